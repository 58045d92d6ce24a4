# SPDX-License-Identifier: Apache-2.0
"""What is read from a path, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fedquit.results.comparison import Comparison
from fedquit.results.folders import RunResults
from fedquit.results.path import at_round, durability, last_rounds, mean_path, natural_fields, path_points
from fedquit.results.requests import RequestRows
from fedquit.results.summary import MethodSummary, group_by_method, summarise


def points(phase: str, start: int, *forget: float, **more: float) -> list[dict[str, Any]]:
    rounds = enumerate(forget, start)
    return [{"round": r, "phase": phase, "test_acc": 80.0, "forget_acc": f, "bytes": r, **more} for r, f in rounds]


PATH = [
    *points("original", 0, 90.0),
    *points("unlearning", 1, 10.0, 5.0),
    *points("recovery", 3, 20.0, 30.0),
    *points("followed", 5, *map(float, range(1, 21))),
]


def test_windows_after_the_stop_end_at_their_round_and_hold_five() -> None:
    fields = durability(PATH)
    assert fields["forget_acc_after_5"] == 3.0, "rounds 1 to 5"
    assert fields["forget_acc_after_10"] == 8.0, "rounds 6 to 10"
    assert fields["forget_acc_after_20"] == 18.0, "rounds 16 to 20"
    assert fields["test_acc_after_20"] == 80.0
    assert "holdout_acc_after_5" not in fields
    assert durability(PATH[:-1]).keys() == {f"{key}_acc_after_{n}" for key in ("test", "forget") for n in (5, 10)}
    assert durability(PATH[:5]) == {}


def test_the_last_rounds_are_rounds_of_training() -> None:
    whole = last_rounds(PATH)
    assert (whole["forget_acc_last"], whole["last_rounds"]) == (25.0, 2), "those that follow have windows of their own"
    short = last_rounds(PATH[:5])
    assert (short["forget_acc_last"], short["last_rounds"]) == (25.0, 2), "recovery alone, no unlearning"
    assert last_rounds(PATH[:3]) == {"test_acc_last": 80.0, "forget_acc_last": 5.0, "last_rounds": 1}
    assert last_rounds([]) == {}
    long = [*points("recovery", 1, *map(float, range(12))), *points("followed", 13, *[99.0] * 20)]
    assert last_rounds(long)["forget_acc_last"] == 6.5, "up to the stop"
    bare = [*PATH[:3], *points("followed", 3, *[99.0] * 20)]
    assert (last_rounds(bare)["forget_acc_last"], last_rounds(bare)["last_rounds"]) == (5.0, 1), "no recovery at all"
    assert last_rounds(points("training", 21, 50.0, 60.0))["forget_acc_last"] == 55.0


def test_natural_is_read_after_as_many_rounds_and_over_the_same_window() -> None:
    natural = [*points("original", 0, 90.0), *points("recovery", 1, 88.0, 80.0, 70.0, 60.0, auc=0.6)]
    at_stop = natural_fields(natural, 4.0, PATH[:5])
    assert at_stop["natural_forget_acc"] == 60.0
    assert at_stop["natural_auc"] == 0.6
    assert at_stop["natural_forget_acc_last"] == 65.0, "rounds 3 and 4, as the method's"
    assert natural_fields(natural, 5.0) == {}, "no number rather than that of another round"
    assert natural_fields(natural, 4.0, PATH)["natural_forget_acc_last"] == 65.0, "whatever follows the stop"
    longer = [*PATH[:5], *points("recovery", 5, 40.0)]
    assert "natural_forget_acc_last" not in natural_fields(natural, 4.0, longer), "round 5 is missing"
    assert natural_fields(natural, None) == {}


def test_the_mean_of_several_recoveries_keeps_phases_and_drops_what_one_lacks() -> None:
    other = [*points("recovery", 3, 40.0, 60.0)]
    other[1].pop("test_acc")
    mean = mean_path([PATH[3:5], other])
    assert [(p["round"], p["phase"], p["forget_acc"]) for p in mean] == [(3, "recovery", 30.0), (4, "recovery", 45.0)]
    assert "test_acc" in mean[0]
    assert "test_acc" not in mean[1]


def test_a_damaged_path_is_no_path() -> None:
    assert path_points("?") == []
    assert path_points([1, {"round": "x"}, {"round": 2.0}]) == [{"round": 2.0}]
    assert at_round([{"round": 2.0}], 2) == {"round": 2.0}


def request(control: list[dict[str, Any]], *extra: dict[str, Any], **recovered: Any) -> RequestRows:
    same = {"method": "m", "request": 0, "clients": [1], "test_acc": 80.0}
    rows = [
        {**same, "phase": "retrained", "forget_acc": 50.0, "forget_acc_last": 48.0, "rounds": 9},
        {**same, "phase": "unlearned", "forget_acc": 5.0, "rounds": 2},
        {**same, "phase": "recovered", "forget_acc": 30.0, "rounds": 2, "path": PATH[:5], **recovered},
        *({**same, **row} for row in extra),
    ]
    return RequestRows(0, rows, control=control)


def test_a_method_is_summed_up_beside_natural_at_its_own_rounds() -> None:
    one = request(points("recovery", 1, 0.0, 0.0, 60.0, 70.0), forget_acc_last=25.0, last_rounds=2)
    two = request(points("recovery", 1, 0.0, 0.0, 40.0, 40.0), forget_acc_last=35.0, last_rounds=1)
    line = summarise("m", [one, two])
    assert line.rounds_from_request == 4.0
    assert line.natural["forget_acc"] == 55.0
    assert line.natural_gaps["forget_acc"] == 15.0, "the mean of |70 - 50| and |40 - 50|"
    assert line.on_path_gaps["forget_acc"] == 20.0
    assert line.last["forget_acc"] == 30.0
    assert line.last_gaps["forget_acc"] == pytest.approx(18.0), "against Retrain's own last rounds"
    assert line.natural_last["forget_acc"] == pytest.approx(52.5)
    assert line.last_rounds == 1.0
    assert MethodSummary.read(line.to_dict()).natural == line.natural


def test_natural_comes_from_the_run_s_own_control_first_and_old_rows_have_none() -> None:
    row = {"phase": "natural", "forget_acc": 61.0, "path": points("recovery", 1, 0.0, 0.0, 0.0, 61.0)}
    own = request([], row)
    assert own.natural["natural_forget_acc"] == 61.0
    assert request([], natural_forget_acc=62.0).natural == {"natural_forget_acc": 62.0}, "without the path"
    assert request([]).natural == {}
    assert summarise("m", [request([])]).natural == {}
    budget = request([], row, {"phase": "budget", "budget": 0.5, "rounds": 1, "forget_acc": 20.0}).budgets[0.5]
    assert budget.natural["natural_forget_acc"] == 0.0, "after three rounds, as far as the budget goes"


def test_a_comparison_keeps_its_controls_and_one_without_them_is_read() -> None:
    stored = Comparison("c", controls={"seed-0/client-1": points("recovery", 1, 3.0)}).to_dict()
    assert Comparison.read("c", stored).controls["seed-0/client-1"][0]["forget_acc"] == 3.0
    assert "controls" not in Comparison("c").to_dict()
    assert Comparison.read("c", {"table": []}).controls == {}


def test_what_is_recorded_beside_a_recovery_does_not_make_another_method_of_it() -> None:
    """Runs of an older version know neither key."""
    recovers = [{"max_rounds": 2}, {"max_rounds": 2, "follow": 0, "control": True}, {"max_rounds": 2, "follow": 20}]
    rows = request([]).rows
    runs = [RunResults("r", {"recover": recover, "method": {"name": "m"}}, {}, rows) for recover in recovers]
    assert [(group.label, len(group.requests)) for group in group_by_method(runs)] == [("m", 3)]
