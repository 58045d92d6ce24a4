# SPDX-License-Identifier: Apache-2.0
"""SCRUB: Towards Unbounded Machine Unlearning. Kurmanji, Triantafillou, Hayes, Triantafillou. NeurIPS 2023.

The model as it was is the teacher. A *max* epoch drives the student's predictions away from the teacher's on the data
to forget; a *min* epoch draws them back on the other data, and learns its labels. The two alternate, and the max epochs
end first. In a federation those who leave do the max epochs and those who stay the min epochs; a client that gives up
samples does all of them by itself, in one visit. SCRUB+R goes back, at the end, to the model whose error on the
forgotten data is nearest to that on data which was never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.core import (
    Batch,
    Federation,
    Local,
    Measurement,
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
from fedquit.core.fedavg import cohort, cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import mean
from fedquit.distill.losses import kl
from fedquit.errors import InputError


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T² KL(teacher || student) of each example at the temperature T; of a sequence, the mean over its positions.

    Args:
        teacher: its logits, `(B, C)`, or `(B, T, C)` for sequences.
        student: its logits, of the same shape.
        temperature: T.
    """
    losses = temperature**2 * kl(teacher / temperature, student / temperature)
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


@dataclass(frozen=True)
class Diverge(Task):
    """A max epoch: away from the teacher."""

    temperature: float = 4.0

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -divergence(model(sent["teacher"], batch.x), model(params, batch.x), self.temperature)


@dataclass(frozen=True)
class Repair(Task):
    """A min epoch: back to the teacher, and to the labels."""

    alpha: float = 0.001
    gamma: float = 0.99
    temperature: float = 4.0

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """The divergence times alpha, and the cross-entropy times gamma."""
        student = model(params, batch.x)
        back = divergence(model(sent["teacher"], batch.x), student, self.temperature)
        return self.alpha * back + self.gamma * cross_entropy(student, batch.y)


@dataclass(frozen=True)
class Errors(Measurement):
    """The share of wrong predictions."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        wrong = (model(params, batch.x).argmax(-1) != batch.y).to(torch.float32)
        return {"wrong": wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong}

    def zeros(self, sent: Sent) -> Params:
        return {"wrong": next(iter(sent["start"].values())).new_zeros((), dtype=torch.float32)}


@dataclass(frozen=True)
class SCRUB(Method):
    """Alternating max and min epochs."""

    lr: float = 5e-5
    optimizer: str = "adam"
    momentum: float = 0.0
    weight_decay: float = 5e-4  # takes the first step: where student and teacher are equal there is no gradient
    max_steps: int = 2  # epochs of those who leave
    min_steps: int = 3  # epochs of those who repair, at least as many
    alpha: float = 0.001  # of the divergence in a min epoch
    gamma: float = 0.99  # of the cross-entropy in a min epoch
    temperature: float = 4.0
    batch_size: int = 32  # of a max epoch
    retain_batch_size: int = 32  # of a min epoch
    rewind: bool = False  # SCRUB+R

    presets = {  # noqa: RUF012 - a ClassVar of the base
        "authors": {"lr": 5e-4, "optimizer": "sgd", "momentum": 0.9, "retain_batch_size": 128},
    }
    knobs = (Knob("lr", 1e-6, 1e-2), Knob("max_steps", 1, 3, "linear"))

    def __post_init__(self) -> None:
        if not 0 <= self.max_steps <= self.min_steps or self.min_steps < 1:
            raise InputError(
                f"scrub has max_steps={self.max_steps} and min_steps={self.min_steps}: a min epoch follows each max "
                "epoch, and there is at least one."
            )

    @property
    def needs_public_data(self) -> bool:
        """SCRUB+R compares with the error on data of the server's own."""
        return self.rewind

    def _local(self, batch_size: int) -> Local:
        return Local(1.0, batch_size, self.optimizer, self.lr, self.momentum, self.weight_decay)

    @property
    def diverge(self) -> Diverge:
        """The task of a max epoch."""
        return Diverge(self._local(self.batch_size), temperature=self.temperature)

    @property
    def repair(self) -> Repair:
        """The task of a min epoch."""
        local = self._local(self.retain_batch_size)
        return Repair(local, alpha=self.alpha, gamma=self.gamma, temperature=self.temperature)

    def _in_one_visit(self, request: Request) -> bool:
        return request.samples and not self.rewind  # which must see the model after each min epoch

    def rounds(self, trained: Trained, request: Request) -> int:
        """One for each min epoch; where clients give up samples, one for all."""
        return 1 if self._in_one_visit(request) else self.min_steps

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """A max epoch, as long as there are any, and a min epoch; or all of them in one visit."""
        teacher = state.kept.get("teacher", state.params)
        steps = range(self.min_steps) if self._in_one_visit(request) else (state.round,)
        if request.samples:
            parts = [part for step in steps for part in self._parts(step)]
            w = mean(fed.run(Program(tuple(parts)), request.clients, start=state.params, teacher=teacher))
        else:
            w = state.params
            if state.round < self.max_steps:
                w = mean(fed.run(self.diverge, request.clients, split="forget", start=w, teacher=teacher))
            stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
            w = mean(fed.run(self.repair, stay, split="retain", start=w, teacher=teacher))
        if not self.rewind:
            return state.next(w, teacher=teacher)
        return self._rewound(fed, state, request, {**state.kept, "teacher": teacher, f"step {state.round}": w})

    def _parts(self, step: int) -> list[Part]:
        repair = Part(self.repair, "retain")
        return [Part(self.diverge, "forget"), repair] if step < self.max_steps else [repair]

    def _rewound(self, fed: Federation, state: State, request: Request, kept: dict[str, Params]) -> State:
        """Measure the error on the forgotten data; after the last min epoch, choose among the models."""
        step = f"step {state.round}"
        measure = Errors()
        error = mean(fed.run(measure, request.clients, split="forget", start=kept[step]))
        errors = {**kept.get("errors", {}), step: error["wrong"]}
        if state.round + 1 < self.min_steps:
            return state.next(kept[step], **{**kept, "errors": errors})
        reference = fed.run_at_server(measure, start=kept[step])["wrong"]
        nearest = min(errors, key=lambda name: float((errors[name] - reference).abs()))
        return state.next(kept[nearest])
