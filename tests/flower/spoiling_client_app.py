# SPDX-License-Identifier: Apache-2.0
"""The example's client, except that all nodes but the first give bad answers, until they mend their ways.

Lies beside `client_app.py` in a copy of the example app, and is named in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from forgetting.client_app import data
from forgetting.task import Net
from torch import Tensor

from fedquit.core import Params
from fedquit.flower import wire
from fedquit.flower.client import erasable

Fault = Callable[[Message, Context], None]


def with_first(how: Callable[[Tensor], Tensor]) -> Fault:
    """A fault in the first parameter."""

    def spoil(reply: Message, _: Context) -> None:
        params: Params = wire.params_from_record(reply.content.array_records[wire.PARAMS])
        name = next(iter(params))
        reply.content[wire.PARAMS] = wire.params_to_record({**params, name: how(params[name])})

    return spoil


def huge(reply: Message, _: Context) -> None:
    """Half as much again as a reply can be."""
    params = wire.params_from_record(reply.content.array_records[wire.PARAMS])
    reply.content[wire.PARAMS] = wire.params_to_record({**params, "more": torch.zeros(10**6)})


def late(_: Message, context: Context) -> None:
    """When nobody waits any more."""
    time.sleep(float(context.run_config["fedquit.timeout"]) + 5)


def from_another_node(reply: Message, _: Context) -> None:
    """In somebody else's name."""
    reply.metadata.__dict__["_src_node_id"] += 1


def to_the_last_question(reply: Message, context: Context) -> None:
    """A second answer to a question that has been answered."""
    reply.metadata.__dict__["_reply_to_message_id"] = (_home(context) / "last").read_text()


# Round after round, by partition. Those that the server waits for in vain are in one round, to be waited for once.
FAULTS: tuple[dict[int, Fault], ...] = (
    {
        1: with_first(lambda t: t * float("nan")),
        2: with_first(lambda t: t.reshape(-1)),
        3: with_first(lambda t: t.double()),
    },
    {1: huge},
    {1: to_the_last_question, 2: from_another_node, 3: late},
)


def _home(context: Context) -> Path:
    return Path(str(context.node_config["fedquit-home"]))


def spoiled(message: Message, context: Context, answer: Callable[[Message, Context], Message]) -> Message:
    """What a node does to its answers, one after another; how far it got lies in its home."""
    reply = answer(message, context)
    if message.metadata.message_type.startswith("train"):
        count = _home(context) / "spoiled"
        done = int(count.read_text()) if count.exists() else 0
        count.write_text(str(done + 1))
        fault = FAULTS[done].get(int(context.node_config["partition-id"])) if done < len(FAULTS) else None
        if fault:
            fault(reply, context)
        (_home(context) / "last").write_text(message.metadata.message_id)
    return reply


app = erasable(ClientApp(mods=[spoiled]), model=lambda context: Net(), data=data)
