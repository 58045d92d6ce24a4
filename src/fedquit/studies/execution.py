# SPDX-License-Identifier: Apache-2.0
"""Carrying out a study: which unit is next, who does it, what is kept, and when to stop.

A unit is done when its record is in the study's folder, and begun again, from its last stored round, as long as it is
not. So a study that was stopped, or killed at any moment, goes on with the same command, here or elsewhere.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedquit.errors import FedquitError, InputError
from fedquit.results.bundles import RETRAIN_FROM, read_bundle
from fedquit.results.comparison import members
from fedquit.results.folders import write_comparison
from fedquit.results.study_folder import (
    UNITS,
    StudyFolder,
    StudyStatus,
    blocked_units,
    code_name,
    study_status,
)
from fedquit.running.store import locked
from fedquit.running.training_cache import Reporter, Silent
from fedquit.studies.comparison import Overview
from fedquit.studies.plan import Plan, Unit
from fedquit.studies.units import UnitWork, trainings_in, work_of
from fedquit.studies.workers import Answer, Job, Worker, WorkerLostError
from fedquit.utils.version import code_version

log = logging.getLogger(__name__)
WORK = "fedquit.studies.units:UnitWork"
LOSSES = 3  # times that a unit may lose the process at work on it before it counts as failed
Finished = tuple[str, Answer | WorkerLostError]


class Executor(Protocol):
    """Does jobs, some at a time."""

    slots: int

    def start(self, name: str, job: Job) -> None:
        """Begin a job; at most `slots` are under way."""

    def finished(self) -> Finished:
        """Wait for a job that was begun, and return its name and answer."""


class InProcess:
    """Does one job at a time in this process.

    Args:
        reporter: Reports its progress.
        is_stopped: Whether to stop at the end of the round at hand.
    """

    slots = 1

    def __init__(self, reporter: Reporter, is_stopped: Callable[[], bool]) -> None:
        self._work = UnitWork(is_stopped)
        self._reporter = reporter
        self._waiting: list[tuple[str, Job]] = []

    def start(self, name: str, job: Job) -> None:
        """Take a job; it is done when its answer is asked for."""
        self._waiting.append((name, job))

    def finished(self) -> Finished:
        """Do the job, and return its answer."""
        name, job = self._waiting.pop()
        return name, self._work(job, self._reporter)


class LocalProcesses:
    """Does jobs in several processes of this machine.

    Args:
        slots: How many.
        lane: Gives, for the number of a process from 0 on, the reporter of its progress.
    """

    def __init__(self, slots: int, lane: Callable[[int], Reporter]) -> None:
        import torch

        threads = max(1, torch.get_num_threads() // slots)
        self.slots = slots
        self._idle = [Worker(WORK, threads, lane(number)) for number in range(slots)]
        self._workers = tuple(self._idle)
        self._answers = queue.SimpleQueue[tuple[Worker, Finished]]()

    def start(self, name: str, job: Job) -> None:
        """Give a job to a process that has none."""
        worker = self._idle.pop()

        def serve() -> None:
            try:
                answer = worker.answer(job)
            except Exception as error:  # whatever it is, somebody waits for an answer
                worker.close()
                answer = WorkerLostError(f"the process at work on it cannot be used ({error}).")
            self._answers.put((worker, (name, answer)))

        threading.Thread(target=serve, daemon=True).start()

    def finished(self) -> Finished:
        """Wait for the next answer."""
        worker, finished = self._answers.get()
        self._idle.append(worker)
        return finished

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.retire()


class RayTasks:
    """Does jobs as tasks of a Ray cluster; Ray runs a task again that was lost with its node.

    Args:
        address: Of the cluster; "" for the one that this machine belongs to, or a new one on this machine alone.
    """

    def __init__(self, address: str = "") -> None:
        try:
            ray: Any = import_module("ray")  # by name: the package has no need of it otherwise
        except ImportError as error:
            raise InputError("--workers ray needs Ray: install the extra with pip install 'fedquit[ray]'.") from error
        self._ray = ray
        self._connected = not ray.is_initialized()
        if self._connected:
            ray.init(address=address or None, log_to_driver=False, configure_logging=False)
        resources: dict[str, float] = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.slots = max(1, gpus or int(resources.get("CPU", 1)))
        self._task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=LOSSES)(remote_unit)
        self._running: dict[Any, str] = {}

    def start(self, name: str, job: Job) -> None:
        """Hand a job to the cluster."""
        self._running[self._task.remote(json.dumps(job))] = name

    def finished(self) -> Finished:
        """Wait for the next answer."""
        (task, *_), _ = self._ray.wait(list(self._running), num_returns=1)
        name = self._running.pop(task)
        try:
            return name, dict(json.loads(self._ray.get(task)))
        except self._ray.exceptions.RayError as error:
            return name, WorkerLostError(f"the cluster lost it ({str(error).strip().splitlines()[0]}).")

    def close(self) -> None:
        """Leave the cluster, and end tasks that are under way."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        if self._connected:
            self._ray.shutdown()


def remote_unit(job: str) -> str:
    """Carry out a unit on a node of a cluster, from JSON to JSON."""
    return json.dumps(UnitWork()(json.loads(job), Silent()))


def executor_for(
    workers: str, overview: Overview, is_stopped: Callable[[], bool], address: str = ""
) -> AbstractContextManager[Executor]:
    """Who does the units: this process, several, or a Ray cluster.

    Args:
        workers: A number of processes, or "ray".
        overview: Reports the progress of each.
        is_stopped: Whether this process shall stop at the end of a round.
        address: Of the Ray cluster.

    Raises:
        InputError: It is neither.
    """
    if workers == "ray":
        return _closing(RayTasks(address))
    if not workers.isdecimal() or int(workers) < 1:
        raise InputError(f"--workers is {workers!r}: give a number of processes from 1 on, or ray.")
    if workers == "1":
        return _as_it_is(InProcess(overview, is_stopped))
    return _closing(LocalProcesses(int(workers), lambda number: overview.lane(number + 1)))


@contextmanager
def _closing(executor: RayTasks | LocalProcesses) -> Iterator[Executor]:
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def _as_it_is(executor: Executor) -> Iterator[Executor]:
    yield executor


@dataclass(frozen=True)
class StudyOutcome:
    """How a call of `run_study` ended.

    Attributes:
        status: Of the study now.
        stopped: Whether its time was up before all was done.
    """

    status: StudyStatus
    stopped: bool


def run_study(
    plan: Plan,
    out: Path,
    *,
    overview: Overview,
    state: Path | None = None,
    time_limit: float | None = None,
    workers: str = "1",
    address: str = "",
    retry_failed: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    retrain_from: Path | None = None,
    record: bool = False,
) -> StudyOutcome:
    """Carry out a study, or go on with it.

    Args:
        plan: Its units.
        out: The folder for their records.
        overview: Reports the progress.
        state: The folder for trainings and unfinished units; else one below `out`.
        time_limit: Seconds after which to stop at the end of a round; None: none.
        workers: Processes that share the work, or "ray".
        address: Of the Ray cluster.
        retry_failed: Whether units that failed are run again.
        is_stopped: Whether to stop at the end of the round at hand, whatever the time.
        retrain_from: A folder of reference bundles: a Retrain that one of them has is not trained.
        record: Whether Retrains that are trained are recorded there, and taken from there.

    Raises:
        FedquitError: A training that was repeated is another model, or the folder cannot be used.
    """
    began = time.monotonic()
    deadline = None if time_limit is None else began + time_limit
    folder = plan.folder(out)
    with locked(out):
        folder.write()
        if retry_failed:
            folder.forget_failures()
        _warn_of_other_code(folder)
        run = _StudyRun(plan, folder, state or out / "state", overview, deadline, is_stopped)
        run.take_retrains_from(retrain_from, record=record)
        try:
            with executor_for(workers, overview, is_stopped, address) as executor:
                run.drive(executor)
        finally:
            _write_comparisons(folder)
        status = study_status(folder)
        if state is None and not (status.missing or status.failed or status.blocked):
            shutil.rmtree(out / "state", ignore_errors=True)
    return StudyOutcome(status, run.stopped)


class _StudyRun:
    """Gives out units whose turn it is, and keeps what comes back."""

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        state: Path,
        overview: Overview,
        deadline: float | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._units = {unit.name: unit for unit in plan.units}
        self._folder = folder
        self._state = state.resolve()
        self._overview = overview
        self._deadline = deadline
        self._is_stopped = is_stopped
        self._models: dict[str, str] = {}  # by name of an Original or Retrain, the fingerprint of its model
        self._trainings: dict[str, str] = {}  # and the name of its training in the state
        self._rounds: dict[str, int] = {}  # by name of a method's run or a control, its rounds from the request on
        self._done: set[str] = set()
        self._failed: dict[str, str] = {}
        self._lost: dict[str, int] = {}  # how often the process at work on a unit was lost
        self._running: set[str] = set()
        self._begun = False  # however short the time, one unit is begun and takes a round
        self.stopped = False
        self._bundles: Path | None = None
        self._record = False
        self._from_bundles: set[str] = set()  # Retrains whose record says that they are from a bundle
        for unit in plan.units:
            record = folder.record(unit.planned)
            if record is not None:
                self._remember(unit, record)
            elif why := folder.failure(unit.planned):
                self._failed[unit.name] = why
        self._lengthen_controls()

    def take_retrains_from(self, bundles: Path | None, *, record: bool) -> None:
        """Take Retrain from reference bundles where they have it.

        Args:
            bundles: Their folder; None: all are trained.
            record: Whether Retrains that are trained are recorded there.

        Raises:
            InputError: Nothing can be recorded without a folder of bundles.
        """
        if record and bundles is None:
            raise InputError("--record-retrains needs a folder: name it with --retrain-from.")
        if bundles is not None and not record:
            read_bundle(bundles)  # a folder without any, or with a damaged one, is refused before all work
        self._bundles = bundles.resolve() if bundles else None
        self._record = record

    def drive(self, executor: Executor) -> None:
        """Do all that can be done in the time that there is."""
        total = len(self._units)
        self._clean()
        while True:
            ready = self._ready()
            if self._is_due():
                self.stopped = self.stopped or bool(ready)
            for unit in [] if self.stopped else ready[: executor.slots - len(self._running)]:
                self._begun = True
                self._overview.runs(len(self._done), total, unit.name)
                self._running.add(unit.name)
                executor.start(unit.name, self._job(unit))
            if not self._running:
                break
            name, answer = executor.finished()
            self._running.discard(name)
            self._keep(self._units[name], answer)
        self._overview.runs(len(self._done), total, "stopped" if self.stopped else "done")

    def _is_due(self) -> bool:
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._is_stopped() or (late and self._begun)

    def _ready(self) -> list[Unit]:
        """The units whose turn it is: all that they wait for is over."""
        blocked = blocked_units([unit.planned for unit in self._units.values()], self._failed)
        over = self._done | self._failed.keys() | blocked.keys()
        ready = []
        for unit in self._units.values():
            if unit.name not in over | self._running and over.issuperset(unit.planned.after):
                ready.append(unit)
        return ready

    def _job(self, unit: Unit) -> Job:
        expected = {"original": self._models.get(unit.original), "retrained": self._models.get(unit.retrain)}
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return {
            "kind": unit.planned.kind,
            "name": unit.name,
            "recipe": unit.recipe.to_dict(),
            "data": unit.recipe.data.folder,  # where the data lies is no part of a recipe's JSON
            "attached": {name: dict(section) for name, section in unit.attached.items()},
            "targets": [list(members(target)) for target in unit.targets],
            "method": unit.planned.method,
            "rounds": self._longest(unit),
            "expected": {phase: model for phase, model in expected.items() if model},
            "state": str(self._state),
            "seconds_left": left,
            "retrain_from": str(self._bundles) if self._bundles and self._may_be_bundled(unit) else "",
            "record_in": str(self._bundles / unit.planned.setting) if self._bundles and self._record else "",
        }

    def _may_be_bundled(self, unit: Unit) -> bool:
        """Whether a unit looks into the bundles: Retrain itself, and a run whose Retrain came from there."""
        return unit.planned.kind == "retrain" or unit.retrain in self._from_bundles

    def _longest(self, unit: Unit) -> int:
        """The most rounds from the request on that a method took beside a control."""
        return max((self._rounds.get(name, 0) for name in unit.planned.after), default=0)

    def _keep(self, unit: Unit, answer: Answer | WorkerLostError) -> None:
        if isinstance(answer, WorkerLostError):
            self._lost[unit.name] = self._lost.get(unit.name, 0) + 1
            if self._lost[unit.name] < LOSSES:
                return  # it is run again
            answer = {"failure": str(answer), "seconds": 0.0}
        if "error" in answer:
            raise FedquitError(answer["error"])
        if "stopped" in answer:
            self.stopped = True
        elif "failure" in answer:
            self._failed[unit.name] = answer["failure"]
            self._folder.write_failure(unit.planned, answer["failure"], answer["seconds"])
        else:
            self._folder.write_record(unit.planned, answer["results"], answer["seconds"])
            self._remember(unit, answer["results"])
            self._lengthen_controls()
        if "stopped" not in answer:
            shutil.rmtree(work_of(self._state, unit.name), ignore_errors=True)
            self._clean()

    def _remember(self, unit: Unit, results: Mapping[str, Any]) -> None:
        self._done.add(unit.name)
        rows: Sequence[Mapping[str, Any]] = results["rows"]
        if unit.planned.kind in ("original", "retrain"):
            self._models[unit.name] = str(rows[0].get("fingerprint", ""))
            self._trainings[unit.name] = str(results.get("training", ""))
            if RETRAIN_FROM in results:
                self._from_bundles.add(unit.name)
        else:
            self._rounds[unit.name] = _rounds_from_request(rows)

    def _lengthen_controls(self) -> None:
        """Let a control go on where a method beside it that came later took longer."""
        for unit in self._units.values():
            if unit.planned.kind == "control" and self._rounds.get(unit.name, -1) < self._longest(unit):
                self._done.discard(unit.name)

    def _clean(self) -> None:
        """Delete trainings that no unit needs any more."""
        over = self._done | self._failed.keys()
        needed = {
            name for unit in self._units.values() if unit.name not in over for name in (unit.original, unit.retrain)
        }
        kept = {self._trainings.get(name) for name in needed}
        for name, training in self._trainings.items():
            if training and name not in needed and training not in kept:
                shutil.rmtree(trainings_in(self._state) / training, ignore_errors=True)


def _rounds_from_request(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds from the request on a run or a control took, those that followed the recovery included."""
    by_phase = {str(row["phase"]): row for row in rows}
    points = [point["round"] for row in rows if row["phase"] != "retrained" for point in row.get("path", ())]
    unlearning = int(by_phase["unlearned"]["rounds"]) if "unlearned" in by_phase else 0
    recovery = [int(row["rounds"]) for phase, row in by_phase.items() if phase in ("recovered", "budget")]
    return max([0, *map(int, points), *(unlearning + rounds for rounds in recovery)])


def _write_comparisons(folder: StudyFolder) -> None:
    for setting in folder.recipes:
        comparison = folder.comparison(setting)
        if comparison is not None:
            write_comparison(folder.folder / UNITS / setting, comparison)


def _warn_of_other_code(folder: StudyFolder) -> None:
    """Say that finished units were made by other code; each record names its own."""
    mine = code_name(code_version())
    others = [code for code in study_status(folder).codes if code != mine]
    if others:
        log.warning(
            "finished units were made by fedquit %s, and this is %s: the study goes on, each record names its code. "
            "What must be trained again must be the same model; for one version alone, choose another --out.",
            " and ".join(others),
            mine,
        )
