# SPDX-License-Identifier: Apache-2.0
"""KLoM: the KL divergence of margins between unlearned and retrained models, example by example.

Georgiev, Rinberg, Park, Garg, Ilyas, Mądry, Neel: Attribute-to-Delete: Machine Unlearning via Datamodel Matching
(2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.errors import InputError

BINS, CLIP, EPS = 20, 100.0, 1e-5


@dataclass(frozen=True, eq=False)
class Klom:
    """One divergence for each example, in nats."""

    per_example: Floats

    @property
    def mean(self) -> float:
        """Over the examples."""
        return float(self.per_example.mean())

    @property
    def p95(self) -> float:
        """The 95th percentile: how bad it is for the worst twentieth."""
        return float(np.percentile(self.per_example, 95))


def klom(unlearned: npt.ArrayLike, oracle: npt.ArrayLike) -> Klom:
    """KL(histogram of phi over unlearned models || the same over oracles), for each example.

    phi is clipped to ±100; the 20 bins of an example share the range of both kinds of model; where an unlearned model
    falls and no oracle does, the oracles get a probability of 1e-5.

    Args:
        unlearned: phi under the unlearned models, (models, examples).
        oracle: phi under the Retrains, (models, examples).
    """
    u, o = phi_pair(unlearned, oracle)
    u, o = np.clip(u, -CLIP, CLIP), np.clip(o, -CLIP, CLIP)
    low = np.minimum(u.min(0), o.min(0))
    width = np.maximum(u.max(0), o.max(0)) - low
    p, q = (_histograms(s, low, np.where(width > 0, width, 1.0)) for s in (u, o))
    q = np.where(p > 0, np.maximum(q, EPS), q)
    q = q / q.sum(1, keepdims=True)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / np.where(q > 0, q, 1.0)), 0.0)
    return Klom(np.maximum(terms.sum(1), 0.0))


def phi_pair(unlearned: npt.ArrayLike, oracle: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Both as (models, examples) of finite numbers, with the same examples."""
    u, o = (np.asarray(s, dtype=np.float64) for s in (unlearned, oracle))
    if u.ndim != 2 or o.ndim != 2 or u.shape[1] != o.shape[1] or not (u.size and o.size):
        raise InputError(f"phi has shapes {u.shape} and {o.shape}: give (models, examples) with the same examples.")
    if not (np.isfinite(u).all() and np.isfinite(o).all()):
        raise InputError("some phi are not finite: they come from `signals`, which keeps them finite.")
    return u, o


def _histograms(phi: Floats, low: Floats, width: Floats) -> Floats:
    """(examples, bins), each row of sum 1; the highest value belongs to the last bin."""
    bins = np.minimum((BINS * ((phi - low) / width)).astype(np.int64), BINS - 1)
    examples = phi.shape[1]
    counts = np.bincount((bins + BINS * np.arange(examples)).ravel(), minlength=BINS * examples)
    return (counts.reshape(examples, BINS) / len(phi)).astype(np.float64)
