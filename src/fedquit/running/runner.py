# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: train, take the request, retrain for comparison, unlearn, recover, evaluate.

Every round is on disk before the next begins, so the same command goes on where a killed one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedquit.audit.evaluation import Evaluation
from fedquit.audit.metrics.relearn import relearn_time
from fedquit.core import ClientId, Params, Request, State
from fedquit.data.federated import FederatedData
from fedquit.data.samples import choose_samples
from fedquit.engine import computing
from fedquit.errors import InputError, StoreError
from fedquit.inference.exposed import LEVEL
from fedquit.results.averages import mean_curve, mean_of_recoveries
from fedquit.results.bundles import KEY, RETRAIN_FROM, BundleReader
from fedquit.results.folders import OWNER_FOLDER, RESULTS, refuse_overwriting, write_results
from fedquit.results.path import durability, last_rounds, longer_fields, mean_path, natural_fields
from fedquit.results.schema import NATURAL, SCHEMA
from fedquit.results.verdicts import RETRAIN_SEED
from fedquit.running.bundles import BundledRetrain, open_bundle, retrain_in, samples_hash, setting_key
from fedquit.running.lifecycle import Life, recovery_is_over, recovery_rounds
from fedquit.running.membership import Membership
from fedquit.running.recipe import EventRecipe, Recipe, RecoverRecipe, without_later_defaults
from fedquit.running.rows import PathPoint, PathRecorder, Recovery, Row, RowMaker, request_point
from fedquit.running.session import Event, Progress
from fedquit.running.setup import Setup, build_setup
from fedquit.running.simulation import Simulation, UnlearnedRequest, joined
from fedquit.running.store import locked, save_params
from fedquit.running.training_cache import Attached, Federated, Reporter, Silent, train
from fedquit.utils.files import append_line, read_json, read_json_rows, write_json, write_private_json
from fedquit.utils.version import code_version

log = logging.getLogger(__name__)
EVENTS_SCHEMA = 2  # raise it whenever what a second event finds would be another thing
SPREAD_SEED_OFFSET = 1_000_003  # between the seed of a run and those of its other Retrains


def run(
    recipe: Recipe,
    out: Path,
    *,
    cache: Path | None = None,
    reporter: Reporter | None = None,
    attached: Attached | None = None,
    setup: Setup | None = None,
    journal: bool = True,
    retrain_from: Path | BundleReader | None = None,
) -> dict[str, Any]:
    """Carry out a recipe in the folder `out`, or go on with it, and return what `results.json` holds.

    Args:
        recipe: What to carry out.
        out: The folder of the run.
        cache: Of trainings; else beside `out`.
        reporter: Is told how far it is.
        attached: Methods that watch the training beside the recipe's own, so that one training serves them all.
        setup: Of this recipe, where it was built already.
        journal: Whether no client is asked twice in an unlearning (`Simulation`).
        retrain_from: A folder of reference bundles, or its reader: Retrain is taken from there and not trained.

    Raises:
        InputError: No Retrain of the bundles fits the recipe.
    """
    reporter = reporter or Silent()
    cache = cache or out.parent / "cache"
    bundle = None if retrain_from is None else open_bundle(retrain_from, recipe)
    setup = setup or build_setup(recipe)
    say_engine(setup)
    wanted = recipe.seed if recipe.retrain_seed is None else recipe.retrain_seed
    bundled = retrain_in(bundle, setting_key(setup), evaluation_of(setup), recipe.seed, wanted) if bundle else None
    attached = attached or {recipe.method_name: setup.method}
    recipe_run = _RecipeRun(setup, out, cache, reporter, attached, bundled, journal=journal)
    with locked(out):
        refuse_overwriting(out, RESULTS)
        _claim(out, setup, bundled)
        rows = list(recipe_run.rows())
        results = results_of(setup, rows)
        if bundled:
            own = {row["phase"]: row for row in rows}
            results[RETRAIN_FROM] = bundled.provenance(recipe, evaluation_of(setup), own["retrained"], own["original"])
        return write_results(out, results)


def results_of(setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    """What `results.json` holds: rows, with all that is needed to know how they were made.

    Args:
        setup: With the recipe that was carried out.
        rows: One for each phase of each request.
    """
    recipe = setup.recipe
    results: dict[str, Any] = {"schema": SCHEMA, "recipe": recipe.to_dict(), "versions": versions(), "rows": list(rows)}
    results["code"] = code_version()
    results["recipe_hash"] = recipe.hash
    results["computed"] = {"device": _device_name(setup.device), "precision": setup.precision}
    results["clients"] = setup.data.label_counts()
    if recipe.request[0].kind == "forget":
        key = setting_key(setup)
        results[KEY] = dataclasses.asdict(key) | {"samples": samples_hash(evaluation_of(setup))}
    return results


def say_engine(setup: Setup) -> None:
    """Which engine does the work, and why."""
    log.info("engine: %s on %s, %s (%s)", setup.chosen.name, setup.device, setup.precision, setup.chosen.why)


def retrain_seed(seed: int, number: int = 0) -> int:
    """The seed of one of the Retrains that are compared with the Retrain of a run, none of which shares its seed.

    Args:
        seed: Of the run.
        number: Of the Retrain, from 0.
    """
    return seed + (number + 1) * SPREAD_SEED_OFFSET


def retrain_again(recipe: Recipe, cache: Path, *, number: int = 0, reporter: Reporter | None = None) -> Row:
    """Retrain for the recipe's first request with another seed: how far two Retrains lie apart is their spread.

    Args:
        recipe: Of the run.
        cache: Of trainings.
        number: Of the Retrain, from 0: each has a seed of its own.
        reporter: Reports the progress.

    Returns:
        Its row, with its own seed as `retrain_seed`.
    """
    other = dataclasses.replace(recipe, seed=retrain_seed(recipe.seed, number), retrain_seed=None)
    title = "Retrain with another seed, for the spread"
    trained_again = _retrain(other, cache, reporter or Silent(), title)
    again = trained_again.progress
    reference = retrained(recipe, cache, Silent())
    evaluation = evaluation_of(build_setup(recipe))
    row = RowMaker(evaluation, recipe, 0, _request(recipe.request[0]))
    distance = evaluation.distance(again.evaluated, reference.evaluated)
    read = _of_last_rounds(trained_again)
    return row("retrain", "retrained again", again) | distance | read | {RETRAIN_SEED: other.seed}


def controls(
    recipe: Recipe,
    out: Path,
    cache: Path,
    rounds: int,
    *,
    reporter: Reporter,
    attached: Attached,
    setup: Setup | None = None,
) -> tuple[list[PathPoint], list[PathPoint]]:
    """What stands beside every method of a comparison for the recipe's first request, whichever method it names.

    Args:
        recipe: With one request to forget.
        out: The folder for it; a longer path goes on from what is there.
        cache: Of trainings.
        rounds: From the request on.
        reporter: Is told how far it is.
        attached: Methods that watch the training, so that Original is the one that the methods found.
        setup: Of this recipe or another on the same data, where one was built already.

    Returns:
        Natural's path, and that of Retrain from its end on: empty without `recover.retrain_longer`.
    """
    recover = RecoverRecipe(until="rounds", max_rounds=0)  # the number of rounds is no part of what the folder holds
    plain = dataclasses.replace(recipe, method={"name": "natural"}, recover=recover)
    setup = setup.with_recipe(plain) if setup else build_setup(plain)
    with locked(out):
        _claim(out, setup)
        run = _RecipeRun(setup, out, cache, reporter, attached)
        return run.control_paths(rounds, longer=recipe.recover.retrain_longer)


def train_original(setup: Setup, cache: Path, reporter: Reporter, attached: Attached) -> Federated:
    """Train with everybody, or take it from the cache.

    Methods that must know the request in advance are told of the recipe's first one.

    Args:
        setup: the recipe's data, network and training.
        cache: the folder of all trainings.
        reporter: is told how far the training is.
        attached: methods that watch the training, or shape it.
    """
    recipe = setup.recipe
    first = next((event for event in recipe.request if event.kind == "forget"), None)
    request = _request(first) if first else None
    data = setup.data
    if first and any(method.knows_request for method in attached.values()):
        data = _marked(first, data, recipe)
    title = "Original: everybody trains"
    return train(setup, data, cache, reporter=reporter, title=title, attached=attached, request=request)


def original_results(
    setup: Setup, cache: Path, reporter: Reporter, attached: Attached, targets: Sequence[Sequence[ClientId]]
) -> dict[str, Any]:
    """Train Original, or take it from the cache, and judge it on the request of each target.

    Args:
        setup: the recipe's data, network and training; its request says whether whole clients leave, or samples.
        cache: the folder of all trainings.
        reporter: is told how far the training is.
        attached: methods that watch the training, or shape it.
        targets: the clients that leave together, for each request.

    Returns:
        What `results.json` holds, with one row for each target, and the hash of the training as `training`.
    """
    trained = train_original(setup, cache, reporter, attached)
    progress = trained.progress
    params = progress.evaluated
    rows = []
    for number, clients in enumerate(targets):
        event = dataclasses.replace(setup.recipe.request[0], clients=tuple(clients))
        evaluation = _evaluation(setup, _marked(event, setup.data, setup.recipe), _request(event))
        row = RowMaker(evaluation, setup.recipe, number, _request(event), params)
        rows.append(row("original", "original", progress) | evaluation.true_logits(params))
    return results_of(setup, rows) | {"training": trained.training}


def retrain_results(setup: Setup, cache: Path, reporter: Reporter) -> dict[str, Any]:
    """Train Retrain for the recipe's first request, or take it from the cache, and judge it.

    Args:
        setup: of a recipe whose seed is Retrain's.
        cache: the folder of all trainings.
        reporter: is told how far the training is.

    Returns:
        What `results.json` holds, with Retrain's row alone, and the hash of the training as `training`.
    """
    event = setup.recipe.request[0]
    request = _request(event)
    marked = _marked(event, setup.data, setup.recipe)
    evaluation = _evaluation(setup, marked, request)
    title = "Retrain: from scratch, without them"
    trained = train(setup, marked.after(request), cache, reporter=reporter, title=title, evaluation=evaluation)
    row = RowMaker(evaluation, setup.recipe, 0, request)("retrain", "retrained", trained.progress)
    row |= _of_last_rounds(trained) | {RETRAIN_SEED: setup.recipe.seed}
    return results_of(setup, [row]) | {"training": trained.training}


def retrained(recipe: Recipe, cache: Path, reporter: Reporter, title: str = "Retrain: from scratch") -> Progress:
    """Retrain for the recipe's first request alone, from the cache where it is there."""
    return _retrain(recipe, cache, reporter, title).progress


def _retrain(recipe: Recipe, cache: Path, reporter: Reporter, title: str) -> Federated:
    setup = _of_retrain(build_setup(recipe))
    event = recipe.request[0]
    marked = _marked(event, setup.data, recipe)
    evaluation = _evaluation(setup, marked, _request(event))
    data = marked.after(_request(event))
    return train(setup, data, cache, reporter=reporter, title=title, evaluation=evaluation)


def _of_retrain(setup: Setup) -> Setup:
    """The setup that Retrain is trained with: the run's own, unless the recipe gives Retrain a seed of its own."""
    recipe = setup.recipe
    if recipe.retrain_seed is None:
        return setup
    return setup.with_recipe(dataclasses.replace(recipe, seed=recipe.retrain_seed))


def _of_last_rounds(retrained: Federated) -> Row:
    """The fields of Retrain's row that come from its last rounds, where they were recorded."""
    path = list(retrained.last_rounds)
    return {"path": path, **last_rounds(path)} if path else {}


def require_servable(setup: Setup, event: EventRecipe) -> None:
    """Refuse a request to forget of clients that are not here or all that are here, or of no data or all of it."""
    _marked(event, setup.data, setup.recipe)


def evaluation_of(setup: Setup) -> Evaluation:
    """What the recipe's first request is judged on."""
    event = setup.recipe.request[0]
    return _evaluation(setup, _marked(event, setup.data, setup.recipe), _request(event))


def _claim(out: Path, setup: Setup, bundled: BundledRetrain | None = None) -> None:
    """A folder belongs to one recipe, with one setup and one Retrain: going on with another would mix two runs."""
    path = out / "recipe.json"
    mine: dict[str, Any] = {"recipe": _claimed(setup), "data and network": setup.fingerprint()}
    if len(setup.recipe.request) > 1:
        mine["events"] = EVENTS_SCHEMA
    if bundled:
        mine["Retrain from a bundle"] = bundled.identity
    if not path.exists():
        write_json(path, mine)
        return
    theirs = read_json(path)
    if not isinstance(theirs, dict):
        raise StoreError(f"{path} is damaged (it is not an object): restore it from a backup, or choose another --out.")
    differing = sorted(_differences(theirs.get("recipe"), mine["recipe"]))
    if differing:
        raise StoreError(
            f"{out} holds a run of another recipe (it differs in {', '.join(differing[:3])}): choose another --out."
        )
    if theirs.get("events") != mine.get("events"):
        raise StoreError(
            f"{out} holds a run of several events by another version of fedquit, whose methods remembered other things "
            "from one event to the next: go on with that version, or choose another --out."
        )
    if theirs.get("Retrain from a bundle") != mine.get("Retrain from a bundle"):
        raise StoreError(
            f"{out} holds a run with another Retrain (trained, or from another bundle): go on with the same "
            "--retrain-from, or without it as that run began, or choose another --out."
        )
    if theirs != mine:
        raise StoreError(
            f"{out} holds a run on other data, or with another network, though the recipe reads the same: "
            "choose another --out."
        )


def _claimed(setup: Setup) -> dict[str, Any]:
    """All that determines a run: of how it is computed, the precision alone."""
    recipe = without_later_defaults(setup.recipe.to_dict(), type(setup.recipe))
    return recipe | {"engine": {"precision": setup.precision}}


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON is anything
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where


def versions() -> dict[str, str]:
    """What the results were computed with."""
    packages = {name: metadata.version(name) for name in ("numpy", "scipy", "scikit-learn", "safetensors")}
    own = {"fedquit": str(code_version()["version"]), "python": platform.python_version(), "torch": torch.__version__}
    return own | packages


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclasses.dataclass(frozen=True)
class _Retrained:
    """What a run needs of its Retrain.

    Attributes:
        row: Of the results.
        test_accuracy: In percent.
        params: Its parameters; None where it comes from a bundle.
        progress: Where its training ended; None where it comes from a bundle.
    """

    row: Row
    test_accuracy: float
    params: Params | None = None
    progress: Progress | None = None

    @property
    def bytes(self) -> float:
        return float(self.row["down_bytes"] + self.row["up_bytes"])

    @property
    def rounds(self) -> int:
        return int(self.row["rounds"])


class _RecipeRun:
    """The events of a recipe, one after the other, as rows of the results."""

    def __init__(
        self,
        setup: Setup,
        out: Path,
        cache: Path,
        reporter: Reporter,
        attached: Attached,
        bundled: BundledRetrain | None = None,
        *,
        journal: bool = True,
    ) -> None:
        self.bundled = bundled
        self.setup = setup
        self.out = out
        self.cache = cache
        self.reporter = reporter
        self.attached = attached
        self.recipe = setup.recipe
        self.method = setup.method
        self.method_name = setup.recipe.method_name
        log = partial(_append_event, out / "events.jsonl")
        self.simulation = Simulation(setup, out, log=log, reporter=reporter, journal=journal)
        self._check_events()

    def rows(self) -> Iterator[Row]:
        """One row for each phase of each event."""
        self._train_original()
        for number, event in enumerate(self.recipe.request):
            yield from self._join(number, event) if event.kind == "join" else self._forget(number, event)

    def _check_events(self) -> None:
        """Lead the federation through all events without any work: one that cannot be served is refused at once."""
        if self.method.needs_public_data and len(self.setup.data.public) == 0:
            raise InputError(
                f"{self.method_name} needs data of the server's own, and there is none: set data.public = 0.05."
            )
        data = self.setup.data
        life = Life(Membership(data.clients))
        data_before_leaving: dict[ClientId, FederatedData] = {}
        for event in self.recipe.request:
            if event.kind == "join":
                life = life.join(event.clients, anew=event.anew, rounds=0)
                data = joined(data, event.clients, data_before_leaving)
                continue
            request = _request(event)
            life = life.begin_unlearning(request, rounds=0)
            self.method.check(request)
            data_before_leaving |= dict.fromkeys(request.clients, data)
            data = _marked(event, data, self.recipe).after(request)
            life = life.begin_recovery().begin_erasing().resume_training()

    def _train_original(self) -> None:
        self.simulation.adopt(train_original(self.setup, self.cache, self.reporter, self.attached))

    def _join(self, number: int, event: EventRecipe) -> Iterator[Row]:
        """Clients join, or are enrolled anew, and training goes on with them."""
        progress = self.simulation.join(event.clients, anew=event.anew, rounds=event.rounds)
        evaluation = _evaluation(self.setup, self.simulation.data, Request(event.clients))
        yield RowMaker(evaluation, self.recipe, number, None)(self.method_name, "joined", progress)

    def _forget(self, number: int, event: EventRecipe) -> Iterator[Row]:
        """Serve a request: Original as it finds it, Retrain for comparison, the unlearning, the recovery, budgets."""
        request = _request(event)
        data = _marked(event, self.simulation.data, self.recipe)
        evaluation = _evaluation(self.setup, data, request)
        original = self.simulation.progress
        before = original.evaluated
        row = RowMaker(evaluation, self.recipe, number, request, before)
        audited = evaluation.one_run_audit(before)
        yield row("original", "original", original) | evaluation.true_logits(before) | audited

        retrained = self._retrained(data.after(request), evaluation, row, before)
        reference = retrained.params if retrained else None
        if retrained:
            yield retrained.row

        unlearned, unlearning = self._unlearn(request, data, evaluation, number)
        params = unlearned.progress.evaluated
        price = {"price_of_forgetting": evaluation.price_of_forgetting(before, params)}
        against = evaluation.against(before, params, reference)
        yield row(self.method_name, "unlearned", unlearned.progress) | price | against

        recoveries = self._recover(unlearned, evaluation, retrained)
        unlearning = [request_point(evaluation, original), *unlearning]
        for recovery in recoveries:
            recovery.memories.close()
        rows = []
        for recovery in recoveries:
            against = evaluation.against(before, recovery.progress.evaluated, reference)
            rows.append(row(self.method_name, "recovered", recovery.progress) | against)
        model = unlearned.folder / "model.safetensors"
        if not model.exists():
            save_params(model, recoveries[0].progress.evaluated)
        self._name_exposed(number, evaluation, recoveries[0].progress.evaluated)
        relearned = self._relearned(evaluation, original, recoveries[0].state, reference) if reference else {}
        path = mean_path([[*unlearning, *r.path.points] for r in recoveries])
        path += self._follow(unlearned, recoveries[0], evaluation)
        rounds = unlearned.progress.state.round + recoveries[0].state.round
        recovered = mean_of_recoveries(rows) | {"curve": mean_curve([r.curve for r in recoveries]), "path": path}
        recovered |= last_rounds(path) | durability(path)
        if retrained and retrained.progress and self.recipe.recover.retrain_longer:
            most = rounds + self.recipe.recover.follow
            longer = self._retrain_longer(unlearned, retrained.progress, evaluation, most)
            recovered |= longer_fields(longer, rounds, path) | {"retrain_longer_path": longer}
        if not self.recipe.recover.control:
            yield recovered | relearned
        else:
            control = self._control(unlearned, original, evaluation, row, reference, rounds)
            yield recovered | natural_fields(control["path"], rounds, path) | relearned
            yield control
        if retrained:
            yield from self._at_budgets(unlearned, row, retrained)
        self.simulation.erase(unlearned, recoveries[0].progress, recoveries[0].memories)

    def _name_exposed(self, number: int, evaluation: Evaluation, recovered: Params) -> None:
        """What names single samples goes to a file for the client that owns them, and nowhere else."""
        for client, samples in evaluation.exposed_by_client(recovered).items():
            named = {"client": client, "request": number, "models": 1, "false_names": LEVEL, "samples": samples}
            write_private_json(self.out / OWNER_FOLDER / f"client-{client}-request-{number}.json", named)

    def _unlearn(
        self, request: Request, data: FederatedData, evaluation: Evaluation, number: int
    ) -> tuple[UnlearnedRequest, list[PathPoint]]:
        """The unlearning, with the accuracies after each of its rounds."""
        file = self.out / f"request-{number}" / "path-unlearning.json"
        recorder = PathRecorder(evaluation, file, "unlearning")
        return self.simulation.unlearn(request, data, recorder.record), recorder.points

    def _control(
        self,
        unlearned: UnlearnedRequest,
        original: Progress,
        evaluation: Evaluation,
        row: RowMaker,
        reference: Params | None,
        rounds: int,
    ) -> Row:
        """The row of Natural after so many rounds from the request on; its path goes on as the method's does."""
        file = unlearned.folder / "natural.json"
        stored: list[Row] = read_json_rows(file, "phase", "rounds")
        path: list[PathPoint] = []
        if not stored:
            natural, path = self._natural(unlearned, original, evaluation, rounds)
            against = evaluation.against(original.evaluated, natural.evaluated, reference)
            stored = [row("natural", NATURAL, natural) | against]
            write_json(file, stored)
        if not path or self.recipe.recover.follow:
            _, path = self._natural(unlearned, original, evaluation, rounds + self.recipe.recover.follow)
        return {**stored[0], "path": path}

    def _natural(
        self, unlearned: UnlearnedRequest, original: Progress, evaluation: Evaluation, rounds: int
    ) -> tuple[Progress, list[PathPoint]]:
        """Natural for so many rounds from the model that the request found, and its path from there."""
        recorder = PathRecorder(evaluation, unlearned.folder / "path-natural.json", "recovery")
        phase = self.simulation.natural(unlearned, original)
        progress = self._recorded(phase, recorder, rounds, "Control: Natural, which unlearns nothing")
        return progress, [request_point(evaluation, original), *recorder.points]

    def _retrain_longer(
        self, unlearned: UnlearnedRequest, retrained: Progress, evaluation: Evaluation, rounds: int
    ) -> list[PathPoint]:
        """The path of Retrain for so many rounds beyond its end; its round 0 is Retrain itself."""
        recorder = PathRecorder(evaluation, unlearned.folder / "path-retrained-longer.json", "training")
        phase = self.simulation.retrain_longer(unlearned, retrained)
        self._recorded(phase, recorder, rounds, "Retrain goes on, for as many rounds in all")
        start = {"round": 0, "phase": "training", **evaluation.point(retrained.evaluated), "bytes": 0}
        return [start, *recorder.points]

    def _recorded(self, phase: Iterator[Progress], recorder: PathRecorder, rounds: int, title: str) -> Progress:
        """Run a phase up to a round, and record each."""
        progress = next(phase)
        recorder.record(progress)
        self.reporter.phase(title, rounds, progress.state.round)
        while progress.state.round < rounds:
            progress = next(phase)
            recorder.record(progress)
            self.reporter.round(progress.state.round, "")
        return progress

    def _follow(self, unlearned: UnlearnedRequest, recovery: Recovery, evaluation: Evaluation) -> list[PathPoint]:
        """The path after the recovery's stop: rounds of ordinary training that change nothing but are recorded."""
        rounds = self.recipe.recover.follow
        if not rounds:
            return []
        stop = recovery.state.round
        recorder = self._recorder(unlearned, evaluation, "path-followed.json", "followed")
        phase = self.simulation.follow(unlearned, recovery.progress, recovery.memories)
        progress = next(phase)
        self.reporter.phase("After the recovery: what lasts", rounds, progress.state.round - stop)
        while True:
            if progress.state.round > stop:
                recorder.record(progress)
            if progress.state.round >= stop + rounds:
                return recorder.points
            progress = next(phase)
            self.reporter.round(progress.state.round - stop, "")

    def control_paths(self, rounds: int, *, longer: bool) -> tuple[list[PathPoint], list[PathPoint]]:
        """Serve the recipe's only request with Natural, for so many rounds.

        Args:
            rounds: From the request on.
            longer: Whether Retrain goes on for as many rounds as well.

        Returns:
            Natural's path, and that of Retrain from its end on.
        """
        self._train_original()
        event = self.recipe.request[0]
        request = _request(event)
        data = _marked(event, self.simulation.data, self.recipe)
        evaluation = _evaluation(self.setup, data, request)
        original = self.simulation.progress
        unlearned = self.simulation.unlearn(request, data)
        natural = self._natural(unlearned, original, evaluation, rounds)[1]
        if not (longer and self.recipe.retrain) or self.bundled:
            return natural, []
        progress = self._train_retrain(data.after(request), evaluation).progress
        return natural, self._retrain_longer(unlearned, progress, evaluation, rounds)

    def _retrained(
        self, data: FederatedData, evaluation: Evaluation, row: RowMaker, before: Params
    ) -> _Retrained | None:
        """Retrain on what remains, where the recipe wants it, with the accuracies after its last rounds.

        Args:
            data: What remains.
            evaluation: Of the request.
            row: Makes rows of the results.
            before: The model that the request found.
        """
        if self.bundled:
            bundled_row = self.bundled.row(self.recipe, row.number, evaluation, before)
            return _Retrained(bundled_row, self.bundled.test_accuracy(evaluation))
        if not self.recipe.retrain:
            return None
        gold = self._train_retrain(data, evaluation)
        params = gold.progress.evaluated
        against = evaluation.against(before, params, None)
        own = {} if self.recipe.retrain_seed is None else {RETRAIN_SEED: self.recipe.retrain_seed}
        trained_row = row("retrain", "retrained", gold.progress) | against | _of_last_rounds(gold) | own
        return _Retrained(trained_row, evaluation.accuracy("test", params) or 0.0, params, gold.progress)

    def _train_retrain(self, data: FederatedData, evaluation: Evaluation) -> Federated:
        title = "Retrain: from scratch, without them"
        setup = _of_retrain(self.setup)
        return train(setup, data, self.cache, reporter=self.reporter, title=title, evaluation=evaluation)

    def _recover(
        self, unlearned: UnlearnedRequest, evaluation: Evaluation, retrained: _Retrained | None
    ) -> list[Recovery]:
        """Ordinary training without the forgotten data, until the test accuracy reaches Retrain's or rounds are up.

        The paper compares the test accuracy "averaged over three runs": then three recoveries go on in step, with
        other random numbers, until the mean of their accuracies is there.
        """
        spec = self.recipe.recover
        most = recovery_rounds(self.method, spec.max_rounds)
        level = retrained.test_accuracy if retrained else math.inf  # beyond reach where there is no Retrain
        target = None if spec.until == "rounds" else level
        recoveries = []
        for i in range(3 if spec.until == "retrained-mean-of-3" else 1):
            run = self.simulation.recovery(unlearned, f"recovery-{i}", f"recovered-{i}", i)
            recorder = self._recorder(unlearned, evaluation, f"path-{i}.json")
            curve = unlearned.folder / f"curve-{i}.json"
            recoveries.append(Recovery(run.rounds, evaluation, curve, run.memories, recorder))
        self.reporter.phase("Recovery: ordinary training goes on", most, recoveries[0].state.round)
        while True:
            behind = min(r.state.round for r in recoveries)
            if all(r.state.round == behind for r in recoveries):
                accuracy = sum(r.test_accuracy for r in recoveries) / len(recoveries)
                self.reporter.round(behind, f"test {accuracy:.1f} %")
                if recovery_is_over(behind, most, accuracy, target):
                    return recoveries
            for recovery in recoveries:
                if recovery.state.round == behind:
                    recovery.step()

    def _recorder(
        self, unlearned: UnlearnedRequest, evaluation: Evaluation, name: str, phase: str = "recovery"
    ) -> PathRecorder:
        """Records what follows the unlearning, in a file of the request's folder."""
        before = unlearned.progress
        return PathRecorder(
            evaluation,
            unlearned.folder / name,
            phase,
            rounds_before=before.state.round,
            bytes_before=before.costs.bytes,
        )

    def _relearned(self, evaluation: Evaluation, original: Progress, recovered: State, reference: Params) -> Row:
        """How fast the forgotten comes back, against Retrain; the level to reach is that of the model before."""
        epochs = self.recipe.evaluate.relearn
        if not epochs:
            return {}
        task = self.setup.training.task_at(recovered.clock)
        with computing(self.setup.precision, self.setup.device):
            curves = [evaluation.relearned(params, task, epochs) for params in (recovered.params, reference)]
        level = evaluation.accuracy("forget", original.evaluated) or 0.0
        took = relearn_time(*curves, level=level)
        ratio = took.ratio if math.isfinite(took.ratio) else None
        return {"relearn_ratio": ratio, "relearn_bound": took.bound, "relearn_curve": curves[0]}

    def _at_budgets(self, unlearned: UnlearnedRequest, row: RowMaker, retrained: _Retrained) -> Iterator[Row]:
        """The same recovery, looked at after the last round that each share of Retrain's bytes pays for.

        Unlearning counts. Where it has cost more than a share by itself, the row has no rounds and says what was spent.
        """
        file = unlearned.folder / "budgets.json"
        rows: list[Row] = read_json_rows(file, "phase", "budget", "budget_spent")
        yield from rows
        budgets = sorted(self.recipe.recover.budgets)[len(rows) :]
        if not budgets:
            return
        rounds = self.simulation.recovery(unlearned, "budgets", "budgets").rounds
        progress = next(rounds)
        self.reporter.phase("Recovery: on to fixed budgets", None, progress.state.round)
        whole = retrained.bytes
        unlearning = unlearned.progress.costs.bytes
        for budget in budgets:
            while unlearning + progress.costs.bytes + _a_round(progress, retrained) <= budget * whole + 1e-6:
                progress = next(rounds)
                self.reporter.round(progress.state.round, f"budget {budget:.0%}")
            spent = (unlearning + progress.costs.bytes) / whole
            rows = [*rows, row(self.method_name, "budget", progress) | {"budget": budget, "budget_spent": spent}]
            write_json(file, rows)
            yield rows[-1]


def _append_event(path: Path, event: Event) -> None:
    append_line(path, json.dumps(event))


def _a_round(progress: Progress, retrained: _Retrained) -> float:
    """The bytes of one more round, as those before it took; of the first, as Retrain's took."""
    if progress.state.round:
        return progress.costs.bytes / progress.state.round
    return retrained.bytes / max(retrained.rounds, 1)


def _evaluation(setup: Setup, data: FederatedData, request: Request) -> Evaluation:
    canaries = setup.canaries
    leaves = canaries is not None and not request.samples and set(canaries.clients) == set(request.clients)
    return Evaluation(
        model=setup.evaluation_model,
        network=setup.model,
        data=data,
        request=request,
        attacks=setup.recipe.evaluate.attacks,
        seed=setup.recipe.seed,
        trigger=setup.trigger,
        passes=setup.passes,
        margin=setup.recipe.evaluate.margin,
        canaries=canaries if leaves else None,
    )


def _marked(event: EventRecipe, data: FederatedData, recipe: Recipe) -> FederatedData:
    """The data with the examples of a request marked: which ones belongs to the data, not to the run's seed."""
    samples = None
    if event.samples:
        samples = choose_samples(data, event.clients, event.samples, event.choose, recipe.data.seed)
    return data.mark(_request(event), samples)


def _request(event: EventRecipe) -> Request:
    return Request(event.clients, samples=event.samples > 0)
