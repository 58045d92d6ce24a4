# SPDX-License-Identifier: Apache-2.0
"""FedOSD: Federated Unlearning with Gradient Descent and Conflict Mitigation. Pan et al. AAAI 2025.

In each round the leaving client descends an *unlearning cross-entropy*, -log(1 - p_y / 2), which
has a bottom where gradient ascent has none; the server takes from its update what is orthogonal to
the updates of all who stay, at the length it had, so that to first order no client who stays is
harmed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core import Batch, Federation, Local, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cohort, fedavg
from fedquit.core.method import Knob, Method
from fedquit.core.params import weights_of
from fedquit.errors import RequestError


@dataclass(frozen=True)
class Unlikely(Task):
    """Make the true class unlikely."""

    opposes_training: ClassVar[bool] = True

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """-log(1 - p_y / 2)."""
        logits = model(params, batch.x)
        p = functional.softmax(logits, -1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        losses = -torch.log1p(-p / 2)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def flat(params: Params) -> Tensor:
    """All weights as one vector, in float64: the projections below are of many small numbers."""
    return torch.cat([p.double().reshape(-1) for p in weights_of(params).values()])


def unflat(vector: Tensor, like: Params) -> Params:
    """The vector's numbers in the shapes of the weights of `like`, with its running statistics where it has any."""
    weights = weights_of(like)
    parts = vector.split([p.numel() for p in weights.values()])
    new = {n: part.view_as(p).to(p.dtype) for (n, p), part in zip(weights.items(), parts, strict=True)}
    return {**like, **new}


def orthogonal_to(vector: Tensor, others: Tensor) -> Tensor:
    """Return the part of a vector that is orthogonal to all rows of `others`, at the vector's own length, or zero."""
    lengths = others.norm(dim=1, keepdim=True)
    rows = others[lengths[:, 0] > 0] / lengths[lengths[:, 0] > 0]  # of one length: a Gram matrix squares differences
    inside: Tensor = rows.T @ (torch.linalg.pinv(rows @ rows.T, hermitian=True) @ (rows @ vector))
    rest: Tensor = vector - inside
    if bool(rest.norm() <= 1e-9 * vector.norm()):  # all of it lies within: what is left are rounding errors
        return torch.zeros_like(vector)
    stretch: Tensor = vector.norm() / rest.norm()
    return rest * stretch


@dataclass(frozen=True)
class FedOSD(Method):
    """Orthogonal steepest descent; the defaults are the reading that is nearest to the tables of FedQUIT's paper."""

    unlearning_rounds: int = 10
    lr: float = 1e-3  # 0: the rate that training has arrived at
    lr_decay: float = 1.0
    batch_size: int = 0  # 0: that of training
    recovery: Literal["fedavg", "projected"] = "projected"
    recovery_lr: float = 0.0  # projected, with SGD; 0: training's optimizer and rate
    several: bool = False  # allow several leaving clients: the mean of their updates, as the authors' code has it

    presets = {  # noqa: RUF012 - a ClassVar of the base
        "authors": {
            "unlearning_rounds": 100,
            "lr": 4e-4,
            "lr_decay": 0.999,
            "batch_size": 200,
            "recovery_lr": 1e-6,
            "several": True,
        },
    }
    knobs = (Knob("lr", 1e-5, 1.0), Knob("unlearning_rounds", 1, 100))

    def check(self, request: Request) -> None:
        """The paper defines one leaving client."""
        if len(request.clients) > 1 and not self.several:
            raise RequestError(
                "FedOSD is defined for one leaving client, whose update is made orthogonal to the others'; set "
                "method.several = true for the mean of several, as its authors' code has it, or ask one after another."
            )

    def rounds(self, trained: Trained, request: Request) -> int:
        return self.unlearning_rounds

    def _local(self, trained: Trained, state: State) -> Local:
        local = trained.training.task_at(state.clock).local
        lr = self.lr * self.lr_decay**state.round if self.lr else local.lr
        size = self.batch_size or local.batch_size
        return Local(local.epochs, size, "sgd", lr)

    def _recovery_local(self, trained: Trained, state: State) -> Local:
        local = self._local(trained, state)
        if self.recovery_lr:
            return replace(local, lr=self.recovery_lr * self.lr_decay**state.round)
        training = trained.training.task_at(state.clock).local
        return replace(local, optimizer=training.optimizer, lr=training.lr)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One step along the leaving clients' mean update, made orthogonal to every retained one."""
        w = state.params
        local = self._local(trained, state)
        before = state.kept.get("before", w)
        learn = replace(trained.training.task, local=local)
        leaving = fed.run(Unlikely(local), request.clients, split="forget", start=w)
        g_u = torch.stack([flat(w) - flat(r.params) for r in leaving]).mean(0)
        stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
        staying = fed.run(learn, stay, split="retain", start=w)
        others = [flat(w) - flat(r.params) for r in staying if r.examples]
        if not others:
            raise RequestError("no client that stays has any data, and FedOSD needs their updates: use fedquit or not.")
        return state.next(unflat(flat(w) - orthogonal_to(g_u, torch.stack(others)), w), before=before)

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """The authors' own, without a step back towards the model before unlearning; or ordinary FedAvg."""
        if self.recovery == "fedavg":
            return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")
        stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
        w = state.params
        before = state.kept.get("before", trained.params)
        local = self._recovery_local(trained, state)
        back = flat(w) - flat(before)
        steps = []
        for r in fed.run(replace(trained.training.task, local=local), stay, split="retain", start=w):
            if not r.examples:
                continue
            g = flat(w) - flat(r.params)
            steps.append(orthogonal_to(g, back.unsqueeze(0)) if bool(back.any()) else g)
        return state.next(unflat(flat(w) - torch.stack(steps).mean(0), w), before=before).tick()
