# SPDX-License-Identifier: Apache-2.0
"""A federation over the grid of `fedquit.flower.in_process`, and everything that can go wrong with its messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedquit.core import ClientId
from fedquit.data.federated import FederatedData
from fedquit.flower import in_process
from fedquit.flower.client import ClientData, erasable
from fedquit.flower.config import ServerConfig
from fedquit.flower.in_process import SUPERLINK, ImpatientClock, InProcessGrid, Parcel, numbered
from fedquit.flower.outbox import Outbox
from fedquit.flower.server import ServerResult, serve
from fedquit.models import FunctionalModel
from fedquit.running.recipe import build

Spoil = Callable[[Message], list[Message]]


def arrived(message: Message) -> tuple[Message, int]:
    """A message once it has travelled, and its bytes on the way."""
    way = Parcel.of(message)
    return way.read(), way.size


@dataclass
class Node(in_process.Node):
    """A SuperNode whose replies may be lost or spoilt."""

    deaf: bool = False  # online, and never answering
    spoil: Spoil = lambda reply: [reply]  # what becomes of its replies on the way
    asked: list[str] = field(default_factory=list)


class InProcess(InProcessGrid):
    """A grid over such nodes that counts bytes and writes a log."""

    nodes: dict[int, Node]  # type: ignore[assignment]

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__({n.id: n for n in nodes})
        self.down_bytes = self.up_bytes = 0
        self.log: list[tuple[int, str]] = []
        self.before: Callable[[Message], None] = lambda message: None  # sees each message before it is sent

    def deliver(self, message: Message) -> None:
        self.before(message)
        there, size = arrived(message)
        node = self.nodes[message.metadata.dst_node_id]
        self.log.append((node.id, message.metadata.message_type))
        node.asked.append(message.metadata.message_type)
        if node.deaf:
            return
        if not node.online:
            self.answer(message, [Message(Error(5, "Node Unavailable"), reply_to=message)])
            return
        (reply,) = node.answers(there)
        if message.metadata.message_type.startswith("train"):
            self.down_bytes += size
            self.up_bytes += arrived(numbered(reply))[1]
        self.answer(message, node.spoil(reply))


class Hurried(ImpatientClock):
    """A clock that passes while one sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes: list[Callable[[float], None]] = []  # told the time after each sleep

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        for wake in self.wakes:
            wake(self.time)


@dataclass
class Setup:
    """A federation of clients with homes, over a grid in this process."""

    data: FederatedData
    model: FunctionalModel
    folder: Path
    authenticated: bool = True
    time: Hurried = field(default_factory=Hurried)

    def __post_init__(self) -> None:
        self.grid = InProcess(self.node(c) for c in self.data.clients)

    def home(self, client: ClientId) -> Path:
        return self.folder / "homes" / str(client)

    def outbox(self, client: ClientId) -> Outbox:
        return Outbox(self.home(client))

    def node_of(self, client: ClientId) -> Node:
        return next(n for n in self.grid.nodes.values() if n.config["partition-id"] == client)

    def node(self, client: ClientId) -> Node:
        mine = self.data.train[client]
        own = ClientData(self.data.x[mine], self.data.y[mine], self.data.dataset.look, mine)
        app = erasable(ClientApp(), model=lambda context: self.model, data=lambda context: own)
        config = {"partition-id": client, "fedquit-home": str(self.home(client))}
        named: dict[str, Any] = {}
        if self.authenticated:
            named = {"name": f"hospital-{client}", "key": f"public key of {client}".encode()}
        return Node(7_000_000 + 31 * (client * 7 % 5) + client, app, config, **named)

    def config(self, **changes: Any) -> ServerConfig:
        values: dict[str, Any] = {
            "state": str(self.folder / "state"),
            "train": {"rounds": 2, "batch_size": 8, "lr": 0.1},
            "method": {"name": "fedquit", "lr": 1e-2, "batch_size": 8},
            "recover_rounds": 1,
            "min_nodes": 2,
        }
        return build(ServerConfig, {**values, **changes}, "fedquit")

    def serve(self, config: ServerConfig, **more: Any) -> ServerResult:
        context = Context(1, SUPERLINK, {}, RecordDict(), {})
        public = ClientData(self.data.x[self.data.public], self.data.y[self.data.public], positions=self.data.public)
        options = {"public": public, "clock": self.time.clock, **more}
        return serve(self.grid, context, model=lambda _: self.model, config=config, **options)

    def trained_by(self) -> set[ClientId]:
        """Who was given a task since the last look."""
        clients = {n.config["partition-id"] for n in self.grid.nodes.values() if "train.fedquit" in n.asked}
        for node in self.grid.nodes.values():
            node.asked.clear()
        return clients


def after_message(grid: InProcess, count: int, act: Callable[[], None]) -> None:
    """Do something once so many messages have been sent."""
    seen = iter(range(1, 10**9))

    def before(message: Message) -> None:
        if next(seen) == count:
            act()

    grid.before = before


def lines(folder: Path) -> Iterator[str]:
    """What the server said."""
    for line in (folder / "state" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "note":
            yield event["text"]


MakeWorld = Callable[..., Setup]  # by the fixture `make`
