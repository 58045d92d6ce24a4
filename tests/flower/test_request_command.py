# SPDX-License-Identifier: Apache-2.0
"""`fedquit request` files what the client or the server then finds; it needs no Flower."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.errors import FedquitError, InputError, RequestError, StoreError
from fedquit.flower.outbox import CONTACT_FILE, NODE_FILE, Inbox, Outbox, Receipt, note_contact
from fedquit.flower.roster import Identity, Roster
from fedquit.utils.files import write_json


def ran(*words: str) -> str:
    done = CliRunner().invoke(app, ["request", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_owner_of_the_data_asks_and_can_see_what_became_of_it(tmp_path: Path) -> None:
    note_contact(tmp_path, "f00d")
    (tmp_path / "which.txt").write_text("7, 2\n5")
    first = json.loads(ran("--home", str(tmp_path), "--samples", str(tmp_path / "which.txt"), "--json"))
    assert first["positions"] == [2, 5, 7]
    assert "nobody has received it yet: the client's next reply" in ran("--home", str(tmp_path))
    Outbox(tmp_path).settle(first["id"], "the server had a reason")
    shown = json.loads(ran("--home", str(tmp_path), "--show", "--json"))
    assert {(e["kind"], e["status"], e["reason"]) for e in shown} == {
        ("samples", "refused", "the server had a reason"),
        ("client", "pending", ""),
    }
    assert "the server had a reason" in ran("--home", str(tmp_path), "--show")


def test_the_owner_sees_when_and_by_whom_a_request_was_received_or_that_nobody_did(tmp_path: Path) -> None:
    note_contact(tmp_path, "f00d")
    entry = json.loads(ran("--home", str(tmp_path), "--json"))
    assert f"{entry['id']}: nobody has received it yet." in ran("--home", str(tmp_path), "--show")
    Outbox(tmp_path).note_receipt(entry["id"], Receipt("r0007", "2026-03-01T10:00:00+00:00", "f00d"))
    shown = " ".join(ran("--home", str(tmp_path), "--show").split())
    assert "received 2026-03-01T10:00:00+00:00 as r0007 by the server of federation f00d" in shown
    (listed,) = json.loads(ran("--home", str(tmp_path), "--show", "--json"))
    assert listed["receipt"]["number"] == "r0007"


def test_a_mistyped_home_is_refused_and_not_made(tmp_path: Path) -> None:
    for words in ([], ["--show"], ["--withdraw", "0a"]):
        with pytest.raises(InputError, match="not the home of a node that was ever started"):
            ran("--home", str(tmp_path / "hospitl"), *words)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "flower").mkdir()  # a node of an earlier version
    assert "is filed" in ran("--home", str(tmp_path))


def test_a_node_to_which_the_server_has_not_spoken_for_long_is_loud(tmp_path: Path) -> None:
    write_json(tmp_path / NODE_FILE, {})
    assert "the server has never spoken to this node" in ran("--home", str(tmp_path))
    write_json(tmp_path / CONTACT_FILE, {"at": "2026-01-01T00:00:00+00:00", "federation": "f00d"})
    assert "days ago, on 2026-01-01" in " ".join(ran("--home", str(tmp_path), "--show").split())
    note_contact(tmp_path, "f00d")
    assert "warning" not in ran("--home", str(tmp_path), "--show")


def test_a_request_can_be_taken_back_until_it_is_served(tmp_path: Path) -> None:
    note_contact(tmp_path, "f00d")
    first = json.loads(ran("--home", str(tmp_path), "--json"))["id"]
    assert "is taken back" in ran("--home", str(tmp_path), "--withdraw", first)
    assert [e.status for e in Outbox(tmp_path).entries()] == ["withdrawing"]
    second = json.loads(ran("--home", str(tmp_path), "--json"))["id"]
    Outbox(tmp_path).settle(second, "served")
    with pytest.raises(RequestError, match="is served already"):
        ran("--home", str(tmp_path), "--withdraw", second)
    with pytest.raises(InputError, match="by its number alone"):
        ran("--home", str(tmp_path), "--withdraw", second, "--show")


def test_the_operator_names_a_client_that_is_known_and_confirms(tmp_path: Path) -> None:
    Roster(tmp_path).enrol([(Identity("key:abcdef0123", "north", True), 10)])
    with pytest.raises(InputError, match=r"Forget client 0 \(north\), with 10 examples, for ever\? .* say --yes"):
        ran("--server", str(tmp_path), "--client", "0")
    assert list(Inbox(tmp_path).waiting()) == []
    assert "forgets client 0 (north)" in ran("--server", str(tmp_path), "--client", "abcdef01", "--yes")
    (filed,) = Inbox(tmp_path).waiting()
    assert filed.client == "key:abcdef0123"
    with pytest.raises(RequestError, match="known are 0: north"):
        ran("--server", str(tmp_path), "--client", "south", "--yes")
    assert "had not read it yet" in ran("--server", str(tmp_path), "--withdraw", filed.id)
    assert list(Inbox(tmp_path).waiting()) == []


@pytest.mark.parametrize("written", [1, 2], ids=["the checksum", "the checksum and the file"])
def test_the_operators_command_writes_nothing_while_the_server_saves_its_clients(written: int, tmp_path: Path) -> None:
    """Whoever wrote here would undo the save, and the next client would get a number that is taken."""
    state = tmp_path / "state"
    north, south = (Identity(f"key:abcdef012{i}", name, True) for i, name in enumerate(("north", "south")))
    Roster(state).enrol([(north, 10)])
    shutil.copytree(state, tmp_path / "later")
    Roster(tmp_path / "later").enrol([(south, 10)])
    for name in ("clients.sha256", "clients.json")[:written]:
        shutil.copy(tmp_path / "later" / name, state / name)
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    ran("--server", str(state), "--client", "north", "--yes")
    assert {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()} == before


def test_a_damaged_ledger_is_not_answered_with_delete_it(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(StoreError, match=r"restore it from a backup. Do not delete it"):
        ran("--server", str(tmp_path), "--show")
    with pytest.raises(StoreError, match="there is no ledger"):
        ran("--server", str(tmp_path / "nowhere"), "--show")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say whose request it is"),
        (["--home", "h", "--server", "s"], "say whose request it is"),
        (["--home", "h", "--client", "x"], "leave --client out"),
        (["--server", "s"], "say who is to be forgotten"),
        (["--server", "s", "--client", "x", "--fraction", "0.1"], "the client's own knowledge"),
        (["--home", "h", "--samples", "nothing.txt"], "cannot read samples"),
        (["--home", "h", "--fraction", "2"], "between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    note_contact(tmp_path / "h", "")
    with pytest.raises(FedquitError, match=sentence):
        ran(*words)
    assert not (tmp_path / "h" / "outbox").exists()


def test_names_of_files_from_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be of the digits"):
        Outbox(tmp_path).get("../../secret")
