# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.errors import InputError
from fedquit.studies.sweep import Candidate, choose, parse_rates, sweep_rates
from worlds import tiny


def candidate(lr: float, auc: float, test_acc: float = 80.0, unlearned_acc: float = 50.0) -> Candidate:
    return Candidate(lr, unlearned_acc, 50.0, 50.0, test_acc, auc, auc - 0.05, auc + 0.05)


REMEMBERED, BLIND = candidate(0, 0.8, unlearned_acc=50.0), candidate(0, 0.52)


def test_of_the_rates_that_leave_no_trace_the_most_useful_is_taken() -> None:
    rates = [(1e-5, 0.7, 90.0), (1e-4, 0.53, 85.0), (1e-3, 0.49, 70.0), (1e-2, 0.3, 20.0)]
    found = choose(REMEMBERED, [candidate(*rate) for rate in rates])
    assert found.chosen is not None
    assert found.chosen.lr == 1e-4
    assert [c.verdict for c in found.candidates] == ["remembered", "no trace", "no trace", "over-unlearned"]


def test_where_every_rate_leaves_a_trace_the_faintest_is_taken() -> None:
    found = choose(REMEMBERED, [candidate(1, 0.7), candidate(2, 0.6), candidate(3, 0.2)])
    assert found.chosen is not None
    assert found.chosen.lr == 2
    assert "every rate leaves a trace" in found.reason


def test_a_comparison_that_sees_nothing_never_names_the_rate_that_does_nothing() -> None:
    idle = candidate(1e-9, 0.5, test_acc=99.0, unlearned_acc=50.0)
    found = choose(BLIND, [idle, candidate(1e-4, 0.5, 80.0, 9.0), candidate(1e-3, 0.5, 70.0, 1.0)])
    assert found.chosen is not None
    assert found.chosen.lr == 1e-4
    assert "cannot tell forget from holdout data even before unlearning" in found.reason
    nothing = choose(BLIND, [idle])
    assert nothing.chosen is None
    assert "try larger ones" in nothing.reason


def test_a_sweep_needs_no_retrain_and_trains_once(tmp_path: Path) -> None:
    recipe = tiny(data={"options": {"examples": 400, "noise": 3.0, "classes": 3, "size": 4}}, train={"rounds": 8})
    found = sweep_rates(recipe, [1e-6, 1e-2], 0, tmp_path / "s")
    assert [c.lr for c in found.candidates] == [1e-6, 1e-2]
    assert found.before.auc == pytest.approx(found.candidates[0].auc, abs=0.01), "a tiny rate does nothing"
    assert found.candidates[0].auc > found.candidates[1].auc, "the larger rate forgets more"
    assert found.candidates[1].unlearned_acc < found.before.unlearned_acc
    assert len(list((tmp_path / "s" / "cache").iterdir())) == 1


def test_a_sweep_without_holdout_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"add --set data\.holdout=0\.2"):
        sweep_rates(tiny(data={"holdout": 0.0}), [1e-4], 1, tmp_path)


@pytest.mark.parametrize("text", ["", "a,b", "1e-4;3e-4", "0", "-1", "nan", "inf"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--lr"):
        parse_rates(text)


def test_rates_are_sorted_and_taken_once() -> None:
    assert parse_rates("1e-3, 1e-4,0.001") == [1e-4, 1e-3]
