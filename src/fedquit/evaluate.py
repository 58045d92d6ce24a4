# SPDX-License-Identifier: Apache-2.0
"""How good a model is on what: accuracy and loss on the test, retain, forget and holdout data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedquit.core import Model, Params, Request
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.errors import NonFiniteError
from fedquit.fedavg import cross_entropy


@dataclass(frozen=True)
class Score:
    """On one set of examples: accuracy in percent, and the loss of each example."""

    accuracy: float
    losses: Tensor

    @property
    def loss(self) -> float:
        """The mean."""
        return float(self.losses.mean())


def score(model: Model, params: Params, x: Tensor, y: Tensor, batch_size: int = 500) -> Score:
    """For sequences, every position counts as one prediction."""
    hits, losses = 0, []
    with torch.no_grad():
        for xs, ys in zip(x.split(batch_size), y.split(batch_size), strict=True):
            logits = model(params, xs)
            hits += int((logits.argmax(-1) == ys).sum())
            losses.append(cross_entropy(logits, ys))
    found = torch.cat(losses)
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteError("the loss is not finite on some examples: lower the learning rate or clip the gradient.")
    return Score(100 * hits / y.numel(), found)


@dataclass(frozen=True)
class Evaluation:
    """What a request is judged on: the retain data of all, and the leaving clients' forget and holdout data."""

    model: Model
    data: FederatedData
    request: Request

    def test(self, params: Params) -> Score:
        """On the global test set."""
        return score(self.model, params, self.data.dataset.test_x, self.data.dataset.test_y)

    def _at(self, params: Params, positions: Tensor) -> Score | None:
        if len(positions) == 0:
            return None
        return score(self.model, params, self.data.x[positions], self.data.y[positions])

    def retain(self, params: Params) -> Score | None:
        """On everything that is not forgotten."""
        return self._at(params, self.data.pooled("retain"))

    def price_of_forgetting(self, before: Params, after: Params) -> float | None:
        """The rise of the mean loss on everything that is not forgotten."""
        losses = [found.loss for params in (before, after) if (found := self.retain(params))]
        return losses[1] - losses[0] if losses else None

    def forget(self, params: Params) -> Score | None:
        """On the marked data."""
        return self._at(params, self.data.pooled("forget", self.request.clients))

    def holdout(self, params: Params) -> Score | None:
        """On what the leaving clients never trained on."""
        kept = [self.data.holdout.get(c, NOTHING) for c in self.request.clients]
        return self._at(params, torch.cat([NOTHING, *kept]))


@dataclass(frozen=True)
class Separation:
    """How well the loss tells two sets apart: the AUC with its 95 % interval."""

    auc: float
    low: float
    high: float


def separation(forgotten: Tensor, unseen: Tensor) -> Separation:
    """The chance that a forgotten example has a lower loss than an unseen one; one half means that nothing shows.

    Mann and Whitney's statistic, with Hanley and McNeil's standard error (Radiology 1982).
    """
    m, n = len(forgotten), len(unseen)
    u = mannwhitneyu(unseen.double().numpy(), forgotten.double().numpy()).statistic
    auc = float(u) / (m * n)
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = (auc * (1 - auc) + (m - 1) * (q1 - auc**2) + (n - 1) * (q2 - auc**2)) / (m * n)
    half = 1.96 * math.sqrt(max(variance, 0.0))
    return Separation(auc, max(auc - half, 0.0), min(auc + half, 1.0))
