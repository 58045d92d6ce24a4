# SPDX-License-Identifier: Apache-2.0
"""What a method does on the embedded data beside FedQUIT, Natural and Retrain: figures, from one short run each.

One seed and one client say which way a method goes, not how good it is: the error of such a verdict is not known, and
none is given. A model that is no better than guessing after its recovery is a violation all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquit.check.federation import described
from fedquit.check.report import BehaviourLine, Findings
from fedquit.core.method import Method
from fedquit.results.schema import number
from fedquit.results.words import fixed
from fedquit.running.recipe import Recipe, load
from fedquit.running.runner import run

SETTINGS = ("recover.max_rounds=6", "evaluate.attacks=[]")
BESIDE = ("fedquit", "natural")
CLASSES = 10
REFERENCES = {"original": "original", "retrained": "retrain"}  # rows that all runs share, and the names to show


def behaviour(
    method: Mapping[str, Any], folder: Path, findings: Findings, *, samples: bool = False
) -> list[BehaviourLine]:
    """Run a method and those beside it on Fashion-MNIST with wrong labels: one of four clients leaves.

    Args:
        method: the table `[method]` of a recipe.
        folder: for the runs.
        findings: where violations are noted.
        samples: whether half of the client's samples are to be forgotten, not all of them.

    Returns:
        Original, Retrain, and each method after its unlearning and its recovery.
    """
    base = load("compare", [*SETTINGS, *(["request.0.samples=0.5"] if samples else [])])
    name = str(method["name"])
    recipes = {other: _with(base, {"name": other}) for other in BESIDE if other != name}
    recipes["fedquit"] = base  # its rate is chosen for this data
    recipes[name] = _with(base, {**base.method, **method} if name == "fedquit" else method)
    attached: dict[str, Method] = {other: recipe.build_method() for other, recipe in recipes.items()}
    lines: list[BehaviourLine] = []
    for other, recipe in recipes.items():
        try:
            rows = run(recipe, folder / other.replace(":", "."), cache=folder / "cache", attached=attached)["rows"]
        except Exception as error:  # a user's method may raise anything
            where, seen = f"Fashion-MNIST, {other}", f"the run ends in {described(error)}"
            findings.add("behaviour", "error", where, seen, "try it with `fedquit run compare --set method.name=…`")
            continue
        shown = [row for row in rows if row["phase"] in ("unlearned", "recovered")]
        lines += [_line(row, other) for row in shown]
        if other == name:
            _judge_model(lines[-1], findings)
            shared = [row for row in rows if row["phase"] in REFERENCES]
            lines = [*(_line(row, REFERENCES[row["phase"]]) for row in shared), *lines]
    return lines


def _with(base: Recipe, method: Mapping[str, Any]) -> Recipe:
    return dataclasses.replace(base, method=dict(method))


def _line(row: Mapping[str, Any], method: str) -> BehaviourLine:
    test, forget = (number(row.get(key)) for key in ("test_acc", "forget_acc"))
    return BehaviourLine(method, row["phase"], test, forget, row["rounds"], row["down_bytes"] + row["up_bytes"])


def _judge_model(last: BehaviourLine, findings: Findings) -> None:
    if last.test_accuracy is None or last.test_accuracy <= 100 / CLASSES:
        findings.add(
            "behaviour",
            "chance",
            f"Fashion-MNIST, {last.method}, {last.phase}",
            f"the model gets {fixed(last.test_accuracy)} % of the test images right, no more than guessing does",
            "unlearn less (a lower rate, fewer epochs), or let ordinary training follow (`recovers = True`)",
        )
