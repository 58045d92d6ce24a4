# SPDX-License-Identifier: Apache-2.0
"""A comparison in few words: each method with its verdict, its control and its hold-outs."""

from __future__ import annotations

from collections.abc import Sequence

from fedquit.results.summary import MethodSummary
from fedquit.results.verdicts import headline
from fedquit.results.words import fixed, signed

SHORT_COLUMNS = ("method", "vs Retrain", "forget gap", "Natural's", "hold-out")
PARTS = ("samples", "distribution")


def in_short(lines: Sequence[MethodSummary]) -> list[MethodSummary]:
    """The lines of which the short table speaks: Original, Retrain and each method that came through."""
    return [line for line in lines if line.phase in ("original", "retrained", "recovered") and line.runs]


def short_cells(line: MethodSummary) -> tuple[str, str, str, str, str]:
    """The cells of `SHORT_COLUMNS`: the method, its verdict, its gap and Natural's at equal rounds, its hold-outs.

    Args:
        line: Of `comparison.json`.
    """
    judged = headline(line.verdicts)
    untested = "not tested" if line.phase == "recovered" else ""
    gap = line.gaps.get("forget_acc")
    natural = line.natural_gaps.get("forget_acc")
    own, control = ["" if value is None else fixed(value) for value in (gap, natural)]
    words: dict[str, float] = {}
    for verdict, number in line.holdout_verdicts.items():
        word = verdict.partition(":")[0].removesuffix(" within the margin")
        words[word] = words.get(word, 0) + number
    ordered = sorted(words, key=lambda word: -words[word])
    held = ", ".join(f"{words[word]:g} {word}" for word in ordered)
    return line.method, judged.word if judged else untested, own, control, held


def parts_of_gap(line: MethodSummary) -> list[str]:
    """The cells of `PARTS`: memory of the samples and knowledge of the distribution, in points."""
    return ["" if points is None else signed(points) for points in (line.sample_memory, line.distribution_knowledge)]
