# SPDX-License-Identifier: Apache-2.0
"""Choose the unlearning rate without a Retrain.

A model that never saw a client treats that client's training data like its holdout data, which
comes from the same distribution and was never trained on. So for each rate the sweep unlearns,
recovers for a few rounds, and measures how well the loss separates the forgotten data from the
holdout data. An AUC of 0.5 means that it cannot; above 0.5, the data is remembered; below 0.5, it
is treated worse than unseen data, which is itself a trace.

Where the loss cannot separate them even before unlearning, the AUC cannot choose a rate: the model
has learnt the client's classes, not its samples. Then the sweep decides by the unlearning round
itself, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedquit.audit.metrics.holdout import verdict_of
from fedquit.errors import InputError
from fedquit.results.intervals import Interval
from fedquit.running.recipe import Recipe, RecoverRecipe
from fedquit.running.rows import Row
from fedquit.running.runner import run
from fedquit.running.training_cache import Reporter

FOLLOWED = 0.8  # the share of the forget accuracy that unlearning must take away where the AUC cannot choose


class Overview(Protocol):
    """Reports the progress of a whole sweep."""

    def runs(self, done: int, total: int, title: str) -> None:
        """Report the progress of all rates.

        Args:
            done: Rates that are over.
            total: All rates.
            title: The rate that begins.
        """


@dataclass(frozen=True)
class Candidate:
    """One rate and its results; rate 0 is the model before unlearning. Accuracies are in percent.

    Attributes:
        lr: the unlearning rate.
        unlearned_acc: accuracy on the forget data right after the unlearning round.
        forget_acc: accuracy on the forget data after recovery.
        holdout_acc: accuracy on the leaving client's holdout data after recovery.
        test_acc: accuracy on the test set after recovery.
        auc: the probability that a forgotten example has a lower loss than a holdout example, after
            recovery.
        auc_low: lower end of its 95 % confidence interval.
        auc_high: upper end of its 95 % confidence interval.
    """

    lr: float
    unlearned_acc: float
    forget_acc: float
    holdout_acc: float
    test_acc: float
    auc: float
    auc_low: float
    auc_high: float

    @classmethod
    def from_rows(cls, lr: float, unlearned: Row, row: Row) -> Candidate:
        """Build a candidate from two rows of a run's results.

        Args:
            lr: the rate.
            unlearned: the row right after the unlearning round.
            row: the row after recovery.

        Raises:
            InputError: if the run has no holdout data to compare with.
        """
        names = [f.name for f in dataclasses.fields(cls) if f.name in row]
        if "auc" not in names:
            raise InputError("the leaving client is too small for holdout data: raise data.holdout or take another.")
        return cls(lr, unlearned["forget_acc"], **{name: row[name] for name in names})

    @property
    def verdict(self) -> str:
        """By the AUC's confidence interval: "remembered", "no trace" or "over-unlearned"."""
        return verdict_of(Interval(self.auc, self.auc_low, self.auc_high))


@dataclass(frozen=True)
class Sweep:
    """All rates, and which one to take.

    Attributes:
        before: the model before unlearning.
        candidates: one for each rate.
        chosen: the rate to take; None where none can be recommended.
        reason: why, as a phrase.
    """

    before: Candidate
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as plain values, for JSON."""
        rates = [dataclasses.asdict(c) | {"verdict": c.verdict} for c in (self.before, *self.candidates)]
        return {"rates": rates, "chosen": self.chosen.lr if self.chosen else None, "reason": self.reason}


def parse_rates(text: str) -> list[float]:
    """Read rates such as "1e-4,3e-4"; return them sorted, each once."""
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
    overview: Overview | None = None,
) -> Sweep:
    """Run the recipe's first request once for each rate, with few recovery rounds and no Retrain.

    Args:
        recipe: the recipe; its `data.holdout` must be above 0.
        rates: the unlearning rates to try.
        rounds: of recovery, the same for each rate.
        out: the folder for the runs, one below it for each rate.
        cache: the folder of trained federations; by default `out / "cache"`.
        reporter: receives the progress.
        overview: is told which rates are done.

    Returns:
        The results of every rate, and the one to take.

    Raises:
        InputError: if there is no holdout data.
    """
    if recipe.data.holdout == 0:
        raise InputError(
            "the sweep compares forget data with holdout data, and the recipe has none: add --set data.holdout=0.2."
        )
    candidates = []
    recover = RecoverRecipe("rounds", rounds)
    for number, lr in enumerate(rates):
        if overview:
            overview.runs(number, len(rates), f"lr {lr:g}")
        method = {**recipe.method, "lr": lr}
        tried = replace(recipe, method=method, request=recipe.request[:1], recover=recover, retrain=False)
        rows = run(tried, out / f"lr-{lr:g}", cache=cache or out / "cache", reporter=reporter)["rows"]
        by_phase = {row["phase"]: row for row in rows}
        candidates.append(Candidate.from_rows(lr, by_phase["unlearned"], by_phase["recovered"]))
    return choose(Candidate.from_rows(0.0, by_phase["original"], by_phase["original"]), candidates)


def choose(before: Candidate, candidates: Sequence[Candidate]) -> Sweep:
    """Choose the rate to take.

    Args:
        before: the model before unlearning.
        candidates: one for each rate.
    """
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
