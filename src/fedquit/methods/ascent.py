# SPDX-License-Identifier: Apache-2.0
"""Unconstrained gradient ascent: the leaving client climbs its own loss without a constraint.

The plain baseline of this field, and what PGA adds its constraints to. The gradient is clipped only
so that the numbers stay finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedquit.core import Batch, Federation, Local, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean


@dataclass(frozen=True)
class Climb(Task):
    """Go up the loss on one's own data."""

    opposes_training: ClassVar[bool] = True

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y)


@dataclass(frozen=True)
class GradientAscent(Method):
    """A few epochs of ascent from the global model, at the leaving client."""

    lr: float = 1e-2
    epochs: float = 5.0
    batch_size: int = 32
    momentum: float = 0.9
    clip: float = 5.0

    knobs = (Knob("lr", 1e-4, 1e-1), Knob("epochs", 1.0, 20.0))

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The mean of the leaving clients' models becomes the global one."""
        local = Local(self.epochs, self.batch_size, "sgd", self.lr, self.momentum, clip=self.clip)
        return state.next(mean(fed.run(Climb(local), request.clients, split="forget", start=state.params)))
