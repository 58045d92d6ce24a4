# SPDX-License-Identifier: Apache-2.0
"""FedUNRAN: On-Device Federated Unlearning via Random Labels. Mora et al. 2024.

The leaving client trains on its own data with labels drawn at random, over all classes, anew in
every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedquit.core import Batch, Federation, Local, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean


@dataclass(frozen=True)
class Mislabel(Task):
    """Learn labels that are drawn at random; the true one may be among them."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        logits = model(params, batch.x)
        classes = logits.shape[-1]
        return cross_entropy(logits, (batch.u * classes).long().clamp(max=classes - 1))


@dataclass(frozen=True)
class FedUNRAN(Method):
    """Some epochs on random labels at the leaving client."""

    lr: float = 1e-3
    epochs: float = 5.0
    batch_size: int = 32

    knobs = (Knob("lr", 1e-5, 1e-2), Knob("epochs", 1.0, 30.0))

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The mean of the leaving clients' models becomes the global one."""
        task = Mislabel(Local(self.epochs, self.batch_size, "adam", self.lr))
        return state.next(mean(fed.run(task, request.clients, split="forget", start=state.params)))
