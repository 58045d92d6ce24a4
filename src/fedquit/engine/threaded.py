# SPDX-License-Identifier: Apache-2.0
"""Several clients at once on a CPU, each in a thread of its own, one step after the other.

A network that is too large to be stacked spends its time inside torch, which releases the GIL. One core per client
never waits, where two cores on one client synchronise in every operation.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import cast

import torch
from torch import Tensor

from fedquit.core import ClientId, Memory, Model, Params, Reply, Sent, Split
from fedquit.core.local_layers import LocalModel
from fedquit.core.projection import Projection, projection_of
from fedquit.data.federated import FederatedData
from fedquit.engine.api import Ask, Examples, LocalResult, client_memory, make_reply
from fedquit.engine.precision import Precision, computing
from fedquit.engine.sequential import examples_by_split, run_visit
from fedquit.engine.training import training_form


@dataclass(frozen=True)
class ThreadModel:
    """A thread's own copy of a network. Fresh parameters come from torch's one generator, so they take a lock."""

    model: Model
    generator_lock: Lock

    def init(self, seed: int) -> Params:
        """Return fresh parameters."""
        with self.generator_lock:
            return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(params, x)

    def projection(self, params: Params, x: Tensor) -> Projection | None:
        """Return the factors of the logits where the network tells them."""
        return projection_of(self.model, params, x)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters; an AttributeError for a network that does not tell them."""
        return self._local_model.names

    @property
    def local_names(self) -> frozenset[str]:
        """The names of those that stay at the clients."""
        return self._local_model.local_names

    def first_layers(self, seed: int) -> Params:
        """Return the local layers of a client that comes for the first time."""
        with self.generator_lock:
            return self._local_model.first_layers(seed)

    @property
    def _local_model(self) -> LocalModel:
        return cast("LocalModel", self.model)

    @property
    def training(self) -> Model | None:
        """The network as ordinary training computes it, where that differs."""
        return training_form(self.model)


@dataclass(frozen=True)
class ThreadedEngine:
    """Trains the clients of a simulated federation, as many at once as there are threads.

    Attributes:
        model: The network.
        data: All clients' examples.
        memory: What the clients keep between rounds, by "client/name".
        workers: How many clients at once.
        precision: What networks compute in on a GPU.
    """

    model: Model
    data: FederatedData
    memory: Memory
    workers: int
    precision: Precision = "float32"
    # functional_call swaps a module's parameters while it computes, so no two threads may share a module.
    _models: SimpleQueue[Model] = field(default_factory=SimpleQueue, init=False, repr=False)

    def __post_init__(self) -> None:
        generator_lock = Lock()
        training_form(self.model, self.data.x)  # before the copies are made
        for _ in range(self.workers):
            self._models.put(ThreadModel(copy.deepcopy(self.model), generator_lock))

    def run(self, ask: Ask) -> Iterator[Reply]:
        """Yield the replies, in the order of `ask.clients`; no more are held than clients are at work."""
        threads = torch.get_num_threads()
        workers = max(1, min(self.workers, len(ask.clients)))
        initializer = partial(torch.set_num_threads, max(1, threads // workers))
        pending: deque[tuple[ClientId, Future[tuple[int, LocalResult]]]] = deque()
        pool = ThreadPoolExecutor(workers, initializer=initializer)
        try:
            with computing(self.precision, self.data.y.device):  # the switches are those of all threads
                for client in ask.clients:
                    examples = examples_by_split(self.data, ask, client)
                    memory = client_memory(self.memory, ask.task, client)
                    pending.append((client, pool.submit(self._train, ask, client, examples, memory)))
                    if len(pending) > workers:
                        yield self._next_reply(pending)
                while pending:
                    yield self._next_reply(pending)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # a thread that sets its own number sets that of all that begin later

    def _train(
        self, ask: Ask, client: ClientId, examples: Mapping[Split, Examples], memory: Sent
    ) -> tuple[int, LocalResult]:
        model = self._models.get()
        try:
            return run_visit(model, ask, client, examples, memory)
        finally:
            self._models.put(model)

    def _next_reply(self, pending: deque[tuple[ClientId, Future[tuple[int, LocalResult]]]]) -> Reply:
        client, future = pending.popleft()
        used, result = future.result()
        return make_reply(self.memory, client, used, result)
