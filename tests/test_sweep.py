# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.errors import InputError
from fedquit.studies.sweep import Candidate, HalfVerdict, choose, parse_rates, sweep_rates
from worlds import tiny

FORGOTTEN = "forgotten within the margin"


def candidate(lr: float, one: str, other: str = FORGOTTEN, reason: str = "blind: why") -> Candidate:
    halves = [HalfVerdict(verdict, reason, 0.5, 0.45, 0.55, 300) for verdict in (one, other)]
    return Candidate(lr, 50.0, 50.0, 50.0, 80.0, 0.5, 0.46, 0.54, verdict=one, reason=reason, halves=tuple(halves))


BEFORE = candidate(0, "remembered")


def test_the_smallest_rate_that_is_forgotten_on_one_half_is_confirmed_on_the_other() -> None:
    found = choose(BEFORE, [candidate(1e-3, FORGOTTEN), candidate(1e-4, FORGOTTEN), candidate(1e-5, "remembered")])
    assert found.chosen is not None
    assert found.chosen.lr == 1e-4
    assert found.to_dict()["chosen"] == 1e-4


def test_a_rate_that_the_other_half_does_not_confirm_is_not_replaced_by_the_next() -> None:
    """Else the other half would choose as well, and confirm nothing."""
    found = choose(BEFORE, [candidate(1e-4, FORGOTTEN, "remembered"), candidate(1e-3, FORGOTTEN, FORGOTTEN)])
    assert found.chosen is None
    assert found.tried is not None
    assert found.tried.lr == 1e-4
    assert "the other half does not confirm it (remembered" in found.reason


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        (["cannot tell", "cannot tell"], "blind: why"),
        (["remembered", "cannot tell"], "blind: why"),
        (["remembered", "remembered"], "every rate is remembered: try larger ones"),
        (["over-unlearned", "over-unlearned"], "every rate is over-unlearned: try smaller ones"),
        (["remembered", "over-unlearned"], "try rates between them"),
    ],
)
def test_where_no_rate_is_forgotten_none_is_named(verdicts: list[str], reason: str) -> None:
    found = choose(BEFORE, [candidate(10.0**i, verdict) for i, verdict in enumerate(verdicts)])
    assert found.chosen is None
    assert found.tried is None
    assert found.reason.endswith(reason)


def test_a_sweep_needs_no_retrain_and_trains_once(tmp_path: Path) -> None:
    recipe = tiny(data={"options": {"examples": 400, "noise": 3.0, "classes": 3, "size": 4}}, train={"rounds": 8})
    found = sweep_rates(recipe, [1e-6, 1e-2], 0, tmp_path / "s")
    assert [c.lr for c in found.candidates] == [1e-6, 1e-2]
    assert found.before.auc == pytest.approx(found.candidates[0].auc, abs=0.01), "a tiny rate does nothing"
    assert found.candidates[0].auc > found.candidates[1].auc, "the larger rate forgets more"
    assert found.candidates[1].unlearned_acc < found.before.unlearned_acc
    assert len(list((tmp_path / "s" / "cache").iterdir())) == 1
    assert found.chosen is None, "the holdout data is far too small"
    assert [half.holdout_size for half in found.before.halves] == [found.before.halves[0].holdout_size] * 2


def test_a_sweep_without_holdout_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"add --set data\.holdout=0\.2"):
        sweep_rates(tiny(data={"holdout": 0.0}), [1e-4], 1, tmp_path)


@pytest.mark.parametrize("text", ["", "a,b", "1e-4;3e-4", "0", "-1", "nan", "inf"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--lr"):
        parse_rates(text)


def test_rates_are_sorted_and_taken_once() -> None:
    assert parse_rates("1e-3, 1e-4,0.001") == [1e-4, 1e-3]
