# SPDX-License-Identifier: Apache-2.0
"""Soft forgetting: your own method in one file. docs/add-a-method.md walks through it.

The leaving client distils a teacher between the model it received and the uniform distribution. With several steps the
teacher moves towards the latter round by round, always from the model as it was before the unlearning.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedquit.core import (
    Batch,
    Federation,
    Knob,
    Local,
    Method,
    Model,
    Params,
    Request,
    Sent,
    State,
    Task,
    Trained,
    mean,
)
from fedquit.errors import InputError


@dataclass(frozen=True)
class Soften(Task):
    """What the leaving client does: follow the teacher on the data to forget."""

    weight: float = 0.9  # of the uniform distribution in the teacher

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Cross-entropy to (1 - weight) * before + weight * uniform."""
        before = model(sent["before"], batch.x).softmax(-1)
        teacher = (1 - self.weight) * before + self.weight / before.shape[-1]
        losses = -(teacher * model(params, batch.x).log_softmax(-1)).sum(-1)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses  # for sequences, the mean over positions


@dataclass(frozen=True)
class SoftForgetting(Method):
    """What the server does: `steps` rounds, each with a teacher that knows less."""

    lr: float = 1e-3
    epochs: float = 1.0
    batch_size: int = 32
    weight: float = 0.9  # of the uniform distribution, in the last step
    steps: int = 1

    presets = {"gentle": {"steps": 2}}  # noqa: RUF012 - a ClassVar of the base
    knobs = (Knob("lr", 1e-5, 1e-2), Knob("epochs", 0.5, 8.0), Knob("weight", 0.1, 1.0, "linear"))

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or self.steps < 1:
            raise InputError("soft forgetting needs a weight from 0 to 1, and at least one step.")

    def rounds(self, trained: Trained, request: Request) -> int:
        """One for each step."""
        return self.steps

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The mean of the leaving clients' models becomes the global one."""
        before = state.kept.get("before", state.params)
        weight = self.weight * (state.round + 1) / self.steps
        task = Soften(Local(self.epochs, self.batch_size, "adam", self.lr), weight=weight)
        replies = fed.run(task, request.clients, split="forget", start=state.params, before=before)
        return state.next(mean(replies), before=before)
