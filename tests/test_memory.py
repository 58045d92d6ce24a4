# SPDX-License-Identifier: Apache-2.0
"""Memories in three tiers: whatever is written, moved, flushed, killed and resumed, they are a dict of versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedquit.core import Params, State
from fedquit.core.params import nbytes
from fedquit.errors import InputError, StoreError
from fedquit.running import memory as module
from fedquit.running.memory import END, Bounds, DiskMemory, Memories
from fedquit.running.session import Session, advance
from fedquit.running.store import StateFile
from fedquit.utils import files
from killed_memory import ROUNDS, NoEngine, expected

ROUND = 1_000_000  # places of a round
TINY = Bounds(device=100, host=200, waiting=300, small=16)
KEYS = ("a", "b/c", "d@1")
LENGTHS = (1, 8, 40)  # of a tensor: smaller than `small`, larger, and larger than a tier


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU, so that the device's tier is tried without one."""


def entry(value: float, length: int = 1) -> Params:
    return {"w": torch.full((length,), value).as_subclass(OnDevice)}


@pytest.fixture(autouse=True)
def device_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tier_of", tier_of)
    monkeypatch.setattr(module, "on_host", to_host)


def tier_of(params: Params) -> str:
    return "device" if any(isinstance(tensor, OnDevice) for tensor in params.values()) else "host"


def to_host(params: Params) -> Params:
    return {name: tensor.as_subclass(torch.Tensor).clone() for name, tensor in params.items()}


class Killed(BaseException):
    """What happens in place of a write."""


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """From so many writes on, no file is written."""
    write = files.write_atomic
    turn = threading.Lock()
    left = writes

    def limited(path: Path, content: bytes) -> None:
        nonlocal left
        with turn:
            left -= 1
            if left < 0:
                raise Killed
        write(path, content)

    files.write_atomic = limited
    try:
        yield
    finally:
        files.write_atomic = write


class Run(RuleBasedStateMachine):
    """A phase that is driven as `session.advance` drives it, beside a dict of what must be seen."""

    @initialize(layered=st.booleans())
    def begin(self, layered: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.below: dict[str, float] = {"a": 100.0, "b/c": 101.0} if layered else {}
        self.now: dict[str, float] = dict(self.below)
        self.saved: dict[str, float] = dict(self.below)  # what the state on disk needs
        self.saved_round = 0
        self.value = 0.0
        self._open()

    def _open(self) -> None:
        lower = DiskMemory(Path(self.folder.name) / "below")
        for key, value in self.below.items():
            lower.move(0)
            lower[key] = entry(value)
        lower.close()
        self.memory = DiskMemory(Path(self.folder.name) / "own", lower if self.below else None, bounds=TINY)
        self.round = self.saved_round
        self.question = 0
        self.memory.move(self.round * ROUND)
        self.memory.begin_round()
        self.memory.discard()
        self.memory.settle()

    @rule(key=st.sampled_from(KEYS), length=st.sampled_from(LENGTHS))
    def write(self, key: str, length: int) -> None:
        self.value += 1
        self.memory[key] = entry(self.value, length)
        self.now[key] = self.value

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: str) -> None:
        if key in self.now:
            del self.memory[key]
            del self.now[key]
        else:
            with pytest.raises(KeyError):
                del self.memory[key]

    @rule()
    def ask(self) -> None:
        self.question += 1
        self.memory.move(self.round * ROUND + self.question)

    @rule(stored=st.booleans())
    def end_round(self, stored: bool) -> None:
        if stored:
            self.memory.flush()
            self.saved = dict(self.now)
            self.saved_round = self.round + 1
        self._next_round(stored=stored)

    def _next_round(self, *, stored: bool) -> None:
        self.round += 1
        self.question = 0
        self.memory.move(self.round * ROUND)
        self.memory.begin_round()
        if stored:
            self.memory.settle()

    @rule()
    def history(self) -> None:
        """Two more rounds without a state: what is written once goes to the background writer."""
        self._next_round(stored=False)
        self._next_round(stored=False)

    @rule()
    def kill(self) -> None:
        self.memory.stop()  # a thread of the dead process must not write into the next attempt's files
        self._open()
        self.now = dict(self.saved)

    @rule(writes=st.integers(0, 3))
    def kill_while_flushing(self, writes: int) -> None:
        with killed_after(writes):
            with suppress(Killed):
                self.memory.flush()
            self.memory._writer.stop()
        self._open()
        self.now = dict(self.saved)

    @precondition(lambda self: self.round == self.saved_round)
    @rule(key=st.sampled_from(KEYS))
    def purge(self, key: str) -> None:
        self.memory.purge(lambda k: k == key)
        for view in (self.now, self.saved):
            view.pop(key, None)
            if key in self.below:
                view[key] = self.below[key]

    @invariant()
    def is_the_dict(self) -> None:
        assert {key: float(self.memory[key]["w"][0]) for key in self.memory} == self.now
        assert len(self.memory) == len(self.now)
        for key in self.now:
            assert self.memory.size_of(key) == nbytes(self.memory[key])

    @invariant()
    def keeps_its_bounds(self) -> None:
        held = self.memory._bytes
        assert held["device"] <= TINY.device
        assert held["host"] <= TINY.host
        for tier, versions in self.memory._held.items():
            assert held[tier] == sum(version.size for version in versions.values())

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()
            reopened = DiskMemory(Path(self.folder.name) / "own", self.memory.below)
            assert {key: float(reopened[key]["w"][0]) for key in reopened} == self.now
            self.folder.cleanup()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name.partition("@")[0] for path in folder.glob("*@*"))


def rounds(memory: DiskMemory, start: int, end: int) -> Iterator[int]:
    """Enter each round in turn."""
    for number in range(start, end):
        memory.move(number * ROUND)
        memory.begin_round()
        yield number


LARGE = Bounds(device=10**9, host=10**9, waiting=10**9, small=16)


def test_what_is_overwritten_is_never_written_until_a_state_needs_it(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    for number in rounds(memory, 0, 5):
        memory["own"] = entry(number, 40)
        memory["round"] = entry(number, 40)
        del memory["round"]
    assert files_in(tmp_path) == []
    memory.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["own@000000004000000.safetensors"]


def test_what_is_written_once_goes_to_disk_in_the_background(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    for number in rounds(memory, 0, 5):
        memory[f"update {number}"] = entry(number, 40)
        memory["sum"] = entry(number, 40)
    memory._writer.finish()
    assert files_in(tmp_path) == [f"update%20{number}" for number in range(3)], "each once a whole round has passed"
    assert float(memory["update 0"]["w"][0]) == 0.0
    memory._collect()
    assert memory.unwritten == nbytes(entry(0, 40)) * 4, "two updates, the sum, and the sum of the round before"


def test_the_state_on_disk_keeps_its_versions_until_another_is_stored(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    for number in rounds(memory, 0, 2):
        memory["sum"] = entry(number)
    memory.flush()  # and the state of round 2 is stored
    for number in rounds(memory, 2, 5):
        memory["sum"] = entry(number)
    memory.flush()  # then the process is killed before it stores the state of round 5
    again = DiskMemory(tmp_path, bounds=LARGE)
    again.move(2 * ROUND)
    again.discard()
    assert float(again["sum"]["w"][0]) == 1.0
    assert len(files_in(tmp_path)) == 1


def test_what_goes_to_disk_for_want_of_room_does_not_pile_up_between_two_states(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=Bounds(device=0, host=0, waiting=10**6, small=16))
    for number in rounds(memory, 0, 2):
        memory["sum"] = entry(number, 40)
    memory.move(2 * ROUND)
    memory.flush()  # the state of round 2 is stored
    memory.settle()
    for number in rounds(memory, 2, 9):
        memory["sum"] = entry(number, 40)
        assert len(files_in(tmp_path)) <= 3, "of the state on disk, of the last round and of this one"
    again = DiskMemory(tmp_path)  # killed before another state was stored
    again.move(2 * ROUND)
    again.discard()
    assert float(again["sum"]["w"][0]) == 1.0


def test_what_has_been_written_in_the_background_leaves_the_ram_while_more_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DiskMemory(tmp_path, bounds=Bounds(device=10**6, host=10**6, waiting=320, small=16))
    hand_over = DiskMemory._hand_over
    waiting: list[int] = []

    def spied(self: DiskMemory, key: str, version: Any) -> None:
        hand_over(self, key, version)
        versions = [v for versions in self._versions.values() for v in versions]
        waiting.append(sum(v.size for v in versions if v.pending is not None))

    monkeypatch.setattr(DiskMemory, "_hand_over", spied)
    memory.move(0)
    for number in range(20):
        memory[f"{number}"] = entry(number, 40)
    memory.flush()
    assert len(waiting) == 20
    assert max(waiting) <= 320 + nbytes(entry(0, 40))


def test_what_was_deleted_before_it_was_ever_written_stays_deleted(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    memory.move(0)
    memory["k"] = entry(1.0, 40)
    memory.move(1)
    del memory["k"]
    memory.flush()
    memory.flush()  # as for each reply that is stored
    assert files_in(tmp_path) == []
    memory.move(ROUND)
    assert "k" not in memory


def test_what_waits_for_the_background_writer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    write = files.write_atomic

    def slow(path: Path, content: bytes) -> None:
        time.sleep(0.02)
        write(path, content)

    monkeypatch.setattr(files, "write_atomic", slow)
    size = nbytes(entry(0, 40))
    memory = DiskMemory(tmp_path, bounds=Bounds(device=10**9, host=10**9, waiting=2 * size, small=16))
    for number in rounds(memory, 0, 9):
        waits.append(sum(n for future, n in memory._writer._waiting if not future.done()))
        for client in range(3):
            memory[f"{number}/{client}"] = entry(number, 40)
    assert max(waits) == 2 * size
    memory.close()
    assert len(files_in(tmp_path)) == 27


def test_a_background_write_that_fails_is_told_at_the_next_round_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        for number in rounds(memory, 0, 3):
            memory[f"{number}"] = entry(number, 40)
        memory._writer.finish()
        with pytest.raises(StoreError, match="No space left on device"):
            memory.begin_round()
        with pytest.raises(StoreError, match="No space left on device"):
            memory.flush()
    memory.flush()
    assert files_in(tmp_path) == ["0", "1", "2"]


def test_without_a_phase_or_without_bounds_a_write_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    durable = DiskMemory(tmp_path / "durable")
    durable.move(5)
    durable["a"] = entry(1.0, 40)
    assert files_in(tmp_path / "durable") == ["a"]
    at_the_end = DiskMemory(tmp_path / "end", bounds=LARGE)
    assert at_the_end.place == END
    at_the_end["a"] = entry(1.0, 40)
    assert files_in(tmp_path / "end") == ["a"]
    reopened = DiskMemory(tmp_path / "end", bounds=LARGE)
    assert float(reopened["a"]["w"][0]) == 1.0
    del reopened["a"]
    assert "a" not in DiskMemory(tmp_path / "end")


def test_a_phase_that_is_over_holds_nothing_in_ram(tmp_path: Path) -> None:
    before = Memories.open(tmp_path / "training", bounds=LARGE)
    before.clients.move(5)
    before.clients["1/own"] = entry(1.0, 40)
    assert files_in(tmp_path / "training" / "clients") == []
    after = Memories.open(tmp_path / "unlearning", before)
    assert after.clients.bounds == LARGE
    assert before.clients._bytes == {"device": 0, "host": 0}
    assert files_in(tmp_path / "training" / "clients") == ["1%2Fown"]
    assert float(after.clients["1/own"]["w"][0]) == 1.0


def test_a_purge_deletes_what_lies_in_ram_waits_and_lies_on_disk(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    for number in rounds(memory, 0, 5):
        memory[f"{number}/3"] = entry(number, 40)
        memory["sum/3"] = entry(number, 40)
        memory["sum/4"] = entry(number, 40)
        if number == 2:
            memory.flush()
    memory.purge(lambda key: key.endswith("/3"))
    assert list(memory) == ["sum/4"]
    memory.close()
    assert files_in(tmp_path) == ["sum%2F4", "sum%2F4"], "of the state on disk, and the newest"


def test_what_is_overwritten_while_it_is_being_written_is_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_atomic
    is_writing = threading.Event()

    def slow(path: Path, content: bytes) -> None:
        is_writing.set()
        time.sleep(0.05)
        write(path, content)

    monkeypatch.setattr(files, "write_atomic", slow)
    memory = DiskMemory(tmp_path, bounds=Bounds(device=0, host=0, waiting=10**9, small=16))
    memory.move(0)
    memory["a"] = entry(1.0, 4000)
    assert is_writing.wait(10)
    memory["a"] = entry(2.0, 40)
    memory.close()
    assert float(DiskMemory(tmp_path)["a"]["w"][0]) == 2.0


def test_a_part_of_something_larger_does_not_keep_all_of_it(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, bounds=LARGE)
    memory.move(0)
    whole = torch.zeros(100, 1000)
    memory["row"] = {"w": whole[3]}
    assert memory["row"]["w"].untyped_storage().nbytes() == 4000


def test_bounds_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDQUIT_HOST_MEMORY", "12345")
    assert Bounds.of(torch.device("cpu")).host == 12345
    monkeypatch.setenv("FEDQUIT_HOST_MEMORY", "1 GB")
    with pytest.raises(InputError, match="FEDQUIT_HOST_MEMORY is '1 GB': give a whole number of bytes"):
        Bounds.of(torch.device("cpu"))
    monkeypatch.delenv("FEDQUIT_HOST_MEMORY")
    assert 2**26 < Bounds.of(torch.device("cpu")).host < 2**45


def counted(folder: Path, bounds: Bounds) -> Iterator[float]:
    """A phase of six rounds, each of which adds one to what the last one kept."""
    memories = Memories.open(folder, bounds=bounds)
    memory = memories.clients
    session = Session(NoEngine(), 0, (), memories=memories.own)

    def step(state: State) -> State:
        memory["0/sum"] = entry(float(memory["0/sum"]["w"][0]) + 1 if "0/sum" in memory else 1.0, 40)
        return state.next(state.params)

    for _ in advance(session, "p", State(entry(0.0)), step, StateFile(folder / "state"), 6):
        yield float(memory["0/sum"]["w"][0]) if "0/sum" in memory else 0.0


@pytest.mark.parametrize("bounds", [LARGE, TINY])
@pytest.mark.parametrize("stored", [True, False])  # whether a state is stored after every round, or only at the end
def test_killed_before_its_state_is_stored_a_phase_finds_the_memories_of_the_one_before(
    bounds: Bounds, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquit.running.session._Pace.is_due", lambda self, size: stored)
    save = StateFile.save
    saves = 0

    def failing(self: StateFile, state: State, *rest: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == (4 if stored else 1):
            raise Killed
        save(self, state, *rest)

    monkeypatch.setattr(StateFile, "save", failing)
    with pytest.raises(Killed):
        list(counted(tmp_path, bounds))
    again = list(counted(tmp_path, bounds))
    assert again == ([3.0, 4.0, 5.0, 6.0] if stored else [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert list(counted(tmp_path, bounds)) == [6.0], "it is over"
    assert len(files_in(tmp_path / "clients")) == 1


def test_killed_at_random_moments_a_history_written_in_the_background_is_whole(tmp_path: Path) -> None:
    script = Path(__file__).parent / "killed_memory.py"
    source = Path(module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] >= 2
    assert report["sums"] == expected()
    assert len(DiskMemory(tmp_path / "server")) == ROUNDS + 1
