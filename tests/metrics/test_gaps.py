# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.metrics import METRICS
from fedquit.audit.metrics.gaps import avg_gap, gap, judge, paired
from fedquit.errors import InputError
from fedquit.inference.gaps import GapSample
from fedquit.inference.multiplicity import holm
from fedquit.results.gaps import mean_difference_p

quick = settings(max_examples=40)
percents = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12)


def test_the_table_names_every_metric_in_one_line() -> None:
    assert set(METRICS) == {
        "gap_verdict",
        "one_run_audit",
        "paired",
        "roc",
        "auc",
        "gap",
        "avg_gap",
        "tug_of_war",
        "tug_of_war_mia",
        "js_divergence",
        "holdout_null",
        "leakage",
        "relearn_time",
        "backdoor",
        "klom",
        "forgetting_quality",
        "model_test",
        "epsilon_bound",
        "sample_exposure",
        "entropy_ks",
    }
    assert all("\n" not in m.description and len(m.description) > 20 and callable(m.function) for m in METRICS.values())


def test_a_gap_is_absolute_for_each_target_with_mean_and_sample_deviation() -> None:
    found = gap([60.0, 40.0, 50.0], [58.0, 44.0, 50.0])
    assert found.per_target.tolist() == [2.0, 4.0, 0.0]
    assert found.mean == 2.0
    assert found.std == pytest.approx(2.0)  # sqrt((0 + 4 + 4) / 2)


def test_gaps_that_would_cancel_do_not() -> None:
    assert gap([55.0, 45.0], [50.0, 50.0]).mean == 5.0


def test_identical_numbers_have_no_gap_and_one_target_no_deviation() -> None:
    assert gap([1.0, 2.0], [1.0, 2.0]).mean == 0
    assert gap([1.0], [2.0]).std is None, "one target says nothing about the spread"


def test_the_average_gap_of_fedquit_on_the_even_split_is_the_printed_one() -> None:
    assert f"{avg_gap(retain=6.1, forget=1.4, song=5.0, yeom=3.0):.1f}" == "3.9"
    assert avg_gap(retain=6.1, forget=1.4, song=5.0, yeom=3.0) == pytest.approx(3.875)


@pytest.mark.parametrize(("forget", "retain"), [(95.0, 97.0), (10.0, 10.0)], ids=["does nothing", "wipes the model"])
def test_a_broken_unlearner_differs_from_retrain(forget: float, retain: float) -> None:
    rng = np.random.default_rng(0)
    oracle = {
        k: v + rng.normal(0, 1, 10) for k, v in {"forget": 70.0, "retain": 97.0, "song": 50.0, "yeom": 55.0}.items()
    }
    again = {k: v + rng.normal(0, 1, 10) for k, v in oracle.items()}
    third = {k: v + rng.normal(0, 1, 10) for k, v in oracle.items()}
    # under a wiped model the attacks may well say what they say of Retrain; the accuracies do not
    broken = {**again, "forget": np.full(10, forget), "retain": np.full(10, retain)}

    def averaged(method: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]) -> float:
        return avg_gap(**{k: gap(method[k], oracle[k]).mean for k in oracle})

    retrains = np.stack([oracle["forget"], again["forget"]], axis=1)
    for method, word in ((broken, "differs"), (third, "cannot tell")):
        sample = GapSample.of(method["forget"][:, None], retrains)
        assert judge({("m", "forget"): sample})["m", "forget"].word == word
    assert averaged(broken) > 3 * averaged(again)


def test_the_interval_of_student_worked_out_by_hand() -> None:
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0
    half = 4.302652729911275 / math.sqrt(3)  # t(0.975, 2) times the deviation 1
    assert (found.t.low, found.t.high) == pytest.approx((2 - half, 2 + half))
    assert not found.different
    assert 1 <= found.bootstrap.low < 2 < found.bootstrap.high <= 3


def test_a_clear_difference_is_called_one_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(0, 10, 20)  # targets differ far more than methods do: pairing takes that out
    a, b, c = targets + 2 + rng.normal(0, 1, 20), targets + rng.normal(0, 1, 20), targets + rng.normal(0, 1, 20)
    assert paired(a, b).different
    assert paired(a, b).t.low > 1
    assert not paired(b, c).different
    assert not paired(b, b).different


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    draws = [paired(rng.normal(1, 1, 15), np.zeros(15)) for _ in range(150)]
    assert np.mean([d.t.covers(1) for d in draws]) > 0.9
    assert np.mean([d.bootstrap.covers(1) for d in draws]) > 0.86


@pytest.mark.parametrize("targets", [2, 3, 6])
@pytest.mark.parametrize("step", [1.0, 0.1])
def test_equal_methods_on_a_grid_are_called_different_in_at_most_5_percent(targets: int, step: float) -> None:
    """Accuracies of 100 or 1,000 examples with a spread of 1 point: the differences of 2 targets often coincide."""
    draws = 6000
    differences = differences_on_a_grid(step, (draws, 1, 1, targets))
    called = np.mean([mean_difference_p(own) <= 0.05 for own in differences[:, 0]])
    assert called <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize(("targets", "step"), [(2, 0.1), (3, 0.1), (3, 1.0), (6, 1.0)])
def test_of_sixteen_equal_methods_in_six_measures_on_a_grid_some_pair_is_called_in_at_most_5_percent(
    targets: int, step: float
) -> None:
    """By Holm's rule; in 81 of these studies of 2 targets some differences coincide, and were called at p = 0."""
    studies = 100
    differences = differences_on_a_grid(step, (studies, 16, 6, targets))
    called = np.mean([min(holm([mean_difference_p(own) for own in study])) <= 0.05 for study in differences])
    assert called <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def differences_on_a_grid(step: float, size: tuple[int, int, int, int]) -> Any:
    """Of equal methods, by study and pair: the gap of each less that of the first, accuracies in steps."""
    studies, methods, measures, targets = size
    draw = np.random.default_rng(2)
    accuracies = np.round(draw.normal(50, 1, (2, studies, 1 + methods, measures, targets)) / step) * step
    sizes = np.abs(accuracies[0] - accuracies[1])
    return (sizes[:, 1:] - sizes[:, :1]).reshape(studies, methods * measures, targets)


def test_one_target_proves_nothing_and_equal_differences_need_no_interval() -> None:
    assert not paired([5.0], [1.0]).different
    assert paired([5.0], [1.0]).t.high == math.inf
    same = paired([1.1, 2.1, 3.1], [1.0, 2.0, 3.0])
    assert same.t.low == same.t.high == pytest.approx(0.1)
    assert (same.p, same.different) == (0.25, False), "all eight patterns of signs but two have a smaller mean"
    six = paired(np.arange(6) + 90.3, np.arange(6) + 90.0)
    assert (six.p, six.different) == (2.0**-5, True)
    assert paired([96.2, 94.1, 0.3], [96.2, 94.1, 0.1 + 0.2]).p == 1.0, "equal up to rounding"
    two = paired([1.0, 3.0], [0.0, 0.0])
    assert (two.bootstrap.low, two.bootstrap.high) == (1.0, 3.0)


@quick
@given(pairs=percents)
def test_swapping_the_methods_turns_the_sign_and_keeps_the_gap(pairs: list[tuple[float, float]]) -> None:
    a, b = np.array(pairs).T
    assert gap(a, b).mean == gap(b, a).mean
    one, other = paired(a, b), paired(b, a)
    assert one.t.low == pytest.approx(-other.t.high, abs=1e-9)
    assert one.bootstrap.low <= one.mean + 1e-9
    assert one.bootstrap.high >= one.mean - 1e-9


def test_what_does_not_pair_is_refused() -> None:
    with pytest.raises(InputError, match="do not pair"):
        gap([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="do not pair"):
        gap([], [])
    with pytest.raises(InputError, match="not finite"):
        paired([1.0, math.nan], [1.0, 2.0])
