# SPDX-License-Identifier: Apache-2.0
"""Measures over many models: the same erasure and the same Retrain, with other seeds.

One unlearned model against one Retrain shows how two models differ; many of each show how two
*procedures* differ, which is what unlearning is about. Unlearned models and Retrains have different
seeds: the tests of `fedquit.inference.models` exchange their labels. The Retrains lie in the cache,
so that every method uses the same ones.

What names single samples goes to a file for the client that owns them (`OWNER_FOLDER`); everything
else is counted over the samples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit
from torch import Tensor

from fedquit.audit.attacks.lira import lira_offline, lira_online, ulira, ulira_by_model
from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.attacks.roc import TprAt, auc, roc
from fedquit.audit.evaluation import Evaluation, Set
from fedquit.audit.metrics.forgetting_quality import forgetting_quality
from fedquit.audit.metrics.klom import klom
from fedquit.audit.scores import Floats, score_examples
from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.inference.models import (
    LEAST_FOR_EPSILON,
    LEVEL,
    EpsilonBound,
    MeanOverModels,
    ModelTest,
    SampleExposure,
    epsilon_bound,
    permutation_test,
    sample_exposure,
    student_over_models,
)
from fedquit.results.folders import OWNER_FOLDER
from fedquit.running.recipe import Recipe
from fedquit.running.runner import evaluation_of, retrained, run, train_original
from fedquit.running.setup import build_setup
from fedquit.running.store import load_params
from fedquit.running.training_cache import Attached, Reporter
from fedquit.utils.files import write_private_json

SEED_STEP = 7_919  # between the seeds of two unlearned models
RETRAIN_STEP = SEED_STEP // 2  # from the seed of an unlearned model to that of a Retrain: no two models share one
LEAST = 4  # models of each kind, the least that can be told apart at 5 %
SUBSET = 1_000  # examples of the retain and test data on which models are compared: drawn once, with seed 0


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
class Tests:
    """The permutation tests on each kind of data.

    Attributes:
        forget: on the forget data: whether the unlearning differs from Retrain where it matters.
        retain: on `SUBSET` random examples of the retain data, or all if there are fewer.
        test: on `SUBSET` random examples of the test set, or all if there are fewer.
    """

    forget: ModelTest
    retain: ModelTest
    test: ModelTest


@dataclass(frozen=True)
class Exposed:
    """How many samples of the forget data stay exposed, without saying which.

    Attributes:
        samples: of the forget data.
        remembered: known better by the unlearned models than by Retrains.
        over_unlearned: known less well than by Retrains, which gives them away as well.
    """

    samples: int
    remembered: int
    over_unlearned: int


@dataclass(frozen=True)
class Evidence:
    """N unlearned models against N Retrains of other seeds.

    A field that ends in `_floor` is the same measure with a Retrain in place of the unlearned
    model. U-LiRA has none: Retrain cannot be told from itself.

    Attributes:
        models: N.
        klom: mean of KLoM over the forget data.
        klom_p95: its 95th percentile; descriptive.
        forgetting_quality: F of the competition, from 0 to 1; descriptive.
        epsilon: the competition's, median over the examples; descriptive, no bound.
        ulira_accuracy: how often U-LiRA tells the two kinds apart, each model left out of its fit; descriptive.
        ulira_finds: true-positive rates of U-LiRA; their intervals take models x examples for independent and are
            too narrow.
        lira_auc: of offline LiRA on the first unlearned model: forget data against data that nobody
            trained on.
        lira_finds: its true-positive rates.
        lira_auc_floor: of the first Retrain.
        lira_finds_floor: of the first Retrain.
        rmia_auc: of RMIA on the first unlearned model.
        rmia_finds: its true-positive rates.
        rmia_auc_floor: of the first Retrain.
        rmia_finds_floor: of the first Retrain.
        lira_online_auc: of online LiRA between the forget data under the first unlearned model and under the first
            Retrain, with Originals as the models that saw it; 0.5 means that the unlearned model looks like Retrain.
        tests: whether the two kinds differ, on forget, retain and test data.
        ulira: how often U-LiRA is right about models outside its fits, with Student's interval over them; 0.5 means
            that it cannot tell.
        epsilon_bound: a lower bound on epsilon with 95 % confidence; None with fewer than 12 models.
        exposed: how many samples stay exposed.
    """

    models: int
    klom: float
    klom_p95: float
    forgetting_quality: float
    epsilon: float
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
    lira_online_auc: float | None
    tests: Tests
    ulira: MeanOverModels
    epsilon_bound: EpsilonBound | None
    exposed: Exposed


@dataclass(frozen=True, eq=False)
class Phis:
    """The scores phi of some models, `(models, examples)`.

    Attributes:
        forget: on the forget data.
        outsiders: on the hold-out data of the leaving clients where there is some, else on the test
            set.
        population: on the test set: the population of RMIA, and the control data of the tests.
        retain: on `SUBSET` random examples of the retain data.
    """

    forget: Floats
    outsiders: Floats
    population: Floats
    retain: Floats


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
        InputError: if `models` is too small, or clients have models of their own.
    """
    require_enough(models)
    if recipe.model.batchnorm == "local":
        raise InputError(
            "the audit over many models compares single models, and with local BatchNorm each client has its own: set "
            "model.batchnorm = 'averaged', or leave --references out."
        )
    setup = build_setup(recipe)
    evaluation = evaluation_of(setup)
    null: Set = "holdout" if len(evaluation.examples("holdout")[1]) else "test"
    sets = [evaluation.examples(name) for name in ("forget", null, "test", "retain")]
    subset = torch.from_numpy(_subset(len(sets[3][1])))
    sets[3] = (sets[3][0][subset], sets[3][1][subset])

    def phi(params: Params) -> list[Floats]:
        return [score_examples(setup.evaluation_model, params, x, y).phi for x, y in sets]

    unlearned: list[list[Floats]] = []
    oracle: list[list[Floats]] = []
    original: list[Floats] = []
    for number in range(1, models + 1):
        at_stop = dataclasses.replace(
            recipe.recover, follow=0, control=False, retrain_longer=False
        )  # no path is read from these runs
        other = dataclasses.replace(recipe, seed=recipe.seed + SEED_STEP * number, recover=at_stop)
        tried = _without_retrain(other)
        run(tried, out / f"model-{number}", cache=cache, reporter=reporter, attached=attached)
        model, _ = load_params(out / f"model-{number}" / "request-0" / "model.safetensors")
        unlearned.append(phi(model))
        original.append(_phi_of_original(tried, cache, reporter, attached, sets[0]))
        other = dataclasses.replace(recipe, seed=recipe.seed + SEED_STEP * number + RETRAIN_STEP)
        oracle.append(phi(retrained(other, cache, reporter).state.params))
    phis = _stacked(unlearned), _stacked(oracle)
    for client, samples in named_samples(_exposure(*phis), evaluation).items():
        named = {"client": client, "models": models, "confidence": 1 - LEVEL, "samples": samples}
        write_private_json(out / OWNER_FOLDER / f"client-{client}.json", named)
    return compare_models(*phis, np.stack(original))


def _phi_of_original(
    recipe: Recipe, cache: Path, reporter: Reporter, attached: Attached | None, forget: tuple[Tensor, Tensor]
) -> Floats:
    """The scores of the model before the request on the forget data, which it was trained on."""
    setup = build_setup(recipe)
    methods = attached or {recipe.method_name: setup.method}
    params = train_original(setup, cache, reporter, methods).progress.state.params
    return score_examples(setup.evaluation_model, params, *forget).phi


def _without_retrain(recipe: Recipe) -> Recipe:
    """The recipe without a Retrain of its own seed, where its recovery does not need one."""
    if recipe.recover.until != "rounds":
        return recipe
    return dataclasses.replace(recipe, retrain=False, recover=dataclasses.replace(recipe.recover, budgets=()))


def _subset(examples: int) -> npt.NDArray[np.int64]:
    """The positions of at most `SUBSET` random examples: the same for every method, seed and run."""
    return np.sort(np.random.default_rng(0).permutation(examples)[:SUBSET])


def _stacked(by_model: list[list[Floats]]) -> Phis:
    """Stack the scores of one model after the other into `(models, examples)` for each set."""
    return Phis(*(np.stack(scores) for scores in zip(*by_model, strict=True)))


def compare_models(unlearned: Phis, oracle: Phis, original: Floats | None = None) -> Evidence:
    """Compute all measures between unlearned models and Retrains.

    Args:
        unlearned: the scores of the unlearned models.
        oracle: the scores of the Retrains, of other seeds.
        original: phi on the forget data under the Originals that were unlearned, (models, examples), for online LiRA.
    """
    u = unlearned.forget
    o = oracle.forget
    divergence = klom(u, o)
    quality = forgetting_quality(u, o)
    duel = ulira(u, o)
    lira = _lira(unlearned, oracle)
    lira_floor = _lira(oracle, oracle)
    rmia_ = _rmia(unlearned, oracle)
    rmia_floor = _rmia(oracle, oracle)
    control = unlearned.population, oracle.population
    exposure = _exposure(unlearned, oracle)
    return Evidence(
        models=len(u),
        klom=divergence.mean,
        klom_p95=divergence.p95,
        forgetting_quality=quality.score,
        epsilon=float(np.median(quality.epsilon)),
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
        lira_online_auc=None if original is None else _lira_online(u, o, original),
        tests=_tests(unlearned, oracle),
        ulira=student_over_models(ulira_by_model(u, o), least=0.0, most=1.0),
        epsilon_bound=epsilon_bound(u, o, *control) if len(u) >= LEAST_FOR_EPSILON else None,
        exposed=Exposed(
            samples=len(exposure.p),
            remembered=int(exposure.remembered.sum()),
            over_unlearned=int(exposure.over_unlearned.sum()),
        ),
    )


def _tests(unlearned: Phis, oracle: Phis) -> Tests:
    """The permutation tests on each kind of data; the control data is the test set."""
    control = unlearned.population, oracle.population
    subset = _subset(unlearned.population.shape[1])
    return Tests(
        forget=permutation_test(unlearned.forget, oracle.forget, *control),
        retain=permutation_test(unlearned.retain, oracle.retain, *control),
        test=permutation_test(unlearned.population[:, subset], oracle.population[:, subset], *control),
    )


def _exposure(unlearned: Phis, oracle: Phis) -> SampleExposure:
    return sample_exposure(unlearned.forget, oracle.forget, unlearned.population, oracle.population)


def named_samples(exposure: SampleExposure, evaluation: Evaluation) -> dict[int, list[dict[str, Any]]]:
    """For each client its samples of the forget data from the most to the least exposed, for this client alone.

    Args:
        exposure: how far the two kinds of model lie apart on each sample.
        evaluation: whose forget data it is.

    Returns:
        For JSON; `sample` is the number of a sample among the training examples of its client.
    """
    words = np.where(exposure.remembered, "remembered", np.where(exposure.over_unlearned, "over-unlearned", ""))
    owners = evaluation.forget_samples()
    by_client: dict[int, list[dict[str, Any]]] = {client: [] for client in evaluation.request.clients}
    for i in np.argsort(-np.abs(exposure.difference) / (exposure.high - exposure.low + 1e-12), kind="stable"):
        client, sample = owners[i]
        by_client[client].append(
            {
                "sample": sample,
                "difference": float(exposure.difference[i]),
                "low": float(exposure.low[i]),
                "high": float(exposure.high[i]),
                "p": float(exposure.p[i]),
                "exposed": str(words[i]),
            }
        )
    return by_client


def _lira(attacked: Phis, oracle: Phis) -> tuple[float, TruePositiveRates]:
    """Run offline LiRA on the first model; its references are the Retrains of all other seeds."""
    forget = lira_offline(attacked.forget[0], oracle.forget[1:])
    return _strength(forget, lira_offline(attacked.outsiders[0], oracle.outsiders[1:]))


def _lira_online(unlearned: Floats, oracle: Floats, original: Floats) -> float:
    """Run online LiRA on the first unlearned model and on the first Retrain, and return the AUC between both.

    Models that saw the forget data are the Originals of all other seeds, models that did not are the other Retrains.
    """
    references = np.concatenate([original[1:], oracle[1:]])
    seen = np.zeros(references.shape, dtype=np.bool_)
    seen[: len(original) - 1] = True
    scores = [lira_online(phi[0], references, seen=seen) for phi in (unlearned, oracle)]
    return auc(scores[0], scores[1]).value


def _rmia(attacked: Phis, oracle: Phis) -> tuple[float, TruePositiveRates]:
    """Run RMIA on the first model, with the same references; phi is the logit of the confidence."""
    population = expit(attacked.population[0]), expit(oracle.population[1:])
    sets = (attacked.forget[0], oracle.forget[1:]), (attacked.outsiders[0], oracle.outsiders[1:])
    members, outsiders = (rmia(expit(one), expit(others), *population) for one, others in sets)
    return _strength(members, outsiders)


def _strength(members: Floats, outsiders: Floats) -> tuple[float, TruePositiveRates]:
    """Return the AUC and the true-positive rates of an attack's scores."""
    curve = roc(members, outsiders)
    rates = TruePositiveRates(at_1=_rate(curve.tpr_at(0.01)), at_tenth=_rate(curve.tpr_at(0.001)))
    return auc(members, outsiders).value, rates


def _rate(at: TprAt) -> TruePositiveRate:
    return TruePositiveRate(at.tpr.value, at.tpr.low, at.tpr.high, at.enough)
