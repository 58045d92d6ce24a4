# SPDX-License-Identifier: Apache-2.0
"""One damaged place in any file of the state directory: the server goes on, or says so and loses nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.errors import StoreError
from fedquit.flower import twice
from fedquit.flower.closed import sites
from fedquit.flower.membership import read_membership, write_membership
from fedquit.flower.outbox import Inbox
from fedquit.flower.server import ServerResult
from fedquit.flower.twice import checksum_of, copy_of, read_json_either, read_json_mended, write_json_twice
from fedquit.utils import files
from flower.grid_world import MakeWorld, Setup, lines

pytestmark = pytest.mark.flower
VALUE = {"erased": [3, 14], "phase": {"number": 7, "kind": "train"}, "names": ["hospital-1", "é"]}
PLACES = {"the first byte": 0.0, "a quarter": 0.25, "the last byte": 1.0}


class Site(NamedTuple):
    name: str
    examples: int
    fingerprints: tuple[str, ...]
    revoked: float | None


def flipped(content: bytes, share: float, bits: int = 0x11) -> bytes:
    """The content with one byte changed, such as a digit to another one."""
    changed = bytearray(content)
    changed[int(share * (len(content) - 1))] ^= bits
    return bytes(changed)


@given(st.sampled_from(["file", "copy", "checksum"]), st.floats(0, 1), st.integers(1, 255))
@settings(deadline=None, max_examples=60)
def test_any_changed_byte_of_what_is_kept_twice_is_found(which: str, share: float, bits: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.json"
        write_json_twice(path, {"older": True})
        write_json_twice(path, VALUE)
        damaged = {"file": path, "copy": copy_of(path), "checksum": checksum_of(path)}[which]
        damaged.write_bytes(flipped(damaged.read_bytes(), share, bits))
        assert read_json_either(path, "who is who") == VALUE
        assert read_json_mended(path, "who is who") == VALUE
        for file in (path, copy_of(path)):
            assert json.loads(file.read_text()) == VALUE, "it is mended"
        path.unlink()
        assert read_json_either(path, "who is who") == VALUE


@pytest.mark.parametrize("writes", [1, 2])
def test_a_kill_between_the_writes_is_no_damage(writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    write_json_twice(path, {"older": True})
    left = iter(range(writes))

    def killed(write: Any) -> Any:
        def or_killed(*arguments: object) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(*arguments)

        return or_killed

    with monkeypatch.context() as patch:
        patch.setattr(twice, "write_atomic", killed(files.write_atomic))
        patch.setattr(twice, "write_json", killed(files.write_json))
        with pytest.raises(KeyboardInterrupt):
            write_json_twice(path, VALUE)
    said: list[str] = []
    assert read_json_mended(path, "who is who", say=said.append) == (VALUE if writes == 2 else {"older": True})
    assert said == []


@given(st.floats(0, 1), st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_any_changed_byte_of_an_operators_request_is_found(share: float, bits: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []
        inbox = Inbox(Path(folder), said.append)
        filed = inbox.file("key:0123456789abcdef")
        (path,) = inbox.folder.iterdir()
        path.write_bytes(flipped(path.read_bytes(), share, bits))
        if not said and (waiting := list(inbox.waiting())):
            assert waiting == [filed], "such as another white space"
            return
        assert path.exists(), "it is not lost"
        (sentence,) = said
        assert str(path) in sentence
        assert "file the request again" in sentence
        assert inbox.problems() == [sentence.removeprefix("warning: ")]


@given(st.floats(0, 1), st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_any_changed_byte_of_the_list_of_sites_is_found(share: float, bits: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listed = [Site(name, 23, (fingerprint,), None) for name, fingerprint in (("a", "01ab"), ("b", "23cd"))]
        path = write_membership(Path(folder), listed)
        expected = read_membership(Path(folder))
        path.write_bytes(flipped(path.read_bytes(), share, bits))
        with contextlib.suppress(StoreError):
            assert read_membership(Path(folder)) == expected, "such as another white space"


@given(st.floats(0, 1), st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_any_changed_byte_of_the_projects_list_is_found(share: float, bits: int) -> None:
    """One digit would give a site another weight, and no other error may reach the front, which would end."""
    with tempfile.TemporaryDirectory() as folder:
        listed = [sites.Site(name, 23, ("AAAA",), (sites.Certificate("ab", 2e9),), 1e9) for name in ("a", "b")]
        sites.write_sites(Path(folder), {site.name: site for site in listed})
        path = Path(folder) / sites.FILE
        expected = sites.read_sites(Path(folder))
        path.write_bytes(flipped(path.read_bytes(), share, bits))
        with contextlib.suppress(StoreError):
            assert sites.read_sites(Path(folder)) == expected, "such as another white space"


def test_an_operators_request_with_a_changed_byte_is_kept_and_can_be_mended(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    state = setup.folder / "state"
    Inbox(state).file("hospital-1")
    (path,) = (state / "requests").iterdir()
    pristine = path.read_bytes()
    path.write_bytes(pristine.replace(b"hospital-1", b"hospital-9"))
    assert not setup.serve(setup.config()).erasures
    assert any(str(path) in line for line in lines(setup.folder))
    path.write_bytes(pristine)
    assert [(e.client, e.status) for e in setup.serve(setup.config()).erasures] == [(1, "done")]
    assert list((state / "requests").iterdir()) == []


def files_of(state: Path) -> list[Path]:
    return [path for path in sorted(state.rglob("*")) if path.is_file() and path.stat().st_size]


def served(setup: Setup) -> ServerResult:
    return setup.serve(setup.config(train={"rounds": 3, "batch_size": 8, "lr": 0.1}, method={"name": "federaser"}))


def test_one_changed_byte_in_any_file_of_the_state_loses_nothing(make: MakeWorld) -> None:
    """After two rounds and an erasure, with a method that has a memory; then a third round is trained."""
    setup = make()
    state = setup.folder / "state"
    setup.outbox(1).file()
    setup.serve(setup.config(method={"name": "federaser"}))
    pristine = setup.folder / "pristine"
    homes = setup.folder / "pristine homes"
    shutil.copytree(state, pristine)
    shutil.copytree(setup.folder / "homes", homes)
    expected = served(setup)
    outcomes: dict[str, set[str]] = {}
    for path in files_of(pristine):
        name = str(path.relative_to(pristine))
        for place, share in PLACES.items():
            for folder, kept in ((state, pristine), (setup.folder / "homes", homes)):
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
            (state / name).write_bytes(flipped(path.read_bytes(), share))
            try:
                result = served(setup)
            except StoreError as error:
                sentence = str(error)
                assert "\n" not in sentence, (name, place)
                assert "delete it" not in sentence.replace("Do not delete it", ""), (name, place)
                (state / name).write_bytes(path.read_bytes())  # as from a backup
                result = served(setup)
                outcomes.setdefault(name, set()).add("says so")
            else:
                outcomes.setdefault(name, set()).add("goes on")
            assert result.erased == expected.erased == {1}, (name, place)
            assert [e.status for e in result.erasures] == ["done"], (name, place)
            assert result.rounds == 3
            for parameter, tensor in expected.params.items():
                assert torch.equal(result.params[parameter], tensor), (name, place)
    assert {name for name, found in outcomes.items() if "says so" in found} <= {
        name for name in outcomes if name.startswith("memory/")
    }, "what is kept twice never ends anything"
    assert {"ledger.json", "ledger.copy.json", "clients.json", "seen.json", "result.json"} <= outcomes.keys()
    assert any(name.endswith("state.safetensors") for name in outcomes)
