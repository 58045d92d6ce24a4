# SPDX-License-Identifier: Apache-2.0
"""Whether what was forgotten stays forgotten: a method against Retrain in windows of rounds after the recovery's stop.

A method is `durable` where it is equivalent to Retrain in every window, and `not durable` where it differs from Retrain
in some window. Equivalence in all windows needs no correction for their number (Berger 1982); a difference in any of W
windows is corrected by the factor W (Bonferroni). Over methods, Holm's rule is applied to either kind of claim. The
tests of one window are those of `gaps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedquit.inference.gaps import CANNOT_TELL, LEVEL, GapSample, GapVerdict, Margin, rounded_p, tested, why_not
from fedquit.inference.multiplicity import holm_in_two_families

DURABLE = "durable"
NOT_DURABLE = "not durable"
DURABLE_WORDS = (DURABLE, NOT_DURABLE, CANNOT_TELL)


@dataclass(frozen=True)
class DurableVerdict:
    """What may be said about a method in all windows after its recovery together.

    Attributes:
        word: One of `DURABLE_WORDS`.
        reason: A sentence on why it is so, and what would tell.
        p: Of "some window differs", corrected for windows and methods; None where no test was possible.
        equivalence_p: Of "not within the margin in some window", by Holm's rule over methods; None without a test.
        margin: In points; of the first window where it counts standard deviations of Retrain. None without one.
        hypotheses: How many methods were judged together.
        windows: By the last round of each window, counted from the stop: gap, interval and sizes; its p-values are
            for itself.
    """

    word: str
    reason: str
    p: float | None = None
    equivalence_p: float | None = None
    margin: float | None = None
    hypotheses: int = 1
    windows: Mapping[str, GapVerdict] = field(default_factory=dict)


def judge_durable(
    samples: Mapping[str, Mapping[int, GapSample]], windows: Sequence[int], margin: Margin | None = None
) -> dict[str, DurableVerdict]:
    """The verdict of each method over all windows, corrected together by Holm's rule over methods.

    Args:
        samples: By method and by the last round of each window that it has.
        windows: The last rounds of all windows that are asked for.
        margin: Of the equivalence; without one nothing is called durable.
    """
    tests = len(samples) * len(windows)
    found: dict[str, DurableVerdict] = {}
    for method, by_window in samples.items():
        each = {end: tested(sample, margin, tests) for end, sample in by_window.items()}
        found[method] = _over_windows(each, windows, len(samples))
    adjusted = holm_in_two_families(found)
    return {method: _worded(verdict, samples[method], windows, margin) for method, verdict in adjusted.items()}


def _over_windows(each: Mapping[int, GapVerdict], windows: Sequence[int], methods: int) -> DurableVerdict:
    """Both p-values of one method over its windows, before Holm's rule."""
    ps = [verdict.p for verdict in each.values() if verdict.p is not None]
    equivalent = [verdict.equivalence_p for end, verdict in each.items() if end in windows]
    known = [p for p in equivalent if p is not None]
    return DurableVerdict(
        CANNOT_TELL,
        "",
        p=min(1.0, len(ps) * min(ps)) if ps else None,
        equivalence_p=max(known) if len(known) == len(windows) else None,
        margin=next((verdict.margin for verdict in each.values()), None),
        hypotheses=methods,
        windows={str(end): verdict for end, verdict in each.items()},
    )


def _worded(
    verdict: DurableVerdict, samples: Mapping[int, GapSample], windows: Sequence[int], margin: Margin | None
) -> DurableVerdict:
    """The rule: a difference in a window comes first, then an equivalence in all; else nothing can be told."""
    if verdict.p is not None and verdict.p <= LEVEL:
        end = min(verdict.windows, key=lambda name: _or_one(verdict.windows[name].p))
        gap = f"{verdict.windows[end].gap or 0.0:+.1f} points".replace("-", "−")
        where = f"differs from Retrain {end} rounds after the stop"
        reason = f"{NOT_DURABLE}: {where} ({gap}, p = {rounded_p(verdict.p)})"
        return replace(verdict, word=NOT_DURABLE, reason=reason)
    if verdict.equivalence_p is not None and verdict.equivalence_p <= LEVEL:
        ends = ", ".join(map(str, windows[:-1])) + f" and {windows[-1]}"
        within = f"within ±{verdict.margin:.1f} points of Retrain {ends} rounds after the stop"
        reason = f"{DURABLE}: {within} (p = {rounded_p(verdict.equivalence_p)})"
        return replace(verdict, word=DURABLE, reason=reason)
    return replace(verdict, word=CANNOT_TELL, reason=f"{CANNOT_TELL}: {_why(verdict, samples, windows, margin)}")


def _why(
    verdict: DurableVerdict, samples: Mapping[int, GapSample], windows: Sequence[int], margin: Margin | None
) -> str:
    missing = [end for end in windows if end not in samples]
    if missing:
        return f"no path reaches {missing[-1]} rounds beyond the recovery's stop; set recover.follow = {windows[-1]}"
    end = max(windows, key=lambda window: _or_one(verdict.windows[str(window)].equivalence_p))
    one = replace(verdict.windows[str(end)], p=verdict.p, equivalence_p=verdict.equivalence_p)
    return f"{end} rounds after the stop, {why_not(one, samples[end], margin)}"


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p
