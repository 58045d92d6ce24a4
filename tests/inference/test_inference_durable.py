# SPDX-License-Identifier: Apache-2.0
"""Durability as one verdict over several windows: error rates and power, simulated with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedquit.inference.durable import DURABLE, NOT_DURABLE, DurableVerdict, judge_durable
from fedquit.inference.gaps import CANNOT_TELL, GapSample, Margin

WINDOWS = (5, 10, 20)


def tolerance(rate: float, studies: int) -> float:
    """Three Monte-Carlo standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / studies)


def followed(
    draw: np.random.Generator, gaps: Sequence[float] = (0.0, 0.0, 0.0), targets: int = 8, retrains: int = 3
) -> dict[int, GapSample]:
    """A method that lies off Retrain by some gap in each window; three quarters of its variance are the run's own.

    A window of Retrain and one of the method have a variance of 1.
    """
    run = math.sqrt(0.75) * draw.normal(size=(targets, 1))
    windows = run + 0.5 * draw.normal(size=(targets, len(gaps))) + np.array(gaps)
    gold = draw.normal(size=(targets, retrains))
    return {end: GapSample.of(windows[:, [i]], gold) for i, end in enumerate(WINDOWS[: len(gaps)])}


def one(samples: dict[int, GapSample], margin: Margin | None = None) -> DurableVerdict:
    return judge_durable({"m": samples}, WINDOWS, margin)["m"]


def rate(word: str, gaps: Sequence[float], margin: Margin | None, studies: int, targets: int = 8) -> float:
    draw = np.random.default_rng(60)
    return sum(one(followed(draw, gaps, targets), margin).word == word for _ in range(studies)) / studies


def test_a_retrain_in_the_place_of_the_method_is_called_not_durable_in_at_most_five_percent() -> None:
    assert rate(NOT_DURABLE, (0.0, 0.0, 0.0), None, 400) <= 0.05 + tolerance(0.05, 400)


@pytest.mark.parametrize("gaps", [(0.0, 0.0, 2.0), (2.0, 2.0, 2.0)], ids=["comes back late", "never was there"])
def test_a_method_at_the_margin_in_some_window_is_called_durable_in_at_most_five_percent(gaps: list[float]) -> None:
    assert rate(DURABLE, gaps, Margin(2.0), 400) <= 0.05 + tolerance(0.05, 400)


def test_the_power_of_both_claims() -> None:
    assert rate(DURABLE, (0.0, 0.0, 0.0), Margin(2.0), 300) == pytest.approx(0.92, abs=tolerance(0.92, 300))
    assert rate(NOT_DURABLE, (0.0, 0.0, 3.0), None, 300) >= 0.99 - tolerance(0.99, 300)


def test_three_methods_together_err_in_five_percent() -> None:
    draw, studies = np.random.default_rng(61), 80
    wrong: tuple[list[bool], list[bool]] = ([], [])
    for _ in range(studies):
        null = judge_durable({f"{i}": followed(draw) for i in range(3)}, WINDOWS)
        wrong[0].append(any(verdict.word == NOT_DURABLE for verdict in null.values()))
        off = judge_durable({f"{i}": followed(draw, (0.0, 0.0, 2.0)) for i in range(3)}, WINDOWS, Margin(2.0))
        wrong[1].append(any(verdict.word == DURABLE for verdict in off.values()))
    for claims in wrong:
        assert np.mean(claims) <= 0.05 + tolerance(0.05, studies)


def test_the_verdict_names_the_window_and_keeps_what_it_rests_on() -> None:
    draw = np.random.default_rng(62)
    back = one(followed(draw, (0.0, 0.0, 9.0)), Margin(2.0))
    assert back.word == NOT_DURABLE
    assert back.reason.startswith("not durable: differs from Retrain 20 rounds after the stop (+")
    assert list(back.windows) == ["5", "10", "20"]
    assert back.windows["20"].gap == pytest.approx(9.0, abs=1.5)
    assert (back.windows["5"].targets, back.windows["5"].retrains, back.hypotheses) == (8, 3, 1)
    below = one(followed(draw, (-9.0, 0.0, 0.0)))
    assert "5 rounds after the stop (−" in below.reason
    lasting = one(followed(draw), Margin(4.0))
    assert (lasting.word, lasting.margin) == (DURABLE, 4.0)
    assert lasting.reason.startswith("durable: within ±4.0 points of Retrain 5, 10 and 20 rounds after the stop (p = ")
    assert lasting.equivalence_p == max(window.equivalence_p or 1.0 for window in lasting.windows.values())
    unknown = one(followed(draw))
    assert unknown.word == CANNOT_TELL
    assert "an equivalence needs a margin that is fixed beforehand" in unknown.reason


def test_too_short_a_path_can_show_a_return_and_nothing_else() -> None:
    draw = np.random.default_rng(63)
    short = one(followed(draw, (0.0, 0.0)), Margin(4.0))
    assert (short.word, short.equivalence_p) == (CANNOT_TELL, None)
    assert short.reason == (
        "cannot tell: no path reaches 20 rounds beyond the recovery's stop; set recover.follow = 20"
    )
    assert one(followed(draw, (0.0, 9.0)), Margin(4.0)).word == NOT_DURABLE
    single = one(followed(draw, (9.0, 9.0, 9.0), retrains=1), Margin(4.0))
    assert "5 rounds after the stop, one Retrain shows no spread" in single.reason
    assert judge_durable({}, WINDOWS) == {}
