# SPDX-License-Identifier: Apache-2.0
"""Choose the unlearning rate without a Retrain.

A model that never saw a client treats that client's training data like its hold-out data, which
comes from the same distribution and was never trained on. So for each rate the sweep unlearns,
recovers for a few rounds, and judges the forgotten data against one half of the hold-out. It takes
the smallest rate that is forgotten within the margin there, and the other half must confirm it:
the best of several rates on one set looks better than it is.

Where the test does not catch Original, or the hold-out is too small, no rate is named. The model
may have learnt the client's classes, not its samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedquit.errors import InputError
from fedquit.inference.trace import CANNOT_TELL, FORGOTTEN, OVER_UNLEARNED, REMEMBERED
from fedquit.running.recipe import Recipe, RecoverRecipe
from fedquit.running.rows import Row
from fedquit.running.runner import run
from fedquit.running.training_cache import Reporter


@dataclass(frozen=True)
class HalfVerdict:
    """The verdict against one half of the hold-out, as a row stores it.

    Attributes:
        verdict: the word.
        reason: why, as a phrase.
        auc: the probability that a forgotten example has a lower loss than one of this half.
        auc_low: lower end of its 95 % confidence interval.
        auc_high: upper end of its 95 % confidence interval.
        holdout_size: examples in this half.
    """

    verdict: str
    reason: str
    auc: float
    auc_low: float
    auc_high: float
    holdout_size: int


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
        verdict: against the whole hold-out, after recovery.
        reason: of the verdict, as a phrase.
        halves: the verdicts against either half of the hold-out.
    """

    lr: float
    unlearned_acc: float
    forget_acc: float
    holdout_acc: float
    test_acc: float
    auc: float
    auc_low: float
    auc_high: float
    verdict: str
    reason: str
    halves: tuple[HalfVerdict, ...]

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
        halves = tuple(HalfVerdict(**half) for half in row.get("holdout_halves", ()))
        if not halves:
            raise InputError("the leaving client is too small for holdout data: raise data.holdout or take another.")
        numbers = ("forget_acc", "holdout_acc", "test_acc", "auc", "auc_low", "auc_high")
        return cls(
            lr,
            unlearned["forget_acc"],
            **{name: row[name] for name in numbers},
            verdict=row["holdout_verdict"],
            reason=row["holdout_reason"],
            halves=halves,
        )


@dataclass(frozen=True)
class Sweep:
    """All rates, and which one to take.

    Attributes:
        before: the model before unlearning.
        candidates: one for each rate.
        chosen: the rate to take; None where none can be recommended.
        reason: why, as a phrase.
        tried: the rate that the second half of the holdout data was asked about; None where there was none.
    """

    before: Candidate
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reason: str
    tried: Candidate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as plain values, for JSON."""
        rates = [dataclasses.asdict(c) for c in (self.before, *self.candidates)]
        chosen, tried = (one.lr if one else None for one in (self.chosen, self.tried))
        return {"rates": rates, "chosen": chosen, "tried": tried, "reason": self.reason}


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
    """The rule: the smallest rate that one half of the holdout data calls forgotten, if the other half confirms it.

    Args:
        before: the model before unlearning.
        candidates: one for each rate.
    """
    rates = tuple(sorted(candidates, key=lambda c: c.lr))
    tried = next((c for c in rates if c.halves[0].verdict == FORGOTTEN), None)
    if tried is None:
        return Sweep(before, rates, None, f"no rate is {FORGOTTEN} on one half of the holdout data; {_why_none(rates)}")
    confirmed = tried.halves[1]
    if confirmed.verdict != FORGOTTEN:
        reason = (
            f"lr = {tried.lr:g} is {FORGOTTEN} on one half of the holdout data, and the other half does not confirm it "
            f"({confirmed.verdict}: {confirmed.reason})"
        )
        return Sweep(before, rates, None, reason, tried)
    reason = f"it is the smallest rate that is {FORGOTTEN} on one half of the holdout data, and the other confirms it"
    return Sweep(before, rates, tried, reason, tried)


def _why_none(rates: Sequence[Candidate]) -> str:
    """What keeps every rate from being forgotten, and what to try."""
    undecided = [c for c in rates if c.halves[0].verdict == CANNOT_TELL]
    if undecided:
        return undecided[0].halves[0].reason
    verdicts = {c.halves[0].verdict for c in rates}
    if verdicts == {REMEMBERED}:
        return "every rate is remembered: try larger ones"
    if verdicts == {OVER_UNLEARNED}:
        return "every rate is over-unlearned: try smaller ones"
    return "smaller rates are remembered and larger ones over-unlearned: try rates between them"
