# SPDX-License-Identifier: Apache-2.0
"""The comparison that papers print: every method, for several targets and seeds, against Retrain.

All chosen methods watch the one training of a seed; Original and Retrain are trained once and shared. A method that
fails, for one target or for all, is a line that says why; the others go on. Natural runs as a control beside them, once
for each target and seed, for as many rounds as the longest method. What the table says is computed in
`fedquit.results.comparison`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fedquit.core.method import Method
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.inference.gaps import Margin
from fedquit.methods import METHODS
from fedquit.results.bundles import RETRAIN_FROM, Bundle
from fedquit.results.comparison import Key, Outcome, Place, Target, build_comparison, members, named, other_retrains
from fedquit.results.folders import COMPARISON, refuse_overwriting, write_comparison
from fedquit.results.schema import Row
from fedquit.results.summary import MethodSummary
from fedquit.running.bundles import open_bundle, samples_hash, setting_key
from fedquit.running.recipe import EventRecipe, Recipe, build
from fedquit.running.runner import controls as run_controls
from fedquit.running.runner import evaluation_of, require_servable, retrain_again, retrained, run, say_engine
from fedquit.running.setup import Setup, build_setup
from fedquit.running.training_cache import Reporter, require_disk
from fedquit.studies.many_models import gathered, require_enough
from fedquit.studies.workers import Answer, Job, WorkerLostError, WorkerPool, cores
from fedquit.utils.names import lookup
from fedquit.utils.version import code_version

WORK = "fedquit.studies.comparison:work"
SPREAD = "Retrain-vs-Retrain spread"
CONTROL = "control"  # Natural, beside every method; the name of its folder


class Overview(Reporter, Protocol):
    """Reports the progress of a whole comparison and of each run in it."""

    def runs(self, done: int, total: int, title: str) -> None:
        """Report the progress of all runs.

        Args:
            done: Runs that are over.
            total: All runs.
            title: The run that begins; with several processes, the one that ended last.
        """

    def lane(self, number: int) -> Reporter:
        """The reporter of one of several processes, from 1 on."""


def chosen_methods(text: str) -> list[str]:
    """The methods named by "all" or "fedquit,pga"; "all" leaves out Retrain, which every method is compared with."""
    if text == "all":
        return [name for name in METHODS if name != "retrain"]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if ":" not in name:
            lookup(METHODS, name, "method")
    return list(dict.fromkeys(names))


def parse_targets(text: str) -> list[Target] | None:
    """The targets in "0,1,2", or "0+1,2+3" for clients that leave together; None for "all", as `compare` takes it."""
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
    retrain_seeds: int = 1,
    margin: Margin | None = None,
    retrain_from: Path | None = None,
) -> tuple[list[MethodSummary], list[Outcome]]:
    """Run everything, or go on with it, and write `comparison.json`.

    Args:
        recipe: With one request to forget; its own method keeps its settings, the others have their defaults.
        methods: By name, in the order of the table.
        targets: The clients that leave in turn; None for every client.
        seeds: How many for each target, from the recipe's on.
        out: The folder of the comparison.
        overview: Reports the progress.
        cache: Of trainings; else a folder below `out`.
        references: Other seeds with which each erasure is repeated, for what needs many models.
        jobs: Processes that share the work; 0 takes as many as `fitting_jobs` says.
        retrain_seeds: Retrains of other seeds for each target. With more than one, each target has an Original of its
            own (`seeds_of`), so that the verdicts can count the targets as independent.
        margin: Of the equivalence with Retrain; None where none was fixed.
        retrain_from: A folder of reference bundles: all Retrains of a target are taken from it, and none is trained.
            Those whose seed no run of the target has are what the verdicts rest on; there must be at least
            `retrain_seeds` of them where that is more than one.

    Returns:
        The lines of the table, and the outcome of each run.
    """
    _check(recipe, seeds, references, jobs, retrain_seeds)
    if references and retrain_from:
        raise InputError("--references needs Retrain's weights, which no bundle has: leave --retrain-from out.")
    bundle = open_bundle(retrain_from, recipe) if retrain_from else None
    refuse_overwriting(out, COMPARISON, recipe.to_dict())
    cache = cache or out / "cache"
    variants = {name: _variant(recipe, name) for name in methods}
    setup = build_setup(recipe)
    targets = setup.data.clients if targets is None else targets
    for target in targets:
        require_servable(setup, _request(recipe, target))
    refused = _refused(setup, variants, cache)
    by_target = seeds_of(recipe.seed, targets, seeds, own=retrain_seeds > 1)
    retrains: dict[Target, list[Row]] = bundled_rows(bundle, setup, by_target, retrain_seeds) if bundle else {}
    places = [(target, own[number]) for number in range(seeds) for target, own in by_target.items()]
    planned = [
        Outcome(name, target, seed, _folder(out, seed, target, name), failure=refused.get(name, ""))
        for target, seed in places
        for name in methods
    ]
    attached = {name: variant.to_dict() for name, variant in variants.items() if name not in refused}
    runs: dict[Key, Job] = {}
    for outcome in planned:
        if not outcome.failure:
            job = _job("run", variants[outcome.method], outcome, cache)
            source = str(retrain_from) if retrain_from else None
            runs[outcome.key] = {**job, "attached": attached, "references": references, RETRAIN_FROM: source}
    spreads = {} if bundle else _retrain_jobs(recipe, by_target, retrain_seeds, out, cache)
    naturals = [Outcome(CONTROL, target, seed, _folder(out, seed, target, CONTROL)) for target, seed in places]

    def controls(done: Mapping[Key, Answer]) -> dict[Key, Job]:
        """Natural for each target and seed, for as many rounds as the longest method took there."""
        plain = {outcome.key: {**_job("control", recipe, outcome, cache), "attached": attached} for outcome in naturals}
        return {key: {**job, "rounds": _longest(done, key)} for key, job in plain.items()}

    total = len(runs) + len(spreads) + len(naturals)
    answers = _carried_out(runs, spreads, controls, overview, jobs or fitting_jobs(setup), total)
    outcomes = [outcome if outcome.failure else _with_answer(outcome, answers[outcome.key]) for outcome in planned]
    for key in spreads:
        retrains.setdefault(key[1], []).append(answers[key]["row"])
    retrained_rows = {outcome.place: outcome.at("retrained") for outcome in outcomes if not outcome.failure}
    again: dict[Place, Row] = {}
    for target, own in by_target.items():
        for number, seed in enumerate(own):
            rows = other_retrains(retrains[target], retrained_rows.get((target, seed), {}))
            if rows:
                again[target, seed] = rows[number % len(rows)]
    several = retrain_seeds > 1 or (bundle is not None and any(len(rows) > 1 for rows in retrains.values()))
    comparison = build_comparison(
        recipe.to_dict(),
        code_version(),
        methods,
        outcomes,
        again,
        out,
        retrains=retrains if several else None,
        margin=margin,
        controls={outcome.place: answers[outcome.key]["path"] for outcome in naturals},
        longer={outcome.place: answers[outcome.key]["longer"] for outcome in naturals},
    )
    if bundle:
        told = [answers[key][RETRAIN_FROM] for key in runs if RETRAIN_FROM in answers[key]]
        seeds_used = {named(target): [row["retrain_seed"] for row in rows] for target, rows in retrains.items()}
        comparison = dataclasses.replace(comparison, extra={RETRAIN_FROM: {"runs": told, "seeds": seeds_used}})
    write_comparison(out, comparison)
    return list(comparison.table), outcomes


def bundled_rows(
    bundle: Bundle, setup: Setup, by_target: Mapping[Target, Sequence[int]], needed: int
) -> dict[Target, list[Row]]:
    """For each target the rows of the bundle's Retrains whose seeds none of its runs has.

    Args:
        bundle: With the Retrains.
        setup: Of the recipe.
        by_target: The seeds of the runs of each target.
        needed: How many there must be, if more than one.

    Raises:
        InputError: No Retrain fits a target, or there are too few.
    """
    key = setting_key(setup)
    rows: dict[Target, list[Row]] = {}
    for target, seeds in by_target.items():
        own = dataclasses.replace(setup, recipe=_for(setup.recipe, seeds[0], target))
        evaluation = evaluation_of(own)
        references = bundle.retrains(key, evaluation.request.clients, samples_hash(evaluation))
        others = [reference for reference in references if reference.seed not in seeds]
        if needed > 1 and len(others) < needed:
            raise InputError(
                f"{bundle.folder} has {len(others)} Retrains without {'+'.join(map(str, members(target)))} whose seeds "
                f"are not those of the runs ({', '.join(map(str, seeds))}), and --retrain-seeds is {needed}: lower it, "
                "or give the runs other seeds with --set seed=."
            )
        rows[target] = [reference.row(members(target)) for reference in others]
    return rows


def seeds_of(first: int, targets: Sequence[Target], seeds: int, *, own: bool) -> dict[Target, list[int]]:
    """The seeds of the runs of each target.

    Args:
        first: The recipe's seed.
        targets: In the order of the command line.
        seeds: How many for each target.
        own: Whether each target has seeds of its own: 0, 3, … for the first of three, 1, 4, … for the second. Otherwise
            all targets have the same, and share the Original of each.
    """
    if not own:
        return {target: [first + number for number in range(seeds)] for target in targets}
    step = len(targets)
    return {target: [first + i + step * number for number in range(seeds)] for i, target in enumerate(targets)}


def _retrain_jobs(
    recipe: Recipe, by_target: Mapping[Target, Sequence[int]], retrain_seeds: int, out: Path, cache: Path
) -> dict[Key, Job]:
    """One Retrain with another seed for each run; or several for each target, whose seeds nothing else has."""
    jobs: dict[Key, Job] = {}
    for target, seeds in by_target.items():
        if retrain_seeds == 1:
            for seed in seeds:
                outcome = Outcome(SPREAD, target, seed, out)
                jobs[outcome.key] = _job("again", recipe, outcome, cache)
            continue
        for number in range(retrain_seeds):
            outcome = Outcome(f"Retrain {number + 1} of {retrain_seeds}", target, seeds[0], out)
            jobs[outcome.key] = {**_job("again", recipe, outcome, cache), "number": number}
    return jobs


def _longest(done: Mapping[Key, Answer], control: Key) -> int:
    """The most rounds from the request on that a method took for the target and seed of a control."""
    taken = [0]
    for key, answer in done.items():
        if key[1:] == control[1:] and "rows" in answer:
            rounds = {row["phase"]: row["rounds"] for row in answer["rows"]}
            recovered = next(row for row in answer["rows"] if row["phase"] == "recovered")
            taken += [point["round"] for point in recovered.get("path", ())]
            taken.append(rounds["unlearned"] + max(rounds["recovered"], rounds.get("budget", 0)))
    return max(taken)


def _check(recipe: Recipe, seeds: int, references: int, jobs: int, retrain_seeds: int) -> None:
    """Refuse what cannot be compared, before any work begins."""
    if retrain_seeds < 1:
        raise InputError(f"--retrain-seeds is {retrain_seeds}: it must be at least 1.")
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}: it must be at least 1.")
    if jobs < 0:
        raise InputError(f"--jobs is {jobs}: give a number of processes, or 0 for as many as fit.")
    if references:
        require_enough(references)
        if recipe.audit.canaries:
            raise InputError(
                "--references compares models of other seeds on the same forget data, and canaries are drawn anew for "
                "each seed: set audit.canaries = 0, or leave --references out."
            )
    if recipe.retrain_seed is not None:
        raise InputError("a comparison chooses the seeds of its Retrains: leave retrain_seed out, use --retrain-seeds.")
    if not recipe.retrain:
        raise InputError("a comparison is one with Retrain: set retrain = true in the recipe.")
    if [event.kind for event in recipe.request] != ["forget"]:
        raise InputError(
            "a comparison is over one request to forget, and this recipe has other events: "
            "leave one [[request]] in it, or carry it out with `fedquit run`."
        )


def fitting_jobs(setup: Setup) -> int:
    """As many processes as there are cores for, each with the threads that its engine keeps busy; one on a GPU."""
    say_engine(setup)
    if setup.device.type != "cpu":
        return 1
    threads = 1 if setup.chosen.name == "stacked" else torch.get_num_threads()
    return max(1, cores() // threads)


def _folder(out: Path, seed: int, target: Target, method: str) -> Path:
    clients = members(target)
    prefix = "clients-" if len(clients) > 1 else "client-"
    return out / f"seed-{seed}" / (prefix + "+".join(map(str, clients))) / method.replace(":", ".")


def _job(do: str, recipe: Recipe, outcome: Outcome, cache: Path) -> Job:
    """What a worker process needs for one run, or for one Retrain with another seed."""
    own = _for(recipe, outcome.seed, outcome.target)
    if do != "control":  # one control serves all methods
        own = dataclasses.replace(own, recover=dataclasses.replace(own.recover, control=False, retrain_longer=False))
    return {
        "do": do,
        "title": f"{outcome.method}, {named(outcome.target)}, seed {outcome.seed}",
        "recipe": own.to_dict(),
        "data": own.data.folder,  # where the data lies is no part of a recipe's JSON
        "folder": str(outcome.folder),
        "cache": str(cache),
    }


def _carried_out(
    runs: Mapping[Key, Job],
    spreads: Mapping[Key, Job],
    controls: Callable[[Mapping[Key, Answer]], Mapping[Key, Job]],
    overview: Overview,
    jobs: int,
    total: int,
) -> dict[Key, Answer]:
    """The answer to each job; with several processes, what others would wait for comes first.

    Args:
        runs: Of the methods.
        spreads: Retrains with another seed.
        controls: Makes the jobs of the controls from the answers so far.
        overview: Reports the progress.
        jobs: Processes.
        total: All jobs.
    """
    answers: dict[Key, Answer] = {}
    if jobs == 1:
        for stage in _stages(runs, spreads, lambda: controls(answers), in_order=True):
            for key, job in stage:
                overview.runs(len(answers), total, job["title"])
                answers[key] = _checked(work(job, overview))
    else:
        overview.runs(0, total, f"{jobs} processes")
        threads = max(1, torch.get_num_threads() // jobs)
        with WorkerPool(WORK, jobs, lambda number: overview.lane(number + 1), threads) as pool:
            for stage in _stages(runs, spreads, lambda: controls(answers)):
                titles = {key: job["title"] for key, job in stage}
                for key, answer in _staged(pool, stage):
                    answers[key] = _checked(answer)
                    overview.runs(len(answers), total, f"{titles[key]}: done")
    overview.runs(total, total, "done")
    return answers


def _stages(
    runs: Mapping[Key, Job],
    spreads: Mapping[Key, Job],
    controls: Callable[[], Mapping[Key, Job]],
    *,
    in_order: bool = False,
) -> Iterator[list[tuple[Key, Job]]]:
    """First a run of each seed, which trains its Original, beside the Retrains of the other targets; then the rest.

    The controls come last: how long they must be is known once all methods are through.

    Args:
        runs: Of the methods.
        spreads: Retrains with another seed.
        controls: Makes the jobs of the controls, once all others are done.
        in_order: Whether one process does it all, so that nothing need be trained ahead.
    """
    if in_order:
        yield [*runs.items(), *spreads.items()]
        yield list(controls().items())
        return
    first = {seed: (method, target, seed) for method, target, seed in reversed(list(runs))}.values()
    retrained_there = {(target, seed) for _, target, seed in first}
    ahead = {key[1:]: key for key in reversed(list(spreads)) if key[1:] not in retrained_there}.values()
    retrains = [(key, {**spreads[key], "do": "retrain"}) for key in spreads if key in ahead]
    yield [*((key, runs[key]) for key in first), *retrains]
    yield [*spreads.items(), *((key, job) for key, job in runs.items() if key not in first)]
    yield list(controls().items())


def _staged(pool: WorkerPool, stage: Sequence[tuple[Key, Job]]) -> Iterator[tuple[Key, Answer]]:
    for number, answer in pool.run([job for _, job in stage]):
        key, job = stage[number]
        if job["do"] == "retrain":
            continue  # trained ahead for other jobs, which find it in the cache, or train it and say why that failed
        if isinstance(answer, WorkerLostError):
            yield key, {"failure" if job["do"] == "run" else "error": f"{job['title']}: {answer}"}
        else:
            yield key, answer


def _checked(answer: Answer) -> Answer:
    if "error" in answer:
        raise FedquitError(answer["error"])
    return answer


def work(job: Job, reporter: Reporter) -> Answer:
    """Do one job, from JSON to JSON: a run of one method, a Retrain, a Retrain with another seed, or a control.

    Args:
        job: From `_job`.
        reporter: Reports the progress.

    Returns:
        `rows` (and `evidence`) or `failure` of a run, `row` of a Retrain with another seed, `path` and `longer` of a
        control; `error` where one of the last two failed.
    """
    recipe = build(Recipe, dict(job["recipe"]), "recipe")
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=job["data"]))
    cache = Path(job["cache"])
    if job["do"] == "run":
        return _run_job(recipe, job, cache, reporter)
    try:
        if job["do"] == "retrain":
            retrained(recipe, cache, reporter)
            return {}
        if job["do"] == "control":
            methods = _attached(job)
            folder, rounds = Path(job["folder"]), int(job["rounds"])
            path, longer = run_controls(recipe, folder, cache, rounds, reporter=reporter, attached=methods)
            return {"path": path, "longer": longer}
        return {"row": retrain_again(recipe, cache, number=job.get("number", 0), reporter=reporter)}
    except FedquitError as error:
        return {"error": str(error)}


def _run_job(recipe: Recipe, job: Job, cache: Path, reporter: Reporter) -> Answer:
    folder = Path(job["folder"])
    methods = _attached(job)
    try:
        source = Path(job[RETRAIN_FROM]) if job.get(RETRAIN_FROM) else None
        results = run(recipe, folder, cache=cache, reporter=reporter, attached=methods, retrain_from=source)
        answer: dict[str, Any] = {"rows": results["rows"]}
        if source:
            answer[RETRAIN_FROM] = results[RETRAIN_FROM]
        if job["references"]:
            evidence = gathered(recipe, job["references"], folder, cache, reporter=reporter, attached=methods)
            answer["evidence"] = dataclasses.asdict(evidence)
    except FedquitError as error:
        return {"failure": str(error)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return answer


def _attached(job: Job) -> dict[str, Method]:
    """The methods that watch the training of a job, by name."""
    variants = {name: build(Recipe, variant, "recipe") for name, variant in job["attached"].items()}
    return {name: variant.build_method() for name, variant in variants.items()}


def _with_answer(outcome: Outcome, answer: Answer) -> Outcome:
    if answer.get("failure"):
        return dataclasses.replace(outcome, failure=answer["failure"])
    return dataclasses.replace(outcome, rows=tuple(answer["rows"]), evidence=answer.get("evidence"))


def _for(recipe: Recipe, seed: int, target: Target) -> Recipe:
    return dataclasses.replace(recipe, seed=seed, request=(_request(recipe, target),))


def _request(recipe: Recipe, target: Target) -> EventRecipe:
    return dataclasses.replace(recipe.request[0], clients=members(target))


def _variant(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another method; its own method keeps the settings that the recipe gives it."""
    return recipe if name == recipe.method_name else dataclasses.replace(recipe, method={"name": name})


def _refused(setup: Setup, variants: Mapping[str, Recipe], cache: Path) -> dict[str, str]:
    """The methods whose memory does not fit on the disk, and the sentence that says so."""
    reasons = {}
    for name, variant in variants.items():
        try:
            require_disk(setup, cache, {name: variant.build_method()})
        except StoreError as error:
            reasons[name] = str(error)
    return reasons
