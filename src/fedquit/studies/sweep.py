# SPDX-License-Identifier: Apache-2.0
"""Choosing the unlearning rate without a Retrain.

A model that never saw a client treats that client's training data like its holdout data, which comes from the same
distribution and never trained anything. So for each rate: unlearn, recover a little, and ask how well the loss tells
the forgotten data from the holdout. An AUC of one half means that it cannot; above, the data is remembered; below, it
is treated worse than data never seen, which is itself a trace.

Where the loss tells them apart not even before unlearning, the comparison is blind: the model has learnt the client's
classes, not its samples. Then the sweep falls back on the unlearning round itself, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedquit.errors import InputError
from fedquit.running.recipe import Recipe, RecoverRecipe
from fedquit.running.rows import Row
from fedquit.running.runner import run
from fedquit.running.training_cache import Reporter

FOLLOWED = 0.8  # of the forget accuracy is gone after the unlearning round: the student has followed its teacher


@dataclass(frozen=True)
class Candidate:
    """One rate and what it leads to; the rate 0 is the model before unlearning."""

    lr: float
    unlearned_acc: float  # on the forget data, right after the unlearning round
    forget_acc: float  # after recovery, like all that follows
    holdout_acc: float
    test_acc: float
    auc: float  # chance that a forgotten example has a lower loss than a holdout example
    auc_low: float
    auc_high: float

    @classmethod
    def from_rows(cls, lr: float, unlearned: Row, row: Row) -> Candidate:
        """From the rows of a run."""
        names = [f.name for f in dataclasses.fields(cls) if f.name in row]
        if "auc" not in names:
            raise InputError("the leaving client is too small for holdout data: raise data.holdout or take another.")
        return cls(lr, unlearned["forget_acc"], **{name: row[name] for name in names})

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.auc_low > 0.5:
            return "remembered"
        return "worse than unseen" if self.auc_high < 0.5 else "no trace"


@dataclass(frozen=True)
class Sweep:
    """All rates, the model before, and which rate to take, and why."""

    before: Candidate
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = [dataclasses.asdict(c) | {"verdict": c.verdict} for c in (self.before, *self.candidates)]
        return {"rates": rates, "chosen": self.chosen.lr if self.chosen else None, "reason": self.reason}


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
) -> Sweep:
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
        at = {row["phase"]: row for row in rows}
        found.append(Candidate.from_rows(lr, at["unlearned"], at["recovered"]))
    return choose(Candidate.from_rows(0.0, at["original"], at["original"]), found)


def choose(before: Candidate, candidates: Sequence[Candidate]) -> Sweep:
    """Name the rate to take."""
    rates = tuple(candidates)
    if before.verdict == "remembered":
        clean = [c for c in rates if c.verdict == "no trace"]
        if clean:
            best = max(clean, key=lambda c: c.test_acc)
            return Sweep(before, rates, best, "of the rates that leave no trace it keeps the best test accuracy")
        best = min(rates, key=lambda c: abs(c.auc - 0.5))
        return Sweep(before, rates, best, "every rate leaves a trace, and this one the faintest: try rates around it")
    blind = "the loss cannot tell forget from holdout data even before unlearning, so the AUC cannot choose"
    followed = [c for c in rates if c.unlearned_acc <= (1 - FOLLOWED) * before.forget_acc]
    if not followed:
        return Sweep(before, rates, None, f"{blind}, and no rate took 80 % of the forget accuracy: try larger ones")
    best = min(followed, key=lambda c: c.lr)
    return Sweep(before, rates, best, f"{blind}; it is the smallest that took 80 % of the forget accuracy")
