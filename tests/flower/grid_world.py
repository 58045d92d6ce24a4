# SPDX-License-Identifier: Apache-2.0
"""A Flower grid within one process: real `ClientApp`s behind real messages, and everything that can go wrong with them.

Messages are taken apart into bytes and put together again on both ways, as on a real wire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedquit.core import ClientId, Request
from fedquit.data.federated import FederatedData
from fedquit.flower.client import ClientData, erasable
from fedquit.flower.config import ServerConfig
from fedquit.flower.outbox import Outbox
from fedquit.flower.server import ServerResult, serve
from fedquit.flower.transport import Clock
from fedquit.models import FunctionalModel
from fedquit.running.recipe import build

SUPERLINK = 1
Spoil = Callable[[Message], list[Message]]


@dataclass(frozen=True)
class OnTheWay:
    """A message as bytes."""

    id: str
    message_id: str
    parts: dict[str, bytes]

    @classmethod
    def of(cls, message: Message) -> OnTheWay:
        parts = {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}
        return cls(message.object_id, message.metadata.message_id, parts)

    def read(self) -> Message:
        there = inflate_object_from_contents(self.id, dict(self.parts))
        assert isinstance(there, Message)
        there.metadata.__dict__["_message_id"] = self.message_id
        return there


def arrived(message: Message) -> tuple[Message, int]:
    """A message once it has travelled, and its bytes on the way."""
    way = OnTheWay.of(message)
    return way.read(), sum(map(len, way.parts.values()))


@dataclass
class Node:
    """A SuperNode with its own app and configuration."""

    id: int
    app: ClientApp
    config: dict[str, Any]
    name: str = ""
    key: bytes = b""
    online: bool = True
    deaf: bool = False  # online, and never answering
    spoil: Spoil = lambda reply: [reply]  # what becomes of its replies on the way
    asked: list[str] = field(default_factory=list)

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(node_id=self.id, public_key=self.key, name=self.name or None)


class InProcess(Grid):
    """A grid over nodes in this process."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {n.id: n for n in nodes}
        self.mail: dict[str, list[OnTheWay]] = {}
        self.down_bytes = self.up_bytes = 0
        self.log: list[tuple[int, str]] = []
        self.before: Callable[[Message], None] = lambda message: None  # sees each message before it is sent
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK, 1

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [n.id for n in self.nodes.values() if n.online]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [n.info for n in self.nodes.values() if n.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        assert isinstance(messages, list), "a real grid reads them twice"
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self._deliver(message)
        return [m.metadata.message_id for m in messages]

    def _deliver(self, message: Message) -> None:
        self.before(message)
        there, size = arrived(message)
        node = self.nodes[message.metadata.dst_node_id]
        self.log.append((node.id, message.metadata.message_type))
        node.asked.append(message.metadata.message_type)
        if node.deaf:
            return
        if not node.online:
            self._answer(message, [Message(Error(5, "Node Unavailable"), reply_to=message)])
            return
        try:
            context = Context(1, node.id, node.config, RecordDict(), {})
            reply = node.app(there, context)
        except Exception as error:
            reply = Message(Error(2, repr(error)), reply_to=there)
        if message.metadata.message_type.startswith("train"):
            self.down_bytes += size
            self.up_bytes += arrived(_numbered(reply))[1]
        self._answer(message, node.spoil(reply))

    def _answer(self, message: Message, replies: list[Message]) -> None:
        self.mail.setdefault(message.metadata.message_id, []).extend(OnTheWay.of(_numbered(r)) for r in replies)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        taken = [reply for number in list(message_ids) for reply in self.mail.pop(number, [])]
        return [reply.read() for reply in taken]  # where one cannot be read, all are lost, as on a real grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def _numbered(reply: Message) -> Message:
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


class Hurried:
    """A clock that passes while one sleeps."""

    def __init__(self) -> None:
        self.time = 1e9
        self.wakes: list[Callable[[float], None]] = []  # told the time after each sleep

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for wake in self.wakes:
            wake(self.time)

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)

    def now(self) -> float:
        self.time += 1e-3  # no two looks at a real clock are the same
        return self.time


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


def marks(data: FederatedData, request: Request) -> FederatedData:
    """The first five samples of each client, for a request of samples."""
    samples = {c: data.train[c][:5] for c in request.clients} if request.samples else None
    return data.mark(request, samples)


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
