# SPDX-License-Identifier: Apache-2.0
"""Several claims at once: how p-values are adjusted so that all claims hold together."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """The adjusted p-values (Holm 1979), in the order given.

    Claims whose adjusted value is at most 0.05 have a chance of at most 5 % of any false one among them.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
