# SPDX-License-Identifier: Apache-2.0
"""The reference engine: one client after the other, one step after the other, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.core import Memory, Model, Params, Reply, Sent, Task
from fedquit.data.federated import FederatedData
from fedquit.engine.api import Ask, ClientIndices, Examples, LocalResult, client_memory, make_reply
from fedquit.engine.optim import OPTIMIZERS, Signal, clipped
from fedquit.engine.plan import make_plan
from fedquit.engine.precision import Precision, computing
from fedquit.utils.names import lookup


def run_client(model: Model, task: Task, mine: Examples, sent: Sent, seed: int) -> LocalResult:
    """Carry out a task on one client's examples.

    Args:
        model: The network.
        task: The loss and what surrounds it.
        mine: The client's examples.
        sent: Parameters that the server sent and that the client had in its memory, by name.
        seed: From which the order of the examples and all other random numbers follow.
    """
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
    return LocalResult(params, task.answer(params, sent), task.keep(params, sent), mean_loss)


def _gradient(loss: Tensor, leaves: Params, *, create_graph: bool) -> Params:
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _hessian_diagonal(gradient: Params, leaves: Params, generator: torch.Generator) -> Params:
    """Estimate the Hessian's diagonal by Hutchinson's z * (H z), with random signs z."""
    signs = {
        n: (torch.randint(2, p.shape, generator=generator) * 2 - 1).to(dtype=p.dtype, device=p.device)
        for n, p in leaves.items()
    }
    along = torch.stack([(gradient[n] * z).sum() for n, z in signs.items()]).sum()
    products = _gradient(along, leaves, create_graph=False)
    return {n: product.detach() * signs[n] for n, product in products.items()}


@dataclass(frozen=True)
class SequentialEngine:
    """Trains the clients of a simulated federation one after the other.

    Attributes:
        model: The network.
        data: All clients' examples, on the device that computes.
        memory: What the clients keep between rounds, by "client/name".
        precision: What networks compute in on a GPU.
    """

    model: Model
    data: FederatedData
    memory: Memory
    precision: Precision = "float32"

    def run(self, ask: Ask) -> Iterator[Reply]:
        """Yield the replies, in the order of `ask.clients`."""
        for client in ask.clients:
            mine = Examples.of(self.data, ClientIndices.of(self.data, client, ask.split, ask.address.seed))
            seed = ask.address.seed_for(client)
            sent = {**ask.sent, **client_memory(self.memory, ask.task, client)}
            with computing(self.precision, self.data.y.device):
                result = run_client(self.model, ask.task, mine, sent, seed)
            yield make_reply(self.memory, client, len(mine.y), result)
