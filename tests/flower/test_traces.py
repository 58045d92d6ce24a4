# SPDX-License-Identifier: Apache-2.0
"""What Flower has deleted is not left on the server's disk, and what it still needs is."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import ConfigRecord
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedquit.flower import sqlite_wipe
from fedquit.flower.deploy import service
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.service import Link, serve
from fedquit.flower.deploy.supervision import Plan
from fedquit.flower.sqlite_wipe import DATABASE, wipe_traces
from flower.grid_world import MakeWorld

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore:No path_separator"),
]  # in Flower's own use of Alembic

SECRET, NEEDED = "an update of the forgotten, ", "a question under way, "


class Store:
    """A SuperLink's own store, which stays open as a SuperLink's does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / DATABASE
        self._store = SqlObjectStore(str(self.path))
        self._store.initialize()

    def put(self, text: str) -> str:
        record = ConfigRecord({"text": text * 5000})
        self._store.preregister(1, ObjectTree(object_id=record.object_id))
        self._store.put(record.object_id, record.deflate())
        return record.object_id

    def put_and_delete(self, text: str) -> None:
        self._store.delete(self.put(text))

    def get(self, number: str) -> bytes:
        return self._store.get(number) or b""


def on_disk(folder: Path, text: str) -> bool:
    return any(text.encode() in path.read_bytes() for path in folder.glob(f"{DATABASE}*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_what_was_deleted_is_gone_and_the_rest_is_there_while_the_store_is_open(store: Store, tmp_path: Path) -> None:
    for _ in range(2):  # once from the log, once from the pages of the file
        needed = store.put(NEEDED)
        store.put_and_delete(SECRET)
        assert on_disk(tmp_path, SECRET), "SQLite leaves it there"
        wipe_traces(store.path, pytest.fail)
        assert not on_disk(tmp_path, SECRET)
        assert store.get(needed).count(NEEDED.encode()) == 5000


def test_a_locked_database_is_tried_again_and_then_told_of(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_wipe, "WAIT", 0.05)
    store.put_and_delete(SECRET)
    said: list[str] = []
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        tries: list[float] = []
        monkeypatch.setattr(time, "sleep", tries.append)
        wipe_traces(store.path, said.append)
        assert len(tries) == sqlite_wipe.TRIES
        (sentence,) = said
        assert sentence.startswith(f"{store.path} may still hold messages that Flower has deleted (database is locked)")
        monkeypatch.setattr(time, "sleep", lambda _: other.execute("ROLLBACK"))
        wipe_traces(store.path, pytest.fail)
    assert not on_disk(tmp_path, SECRET)


def test_without_a_database_there_is_nothing_to_wipe(tmp_path: Path) -> None:
    wipe_traces(tmp_path / "none", pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_done_when_nothing_of_it_is_left_in_flowers_database(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    folder = setup.folder / "state" / "flower"
    Store(folder).put_and_delete(SECRET)
    setup.serve(setup.config())
    assert on_disk(folder, SECRET), "nobody has asked"
    setup.outbox(1).file()
    (entry,) = setup.serve(setup.config()).erasures
    assert entry.status == "done"
    assert not on_disk(folder, SECRET)


def test_serving_begins_and_ends_without_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "state"
    Store(folder).put_and_delete(SECRET)

    def run_until_finished(*_: object, **__: object) -> int:
        assert not on_disk(folder, SECRET), "what a killed SuperLink left"
        Store(folder).put_and_delete(SECRET)
        return 1

    monkeypatch.setattr(service, "run_until_finished", run_until_finished)
    monkeypatch.setattr(service, "superlink_command", lambda *_: ["sleep", "1000"])
    monkeypatch.setattr(Control, "healthy", lambda _: True)
    assert serve(Plan(tmp_path), Link("127.0.0.1:1", mode="insecure"), folder, until_trained=True) == 1
    assert not on_disk(folder, SECRET)
