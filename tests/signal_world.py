# SPDX-License-Identifier: Apache-2.0
"""Made-up signals with known answers: a model that learnt, one that never saw the data, and two broken unlearners.

Logits are drawn: the margin of the true class is high for what a model trained on, lower for what it did not. Original
trained on retain and forget data, Retrain on retain data. The unlearner "nothing" hands back Original; "wiped" hands
back a model that knows nothing at all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedquit.audit.scores import Floats, Scores, score_examples
from fedquit.core import Params

CLASSES = 10
TRAINED, UNSEEN = 6.0, 3.0  # mean margin
Kind = Literal["retrain", "nothing", "wiped"]


class Given:
    """A model whose logits are its input."""

    def init(self, seed: int) -> Params:
        return {}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x


def of_logits(logits: Tensor, labels: Tensor, batch_size: int = 500) -> Scores:
    return score_examples(Given(), {}, logits, labels, batch_size)


def drawn(n: int, margin: float, seed: int) -> Scores:
    """Examples of ten classes; a margin of 0 is a model that guesses."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=g)
    logits = torch.randn(n, CLASSES, generator=g)
    logits[torch.arange(n), labels] += margin + (1.5 * torch.randn(n, generator=g) if margin else 0.0)
    return of_logits(logits, labels)


class Scene(NamedTuple):
    retain: Scores
    test: Scores
    forget: Scores
    holdout: Scores


def scene(kind: Kind, n: int = 1000, seed: int = 0) -> Scene:
    """What one model looks like from outside."""
    seen, unseen = (0.0, 0.0) if kind == "wiped" else (TRAINED, UNSEEN)
    forget = seen if kind == "nothing" else unseen
    retain, test, forgotten, holdout = (
        drawn(n, m, 10 * seed + i) for i, m in enumerate((seen, unseen, forget, unseen))
    )
    return Scene(retain, test, forgotten, holdout)


def phi_over_models(kind: Kind, models: int, examples: int, seed: int) -> Floats:
    """Phi of forget examples under many models, (models, examples); each example is as hard as in every other call."""
    hard = np.random.default_rng(0).normal(0, 1, examples)
    level = {"retrain": 1.0, "nothing": 4.0, "wiped": -2.2}[kind]
    noise = np.random.default_rng(seed).normal(0, 0.2 if kind == "wiped" else 1.0, (models, examples))
    return level + (0.0 if kind == "wiped" else hard) + noise
