# SPDX-License-Identifier: Apache-2.0
"""Error rates and power of the verdicts on gaps to Retrain, over simulated studies with fixed seeds.

    python benchmarks/gap_verdicts.py [STUDIES]

It prints the tables of docs/evaluation.md. Values are drawn with a standard deviation of 1 for Retrain; a gap is in
that unit. "unequal": each target has a spread of its own, exp N(0, 0.7); "t3": heavy tails. The other tables are of
accuracies in steps, most of them the worst of some places of method and Retrain on the grid.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedquit.inference.gaps import (
    DIFFERS,
    GapSample,
    any_target_p,
    bias_p,
    client_gap,
    equivalence_p,
    judge,
    mean_interval,
    seed_blocks_p,
    studentised_p,
)

Floats = npt.NDArray[np.float64]
LEVEL = 0.05


def normal(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """Equal spreads."""
    return draw.normal(size=(targets, values))


def unequal(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """A spread of its own for each target."""
    return draw.normal(size=(targets, values)) * np.exp(draw.normal(0, 0.7, (targets, 1)))


def heavy(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """Student's t with three degrees of freedom, with a standard deviation of 1."""
    return draw.standard_t(3, size=(targets, values)) / math.sqrt(3)


def correlated(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """All targets of a seed share an Original: correlation 0.5."""
    common = draw.normal(size=(1, values))
    return (common + draw.normal(size=(targets, values))) * math.sqrt(0.5)


def rate(studies: int, study: Callable[[np.random.Generator], bool]) -> float:
    """The share of studies in which something is claimed."""
    draw = np.random.default_rng(0)
    return sum(study(draw) for _ in range(studies)) / studies


def sample(values: Floats, runs: int = 1, gap: float = 0.0) -> GapSample:
    """The first values of each target are the method's, moved by the gap."""
    moved = values.copy()
    moved[:, :runs] += gap
    return GapSample.of(moved[:, :runs], moved[:, runs:])


def old_rule(draw: np.random.Generator) -> bool:
    """A gap is a difference if it is larger than that of one other Retrain."""
    method, retrain, again = draw.normal(size=(3, 5))
    return bool(np.abs(method - retrain).mean() > np.abs(again - retrain).mean())


def twenty(draw: np.random.Generator, *, corrected: bool) -> bool:
    """Four methods and five measures without any gap; correlated within a run."""
    retrain = draw.normal(size=(5, 5, 3))
    runs = (draw.normal(size=(5, 4, 1)) + draw.normal(size=(5, 4, 5))) * math.sqrt(0.5)
    pairs = [(i, j) for i in range(4) for j in range(5)]
    samples = {(str(i), str(j)): GapSample.of(runs[:, i, j, None], retrain[:, j]) for i, j in pairs}
    if corrected:
        return any(verdict.word == DIFFERS for verdict in judge(samples).values())
    return any(any_target_p(one) <= LEVEL for one in samples.values())


def covers_not(draw: np.random.Generator) -> bool:
    """The interval of the mean, with targets as units, though they share an Original."""
    low, high = mean_interval(sample(correlated(draw, 5, 7), 3).gaps)
    return not low <= 0 <= high


Study = Callable[[np.random.Generator], bool]
KINDS = {"normal": normal, "unequal": unequal, "t3": heavy}


def differs(kind: str, targets: int, gap: float = 0.0) -> Study:
    """One run of the method, three Retrains: any target differs."""
    return lambda draw: any_target_p(sample(KINDS[kind](draw, targets, 4), gap=gap)) <= LEVEL


def biased(targets: int, gap: float) -> Study:
    """One run of the method, three Retrains: the mean differs."""
    return lambda draw: bias_p(sample(normal(draw, targets, 4), gap=gap)) <= LEVEL


def equivalent(gap: float) -> Study:
    """One run of the method, three Retrains, five targets: equivalent within two standard deviations."""
    return lambda draw: equivalence_p(sample(normal(draw, 5, 4), gap=gap).gaps, 2.0) <= LEVEL


def equivalent_to_same(kind: str) -> Study:
    """Five runs of the method and of Retrain, ten targets, a gap of two standard deviations."""
    gap = 2.0 * (math.exp(0.49) if kind == "unequal" else 1.0)
    return lambda draw: studentised_p(sample(KINDS[kind](draw, 10, 10), 5, gap), 2.0) <= LEVEL


CLAIMS: list[tuple[str, str, Study]] = [
    ("larger than the gap of one other Retrain (the former rule); no gap", "5 %", old_rule),
    *((f"any target differs; no gap, {kind}, T = 5, R = 3", "at most 5 %", differs(kind, 5)) for kind in KINDS),
    *((f"any target differs; gap 2s, T = {t}, R = 3", "high", differs("normal", t, 2.0)) for t in (3, 5, 10)),
    *((f"the mean differs; gap 2s, T = {t}, R = 3", "high", biased(t, 2.0)) for t in (3, 5, 10)),
    ("any of 20 differs, uncorrected; no gap, T = 5, R = 3", "5 %", lambda draw: twenty(draw, corrected=False)),
    ("any of 20 differs, Holm; no gap, T = 5, R = 3", "at most 5 %", lambda draw: twenty(draw, corrected=True)),
    ("the mean differs, targets as units; no gap, shared Original (0.5), M = 3, R = 4", "5 %", covers_not),
    (
        "any target differs, whole seeds; no gap, shared Original (0.5), M = 3, R = 4",
        "at most 5 %",
        lambda draw: seed_blocks_p(sample(correlated(draw, 5, 7), 3)) <= LEVEL,
    ),
    ("equivalent within 2s, fixed beforehand; gap 2s, T = 5, R = 3", "at most 5 %", equivalent(2.0)),
    ("equivalent within 2s, fixed beforehand; no gap, T = 5, R = 3", "high", equivalent(0.0)),
    *(
        (f"equivalent within 2s of the same Retrains; gap 2s, {kind}, T = 10, M = R = 5", "at most 5 %", study)
        for kind, study in ((kind, equivalent_to_same(kind)) for kind in KINDS)
    ),
]


PLACES = [(method, retrain) for method in (0.0, 0.25, 0.45) for retrain in (0.0, 0.3, 0.5)]


def mean_of_rounded(centre: float, spread: float) -> float:
    """The mean of a normal number that is rounded to a whole one."""
    whole = np.arange(math.floor(centre) - 40, math.floor(centre) + 41)
    below = [
        0.5 * (1 + math.erf((edge - centre) / spread / math.sqrt(2))) for edge in (*(whole - 0.5), whole[-1] + 0.5)
    ]
    return float((whole * np.diff(below)).sum())


def on_grid(studies: int, targets: int, retrains: int, spread: float) -> Floats:
    """The worst rates over the places, with steps of 1 and that standard deviation of Retrain.

    Returns:
        Called equivalent at the margin, by the t test alone, with the step known and as values show it; the interval of
        the mean misses.
    """
    draw = np.random.default_rng(0)
    worst = np.zeros(4)
    for method, retrain in PLACES:
        gap = mean_of_rounded(52 + method, spread) - mean_of_rounded(50 + retrain, spread)
        found = np.zeros(4)
        for _ in range(studies):
            values = draw.normal(50 + retrain, spread, size=(targets, 1 + retrains))
            values[:, 0] += 2 + method - retrain
            one = sample(np.round(values))
            low, high = mean_interval(one.gaps, step=1.0)
            found += [
                equivalence_p(one.gaps, gap) <= LEVEL,
                equivalence_p(one.gaps, gap, step=1.0) <= LEVEL,
                equivalence_p(one.gaps, gap, step=one.step) <= LEVEL,
                not low - 1e-9 <= gap <= high + 1e-9,
            ]
        worst = np.maximum(worst, found / studies)
    return worst


def below_a_step(studies: int, targets: int, share: float) -> tuple[float, float, float]:
    """Retrains that coincide, and a method of which that share of runs lies one step off: the gap is that share.

    Returns:
        Called equivalent at the margin, with the step known and as values show it; the interval of the mean misses.
    """
    draw = np.random.default_rng(0)
    found = np.zeros(3)
    for _ in range(studies):
        one = GapSample.of(draw.random((targets, 1)) < share, np.zeros((targets, 3)))
        low, high = mean_interval(one.gaps, step=1.0)
        found += [
            equivalence_p(one.gaps, share, step=1.0) <= LEVEL,
            equivalence_p(one.gaps, share, step=one.step) <= LEVEL,
            not low <= share <= high,
        ]
    known, shown, missed = found / studies
    return float(known), float(shown), float(missed)


SIZES = ((10, 10, 1000), (10, 10, 10, 10, 1000), (20, 20, 20, 20, 2000), (20, 22, 24, 26, 28), (97, 99, 100, 101, 103))


def different_sizes(studies: int, sizes: tuple[int, ...]) -> Floats:
    """The worst rates over spreads and places for clients of so many examples, with six Retrains.

    Returns:
        Called equivalent at the margin and interval missed; called no benefit over leaving and interval missed.
    """
    draw = np.random.default_rng(0)
    steps = 100 / np.array(sizes, dtype=np.float64)
    worst = np.zeros(4)
    for spread, method, retrain in itertools.product((0.3, 1.0, 2.0), (52.0, 53.1), (50.0, 50.3)):
        centres = [
            h * (mean_of_rounded(method / h, spread / h) - mean_of_rounded(retrain / h, spread / h)) for h in steps
        ]
        gap = float(np.mean(centres))
        found = np.zeros(4)
        for _ in range(studies if gap > 0.1 else 0):
            values = draw.normal(retrain, spread, size=(len(sizes), 7))
            values[:, 0] += method - retrain
            values = np.round(values / steps[:, None]) * steps[:, None]
            for way, gaps in enumerate((sample(values).gaps, values[:, 0] - values[:, 1])):
                low, high = mean_interval(gaps, step=steps)
                found[2 * way] += equivalence_p(gaps, gap, step=steps) <= LEVEL
                found[2 * way + 1] += not low - 1e-9 <= gap <= high + 1e-9
        worst = np.maximum(worst, found / studies)
    return worst


def power_on_grid(studies: int, targets: int, step: float) -> tuple[float, float]:
    """How often a method without a gap is called equivalent within two deviations, with and without the step."""
    draw = np.random.default_rng(0)
    found = np.zeros(2)
    for _ in range(studies):
        values = draw.normal(50.3, 1.0, size=(targets, 4))
        one = sample(np.round(values / step) * step if step else values)
        found += [equivalence_p(one.gaps, 2.0, step=step) <= LEVEL, equivalence_p(one.gaps, 2.0) <= LEVEL]
    return float(found[0] / studies), float(found[1] / studies)


def single_clients(studies: int, retrains: int) -> tuple[float, float]:
    """How often another Retrain lies outside of a single client's interval, at worst: without the step, and with it."""
    draw = np.random.default_rng(0)
    worst = np.zeros(2)
    for spread in (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0):
        for place in (0.0, 0.25, 0.4, 0.5):
            found = np.zeros(2)
            for _ in range(studies):
                values = np.round(draw.normal(50 + place, spread, size=1 + retrains))
                for way, step in enumerate((1e-6, 1.0)):  # the first is as good as none, and has a width of 0
                    alone = client_gap(values[:1], values[1:], step=step)
                    found[way] += alone is not None and alone.outside
            worst = np.maximum(worst, found / studies)
    return float(worst[0]), float(worst[1])


def main() -> None:
    """Print the tables as Markdown."""
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| claim, and what is true | should be | found |")
    print("|---|---|---|")
    for claim, wanted, study in CLAIMS:
        print(f"| {claim} | {wanted} | {100 * rate(studies, study):.1f} % |")
    print()
    print("| T | R | s in steps | equivalent, t test alone | step known | step from the values | mean outside |")
    print("|---|---|---|---|---|---|---|")
    for targets, retrains in ((2, 3), (3, 3), (5, 3), (5, 8), (10, 3)):
        for spread in (0.05, 0.15, 0.5, 1.0):
            rates = " | ".join(f"{100 * found:.1f} %" for found in on_grid(studies, targets, retrains, spread))
            print(f"| {targets} | {retrains} | {spread:g} | {rates} |")
    print()
    print("| T | gap in steps | equivalent, step known | step from the values | mean outside |")
    print("|---|---|---|---|---|")
    for targets, share in itertools.product((5, 6, 10, 20), (0.1, 0.2, 0.4, 0.6)):
        rates = " | ".join(f"{100 * found:.1f} %" for found in below_a_step(5 * studies, targets, share))
        print(f"| {targets} | {share:g} | {rates} |")
    print()
    print("| examples of the clients | equivalent | mean outside | no benefit over leaving | mean outside |")
    print("|---|---|---|---|---|")
    for sizes in SIZES:
        rates = " | ".join(f"{100 * found:.1f} %" for found in different_sizes(studies, sizes))
        print(f"| {', '.join(map(str, sizes))} | {rates} |")
    print()
    print("| T | no grid | steps of s | steps of 2s |")
    print("|---|---|---|---|")
    for targets in (3, 4, 5, 6, 8, 10):
        each = [power_on_grid(5 * studies, targets, step) for step in (0.0, 1.0, 2.0)]
        rates = " | ".join(f"{100 * known:.0f} % ({100 * plain:.0f} %)" for known, plain in each)
        print(f"| {targets} | {rates} |")
    print()
    print("| R | another Retrain outside, without the step | with the step |")
    print("|---|---|---|")
    for retrains in (2, 3, 5, 10, 19):
        plain, known = single_clients(5 * studies, retrains)
        print(f"| {retrains} | {100 * plain:.1f} % | {100 * known:.1f} % |")


if __name__ == "__main__":
    main()
