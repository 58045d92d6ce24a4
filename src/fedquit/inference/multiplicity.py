# SPDX-License-Identifier: Apache-2.0
"""Several claims at once: how p-values are adjusted so that all claims hold together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt


class TwoTests(Protocol):
    """A verdict with the p-value of a difference and that of an equivalence; None where there was no test."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def p(self) -> float | None: ...

    @property
    def equivalence_p(self) -> float | None: ...


Key = TypeVar("Key", bound=Hashable)
Verdict = TypeVar("Verdict", bound=TwoTests)


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


def holm_in_two_families(verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
    """Verdicts with adjusted p-values: the differences are one family, the equivalences another.

    What was not tested counts in its family, so that the others do not depend on what could be tested.
    """
    found = verdicts.values()
    differs = holm([1.0 if verdict.p is None else verdict.p for verdict in found])
    alike = holm([1.0 if verdict.equivalence_p is None else verdict.equivalence_p for verdict in found])
    return {
        key: replace(
            verdict,
            p=None if verdict.p is None else p,
            equivalence_p=None if verdict.equivalence_p is None else equivalent,
        )
        for (key, verdict), p, equivalent in zip(verdicts.items(), differs, alike, strict=True)
    }


def benjamini_hochberg(p_values: npt.ArrayLike, level: float = 0.05) -> npt.NDArray[np.bool_]:
    """Which claims to make so that at most a share `level` of them is false on average (Benjamini, Hochberg 1995).

    Args:
        p_values: (claims,), independent or positively dependent.
        level: The mean share of false claims among those that are made.

    Returns:
        Whether each claim is made, (claims,).
    """
    p = np.asarray(p_values, dtype=np.float64)
    ordered = np.sort(p)
    small = np.flatnonzero(ordered <= level * np.arange(1, len(p) + 1) / max(1, len(p)) + 1e-12)
    if not len(small):
        return np.zeros(len(p), dtype=bool)
    return np.asarray(p <= ordered[small[-1]], dtype=bool)
