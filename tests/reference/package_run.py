# SPDX-License-Identifier: Apache-2.0
"""The same federation, run by the package: its lifecycle, its session and one of its engines; replies are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from fedquit.core import ClientId, Local, Memory, Model, Params, Reply, State, Training
from fedquit.core.fedavg import Learn
from fedquit.core.method import Method
from fedquit.core.params import placed
from fedquit.data.federated import FederatedData
from fedquit.engine import Ask, Engine, GraphCache, SequentialEngine, StackedEngine, ThreadedEngine
from fedquit.running import lifecycle
from fedquit.running.lifecycle import NOBODY, Hooks, Life
from fedquit.running.membership import Membership
from fedquit.running.session import Session
from reference.world import (
    BATCH,
    DATA,
    EPOCHS,
    LR,
    LR_DECAY,
    MODEL,
    RECOVERY_ROUNDS,
    ROUNDS,
    WEIGHT_DECAY,
    Erasure,
    Log,
    Visited,
    Weights,
    initial,
)

TRAINING = Training(Learn(Local(EPOCHS, BATCH, "sgd", LR, weight_decay=WEIGHT_DECAY)), rounds=ROUNDS, lr_decay=LR_DECAY)


@dataclass
class Recorder:
    """An engine whose replies are written to a log."""

    inner: Engine
    log: Log

    @property
    def model(self) -> Model:
        return self.inner.model

    def run(self, ask: Ask) -> Iterator[Reply]:
        for reply in self.inner.run(ask):
            place = (ask.address.phase, ask.address.round, ask.address.question, reply.client)
            loss = None if math.isnan(reply.loss) else reply.loss
            self.log.visits.append(Visited(place, reply.examples, _on_cpu(reply.params), loss))
            yield reply


def _on_cpu(params: Params) -> Weights:
    return placed(params, torch.device("cpu"))


@dataclass(frozen=True)
class TrainedPackage:
    """A federation that the package has trained with methods attached.

    Attributes:
        state: the model.
        shelves: what each method keeps at the server, by the method's name here.
        homes: what the clients keep.
        log: the trajectory.
    """

    state: State
    shelves: Mapping[str, Memory]
    homes: Memory
    log: Log = field(repr=False)


@dataclass(frozen=True)
class Package:
    """One engine of the package on this world's federation.

    Attributes:
        engine: "sequential", "threaded" or "stacked", or "cuda" for the stacked one on a GPU.
        graphs: captured and traced steps that all phases share; None for those of each phase alone.
    """

    engine: str
    graphs: GraphCache | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.engine == "cuda" else "cpu")

    def new_engine(self, data: FederatedData, homes: Memory) -> Engine:
        if self.engine == "sequential":
            return SequentialEngine(MODEL, data, homes)
        if self.engine == "threaded":
            return ThreadedEngine(MODEL, data, homes, workers=2)
        return StackedEngine(MODEL, data, homes, graphs=self.graphs or GraphCache())

    def session(
        self, data: FederatedData, homes: Memory, seed: int, clients: tuple[ClientId, ...], log: Log
    ) -> Session:
        """The clients behind the engine, with every reply recorded.

        Args:
            data: theirs, with the examples of a request marked.
            homes: what they keep between rounds.
            seed: of the run.
            clients: who can be asked.
            log: where replies are recorded.
        """
        there = replace(data, dataset=data.dataset.to(self.device))
        return Session(Recorder(self.new_engine(there, homes), log), seed, clients)

    def train(self, attached: Mapping[str, Method], seed: int, erasure: Erasure | None = None) -> TrainedPackage:
        """Ordinary training with several methods attached.

        Args:
            attached: by name.
            seed: of the run.
            erasure: where they must know the request in advance.
        """
        shelves: dict[str, Memory] = {name: {} for name in attached}
        homes: Memory = {}
        log = Log()
        data = erasure.data() if erasure else DATA
        hooks = Hooks(attached, shelves.__getitem__, erasure.request if erasure else NOBODY)
        session = self.session(data, homes, seed, data.clients, log)
        state = State(placed(initial(0), self.device))
        for r in range(ROUNDS):
            session.enter("train", r)
            state = hooks.round(session, state, TRAINING, data.clients)
            log.models.append(("train", r, _on_cpu(state.params)))
        return TrainedPackage(state, shelves, homes, log)

    def serve(self, trained: TrainedPackage, name: str, method: Method, erasure: Erasure) -> Log:
        """Serve a request with a method, and recover.

        Args:
            trained: the federation that the request finds; it is left as it is.
            name: under which the method's memory lies.
            method: that serves the request.
            erasure: the request.

        Returns:
            The trajectory, that of the training included.
        """
        request, marked = erasure.request, erasure.data()
        method.check(request)
        log = Log(list(trained.log.visits), list(trained.log.models))
        shelf = dict(trained.shelves.get(name, {}))
        homes = dict(trained.homes)

        life = Life(Membership(marked.clients)).begin_unlearning(request, rounds=ROUNDS)
        state = lifecycle.entered("unlearn", trained.state)
        examples = {c: len(DATA.view(c, "all")) for c in DATA.clients}
        found = life.trained(state, placed(initial(0), self.device), TRAINING, examples, shelf)
        session = self.session(marked, homes, erasure.seed, life.askable(marked.clients), log)
        for r in range(method.rounds(found, request)):
            session.enter(life.phase.name, r)
            state = lifecycle.unlearning_round(method, session, state, found, request)
            log.models.append((life.phase.name, r, _on_cpu(state.params)))

        life = life.begin_recovery()
        state = lifecycle.entered("recover", state)
        retained = marked.after(request)
        session = self.session(retained, homes, erasure.seed, life.askable(retained.clients), log)
        hooks = Hooks.of(name, method, lambda _: shelf)
        for r in range(lifecycle.recovery_rounds(method, RECOVERY_ROUNDS)):
            session.enter(life.phase.name, r)
            state = lifecycle.recovery_round(method, hooks, session, state, found, request)
            log.models.append((life.phase.name, r, _on_cpu(state.params)))
        return log
