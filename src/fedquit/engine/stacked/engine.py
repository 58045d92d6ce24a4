# SPDX-License-Identifier: Apache-2.0
"""Many clients in one computation: their parameters are rows of one buffer, and a step takes all of them one step on.

Clients differ in how many steps they take and in the size of their last batch. They are sorted by their steps, so that
those still at work are always the first rows; a batch that is not full is padded, and the padding weighs nothing. What
a client computes is what `engine.sequential` computes, up to the order of the sums.

On a GPU a step is recorded once for each number of clients and replayed: the clock, the learning rate and the plan are
read from memory. With `precision = "bf16"` networks compute in bfloat16 on copies of parameters that stay in float32.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from torch.func import vmap

from fedquit.core import Batch, ClientId, Memory, Model, Params, Reply, Sent, Split, Task
from fedquit.core.params import placed
from fedquit.data.federated import FederatedData
from fedquit.data.preprocessing import AsStored
from fedquit.engine.cuda.ops import Rerouted, Room, kernels_at_hand
from fedquit.engine.optim import OPTIMIZERS, Signal, clipped
from fedquit.engine.plan import Plan, make_plan
from fedquit.engine.precision import Precision, Reading, computing, on_gpu
from fedquit.engine.sequential import Ask, Outcome, Own, SequentialEngine, at_home, reply_of
from fedquit.engine.stacked.cpu_ops import Batched
from fedquit.engine.stacked.replay import LARGEST, Replays
from fedquit.utils.names import lookup

log = logging.getLogger(__name__)
ALIGNED = 64  # numbers
READY_BYTES = 4 << 30  # the most that a round's examples may take once they are ready
READY_AT_ONCE = 1 << 14  # examples
RECORDED = 6  # kinds of work whose recordings are kept: a method has two or three, and each holds some gigabytes


@dataclass(frozen=True)
class Low:
    """A network that computes in bfloat16; of parameters that have a copy in bfloat16, it takes that."""

    model: Model
    known: Sequence[tuple[Params, Params]] = ()
    rerouted: bool = False
    room: Room | None = None

    def init(self, seed: int) -> Params:
        """Fresh parameters, in the network's own precision."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits, in float32."""
        low = next((copy for own, copy in self.known if own is params), None)
        if low is None:
            low = {n: p.to(torch.bfloat16) for n, p in params.items()}
        with Rerouted(self.room) if self.rerouted else contextlib.nullcontext():
            return self.model(low, x).float()


def evaluation_model_of(model: Model, precision: Precision, device: torch.device) -> Model:
    """A network as it is evaluated: in the precision in which it was trained."""
    if precision == "bf16":
        model = Low(model, (), on_gpu(device) and kernels_at_hand())
    return Reading(model, precision, device) if on_gpu(device) else model


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a client's row."""

    shapes: Mapping[str, tuple[int, ...]]
    convolutions_last: bool  # their output channels lie innermost, as the kernels want them

    @cached_property
    def starts(self) -> list[int]:
        """Where each parameter begins, and at last the size of a row: at multiples that wide loads want."""
        sizes = (-(-math.prod(s) // ALIGNED) * ALIGNED for s in self.shapes.values())
        return list(accumulate(sizes, initial=0))

    def _moved(self, name: str) -> bool:
        return self.convolutions_last and len(self.shapes[name]) == 4

    def views(self, rows: Tensor) -> Params:
        """The parameters of so many clients, by name, each with the clients in front."""
        found: Params = {}
        for (name, shape), start in zip(self.shapes.items(), self.starts, strict=False):
            part = rows[:, start : start + math.prod(shape)]
            if self._moved(name):
                o, i, high, wide = shape
                found[name] = part.view(-1, high, wide, i, o).permute(0, 4, 3, 1, 2)
            else:
                found[name] = part.view(-1, *shape)
        return found

    @property
    def extents(self) -> dict[int, int]:
        """How many numbers each parameter has, by where it begins."""
        return dict(zip(self.starts, map(math.prod, self.shapes.values()), strict=False))

    def fill(self, rows: Tensor, params: Mapping[str, Tensor | None], kept: Container[int] = ()) -> None:
        """Write parameters, or gradients, into rows, or add them to what is kept where one begins; None is zero."""
        into, source = [], []
        for (name, view), start in zip(self.views(rows).items(), self.starts, strict=False):
            given = params[name]
            if start in kept:
                if given is not None:
                    view.add_(given)
            elif given is None:
                view.zero_()
            else:
                into.append(view)
                source.append(given.expand_as(view))
        if into:
            torch._foreach_copy_(into, source)


@dataclass(frozen=True)
class Schedule:
    """The plans of several clients, padded to the same shape: (steps, clients, batch, …)."""

    at: Tensor  # positions in the data set
    share: Tensor  # the weight of each example in the mean of its batch; 0 for padding
    u: Tensor
    fixed: Tensor
    forget: Tensor
    variation: Tensor

    @classmethod
    def empty(cls, steps: int, clients: int, batch: int, label: Sequence[int], draws: int) -> Schedule:
        """Nothing but padding."""
        shape = (steps, clients, batch)
        at, share = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.float64)
        u, fixed = (torch.zeros(*shape, *label) for _ in range(2))
        return cls(at, share, u, fixed, torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, draws))

    def to(self, device: torch.device) -> Schedule:
        """In that device's memory."""
        return Schedule(*(getattr(self, f.name).to(device) for f in fields(self)))

    def fill(self, jobs: Sequence[Job]) -> None:
        """Take these clients' plans, in place; all but the drawing of lots is done where the schedule lies."""
        device = self.at.device
        batches = [(t, k, size) for k, job in enumerate(jobs) for t, size in enumerate(job.plan.sizes)]
        step, row, sizes = torch.tensor(batches, dtype=torch.long).view(-1, 3).to(device).unbind(1)
        at = torch.cat([job.own.at[job.plan.order] for job in jobs]).to(device)
        first = sizes.cumsum(0) - sizes
        batch = torch.arange(len(sizes), device=device)
        which = batch.repeat_interleave(sizes, output_size=len(at))  # the batch of each example
        place = step[which], row[which], torch.arange(len(at), device=device) - first[which]
        for f in fields(self):
            getattr(self, f.name).zero_()
        self.at[step, row] = at[first].unsqueeze(-1)  # padding is of the same batch: a stranger's may overflow
        self.at[place] = at
        self.share[place] = 1 / sizes.double()[which]
        self.u[place] = torch.cat([job.plan.uniforms for job in jobs]).to(device)
        self.fixed[place] = torch.cat([job.own.fixed[job.plan.order] for job in jobs]).to(device)
        self.forget[place] = torch.cat([job.own.forget[job.plan.order] for job in jobs]).to(device)
        self.variation[place] = torch.cat([job.plan.draws for job in jobs]).to(device)

    def row(self, width: int, t: int | Tensor, size: int) -> Schedule:
        """Step t of the first clients, so much of a batch; where t is a tensor, whatever it will hold by then."""
        return Schedule(*(_row(getattr(self, f.name), width, t)[:, :size] for f in fields(self)))


def _row(table: Tensor, width: int, t: int | Tensor) -> Tensor:
    return table[t, :width] if isinstance(t, int) else table.index_select(0, t)[0, :width]


class Work:
    """Several clients at one task: their rows, and the step that takes them on."""

    def __init__(self, engine: StackedEngine, task: Task, jobs: Sequence[Job], steps: int) -> None:
        data, first = engine.data, jobs[0]
        self.model, self.dataset, self.task = engine.model, data.dataset, task
        self.optimizer = lookup(OPTIMIZERS, task.local.optimizer, "optimizer")
        self.device = data.y.device
        self.recorded = engine.recording
        self.side = engine.works.stream(self.device) if self.recorded else None
        self.kernels = engine.kernels
        self.batched = not engine.recording and not engine.low
        shapes = {n: tuple(p.shape) for n, p in first.begun.items()}
        self.layout = Layout(shapes, convolutions_last=self.kernels or self.batched)
        like = next(iter(first.begun.values()))
        self.rows = torch.zeros(len(jobs), self.layout.starts[-1], dtype=like.dtype, device=self.device)
        self.low = self.rows.to(torch.bfloat16) if engine.low else None
        self.room = Room(self.rows if self.low is None else self.low, self.layout.extents)
        self.slots = {s: torch.zeros_like(self.rows) for s in self.optimizer.slots if _used(s, task)}
        self.losses = torch.zeros(len(jobs), dtype=like.dtype, device=self.device)
        self.clock = torch.zeros(1, dtype=torch.long, device=self.device)
        self.lr = torch.zeros((), dtype=torch.float64, device=self.device)
        self.draws = self.dataset.look.draws if task.augments else 0
        self.schedule = Schedule.empty(steps, len(jobs), task.local.batch_size, self.dataset.y.shape[1:], self.draws)
        self.schedule = self.schedule.to(self.device)
        self.ready = self._room_for_examples() if self.recorded else None
        self.shared: dict[str, Params] = {}
        self.each: dict[str, Params] = {}
        self.shared_low: dict[str, Params] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.replays: Replays | None = None
        self.sizes: list[int] = []  # of the largest batch of each step
        self._known_leaves: dict[int, Params] = {}
        self._take(jobs)

    def _take(self, jobs: Sequence[Job]) -> None:
        """What the clients were sent; tensors that a recorded step reads stay where they are."""
        names = jobs[0].sent.keys()
        same = {n for n in names if all(job.sent[n] is jobs[0].sent[n] for job in jobs)}
        shared = {n: placed(jobs[0].sent[n], self.device) for n in names if n in same}
        each = {n: _stacked([placed(job.sent[n], self.device) for job in jobs]) for n in names if n not in same}
        if self.recorded and self.shared.keys() == shared.keys() and self.each.keys() == each.keys():
            _copy(self.shared, shared)
            _copy(self.each, each)
        else:
            own = (
                {n: {m: p.clone() for m, p in part.items()} for n, part in shared.items()} if self.recorded else shared
            )
            self.shared, self.each = own, each
            self.shared_low = (
                {n: {m: torch.empty_like(p, dtype=torch.bfloat16) for m, p in part.items()} for n, part in own.items()}
                if self.low is not None
                else {}
            )
        for n, part in self.shared_low.items():
            for m, p in part.items():
                p.copy_(self.shared[n][m])

    def load(self, jobs: Sequence[Job], lr: float) -> None:
        """Begin anew: the clients in the order of their steps, the most first."""
        self._take(jobs)
        if all(job.begun is jobs[0].begun for job in jobs):
            self.layout.fill(self.rows, {n: p.unsqueeze(0) for n, p in placed(jobs[0].begun, self.device).items()})
        else:
            self.layout.fill(self.rows, _stacked([placed(job.begun, self.device) for job in jobs]))
        if self.low is not None:
            self.low.copy_(self.rows)
        for slot in self.slots.values():
            slot.zero_()
        self.losses.zero_()
        self.clock.zero_()
        self.lr.fill_(lr)
        self.schedule.fill(jobs)
        self.sizes = [max(sizes) for sizes in zip_longest(*(job.plan.sizes for job in jobs), fillvalue=0)]
        if self.ready is not None:
            self._make_ready(max(len(job.plan.sizes) for job in jobs))

    def _room_for_examples(self) -> Tensor | None:
        """Where all examples of a round lie once they are ready; None where that would take too much memory."""
        shape = *self.schedule.at.shape, *self.dataset.shape
        dtype = torch.bfloat16 if self.low is not None else self.rows.dtype
        if isinstance(self.dataset.look, AsStored) or math.prod(shape) * dtype.itemsize > READY_BYTES:
            return None
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _make_ready(self, steps: int) -> None:
        assert self.ready is not None
        at_once = max(1, READY_AT_ONCE // self.schedule.at[0].numel())
        for start in range(0, steps, at_once):
            some = slice(start, min(start + at_once, steps))
            into = self.ready[some]
            into.copy_(self._seen(self.schedule.at[some], self.schedule.variation[some]).view(into.shape))

    def run(self, steps: Sequence[int]) -> None:
        """All steps; `steps` are those of each client, the most first."""
        for t in range(steps[0]):
            width = sum(1 for s in steps if s > t)
            if self.recorded:
                self.graphs[width].replay()
            else:
                self._step(width, t)

    def record(self, widths: Sequence[int]) -> None:
        """Record a step for each of these numbers of clients, once its kernels are compiled and it has run."""
        if self.kernels:
            from fedquit.engine.cuda.triton_common import compiled_ahead

            with compiled_ahead():  # all kernels of all steps at once
                for width in widths:
                    self._first_step(width)
        side = self.side
        assert side is not None
        for width in widths:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._first_step(width)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=side):
                self._step(width)
            self.graphs[width] = graph

    def _first_step(self, width: int) -> None:
        self.clock.zero_()  # it may stand at the end of the last round, past which there is nothing to read
        self._step(width)

    def _step(self, width: int, t: int | None = None) -> None:
        self.room.open()
        now = self.clock if t is None else t
        plan = self.schedule.row(width, now, self.sizes[t] if t is not None else self.task.local.batch_size)
        own, copies = self._own(width), self._leaves(self.low[:width]) if self.low is not None else {}
        each = {n: {m: p[:width] for m, p in part.items()} for n, part in self.each.items()}
        x = self._seen(plan.at, plan.variation) if self.ready is None else _row(self.ready, width, now)
        x = x.view(width, -1, *self.dataset.shape)
        batch = x, self.dataset.y[plan.at], plan.u, plan.fixed, plan.forget
        try:
            if self.replays is not None:
                loss, found = self.replays.take(self._gradients, self.shared, plan.share, own, each, batch)
            else:
                loss, found = self._gradients(self.shared, plan.share, own, copies, each, *batch)
        finally:  # also where memory ran out: nothing may go on beside, and a recording ends on one stream
            self.room.meet()
        with torch.no_grad():
            self.losses[:width] += loss.detach()
            number = (self.clock[0] + 1).double() if t is None else t + 1  # whole numbers give powers in float32
            self._update(width, found, each, number)
            self.clock += 1

    def _gradients(
        self, shared: Sent, share: Tensor, own: Params, copies: Params, each: Sent, *batch: Tensor
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Each client's loss, and the gradient by the copies in lower precision and by the parameters themselves."""
        losses = vmap(partial(self._loss, shared))(own, copies, each, *batch)
        loss = (losses * share.to(losses.dtype)).sum(1)
        return loss, torch.autograd.grad(loss.sum(), [*copies.values(), *own.values()], allow_unused=True)

    def _own(self, width: int) -> Params:
        """The parameters of the first clients; they stay where they are, and so does what points at them."""
        if width not in self._known_leaves:
            self._known_leaves[width] = self._leaves(self.rows[:width])
        return self._known_leaves[width]

    def _leaves(self, rows: Tensor) -> Params:
        return {n: p.detach().requires_grad_() for n, p in self.layout.views(rows).items()}

    def _seen(self, at: Tensor, variation: Tensor) -> Tensor:
        """The examples at these positions as the network reads them, in one row."""
        stored, look = self.dataset.x[at.flatten()], self.dataset.look
        return look.varied(stored, variation.flatten(0, -2)) if self.draws else look.plain(stored)

    def _loss(
        self,
        shared: Sent,
        own: Params,
        copies: Params,
        each: Sent,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        fixed: Tensor,
        forget: Tensor,
    ) -> Tensor:
        """Of one client, for each of its examples."""
        model = self.model
        if self.low is not None:
            known = [(own, copies), *((self.shared[n], part) for n, part in self.shared_low.items())]
            model = Low(self.model, known, self.kernels, self.room)
        with Batched() if self.batched else contextlib.nullcontext():
            return self.task.loss(model, own, {**shared, **each}, Batch(x, y, u, fixed, forget))

    def _update(self, width: int, found: Sequence[Tensor | None], each: Sent, t: int | Tensor) -> None:
        rows, local = self.rows[:width], self.task.local
        gradient = self._gradient(width, found)
        lr = self.lr if self.recorded else None
        plain = type(self.task).after_step is Task.after_step
        if local.clip or local.clip_tensor:
            views = self.layout.views(gradient.to(rows.dtype))
            gradient = torch.zeros_like(rows)
            self.layout.fill(gradient, vmap(lambda g: clipped(g, local))(views))
        elif self.kernels and plain and local.optimizer == "sgd" and not local.momentum and self.low is not None:
            from fedquit.engine.cuda.triton_gemm import sgd_

            sgd_(rows, self.low[:width], gradient, self.lr, local.weight_decay)
            return
        signal = Signal(t, {"": gradient.to(rows.dtype)}, lr=lr)
        slots = {s: {"": v[:width]} for s, v in self.slots.items()}
        stepped, kept = self.optimizer.step({"": rows}, slots, signal, local)
        new = stepped[""]
        if not plain:
            both = self.layout.views(new), self.layout.views(rows), each
            self.layout.fill(rows, vmap(lambda a, b, e: self.task.after_step(a, b, {**self.shared, **e}))(*both))
        else:
            rows.copy_(new)
        for s, v in self.slots.items():
            v[:width].copy_(kept[s][""])
        if self.low is not None:
            self.low[:width].copy_(rows)

    def _gradient(self, width: int, found: Sequence[Tensor | None]) -> Tensor:
        """As rows: through the copies in lower precision, and through the parameters where a loss has them too."""
        names = list(self.layout.shapes)
        rows = self.room.gradients[:width]
        self.layout.fill(rows, dict(zip(names, found[: len(names)], strict=True)), self.room.claimed)
        directly = dict(zip(names, found[len(names) :], strict=True)) if self.low is not None else {}
        if any(g is not None for g in directly.values()):
            more = torch.zeros_like(self.rows[:width])
            self.layout.fill(more, directly)
            return rows + more
        return rows

    def outcomes(self, jobs: Sequence[Job], steps: Sequence[int]) -> Iterator[tuple[ClientId, Outcome]]:
        """What came of each client's work."""
        views = self.layout.views(self.rows)
        whole = {n: p.clone(memory_format=torch.contiguous_format) for n, p in views.items()}
        losses = self.losses.tolist()
        for row, job in enumerate(jobs):
            params = {n: p[row] for n, p in whole.items()}
            loss = losses[row] / steps[row] if steps[row] else math.nan
            answer, kept = self.task.answer(params, job.sent), self.task.keep(params, job.sent)
            own = {name: {n: p.clone() for n, p in part.items()} for name, part in kept.items()}  # without the others'
            yield job.client, Outcome(params, answer, own, loss)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Operations this short gain nothing from a second thread, and wait long for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _used(slot: str, task: Task) -> bool:
    return slot != "velocity" or task.local.momentum > 0


def _stacked(parts: Sequence[Params]) -> Params:
    return {n: torch.stack([part[n] for part in parts]) for n in parts[0]}


def _copy(into: Mapping[str, Params], source: Mapping[str, Params]) -> None:
    for name, part in source.items():
        for n, p in part.items():
            into[name][n].copy_(p)


@dataclass(frozen=True)
class Job:
    """One client's work: its examples, its plan, what it was sent and what it begins with."""

    client: ClientId
    own: Own
    plan: Plan
    sent: Sent
    begun: Params


class Recordings(dict[object, Work | Replays]):
    """By what they depend on, the last used last; they serve every engine over the same data set."""

    fits = 0  # how many clients go at once, once memory has run out; 0: it never has
    _stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one that all are recorded on: torch keeps memory for matrix products with every stream it has seen."""
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    @property
    def recorded(self) -> list[object]:
        """What was recorded on a GPU, and holds its memory."""
        return [kind for kind, work in self.items() if isinstance(work, Work)]

    def keep(self, most: int) -> None:
        """Of what was recorded, only so many: the last used."""
        for kind in self.recorded[: max(0, len(self.recorded) - most)]:
            del self[kind]


@dataclass
class StackedEngine:
    """The clients of a simulated federation, many at once."""

    model: Model
    data: FederatedData
    homes: Memory
    width: int = 0  # how many at once, at most; 0: as many as are asked
    precision: Precision = "float32"
    works: Recordings = field(default_factory=Recordings, repr=False)
    owns: dict[tuple[ClientId, Split, int], Own] = field(default_factory=dict, init=False, repr=False)

    @property
    def recording(self) -> bool:
        """Whether steps are recorded and replayed."""
        return self.data.y.device.type == "cuda"

    @property
    def low(self) -> bool:
        """Whether networks compute in bfloat16."""
        return self.precision == "bf16"

    @property
    def kernels(self) -> bool:
        """Whether convolutions and normalisations go to kernels of our own."""
        return self.low and self.recording and kernels_at_hand()

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`."""
        if lookup(OPTIMIZERS, ask.task.local.optimizer, "optimizer").wants_curvature:
            alone = SequentialEngine(self.model, self.data, self.homes, self.precision)  # it differentiates twice
            yield from alone.run(ask)
            return
        waiting, again = list(ask.clients), False
        while waiting:
            width = min(n for n in (self.width, self.works.fits, len(waiting)) if n)
            try:
                with computing(self.precision, self.data.y.device):
                    replies = self._together(ask, waiting[:width])
            except torch.OutOfMemoryError:
                again = not again and bool(self.works.recorded)  # as many once more, without what others have left
                if not again and width == 1:
                    raise
                replies = []
            if not replies:  # by now what failed is let go of, too
                self._make_room(width, halve=not again)
                continue
            yield from replies
            waiting, again = waiting[width:], False

    def _make_room(self, width: int, *, halve: bool) -> None:
        self.works.clear()
        torch.cuda.empty_cache()
        if halve:
            self.works.fits = width // 2
            log.warning("%d clients at once do not fit into memory: going on with %d.", width, self.works.fits)

    def _together(self, ask: Ask, clients: Sequence[ClientId]) -> list[Reply]:
        with _one_thread() if self.recording else contextlib.nullcontext():  # what a CPU prepares for a GPU is short
            return self._all_at_once(ask, clients)

    def _all_at_once(self, ask: Ask, clients: Sequence[ClientId]) -> list[Reply]:
        jobs = self._jobs(ask, clients)
        kinds: dict[tuple[str, ...], list[Job]] = {}
        for job in jobs:  # a client that has not kept yet what others have works with others like it
            kinds.setdefault((*sorted(job.sent), *sorted(job.begun)), []).append(job)
        done = {c: reply for alike in kinds.values() for c, reply in self._alike(ask, alike)}
        return [reply_of(self.homes, job.client, len(job.own.at), done[job.client]) for job in jobs]

    def _jobs(self, ask: Ask, clients: Sequence[ClientId]) -> list[Job]:
        task, draws = ask.task, self.data.dataset.look.draws if ask.task.augments else 0
        label = self.data.y.shape[1:]
        jobs = []
        common: tuple[Sent, Params] | None = None
        for client in clients:
            own = self._own(client, ask.split, ask.address.seed)
            plan = make_plan(len(own.at), task.local, ask.address.seed_for(client), label, draws)
            home = at_home(self.homes, task, client)
            with torch.no_grad():
                if home or common is None:
                    sent = task.prepare(self.model, {**ask.sent, **home})
                    prepared = sent, task.begin(sent)
                    common = common if home else prepared
                else:
                    prepared = common
            jobs.append(Job(client, own, plan, *prepared))
        return jobs

    def _own(self, client: ClientId, split: Split, seed: int) -> Own:
        """A client's view of the data, the same in every round."""
        key = client, split, seed
        if key not in self.owns:
            self.owns[key] = Own.of(self.data, client, split, seed)
        return self.owns[key]

    def _alike(self, ask: Ask, jobs: list[Job]) -> Iterator[tuple[ClientId, Outcome]]:
        jobs = sorted(jobs, key=lambda job: -len(job.plan.sizes))
        steps = [len(job.plan.sizes) for job in jobs]
        work = self._work(ask.task, jobs, steps)
        with _one_thread() if work.replays is not None else contextlib.nullcontext():
            work.load(jobs, ask.task.local.lr)
            work.run(steps)
        yield from work.outcomes(jobs, steps)

    def _on_cpu(self, work: Work, task: Task, jobs: Sequence[Job]) -> Work:
        if not self.low and work.rows.numel() <= LARGEST:
            replays = self.works.setdefault(("replays", _kind(task, jobs, 0)), Replays())
            work.replays = replays if isinstance(replays, Replays) else None
        return work

    def _work(self, task: Task, jobs: Sequence[Job], steps: Sequence[int]) -> Work:
        if not self.recording:
            return self._on_cpu(Work(self, task, jobs, steps[0]), task, jobs)
        room = 1 << max(steps[0] - 1, 0).bit_length()  # so that a longer plan seldom needs a new recording
        kind = _kind(task, jobs, room)
        work = self.works.pop(kind, None)
        if work is None:
            self.works.keep(RECORDED - 1)
            work = Work(self, task, jobs, room)
        assert isinstance(work, Work)
        self.works[kind] = work
        work.task = task
        widths = {sum(1 for s in steps if s > t) for t in range(steps[0])}
        if not widths <= work.graphs.keys():
            work.record(sorted(widths - work.graphs.keys(), reverse=True))
        return work


def _kind(task: Task, jobs: Sequence[Job], room: int) -> object:
    """All that a recorded step depends on but for what it reads from memory."""
    own = tuple((f.name, getattr(task, f.name)) for f in fields(task) if f.name not in ("local", "remember"))
    local = replace(task.local, lr=1.0, epochs=1.0)
    first = jobs[0]
    sent = tuple((name, tuple((n, p.shape) for n, p in part.items())) for name, part in sorted(first.sent.items()))
    same = tuple(all(job.sent[name] is first.sent[name] for job in jobs) for name in sorted(first.sent))
    return type(task), own, local, len(jobs), room, sent, same, tuple((n, p.shape) for n, p in first.begun.items())
