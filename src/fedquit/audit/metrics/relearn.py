# SPDX-License-Identifier: Apache-2.0
"""Relearn time: how fast the forgotten comes back when the model sees it again.

Golatkar, Achille, Soatto: Eternal Sunshine of the Spotless Net: Selective Forgetting in Deep Networks (CVPR 2020). A
model that never saw the data needs as long as Retrain does; one that only hid what it knew needs less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError

Bound = Literal["exact", "at least", "at most", "unknown"]


@dataclass(frozen=True)
class Relearn:
    """Steps until each reaches the level; None where it never does within its curve."""

    unlearned: int | None
    oracle: int | None
    ratio: float  # near 1: alike; below 1: knowledge was left
    bound: Bound  # what the ratio is worth


def relearn_time(unlearned: npt.ArrayLike, oracle: npt.ArrayLike, *, level: float, rising: bool = True) -> Relearn:
    """The steps that the unlearned model needs to reach the level, over those that the oracle needs.

    A curve that ends below the level needs at least one step more than it has: then the ratio is a bound, and where
    both do it is not a number.

    Args:
        unlearned: the forget accuracy of the unlearned model before the first step, after it, and so on, (S,).
        oracle: the same of Retrain.
        level: Original's.
        rising: whether the curves rise to the level; False for the forget loss, which falls.
    """
    ours = _first(unlearned, level, rising)
    theirs = _first(oracle, level, rising)
    if ours is None and theirs is None:
        return Relearn(ours, theirs, math.nan, "unknown")
    bound: Bound = "exact"
    if ours is None:
        bound = "at least"
    elif theirs is None:
        bound = "at most"
    steps = np.size(unlearned) if ours is None else ours
    oracle_steps = np.size(oracle) if theirs is None else theirs
    if oracle_steps == 0:
        return Relearn(ours, theirs, 1.0 if steps == 0 else math.inf, bound)
    return Relearn(ours, theirs, steps / oracle_steps, bound)


def _first(curve: npt.ArrayLike, level: float, rising: bool) -> int | None:
    values = np.asarray(curve, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or np.isnan(values).any():
        raise InputError("a relearning curve needs one number for each step, the first before any step.")
    reached = np.flatnonzero(values >= level if rising else values <= level)
    return int(reached[0]) if len(reached) else None
