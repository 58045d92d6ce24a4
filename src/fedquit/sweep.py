# SPDX-License-Identifier: Apache-2.0
"""Choosing the unlearning rate without a Retrain.

A model that never saw a client treats that client's training data like its holdout data, which comes from the same
distribution and never trained anything. So for each rate: unlearn, recover a little, and ask how well the loss tells
the forgotten data from the holdout. An AUC of one half means that it cannot; above, the data is remembered; below, it
is treated worse than data never seen, which is itself a trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedquit.errors import InputError
from fedquit.recipe import Recipe, RecoverRecipe
from fedquit.runner import Reporter, Row, run


@dataclass(frozen=True)
class Candidate:
    """One rate, and what it leads to."""

    lr: float
    forget_acc: float
    holdout_acc: float
    test_acc: float
    auc: float  # chance that a forgotten example has a lower loss than a holdout example
    auc_low: float
    auc_high: float
    verdict: str = ""
    chosen: bool = False

    @classmethod
    def from_row(cls, lr: float, row: Row) -> Candidate:
        """From the recovered row of a run."""
        names = [f.name for f in dataclasses.fields(cls) if f.name in row]
        return cls(lr, **{name: row[name] for name in names})

    @property
    def verdict_alone(self) -> str:
        """What the interval says, whatever the other rates do."""
        if self.auc_low > 0.5:
            return "still remembered"
        if self.auc_high < 0.5:
            return "treated worse than unseen data"
        return "cannot be told from unseen data"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def parse_rates(text: str) -> list[float]:
    """From "1e-4,3e-4"."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--lr {text!r} is not a list of numbers: write, for example, 1e-4,3e-4,1e-3.") from error
    if not all(math.isfinite(r) and r > 0 for r in rates):
        raise InputError(f"--lr {text!r}: every rate must be a finite number above 0.")
    return sorted(set(rates))


def sweep_rates(
    recipe: Recipe,
    rates: Sequence[float],
    rounds: int,
    out: Path,
    *,
    cache: Path | None = None,
    reporter: Reporter | None = None,
) -> list[Candidate]:
    """Serve the recipe's first request once for each rate, each with the same few recovery rounds and no Retrain."""
    if recipe.data.holdout == 0:
        raise InputError(
            "the sweep compares forget data with holdout data, and the recipe has none: add --set data.holdout=0.2."
        )
    found = []
    for lr in rates:
        method, recover = {**recipe.method, "lr": lr}, RecoverRecipe("rounds", rounds)
        tried = replace(recipe, method=method, request=recipe.request[:1], recover=recover, retrain=False)
        rows = run(tried, out / f"lr-{lr:g}", cache=cache or out / "cache", reporter=reporter)["rows"]
        found.append(Candidate.from_row(lr, next(r for r in rows if r["phase"] == "recovered")))
    return choose(found)


def choose(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Name the rate to take: of those that leave no trace the best test accuracy, else the AUC nearest to one half."""
    clean = [c for c in candidates if c.auc_low <= 0.5 <= c.auc_high]
    best = max(clean, key=lambda c: c.test_acc) if clean else min(candidates, key=lambda c: abs(c.auc - 0.5))
    return [replace(c, verdict=c.verdict_alone, chosen=c is best) for c in candidates]
