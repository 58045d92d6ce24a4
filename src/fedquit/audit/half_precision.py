# SPDX-License-Identifier: Apache-2.0
"""Per-example scores that were stored in half precision, and how far what is computed from them can be off.

Half precision keeps 11 significant bits: a number moves by at most 2^-11 of its size, and its order among others is
kept but for ties. An AUC therefore moves by at most half the share of pairs that have become ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats, Integers, Scores
from fedquit.inference.trace import area


def stored_scores(arrays: Mapping[str, npt.NDArray[Any]], labels: Integers, positions: int = 1) -> Scores:
    """Scores from what a reference bundle keeps of them: loss and confidence follow from phi.

    Args:
        arrays: `phi`, `entropy`, `modified_entropy` and `correct`, (N,) each.
        labels: of the same examples, (N,).
        positions: predictions for each example, of which `correct` counts the right ones.
    """
    phi = arrays["phi"].astype(np.float64)
    loss = np.logaddexp(0.0, -phi)
    return Scores(
        label=labels,
        correct=arrays["correct"].astype(np.float64) / positions,
        confidence=np.exp(-loss),
        loss=loss,
        phi=phi,
        entropy=arrays["entropy"].astype(np.float64),
        modified_entropy=arrays["modified_entropy"].astype(np.float64),
    )


def rounding_error(stored: npt.NDArray[np.float16]) -> Floats:
    """How far each number may lie from what it was before it was rounded to half precision.

    Half the distance to the next number away from zero; a number at the end of the range may have been any larger one.
    """
    sizes = np.abs(stored)
    largest = np.finfo(np.float16).max
    spacing = np.spacing(np.minimum(sizes, np.nextafter(largest, np.float16(0)))).astype(np.float64) / 2
    return np.where(sizes >= largest, np.inf, spacing)


def auc_bounds(members: Floats, outsiders: Floats, errors: tuple[Floats, Floats]) -> tuple[float, float]:
    """Between which values the AUC lies whose scores are known up to errors.

    Args:
        members: their scores, (M,).
        outsiders: theirs, (N,).
        errors: the largest error of each score of the members, and of the outsiders.
    """
    lowest = area(_finite(members - errors[0]), _finite(outsiders + errors[1])).value
    highest = area(_finite(members + errors[0]), _finite(outsiders - errors[1])).value
    return lowest, highest


def auc_uncertainty(members: npt.NDArray[np.float16], outsiders: npt.NDArray[np.float16]) -> float:
    """By how much the AUC of stored scores can be off, at most, because they were rounded to half precision.

    Args:
        members: their scores as they are stored, (M,).
        outsiders: theirs, (N,).
    """
    wide = members.astype(np.float64), outsiders.astype(np.float64)
    low, high = auc_bounds(*wide, (rounding_error(members), rounding_error(outsiders)))
    known = area(*wide).value
    return max(high - known, known - low)


def _finite(scores: Floats) -> Floats:
    return np.nan_to_num(scores, posinf=1e300, neginf=-1e300)
