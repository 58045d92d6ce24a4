# SPDX-License-Identifier: Apache-2.0
"""Tug-of-War: forgetting against keeping, in one number.

Zhao, Kurmanji, Bărbulescu, Triantafillou, Triantafillou: What Makes Unlearning Hard and What to Do About It (NeurIPS
2024). The product falls if any one of the three strays from Retrain, so that none can pay for another.
"""

from __future__ import annotations

import math

from fedquit.errors import InputError


def tug_of_war(*, forget: float, retain: float, test: float) -> float:
    """ToW = (1 - |forget gap|)(1 - |retain gap|)(1 - |test gap|).

    Args:
        forget: The gap to Retrain in forget accuracy, in points; its sign does not matter.
        retain: The same in retain accuracy.
        test: The same in test accuracy.

    Returns:
        1 for a model with Retrain's accuracies, 0 where one of them is wholly off.
    """
    return math.prod(1 - _share(g) for g in (forget, retain, test))


def tug_of_war_mia(*, mia: float, retain: float, test: float) -> float:
    """ToW-MIA: Tug-of-War with a membership attack in place of the forget accuracy.

    Args:
        mia: The gap to Retrain of the attack, in points; its sign does not matter.
        retain: The same in retain accuracy.
        test: The same in test accuracy.
    """
    return tug_of_war(forget=mia, retain=retain, test=test)


def _share(gap: float) -> float:
    if not abs(gap) <= 100:
        raise InputError(f"a gap is {gap} points: it must lie between -100 and 100.")
    return abs(gap) / 100
