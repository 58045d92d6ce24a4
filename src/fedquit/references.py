# SPDX-License-Identifier: Apache-2.0
"""What needs many models: the same erasure and the same Retrain, each with other seeds, compared example by example.

One unlearned model against one Retrain says how two models differ; many of each say how two *procedures* differ, which
is what unlearning is about. The Retrains lie in the cache and serve every method.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedquit.attacks.lira import lira_offline, ulira
from fedquit.attacks.strength import roc
from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.metrics.forgetting_quality import forgetting_quality
from fedquit.metrics.klom import klom
from fedquit.recipe import Recipe
from fedquit.runner import evaluation_of, retrained, run
from fedquit.signals import Floats, signals
from fedquit.store import load_params
from fedquit.training import Attached, Reporter
from fedquit.world import open_world

SEED_STEP = 7_919  # between the seeds of two reference models
LEAST = 4  # models of each kind: forgetting quality needs 3, and two halves of Retrains make the floor


@dataclass(frozen=True)
class Evidence:
    """N unlearned models against N Retrains, on the forget data, and what Retrain gives against Retrain."""

    models: int
    klom: float  # mean over the examples
    klom_p95: float
    klom_floor: float  # Retrain against Retrain, with half as many of each
    forgetting_quality: float  # F, from 0 to 1
    forgetting_quality_floor: float | None  # None with fewer than 6 models
    ulira_accuracy: float  # how often U-LiRA tells the two kinds apart; one half means that it cannot
    ulira_tpr_at_1: float  # at 1 % false alarms
    lira_tpr_at_1: float  # offline, of the first unlearned model: forget data against test data


def gathered(
    recipe: Recipe, models: int, out: Path, cache: Path, *, reporter: Reporter, attached: Attached | None = None
) -> Evidence:
    """Run the recipe's erasure with `models` other seeds, or take them from disk, and compare."""
    if models < LEAST:
        raise InputError(f"--references {models} are too few: take at least {LEAST}, and 64 for claims.")
    world = open_world(recipe)
    who = evaluation_of(world)
    (x, y), (test_x, test_y) = who.examples("forget"), who.examples("test")

    def phi(params: Params) -> Floats:
        return signals(world.model, params, x, y).phi

    unlearned, oracle, on_test, first = [], [], [], world.initial
    for number in range(1, models + 1):
        tried = dataclasses.replace(recipe, seed=recipe.seed + SEED_STEP * number)
        run(tried, out / f"reference-{number}", cache=cache, reporter=reporter, attached=attached)
        model, _ = load_params(out / f"reference-{number}" / "request-0" / "model.safetensors")
        gold = retrained(tried, cache, reporter).state.params
        unlearned.append(phi(model))
        oracle.append(phi(gold))
        on_test.append(signals(world.model, gold, test_x, test_y).phi)
        first = model if number == 1 else first
    first_on_test = signals(world.model, first, test_x, test_y).phi
    return _compared(np.stack(unlearned), np.stack(oracle), np.stack(on_test), first_on_test)


def _compared(unlearned: Floats, oracle: Floats, on_test: Floats, first_on_test: Floats) -> Evidence:
    models, half = len(unlearned), len(unlearned) // 2
    apart = klom(unlearned, oracle)
    duel = ulira(unlearned, oracle)
    lira = roc(lira_offline(unlearned[0], oracle), lira_offline(first_on_test, on_test))
    floor = forgetting_quality(oracle[:half], oracle[half : 2 * half]).score if half >= 3 else None
    return Evidence(
        models,
        apart.mean,
        apart.p95,
        klom(oracle[:half], oracle[half:]).mean,
        forgetting_quality(unlearned, oracle).score,
        floor,
        float(duel.accuracy.mean()),
        roc(duel.unlearned.ravel(), duel.never.ravel()).tpr_at(0.01).tpr.value,
        lira.tpr_at(0.01).tpr.value,
    )
