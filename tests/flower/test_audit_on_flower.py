# SPDX-License-Identifier: Apache-2.0
"""The one-run audit on Flower: a client's own canaries at home, and the simulator's rule on both sides."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from flwr.clientapp import ClientApp
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.core import ClientId
from fedquit.engine import Address
from fedquit.errors import InputError
from fedquit.flower import in_process, wire
from fedquit.flower.canaries import HomeCanaries
from fedquit.flower.client import ClientData, erasable
from fedquit.running.recipe import Recipe
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from flower.grid_world import Node, Setup
from worlds import tiny

pytestmark = pytest.mark.flower

LEAVING = 1
TRAIN = {"rounds": 6, "batch_size": 16, "lr": 0.05, "epochs": 2.0, "weight_decay": 0.0}
METHOD = {"name": "fedquit", "lr": 1e-3, "batch_size": 16}


def recipe(canaries: int) -> Recipe:
    options = {"examples": 400, "test_examples": 40, "classes": 4, "size": 5, "noise": 8.0}
    return tiny(
        data={"options": options, "clients": 3, "holdout": 0.0, "public": 0.0},
        model={"name": "mlp", "options": {}, "dtype": "float64"},
        train=TRAIN,
        request=[{"clients": [LEAVING]}],
        method=METHOD,
        recover={"until": "rounds", "max_rounds": 1},
        evaluate={"attacks": []},
        audit={"canaries": canaries},
        retrain=False,
    )


@dataclass
class Audited(Setup):
    """A federation whose leaving client has canaries."""

    canaries: int = 100

    def node(self, client: ClientId) -> Node:
        mine = self.data.train[client]
        own = ClientData(self.data.x[mine], self.data.y[mine], self.data.dataset.look, mine)
        count = self.canaries if client == LEAVING else 0
        app = erasable(ClientApp(), model=lambda _: self.model, data=lambda _: own, canaries=count)
        made: Node = super().node(client)
        made.app = app
        return made


def world(folder: Path, canaries: int = 100) -> Audited:
    setup = build_setup(recipe(0))
    return Audited(setup.data, setup.model, folder, canaries=canaries)


def served(setup: Audited, **changes: Any) -> dict[str, Any]:
    """Train, let the client leave, and return its entry in the ledger."""
    given: dict[str, Any] = {"train": TRAIN, "method": METHOD, "recover_rounds": 1, "audit": True, **changes}
    config = setup.config(**given)
    setup.serve(config)
    setup.outbox(LEAVING).file()
    setup.serve(config)
    (entry,) = json.loads((setup.folder / "state" / "ledger.json").read_text())["entries"]
    assert entry["status"] == "done"
    return dict(entry)


def test_the_audit_on_flower_equals_the_simulator_s(tmp_path: Path) -> None:
    setup = world(tmp_path)
    home = HomeCanaries(setup.home(LEAVING))
    home.path.parent.mkdir(parents=True)
    examples = len(setup.data.train[LEAVING])
    seed = Address(0, "canaries").seed_for(LEAVING)
    home.path.write_text(json.dumps({"seed": seed, "canaries": 100, "examples": examples}))
    entry = served(setup)
    rows = {row["phase"]: row for row in run(recipe(100), tmp_path / "simulated")["rows"]}
    fields = {key: value for key, value in rows["recovered"].items() if key.startswith("canary_")}
    assert entry["audit"] == fields
    assert fields["canary_natural_guesses"] == 20
    (of_client,) = setup.outbox(LEAVING).entries()
    assert of_client.audit == fields
    assert of_client.status == "served"


def test_canaries_left_out_are_never_sent_into_training_and_the_server_learns_counts_alone(tmp_path: Path) -> None:
    setup = world(tmp_path)
    seen: list[str] = []
    answers = in_process.Node.answers

    def listening(node: in_process.Node, message: Any) -> list[Any]:
        replies = answers(node, message)
        seen.extend(str(record) for reply in replies for record in reply.content.config_records.values())
        return replies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process.Node, "answers", listening)
        setup.serve(setup.config(train=TRAIN, method=METHOD))
        home = HomeCanaries(setup.home(LEAVING))
        stored = json.loads(home.path.read_text())
        members = {m["number"]: m for m in json.loads((tmp_path / "state" / "clients.json").read_text())}
        entry = served(setup)
    canaries = 100
    assert stored["canaries"] == canaries
    said = [text for text in seen if '"correct"' in text.replace("\\", "")]
    assert len(said) == 1
    assert not any(str(stored["seed"]) in text for text in seen)
    examples = len(setup.data.train[LEAVING])
    written = tmp_path / "again"
    written.mkdir()
    (written / "canaries.json").write_text(json.dumps(stored))
    drawn = HomeCanaries(written).drawn(examples)
    assert drawn is not None
    trained_on = examples - len(drawn.excluded_at)
    assert members[LEAVING]["examples"] == trained_on
    assert entry["audit"]["canary_natural_canaries"] == canaries
    assert not home.path.exists(), "the coins are deleted with the client"


def test_both_owners_are_shown_the_sentence(tmp_path: Path) -> None:
    setup = world(tmp_path)
    sentence = served(setup)["audit"]["canary_natural_sentence"]
    for whose in (["--home", str(setup.home(LEAVING))], ["--server", str(tmp_path / "state")]):
        printed = CliRunner().invoke(app, ["request", *whose, "--show"]).stdout
        assert sentence in printed


def test_without_canaries_or_without_the_setting_there_is_no_audit(tmp_path: Path) -> None:
    assert served(world(tmp_path / "none", canaries=0))["audit"] == {}
    silent = world(tmp_path / "off")
    assert served(silent, audit=False)["audit"] == {}
    assert silent.outbox(LEAVING).entries()[0].audit == {}


def test_coins_are_drawn_once_and_outlast_data_that_is_added(tmp_path: Path) -> None:
    home = HomeCanaries(tmp_path, 50)
    first = home.drawn(100)
    later = HomeCanaries(tmp_path, 60).drawn(130)
    assert first is not None
    assert later is not None
    assert torch.equal(first.at, later.at)
    assert torch.equal(first.included, later.included)
    with pytest.raises(InputError, match="drawn from 100 examples, and this client has only 99"):
        home.drawn(99)
    with pytest.raises(InputError, match="too few for an audit: take 40 or more"):
        HomeCanaries(tmp_path, 39)
    with pytest.raises(InputError, match="50 canaries are asked for, and the client has 50"):
        HomeCanaries(tmp_path / "other", 50).drawn(50)
    assert HomeCanaries(tmp_path / "none").drawn(10) is None


@pytest.mark.parametrize(
    "claimed",
    [
        "all of them",
        {"canaries": 100, "guesses": 20, "correct": 21, "correct_before": 3},
        {"canaries": 100, "guesses": 20, "correct": 2},
        {"canaries": 10**9, "guesses": 10**8, "correct": 1, "correct_before": 1},
        {"canaries": 100, "guesses": 20, "correct": -1, "correct_before": 3},
    ],
)
def test_impossible_counts_from_outside_are_refused(claimed: Any) -> None:
    with pytest.raises(wire.InvalidMessage):
        wire.counts_from_body({"audit": claimed})
    good = {"canaries": 100, "guesses": 20, "correct": 12, "correct_before": 20}
    counts = wire.counts_from_body({"audit": good})
    assert counts is not None
    assert counts.judged().verdict == "not detected"
    assert wire.counts_from_body({}) is None
