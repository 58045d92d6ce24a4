# SPDX-License-Identifier: Apache-2.0
"""The reference meaning of a task: one client after the other, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedquit.core import SERVER, Batch, ClientId, Memory, Model, Params, Reply, Sent, Split, Task
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.data.preprocessing import AS_STORED, Look
from fedquit.engine.optim import OPTIMIZERS, Signal, clipped
from fedquit.engine.plan import Address, fixed_uniforms, make_plan
from fedquit.engine.precision import Precision, computing
from fedquit.utils.names import lookup


@dataclass(frozen=True)
class Ask:
    """A question of the server to some clients, with its place in the run."""

    task: Task
    clients: Sequence[ClientId]
    split: Split
    sent: Sent
    address: Address


class Engine(Protocol):
    """Carries out questions. It knows no method and keeps no place: the same `Ask` always gives the same replies."""

    @property
    def model(self) -> Model:
        """The network that everybody trains."""

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`."""


@dataclass(frozen=True)
class Own:
    """Which examples are a client's own: their positions, which of them are marked, and their own random numbers."""

    at: Tensor
    fixed: Tensor
    forget: Tensor

    @classmethod
    def of(cls, data: FederatedData, client: ClientId, split: Split, run_seed: int) -> Own:
        """A client's view of the data (the server's is its public part)."""
        mine = data.view(client, split) if client != SERVER else data.public
        fixed = fixed_uniforms(mine, Address(run_seed, "fixed").seed_for(client), data.y.shape[1:])
        return cls(mine, fixed, torch.isin(mine, data.forget.get(client, NOTHING)))


@dataclass(frozen=True)
class Examples:
    """What a client works on: its examples, which of them are marked, and their own random numbers."""

    x: Tensor
    y: Tensor
    fixed: Tensor
    forget: Tensor
    look: Look = AS_STORED

    @classmethod
    def of(cls, data: FederatedData, own: Own) -> Examples:
        """A client's part of a data set."""
        x, y = data.x[own.at], data.y[own.at]
        return cls(x, y, own.fixed.to(y.device), own.forget.to(y.device), data.dataset.look)

    @classmethod
    def unmarked(cls, x: Tensor, y: Tensor, look: Look = AS_STORED) -> Examples:
        """Examples of which none is to be forgotten, with zeros for their own random numbers."""
        return cls(x, y, torch.zeros(y.shape).to(y.device), torch.zeros(len(y), dtype=torch.bool).to(y.device), look)

    def batch(self, positions: Tensor, noise: Tensor, variation: Tensor | None = None) -> Batch:
        """Some of them, as a network reads them: augmented with those random numbers, or plain."""
        at = positions.to(self.y.device)
        seen = (
            self.look.plain(self.x[at]) if variation is None else self.look.varied(self.x[at], variation.to(at.device))
        )
        return Batch(seen, self.y[at], noise.to(at.device), self.fixed[at], self.forget[at])


@dataclass(frozen=True)
class Outcome:
    """What comes of a client's work: for the server, and for the client's own memory."""

    params: Params
    answer: Params
    keep: Mapping[str, Params]
    loss: float  # the mean over the steps


def run_client(model: Model, task: Task, mine: Examples, sent: Sent, seed: int) -> Outcome:
    """What a client does with its examples."""
    optimizer = lookup(OPTIMIZERS, task.local.optimizer, "optimizer")
    draws = mine.look.draws if task.augments else 0
    plan = make_plan(len(mine.y), task.local, seed, mine.y.shape[1:], draws)
    with torch.no_grad():
        sent = task.prepare(model, sent)
    probe = torch.Generator().manual_seed(plan.curvature_seed)
    params = task.begin(sent)
    slots = {s: {n: torch.zeros_like(p) for n, p in params.items()} for s in optimizer.slots}
    losses = []
    for t, (positions, noise) in enumerate(zip(plan.steps, plan.noise, strict=True), start=1):
        batch = mine.batch(positions, noise, plan.variation[t - 1] if draws else None)
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}  # a hook may have returned `sent`
        loss = task.loss(model, leaves, sent, batch).mean()
        gradient = _gradient(loss, leaves, create_graph=optimizer.wants_curvature)
        curvature = _hessian_diagonal(gradient, leaves, probe) if optimizer.wants_curvature else None
        with torch.no_grad():
            params = {n: p.detach() for n, p in leaves.items()}
            signal = Signal(t, clipped({n: g.detach() for n, g in gradient.items()}, task.local), curvature)
            new, slots = optimizer.step(params, slots, signal, task.local)
            params = task.after_step(new, params, sent)
        losses.append(loss.detach())
    mean_loss = float(torch.stack(losses).mean()) if losses else float("nan")
    return Outcome(params, task.answer(params, sent), task.keep(params, sent), mean_loss)


def _gradient(loss: Tensor, leaves: Params, *, create_graph: bool) -> Params:
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _hessian_diagonal(gradient: Params, leaves: Params, generator: torch.Generator) -> Params:
    """Hutchinson's estimate z * (H z) with random signs z."""
    signs = {
        n: (torch.randint(2, p.shape, generator=generator) * 2 - 1).to(dtype=p.dtype, device=p.device)
        for n, p in leaves.items()
    }
    along = torch.stack([(gradient[n] * z).sum() for n, z in signs.items()]).sum()
    return {n: h.detach() * signs[n] for n, h in _gradient(along, leaves, create_graph=False).items()}


@dataclass(frozen=True)
class SequentialEngine:
    """All clients of a simulated federation, one after the other."""

    model: Model
    data: FederatedData
    homes: Memory  # what the clients keep, by "client/name"
    precision: Precision = "float32"

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`."""
        for client in ask.clients:
            mine = Examples.of(self.data, Own.of(self.data, client, ask.split, ask.address.seed))
            seed = ask.address.seed_for(client)
            sent = {**ask.sent, **at_home(self.homes, ask.task, client)}
            with computing(self.precision, self.data.y.device):
                done = run_client(self.model, ask.task, mine, sent, seed)
            yield reply_of(self.homes, client, len(mine.y), done)


def at_home(homes: Memory, task: Task, client: ClientId) -> Sent:
    """What a task needs of what a client keeps, as far as it is there."""
    return {n: homes[key] for n in task.needs if (key := f"{client}/{n}") in homes}


def reply_of(homes: Memory, client: ClientId, examples: int, done: Outcome) -> Reply:
    """A client's answer, once what it keeps is at home."""
    for name, kept in done.keep.items():
        homes[f"{client}/{name}"] = kept
    return Reply(client, done.answer, examples, done.loss)
