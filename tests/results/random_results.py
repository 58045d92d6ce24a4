# SPDX-License-Identifier: Apache-2.0
"""Random comparisons, in memory and as folders: methods, targets, seeds, failures, budgets, and missing fields."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fedquit.inference.trace import VERDICTS
from fedquit.results.comparison import Comparison, Outcome, Target, build_comparison, members
from fedquit.results.folders import write_comparison, write_results
from fedquit.results.schema import COMPARED

OPTIONAL = (*COMPARED[1:], "forget_js")  # the test accuracy is always there
COST_FIELDS = ("down_bytes", "up_bytes", "client_epochs", "server_epochs", "client_flops", "server_flops")
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """A comparison as `fedquit compare` would have found it."""

    methods: tuple[str, ...]
    targets: tuple[Target, ...]
    seeds: int
    failed: frozenset[tuple[str, int, int]]  # method, index of the target, seed
    absent: frozenset[str]  # fields that no row has
    unmeasured: frozenset[str]  # fields that are null in some rows
    budgets: tuple[float, ...]
    again: bool  # whether Retrain was run with another seed
    numbers: int  # the seed of all numbers
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    retrain_again: dict[tuple[Target, int], dict[str, Any]] = field(default_factory=dict, repr=False)


@st.composite
def studies(draw: st.DrawFn) -> Study:
    """Any comparison with at least one run that came through."""
    methods = tuple(
        draw(st.lists(st.sampled_from(["fedquit", "fukd", "own|m_x&1"]), min_size=1, max_size=3, unique=True))
    )
    every: list[Target] = [0, 1, 7, (2, 3), (4, 5, 6)]
    targets = tuple(draw(st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True)))
    seeds = draw(st.integers(1, 2))
    places = [(m, t, s) for m in methods for t in range(len(targets)) for s in range(seeds)]
    failed = draw(st.frozensets(st.sampled_from(places), max_size=len(places) - 1))
    costs = st.sampled_from(("server_flops", "server_epochs", "client_flops"))
    absent = draw(st.frozensets(st.sampled_from(OPTIONAL) | costs, max_size=4))
    study = Study(
        methods=methods,
        targets=targets,
        seeds=seeds,
        failed=failed,
        absent=absent - {"retain_acc"},
        unmeasured=draw(st.frozensets(st.sampled_from(OPTIONAL), max_size=3)),
        budgets=tuple(draw(st.lists(st.sampled_from([0.05, 0.25, 0.5]), max_size=2, unique=True))),
        again=draw(st.booleans()),
        numbers=draw(st.integers(0, 2**32)),
    )
    fill(study)
    return study


def fill(study: Study) -> None:
    """Draw the numbers of all runs."""
    source = random.Random(study.numbers)
    for seed in range(study.seeds):
        for index, target in enumerate(study.targets):
            shared = {phase: _row(study, source, "", phase, target, seed) for phase in ("original", "retrained")}
            if study.again:
                study.retrain_again[target, seed] = _row(study, source, "retrain", "retrained again", target, seed)
            for method in study.methods:
                place = Path(f"seed-{seed}") / _folder(target) / method.replace(":", ".")
                if (method, index, seed) in study.failed:
                    outcome = Outcome(method, target, seed, place, failure="it did not converge")
                else:
                    rows = [
                        {**shared["original"], "method": "original"},
                        {**shared["retrained"], "method": "retrain"},
                        _row(study, source, method, "unlearned", target, seed),
                        {**_row(study, source, method, "recovered", target, seed), "curve": [], "runs": 1},
                        *(_at_budget(study, source, method, share, target, seed) for share in sorted(study.budgets)),
                    ]
                    outcome = Outcome(method, target, seed, place, rows=tuple(rows))
                study.outcomes.append(outcome)


def _folder(target: Target) -> str:
    clients = "+".join(map(str, members(target)))
    return f"clients-{clients}" if isinstance(target, tuple) else f"client-{clients}"


def _row(study: Study, source: random.Random, method: str, phase: str, target: Target, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "phase": phase, "request": 0, "clients": list(members(target))}
    row |= {"samples": False, "seed": seed, "rounds": source.randrange(9), "seconds": source.uniform(0, 300)}
    row |= {key: source.uniform(0, 100) for key in COMPARED}
    row["forget_js"] = source.uniform(0, 0.69)
    row |= {"down_bytes": source.randrange(9) * 10**5, "up_bytes": source.randrange(9) * 10**5}
    row |= {"client_epochs": float(source.randrange(4)), "server_epochs": float(source.randrange(4))}
    row |= {"client_flops": source.randrange(9) * 10**9, "server_flops": source.randrange(99) * 10**9}
    row["holdout_acc"] = source.uniform(0, 100)
    row |= {"holdout_verdict": source.choice(VERDICTS), "holdout_reason": "hold-out too small: why"}
    row["fingerprint"] = f"{source.getrandbits(64):x}"
    row |= {"a_later_field": {"kept": True}}
    for key in study.unmeasured:
        if source.random() < 0.4:
            row[key] = None
    return {key: value for key, value in row.items() if key not in study.absent}


def _at_budget(
    study: Study, source: random.Random, method: str, share: float, target: Target, seed: int
) -> dict[str, Any]:
    spent = share * source.choice([0.5, 1.0, 3.0])
    return {**_row(study, source, method, "budget", target, seed), "budget": share, "budget_spent": spent}


def write_study(study: Study, out: Path) -> Comparison:
    """Write the runs and the comparison as folders, and return the comparison."""
    outcomes = []
    for outcome in study.outcomes:
        placed = Outcome(
            outcome.method,
            outcome.target,
            outcome.seed,
            out / outcome.folder,
            rows=outcome.rows,
            failure=outcome.failure,
        )
        outcomes.append(placed)
        if not outcome.failure:
            write_results(placed.folder, run_results(outcome))
    recipe = {"title": "Random", "seed": 0}
    comparison = build_comparison(recipe, {"version": "0"}, study.methods, outcomes, study.retrain_again, out)
    write_comparison(out, comparison)
    return comparison


def run_results(outcome: Outcome) -> Mapping[str, Any]:
    recipe = {"title": "Random", "seed": outcome.seed, "method": {"name": outcome.method}}
    return {"schema": 1, "recipe": recipe, "versions": {"fedquit": "0"}, "rows": json.loads(json.dumps(outcome.rows))}
