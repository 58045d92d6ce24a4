# SPDX-License-Identifier: Apache-2.0
"""What needs many models of each kind: one method over its runs, and its verdict among several methods."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedquit.inference.models import models_needed, smallest_p, verdict
from fedquit.inference.multiplicity import holm

DESCRIBED = ("shift", "klom", "klom_by_chance")  # numbers of a test that are averaged over the runs
SETS = ("forget", "retain", "test")  # the data on which models are compared


def mean_evidence(evidence: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method over its runs: means of what describes, and the tests and bounds of all runs together.

    Args:
        evidence: For each run its measures, as JSON objects of the same shape.

    Returns:
        Means, and `tests`, `epsilon_bound` and `exposed` as below. Empty without evidence.
    """
    if not evidence:
        return {}
    joint = ("tests", "epsilon_bound", "exposed")
    means: dict[str, Any] = _averaged([{k: v for k, v in each.items() if k not in joint} for each in evidence])
    tests = [each["tests"] for each in evidence if isinstance(each.get("tests"), Mapping)]
    bounds = [each["epsilon_bound"] for each in evidence if isinstance(each.get("epsilon_bound"), Mapping)]
    exposed = [each["exposed"] for each in evidence if isinstance(each.get("exposed"), Mapping)]
    if tests:
        means["tests"] = {name: _joint_test([each[name] for each in tests]) for name in SETS}
    if bounds:
        means["epsilon_bound"] = _smallest_bound(bounds)
    if exposed:
        means["exposed"] = {key: sum(each[key] for each in exposed) for key in exposed[0]}
    return means


def _joint_test(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the method differs from Retrain for any of its runs.

    The p-value is the smallest one times the number of runs (Bonferroni), which holds however the runs depend on each
    other; several targets share the seeds of their trainings.
    """
    runs = len(tests)
    joint: dict[str, Any] = {key: float(statistics.fmean(test[key] for test in tests)) for key in DESCRIBED}
    joint["examples"] = sum(test["examples"] for test in tests)
    joint["models"] = min(test["unlearned"] for test in tests)
    joint["permutations"] = min(test["permutations"] for test in tests)
    joint["runs"] = runs
    for key in ("shift_p", "klom_p", "p"):
        joint[key] = min(1.0, runs * min(test[key] for test in tests))
    return joint


def _smallest_bound(bounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The smallest of several lower bounds: with 95 % confidence one on the smallest epsilon, whatever the others."""
    return dict(min(bounds, key=lambda bound: float(bound["value"])))


def judged_together(references: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The references of several methods with a verdict on each kind of data, corrected for the number of methods.

    Args:
        references: For each method what `mean_evidence` returns; empty where it has none.

    Returns:
        The same, where each test has `p_holm` (Holm's correction over the methods, on this kind of data), `word`
        (`differs` or `cannot tell`) and, where no outcome could have been called a difference, `models_needed`.
    """
    judged = [dict(each) for each in references]
    tested = [each for each in judged if "tests" in each]
    for each in tested:
        each["tests"] = {name: dict(test) for name, test in each["tests"].items()}
    for name in SETS:
        adjusted = holm([each["tests"][name]["p"] for each in tested])
        for each, p in zip(tested, adjusted, strict=True):
            test = each["tests"][name]
            test["p_holm"] = p
            test["word"] = verdict(p)
            comparisons = test["runs"] * len(tested)
            least = max(smallest_p(test["models"], test["models"]), 1 / test["permutations"])
            if verdict(comparisons * least) != "differs":
                test["models_needed"] = models_needed(comparisons)
    return judged


def _averaged(values: Sequence[Any]) -> Any:  # noqa: ANN401 - what JSON can hold
    """The mean of numbers, part by part in objects; a truth value must hold for all."""
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], Mapping):
        keys = [key for key in values[0] if all(value[key] is not None for value in values)]
        return {key: _averaged([value[key] for value in values]) for key in keys}
    return float(statistics.fmean(values))
