# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.errors import InputError
from fedquit.sweep import Candidate, choose, parse_rates, sweep_rates
from worlds import tiny


def candidate(lr: float, auc: float, test_acc: float = 80.0, half: float = 0.05) -> Candidate:
    return Candidate(lr, 50.0, 50.0, test_acc, auc, auc - half, auc + half)


def test_of_the_rates_that_leave_no_trace_the_most_useful_is_taken() -> None:
    found = choose(
        [candidate(1e-5, 0.7, 90), candidate(1e-4, 0.53, 85), candidate(1e-3, 0.49, 70), candidate(1e-2, 0.3, 20)]
    )
    assert [c.chosen for c in found] == [False, True, False, False]
    assert [c.verdict for c in found] == [
        "still remembered",
        "cannot be told from unseen data",
        "cannot be told from unseen data",
        "treated worse than unseen data",
    ]


def test_where_every_rate_leaves_a_trace_the_faintest_is_taken() -> None:
    assert [c.chosen for c in choose([candidate(1, 0.7), candidate(2, 0.6), candidate(3, 0.2)])] == [False, True, False]


def test_a_sweep_needs_no_retrain_and_trains_once(tmp_path: Path) -> None:
    recipe = tiny(data={"options": {"examples": 400, "noise": 3.0, "classes": 3, "size": 4}}, train={"rounds": 8})
    found = sweep_rates(recipe, [1e-6, 1e-2], 0, tmp_path / "s")
    assert [c.lr for c in found] == [1e-6, 1e-2]
    assert found[0].auc > found[1].auc, "the larger rate forgets more"
    assert sum(c.chosen for c in found) == 1
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
