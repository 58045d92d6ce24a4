# SPDX-License-Identifier: Apache-2.0
"""FedQUIT: On-Device Federated Unlearning via a Quasi-Competent Virtual Teacher. Mora, Valerio, Bellavista, Passarella.

Algorithm 1, at the leaving client: a student starts from the global model and distils, on the
forget data alone, a virtual teacher: the global model with its score for the true class pushed
down. Algorithm 2, at the server: several requests are served in one round, and the mean of the
snapshots, weighted by the sizes of the forget sets, becomes the global model. Recovery is ordinary
FedAvg without the forgotten data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedquit.core import Batch, ClientId, Federation, Local, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean
from fedquit.core.projection import projection_of
from fedquit.distill.chunked import chunked_distillation_loss
from fedquit.distill.losses import LOSSES, Rule, of_examples
from fedquit.distill.virtual_teacher import DEFAULTS, TEACHERS, checked_options
from fedquit.utils.names import lookup


@dataclass(frozen=True)
class Distill(Task):
    """Follow the virtual teacher on one's own forget data."""

    opposes_training: ClassVar[bool] = True

    teacher: str = "min"
    divergence: str = "kl"
    v: float = 0.0
    tau: float = 1.0
    k: int = 5

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Lines 5 to 13: student and global model on the batch, the true class lowered, and the divergence."""
        rule = Rule(self.teacher, self.divergence, self.v, self.tau, self.k)
        student = projection_of(model, params, batch.x)
        teacher = projection_of(model, sent["start"], batch.x) if student else None
        if student and teacher:  # a language model: a few positions at a time
            return chunked_distillation_loss(student, teacher, batch.y, batch.u, rule)
        z_s = model(params, batch.x)
        z_g = model(sent["start"], batch.x)  # the global model as it was received: no second download
        return of_examples(rule.losses(z_s, z_g, batch.y, batch.u))


@dataclass(frozen=True)
class FedQUIT(Method):
    """One epoch at the leaving client; the learning rate is the one to choose (docs/choosing-lr.md)."""

    lr: float = 1e-4
    epochs: float = 1.0
    batch_size: int = 32
    optimizer: str = "adam"
    weight_decay: float | None = None  # None: 0.004 for adamw, as in the authors' transformer runs, and 0 otherwise
    teacher: str = "min"
    loss: str = "kl"
    v: float = 0.0  # teacher "fixed"
    tau: float = 1.0  # teacher "temperature"
    k: int = 5  # teacher "topk"
    order: Literal["parallel", "sequential"] = "parallel"  # of several clients in one request

    knobs = (Knob("lr", 1e-6, 1e-2), Knob("epochs", 0.25, 8.0))

    def __post_init__(self) -> None:
        takes = lookup(TEACHERS, self.teacher, "teacher").takes
        lookup(LOSSES, self.loss, "loss")
        given = {"v": self.v, "tau": self.tau, "k": self.k}
        checked_options(self.teacher, {o: x for o, x in given.items() if o in takes or x != DEFAULTS[o]})  # type: ignore[literal-required]
        _ = self.distill

    @property
    def distill(self) -> Distill:
        """The task of a leaving client."""
        decay = self.weight_decay if self.weight_decay is not None else 0.004 * (self.optimizer == "adamw")
        local = Local(self.epochs, self.batch_size, self.optimizer, self.lr, weight_decay=decay)
        return Distill(local, teacher=self.teacher, divergence=self.loss, v=self.v, tau=self.tau, k=self.k)

    def _turns(self, request: Request) -> list[list[ClientId]]:
        return [list(request.clients)] if self.order == "parallel" else [[u] for u in request.clients]

    def rounds(self, trained: Trained, request: Request) -> int:
        """One for all (Algorithm 2), or one for each client, from the last one's snapshot."""
        return len(self._turns(request))

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The snapshots of the leaving clients, averaged with the sizes of their forget sets."""
        leaving = self._turns(request)[state.round]
        return state.next(mean(fed.run(self.distill, leaving, split="forget", start=state.params)))
