# SPDX-License-Identifier: Apache-2.0
"""Many clients in one computation: their parameters are rows of one buffer, and a step takes all of them one step on.

`work` holds the clients' state and the step; `layout`, `schedule`, `inputs` and `sent` are its parts. On a GPU steps
are captured as CUDA graphs and replayed (`capture`). On a CPU they run eagerly (`eager`), and those of small networks
are traced and replayed (`replay`). What a client computes is what `fedquit.engine.sequential` computes, up to the order
of the sums.

Measurements, programs, monitored tasks and optimizers that want the curvature go to `fedquit.engine.sequential`, client
by client on the same device: the former two ask few clients once, and clients that end at different steps would leave
most of a stack idle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from fedquit.core import ClientId, Measurement, Memory, Model, Params, Program, Reply, Sent, Split, Task
from fedquit.core.local_layers import LAYERS
from fedquit.core.types import is_monitored
from fedquit.data.federated import FederatedData
from fedquit.engine.api import Ask, ClientIndices, LocalResult, client_memory, make_reply
from fedquit.engine.cuda.ops import kernels_available
from fedquit.engine.local_layers import after_visit, at_client, own_layers
from fedquit.engine.optim import OPTIMIZERS
from fedquit.engine.plan import make_plan
from fedquit.engine.precision import Precision, computing
from fedquit.engine.sequential import SequentialEngine
from fedquit.engine.stacked.capture import CapturedSteps, warn_once
from fedquit.engine.stacked.compiled import MIN_CLIENTS, MIN_NUMBERS, MIN_STEPS, Compile, inductor
from fedquit.engine.stacked.eager import EagerSteps, Steps
from fedquit.engine.stacked.graph_cache import MAX_CAPTURED, GraphCache
from fedquit.engine.stacked.replay import MAX_NUMBERS, ReplayedSteps, TracedSteps, one_thread
from fedquit.engine.stacked.schedule import Job
from fedquit.engine.stacked.work import Numerics, Work
from fedquit.utils.names import lookup

log = logging.getLogger(__name__)
NO_COMPILER = (
    "Steps are not compiled, and run slower: this takes Triton and a GPU of compute capability 8.0 or more "
    '(engine.compile = "never" leaves this warning out).'
)


@dataclass
class StackedEngine:
    """Trains the clients of a simulated federation, many at once.

    Attributes:
        model: The network.
        data: All clients' examples, on the device that computes.
        memory: What the clients keep between rounds, by "client/name".
        width: How many clients at once, at most; 0: as many as are asked.
        precision: What networks compute in.
        graphs: Captured and traced steps, which engines over the same data set may share.
        compile: Whether steps on a GPU are compiled: "auto" for networks that the kernels do not cover, in trainings
            that are long enough; "never" leaves all that was written for such networks out.
        rounds: Of training that are planned in all, also before a run is resumed; "auto" counts their steps.
    """

    model: Model
    data: FederatedData
    memory: Memory
    width: int = 0
    precision: Precision = "float32"
    graphs: GraphCache = field(default_factory=GraphCache, repr=False)
    compile: Compile = "auto"
    rounds: int = 1
    _indices: dict[tuple[ClientId, Split, int], ClientIndices] = field(default_factory=dict, init=False, repr=False)

    @property
    def captures_graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs and replayed: on a GPU."""
        return self.data.y.device.type == "cuda"

    @property
    def uses_kernels(self) -> bool:
        """Whether convolutions, GroupNorm and SGD go to the Triton kernels."""
        return self.precision == "bf16" and self.captures_graphs and kernels_available()

    def run(self, ask: Ask) -> Iterator[Reply]:
        """Yield the replies, in the order of `ask.clients`; no more are held than clients train at once."""
        task = ask.task
        if isinstance(task, Program) or not _can_be_stacked(task):
            yield from SequentialEngine(self.model, self.data, self.memory, self.precision).run(ask)
            return
        waiting = list(ask.clients)
        retried = False
        while waiting:
            width = min(n for n in (self.width, self.graphs.max_clients, len(waiting)) if n)
            try:
                with computing(self.precision, self.data.y.device):
                    replies = self._train(ask, task, waiting[:width])
            except torch.OutOfMemoryError:
                retried = not retried and bool(self.graphs.captured)  # as many once more, without others' graphs
                if not retried and width == 1:
                    raise
                replies = []
            if not replies:  # outside of `except`, whose traceback holds the tensors of what failed
                self._free_memory(width, halve=not retried)
                continue
            yield from replies
            waiting = waiting[width:]
            retried = False

    def _free_memory(self, width: int, *, halve: bool) -> None:
        """Drop all graphs, and where that has not been enough, let half as many clients train at once from now on."""
        self.graphs.clear()
        torch.cuda.empty_cache()
        if halve:
            self.graphs.max_clients = width // 2
            log.warning("%d clients at once do not fit into memory: going on with %d.", width, width // 2)

    def _train(self, ask: Ask, task: Task, clients: Sequence[ClientId]) -> list[Reply]:
        """Train these clients at once."""
        with one_thread() if self.captures_graphs else contextlib.nullcontext():  # what a host does for a GPU is short
            jobs = self._jobs(ask, task, clients)
            results: dict[ClientId, LocalResult] = {}
            for alike in _grouped(jobs):
                results.update(self._train_alike(task, alike))
            return [self._reply(task, job, results[job.client]) for job in jobs]

    def _reply(self, task: Task, job: Job, result: LocalResult) -> Reply:
        examples = len(job.indices.at)
        return make_reply(self.memory, job.client, examples, after_visit(task, job.layers, result, examples))

    def _jobs(self, ask: Ask, task: Task, clients: Sequence[ClientId]) -> list[Job]:
        """Plan each client's work; clients without a memory share what the task prepares from what all were sent."""
        draws = self.data.dataset.look.draws if task.augments else 0
        label_shape = self.data.y.shape[1:]
        jobs = []
        common: tuple[Sent, Params] | None = None
        for client in clients:
            indices = self._indices_of(client, ask.split, ask.address.seed)
            seed = ask.address.seed_for(client)
            plan = make_plan(len(indices.at), task.local, seed, label_shape, draws)
            own = client_memory(self.memory, task, client)
            layers = own_layers(self.model, ask, own)
            own = {name: params for name, params in own.items() if name != LAYERS}
            if own or layers:
                prepared = self._prepared(task, {**at_client(self.model, ask, layers).sent, **own})
            else:
                common = common or self._prepared(task, ask.sent)
                prepared = common
            jobs.append(Job(client, indices, plan, *prepared, seed, layers))
        return jobs

    def _prepared(self, task: Task, sent: Sent) -> tuple[Sent, Params]:
        """Return what a client was sent, as its task prepares it, and the parameters that it begins with."""
        with torch.no_grad():
            prepared = task.prepare(self.model, {**sent})
            return prepared, task.begin(prepared)

    def _indices_of(self, client: ClientId, split: Split, seed: int) -> ClientIndices:
        """Return a client's examples, which are the same in every round."""
        key = client, split, seed
        if key not in self._indices:
            self._indices[key] = ClientIndices.of(self.data, client, split, seed)
        return self._indices[key]

    def _train_alike(self, task: Task, jobs: Sequence[Job]) -> Iterator[tuple[ClientId, LocalResult]]:
        """Train clients whose parameters have the same names and shapes."""
        jobs = sorted(jobs, key=lambda job: -job.steps)
        steps = self._captured(task, jobs) if self.captures_graphs else self._on_cpu(task, jobs)
        steps.run(jobs)
        yield from steps.work.results(jobs)

    def _on_cpu(self, task: Task, jobs: Sequence[Job]) -> Steps:
        """Steps that run eagerly, or from traced steps where the network is small."""
        work = self._work(task, jobs, jobs[0].steps)
        if self.precision == "bf16" or work.clients.rows.numel() > MAX_NUMBERS:
            return EagerSteps(work)
        return ReplayedSteps(work, self.graphs.traced.setdefault(_graph_key(task, jobs, 0), TracedSteps()))

    def _captured(self, task: Task, jobs: Sequence[Job]) -> Steps:
        """Steps of CUDA graphs: those of an earlier round, or new ones."""
        capacity = 1 << max(jobs[0].steps - 1, 0).bit_length()  # so that a longer plan seldom needs a new capture
        key = _graph_key(task, jobs, capacity)
        steps = self.graphs.captured.pop(key, None)
        if steps is None:
            self.graphs.shrink(MAX_CAPTURED - 1)
            work = self._work(task, jobs, capacity)
            compiler = inductor if self._compiles(jobs, capacity) else None
            steps = CapturedSteps(work, self.graphs.stream(self.data.y.device), compiler, self.graphs.told)
        self.graphs.captured[key] = steps
        steps.work.task = task
        steps.prepare(jobs)
        return steps

    def _is_worth_compiling(self, jobs: Sequence[Job], steps: int) -> bool:
        """Whether steps are to be compiled; it follows from sizes and the plan, so that runs repeat and resume exactly.

        Args:
            jobs: Of the clients that train at once.
            steps: Of a round, counted up to a power of two.
        """
        if self.compile != "auto":
            return self.compile == "always"
        numbers = len(jobs) * sum(tensor.numel() for tensor in jobs[0].start.values())
        enough = len(jobs) >= MIN_CLIENTS and numbers >= MIN_NUMBERS and self.rounds * steps >= MIN_STEPS
        return enough and self.precision == "bf16"

    def _compiles(self, jobs: Sequence[Job], steps: int) -> bool:
        """Whether they are: without what it takes, a warning says so, unless it was asked for."""
        worth_it = self._is_worth_compiling(jobs, steps)
        if worth_it and self.compile == "auto" and not self.uses_kernels:
            warn_once(NO_COMPILER, self.graphs.told)
            return False
        return worth_it

    def _work(self, task: Task, jobs: Sequence[Job], steps: int) -> Work:
        numerics = Numerics(
            bf16=self.precision == "bf16",
            kernels=self.uses_kernels,
            captured=self.captures_graphs,
            general=self.captures_graphs and self._is_worth_compiling(jobs, steps),
        )
        return Work(self.model, self.data.dataset, task, jobs, steps, numerics)


def _can_be_stacked(task: Task) -> bool:
    if isinstance(task, Measurement) or is_monitored(task):
        return False
    optimizer = lookup(OPTIMIZERS, task.local.optimizer, "optimizer")
    return not optimizer.wants_curvature  # it differentiates twice


def _grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group clients by the names of their parameters: a new client lacks what others have in their memory."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault((*sorted(job.sent), *sorted(job.start)), []).append(job)
    return list(groups.values())


def _graph_key(task: Task, jobs: Sequence[Job], capacity: int) -> object:
    """Return all that a graph depends on, but for what it reads from memory.

    Args:
        task: Its type and fields; learning rate and epochs are read from memory.
        jobs: Their number, and the shapes of what the clients were sent.
        capacity: The most steps that the schedule holds.
    """
    own = tuple((f.name, getattr(task, f.name)) for f in fields(task) if f.name not in ("local", "remember"))
    local = replace(task.local, lr=1.0, epochs=1.0)
    first = jobs[0]
    names = sorted(first.sent)
    sent = tuple((name, _shapes(first.sent[name])) for name in names)
    same = tuple(all(job.sent[name] is first.sent[name] for job in jobs) for name in names)
    return type(task), own, local, len(jobs), capacity, sent, same, _shapes(first.start)


def _shapes(params: Mapping[str, torch.Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((n, p.shape) for n, p in params.items())
