# SPDX-License-Identifier: Apache-2.0
"""What needs many models of each kind: means over the runs of a method, and when the method counts as farther."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FALLING = "forgetting_quality"  # the one measure that is lower, the farther two kinds of model lie apart


def is_farther(measure: str, method: float, farthest: float) -> bool:
    """The rule for "a difference" over many models: the method lies farther from Retrain than Retrain in any halving.

    Args:
        measure: Its name; forgetting quality falls with the distance, the others rise.
        method: The method's mean over the halvings.
        farthest: The farthest of Retrain's over the halvings.
    """
    return method < farthest if measure == FALLING else method > farthest


def mean_evidence(evidence: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means over the runs of a method, judged anew: what holds for each run need not hold for their mean.

    Args:
        evidence: For each run its measures, as JSON objects of the same shape.

    Returns:
        The means; in `halves`, each measure has `different`. Empty without evidence.
    """
    if not evidence:
        return {}
    means: dict[str, Any] = _averaged(list(evidence))
    for measure, half in means.get("halves", {}).items():
        half["different"] = is_farther(measure, half["method"], half["farthest"])
    return means


def _averaged(values: Sequence[Any]) -> Any:  # noqa: ANN401 - what JSON can hold
    """The mean of numbers, part by part in objects; a truth value must hold for all."""
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], Mapping):
        keys = [key for key in values[0] if all(value[key] is not None for value in values)]
        return {key: _averaged([value[key] for value in values]) for key in keys}
    return float(statistics.fmean(values))
