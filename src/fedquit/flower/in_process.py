# SPDX-License-Identifier: Apache-2.0
"""A Flower grid within one process: real `ClientApp`s behind real messages, without a SuperLink and its nodes.

Messages are taken apart into bytes and put together again on both ways, as on a real wire. It serves trials: a
deployment is started by `fedquit.flower.deploy`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from fedquit.core import ClientId, Model
from fedquit.data.federated import FederatedData
from fedquit.flower.client import ClientData, erasable
from fedquit.flower.config import ServerConfig
from fedquit.flower.outbox import Outbox
from fedquit.flower.server import ServerResult, serve
from fedquit.flower.transport import Clock

SUPERLINK = 1  # the id of the node from which the server's messages come
FIRST_NODE = 7_000_000


@dataclass(frozen=True)
class Parcel:
    """A message as bytes, on its way."""

    id: str
    message_id: str
    parts: dict[str, bytes]

    @classmethod
    def of(cls, message: Message) -> Parcel:
        """Take a message apart."""
        parts = {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}
        return cls(message.object_id, message.metadata.message_id, parts)

    def read(self) -> Message:
        """Put the message together again."""
        message = inflate_object_from_contents(self.id, dict(self.parts))
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = self.message_id
        return message

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.parts.values()))


def numbered(message: Message) -> Message:
    """The message with the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@dataclass
class Node:
    """A SuperNode with its own app and configuration.

    Attributes:
        id: as the grid knows it.
        app: answers its messages.
        config: of the node.
        name: that the operator registered; "" for none.
        key: the public key that the operator registered.
        online: whether the grid lists it.
    """

    id: int
    app: ClientApp
    config: dict[str, Any]
    name: str = ""
    key: bytes = b""
    online: bool = True

    @property
    def info(self) -> NodeInfo:
        """What the grid says of it."""
        return NodeInfo(node_id=self.id, public_key=self.key, name=self.name or None)

    def answers(self, message: Message) -> list[Message]:
        """The replies to a message as it arrived; an error of the app is Flower's error message."""
        context = Context(1, self.id, self.config, RecordDict(), {})
        try:
            return [self.app(message, context)]
        except Exception as error:  # a node reports whatever its app raises
            return [Message(Error(2, repr(error)), reply_to=message)]


@dataclass
class InProcessGrid(Grid):  # type: ignore[misc, unused-ignore]
    """A grid over nodes in this process.

    Attributes:
        nodes: by id.
        mail: replies that wait to be pulled, by the id of the message that they answer.
    """

    nodes: dict[int, Node]
    mail: dict[str, list[Parcel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK, 1

    def set_run(self, run: Any) -> None:  # noqa: ANN401 - Flower's signature
        """There are no runs here."""
        raise NotImplementedError

    @property
    def run(self) -> Any:  # noqa: ANN401 - Flower's signature
        """There are no runs here."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ANN401 - Flower's signature
        """Deprecated in Flower, and not needed."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the nodes that are online."""
        return [node.id for node in self.nodes.values() if node.online]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The nodes that are online."""
        return [node.info for node in self.nodes.values() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages; each node answers at once."""
        assert isinstance(messages, list), "a real grid reads them twice"
        for message in messages:
            self.deliver(numbered(message))
        return [message.metadata.message_id for message in messages]

    def deliver(self, message: Message) -> None:
        """Let the node of a message answer it."""
        node = self.nodes[message.metadata.dst_node_id]
        self.answer(message, node.answers(Parcel.of(message).read()))

    def answer(self, message: Message, replies: Sequence[Message]) -> None:
        """Put replies to a message into the mail."""
        parcels = [Parcel.of(numbered(reply)) for reply in replies]
        self.mail.setdefault(message.metadata.message_id, []).extend(parcels)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are here."""
        taken = [parcel for number in list(message_ids) for parcel in self.mail.pop(number, [])]
        return [parcel.read() for parcel in taken]  # where one cannot be read, all are lost, as on a real grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver messages and return the replies, which are there at once."""
        return self.pull_messages(self.push_messages(list(messages)))


class ImpatientClock:
    """A clock on which the time of a sleep has passed at once."""

    def __init__(self) -> None:
        self.time = 1e9

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.time += seconds

    def now(self) -> float:
        """The time; no two looks at a real clock are the same."""
        self.time += 1e-3
        return self.time

    @property
    def clock(self) -> Clock:
        """The two functions as a `Clock`, which `serve` takes."""
        return Clock(self.now, self.sleep)


@dataclass
class InProcessFederation:
    """Clients with homes of their own, over a grid in this process.

    Attributes:
        data: of the clients, whose numbers are 0, 1, …
        model: the network.
        folder: for the clients' homes and the server's state.
    """

    data: FederatedData
    model: Model
    folder: Path
    clock: ImpatientClock = field(default_factory=ImpatientClock)
    grid: InProcessGrid = field(init=False)

    def __post_init__(self) -> None:
        nodes = [self._node(client) for client in self.data.clients]
        self.grid = InProcessGrid({node.id: node for node in nodes})

    def outbox(self, client: ClientId) -> Outbox:
        """Where the owner of a client's data asks for it to be forgotten."""
        return Outbox(self._home(client))

    def _home(self, client: ClientId) -> Path:
        return self.folder / "homes" / str(client)

    def _node(self, client: ClientId) -> Node:
        mine = self.data.train[client]
        own = ClientData(self.data.x[mine], self.data.y[mine], self.data.dataset.look, mine)
        app = erasable(ClientApp(), model=lambda _: self.model, data=lambda _: own)
        config = {"partition-id": client, "fedquit-home": str(self._home(client))}
        # Who appears together is numbered by name, so the name has the client's number.
        return Node(FIRST_NODE + client, app, config, f"client-{client:06d}", f"public key of {client}".encode())

    def serve(self, config: ServerConfig) -> ServerResult:
        """Run the server until all rounds are trained and no request waits."""
        context = Context(1, SUPERLINK, {}, RecordDict(), {})
        at = self.data.public
        public = ClientData(self.data.x[at], self.data.y[at], positions=at)
        with _quiet():
            return serve(
                self.grid, context, model=lambda _: self.model, config=config, public=public, clock=self.clock.clock
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower's logger say nothing of what the server tells its operator."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
