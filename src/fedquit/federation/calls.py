# SPDX-License-Identifier: Apache-2.0
"""`fedquit.run`, `fedquit.compare` and `fedquit.study`: what the commands do, from a program.

They call what the commands call, so that the same recipe gives the same results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedquit.errors import InputError
from fedquit.federation.outcomes import ComparisonResult, Folder, RunResult, StudyResult
from fedquit.federation.setting import Setting, as_setting
from fedquit.inference.gaps import Margin
from fedquit.results.comparison import Target
from fedquit.results.folders import RunResults, open_folders, read_comparison
from fedquit.results.study_folder import StudyFolder
from fedquit.running.in_memory import Given, at_hand
from fedquit.running.params_file import load_params
from fedquit.running.recipe import Recipe, Settings
from fedquit.running.runner import run as run_recipe
from fedquit.running.setup import build_setup
from fedquit.running.smoke import smoke as smallest
from fedquit.studies.comparison import Overview, chosen_methods, default_targets
from fedquit.studies.comparison import compare as compare_methods
from fedquit.studies.execution import run_study
from fedquit.studies.plan import expand, load_study, read_study

What = str | Path | Recipe | Setting


def run(
    setting: What,
    *,
    forget: object = None,
    settings: Settings = (),
    smoke: bool = False,
    out: Path | str | None = None,
    cache: Path | str | None = None,
    retrain_from: Path | str | None = None,
    progress: bool = False,
) -> RunResult:
    """Train a federation, take its requests, retrain for comparison, unlearn, recover and evaluate.

        result = fedquit.run("demo")
        result = fedquit.run(fedquit.Setting(make_model, {"a": data_a, "b": data_b}, test), forget="a")

    Args:
        setting: a `Setting`, a `Recipe`, the name of a packaged recipe, or a .toml file.
        forget: the client that leaves, or a list of clients that leave together; else as the recipe says.
        settings: changes of the recipe's keys: `{"method.lr": 3e-4}`, or `["method.lr=3e-4"]`.
        smoke: try it out: made-up data, a few clients, one round.
        out: the folder of the run; the same call goes on where a killed one stopped. Without it a temporary folder
            lives as long as the result.
        cache: where trained federations are kept; else beside `out`.
        retrain_from: a folder of reference bundles, from which Retrain is taken instead of being trained.
        progress: print the phases and rounds on the standard error stream.

    Returns:
        The rows and the recovered model.

    Raises:
        InputError: for data, a model or values that cannot be used.
        UnknownNameError: for a recipe, key or name that does not exist.
        StoreError: if `out` holds something else.
    """
    chosen = _chosen(setting, settings, forget, smoke=smoke)
    place = Folder.at(out)
    with _scope(chosen.recipe, chosen.objects):
        setup = build_setup(chosen.recipe)
        stored = run_recipe(
            chosen.recipe,
            place.path,
            cache=_path(cache),
            reporter=_reporter(progress),
            setup=setup,
            retrain_from=_path(retrain_from),
        )
    results = RunResults.read(place.path.name, stored)
    last = max((row["request"] for row in results.rows if row["phase"] == "recovered"), default=0)
    params, _ = load_params(place.path / f"request-{last}" / "model.safetensors")
    return RunResult(results, params, chosen.ids, setup, place)


def compare(
    setting: What,
    methods: str | Sequence[str] = "all",
    targets: Sequence[Any] | str | None = None,
    *,
    seeds: int = 1,
    retrain_seeds: int = 1,
    margin: str | float | None = None,
    references: int = 0,
    settings: Settings = (),
    smoke: bool = False,
    out: Path | str | None = None,
    cache: Path | str | None = None,
    jobs: int | None = None,
    retrain_from: Path | str | None = None,
    progress: bool = False,
) -> ComparisonResult:
    """Run several methods for several leaving clients and seeds, against Retrain and Natural.

    Args:
        setting: a `Setting`, a `Recipe`, the name of a packaged recipe, or a .toml file.
        methods: names, or `all`.
        targets: the clients that leave in turn, an entry of several being those that leave together; as text with
            commas and plus signs, as the command takes it; `all` for everybody in turn; else the recipe's, or the
            first.
        seeds: how many of each target, from the recipe's on.
        retrain_seeds: Retrains with seeds of their own for each target; from 2 on each target has its own Original.
        margin: the gap that would not matter, chosen before the runs: points as 2, deviations of Retrain as "2s".
        references: more seeds of each erasure, for what needs many models.
        settings: changes of the recipe's keys.
        smoke: try it out: made-up data, a few clients, one round.
        out: the folder of the comparison; the same call goes on where a killed one stopped. Without it a temporary
            folder lives as long as the result.
        cache: where trained federations are kept; else in `out`.
        jobs: worker processes; 0 for one on each core where that pays. Objects of this program cannot reach other
            processes, so that a setting with any takes 1.
        retrain_from: a folder of reference bundles, from which all Retrains are taken.
        progress: print which run is at work on the standard error stream.

    Returns:
        The table, with gaps and verdicts, and all runs.

    Raises:
        InputError: for data, a model or values that cannot be used.
        UnknownNameError: for a recipe, key, method or client that does not exist.
        StoreError: if `out` holds something else.
    """
    chosen = _chosen(setting, settings, None, smoke=smoke)
    place = Folder.at(out)
    leaving = default_targets(chosen.recipe) if targets is None else _targets(chosen, targets)
    names = methods if isinstance(methods, str) else ",".join(methods)
    with _scope(chosen.recipe, chosen.objects):
        compare_methods(
            chosen.recipe,
            chosen_methods(names),
            leaving,
            seeds,
            place.path,
            overview=_reporter(progress),
            cache=_path(cache),
            references=references,
            jobs=_jobs(jobs, chosen.objects),
            retrain_seeds=retrain_seeds,
            margin=None if margin is None else Margin.parse(str(margin)),
            retrain_from=_path(retrain_from),
        )
    opened = open_folders([place.path])
    return ComparisonResult(read_comparison(place.path), opened.runs, place)


def study(
    study: str | Path | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    time_limit: float | None = None,
    workers: int | str | None = None,
    state: Path | str | None = None,
    retry_failed: bool = False,
    data_dir: Path | str | None = None,
    partition_dir: Path | str | None = None,
    retrain_from: Path | str | None = None,
    record_retrains: bool = False,
    ray_address: str = "",
    progress: bool = False,
) -> StudyResult:
    """Carry out a study, or go on with it: settings x targets x seeds x methods, each finished unit kept.

        fedquit.study({"block": [{"name": "mine", "recipe": setting, "targets": [0, 1], "methods": ["fedquit"]}]})

    Args:
        study: the name of a packaged study, a .toml file, or the content of such a file as a mapping; the `recipe` of
            a block may be a `Setting` or a `Recipe`.
        out: the folder of the study. Without it a temporary folder lives as long as the result.
        time_limit: seconds after which to stop at the end of a round.
        workers: processes that share the work, or `ray`. Objects of this program cannot reach other processes.
        state: where trainings and unfinished units are kept; else in `out`.
        retry_failed: run units again that failed.
        data_dir: where published data lies; else as the recipes say.
        partition_dir: where the partition files that the study names lie; else beside it.
        retrain_from: a folder of reference bundles: a Retrain that one of them has is not trained.
        record_retrains: record Retrains that are trained in that folder.
        ray_address: of the Ray cluster.
        progress: print which unit is at work on the standard error stream.

    Returns:
        What is done, missing and failed, and a comparison for each setting.

    Raises:
        InputError: for a study that cannot be carried out.
        UnknownNameError: for a study, key or name that does not exist.
        StoreError: if `out` holds something else.
    """
    home = Path()
    recipes: dict[str, Recipe] = {}
    objects: dict[str, Given] = {}
    if isinstance(study, Mapping):
        content, recipes, objects = _with_names(study)
        written = read_study(content)
    else:
        written = load_study(str(study))
        home = Path(study).parent
    place = Folder.at(out)
    many = str(workers if workers is not None else 1)
    if objects and many != "1":
        raise InputError("objects of this program cannot reach other processes: leave workers out.")
    with at_hand(objects):
        plan = expand(written, folder=home, data_dir=_path(data_dir), partitions=_path(partition_dir), recipes=recipes)
        outcome = run_study(
            plan,
            place.path,
            overview=_reporter(progress),
            state=_path(state),
            time_limit=time_limit,
            workers=many,
            address=ray_address,
            retry_failed=retry_failed,
            retrain_from=_path(retrain_from),
            record=record_retrains,
        )
    folder = StudyFolder.read(place.path)
    compared = {name: folder.comparison(name) for name in plan.recipes}
    comparisons = {name: one for name, one in compared.items() if one is not None}
    return StudyResult(outcome.status, outcome.stopped, comparisons, place)


class _Quiet:
    """Reports nothing."""

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        pass

    def round(self, done: int, note: str) -> None:
        pass

    def runs(self, done: int, total: int, title: str) -> None:
        pass

    def lane(self, number: int) -> _Quiet:
        return self


class _Lines(_Quiet):
    """Prints a line for each phase, and one for every tenth round."""

    def __init__(self) -> None:
        self._total: int | None = None

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        self._total = rounds
        _say(f"{title} (done already)" if rounds and done >= rounds else title)

    def round(self, done: int, note: str) -> None:
        if note or done % 10 == 0:
            of = f" of {self._total}" if self._total else ""
            _say(f"  round {done}{of} {note}".rstrip())

    def runs(self, done: int, total: int, title: str) -> None:
        _say(f"[{done}/{total}] {title}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _reporter(progress: bool) -> Overview:
    return _Lines() if progress else _Quiet()


def _chosen(setting: What, settings: Settings, forget: object, *, smoke: bool) -> Setting:
    chosen = as_setting(setting, settings)
    if forget is not None:
        chosen = as_setting(chosen, {"request.0.clients": chosen.ids_of(forget)})
    if smoke:
        if chosen.objects:
            raise InputError("smoke=True makes data up, and this setting has objects of its own: leave it out.")
        chosen.recipe = smallest(chosen.recipe)
    return chosen


def _targets(setting: Setting, targets: Sequence[Any] | str) -> list[Target] | None:
    """The targets in turn; None for "all". Text is a client's name, or targets as the command writes them."""
    if not isinstance(targets, str):
        return [_target(setting, target) for target in targets]
    if targets == "all":
        return None
    if setting.ids is not None and targets in setting.ids:
        return [_target(setting, targets)]
    groups = [[name.strip() for name in part.split("+")] for part in targets.split(",")]
    return list(dict.fromkeys(_target(setting, group) for group in groups))


def _target(setting: Setting, target: object) -> Target:
    ids = setting.ids_of(target)
    return ids[0] if len(ids) == 1 else ids


@contextmanager
def _scope(recipe: Recipe, objects: Mapping[str, Given]) -> Iterator[None]:
    """Objects at hand, and the threads that the recipe asks for."""
    threads = torch.get_num_threads()
    with at_hand(objects):
        try:
            if recipe.engine.threads:
                torch.set_num_threads(recipe.engine.threads)
            yield
        finally:
            torch.set_num_threads(threads)


def _jobs(jobs: int | None, objects: Mapping[str, Given]) -> int:
    if not objects:
        return jobs or 0
    if jobs not in (None, 1):
        raise InputError(f"jobs is {jobs}, and objects of this program cannot reach other processes: leave it out.")
    return 1


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


def _with_names(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Recipe], dict[str, Given]]:
    """A study's content with a name in place of each recipe that is an object; these recipes; and their objects."""
    blocks: list[Any] = []
    recipes: dict[str, Recipe] = {}
    objects: dict[str, Given] = {}
    for number, block in enumerate(content.get("block", ())):
        values = dict(block) if isinstance(block, Mapping) else block
        recipe = values.get("recipe") if isinstance(values, dict) else None
        if isinstance(recipe, Setting | Recipe):
            setting = as_setting(recipe)
            name = f"setting-{number}"
            recipes[name] = setting.recipe
            objects |= setting.objects
            values = {**values, "recipe": name, "name": values.get("name") or name}
            if setting.ids is not None and isinstance(values.get("targets"), list):
                values["targets"] = [_word(setting, target) for target in values["targets"]]
        blocks.append(values)
    return {**content, "block": blocks}, recipes, objects


def _word(setting: Setting, target: object) -> str:
    """A target as a study's file writes it: "0", "0+1"."""
    return target if target == "all" else "+".join(map(str, setting.ids_of(target)))
