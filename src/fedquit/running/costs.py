# SPDX-License-Identifier: Apache-2.0
"""What a method costs, counted from outside by wrapping its federation: no method counts its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from fedquit.core import (
    SERVER,
    ClientId,
    Effort,
    Params,
    Part,
    Program,
    Reply,
    Sent,
    Split,
    State,
    Task,
)
from fedquit.core.params import nbytes
from fedquit.core.types import RECEIVED, parts_of
from fedquit.core.wrapper import FederationWrapper


@dataclass(frozen=True)
class Costs:
    """Sums over a phase; the storage is the most that lay there at its beginning or at the end of a round."""

    down_bytes: int = 0  # from the server to clients
    up_bytes: int = 0
    participations: int = 0  # one client in one question, however many parts its program has
    client_epochs: float = 0.0  # passes of a client over the data it was asked to use, as many as it took
    server_epochs: float = 0.0  # passes of the server over its public data
    server_storage_bytes: int = 0  # the global model, the method's own state, and what its watcher kept
    client_storage_bytes: int = 0  # what all clients keep at home, together
    client_flops: int = 0  # of all clients, 2 for a multiplication with an addition
    server_flops: int = 0

    def __add__(self, other: Costs) -> Costs:
        storage = ("server_storage_bytes", "client_storage_bytes")
        both = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Costs(**{name: max(a, b) if name in storage else a + b for name, a, b in both})

    @property
    def bytes(self) -> int:
        """What travelled, down and up."""
        return self.down_bytes + self.up_bytes


class Work(Protocol):
    """Knows how much computing a task takes."""

    def at_client(self, task: Task, sent: Sent, examples: int, steps: int | None = None) -> int:
        """FLOPs of one client's work: of so many steps, or of all that are planned for its examples."""

    def at_server(self, task: Task, sent: Sent, steps: int | None = None) -> int:
        """FLOPs of the task on the server's own data, in the same way."""


@runtime_checkable
class RepliesAtServer(Protocol):
    """A federation that says what a task on the server's own data took, as a client's reply does."""

    def reply_at_server(self, task: Task, sent: Sent) -> Reply:
        """The reply to a task on the server's own public data."""


@dataclass
class Metered(FederationWrapper):
    """Any federation, with every byte and every pass counted. A method cannot tell."""

    stored: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes kept at the server and at the clients
    work: Work | None = None
    costs: Costs = Costs()

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask, and count each client's download, work and upload once its reply is here."""
        # A set of parameters under two names travels once.
        down = sum(nbytes(p) for p in {id(p): p for p in sent.values()}.values())
        known = {**sent, RECEIVED: sent.get("start", {})} if isinstance(task, Program) else sent
        for reply in self.inner.run(task, clients, split=split, **sent):
            self.costs += Costs(down, nbytes(reply.params), 1)
            for part, effort in efforts(parts_of(task, split), reply):
                epochs = part.task.local.epochs_of(effort.examples, effort.steps)
                flops = self.work.at_client(part.task, known, effort.examples, effort.steps) if self.work else 0
                self.costs += Costs(client_epochs=epochs, client_flops=flops)
            yield reply

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own data: nothing travels, and its passes and FLOPs are counted."""
        if isinstance(self.inner, RepliesAtServer):
            reply = self.inner.reply_at_server(task, sent)
        else:
            reply = Reply(SERVER, self.inner.run_at_server(task, **sent), 0)
        effort = reply.efforts[0] if reply.efforts else None
        epochs = task.local.epochs_of(effort.examples, effort.steps) if effort else task.local.epochs
        flops = self.work.at_server(task, sent, effort.steps if effort else None) if self.work else 0
        self.costs += Costs(server_epochs=epochs, server_flops=flops)
        return reply.params

    def settle(self, state: State) -> None:
        """Count what is stored, at the beginning of a phase and at the end of each round."""
        server, clients = self.stored()
        own = nbytes(state.params) + sum(nbytes(part) for part in state.kept.values())
        self.costs += Costs(server_storage_bytes=own + server, client_storage_bytes=clients)


def efforts(parts: Sequence[Part], reply: Reply) -> Iterator[tuple[Part, Effort]]:
    """What each part of a client's visit took: as its reply says, or as planned where that is certain.

    Args:
        parts: of the program; a task is one part.
        reply: the client's.
    """
    (first, *_) = parts
    planned = Effort(reply.examples, first.task.local.steps(reply.examples))
    return zip(parts, reply.efforts or (planned,), strict=True)
