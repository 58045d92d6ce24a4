# SPDX-License-Identifier: Apache-2.0
"""Whether what was forgotten stays forgotten: a method against Retrain in windows of rounds after the recovery's stop.

A method is `durable` where it is equivalent to Retrain in every measure and window, and `not durable` where it differs
from Retrain in some measure and window. Equivalence in all of them needs no correction for their number (Berger 1982);
a difference in any of W of them is corrected by the factor W (Bonferroni). Over methods, Holm's rule is applied to
either kind of claim. The tests of one window are those of `gaps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedquit.inference.gaps import CANNOT_TELL, LEVEL, GapSample, GapVerdict, Margin, rounded_p, tested, why_not
from fedquit.inference.multiplicity import holm_in_two_families

DURABLE = "durable"
NOT_DURABLE = "not durable"
DURABLE_WORDS = (DURABLE, NOT_DURABLE, CANNOT_TELL)

Window = tuple[str, int]  # a measure, as "forget_acc", and the last round of a window, counted from the stop


def window_field(window: Window) -> str:
    """The field of a row that has the mean over a window, as in "forget_acc_after_20"."""
    measure, end = window
    return f"{measure}_after_{end}"


@dataclass(frozen=True)
class DurableVerdict:
    """What may be said about a method in all measures and windows after its recovery together.

    Attributes:
        word: One of `DURABLE_WORDS`.
        reason: A sentence on why it is so, and what would tell.
        p: Of "some window differs", corrected for windows, measures and methods; None where no test was possible.
        equivalence_p: Of "not within the margin in some window", by Holm's rule over methods; None without a test.
        margin: In points; of the first window where it counts standard deviations of Retrain. None without one.
        hypotheses: How many methods were judged together.
        windows: By the field of each window, as "forget_acc_after_20": gap, interval and sizes; its p-values are for
            itself.
    """

    word: str
    reason: str
    p: float | None = None
    equivalence_p: float | None = None
    margin: float | None = None
    hypotheses: int = 1
    windows: Mapping[str, GapVerdict] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What is asked of every method.

    Attributes:
        ends: The last rounds of the windows, counted from the stop.
        names: By measure, what a sentence calls it, as "forget accuracy"; the first one is asked of every method, the
            others where a method has them.
        margin: Of the equivalence; without one nothing is called durable.
    """

    ends: Sequence[int]
    names: Mapping[str, str]
    margin: Margin | None = None

    def measures(self, samples: Mapping[Window, GapSample]) -> list[str]:
        """Those that a method is judged by."""
        first, *others = self.names
        return [first, *(measure for measure in others if any(measure == known for known, _ in samples))]

    def windows(self, samples: Mapping[Window, GapSample]) -> list[Window]:
        """All that must be equivalent for a method to be durable."""
        return [(measure, end) for measure in self.measures(samples) for end in self.ends]


def judge_durable(samples: Mapping[str, Mapping[Window, GapSample]], asked: Asked) -> dict[str, DurableVerdict]:
    """The verdict of each method over all measures and windows, corrected together by Holm's rule over methods.

    Args:
        samples: By method and by the windows that it has.
        asked: Which windows and measures, and the margin.
    """
    tests = sum(len(asked.windows(own)) for own in samples.values())
    found: dict[str, DurableVerdict] = {}
    for method, own in samples.items():
        each = {window: tested(sample, asked.margin, tests) for window, sample in own.items()}
        found[method] = _over_windows(each, asked.windows(own), len(samples))
    adjusted = holm_in_two_families(found)
    return {method: _worded(verdict, samples[method], asked) for method, verdict in adjusted.items()}


def _over_windows(each: Mapping[Window, GapVerdict], windows: Sequence[Window], methods: int) -> DurableVerdict:
    """Both p-values of one method over its windows, before Holm's rule."""
    ps = [verdict.p for verdict in each.values() if verdict.p is not None]
    equivalent = [verdict.equivalence_p for window, verdict in each.items() if window in windows]
    known = [p for p in equivalent if p is not None]
    return DurableVerdict(
        CANNOT_TELL,
        "",
        p=min(1.0, len(ps) * min(ps)) if ps else None,
        equivalence_p=max(known) if len(known) == len(windows) else None,
        margin=next((verdict.margin for verdict in each.values()), None),
        hypotheses=methods,
        windows={window_field(window): verdict for window, verdict in each.items()},
    )


def _worded(verdict: DurableVerdict, samples: Mapping[Window, GapSample], asked: Asked) -> DurableVerdict:
    """The rule: a difference in a window comes first, then an equivalence in all; else nothing can be told."""
    if verdict.p is not None and verdict.p <= LEVEL:
        measure, end = min(samples, key=lambda window: _or_one(verdict.windows[window_field(window)].p))
        gap = verdict.windows[window_field((measure, end))].gap or 0.0
        points = f"{gap:+.1f} points".replace("-", "−")
        where = f"{asked.names[measure]} differs from Retrain's {end} rounds after the stop"
        reason = f"{NOT_DURABLE}: {where} ({points}, {rounded_p(verdict.p)})"
        return replace(verdict, word=NOT_DURABLE, reason=reason)
    if verdict.equivalence_p is not None and verdict.equivalence_p <= LEVEL:
        ends = _listed([str(end) for end in asked.ends])
        names = _listed([asked.names[measure] for measure in asked.measures(samples)])
        within = f"{names} within ±{verdict.margin:.1f} points of Retrain's {ends} rounds after the stop"
        reason = f"{DURABLE}: {within} ({rounded_p(verdict.equivalence_p)})"
        return replace(verdict, word=DURABLE, reason=reason)
    return replace(verdict, word=CANNOT_TELL, reason=f"{CANNOT_TELL}: {_why(verdict, samples, asked)}")


def _why(verdict: DurableVerdict, samples: Mapping[Window, GapSample], asked: Asked) -> str:
    """Which window keeps the verdict open, and what would tell."""
    windows = asked.windows(samples)
    missing = [end for measure, end in windows if (measure, end) not in samples]
    if missing:
        last = asked.ends[-1]
        return f"no path reaches {missing[-1]} rounds beyond the recovery's stop; set recover.follow = {last}"
    worst = max(windows, key=lambda window: _or_one(verdict.windows[window_field(window)].equivalence_p))
    one = replace(verdict.windows[window_field(worst)], p=verdict.p, equivalence_p=verdict.equivalence_p)
    measure, end = worst
    return f"{asked.names[measure]} {end} rounds after the stop, {why_not(one, samples[worst], asked.margin)}"


def _listed(names: Sequence[str]) -> str:
    """As in "5, 10 and 20"."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p
