# SPDX-License-Identifier: Apache-2.0
"""Studies so small that a unit takes a fraction of a second, and what their records say without the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedquit.running.training_cache import Reporter, Silent
from fedquit.studies.execution import StudyOutcome, run_study
from fedquit.studies.plan import Plan, expand, read_study

RECIPE = """
title = "tiny"
[data]
name = "synthetic"
options = { examples = 120, test_examples = 60, classes = 3, size = 4 }
partition = "iid"
clients = 4
holdout = 0.2
[model]
name = "seam_methods:small_net"
dtype = "float64"
[train]
rounds = 3
batch_size = 8
lr = 0.1
[[request]]
clients = [1]
[method]
name = "fedquit"
lr = 1e-2
[recover]
until = "rounds"
max_rounds = 2
[evaluate]
attacks = []
"""
BLOCK: dict[str, Any] = {
    "recipe": "tiny.toml",
    "targets": [0, "1+2"],
    "seeds": [[0], [1]],
    "retrain_seeds": [[10, 11], [20, 21]],
    "methods": ["fedquit", "pga"],
    "follow": 1,
    "control": True,
}


class Quiet(Silent):
    """An overview that says nothing, and remembers which units were begun."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def runs(self, done: int, total: int, title: str) -> None:
        self.titles.append(title)

    def lane(self, number: int) -> Reporter:
        return self


def planned(where: Path, *blocks: dict[str, Any], **values: Any) -> Plan:
    """The plan of a study on the tiny recipe."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "tiny.toml").write_text(RECIPE)
    return expand(read_study({"block": list(blocks) or [BLOCK], **values}), folder=where)


def carried_out(plan: Plan, out: Path, **options: Any) -> StudyOutcome:
    return run_study(plan, out, overview=options.pop("overview", Quiet()), **options)


def records(out: Path) -> dict[str, Any]:
    """All records of a study without the clock, by their path."""
    found = {}
    for path in sorted((out / "units").rglob("*.json")):
        if path.name != "comparison.json":
            found[str(path.relative_to(out))] = _without_clock(json.loads(path.read_text()))
    return found


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(inner) for key, inner in value.items() if key != "seconds"}
    if isinstance(value, list):
        return [_without_clock(inner) for inner in value]
    return value
