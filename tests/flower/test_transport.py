# SPDX-License-Identifier: Apache-2.0
"""Every message that is sent has exactly one result: its reply, or a sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Message

from fedquit.flower import wire
from fedquit.flower.transport import OutgoingMessage, Transport
from flower.grid_world import InProcess, MakeWorld, Setup

pytestmark = pytest.mark.flower
UNSENT, DEAF, OFFLINE, FINE = 0, 1, 2, 3


def query(setup: Setup, client: int) -> OutgoingMessage:
    return OutgoingMessage(setup.node_of(client).id, wire.QUERY, wire.body_to_records({"verdicts": {}}))


@pytest.mark.parametrize("left_out", [True, False], ids=["left out", "without an id"])
def test_every_message_has_one_result(left_out: bool, make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make()
    setup.node_of(DEAF).deaf = True
    setup.node_of(OFFLINE).online = False
    unsent = setup.node_of(UNSENT).id

    def push_some(grid: InProcess, messages: Iterable[Message]) -> list[str]:
        """Flower's grids differ in what they return for a message that could not be sent."""
        results = []
        for message in messages:
            if message.metadata.dst_node_id != unsent:
                results += push(grid, [message])
                continue
            message.metadata.__dict__["_message_id"] = message.object_id
            if not left_out:
                results.append("")
        return results

    push: Any = InProcess.push_messages
    monkeypatch.setattr(InProcess, "push_messages", push_some)
    messages = [query(setup, client) for client in (UNSENT, DEAF, OFFLINE, FINE)]
    transport = Transport(setup.grid, pytest.fail, setup.time.clock)
    results = list(transport.exchange(messages, timeout=7))
    assert sorted(m.node for m, _ in results) == sorted(m.node for m in messages)
    by_node = {message.node: reply for message, reply in results}
    assert by_node[unsent] == "the message could not be sent"
    assert by_node[setup.node_of(DEAF).id] == "no answer within 7 s"
    assert by_node[setup.node_of(OFFLINE).id] == "error 5: Node Unavailable"
    reply = by_node[setup.node_of(FINE).id]
    assert isinstance(reply, Message)
    assert wire.body_from_records(reply.content)["partition"] == str(FINE)


def test_the_wait_ends_at_its_timeout_and_polls_less_and_less_often(make: MakeWorld) -> None:
    setup = make()
    setup.node_of(DEAF).deaf = True
    pauses: list[float] = []
    began = setup.time.time
    clock = setup.time.clock

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        setup.time.sleep(seconds)

    transport = Transport(setup.grid, pytest.fail, type(clock)(clock.now, sleep))
    list(transport.exchange([query(setup, DEAF)], timeout=60))
    assert 60 <= setup.time.time - began < 65
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.1
    assert pauses[-1] == 3.0
