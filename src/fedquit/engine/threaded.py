# SPDX-License-Identifier: Apache-2.0
"""Several clients at once on a CPU, each on a core of its own, one step after the other.

A network that is too large to be stacked spends its time inside torch, which lets go of Python meanwhile. A core that
works alone on a client waits for nobody, where two cores on one client wait for each other in every operation.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock

import torch
from torch import Tensor

from fedquit.core import ClientId, Memory, Model, Params, Reply, Sent
from fedquit.data.federated import FederatedData
from fedquit.engine.precision import Precision, computing
from fedquit.engine.sequential import Ask, Examples, Outcome, Own, at_home, reply_of, run_client


@dataclass(frozen=True)
class Copy:
    """A network of one thread's own; fresh parameters come from torch's one generator, so threads take turns."""

    own: Model
    turn: Lock

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        with self.turn:
            return self.own.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""
        return self.own(params, x)


@dataclass(frozen=True)
class ThreadedEngine:
    """The clients of a simulated federation, as many at once as there are threads."""

    model: Model
    data: FederatedData
    homes: Memory
    workers: int
    precision: Precision = "float32"
    # A module is lent other parameters while it computes: each thread needs one that nobody else computes with.
    _models: SimpleQueue[Model] = field(default_factory=SimpleQueue, init=False, repr=False)

    def __post_init__(self) -> None:
        one_at_a_time = Lock()
        for _ in range(self.workers):
            self._models.put(Copy(copy.deepcopy(self.model), one_at_a_time))

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`; no more are held than clients are at work."""
        before = torch.get_num_threads()
        workers = max(1, min(self.workers, len(ask.clients)))
        each = partial(torch.set_num_threads, max(1, before // workers))
        waiting: deque[tuple[ClientId, int, Future[Outcome]]] = deque()
        pool = ThreadPoolExecutor(workers, initializer=each)
        try:
            with computing(self.precision, self.data.y.device):  # of all threads at once
                for client in ask.clients:
                    mine = Examples.of(self.data, Own.of(self.data, client, ask.split, ask.address.seed))
                    sent = {**ask.sent, **at_home(self.homes, ask.task, client)}
                    waiting.append((client, len(mine.y), pool.submit(self._work, ask, client, mine, sent)))
                    if len(waiting) > workers:
                        yield self._next(waiting)
                while waiting:
                    yield self._next(waiting)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # a thread that sets its own number sets that of all that begin later

    def _work(self, ask: Ask, client: ClientId, mine: Examples, sent: Sent) -> Outcome:
        model = self._models.get()
        try:
            return run_client(model, ask.task, mine, sent, ask.address.seed_for(client))
        finally:
            self._models.put(model)

    def _next(self, waiting: deque[tuple[ClientId, int, Future[Outcome]]]) -> Reply:
        client, examples, work = waiting.popleft()
        return reply_of(self.homes, client, examples, work.result())
