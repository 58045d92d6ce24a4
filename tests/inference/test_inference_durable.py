# SPDX-License-Identifier: Apache-2.0
"""Durability over two measures and several windows: error rates and power, simulated with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fedquit.inference.durable import DURABLE, NOT_DURABLE, Asked, DurableVerdict, Window, judge_durable
from fedquit.inference.gaps import CANNOT_TELL, GapSample, Margin

WINDOWS = (5, 10, 20)
NAMES = {"forget_acc": "forget accuracy", "holdout_acc": "hold-out accuracy"}
SAMPLES = ("forget_acc",)
BOTH = tuple(NAMES)


def tolerance(rate: float, studies: int) -> float:
    """Three Monte-Carlo standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / studies)


def followed(
    draw: np.random.Generator,
    gaps: Sequence[float] = (0.0, 0.0, 0.0),
    targets: int = 8,
    retrains: int = 3,
    measures: Sequence[str] = BOTH,
) -> dict[Window, GapSample]:
    """A method that lies off Retrain by some gap in each window of the last measure.

    A window of Retrain and one of the method have a variance of 1. Three quarters of it are the run's own, and half of
    these are common to both measures.
    """
    common = math.sqrt(0.375) * draw.normal(size=(targets, 1 + retrains))
    samples: dict[Window, GapSample] = {}
    for measure in measures:
        run = common + math.sqrt(0.375) * draw.normal(size=(targets, 1 + retrains))
        windows = run[:, [0]] + 0.5 * draw.normal(size=(targets, len(gaps)))
        if measure == measures[-1]:
            windows = windows + np.array(gaps)
        gold = run[:, 1:] + 0.5 * draw.normal(size=(targets, retrains))
        for i, end in enumerate(WINDOWS[: len(gaps)]):
            samples[measure, end] = GapSample.of(windows[:, [i]], gold)
    return samples


def together(samples: Mapping[str, Mapping[Window, GapSample]], margin: Margin | None = None) -> list[DurableVerdict]:
    return list(judge_durable(samples, Asked(WINDOWS, NAMES, margin)).values())


def one(samples: dict[Window, GapSample], margin: Margin | None = None) -> DurableVerdict:
    (verdict,) = together({"m": samples}, margin)
    return verdict


def rate(
    word: str, gaps: Sequence[float], margin: Margin | None, studies: int, measures: Sequence[str] = BOTH
) -> float:
    draw = np.random.default_rng(60)
    return sum(one(followed(draw, gaps, measures=measures), margin).word == word for _ in range(studies)) / studies


@pytest.mark.parametrize("measures", [SAMPLES, BOTH], ids=["one measure", "two"])
def test_a_retrain_in_the_place_of_the_method_is_called_not_durable_in_at_most_five_percent(
    measures: tuple[str, ...],
) -> None:
    assert rate(NOT_DURABLE, (0.0, 0.0, 0.0), None, 400, measures) <= 0.05 + tolerance(0.05, 400)


@pytest.mark.parametrize("gaps", [(0.0, 0.0, 2.0), (2.0, 2.0, 2.0)], ids=["comes back late", "never was there"])
def test_a_method_at_the_margin_in_some_window_is_called_durable_in_at_most_five_percent(gaps: list[float]) -> None:
    assert rate(DURABLE, gaps, Margin(2.0), 400) <= 0.05 + tolerance(0.05, 400)


def test_the_power_of_both_claims() -> None:
    assert rate(DURABLE, (0.0, 0.0, 0.0), Margin(2.0), 300, SAMPLES) == pytest.approx(0.96, abs=tolerance(0.96, 300))
    assert rate(DURABLE, (0.0, 0.0, 0.0), Margin(2.0), 300) == pytest.approx(0.93, abs=tolerance(0.93, 300))
    assert rate(NOT_DURABLE, (0.0, 0.0, 3.0), None, 300) == pytest.approx(0.965, abs=tolerance(0.965, 300))


def test_three_methods_together_err_in_five_percent() -> None:
    draw, studies = np.random.default_rng(61), 80
    wrong: tuple[list[bool], list[bool]] = ([], [])
    for _ in range(studies):
        null = together({f"{i}": followed(draw) for i in range(3)})
        wrong[0].append(any(verdict.word == NOT_DURABLE for verdict in null))
        off = together({f"{i}": followed(draw, (0.0, 0.0, 2.0)) for i in range(3)}, Margin(2.0))
        wrong[1].append(any(verdict.word == DURABLE for verdict in off))
    for claims in wrong:
        assert np.mean(claims) <= 0.05 + tolerance(0.05, studies)


def test_the_verdict_names_measure_and_window_and_keeps_what_it_rests_on() -> None:
    draw = np.random.default_rng(62)
    back = one(followed(draw, (0.0, 0.0, 9.0)), Margin(2.0))
    assert back.word == NOT_DURABLE
    assert back.reason.startswith("not durable: hold-out accuracy differs from Retrain's 20 rounds after the stop (+")
    assert list(back.windows) == [f"{measure}_after_{end}" for measure in BOTH for end in WINDOWS]
    assert back.windows["holdout_acc_after_20"].gap == pytest.approx(9.0, abs=1.5)
    first = back.windows["forget_acc_after_5"]
    assert (first.targets, first.retrains, first.hypotheses, back.hypotheses) == (8, 3, 6, 1)
    below = one(followed(draw, (-9.0, 0.0, 0.0), measures=SAMPLES))
    assert below.reason.startswith("not durable: forget accuracy differs from Retrain's 5 rounds after the stop (−")
    lasting = one(followed(draw), Margin(4.0))
    assert (lasting.word, lasting.margin) == (DURABLE, 4.0)
    assert lasting.reason.startswith(
        "durable: forget accuracy and hold-out accuracy within ±4.0 points of Retrain's 5, 10 and 20 rounds after the "
        "stop (p < 0.001)"
    )
    assert lasting.equivalence_p == max(window.equivalence_p or 1.0 for window in lasting.windows.values())
    alone = one(followed(draw, measures=SAMPLES), Margin(4.0))
    assert alone.reason.startswith("durable: forget accuracy within ±4.0 points"), "it says what was not judged"
    unknown = one(followed(draw))
    assert unknown.word == CANNOT_TELL
    assert "an equivalence needs a margin that is fixed beforehand" in unknown.reason


def test_knowledge_of_the_distribution_that_stays_is_not_durable_forgetting() -> None:
    draw = np.random.default_rng(64)
    samples = followed(draw, (3.0, 3.0, 3.0))
    assert one(samples, Margin(2.0)).word == NOT_DURABLE
    assert one({key: own for key, own in samples.items() if key[0] == "forget_acc"}, Margin(4.0)).word == DURABLE


def test_too_short_a_path_can_show_a_return_and_nothing_else() -> None:
    draw = np.random.default_rng(63)
    short = one(followed(draw, (0.0, 0.0)), Margin(4.0))
    assert (short.word, short.equivalence_p) == (CANNOT_TELL, None)
    assert short.reason == (
        "cannot tell: no path reaches 20 rounds beyond the recovery's stop; set recover.follow = 20"
    )
    assert one(followed(draw, (0.0, 9.0)), Margin(4.0)).word == NOT_DURABLE
    single = one(followed(draw, (9.0, 9.0, 9.0), retrains=1), Margin(4.0))
    assert "forget accuracy 5 rounds after the stop, one Retrain shows no spread" in single.reason
    assert judge_durable({}, Asked(WINDOWS, NAMES)) == {}
