# SPDX-License-Identifier: Apache-2.0
"""`fedquit request` files what the client or the server then finds; it needs no Flower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.errors import FedquitError, InputError, RequestError
from fedquit.flower.outbox import Inbox, Outbox
from fedquit.flower.roster import Identity, Roster


def ran(*words: str) -> str:
    done = CliRunner().invoke(app, ["request", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_owner_of_the_data_asks_and_can_see_what_became_of_it(tmp_path: Path) -> None:
    (tmp_path / "which.txt").write_text("7, 2\n5")
    first = json.loads(ran("--home", str(tmp_path), "--samples", str(tmp_path / "which.txt"), "--json"))
    assert first["positions"] == [2, 5, 7]
    assert "the client's next reply" in ran("--home", str(tmp_path))
    Outbox(tmp_path).settle(first["id"], "the server had a reason")
    shown = json.loads(ran("--home", str(tmp_path), "--show", "--json"))
    assert {(e["kind"], e["status"], e["reason"]) for e in shown} == {
        ("samples", "refused", "the server had a reason"),
        ("client", "pending", ""),
    }
    assert "the server had a reason" in ran("--home", str(tmp_path), "--show")


def test_the_operator_names_a_client_that_is_known(tmp_path: Path) -> None:
    Roster(tmp_path).enrol([(Identity("key:abcdef0123", "north", True), 10)])
    assert "forgets client 0 (north)" in ran("--server", str(tmp_path), "--client", "abcdef01")
    assert [f.client for f in Inbox(tmp_path).waiting()] == ["key:abcdef0123"]
    with pytest.raises(RequestError, match="known are 0: north"):
        ran("--server", str(tmp_path), "--client", "south")


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
    with pytest.raises(FedquitError, match=sentence):
        ran(*words)
    assert not (tmp_path / "h" / "outbox").exists()


def test_names_of_files_from_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be of the digits"):
        Outbox(tmp_path).get("../../secret")
