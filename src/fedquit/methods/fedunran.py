# SPDX-License-Identifier: Apache-2.0
"""FedUNRAN: On-Device Federated Unlearning via Random Labels. Mora et al. 2024.

The leaving client trains on its own data with labels drawn at random, over all classes, anew in
every step. The authors let it stop early, once the loss no longer falls (preset `authors`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedquit.core import (
    Batch,
    EarlyStopping,
    Federation,
    Local,
    Model,
    Params,
    Request,
    Sent,
    State,
    Step,
    Task,
    Trained,
)
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean
from fedquit.errors import InputError


@dataclass(frozen=True)
class Mislabel(Task):
    """Learn labels that are drawn at random; the true one may be among them."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        logits = model(params, batch.x)
        classes = logits.shape[-1]
        return cross_entropy(logits, (batch.u * classes).long().clamp(max=classes - 1))


@dataclass(frozen=True)
class MislabelPatiently(Mislabel):
    """The same, until the loss has not fallen for `patience` epochs; then go back to the best epoch."""

    patience: int = 3

    @property
    def _stopping(self) -> EarlyStopping:
        return EarlyStopping(self.patience, restore_best=True)

    def monitor_start(self, params: Params) -> Params:
        return self._stopping.start(params)

    def monitor(self, state: Params, step: Step, params: Params) -> Params:
        return self._stopping.observe(state, step, params)

    def monitor_end(self, state: Params, params: Params) -> Params:
        return self._stopping.end(state, params)


@dataclass(frozen=True)
class FedUNRAN(Method):
    """Some epochs on random labels at the leaving client."""

    lr: float = 1e-3
    epochs: float = 5.0
    batch_size: int = 32
    patience: int = 0  # epochs without a lower loss after which a client stops; 0: it never does

    presets = {"authors": {"epochs": 30.0, "patience": 3}}  # noqa: RUF012 - a ClassVar of the base

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise InputError(f"patience is {self.patience}: give a number of epochs, or 0 for none.")

    knobs = (Knob("lr", 1e-5, 1e-2), Knob("epochs", 1.0, 30.0))

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The mean of the leaving clients' models becomes the global one."""
        local = Local(self.epochs, self.batch_size, "adam", self.lr)
        task = MislabelPatiently(local, patience=self.patience) if self.patience else Mislabel(local)
        return state.next(mean(fed.run(task, request.clients, split="forget", start=state.params)))
