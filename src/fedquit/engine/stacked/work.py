# SPDX-License-Identifier: Apache-2.0
"""The state of several clients that train together, and the step that takes all of them one step on.

A step computes every client's loss under `vmap`, the gradients of all in one backward pass, and the optimizer's update
on whole rows. What a client computes is what `fedquit.engine.sequential` computes, up to the order of the sums.

How steps are run is the business of three other modules: `eager` runs them one by one, `replay` replays the traced
operations of small networks on a CPU, and `capture` replays CUDA graphs on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fedquit.core import Batch, ClientId, Model, Params, Sent, Task
from fedquit.core.params import placed, weights_of
from fedquit.data.federated import Dataset
from fedquit.engine.api import LocalResult
from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.evaluation_model import Bfloat16Model
from fedquit.engine.optim import OPTIMIZERS, Adam, Signal, clipped
from fedquit.engine.stacked.cpu_ops import CpuOps
from fedquit.engine.stacked.inputs import Inputs
from fedquit.engine.stacked.layout import Layout
from fedquit.engine.stacked.products import ProductOps
from fedquit.engine.stacked.schedule import Job, Schedule
from fedquit.engine.stacked.sent import SentParams, stacked
from fedquit.engine.stacked.training_state import TrainingState
from fedquit.engine.training import TrainingModel
from fedquit.utils.names import lookup


@dataclass(frozen=True)
class Numerics:
    """What a step computes in and with.

    Attributes:
        bf16: Networks compute in bfloat16, on copies of parameters that stay in their own precision.
        kernels: Convolutions, GroupNorm and SGD go to the Triton kernels.
        captured: Steps are captured as CUDA graphs: they read everything that changes from fixed addresses.
        general: What `engine.compile` asks for is taken: linear layers on rows, Adam's kernel, and the kernels also for
            convolutions with a bias and for clipped SGD.
        compiled: A compiler gets the network as products and elementwise operations, without kernels of our own.
    """

    bf16: bool = False
    kernels: bool = False
    captured: bool = False
    general: bool = False
    compiled: bool = False

    @property
    def network_kernels(self) -> bool:
        """Whether the network's operations go to the Triton kernels."""
        return self.kernels and not self.compiled

    @property
    def cpu_ops(self) -> bool:
        """Whether convolutions and GroupNorm go to the operations of `cpu_ops`."""
        return not self.captured and not self.bf16


class Clock(Protocol):
    """The step that is taken: as the host knows it, or as a CUDA graph reads it from memory."""

    @property
    def index(self) -> int | Tensor:
        """The step's place in the schedule, from 0; as a tensor, (1,)."""

    @property
    def number(self) -> int | Tensor:
        """The step's number for the optimizer, from 1."""

    @property
    def batch_size(self) -> int:
        """How many examples of each client's batch are computed, padding included."""

    @property
    def lr(self) -> Tensor | None:
        """The learning rate in memory, (); None for that of the task."""


Gradients = Sequence[Tensor | None]


class StepTensors(NamedTuple):
    """All tensors that losses and gradients of a step are computed from.

    Attributes:
        shared: What all clients were sent.
        shared_low: The same in bfloat16, or nothing.
        share: The weight of each example in its client's loss, (width, B).
        params: Leaves (width, *shape).
        copies: The same in bfloat16, or nothing.
        per_client: What each client was sent, (width, *shape).
        batch: The fields of a `Batch`, each (width, B, ...).
        statistics: Running statistics of each client, (width, *shape); nothing for most networks.
        keys: Of the random numbers inside a network, (width,); None for most networks.
    """

    shared: Sent
    shared_low: Sent
    share: Tensor
    params: Params
    copies: Params
    per_client: Sent
    batch: tuple[Tensor, ...]
    statistics: Params
    keys: Tensor | None


class StepResult(NamedTuple):
    """What a step computes.

    Attributes:
        loss: Each client's, (width,).
        gradients: Of the copies and then of the parameters: None where a leaf is not used, or where kernels have
            written its gradient into the gradient buffer.
        statistics: After the step, (width, *shape).
    """

    loss: Tensor
    gradients: Gradients
    statistics: Params


GradientFunction = Callable[[StepTensors], StepResult]


class ClientRows:
    """The parameters of K clients as rows of one buffer, and what the optimizer keeps for them."""

    def __init__(self, layout: Layout, like: Tensor, clients: int, slots: Sequence[str], *, bf16: bool) -> None:
        """Allocate the rows.

        Args:
            layout: Where each parameter lies in a row.
            like: A tensor of the rows' type, on their device.
            clients: K.
            slots: The names of what the optimizer keeps, each (K, row_size).
            bf16: Whether to keep a copy of the rows in bfloat16.
        """
        self.layout = layout
        self.rows = torch.zeros(clients, layout.row_size, dtype=like.dtype, device=like.device)
        self.low = self.rows.to(torch.bfloat16) if bf16 else None
        self.slots = {name: torch.zeros_like(self.rows) for name in slots}
        self._leaves: dict[int, Params] = {}

    def load(self, jobs: Sequence[Job]) -> None:
        """Take the parameters that the clients of a round begin with; the optimizer begins anew."""
        device = self.rows.device
        if all(job.start is jobs[0].start for job in jobs):
            start = placed(jobs[0].start, device)
            self.layout.fill(self.rows, {n: p.unsqueeze(0) for n, p in start.items()})
        else:
            self.layout.fill(self.rows, stacked([placed(job.start, device) for job in jobs]))
        self.copy_to_low(len(self.rows))
        for slot in self.slots.values():
            slot.zero_()

    def copy_to_low(self, width: int) -> None:
        """Bring the copy in bfloat16 up to date for the first clients."""
        if self.low is not None:
            self.low[:width].copy_(self.rows[:width])

    def leaves(self, width: int) -> Params:
        """Return the parameters of the first clients as leaves of autograd; the same objects every time."""
        if width not in self._leaves:
            self._leaves[width] = self._as_leaves(self.rows[:width])
        return self._leaves[width]

    def low_leaves(self, width: int) -> Params:
        """Return their copies in bfloat16 as leaves of autograd; nothing where there is no copy."""
        return self._as_leaves(self.low[:width]) if self.low is not None else {}

    def _as_leaves(self, rows: Tensor) -> Params:
        return {n: p.detach().requires_grad_() for n, p in self.layout.views(rows).items()}


class Work:
    """Several clients at one task."""

    def __init__(
        self, model: Model, dataset: Dataset, task: Task, jobs: Sequence[Job], steps: int, numerics: Numerics
    ) -> None:
        """Allocate all that the clients need.

        Args:
            model: The network.
            dataset: All examples, on the device that computes.
            task: What the clients do.
            jobs: The clients' work; of all rounds the number of clients and the shapes are the same.
            steps: The most steps that a client takes in any round.
            numerics: What a step computes in and with.
        """
        device = dataset.y.device
        start = weights_of(jobs[0].start)
        draws = dataset.look.draws if task.augments else 0
        shapes = {n: tuple(p.shape) for n, p in start.items()}
        layout = Layout(shapes, output_channels_last=numerics.kernels or numerics.cpu_ops)
        like = torch.empty(0, dtype=next(iter(start.values())).dtype, device=device)
        schedule = Schedule.empty(steps, len(jobs), task.local.batch_size, dataset.y.shape[1:], draws).to(device)
        self.model = model
        self.task = task
        self.numerics = numerics
        self.optimizer = lookup(OPTIMIZERS, task.local.optimizer, "optimizer")
        slots = [name for name in self.optimizer.slots if name != "velocity" or task.local.momentum > 0]
        self.clients = ClientRows(layout, like, len(jobs), slots, bf16=numerics.bf16)
        low = self.clients.low
        self.gradient_buffer = GradientBuffer(self.clients.rows if low is None else low, layout.sizes)
        self.losses = torch.zeros(len(jobs), dtype=like.dtype, device=device)  # (K,): sums over the steps
        computes_in = like.dtype if low is None else low.dtype
        self.inputs = Inputs(dataset, schedule, draws, ahead=computes_in if numerics.captured else None)
        self.sent = SentParams(device, static=numerics.captured, bf16=numerics.bf16)
        self.sent.load(jobs)
        self.training_state = TrainingState.of(model, task, jobs, dataset.x)  # None for most networks

    def load(self, jobs: Sequence[Job]) -> None:
        """Take the work of a round; the clients with the most steps come first."""
        self.sent.load(jobs)
        self.clients.load(jobs)
        self.losses.zero_()
        self.inputs.load(jobs)
        if self.training_state is not None:
            self.training_state.load(jobs)

    def step(self, width: int, clock: Clock, gradients_of: GradientFunction, computed: int = 0) -> None:
        """Take the first clients one step on.

        Args:
            width: How many clients.
            clock: Which step it is.
            gradients_of: `self.gradients`, or something that computes the same faster.
            computed: For how many clients losses and gradients are computed, those that have no such step among them;
                0 for `width`. A compiled step is compiled for one number of clients.
        """
        self.gradient_buffer.begin_step()
        tensors = self.tensors(computed or width, clock)
        try:
            result = gradients_of(tensors)
        finally:  # also where memory ran out: a capture has to end on the stream it began on
            self.gradient_buffer.synchronise()
        with torch.no_grad():
            self.losses[:width] += result.loss.detach()[:width]
            if self.training_state is not None:  # in place, so after the backward pass, which may read them
                self.training_state.update({n: s[:width] for n, s in result.statistics.items()}, width)
            gradients = [g if g is None else g[:width] for g in result.gradients]
            self._update(width, gradients, self.sent.of_clients(width), clock)

    def tensors(self, width: int, clock: Clock) -> StepTensors:
        """Return what the losses and gradients of the first clients are computed from."""
        plan = self.inputs.schedule.at_step(clock.index, width, clock.batch_size)
        state = self.training_state
        return StepTensors(
            shared=self.sent.shared,
            shared_low=self.sent.shared_low,
            share=plan.share,
            params=self.clients.leaves(width),
            copies=self.clients.low_leaves(width),
            per_client=self.sent.of_clients(width),
            batch=(self.inputs.x(plan, clock.index), self.inputs.dataset.y[plan.at], plan.u, plan.fixed, plan.forget),
            statistics={} if state is None else state.of_clients(width),
            keys=None if state is None else state.keys(width, clock.index),
        )

    def gradients(self, step: StepTensors) -> StepResult:
        """Compute losses and gradients."""
        after: Params = {}
        clients = step.params, step.copies, step.per_client
        if step.keys is None:
            losses = vmap(partial(self._loss, step))(*clients, *step.batch)  # (width, B)
        else:
            stateful = step.statistics, step.keys, step.share
            losses, after = vmap(partial(self._stateful_loss, step))(*clients, *stateful, *step.batch)
        loss = (losses * step.share.to(losses.dtype)).sum(1)  # (width,)
        leaves = [*step.copies.values(), *step.params.values()]
        return StepResult(loss, torch.autograd.grad(loss.sum(), leaves, allow_unused=True), after)

    def _stateful_loss(
        self,
        whole_step: StepTensors,
        params: Params,
        copies: Params,
        per_client: Sent,
        statistics: Params,
        key: Tensor,
        share: Tensor,
        *batch: Tensor,
    ) -> tuple[Tensor, Params]:
        """As `_loss`, of a network with dropout or BatchNorm; returns also its statistics after the step."""
        assert self.training_state is not None
        form = self.training_state.form
        constant = self.numerics.compiled
        step = None if form is None else TrainingModel(self.model, form, key, share, constant_places=constant)
        model = self.model if step is None else step
        whole = {**params, **statistics}
        if self.numerics.bf16:
            # In training the batch's statistics are computed and recorded in their own precision; in evaluation torch
            # wants all tensors of a BatchNorm alike.
            low = statistics if step else {n: s.to(torch.bfloat16) for n, s in statistics.items()}
            model = self._in_bfloat16(model, whole, {**copies, **low}, whole_step)
        with self._operations():
            losses = self.task.loss(model, whole, {**whole_step.shared, **per_client}, Batch(*batch))
        after = {} if step is None else step.statistics
        return losses, {n: after.get(n, s) for n, s in statistics.items()}

    def _loss(
        self, whole_step: StepTensors, params: Params, copies: Params, per_client: Sent, *batch: Tensor
    ) -> Tensor:
        """Return the loss of each example of one client, (B,), inside `vmap`."""
        model = self.model
        if self.numerics.bf16:
            model = self._in_bfloat16(model, params, copies, whole_step)
        with self._operations():
            return self.task.loss(model, params, {**whole_step.shared, **per_client}, Batch(*batch))

    def _in_bfloat16(self, model: Model, params: Params, copies: Params, step: StepTensors) -> Bfloat16Model:
        shared = ((step.shared[name], low) for name, low in step.shared_low.items())
        known = [(params, copies), *shared]
        kernels, biases = self.numerics.network_kernels, self.numerics.general
        return Bfloat16Model(model, known, kernels, self.gradient_buffer, kernel_biases=biases)

    def _operations(self) -> contextlib.AbstractContextManager[object]:
        """Return the mode that replaces operations of torch which `vmap` would make slow."""
        if self.numerics.cpu_ops:
            return CpuOps()
        if not self.numerics.general:
            return contextlib.nullcontext()
        return ProductOps(convolutions=self.numerics.compiled)

    def _update(self, width: int, gradients: Gradients, per_client: Sent, clock: Clock) -> None:
        """Take the optimizer's step on the first rows."""
        rows = self.clients.rows[:width]
        gradient = self._gradient_rows(width, gradients)
        if self.task.local.clip or self.task.local.clip_tensor:
            gradient = self._clipped(gradient.to(rows.dtype))
        if self._has_update_kernel():
            self._update_by_kernel(width, gradient, clock)
            return
        signal = Signal(clock.number, {"": gradient.to(rows.dtype)}, lr=clock.lr)
        slots = {name: {"": slot[:width]} for name, slot in self.clients.slots.items()}
        stepped, new_slots = self.optimizer.step({"": rows}, slots, signal, self.task.local)
        if self._has_plain_step():
            rows.copy_(stepped[""])
        else:
            self._after_step(stepped[""], rows, per_client)
        for name, slot in self.clients.slots.items():
            slot[:width].copy_(new_slots[name][""])
        self.clients.copy_to_low(width)

    def _has_plain_step(self) -> bool:
        return type(self.task).after_step is Task.after_step

    def _has_update_kernel(self) -> bool:
        local = self.task.local
        clips = bool(local.clip or local.clip_tensor)
        covered = local.optimizer == "sgd" and not local.momentum and not clips
        if self.numerics.general:
            covered = isinstance(self.optimizer, Adam) or (local.optimizer == "sgd" and not local.momentum)
        return covered and self._has_plain_step() and self.numerics.kernels and self.numerics.bf16

    def _update_by_kernel(self, width: int, gradient: Tensor, clock: Clock) -> None:
        """Take the step of SGD without momentum, or of Adam, in one pass over the rows."""
        local = self.task.local
        rows = self.clients.rows[:width]
        assert self.clients.low is not None
        assert clock.lr is not None
        low = self.clients.low[:width]
        if not isinstance(self.optimizer, Adam):
            from fedquit.engine.cuda.triton_sgd import sgd_

            sgd_(rows, low, gradient, clock.lr, local.weight_decay)
            return
        from fedquit.engine.cuda.triton_adam import AdamRates, adam_

        adam = self.optimizer
        decay = 1 - clock.lr * (local.weight_decay if adam.decoupled else 0.0)
        c1, c2 = (torch.as_tensor(1 - beta**clock.number) for beta in (adam.beta1, adam.beta2))
        adam_(
            *(rows, low, (self.clients.slots["m"][:width], self.clients.slots["v"][:width]), gradient),
            AdamRates(clock.lr, decay, c1, c2),
            l2=0.0 if adam.decoupled else local.weight_decay,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
        )

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Clip each client's gradient, (width, row_size)."""
        layout = self.clients.layout
        local = self.task.local
        into = torch.zeros_like(gradient)
        layout.fill(into, vmap(lambda g: clipped(g, local))(layout.views(gradient)))
        return into

    def _after_step(self, new: Tensor, rows: Tensor, per_client: Sent) -> None:
        """Write into rows (width, row_size) what the task's hook makes of the step from them to `new`."""
        layout = self.clients.layout

        def hook(after: Params, before: Params, own: Sent) -> Params:
            return self.task.after_step(after, before, {**self.sent.shared, **own})

        layout.fill(rows, vmap(hook)(layout.views(new), layout.views(rows), per_client))

    def _gradient_rows(self, width: int, gradients: Gradients) -> Tensor:
        """Return the gradient as rows (width, row_size): by the kernels, by autograd, and where both, their sum."""
        layout = self.clients.layout
        names = list(layout.shapes)
        rows = self.gradient_buffer.gradients[:width]
        by_name = dict(zip(names, gradients[: len(names)], strict=True))
        layout.fill(rows, by_name, add_at=self.gradient_buffer.claimed)
        if not self.numerics.bf16:
            return rows
        direct = dict(zip(names, gradients[len(names) :], strict=True))  # by the parameters, beside their copies
        if all(g is None for g in direct.values()):
            return rows
        more = torch.zeros_like(self.clients.rows[:width])
        layout.fill(more, direct)
        return rows + more

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[ClientId, LocalResult]]:
        """Yield what each client's training led to, in the order of `jobs`."""
        views = self.clients.layout.views(self.clients.rows)
        stacked_params = {n: p.clone(memory_format=torch.contiguous_format) for n, p in views.items()}
        losses = self.losses.tolist()
        for row, job in enumerate(jobs):
            params = {n: p[row] for n, p in stacked_params.items()}
            if self.training_state is not None:
                params |= self.training_state.of_row(row)
            loss = losses[row] / job.steps if job.steps else math.nan
            answer = self.task.answer(params, job.sent)
            keep = self.task.keep(params, job.sent)
            # A view would keep the parameters of all clients in memory for as long as this one keeps its own.
            own = {name: {n: p.clone() for n, p in part.items()} for name, part in keep.items()}
            yield job.client, LocalResult(params, answer, own, loss)
