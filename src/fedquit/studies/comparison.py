# SPDX-License-Identifier: Apache-2.0
"""The comparison that papers print: every method, for several targets and seeds, against Retrain.

All chosen methods watch the one training of a seed; Original and Retrain are trained once and shared. A method that
fails, for one target or for all, is a row that says why; the others go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.methods import METHODS
from fedquit.running.recipe import EventRecipe, Recipe, build
from fedquit.running.runner import require_servable, retrain_again, retrained, run, say_engine
from fedquit.running.setup import Setup, build_setup
from fedquit.running.training_cache import Reporter, require_disk
from fedquit.studies.comparison_table import Key, Line, Outcome, Target, members, named, summarised, to_dict
from fedquit.studies.many_models import Evidence, gathered, require_enough
from fedquit.studies.workers import Answer, Job, WorkerLostError, WorkerPool, cores
from fedquit.utils.files import write_json
from fedquit.utils.names import lookup

WORK = "fedquit.studies.comparison:work"
FLOOR = "noise floor"


class Overview(Reporter, Protocol):
    """Somebody who wants to know how far the whole comparison is, and each run."""

    def runs(self, done: int, total: int, title: str) -> None:
        """So many runs are over, and this one begins, or is the last that ended where several go side by side."""

    def lane(self, number: int) -> Reporter:
        """Who wants to know how far one of several processes is."""


def chosen_methods(text: str) -> list[str]:
    """From "all" or "fedquit,pga"; all are those of the table but Retrain, which is always the yardstick."""
    if text == "all":
        return [name for name in METHODS if name != "retrain"]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if ":" not in name:
            lookup(METHODS, name, "method")
    return list(dict.fromkeys(names))


def parse_targets(text: str) -> list[Target] | None:
    """From "0,1,2", or "0+1,2+3" for clients that leave together; "all" is None, as `compare` takes it."""
    if text == "all":
        return None
    try:
        groups = [tuple(sorted(map(int, part.split("+")))) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"--targets {text!r} is not a list of clients: write, for example, 0,1,2, or 0+1,2+3 for pairs, or all."
        ) from error
    return list(dict.fromkeys(group[0] if len(group) == 1 else group for group in groups))


def default_targets(recipe: Recipe) -> list[Target]:
    """The clients of a request that names several; else client 0."""
    clients = recipe.request[0].clients
    return [tuple(sorted(clients))] if len(clients) > 1 else [0]


def compare(
    recipe: Recipe,
    methods: Sequence[str],
    targets: Sequence[Target] | None,
    seeds: int,
    out: Path,
    *,
    overview: Overview,
    cache: Path | None = None,
    references: int = 0,
    jobs: int = 1,
) -> tuple[list[Line], list[Outcome]]:
    """Run everything, or go on with it, and write `comparison.json`.

    Without `targets`, every client leaves in turn. With `references`, each erasure is repeated with so many other
    seeds, for what needs many models. With `jobs`, so many processes share the work; 0 takes as many as `fitting_jobs`
    says.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}: it must be at least 1.")
    if jobs < 0:
        raise InputError(f"--jobs is {jobs}: give a number of processes, or 0 for as many as fit.")
    if references:
        require_enough(references)
    if not recipe.retrain:
        raise InputError("a comparison is one with Retrain: set retrain = true in the recipe.")
    if [event.kind for event in recipe.request] != ["forget"]:
        raise InputError(
            "a comparison is over one request to forget, and this recipe has other events: "
            "leave one [[request]] in it, or carry it out with `fedquit run`."
        )
    cache = cache or out / "cache"
    variants = {name: _variant(recipe, name) for name in methods}
    setup = build_setup(recipe)
    targets = setup.data.clients if targets is None else targets
    for target in targets:
        require_servable(setup, _request(recipe, target))
    refused = _refused(setup, variants, cache)
    places = [(t, s) for s in range(recipe.seed, recipe.seed + seeds) for t in targets]
    blank = [Outcome(n, t, s, _folder(out, s, t, n), failure=refused.get(n, "")) for t, s in places for n in methods]
    beside = {"attached": {n: v.to_dict() for n, v in variants.items() if n not in refused}, "references": references}
    runs = {o.key: _task("run", variants[o.method], o, cache) | beside for o in blank if not o.failure}
    again = [Outcome(FLOOR, t, s, out) for t, s in places]
    floors = {o.key: _task("floor", recipe, o, cache) for o in again}
    answers = _carried_out(runs, floors, overview, jobs or fitting_jobs(setup))
    outcomes = [o if o.failure else _filled(o, answers[o.key]) for o in blank]
    floor = {(o.target, o.seed): answers[o.key]["row"] for o in again}
    lines = list(summarised(outcomes, methods, floor))
    write_json(out / "comparison.json", to_dict(recipe, lines, outcomes, floor, out))
    return lines, outcomes


def fitting_jobs(setup: Setup) -> int:
    """As many processes as there are cores for, each with the threads that its engine keeps busy; one on a GPU."""
    say_engine(setup)
    if setup.device.type != "cpu":
        return 1
    return max(1, cores() // (1 if setup.chosen.name == "stacked" else torch.get_num_threads()))


def _folder(out: Path, seed: int, target: Target, method: str) -> Path:
    clients = members(target)
    who = ("clients-" if len(clients) > 1 else "client-") + "+".join(map(str, clients))
    return out / f"seed-{seed}" / who / method.replace(":", ".")


def _task(do: str, recipe: Recipe, of: Outcome, cache: Path) -> Job:
    own = _for(recipe, of.seed, of.target)
    title = f"{of.method}, {named(of.target)}, seed {of.seed}"
    data = own.data.folder  # where it lies is no part of what a recipe says of itself
    task = {"do": do, "title": title, "recipe": own.to_dict(), "data": data}
    return {**task, "folder": str(of.folder), "cache": str(cache)}


def _carried_out(
    runs: Mapping[Key, Job], floors: Mapping[Key, Job], overview: Overview, jobs: int
) -> dict[Key, Answer]:
    """The answer to each task; side by side, what others would wait for comes first."""
    tasks, found = {**runs, **floors}, dict[Key, Answer]()
    if jobs == 1:
        for number, (key, task) in enumerate(tasks.items()):
            overview.runs(number, len(tasks), task["title"])
            found[key] = _sound(work(task, overview))
    else:
        overview.runs(0, len(tasks), f"{jobs} processes")
        threads = max(1, torch.get_num_threads() // jobs)
        with WorkerPool(WORK, jobs, lambda number: overview.lane(number + 1), threads) as processes:
            for key, answer in (a for stage in _stages(runs, floors) for a in _together(processes, stage)):
                found[key] = _sound(answer)
                overview.runs(len(found), len(tasks), f"{tasks[key]['title']}: done")
    overview.runs(len(tasks), len(tasks), "done")
    return found


def _stages(runs: Mapping[Key, Job], floors: Mapping[Key, Job]) -> Iterator[list[tuple[Key, Job]]]:
    """First a run of each seed, which trains its Original, beside the Retrains of the other targets; then the rest."""
    first = {seed: (method, target, seed) for method, target, seed in reversed(list(runs))}.values()
    served = {(target, seed) for _, target, seed in first}
    retrains = [(key, {**task, "do": "retrain"}) for key, task in floors.items() if key[1:] not in served]
    yield [*((key, runs[key]) for key in first), *retrains]
    yield [*floors.items(), *((key, task) for key, task in runs.items() if key not in first)]


def _together(processes: WorkerPool, stage: Sequence[tuple[Key, Job]]) -> Iterator[tuple[Key, Answer]]:
    for number, found in processes.run([task for _, task in stage]):
        key, task = stage[number]
        if task["do"] == "retrain":
            continue  # trained ahead for others, who find it in the cache, or train it themselves and say why not
        if isinstance(found, WorkerLostError):
            yield key, {"failure" if task["do"] == "run" else "error": f"{task['title']}: {found}"}
        else:
            yield key, found


def _sound(answer: Answer) -> Answer:
    if "error" in answer:
        raise FedquitError(answer["error"])
    return answer


def work(task: Job, reporter: Reporter) -> Answer:
    """A run of one method, a Retrain for the cache, or the noise floor of a target: from JSON to JSON."""
    recipe, cache = build(Recipe, dict(task["recipe"]), "recipe"), Path(task["cache"])
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=task["data"]))
    if task["do"] == "run":
        return _tried(recipe, task, cache, reporter)
    try:
        if task["do"] == "retrain":
            retrained(recipe, cache, reporter)
            return {}
        return {"row": retrain_again(recipe, cache, reporter=reporter)}
    except FedquitError as error:
        return {"error": str(error)}


def _tried(recipe: Recipe, task: Job, cache: Path, reporter: Reporter) -> Answer:
    folder, attached = Path(task["folder"]), {n: build(Recipe, r, "recipe") for n, r in task["attached"].items()}
    methods = {name: variant.build_method() for name, variant in attached.items()}
    try:
        answer = {"rows": run(recipe, folder, cache=cache, reporter=reporter, attached=methods)["rows"]}
        if task["references"]:
            found = gathered(recipe, task["references"], folder, cache, reporter=reporter, attached=methods)
            answer["evidence"] = dataclasses.asdict(found)
    except FedquitError as error:
        return {"failure": str(error)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return answer


def _filled(outcome: Outcome, answer: Answer) -> Outcome:
    if answer.get("failure"):
        return dataclasses.replace(outcome, failure=answer["failure"])
    evidence = build(Evidence, answer["evidence"], "evidence") if answer.get("evidence") else None
    return dataclasses.replace(outcome, rows=tuple(answer["rows"]), evidence=evidence)


def _for(recipe: Recipe, seed: int, target: Target) -> Recipe:
    return dataclasses.replace(recipe, seed=seed, request=(_request(recipe, target),))


def _request(recipe: Recipe, target: Target) -> EventRecipe:
    return dataclasses.replace(recipe.request[0], clients=members(target))


def _variant(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another method; its own keeps the settings that the recipe gives it."""
    return recipe if name == recipe.method_name else dataclasses.replace(recipe, method={"name": name})


def _refused(setup: Setup, variants: Mapping[str, Recipe], cache: Path) -> dict[str, str]:
    """The methods that cannot watch the training, and why."""
    found = {}
    for name, variant in variants.items():
        try:
            require_disk(setup, cache, {name: variant.build_method()})
        except StoreError as error:
            found[name] = str(error)
    return found
