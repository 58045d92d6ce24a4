# SPDX-License-Identifier: Apache-2.0
"""Carrying out one unit of a study, from JSON to JSON: Original, Retrain, a method's run, or the control."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedquit.core.method import Method
from fedquit.errors import FedquitError, StoreError
from fedquit.results.bundles import RETRAIN_FROM, BundleReader
from fedquit.results.schema import ACCURACIES, NATURAL
from fedquit.running.bundles import BundledRetrain, recorded_retrain, require_one_request
from fedquit.running.deadline import StopAtRoundEnd, TimeIsUpError
from fedquit.running.recipe import Recipe, build
from fedquit.running.runner import controls, evaluation_of, original_results, results_of, retrain_results, run
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import locked
from fedquit.running.training_cache import Reporter
from fedquit.studies.bundles import record_retrain
from fedquit.studies.workers import Answer, Job
from fedquit.utils.files import read_json, write_json

Results = dict[str, Any]


class OtherModelError(StoreError):
    """A training that was repeated gave another model than the one that its record names."""


def trainings_in(state: Path) -> Path:
    """Where, below the state of a study, trained federations lie."""
    return state / "trainings"


def work_of(state: Path, unit: str) -> Path:
    """Where, below the state of a study, a unit that is not finished lies."""
    return state / "work" / unit


def obtain_retrain(setup: Setup, job: Job, bundles: BundleReader | None, reporter: Reporter) -> Results:
    """The results of a Retrain unit: the one place where a study gets a Retrain.

    Args:
        setup: Of a recipe whose first request Retrain leaves out, and whose seed is Retrain's.
        job: `record_in`, the folder where a Retrain that is trained is recorded ("": nowhere); `state`.
        bundles: The reference bundles, `retrain_from` of the job; None for none.
        reporter: Is told how far the training is.

    Returns:
        What `results.json` holds, with Retrain's row alone; and the hash of its training as `training`, or, where it is
        in a bundle, what is said of that as `retrain_from`.
    """
    state = Path(job["state"])
    if bundles is None:
        return retrain_results(setup, trainings_in(state), reporter)
    require_one_request(setup.recipe)
    evaluation = evaluation_of(setup)
    reference = recorded_retrain(bundles, setup, evaluation)
    if reference is None and job["record_in"]:
        record_retrain(setup, Path(job["record_in"]), state / "references", reporter)
        reference = recorded_retrain(bundles, setup, evaluation)
    if reference is None:
        return retrain_results(setup, trainings_in(state), reporter)
    bundled = BundledRetrain(reference)
    return results_of(setup, [bundled.own_row(setup.recipe)]) | {RETRAIN_FROM: bundled.said(setup.recipe)}


class UnitWork:
    """Carries out units one after the other; those on the same data share it, and the captured steps.

    Args:
        is_stopped: Whether to stop at the end of the round at hand.
    """

    def __init__(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._is_stopped = is_stopped
        self._setup: Setup | None = None
        self._bundles: BundleReader | None = None

    def __call__(self, job: Job, reporter: Reporter) -> Answer:
        """Carry out a unit.

        Args:
            job: `kind`, `name`, `recipe` and `data` (where data lies), `attached`, `targets`, `rounds`, `expected`,
                `method` (its label), `state` (the folder for what is unfinished), `seconds_left` (None: no limit) and
                `retrain_from` and `record_in` (`obtain_retrain`; of a method's run, where its Retrain is from there).
            reporter: Reports the progress.

        Returns:
            `results` and `seconds`; or `stopped`; or `failure`, a sentence; or `error`, one that ends the study.
        """
        began = time.monotonic()
        limit = job["seconds_left"]
        folder = work_of(Path(job["state"]), job["name"])
        clock = folder / "seconds.json"

        def is_due() -> bool:
            return self._is_stopped() or (limit is not None and time.monotonic() - began >= limit)

        try:
            with locked(folder, wait=True):  # a process that was given up may take a moment to end
                before = float(read_json(clock)) if clock.exists() else 0.0
                try:
                    results = self._carried_out(job, folder / "run", StopAtRoundEnd(reporter, is_due))
                except TimeIsUpError:
                    write_json(clock, before + time.monotonic() - began)
                    return {"stopped": True}
        except OtherModelError as error:
            return {"error": str(error)}
        except FedquitError as error:
            return {"failure": str(error), "seconds": time.monotonic() - began}
        except Exception as error:  # a method may do anything, and the other units go on
            return {"failure": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
        return {"results": results, "seconds": before + time.monotonic() - began}

    def _carried_out(self, job: Job, folder: Path, reporter: Reporter) -> Results:
        recipe = build(Recipe, dict(job["recipe"]), "recipe")
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=job["data"]))
        self._setup = setup = self._setup.with_recipe(recipe) if self._setup else build_setup(recipe)
        cache = trainings_in(Path(job["state"]))
        attached = _methods(job["attached"])
        if job["kind"] == "original":
            results = original_results(setup, cache, reporter, attached, job["targets"])
        elif job["kind"] == "retrain":
            results = obtain_retrain(setup, job, self._bundles_of(job), reporter)
        elif job["kind"] == "control":
            path, _ = controls(recipe, folder, cache, job["rounds"], reporter=reporter, attached=attached, setup=setup)
            results = results_of(setup, [_control_row(recipe, path)])
        else:
            results = run(
                recipe,
                folder,
                cache=cache,
                reporter=reporter,
                attached=attached,
                setup=setup,
                journal=False,
                retrain_from=self._bundles_of(job),
            )
            results = {**results, "rows": [_labelled(row, recipe, job["method"]) for row in results["rows"]]}
        _require_expected(job, results)
        return results

    def _bundles_of(self, job: Job) -> BundleReader | None:
        """The reader of the study's bundles, which lasts: a record is read once, and one of another process is seen."""
        if not job["retrain_from"]:
            return None
        folder = Path(job["retrain_from"])
        if self._bundles is None or self._bundles.folder != folder:
            self._bundles = BundleReader(folder)
        return self._bundles


def _methods(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Method]:
    return {name: Recipe(method=section).build_method() for name, section in sections.items()}


def _labelled(row: dict[str, Any], recipe: Recipe, label: str) -> dict[str, Any]:
    """The row under the method's name in the study, which tells its strengths apart."""
    return {**row, "method": label} if row["method"] == recipe.method_name else row


def _control_row(recipe: Recipe, path: list[dict[str, Any]]) -> dict[str, Any]:
    """Natural's row: its accuracies after the last round, and its path."""
    last = path[-1]
    levels = {key: last[key] for key in (*ACCURACIES, "holdout_acc") if key in last}
    request = recipe.request[0]
    about = {"method": "natural", "phase": NATURAL, "request": 0, "clients": list(request.clients)}
    return {
        **about,
        "samples": request.samples > 0,
        "seed": recipe.seed,
        "rounds": last["round"],
        **levels,
        "path": path,
    }


def _require_expected(job: Job, results: Results) -> None:
    """Refuse a training that was repeated, because its weights were not kept, and came out differently."""
    fingerprints = {row["phase"]: row.get("fingerprint") for row in results["rows"]}
    for phase, expected in job["expected"].items():
        if phase in fingerprints and fingerprints[phase] != expected:
            name = {"original": "Original", "retrained": "Retrain"}[phase]
            raise OtherModelError(
                f"{name} of {job['name']} was trained again and is another model than its record names "
                f"({fingerprints[phase]}, not {expected}): go on with the code, packages and device that made the "
                "record, or choose another --out."
            )
