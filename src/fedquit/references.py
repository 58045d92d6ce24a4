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
from scipy.special import expit

from fedquit.attacks.lira import lira_offline, ulira
from fedquit.attacks.rmia import rmia
from fedquit.attacks.strength import auc, roc
from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.evaluate import Set
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
FALSE_ALARMS = 0.01  # at which true positives are counted


@dataclass(frozen=True)
class Evidence:
    """N unlearned models against N Retrains, on the forget data; each `_floor` is what Retrain gives in their place."""

    models: int
    klom: float  # mean over the examples
    klom_p95: float
    klom_floor: float  # one half of the Retrains against the other
    forgetting_quality: float  # F, from 0 to 1
    forgetting_quality_floor: float | None  # in halves as well: None with fewer than 6 models
    epsilon: float  # the median over the examples
    epsilon_floor: float | None
    ulira_accuracy: float  # how often U-LiRA tells the two kinds apart; one half means that it cannot
    ulira_tpr_at_1: float  # at 1 % false alarms
    lira_auc: float  # offline, of the first unlearned model: forget data against data that nobody trained on
    lira_tpr_at_1: float
    lira_auc_floor: float  # the same for the first Retrain
    lira_tpr_at_1_floor: float
    rmia_auc: float
    rmia_tpr_at_1: float
    rmia_auc_floor: float
    rmia_tpr_at_1_floor: float


@dataclass(frozen=True, eq=False)
class Phis:
    """phi under some models, one row for each: on the forget data, on outsiders, and on the population of RMIA."""

    forget: Floats
    outsiders: Floats  # the hold-out of the leaving clients where there is one, else the test set
    population: Floats  # the test set


def require_enough(models: int) -> None:
    """Refuse a number of models that says nothing."""
    if models < LEAST:
        raise InputError(f"--references {models} are too few: take at least {LEAST}, and 64 for claims.")


def gathered(
    recipe: Recipe, models: int, out: Path, cache: Path, *, reporter: Reporter, attached: Attached | None = None
) -> Evidence:
    """Run the recipe's erasure with `models` other seeds, or take them from disk, and compare."""
    require_enough(models)
    world = open_world(recipe)
    who = evaluation_of(world)
    null: Set = "holdout" if len(who.examples("holdout")[1]) else "test"
    sets = [who.examples(name) for name in ("forget", null, "test")]

    def phi(params: Params) -> list[Floats]:
        return [signals(world.eyes, params, x, y).phi for x, y in sets]

    unlearned, oracle = [], []
    for number in range(1, models + 1):
        tried = dataclasses.replace(recipe, seed=recipe.seed + SEED_STEP * number)
        run(tried, out / f"reference-{number}", cache=cache, reporter=reporter, attached=attached)
        model, _ = load_params(out / f"reference-{number}" / "request-0" / "model.safetensors")
        unlearned.append(phi(model))
        oracle.append(phi(retrained(tried, cache, reporter).state.params))
    both = [Phis(*(np.stack(part) for part in zip(*found, strict=True))) for found in (unlearned, oracle)]
    return compared(*both)


def compared(unlearned: Phis, oracle: Phis) -> Evidence:
    """Tell the two kinds of models apart in every way that there is."""
    u, o = unlearned.forget, oracle.forget
    half = len(u) // 2
    apart, duel, quality = klom(u, o), ulira(u, o), forgetting_quality(u, o)
    floor = forgetting_quality(o[:half], o[half : 2 * half]) if half >= 3 else None
    found = [(_lira(kind, oracle), _rmia(kind, oracle)) for kind in (unlearned, oracle)]
    (lira, rmia_), (lira_floor, rmia_floor) = found
    return Evidence(
        models=len(u),
        klom=apart.mean,
        klom_p95=apart.p95,
        klom_floor=klom(o[:half], o[half:]).mean,
        forgetting_quality=quality.score,
        forgetting_quality_floor=floor.score if floor else None,
        epsilon=float(np.median(quality.epsilon)),
        epsilon_floor=float(np.median(floor.epsilon)) if floor else None,
        ulira_accuracy=float(duel.accuracy.mean()),
        ulira_tpr_at_1=_strength(duel.unlearned.ravel(), duel.never.ravel())[1],
        lira_auc=lira[0],
        lira_tpr_at_1=lira[1],
        lira_auc_floor=lira_floor[0],
        lira_tpr_at_1_floor=lira_floor[1],
        rmia_auc=rmia_[0],
        rmia_tpr_at_1=rmia_[1],
        rmia_auc_floor=rmia_floor[0],
        rmia_tpr_at_1_floor=rmia_floor[1],
    )


def _lira(attacked: Phis, oracle: Phis) -> tuple[float, float]:
    """LiRA against the first model; its references are the Retrains of all other seeds, which saw neither set."""
    forget = lira_offline(attacked.forget[0], oracle.forget[1:])
    return _strength(forget, lira_offline(attacked.outsiders[0], oracle.outsiders[1:]))


def _rmia(attacked: Phis, oracle: Phis) -> tuple[float, float]:
    """RMIA against the first model, with the same references; phi is the logit of the confidence."""
    population = expit(attacked.population[0]), expit(oracle.population[1:])
    sets = (attacked.forget[0], oracle.forget[1:]), (attacked.outsiders[0], oracle.outsiders[1:])
    members, outsiders = (rmia(expit(one), expit(others), *population) for one, others in sets)
    return _strength(members, outsiders)


def _strength(members: Floats, outsiders: Floats) -> tuple[float, float]:
    """The AUC, and the members found at few false alarms."""
    return auc(members, outsiders).value, roc(members, outsiders).tpr_at(FALSE_ALARMS).tpr.value
