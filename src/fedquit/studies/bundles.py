# SPDX-License-Identifier: Apache-2.0
"""Making reference bundles: Original and Retrains are trained, recorded in their last rounds, and let go.

Each training goes on from round to round in a folder of its own beside the bundle, and stops at a round's end when its
time is up; the same command goes on. Attacks on the models of the last rounds run in threads while training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import save

from fedquit.audit.evaluation import SETS, Evaluation, Set, point_of
from fedquit.audit.scores import Scores, score_examples
from fedquit.core import State
from fedquit.core.fedavg import fedavg
from fedquit.core.params import fingerprint
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.results.bundles import (
    CORRECT,
    KIND,
    SCHEMA,
    SCORES,
    Reference,
    counted,
    halved,
    read_bundle,
    target_name,
    write_reference,
)
from fedquit.results.comparison import Target, members
from fedquit.results.path import LAST
from fedquit.running.bundles import require_one_request, samples_hash, setting_key
from fedquit.running.costs import Metered
from fedquit.running.recipe import Recipe, build
from fedquit.running.rows import Row
from fedquit.running.runner import evaluation_of, require_servable, say_engine, versions
from fedquit.running.session import Progress, Rounds, Session, advance
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import Memories, StateFile, locked
from fedquit.running.training_cache import Reporter, training_hash
from fedquit.studies.workers import Answer, Job, WorkerLostError, WorkerPool, cores
from fedquit.utils.files import write_atomic
from fedquit.utils.version import code_version

WORK = "fedquit.studies.bundles:work"
LARGE = ("roc", "entropy", "holdout_halves")  # curves, densities and lists: of the last round alone
STORED = ("test", "forget", "holdout", "train")  # whose scores a bundle keeps; `train` of Original alone
ATTACKS_AT_ONCE = 12  # threads at most


@dataclass(frozen=True)
class Unit:
    """One training: Original (no target), or the Retrain of a target."""

    seed: int
    target: Target | None = None
    samples: bool = False  # whether only some samples of the target are forgotten

    @property
    def name(self) -> str:
        """The name of its files."""
        if self.target is None:
            return f"original-seed{self.seed}"
        clients = members(self.target)
        who = f"client{'s' if len(clients) > 1 else ''}{target_name(clients)}"
        return f"retrain-{'samples-of-' if self.samples else ''}{who}-seed{self.seed}"

    @property
    def title(self) -> str:
        """For progress and messages."""
        if self.target is None:
            return f"Original, seed {self.seed}"
        return f"Retrain without {target_name(members(self.target))}, seed {self.seed}"


@dataclass(frozen=True)
class Made:
    """What `make_bundle` has done so far: the units whose records are complete, and those that are not."""

    done: tuple[Unit, ...]
    left: tuple[Unit, ...]


def units_of(
    recipe: Recipe, targets: Sequence[Target], retrain_seeds: Sequence[int], original_seeds: Sequence[int]
) -> list[Unit]:
    """The trainings of a bundle: every Original, then target by target its Retrains.

    Args:
        recipe: Of the setting.
        targets: Whose Retrains are recorded.
        retrain_seeds: Of the Retrains of each target.
        original_seeds: Of the Originals; none where they are not wanted.
    """
    some = bool(recipe.request[0].samples)
    retrains = [Unit(seed, target, some) for target in targets for seed in retrain_seeds]
    return [*(Unit(seed) for seed in original_seeds), *retrains]


def make_bundle(
    recipe: Recipe,
    units: Sequence[Unit],
    targets: Sequence[Target],
    out: Path,
    *,
    state: Path | None = None,
    time_limit: float | None = None,
    jobs: int = 1,
    reporter: Reporter,
    lane: Callable[[int], Reporter] | None = None,
) -> Made:
    """Train and record what a bundle lacks, as far as time allows.

    Args:
        recipe: Of the setting; its method is not used.
        units: From `units_of`.
        targets: For which Originals are evaluated.
        out: The folder of the bundle.
        state: Where trainings that are not complete lie, with their weights; else a folder beside `out`.
        time_limit: Seconds after which all training stops at the end of its round.
        jobs: Processes that train at once.
        reporter: Is told how far each training is.
        lane: Gives, for the number of a process from 1 on, the reporter of its progress; else all report to `reporter`.

    Raises:
        InputError: The recipe has no bundle, or a target does not exist.
        StoreError: The folder has records of another setting under the same names.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    require_one_request(recipe)
    if time_limit is not None and time_limit <= 0:
        raise InputError(f"--time-limit is {time_limit:g}: give a number of seconds above 0.")
    state = state or out.with_name(f"{out.name}.state")
    if state.resolve() == out.resolve() or out.resolve() in state.resolve().parents:
        raise InputError(f"--state {state} lies in the bundle, which has no weights: choose a folder outside of {out}.")
    setup = build_setup(recipe)
    for target in targets:
        require_servable(setup, dataclasses.replace(recipe.request[0], clients=members(target)))
    say_engine(setup)
    _refuse_other_setting(out, units, setup)
    left = [unit for unit in units if not (out / f"{unit.name}.json").exists()]
    if jobs > 1 and len(left) > 1:
        lanes = lane or (lambda _: reporter)
        _make_in_processes(recipe, left, targets, out, state, deadline, jobs, lanes)
    else:
        for unit in left:
            if not _Recorder(recipe, unit, targets, out, state, deadline, setup).make(reporter):
                break
    done = tuple(unit for unit in units if (out / f"{unit.name}.json").exists())
    return Made(done, tuple(unit for unit in units if unit not in done))


def _refuse_other_setting(out: Path, units: Sequence[Unit], setup: Setup) -> None:
    """A folder has one record of each name: that of another setting would be taken for this one's."""
    named = {out / f"{unit.name}.json" for unit in units}
    if not any(file.exists() for file in named):
        return
    key = setting_key(setup)
    for reference in read_bundle(out).references:
        if reference.file in named and reference.key != key:
            raise StoreError(f"{reference.file} is a record of another setting: choose another --out.")


def _make_in_processes(
    recipe: Recipe,
    units: Sequence[Unit],
    targets: Sequence[Target],
    out: Path,
    state: Path,
    deadline: float | None,
    jobs: int,
    lane: Callable[[int], Reporter],
) -> None:
    """Several trainings at once; each process does one after the other until the time is up."""
    plain: Job = {
        "recipe": recipe.to_dict(),
        "data": recipe.data.folder,  # where the data lies is no part of a recipe's JSON
        "targets": [list(members(target)) for target in targets],
        "out": str(out),
        "state": str(state),
        "deadline": deadline,  # the clock is the machine's, the same in every process
        "threads": max(1, cores() // jobs),
    }
    tasks: list[Job] = []
    for unit in units:
        clients = None if unit.target is None else list(members(unit.target))
        tasks.append({**plain, "seed": unit.seed, "target": clients})
    threads = max(1, torch.get_num_threads() // jobs)
    with WorkerPool(WORK, jobs, lambda number: lane(number + 1), threads) as pool:
        for number, answer in pool.run(tasks):
            if isinstance(answer, WorkerLostError):
                raise FedquitError(f"{units[number].title}: {answer}")
            if "error" in answer:
                raise FedquitError(f"{units[number].title}: {answer['error']}")


def record_retrain(setup: Setup, out: Path, state: Path, reporter: Reporter) -> None:
    """Train the Retrain of a setup's request and record it in a bundle, or go on with it.

    Args:
        setup: Of a recipe whose seed is Retrain's.
        out: The folder of the bundle.
        state: The folder of trainings that are not complete.
        reporter: Is told how far the training is; one that raises stops it at the end of a round, with all on disk.
    """
    event = setup.recipe.request[0]
    target = _target(event.clients)
    unit = Unit(setup.recipe.seed, target, bool(event.samples))
    _Recorder(setup.recipe, unit, [target], out, state, None, setup).make(reporter)


def work(job: Job, reporter: Reporter) -> Answer:
    """Make one record, or as much of it as time allows; from JSON to JSON.

    Args:
        job: A recipe, a unit of it, and where it is recorded.
        reporter: Reports the progress.

    Returns:
        `complete`, or `error`.
    """
    recipe = build(Recipe, dict(job["recipe"]), "recipe")
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=job["data"]))
    targets = [_target(clients) for clients in job["targets"]]
    target = None if job["target"] is None else _target(job["target"])
    unit = Unit(job["seed"], target, bool(recipe.request[0].samples))
    try:
        recorder = _Recorder(recipe, unit, targets, Path(job["out"]), Path(job["state"]), job["deadline"])
        return {"complete": recorder.make(reporter, threads=job["threads"])}
    except FedquitError as error:
        return {"error": str(error)}


def _target(clients: Sequence[int]) -> Target:
    return clients[0] if len(clients) == 1 else tuple(clients)


@dataclass(frozen=True, eq=False)
class _Scored:
    """A model of the last rounds: the head of its rows, and its scores on each set in full precision."""

    head: Row
    sets: dict[str, Scores]


_Rows = dict[str, tuple[Row, Row, "Future[dict[str, Any]]"]]  # by target: head and path point, and attacks under way


class _Recorder:
    """Trains one unit and records it.

    Args:
        recipe: Of the setting.
        unit: What to train.
        targets: For which Original is evaluated.
        out: The folder of the bundle.
        state: The folder of trainings that are not complete.
        deadline: On the clock of `time.monotonic`; None without a limit.
        setup: Of the recipe, if it is at hand; it serves every unit with the recipe's seed.
    """

    def __init__(
        self,
        recipe: Recipe,
        unit: Unit,
        targets: Sequence[Target],
        out: Path,
        state: Path,
        deadline: float | None,
        setup: Setup | None = None,
    ) -> None:
        self.unit = unit
        self.targets = targets if unit.target is None else [unit.target]
        self.file = out / f"{unit.name}.json"
        self.folder = state / unit.name
        self.deadline = deadline
        own = dataclasses.replace(recipe, seed=unit.seed)
        fits = setup is not None and setup.recipe.seed == unit.seed
        self.setup = setup if setup is not None and fits else build_setup(own)
        self.recipe = own
        self.evaluations = {target: self._evaluation(target) for target in self.targets}

    def _evaluation(self, target: Target) -> Evaluation:
        event = dataclasses.replace(self.recipe.request[0], clients=members(target))
        recipe = dataclasses.replace(self.recipe, request=(event,))
        return evaluation_of(dataclasses.replace(self.setup, recipe=recipe))

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def make(self, reporter: Reporter, threads: int = 0) -> bool:
        """Train to the end and write the record; False where the time is up before.

        Args:
            reporter: Is told how far the training is.
            threads: For the attacks; 0 takes as many as there are cores.
        """
        if self._late():
            return False
        workers = ThreadPoolExecutor(min(threads or cores(), ATTACKS_AT_ONCE))
        with locked(self.folder), workers as attacks, closing(self._rounds()) as rounds:
            if self.file.exists():  # another process has made it in the meantime
                return True
            try:
                complete = self._train(rounds, attacks, reporter)
            except BaseException:
                attacks.shutdown(cancel_futures=True)  # the scores are on disk
                raise
            if not complete:
                return False
        shutil.rmtree(self.folder)
        return True

    def _train(self, rounds: Rounds, attacks: ThreadPoolExecutor, reporter: Reporter) -> bool:
        """Train to the end and write the record; False where the time is up before."""
        rows: dict[int, _Rows] = {}
        total = self.setup.training.rounds
        progress = next(rounds)
        reporter.phase(self.unit.title, total, progress.state.round)
        for done in range(max(1, total - LAST + 1), progress.state.round + 1):
            kept = self._kept(done) if done < progress.state.round else self._scored(progress)
            if kept is None:
                raise StoreError(
                    f"the scores of round {done} are missing in {self.folder}: move that folder away and run the "
                    "same command again, which trains this model from the beginning."
                )
            rows[done] = self._measured(kept, attacks)
        while progress.state.round < total:
            if self._late():
                attacks.shutdown(cancel_futures=True)  # the scores are on disk
                return False
            progress = next(rounds)
            if progress.state.round > total - LAST:
                kept = self._scored(progress)
                rows[progress.state.round] = self._measured(kept, attacks)
            reporter.round(progress.state.round, "")
        self._write([rows[done] for done in sorted(rows)], self._scored(progress))
        return True

    def _rounds(self) -> Rounds:
        data = self.setup.data
        if self.unit.target is not None:
            evaluation = self.evaluations[self.unit.target]
            data = evaluation.data.after(evaluation.request)
        self.data = data
        memories = Memories.open(self.folder, device=self.setup.device)
        engine = self.setup.engine(data, memories.clients)
        session = Session(engine, self.recipe.seed, data.clients, memories=memories.own)
        meter = Metered(session, work=self.setup.flops)

        def step(state: State) -> State:
            return fedavg(meter, state, self.setup.training, data.clients)

        rounds = self.setup.training.rounds
        return advance(session, "train", State(self.setup.initial), step, self._state_file, rounds, meter)

    @property
    def _state_file(self) -> StateFile:
        return StateFile(self.folder / "state.safetensors")

    def _scored(self, progress: Progress) -> _Scored:
        """The scores of a model of the last rounds, on disk before the next round begins."""
        kept = self._kept(progress.state.round)
        params = progress.state.params
        if kept is not None and kept.head["fingerprint"] == fingerprint(params):
            return kept
        sets: dict[str, Scores] = {}
        if self.unit.target is None:  # one pass over all data serves every target
            dataset, model = self.setup.data.dataset, self.setup.evaluation_model
            sets["train"] = score_examples(model, params, dataset.x, dataset.y)
            sets["test"] = score_examples(model, params, dataset.test_x, dataset.test_y)
        else:
            by_set = self.evaluations[self.unit.target].scores(params)
            sets |= {name: scores for name, scores in by_set.items() if scores is not None}
        head = {
            "method": "original" if self.unit.target is None else "retrain",
            "phase": "original" if self.unit.target is None else "retrained",
            "request": 0,
            "samples": bool(self.recipe.request[0].samples),
            "seed": self.unit.seed,
            "rounds": progress.state.round,
            "seconds": round(progress.seconds, 3),
            **asdict(progress.costs),
            "fingerprint": fingerprint(params),
        }
        arrays = {f"{name}.{f.name}": getattr(scores, f.name) for name, scores in sets.items() for f in fields(Scores)}
        write_atomic(self._scores_file(progress.state.round), save(arrays, {"head": json.dumps(head)}))
        return _Scored(head, sets)

    def _scores_file(self, done: int) -> Path:
        return self.folder / f"scores-{done}.safetensors"

    def _kept(self, done: int) -> _Scored | None:
        """The scores of a round that was trained before, if they were kept."""
        path = self._scores_file(done)
        if not path.exists():
            return None
        by_set: dict[str, dict[str, npt.NDArray[Any]]] = {}
        with safe_open(path, "np") as file:
            head = json.loads(file.metadata()["head"])
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, key = name.partition(".")
                by_set.setdefault(kind, {})[key] = file.get_tensor(name)
        return _Scored(head, {kind: Scores(**arrays) for kind, arrays in by_set.items()})

    def _measured(self, scored: _Scored, attacks: ThreadPoolExecutor) -> _Rows:
        """The rows of a model for all targets, with their attacks under way."""
        rows: _Rows = {}
        for target, evaluation in self.evaluations.items():
            if self.unit.target is None:
                by_set = evaluation.scores_within(scored.sets["train"], scored.sets["test"])
            else:
                names: tuple[Set, ...] = (*SETS, "retain_part")
                by_set = {name: scored.sets.get(name) for name in names}
            point = {"round": scored.head["rounds"], "phase": "training", **point_of(by_set, evaluation.positions)}
            point["bytes"] = scored.head["down_bytes"] + scored.head["up_bytes"]
            head = {**scored.head, "clients": list(members(target))}
            job = attacks.submit(evaluation.measures, by_set, self.recipe.evaluate.attacks)
            rows[target_name(members(target))] = (head, point, job)
        return rows

    def _write(self, measured: Sequence[_Rows], final: _Scored) -> Reference:
        """Write the record.

        Args:
            measured: The rows of each of the last rounds.
            final: The scores of the last one.
        """
        setup = self.setup
        positions = next(iter(self.evaluations.values())).positions
        rows: dict[str, list[Row]] = {}
        paths: dict[str, list[Row]] = {}
        for each in measured:
            for name, (head, point, job) in each.items():
                row = {**head, **job.result()}
                last = head["rounds"] == final.head["rounds"]
                small = row if last else {key: value for key, value in row.items() if key not in LARGE}
                rows.setdefault(name, []).append(small)
                paths.setdefault(name, []).append(point)
        stored = {name: scores for name, scores in final.sets.items() if name in STORED}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, scores in stored.items():
            arrays |= {f"{name}.{key}": halved(getattr(scores, key)) for key in SCORES}
            arrays[f"{name}.{CORRECT}"] = counted(scores.correct, positions)
        target = self.unit.target
        cuda = setup.device.type == "cuda"
        record = {
            "schema": SCHEMA,
            "kind": KIND,
            "role": "original" if target is None else "retrained",
            "target": [] if target is None else sorted(members(target)),
            "samples": "" if target is None else samples_hash(self.evaluations[target]),
            "seed": self.unit.seed,
            "key": asdict(setting_key(setup)),
            "training_hash": training_hash(setup, self.data, {}, None),
            "recipe": self.recipe.to_dict(),
            "versions": versions(),
            "code": code_version(),
            "computed": {
                "device": torch.cuda.get_device_name(setup.device) if cuda else setup.device.type,
                "precision": setup.precision,
            },
            "clients": setup.data.label_counts(),
            "positions": positions,
            "scores": {name: len(scores) for name, scores in stored.items()},
            "rows": rows,
            "paths": paths,
        }
        return write_reference(self.file, record, arrays)
