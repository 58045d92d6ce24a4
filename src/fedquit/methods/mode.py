# SPDX-License-Identifier: Apache-2.0
"""MoDe: Federated Unlearning with Momentum Degradation. Zhao et al. IEEE Internet of Things Journal 2023.

In each round, two steps. *Momentum degradation*: a second model, trained from scratch by the
remaining clients, is mixed into the global one. *Memory guidance*: all clients train the global
model on, the leaving ones on the labels that the degraded model gives to their data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from fedquit.core import Batch, Federation, Model, Params, Reply, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cohort, cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean, mix


@dataclass(frozen=True)
class Guide(Task):
    """Learn the degraded model's labels instead of one's own."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Cross-entropy to the most likely class of the degraded model."""
        return cross_entropy(model(params, batch.x), model(sent["degraded"], batch.x).argmax(-1))


@dataclass(frozen=True)
class MoDe(Method):
    """The defaults are the port behind the table of FedQUIT's paper; a rate of 0 is that of training, without decay."""

    unlearning_rounds: int = 10
    degradation_rounds: int = 6
    momentum: float = 0.95
    retained_lr: float = 5e-4
    target_lr: float = 0.0

    refuses_local_layers = "it trains a second model beside the global one, and a client keeps the BatchNorm of one"
    presets = {"swapped": {"retained_lr": 0.0, "target_lr": 5e-4}}  # noqa: RUF012 - a ClassVar of the base
    knobs = (
        Knob("unlearning_rounds", 1, 20),
        Knob("degradation_rounds", 1, 10),
        Knob("momentum", 0.5, 0.99, "linear"),
        Knob("retained_lr", 1e-5, 1e-1),
        Knob("target_lr", 1e-5, 1e-1),
    )

    def rounds(self, trained: Trained, request: Request) -> int:
        """Memory guidance takes `unlearning_rounds`; degradation runs in the first of them."""
        return self.unlearning_rounds

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Do one round of momentum degradation, then one of memory guidance."""
        learn = trained.training.task
        stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
        w = state.params
        degraded = state.kept.get("degraded", trained.initial)
        if state.round < self.degradation_rounds:
            degraded = mean(fed.run(learn, stay, split="retain", start=degraded))
            w = mix(w, degraded, self.momentum)

        def guided() -> Iterator[Reply]:
            yield from fed.run(_at(learn, self.retained_lr), stay, split="retain", start=w)
            guide = Guide(_at(learn, self.target_lr).local)
            yield from fed.run(guide, request.clients, split="forget", start=w, degraded=degraded)

        return state.next(mean(guided()), degraded=degraded).tick()


def _at(task: Task, lr: float) -> Task:
    return replace(task, local=replace(task.local, lr=lr)) if lr else task
