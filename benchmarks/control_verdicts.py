# SPDX-License-Identifier: Apache-2.0
"""Error rates and power of the verdicts against Natural and of durability, over simulated studies with fixed seeds.

    python benchmarks/control_verdicts.py [STUDIES]

It prints two tables of docs/evaluation.md. A run has a standard deviation of 1 (s), and its difference from Natural,
which begins with the same Original, one of √2. Three quarters of the variance of a window after the recovery are the
run's own, and half of these are common to forget and hold-out accuracy; the rest is that of the window.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedquit.inference.durable import DURABLE, NOT_DURABLE, Asked, Window, judge_durable
from fedquit.inference.gaps import GapSample, Margin
from fedquit.inference.leaving import DIFFERS_FROM_LEAVING, NO_BENEFIT, LeavingSample, judge_leaving, sign_flip_p

Floats = npt.NDArray[np.float64]
Study = Callable[[np.random.Generator], bool]
LEVEL = 0.05
NO_GRID = [0.0] * 50  # the step of values that are not rounded


def normal(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """Equal spreads."""
    return draw.normal(size=(targets, values))


def unequal(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """A spread of its own for each target."""
    return draw.normal(size=(targets, values)) * np.exp(draw.normal(0, 0.7, (targets, 1)))


def skewed(draw: np.random.Generator, targets: int, values: int) -> Floats:
    """Values that are far from normal."""
    return draw.exponential(size=(targets, values))


KINDS = {"normal": normal, "unequal": unequal, "skewed": skewed}


def differences(draw: np.random.Generator, targets: int, runs: int = 1, kind: str = "normal") -> Floats:
    """Method less Natural, two runs with noise of their own from one Original."""
    pairs = KINDS[kind](draw, targets, 2 * runs)
    return pairs[:, :runs] - pairs[:, runs:]


def flips(values: Floats, *, shared: bool = False) -> bool:
    """Whether one method in one measure is called different."""
    return sign_flip_p(LeavingSample(list(values), shared).flipped) <= LEVEL


def twelve(draw: np.random.Generator, *, corrected: bool) -> bool:
    """Six methods and two measures that are Natural's; correlated within a run."""
    samples = {}
    for method in range(6):
        common = differences(draw, 10)
        for measure in range(2):
            own = math.sqrt(0.5) * (common + differences(draw, 10))
            samples[str(method), str(measure)] = LeavingSample(list(own), steps=NO_GRID[: len(own)])
    if corrected:
        return any(verdict.word == DIFFERS_FROM_LEAVING for verdict in judge_leaving(samples).values())
    return any(sign_flip_p(sample.flipped) <= LEVEL for sample in samples.values())


def shared(draw: np.random.Generator, *, whole: bool) -> bool:
    """Four targets, seven seeds; half of the variance is common to the targets of a seed."""
    values = math.sqrt(0.5) * (differences(draw, 1, 7) + differences(draw, 4, 7))
    return flips(values, shared=whole)


def no_benefit(shift: float) -> Study:
    """Seven targets, a margin of 2s."""

    def study(draw: np.random.Generator) -> bool:
        sample = LeavingSample(list(differences(draw, 7) + shift), steps=NO_GRID[:7])
        (verdict,) = judge_leaving({("m", "forget_acc"): sample}, Margin(2.0)).values()
        return verdict.word == NO_BENEFIT

    return study


def differs(targets: int, runs: int = 1, *, kind: str = "normal", effect: float = 0.0) -> Study:
    """One method in one measure that lies off by an effect."""
    return lambda draw: flips(differences(draw, targets, runs, kind) - effect)


SAMPLES = ("forget_acc",)
BOTH = ("forget_acc", "holdout_acc")


def followed(
    word: str,
    gaps: tuple[float, float, float],
    *,
    margin: float | None = None,
    methods: int = 1,
    measures: tuple[str, ...] = BOTH,
) -> Study:
    """Eight targets, three Retrains; the last measure lies off Retrain's by these gaps 5, 10 and 20 rounds after."""
    ends = (5, 10, 20)

    def method(draw: np.random.Generator) -> dict[Window, GapSample]:
        common = math.sqrt(0.375) * normal(draw, 8, 4)
        samples: dict[Window, GapSample] = {}
        for measure in measures:
            runs = common + math.sqrt(0.375) * normal(draw, 8, 4)
            off = np.array(gaps if measure == measures[-1] else (0, 0, 0))
            values = runs[:, [0]] + 0.5 * normal(draw, 8, 3) + off
            retrain = runs[:, 1:] + 0.5 * normal(draw, 8, 3)
            samples |= {
                (measure, end): GapSample.of(values[:, [i]], retrain, steps=NO_GRID[: len(retrain)])
                for i, end in enumerate(ends)
            }
        return samples

    def study(draw: np.random.Generator) -> bool:
        samples = {str(number): method(draw) for number in range(methods)}
        asked = Asked(ends, {measure: measure for measure in BOTH}, None if margin is None else Margin(margin))
        return any(verdict.word == word for verdict in judge_durable(samples, asked).values())

    return study


LASTING: list[tuple[str, str, Study]] = [
    ("not durable; Retrain itself", "at most 5 %", followed(NOT_DURABLE, (0, 0, 0))),
    ("not durable; Retrain itself, no hold-out", "at most 5 %", followed(NOT_DURABLE, (0, 0, 0), measures=SAMPLES)),
    ("any of 4 methods not durable; Retrain itself", "at most 5 %", followed(NOT_DURABLE, (0, 0, 0), methods=4)),
    ("not durable; off by 3s in the last window", "high", followed(NOT_DURABLE, (0, 0, 3))),
    ("not durable; off by 3s in all windows", "high", followed(NOT_DURABLE, (3, 3, 3))),
    ("durable within 2s; off by 2s in the last window", "at most 5 %", followed(DURABLE, (0, 0, 2), margin=2)),
    ("durable within 2s; off by 2s in all windows", "at most 5 %", followed(DURABLE, (2, 2, 2), margin=2)),
    (
        "any of 4 methods durable within 2s; off by 2s in the last window",
        "at most 5 %",
        followed(DURABLE, (0, 0, 2), margin=2, methods=4),
    ),
    ("durable within 2s; Retrain itself", "high", followed(DURABLE, (0, 0, 0), margin=2)),
    (
        "durable within 2s; Retrain itself, no hold-out",
        "high",
        followed(DURABLE, (0, 0, 0), margin=2, measures=SAMPLES),
    ),
]

CLAIMS: list[tuple[str, str, Study]] = [
    *((f"differs; Natural itself, {kind}, T = 8, M = 1", "at most 5 %", differs(8, kind=kind)) for kind in KINDS),
    ("differs; Natural itself, normal, T = 4, M = 2", "at most 5 %", differs(4, 2)),
    ("differs; forgets more by 2s, T = 6", "high", differs(6, effect=2.0)),
    ("differs; forgets more by 2s, T = 10", "high", differs(10, effect=2.0)),
    ("differs; forgets more by 1s, T = 10", "high", differs(10, effect=1.0)),
    ("any of 12 differs, uncorrected; Natural itself, T = 10", "5 %", lambda draw: twelve(draw, corrected=False)),
    ("any of 12 differs, Holm; Natural itself, T = 10", "at most 5 %", lambda draw: twelve(draw, corrected=True)),
    ("differs, each run by itself; shared Original (0.5)", "5 %", lambda draw: shared(draw, whole=False)),
    ("differs, whole seeds; shared Original (0.5)", "at most 5 %", lambda draw: shared(draw, whole=True)),
    ("no benefit within 2s; differs by 2s, T = 7", "at most 5 %", no_benefit(2.0)),
    ("no benefit within 2s; Natural itself, T = 7", "high", no_benefit(0.0)),
]


def main() -> None:
    """Print the tables as Markdown."""
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for title, claims in (("Against Natural", CLAIMS), ("Durability", LASTING)):
        print(f"{title}\n\n| claim, and what is true | should be | found |")
        print("|---|---|---|")
        for claim, wanted, study in claims:
            draw = np.random.default_rng(0)
            found = sum(study(draw) for _ in range(studies)) / studies
            print(f"| {claim} | {wanted} | {100 * found:.1f} % |")
        print()


if __name__ == "__main__":
    main()
