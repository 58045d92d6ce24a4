# SPDX-License-Identifier: Apache-2.0
"""SSD: Fast Machine Unlearning without Retraining through Selective Synaptic Dampening. Foster, Schoepf, Brintrup.

AAAI 2024. Weights that matter more to the forgotten data than to the other data are scaled down, in one step and
without any training. How much a weight matters is its entry in the diagonal of the empirical Fisher information: the
mean of its squared gradient over single examples. Here each client measures that on its own data, and the server takes
the means with weights n_k: exactly what a pass over the pooled data would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquit.core import Batch, Federation, Local, Measurement, Model, Params, Reply, Request, Sent, State, Trained
from fedquit.core.fedavg import cross_entropy
from fedquit.core.gradients import per_example_gradients
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean, statistics_of, weights_of
from fedquit.errors import InputError


@dataclass(frozen=True)
class FisherDiagonal(Measurement):
    """The mean over the examples of the squared gradient of the loss."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        """The squared gradient of each example, `(B, *shape)`."""
        statistics = statistics_of(params)

        def loss(at: Params, some: Batch) -> Tensor:
            return cross_entropy(model({**at, **statistics}, some.x), some.y)

        return {n: g.square() for n, g in per_example_gradients(loss, weights_of(params), batch).items()}


def dampened(params: Params, forget: Params, other: Params, alpha: float, dampening: float) -> Params:
    """Scale the weights whose importance for the forgotten data is more than alpha times that for the other data.

    Args:
        params: the model.
        forget: the Fisher diagonal of the forgotten data.
        other: that of the data it is compared with.
        alpha: how much larger `forget` must be for a weight to be selected.
        dampening: lambda: a selected weight is multiplied by lambda * other / forget, at most by 1.
    """
    scaled = dict(params)
    for n, w in weights_of(params).items():
        selected = forget[n] > alpha * other[n]
        factor = (dampening * other[n] / forget[n]).clamp(max=1.0)
        scaled[n] = torch.where(selected, factor * w, w)
    return scaled


@dataclass(frozen=True)
class SSD(Method):
    """One step of dampening; no client trains."""

    alpha: float = 2.0
    dampening: float = 1.0  # lambda
    against: Literal["retain", "all"] = "retain"  # the other data: what stays, or all that was trained on
    batch_size: int = 32  # of the measurement: memory for so many gradients, and no other effect

    presets = {  # noqa: RUF012 - a ClassVar of the base
        "authors": {"against": "all", "alpha": 10.0, "dampening": 1.0},
        "vit": {"against": "all", "alpha": 5.0, "dampening": 1.0},
        "faces": {"against": "all", "alpha": 50.0, "dampening": 0.1},
    }
    knobs = (Knob("alpha", 0.5, 100.0), Knob("dampening", 0.1, 10.0))

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.dampening < 0:
            raise InputError(f"ssd has alpha={self.alpha} and dampening={self.dampening}: give numbers from 0 on.")

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Measure at those who leave and at those who stay, and dampen."""
        measure = FisherDiagonal(Local(batch_size=self.batch_size))
        leaving = list(fed.run(measure, request.clients, split="forget", start=state.params))
        forget = mean(leaving)
        examples = sum(reply.examples for reply in leaving)
        others = list(fed.run(measure, request.stay(fed.clients), split="retain", start=state.params))
        if self.against == "all":
            others.append(Reply(request.clients[0], forget, examples))
        return state.next(dampened(state.params, forget, mean(others), self.alpha, self.dampening))
