# SPDX-License-Identifier: Apache-2.0
"""What needs many models: the same erasure and the same Retrain, each with other seeds, compared example by example.

One unlearned model against one Retrain says how two models differ; many of each say how two *procedures* differ, which
is what unlearning is about. The Retrains lie in the cache and serve every method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from fedquit.audit.attacks.lira import lira_offline, ulira
from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.attacks.roc import FPRS, TprAt, auc, roc
from fedquit.audit.evaluation import Set
from fedquit.audit.metrics.forgetting_quality import forgetting_quality
from fedquit.audit.metrics.klom import klom
from fedquit.audit.scores import Floats, score_examples
from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.results.references import FALLING
from fedquit.running.recipe import Recipe
from fedquit.running.runner import evaluation_of, retrained, run
from fedquit.running.setup import build_setup
from fedquit.running.store import load_params
from fedquit.running.training_cache import Attached, Reporter

SEED_STEP = 7_919  # between the seeds of two reference models
LEAST = 4  # models of each kind: forgetting quality needs 3
LEAST_IN_HALVES = 6  # the same for each half; fewer could not be halved in as many ways as there are halvings
HALVINGS = 19  # of the models: by chance, a twentieth one is farther than all of them one time in twenty


@dataclass(frozen=True)
class InHalves:
    """A measure between halves of the models: means over the halvings, and the farthest of Retrain's."""

    method: float  # unlearned models against Retrains of other seeds
    retrain: float  # Retrains in their place, just as many
    farthest: float


@dataclass(frozen=True)
class Halves:
    """What depends on how many models there are: the method and Retrain measured with equally many."""

    klom: InHalves
    klom_p95: InHalves
    forgetting_quality: InHalves
    epsilon: InHalves


@dataclass(frozen=True)
class Found:
    """The share of members that an attack finds at some rate of false alarms, with Clopper and Pearson's interval."""

    value: float
    low: float
    high: float
    enough: bool  # whether there are outsiders enough for that rate


@dataclass(frozen=True)
class Finds:
    """Whom an attack finds at few false alarms."""

    at_1: Found  # percent
    at_tenth: Found  # of a percent


@dataclass(frozen=True)
class Evidence:
    """N unlearned models against N Retrains, on the forget data; each `_floor` is what Retrain gives in their place."""

    models: int
    klom: float  # mean over the examples
    klom_p95: float
    forgetting_quality: float  # F, from 0 to 1
    epsilon: float  # the median over the examples
    halves: Halves | None  # the four above beside Retrain's; None with fewer than 6 models
    ulira_accuracy: float  # how often U-LiRA tells the two kinds apart; one half means that it cannot
    ulira_finds: Finds  # without a floor: told from itself, Retrain is found as often as there are false alarms
    lira_auc: float  # offline, of the first unlearned model: forget data against data that nobody trained on
    lira_finds: Finds
    lira_auc_floor: float  # the same for the first Retrain
    lira_finds_floor: Finds
    rmia_auc: float
    rmia_finds: Finds
    rmia_auc_floor: float
    rmia_finds_floor: Finds


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
    setup = build_setup(recipe)
    who = evaluation_of(setup)
    null: Set = "holdout" if len(who.examples("holdout")[1]) else "test"
    sets = [who.examples(name) for name in ("forget", null, "test")]

    def phi(params: Params) -> list[Floats]:
        return [score_examples(setup.evaluation_model, params, x, y).phi for x, y in sets]

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
    duel = ulira(u, o)
    found = [(_lira(kind, oracle), _rmia(kind, oracle)) for kind in (unlearned, oracle)]
    (lira, rmia_), (lira_floor, rmia_floor) = found
    return Evidence(
        models=len(u),
        **_distances(u, o),
        halves=_in_halves(u, o) if len(u) >= LEAST_IN_HALVES else None,
        ulira_accuracy=float(duel.accuracy.mean()),
        ulira_finds=_strength(duel.unlearned.ravel(), duel.never.ravel())[1],
        lira_auc=lira[0],
        lira_finds=lira[1],
        lira_auc_floor=lira_floor[0],
        lira_finds_floor=lira_floor[1],
        rmia_auc=rmia_[0],
        rmia_finds=rmia_[1],
        rmia_auc_floor=rmia_floor[0],
        rmia_finds_floor=rmia_floor[1],
    )


def _distances(unlearned: Floats, oracle: Floats) -> dict[str, float]:
    apart, quality = klom(unlearned, oracle), forgetting_quality(unlearned, oracle)
    epsilon = float(np.median(quality.epsilon))
    return {"klom": apart.mean, "klom_p95": apart.p95, "forgetting_quality": quality.score, "epsilon": epsilon}


def _in_halves(unlearned: Floats, oracle: Floats) -> Halves:
    """Half of the models of either kind against the Retrains of the other half of the seeds.

    These measures depend on how many models they see, and Retrain against Retrain has only half as many to see.
    """
    both = [(_distances(unlearned[a], oracle[b]), _distances(oracle[a], oracle[b])) for a, b in _halvings(len(oracle))]

    def measured(name: str) -> InHalves:
        method, retrain = ([found[kind][name] for found in both] for kind in (0, 1))
        farthest = min(retrain) if name == FALLING else max(retrain)
        return InHalves(float(np.mean(method)), float(np.mean(retrain)), farthest)

    return Halves(**{field.name: measured(field.name) for field in dataclasses.fields(Halves)})


def _halvings(models: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """The same ones for every method."""
    draw, half = np.random.default_rng(0), models // 2
    for _ in range(HALVINGS):
        order = draw.permutation(models)
        yield order[:half], order[half : 2 * half]


def _lira(attacked: Phis, oracle: Phis) -> tuple[float, Finds]:
    """LiRA against the first model; its references are the Retrains of all other seeds, which saw neither set."""
    forget = lira_offline(attacked.forget[0], oracle.forget[1:])
    return _strength(forget, lira_offline(attacked.outsiders[0], oracle.outsiders[1:]))


def _rmia(attacked: Phis, oracle: Phis) -> tuple[float, Finds]:
    """RMIA against the first model, with the same references; phi is the logit of the confidence."""
    population = expit(attacked.population[0]), expit(oracle.population[1:])
    sets = (attacked.forget[0], oracle.forget[1:]), (attacked.outsiders[0], oracle.outsiders[1:])
    members, outsiders = (rmia(expit(one), expit(others), *population) for one, others in sets)
    return _strength(members, outsiders)


def _strength(members: Floats, outsiders: Floats) -> tuple[float, Finds]:
    """The AUC, and the members found at few false alarms."""
    few, fewest = (_found(roc(members, outsiders).tpr_at(fpr)) for fpr in FPRS)
    return auc(members, outsiders).value, Finds(at_1=few, at_tenth=fewest)


def _found(at: TprAt) -> Found:
    return Found(at.tpr.value, at.tpr.low, at.tpr.high, at.enough)
