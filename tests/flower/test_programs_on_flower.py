# SPDX-License-Identifier: Apache-2.0
"""Programs, measurements and early stops over Flower: one message each, charged for what was taken, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import ConfigRecord, Message

from fedquit.core import Local
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Ask, SequentialEngine
from fedquit.flower import wire
from fedquit.flower.server import ServerResult
from fedquit.models import FunctionalModel
from flower.grid_world import Setup, lines
from seam_methods import Patiently

pytestmark = pytest.mark.flower


def served(setup: Setup, method: str, client: int, positions: Any = ()) -> tuple[ServerResult, ServerResult]:
    """A federation before and after it has served one request."""
    config = setup.config(method={"name": method})
    before = setup.serve(config)
    setup.outbox(client).file(positions=positions)
    setup.grid.log.clear()
    return before, setup.serve(config)


def test_a_program_is_one_message_and_one_participation(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)
    _, after = served(setup, "seam_methods:ClimbAndReturn", 0, range(5))
    (erasure,) = after.erasures
    costs = erasure.costs["unlearning"]
    assert (costs["participations"], costs["client_epochs"]) == (1, 1.0 + 2.0 + 2.0)
    assert costs["down_bytes"] == costs["up_bytes"], "the model, once each way"
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    (reply,) = [e for e in events if e["event"] == "reply" and e["phase"] == "unlearn-0"]
    assert (reply["task"], reply["split"]) == ("Fisher+Climb+Return", "retain+forget+retain")
    assert reply["examples"] == 23
    assert reply["steps"] == [5, 2 * 2, 2 * 5], "batches of four, of 18 and of 5 examples"


def steps_in_the_simulator(setup: Setup, before: ServerResult, client: int) -> int:
    task = Patiently(Local(epochs=20.0, batch_size=4, lr=0.05))
    marked = setup.data.train[client]
    data = FederatedData(setup.data.dataset, setup.data.train, forget={client: marked})
    ask = Ask(task, (client,), "forget", {"start": before.params}, Address(setup.config().run_seed, "unlearn-0"))
    (reply,) = SequentialEngine(setup.model, data, {}).run(ask)
    return reply.efforts[0].steps


def test_who_stops_early_is_charged_for_the_steps_it_took(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)
    before, after = served(setup, "seam_methods:StopEarly", 0)
    (erasure,) = after.erasures
    steps = steps_in_the_simulator(setup, before, 0)
    assert 0 < steps < 20 * 6, "it stopped early"
    assert erasure.costs["unlearning"]["client_epochs"] == steps / 6  # 23 examples in batches of 4


@pytest.mark.parametrize(
    ("efforts", "sentence"),
    [([[23, 121]], "121 steps on 23 examples, where 120 were planned"), (None, "for each of 1 parts")],
)
def test_a_client_that_claims_other_work_than_was_asked_for_is_not_believed(
    efforts: object, sentence: str, toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)

    def claim(reply: Message) -> list[Message]:
        words = json.loads(str(reply.content.config_records[wire.REPLY]["words"]))
        if "efforts" in words:
            record = dict(reply.content.config_records[wire.REPLY])
            record["words"] = json.dumps({**words, "efforts": efforts})
            reply.content[wire.REPLY] = ConfigRecord(record)
        return [reply]

    setup.node_of(0).spoil = claim
    _, after = served(setup, "seam_methods:StopEarly", 0)
    (erasure,) = after.erasures
    assert (erasure.status, erasure.fallback) == ("done", True), "the fallback serves the request"
    assert any(sentence in line for line in lines(setup.folder))
