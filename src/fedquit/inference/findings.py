# SPDX-License-Identifier: Apache-2.0
"""Whether a finding that somebody stated holds in measurements of one's own, and whether two means differ by chance.

A finding is a list of comparisons "a is less than b", of which at least u of k must be true. Both sides are measured
for the same targets.

| question | function |
|---|---|
| is a less than b, over targets | `less_p` (sign flips of the differences, exact) |
| are at least u of k comparisons true | `at_least_p` (Benjamini and Heller 2008) |
| which targets could tell | `least_targets` |
| does a mean over some targets differ from a printed mean by more than the printed deviation explains | `allowed` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedquit.errors import InputError
from fedquit.inference.gaps import share_at_least

LEVEL = 0.05
_DRAWN = 2**16  # patterns of signs, where there are too many to count


def less_p(one: Sequence[float], other: Sequence[float]) -> float:
    """The p-value of "one is not less than the other", over the same targets.

    Under it, each target's difference is as likely to have either sign, or favours the other. All patterns of signs are
    counted whose mean difference is at least the one observed; the smallest p of n targets is 1/2^n.

    Args:
        one: A value for each target.
        other: The other value of the same targets, in the same order.
    """
    differences = np.asarray(other, dtype=np.float64) - np.asarray(one, dtype=np.float64)
    signed = [np.array([value, -value]) for value in differences]
    return share_at_least(signed, float(differences.sum()), _DRAWN, both_tails=False)


def at_least_p(p_values: Sequence[float], needed: int) -> float:
    """The p-value of "fewer than so many of the comparisons are true", whatever their dependence.

    Args:
        p_values: One for each comparison.
        needed: How many must be true; all of them give the largest p-value, one gives Bonferroni's.

    Raises:
        InputError: If the number needed is no part of the comparisons.
    """
    if not 1 <= needed <= len(p_values):
        raise InputError(f"{needed} of {len(p_values)} comparisons cannot be asked for: name 1 to {len(p_values)}.")
    return min(1.0, (len(p_values) - needed + 1) * sorted(p_values)[needed - 1])


def least_targets(comparisons: int, needed: int) -> int:
    """The fewest targets with which a finding can be called true at 5 %."""
    return math.ceil(math.log2((comparisons - needed + 1) / LEVEL))


def allowed(deviation: float, ours: int, theirs: int = 10, rounding: float = 0.0) -> float:
    """How far a mean over some targets may lie from a printed mean before chance is an unlikely explanation.

    Both means are over targets drawn from the same clients, with the printed standard deviation. A difference beyond
    this has a chance of at most 5 % where the values are normal.

    Args:
        deviation: The standard deviation over targets, as printed.
        ours: How many targets our mean is over.
        theirs: How many the printed mean and deviation are over.
        rounding: Half a unit of the last digit printed.
    """
    from scipy.stats import t  # late: scipy takes half a second

    quantile = float(t.ppf(1 - LEVEL / 2, theirs - 1))
    return quantile * deviation * math.sqrt(1 / ours + 1 / theirs) + rounding
