# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fedquit.audit.attacks import ATTACKS
from fedquit.results.averages import mean_curve, mean_density, mean_of_recoveries, mean_of_requests, mean_roc
from fedquit.results.schema import COMPARED, COSTS, MEASURES, REQUIRED, fault_of_row, number
from fedquit.results.words import share, times
from fedquit.running.costs import Costs
from fedquit.running.runner import run
from worlds import tiny

NOT_MEASURES = {"request", "samples", "seed", "runs"}  # numbers and truth values that say which row it is
SETTLED = ("_enough",)  # truth values about the outsiders


def test_results_need_neither_torch_nor_a_drawing_library() -> None:
    code = (
        "import fedquit.results, sys; assert not {'torch', 'matplotlib', 'scipy', 'jinja2', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_measures_names_every_number_of_a_row(tmp_path: Path) -> None:
    everything = tiny(
        recover={"until": "rounds", "max_rounds": 1, "budgets": [0.5], "follow": 20}
        | {"control": True, "retrain_longer": True},
        evaluate={"relearn": 1, "backdoor": 0.5, "backdoor_size": 2},
        data={"holdout": 0.2},
        audit={"canaries": 8, "guesses": 4, "kind": "both"},
    )
    rows = run(everything, tmp_path / "run")["rows"]
    measured = {key for row in rows for key, value in row.items() if number(value) is not None or value is None}
    assert measured - NOT_MEASURES <= MEASURES.keys(), "a number that no table would average"
    optional = {"relearn_ratio"}
    assert MEASURES.keys() - measured <= optional, "a measure that no row has"
    assert {f.name for f in fields(Costs)} < MEASURES.keys()
    assert {f"mia_{name}" for name in ATTACKS} < set(COMPARED)
    assert all(field in MEASURES for kind in COSTS.values() for field in kind.fields)


def row(**changes: Any) -> dict[str, Any]:
    return {"method": "m", "phase": "recovered", "request": 0, "clients": [1], "forget_acc": 10.0, **changes}


def test_recoveries_average_measures_and_keep_the_first_one_s_costs_and_verdicts() -> None:
    first = row(
        rounds=2, auc_low=0.4, down_bytes=5, **{"tpr_at_0.01_enough": True}, holdout_verdict="no trace", later=1.0
    )
    second = row(forget_acc=20.0, rounds=4, auc_low=0.6, down_bytes=9, holdout_verdict="remembered", later=3.0)
    assert mean_of_recoveries([first, second]) == first | {"forget_acc": 15.0, "auc_low": 0.5, "runs": 2}


def test_requests_average_numbers_but_no_interval_and_no_seed() -> None:
    averaged = mean_of_requests(
        [row(rounds=2, seed=1, auc=0.4, auc_low=0.3), row(rounds=4, seed=2, auc=0.6, auc_low=0.5)]
    )
    assert (averaged["rounds"], averaged["auc"]) == (3.0, 0.5)
    assert not {"seed", "auc_low"} & averaged.keys()


def test_a_curve_that_was_over_sooner_stays_where_it_ended() -> None:
    long = [{"round": 0, "test_acc": 10.0}, {"round": 1, "test_acc": 20.0}, {"round": 2, "test_acc": 30.0}]
    short = [{"round": 0, "test_acc": 30.0, "forget_acc": 1.0}]
    assert mean_curve([long, short]) == [
        {"round": 0.0, "test_acc": 20.0},
        {"round": 1.0, "test_acc": 25.0},
        {"round": 2.0, "test_acc": 30.0},
    ]
    assert mean_curve([long]) == long
    assert mean_curve([]) == []


def test_means_of_roc_curves_and_densities() -> None:
    one, other = {"fpr": [0.1, 1.0], "tpr": [0.2, 1.0]}, {"fpr": [0.1, 1.0], "tpr": [0.4, 1.0]}
    assert mean_roc([one, other, {"fpr": [0.5], "tpr": [0.5]}])["tpr"] == pytest.approx([0.3, 1.0])
    left = {"edges": [0.0, 1.0], "forget": [1.0]}
    right = {"edges": [1.0, 2.0], "forget": [1.0]}
    assert mean_density([left, right], bins=4) == {"edges": [0.0, 0.5, 1.0, 1.5, 2.0], "forget": [0.5] * 4}
    assert mean_density([left, {"edges": [0.0, 1.0], "test": [1.0]}]) == {}


@pytest.mark.parametrize(
    ("damaged", "fault"),
    [
        (3, "is not an object"),
        ({}, "has no usable method"),
        (row(request="0"), "has no usable request"),
        (row(clients=None), "has no usable clients"),
        (row(clients=[[0]]), "has no usable clients"),
        (row(holdout_verdict=["no trace"]), "has no usable holdout_verdict"),
        ({key: value for key, value in row().items() if key in REQUIRED}, "has no measure: none of test_acc"),
        (row(forget_acc=-1.0), "has forget_acc -1, which is not a percentage"),
        (row(forget_acc=None), ""),
        (row(forget_acc="?"), ""),
        (row(forget_acc=10**400), ""),
    ],
)
def test_a_row_is_read_or_says_why_not(damaged: object, fault: str) -> None:
    said = fault_of_row(damaged)
    assert said.startswith(fault) if fault else said == ""


def test_how_numbers_are_printed() -> None:
    assert [times(38.64, 1.0), times(0.0393, 9.0), times(None, 0.0), times(None, None), times(1.0, 2.0)] == [
        "38.6×",
        "0.039×",
        "free",
        "",
        "1.0×",
    ]
    assert [share(v) for v in (2743.2, 26.25, 0.25, 0.0, None)] == [
        "2743\u00a0%",
        "26.2\u00a0%",
        "0.25\u00a0%",
        "0.0\u00a0%",
        "–",
    ]
