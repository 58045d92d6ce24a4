# SPDX-License-Identifier: Apache-2.0
"""What every engine takes and gives: `Ask` goes in, a `Reply` of each client comes out.

An engine carries out tasks. It knows no unlearning method and keeps no state of the run: the same `Ask` always gives
the same replies. `fedquit.engine.sequential` is the reference; the others compute the same faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedquit.core import (
    SERVER,
    Batch,
    ClientId,
    Effort,
    Memory,
    Model,
    Params,
    Part,
    Program,
    Reply,
    Sent,
    Split,
    Task,
)
from fedquit.core.local_layers import LAYERS
from fedquit.core.types import parts_of
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.data.preprocessing import AS_STORED, Look
from fedquit.engine.plan import Address, fixed_uniforms


@dataclass(frozen=True)
class Ask:
    """One task or program for some clients, with its place in the run.

    Attributes:
        task: What each client does.
        clients: Who does it.
        split: Which part of its examples a client uses: all, forget or retain; the parts of a program have their own.
        sent: Parameters that the server sends along, by name.
        address: The place in the run, from which all random numbers follow.
    """

    task: Task | Program
    clients: Sequence[ClientId]
    split: Split
    sent: Sent
    address: Address

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a client does in its visit, one part after the other; a task is one part."""
        return parts_of(self.task, self.split)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the parts use, each once."""
        return tuple(dict.fromkeys(part.split for part in self.parts))


class Engine(Protocol):
    """Carries out tasks for the clients of a federation."""

    @property
    def model(self) -> Model:
        """The network that everybody trains."""

    def run(self, ask: Ask) -> Iterator[Reply]:
        """Yield the replies, in the order of `ask.clients`."""


@dataclass(frozen=True)
class ClientIndices:
    """A client's examples as positions in the data set. It has N of them.

    Attributes:
        at: Positions in the data set, (N,).
        fixed: Uniform numbers that belong to the examples for the whole run, (N, *label shape).
        forget: Whether each example is marked to be forgotten, (N,).
    """

    at: Tensor
    fixed: Tensor
    forget: Tensor

    @classmethod
    def of(cls, data: FederatedData, client: ClientId, split: Split, run_seed: int) -> ClientIndices:
        """Return those of one client; the server's are the public part of the data."""
        positions = data.view(client, split) if client != SERVER else data.public
        fixed = fixed_uniforms(positions, Address(run_seed, "fixed").seed_for(client), data.y.shape[1:])
        return cls(positions, fixed, torch.isin(positions, data.forget.get(client, NOTHING)))


@dataclass(frozen=True)
class Examples:
    """A client's N examples as they are stored.

    Attributes:
        x: Stored inputs, (N, ...).
        y: Labels, (N, *label shape).
        fixed: Uniform numbers that belong to the examples for the whole run, shaped like the labels.
        forget: Whether each example is marked to be forgotten, (N,).
        look: The preprocessing from stored inputs to what a network reads.
    """

    x: Tensor
    y: Tensor
    fixed: Tensor
    forget: Tensor
    look: Look = AS_STORED

    @classmethod
    def of(cls, data: FederatedData, indices: ClientIndices) -> Examples:
        """Return the examples at a client's positions in a data set."""
        x = data.x[indices.at]
        y = data.y[indices.at]
        return cls(x, y, indices.fixed.to(y.device), indices.forget.to(y.device), data.dataset.look)

    @classmethod
    def unmarked(cls, x: Tensor, y: Tensor, look: Look = AS_STORED) -> Examples:
        """Return examples of which none is to be forgotten; their fixed uniform numbers are zero."""
        fixed = torch.zeros(y.shape).to(y.device)
        forget = torch.zeros(len(y), dtype=torch.bool).to(y.device)
        return cls(x, y, fixed, forget, look)

    def batch(self, positions: Tensor, noise: Tensor, variation: Tensor | None = None) -> Batch:
        """Preprocess some of the examples.

        Args:
            positions: Which ones, (B,), each below N.
            noise: Uniform numbers for the labels, (B, *label shape).
            variation: Uniform numbers for the augmentation, (B, draws); None for no augmentation.
        """
        at = positions.to(self.y.device)
        stored = self.x[at]
        x = self.look.plain(stored) if variation is None else self.look.varied(stored, variation.to(at.device))
        return Batch(x, self.y[at], noise.to(at.device), self.fixed[at], self.forget[at])


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's local training.

    Attributes:
        params: The trained parameters.
        answer: What goes back to the server.
        keep: What stays in the client's own memory, by name.
        loss: The mean over the steps; NaN where there was none.
        efforts: What each part of a program took, or what a monitored task took; empty for any other task.
    """

    params: Params
    answer: Params
    keep: Mapping[str, Params]
    loss: float
    efforts: tuple[Effort, ...] = ()


def client_memory(memory: Memory, task: Task | Program, client: ClientId) -> Sent:
    """Return what a task, or any part of a program, needs from a client's own memory, as far as it is there.

    The client's own layers are always needed.

    Args:
        memory: What all clients keep, by "client/name".
        task: Its `needs` are the names to look up.
        client: Whose memory is read.
    """
    needs = dict.fromkeys([LAYERS, *(name for part in parts_of(task, "all") for name in part.task.needs)])
    return {name: memory[key] for name in needs if (key := f"{client}/{name}") in memory}


def make_reply(memory: Memory, client: ClientId, examples: int, result: LocalResult) -> Reply:
    """Store what a client keeps, then return its reply.

    Args:
        memory: What all clients keep, by "client/name"; written to.
        client: Whose result it is.
        examples: The number of examples that it used.
        result: What its local training led to.
    """
    for name, params in result.keep.items():
        memory[f"{client}/{name}"] = params
    return Reply(client, result.answer, examples, result.loss, result.efforts)
