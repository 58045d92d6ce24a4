# SPDX-License-Identifier: Apache-2.0
"""Measures over many models: the same erasure and the same Retrain, with other seeds.

One unlearned model against one Retrain shows how two models differ; many of each show how two
*procedures* differ, which is what unlearning is about. The Retrains lie in the cache, so that every
method uses the same ones.
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
    """A measure between halves of the models: means over the halvings.

    Attributes:
        method: unlearned models against Retrains of other seeds.
        retrain: as many Retrains in place of the unlearned models.
        farthest: the largest distance of `retrain` over the halvings.
    """

    method: float
    retrain: float
    farthest: float


@dataclass(frozen=True)
class Halves:
    """The measures that depend on the number of models, with equally many for the method and Retrain."""

    klom: InHalves
    klom_p95: InHalves
    forgetting_quality: InHalves
    epsilon: InHalves


@dataclass(frozen=True)
class TruePositiveRate:
    """A true-positive rate at a fixed false-positive rate, with its Clopper-Pearson interval.

    Attributes:
        value: the rate, from 0 to 1.
        low: lower end of the interval.
        high: upper end of the interval.
        enough: whether there are enough outsiders for that false-positive rate.
    """

    value: float
    low: float
    high: float
    enough: bool


@dataclass(frozen=True)
class TruePositiveRates:
    """An attack's true-positive rates at low false-positive rates.

    Attributes:
        at_1: at 1 % false positives.
        at_tenth: at 0.1 % false positives.
    """

    at_1: TruePositiveRate
    at_tenth: TruePositiveRate


@dataclass(frozen=True)
class Evidence:
    """N unlearned models against N Retrains, on the forget data.

    A field that ends in `_floor` is the same measure with a Retrain in place of the unlearned
    model. U-LiRA has none: Retrain cannot be told from itself.

    Attributes:
        models: N.
        klom: mean of KLoM over the examples.
        klom_p95: its 95th percentile.
        forgetting_quality: F, from 0 to 1.
        epsilon: median over the examples.
        halves: the four measures above beside Retrain's; None with fewer than 6 models.
        ulira_accuracy: how often U-LiRA tells the two kinds apart; 0.5 means that it cannot.
        ulira_finds: true-positive rates of U-LiRA.
        lira_auc: of offline LiRA on the first unlearned model: forget data against data that nobody
            trained on.
        lira_finds: its true-positive rates.
        lira_auc_floor: of the first Retrain.
        lira_finds_floor: of the first Retrain.
        rmia_auc: of RMIA on the first unlearned model.
        rmia_finds: its true-positive rates.
        rmia_auc_floor: of the first Retrain.
        rmia_finds_floor: of the first Retrain.
    """

    models: int
    klom: float
    klom_p95: float
    forgetting_quality: float
    epsilon: float
    halves: Halves | None
    ulira_accuracy: float
    ulira_finds: TruePositiveRates
    lira_auc: float
    lira_finds: TruePositiveRates
    lira_auc_floor: float
    lira_finds_floor: TruePositiveRates
    rmia_auc: float
    rmia_finds: TruePositiveRates
    rmia_auc_floor: float
    rmia_finds_floor: TruePositiveRates


@dataclass(frozen=True, eq=False)
class Phis:
    """The scores phi of some models, `(models, examples)`.

    Attributes:
        forget: on the forget data.
        outsiders: on the hold-out data of the leaving clients where there is some, else on the test
            set.
        population: on the test set, the population of RMIA.
    """

    forget: Floats
    outsiders: Floats
    population: Floats


def require_enough(models: int) -> None:
    """Raise an InputError where there are too few models for any measure."""
    if models < LEAST:
        raise InputError(f"--references {models} are too few: take at least {LEAST}, and 64 for claims.")


def gathered(
    recipe: Recipe, models: int, out: Path, cache: Path, *, reporter: Reporter, attached: Attached | None = None
) -> Evidence:
    """Run the recipe's erasure with other seeds, or read it from disk, and compare with Retrains.

    Args:
        recipe: the recipe.
        models: how many other seeds.
        out: the folder for the runs, one below it for each seed.
        cache: the folder of trained federations.
        reporter: receives the progress.
        attached: methods that watch the training beside the recipe's own.

    Raises:
        InputError: if `models` is too small.
    """
    require_enough(models)
    setup = build_setup(recipe)
    evaluation = evaluation_of(setup)
    null: Set = "holdout" if len(evaluation.examples("holdout")[1]) else "test"
    sets = [evaluation.examples(name) for name in ("forget", null, "test")]

    def phi(params: Params) -> list[Floats]:
        return [score_examples(setup.evaluation_model, params, x, y).phi for x, y in sets]

    unlearned: list[list[Floats]] = []
    oracle: list[list[Floats]] = []
    for number in range(1, models + 1):
        at_stop = dataclasses.replace(recipe.recover, follow=0, control=False)  # no path is read from these runs
        tried = dataclasses.replace(recipe, seed=recipe.seed + SEED_STEP * number, recover=at_stop)
        run(tried, out / f"reference-{number}", cache=cache, reporter=reporter, attached=attached)
        model, _ = load_params(out / f"reference-{number}" / "request-0" / "model.safetensors")
        unlearned.append(phi(model))
        oracle.append(phi(retrained(tried, cache, reporter).state.params))
    return compare_models(_stacked(unlearned), _stacked(oracle))


def _stacked(by_model: list[list[Floats]]) -> Phis:
    """Stack the scores of one model after the other into `(models, examples)` for each set."""
    return Phis(*(np.stack(scores) for scores in zip(*by_model, strict=True)))


def compare_models(unlearned: Phis, oracle: Phis) -> Evidence:
    """Compute all measures between unlearned models and Retrains.

    Args:
        unlearned: the scores of the unlearned models.
        oracle: the scores of the Retrains.
    """
    u = unlearned.forget
    o = oracle.forget
    duel = ulira(u, o)
    lira = _lira(unlearned, oracle)
    lira_floor = _lira(oracle, oracle)
    rmia_ = _rmia(unlearned, oracle)
    rmia_floor = _rmia(oracle, oracle)
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
    divergence = klom(unlearned, oracle)
    quality = forgetting_quality(unlearned, oracle)
    epsilon = float(np.median(quality.epsilon))
    return {
        "klom": divergence.mean,
        "klom_p95": divergence.p95,
        "forgetting_quality": quality.score,
        "epsilon": epsilon,
    }


def _in_halves(unlearned: Floats, oracle: Floats) -> Halves:
    """Compare half of the models of either kind with the Retrains of the other half of the seeds.

    These measures depend on the number of models, and Retrain against Retrain can use only half of
    them.
    """
    method_distances: list[dict[str, float]] = []
    retrain_distances: list[dict[str, float]] = []
    for a, b in _halvings(len(oracle)):
        method_distances.append(_distances(unlearned[a], oracle[b]))
        retrain_distances.append(_distances(oracle[a], oracle[b]))

    def measured(name: str) -> InHalves:
        method = [distances[name] for distances in method_distances]
        retrain = [distances[name] for distances in retrain_distances]
        farthest = min(retrain) if name == FALLING else max(retrain)
        return InHalves(float(np.mean(method)), float(np.mean(retrain)), farthest)

    return Halves(**{field.name: measured(field.name) for field in dataclasses.fields(Halves)})


def _halvings(models: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield pairs of disjoint halves of the models' numbers, the same for every method."""
    rng = np.random.default_rng(0)
    half = models // 2
    for _ in range(HALVINGS):
        order = rng.permutation(models)
        yield order[:half], order[half : 2 * half]


def _lira(attacked: Phis, oracle: Phis) -> tuple[float, TruePositiveRates]:
    """Run offline LiRA on the first model; its references are the Retrains of all other seeds."""
    forget = lira_offline(attacked.forget[0], oracle.forget[1:])
    return _strength(forget, lira_offline(attacked.outsiders[0], oracle.outsiders[1:]))


def _rmia(attacked: Phis, oracle: Phis) -> tuple[float, TruePositiveRates]:
    """Run RMIA on the first model, with the same references; phi is the logit of the confidence."""
    population = expit(attacked.population[0]), expit(oracle.population[1:])
    sets = (attacked.forget[0], oracle.forget[1:]), (attacked.outsiders[0], oracle.outsiders[1:])
    members, outsiders = (rmia(expit(one), expit(others), *population) for one, others in sets)
    return _strength(members, outsiders)


def _strength(members: Floats, outsiders: Floats) -> tuple[float, TruePositiveRates]:
    """Return the AUC and the true-positive rates of an attack's scores."""
    curve = roc(members, outsiders)
    at_1, at_tenth = (_rate(curve.tpr_at(fpr)) for fpr in FPRS)
    return auc(members, outsiders).value, TruePositiveRates(at_1=at_1, at_tenth=at_tenth)


def _rate(at: TprAt) -> TruePositiveRate:
    return TruePositiveRate(at.tpr.value, at.tpr.low, at.tpr.high, at.enough)
