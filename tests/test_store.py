# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquit.core import Effort, Params, Reply, State
from fedquit.core.params import fingerprint
from fedquit.errors import StoreError
from fedquit.running.runner import run
from fedquit.running.store import (
    DiskMemory,
    Journal,
    Memories,
    StateFile,
    load_params,
    locked,
    save_params,
)
from fedquit.utils.files import append_line, read_json, read_json_rows, write_atomic
from worlds import tiny


def some(value: float) -> Params:
    return {"w": torch.full((3, 2), value), "b": torch.tensor(value, dtype=torch.float64)}


def test_parameters_come_back_bit_for_bit(tmp_path: Path) -> None:
    params = {
        "float": torch.randn(4, 3),
        "double": torch.tensor(1e-310, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "turned": torch.randn(3, 4).T,
        "empty": torch.zeros(0, 3),
    }
    save_params(tmp_path / "p", params, {"round": 3})
    loaded, meta = load_params(tmp_path / "p")
    assert fingerprint(loaded) == fingerprint(params)
    assert meta == {"round": 3}


@pytest.mark.parametrize("where", [10, 200, -5])
def test_a_damaged_checkpoint_is_refused_with_what_to_do(where: int, tmp_path: Path) -> None:
    path = tmp_path / "p"
    save_params(path, some(1.5))
    content = bytearray(path.read_bytes())
    content[where] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"is damaged \(.*\): restore it from a backup, or run into another folder"):
        load_params(path)


def test_a_cut_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    save_params(path, some(1.5))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match="damaged"):
        load_params(path)


def test_a_full_disk_leaves_the_previous_state_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path / "state")
    file.save(State(some(1.0), clock=4, round=2), 1.5)

    def full(_descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=r"No space left on device.*nothing was changed; free space"):
        file.save(State(some(2.0), clock=5, round=3), 2.5)
    monkeypatch.undo()
    loaded = file.load()
    assert loaded is not None
    assert fingerprint(loaded[0].params) == fingerprint(some(1.0))
    assert (loaded[0].clock, loaded[0].round, loaded[1]) == (4, 2, 1.5)
    assert [p.name for p in tmp_path.iterdir()] == ["state"], "nothing half-written is left behind"


WRITES_TOO_MUCH = """
import resource, signal, sys
from pathlib import Path
from fedquit.utils.files import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_atomic(Path(sys.argv[1]), b"x" * 100_000)
"""


def test_a_write_that_the_system_cuts_short_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"before")
    command = [sys.executable, "-c", WRITES_TOO_MUCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert "StoreError: cannot write" in done.stderr
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="nothing was changed"):
        write_atomic(tmp_path / "file" / "below", b"")
    with pytest.raises(StoreError, match="choose another folder"), locked(tmp_path / "file" / "below"):
        pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of a few kilobytes, which can be made larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")

    def resized(kilobytes: int) -> Path:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)
        return disk

    yield resized
    subprocess.run(["umount", disk], check=True)


def test_on_a_disk_that_is_full_at_any_point_the_run_goes_on_once_there_is_space(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    straight = run(tiny(), tmp_path / "straight" / "run")
    stopped_at = set()
    for kilobytes in range(4, 400, 4):
        try:
            results = run(tiny(), small_disk(kilobytes) / "run")
        except StoreError as error:
            stopped_at.add(str(error))
        else:
            break
    assert all("No space left on device" in sentence for sentence in stopped_at)
    assert len(stopped_at) >= 5
    assert [r["fingerprint"] for r in results["rows"]] == [r["fingerprint"] for r in straight["rows"]]


def test_damaged_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(StoreError, match=r"cannot read .*a\.json"):
        read_json(tmp_path / "a.json")


def test_a_state_comes_back_with_the_method_s_own(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    assert file.load() is None
    file.save(State(some(1.0), 7, 2, {"degraded": some(2.0), "before": {"a:b": torch.ones(1)}}), 3.5)
    loaded = file.load()
    assert loaded is not None
    state, seconds, costs = loaded
    assert costs == {}
    assert (state.clock, state.round, seconds) == (7, 2, 3.5)
    assert fingerprint(state.params) == fingerprint(some(1.0))
    assert fingerprint(state.kept["degraded"]) == fingerprint(some(2.0))
    assert list(state.kept["before"]) == ["a:b"]


def test_names_keep_their_order_on_disk(tmp_path: Path) -> None:
    names = ["stem.weight", "10.weight", "blocks.weight", "2.weight", "head.bias"]
    save_params(tmp_path / "p", {n: torch.ones(1) for n in names})
    assert list(load_params(tmp_path / "p")[0]) == names
    StateFile(tmp_path / "s").save(State({n: torch.ones(1) for n in names}, kept={"b": some(1.0), "a": some(2.0)}), 0.0)
    loaded = StateFile(tmp_path / "s").load()
    assert loaded is not None
    assert list(loaded[0].params) == names
    assert list(loaded[0].kept) == ["b", "a"]


def test_a_journal_gives_back_what_was_answered(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.get("round0-question0", 3) is None
    journal.put("round0-question0", Reply(3, some(1.0), 17, 0.25))
    journal.put("round0-question0", Reply(4, some(2.0), 0))
    reply = journal.get("round0-question0", 3)
    assert reply is not None
    assert (reply.client, reply.examples, reply.loss) == (3, 17, 0.25)
    nobody = journal.get("round0-question0", 4)
    assert nobody is not None
    assert nobody.loss != nobody.loss
    assert reply.efforts == nobody.efforts == (), "as in journals of earlier versions"
    journal.put("round0-question1", Reply(3, some(1.0), 17, 0.25, (Effort(5, 2), Effort(12, 0))))
    visit = journal.get("round0-question1", 3)
    assert visit is not None
    assert visit.efforts == (Effort(5, 2), Effort(12, 0))
    journal.clear()
    assert journal.get("round0-question0", 3) is None


def test_an_entry_is_seen_from_later_places_and_by_the_attempt_that_wrote_it(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    memory.move(1_000)
    memory["a/b"] = some(1.0)
    assert float(memory["a/b"]["b"]) == 1.0

    again = DiskMemory(tmp_path)  # the same place, after a kill
    again.move(1_000)
    assert "a/b" not in again
    again["a/b"] = some(1.0)
    again.move(2_000)
    again["a/b"] = some(2.0)

    once_more = DiskMemory(tmp_path)
    once_more.move(2_000)
    assert float(once_more["a/b"]["b"]) == 1.0, "the second attempt finds what the first one found"
    once_more.move(2_001)
    assert float(once_more["a/b"]["b"]) == 2.0
    once_more.settle()
    assert len(list(tmp_path.iterdir())) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 9))), max_size=12))
def test_a_memory_on_disk_is_a_dict(writes: list[tuple[str, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory, plain = DiskMemory(Path(folder)), dict[str, int]()
        for place, (key, value) in enumerate(writes, start=1):
            memory.move(place)
            if value is not None:
                memory[key], plain[key] = some(value), value
            elif key in plain:
                del memory[key], plain[key]
            memory.settle()
        reopened = DiskMemory(Path(folder))
        for found in (memory, reopened):
            assert {k: int(found[k]["b"]) for k in found} == plain
            assert len(found) == len(plain)


def test_what_a_phase_keeps_lies_over_what_came_before(tmp_path: Path) -> None:
    before = Memories.open(tmp_path / "training")
    before.own[1].move(5)
    before.clients["1/own"] = some(1.0)
    now = Memories.open(tmp_path / "unlearning", before)
    assert float(now.clients["1/own"]["b"]) == 1.0
    now.clients["1/own"] = some(2.0)
    assert float(now.clients["1/own"]["b"]) == 2.0
    assert float(Memories.open(tmp_path / "training").clients["1/own"]["b"]) == 1.0, "the cache is not touched"


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StoreError, match="another process is running"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_lines_are_added_whole(tmp_path: Path) -> None:
    for i in range(3):
        append_line(tmp_path / "log", json.dumps({"i": i}))
    assert [json.loads(line)["i"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("stored", ['{"round": 1}', "[1]", '[{"test_acc": 1.0}]', '[{"round": 1'])
def test_a_damaged_curve_is_one_sentence(stored: str, tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    assert read_json_rows(path, "round") == []
    path.write_text('[{"round": 1}]')
    assert read_json_rows(path, "round") == [{"round": 1}]
    path.write_text(stored)
    with pytest.raises(StoreError, match="restore it from a copy, or move it away"):
        read_json_rows(path, "round")
