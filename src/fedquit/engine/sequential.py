# SPDX-License-Identifier: Apache-2.0
"""The reference engine: one client after the other, one step after the other, in plain torch.

`run_visit` is what a question means to one client, here, in other engines and at a Flower node; `run_client` is what a
task means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquit.core import (
    ClientId,
    Effort,
    Measurement,
    Memory,
    Model,
    Params,
    Part,
    Program,
    Reply,
    Sent,
    Split,
    Step,
    Task,
)
from fedquit.core.local_layers import LAYERS
from fedquit.core.params import statistics_of, weights_of
from fedquit.core.types import RECEIVED, examples_used, is_monitored
from fedquit.data.federated import FederatedData
from fedquit.engine.api import Ask, ClientIndices, Examples, LocalResult, client_memory, make_reply
from fedquit.engine.local_layers import after_visit, at_client, own_layers
from fedquit.engine.optim import OPTIMIZERS, Signal, clipped
from fedquit.engine.plan import make_plan, measuring_plan, step_key
from fedquit.engine.precision import Precision, computing
from fedquit.engine.training import TrainingModel, measuring, training_form
from fedquit.errors import InputError
from fedquit.utils.names import lookup


def run_visit(
    model: Model, ask: Ask, client: ClientId, examples: Mapping[Split, Examples], memory: Sent
) -> tuple[int, LocalResult]:
    """Carry out a question at one client: its task, or all parts of its program.

    Args:
        model: The network.
        ask: The question.
        client: Who answers it.
        examples: The client's examples, by the splits that the question uses.
        memory: What the parts need from the client's own memory, by name.

    Returns:
        How many of the client's examples were used, each counted once, and the result.
    """
    counts = {split: len(mine.y) for split, mine in examples.items()}
    used = examples_used(ask.parts, counts)
    layers = own_layers(model, ask, memory)
    memory = {name: params for name, params in memory.items() if name != LAYERS}
    ask = at_client(model, ask, layers)
    if isinstance(ask.task, Program):
        result = _run_program(model, ask, client, examples, memory)
    else:
        sent = {**ask.sent, **memory}
        result = run_client(model, ask.task, examples[ask.split], sent, ask.address.seed_for(client))
    return used, after_visit(ask.task, layers, result, used)


def _run_program(
    model: Model, ask: Ask, client: ClientId, examples: Mapping[Split, Examples], memory: Sent
) -> LocalResult:
    received = ask.sent["start"]
    start = received
    trained: Params = {}  # what the training parts answered
    keep: dict[str, Params] = {}
    efforts: list[Effort] = []
    for number, part in enumerate(ask.parts):
        own = {name: params for name, params in {**memory, **keep}.items() if name in part.task.needs}
        sent = {**ask.sent, "start": start, RECEIVED: received, **own}
        mine = examples[part.split]
        result = run_client(model, part.task, mine, sent, ask.address.seed_for(client, number))
        planned = Effort(len(mine.y), part.task.local.steps(len(mine.y)))
        efforts += result.efforts or [planned]
        keep |= result.keep
        if not isinstance(part.task, Measurement):
            _require_model_tensors(part, number, result, start, last=number == len(ask.parts) - 1)
            start = {**start, **result.answer}
            trained = {**trained, **result.answer}
    answer = result.answer if isinstance(part.task, Measurement) else trained
    return replace(result, params=start, answer=answer, keep=keep, efforts=tuple(efforts))


def _require_model_tensors(part: Part, number: int, result: LocalResult, start: Params, *, last: bool) -> None:
    """Refuse an answer in the middle of a program from which the next part could not start."""
    unknown = result.answer.keys() - start.keys()
    if unknown and not last:
        raise InputError(
            f"part {number + 1} of the program, {type(part.task).__name__}, answers with {min(unknown)!r}, which the "
            "model does not have: only the last part may."
        )


def run_client(model: Model, task: Task, mine: Examples, sent: Sent, seed: int) -> LocalResult:
    """Carry out a task on one client's examples.

    Args:
        model: The network.
        task: The loss and what surrounds it.
        mine: The client's examples.
        sent: Parameters that the server sent and that the client had in its memory, by name.
        seed: From which the order of the examples and all other random numbers follow.
    """
    if isinstance(task, Measurement):
        return _measure(model, task, mine, sent, seed)
    monitored = is_monitored(task)
    optimizer = lookup(OPTIMIZERS, task.local.optimizer, "optimizer")
    draws = mine.look.draws if task.augments else 0
    plan = make_plan(len(mine.y), task.local, seed, mine.y.shape[1:], draws)
    with torch.no_grad():
        sent = task.prepare(model, sent)
    probe = torch.Generator().manual_seed(plan.curvature_seed)
    begun = task.begin(sent)
    params = weights_of(begun)
    statistics = statistics_of(begun)
    form = training_form(model, mine.x) if task.augments else None
    slots = {s: {n: torch.zeros_like(p) for n, p in params.items()} for s in optimizer.slots}
    watched = task.monitor_start(begun) if monitored else {}
    losses = []
    for t, (positions, noise) in enumerate(zip(plan.steps, plan.noise, strict=True), start=1):
        batch = mine.batch(positions, noise, plan.variation[t - 1] if draws else None)
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}  # a hook may have returned `sent`
        network = model if form is None else _in_step(model, form, seed, t, mine.y.device)
        loss = task.loss(network, {**leaves, **statistics} if statistics else leaves, sent, batch).mean()
        gradient = _gradient(loss, leaves, create_graph=optimizer.wants_curvature)
        curvature = _hessian_diagonal(gradient, leaves, probe) if optimizer.wants_curvature else None
        with torch.no_grad():
            params = {n: p.detach() for n, p in leaves.items()}
            signal = Signal(t, clipped({n: g.detach() for n, g in gradient.items()}, task.local), curvature)
            new, slots = optimizer.step(params, slots, signal, task.local)
            params = task.after_step(new, params, sent)
        if isinstance(network, TrainingModel):
            statistics = {n: network.statistics.get(n, s) for n, s in statistics.items()}
        losses.append(loss.detach())
        if monitored:
            taken = _step(t, losses[-1], len(positions), len(mine.y), task)
            watched = task.monitor(watched, taken, {**params, **statistics})
            if bool(watched["halted"]):
                break
    efforts: tuple[Effort, ...] = ()
    params = {**params, **statistics}
    if monitored:
        params = task.monitor_end(watched, params)
        efforts = (Effort(len(mine.y), len(losses)),)
    mean_loss = float(torch.stack(losses).mean()) if losses else float("nan")
    return LocalResult(params, task.answer(params, sent), task.keep(params, sent), mean_loss, efforts)


def _in_step(model: Model, form: Model, seed: int, number: int, device: torch.device) -> TrainingModel:
    """Return the network in the step of that number, from 1."""
    key = step_key(torch.tensor(seed, device=device), number - 1)
    return TrainingModel(model, form, key)


def _step(number: int, loss: Tensor, batch: int, examples: int, task: Task) -> Step:
    ends_epoch = number % task.local.steps_per_epoch(examples) == 0
    return Step(
        number=torch.tensor(number, device=loss.device),
        loss=loss,
        examples=torch.tensor(batch, device=loss.device),
        ends_epoch=torch.tensor(ends_epoch, device=loss.device),
    )


def _measure(model: Model, task: Measurement, mine: Examples, sent: Sent, seed: int) -> LocalResult:
    """Average the task's statistic over the examples, in one pass."""
    count = len(mine.y)
    model = measuring(model)
    plan = measuring_plan(count, task.local, seed, mine.y.shape[1:])
    with torch.no_grad():
        sent = task.prepare(model, sent)
        params = task.begin(sent)
        like = task.zeros(sent)
        total = {n: torch.zeros_like(zero, dtype=torch.float64) for n, zero in like.items()}
        for positions, noise in zip(plan.steps, plan.noise, strict=True):
            statistic = task.statistic(model, params, sent, mine.batch(positions, noise))
            _require_shapes(task, statistic, like, len(positions))
            total = {n: t + statistic[n].sum(0, dtype=torch.float64) for n, t in total.items()}
        mean = {n: (t / max(count, 1)).to(like[n].dtype) for n, t in total.items()}
        return LocalResult(mean, task.answer(mean, sent), task.keep(mean, sent), math.nan)


def _require_shapes(task: Measurement, statistic: Params, like: Params, batch: int) -> None:
    expected = {n: (batch, *zero.shape) for n, zero in like.items()}
    shapes = {n: tuple(tensor.shape) for n, tensor in statistic.items()}
    if shapes != expected:
        raise InputError(
            f"the statistic of {type(task).__name__} has the shapes {shapes} for {batch} examples, where `zeros` leads "
            f"to expect {expected}: let `zeros` return the names and shapes of the mean."
        )


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
            examples = examples_by_split(self.data, ask, client)
            memory = client_memory(self.memory, ask.task, client)
            with computing(self.precision, self.data.y.device):
                used, result = run_visit(self.model, ask, client, examples, memory)
            yield make_reply(self.memory, client, used, result)


def examples_by_split(data: FederatedData, ask: Ask, client: ClientId) -> dict[Split, Examples]:
    """Return a client's examples in the splits that a question uses.

    Args:
        data: All clients' examples.
        ask: The question.
        client: Whose examples they are.
    """
    indices = {split: ClientIndices.of(data, client, split, ask.address.seed) for split in ask.splits}
    return {split: Examples.of(data, positions) for split, positions in indices.items()}
