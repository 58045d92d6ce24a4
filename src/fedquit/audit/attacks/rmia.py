# SPDX-License-Identifier: Apache-2.0
"""RMIA, offline: is the model surer of x than of other people's data, beyond what reference models would be?

Zarifzadeh, Liu, Shokri: Low-Cost High-Power Membership Inference Attacks (ICML 2024). It works with one to four
reference models, none of which needs to have seen x; for an erasure, a checkpoint from before the client joined can be
one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.errors import InputError

TINY = 1e-300


def rmia(
    target: npt.ArrayLike,
    references: npt.ArrayLike,
    population: npt.ArrayLike,
    population_references: npt.ArrayLike,
    *,
    gamma: float = 1.0,
    a: float = 0.3,
) -> Floats:
    """RMIA, offline: for each example the share of the population z over which its likelihood ratio dominates.

    score(x) = P_z[ (p(x|model) / p(x)) / (p(z|model) / p(z)) > gamma ], where p(.|model) is the true-class confidence
    and p(x) = ((1 + a) * mean over the references of p(x|reference) + (1 - a)) / 2 stands for models that may have seen
    x.

    Args:
        target: confidences of the examples under the attacked model, (N,).
        references: the same under reference models that did not see them, (R, N).
        population: confidences of examples that neither model saw, under the attacked model, (Z,).
        population_references: the same under the reference models, (R, Z).
        gamma: how far the ratio must dominate.
        a: how much a model that saw an example is taken to resemble one that did not; 1 for not at all different.
    """
    if gamma <= 0 or not 0 <= a <= 1:
        raise InputError(f"gamma is {gamma} and a is {a}: gamma must be above 0, and a from 0 to 1.")
    of_x = _ratio(target, references, a)
    of_z = np.sort(_ratio(population, population_references, a))
    return (np.searchsorted(of_z, of_x / gamma, side="left") / len(of_z)).astype(np.float64)


def _ratio(confidence: npt.ArrayLike, references: npt.ArrayLike, a: float) -> Floats:
    p, refs = np.asarray(confidence, dtype=np.float64), np.atleast_2d(np.asarray(references, dtype=np.float64))
    if p.ndim != 1 or len(p) == 0 or refs.shape[1] != len(p):
        raise InputError(f"{p.shape} confidences do not fit references of shape {refs.shape}: give (N,) and (R, N).")
    average = np.asarray(refs.mean(0), dtype=np.float64)
    return p / np.maximum(((1 + a) * average + (1 - a)) / 2, TINY)
