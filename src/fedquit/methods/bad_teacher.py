# SPDX-License-Identifier: Apache-2.0
"""Bad Teacher: Can Bad Teaching Induce Forgetting? Unlearning in Deep Networks Using an Incompetent Teacher.

Chundawat, Tarun, Mandal, Kankanhalli. AAAI 2023. Two teachers: on the data to forget the student follows an
*incompetent* one, a network that was drawn at random; on the other data the *competent* one, the model as it was. In a
federation those who leave learn from the former, and those who stay then from the latter; a client that gives up
samples has both kinds of data and learns from both teachers in one visit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquit.core import (
    Batch,
    Federation,
    Local,
    Model,
    Params,
    Part,
    Program,
    Request,
    Sent,
    State,
    Task,
    Trained,
)
from fedquit.core.fedavg import cohort
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean
from fedquit.distill.losses import kl


@dataclass(frozen=True)
class Teach(Task):
    """Follow a teacher, without labels."""

    teachers: str = "both"  # incompetent, competent, or both: which one depends on whether an example is marked
    temperature: float = 1.0
    seed: int = 0  # of the incompetent teacher, which each client draws by itself

    def prepare(self, model: Model, sent: Sent) -> Sent:
        """Draw the incompetent teacher."""
        if self.teachers == "competent":
            return sent
        like = sent["start"]
        return {**sent, "incompetent": {n: p.to(like[n]) for n, p in model.init(self.seed).items()}}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """KL(teacher || student) at the temperature."""
        student = model(params, batch.x) / self.temperature
        losses = {name: kl(model(sent[name], batch.x) / self.temperature, student) for name in self._names}
        by_example = {name: x.flatten(1).mean(1) if x.dim() > 1 else x for name, x in losses.items()}
        if self.teachers == "both":
            return torch.where(batch.forget, by_example["incompetent"], by_example["competent"])
        return by_example[self.teachers]

    @property
    def _names(self) -> tuple[str, ...]:
        return ("incompetent", "competent") if self.teachers == "both" else (self.teachers,)


@dataclass(frozen=True)
class BadTeacher(Method):
    """An epoch with the incompetent teacher, and a part of one with the competent one."""

    lr: float = 3e-4
    epochs: float = 1.0
    batch_size: int = 32
    temperature: float = 1.0
    retain_epochs: float = 0.3  # of those who repair; not where samples are mixed
    samples: Literal["mixed", "phases"] = "mixed"  # of a client that gives up samples: same batches, or first and then

    presets = {"authors": {"lr": 1e-4, "batch_size": 256}}  # noqa: RUF012 - a ClassVar of the base
    knobs = (Knob("lr", 1e-5, 1e-2), Knob("epochs", 0.25, 8.0), Knob("retain_epochs", 0.1, 3.0))

    def _teach(self, teachers: str, seed: int) -> Teach:
        epochs = self.retain_epochs if teachers == "competent" else self.epochs
        local = Local(epochs, self.batch_size, "adam", self.lr)
        return Teach(local, teachers=teachers, temperature=self.temperature, seed=seed)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Those who leave follow the incompetent teacher, those who stay the competent one."""
        w = state.params
        incompetent, competent = self._teach("incompetent", fed.seed), self._teach("competent", 0)
        if request.samples and self.samples == "mixed":
            both = self._teach("both", fed.seed)
            return state.next(mean(fed.run(both, request.clients, split="all", start=w, competent=w)))
        if request.samples:
            visit = Program((Part(incompetent, "forget"), Part(competent, "retain")))
            return state.next(mean(fed.run(visit, request.clients, start=w, competent=w)))
        stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
        misled = mean(fed.run(incompetent, request.clients, split="forget", start=w))
        return state.next(mean(fed.run(competent, stay, split="retain", start=misled, competent=w)))
