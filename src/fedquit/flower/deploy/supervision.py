# SPDX-License-Identifier: Apache-2.0
"""A run that is submitted again after every failure, until it has finished.

Flower does not resume a run: when the SuperLink or the ServerApp dies, the run has failed. fedquit's ServerApp keeps
its state on disk, so a new run continues where the last one stopped. `run_until_finished` submits that new run.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedquit.errors import InputError, StoreError
from fedquit.flower.deploy.commands import Value
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.logs import COLOURS
from fedquit.flower.deploy.processes import Backoff, Say, SupervisedProcess
from fedquit.utils.files import read_json, write_json

Hear = Callable[[str], None]  # takes one line of the run's log
STATE = "fedquit.state"  # the setting by which an app learns where its state directory is
RUN_BACKOFF = Backoff(first=2.0, factor=2.0, longest=60.0, attempts=10)
COMPLETED = "finished:completed"  # in Flower's words
STOPPED = "finished:stopped"
UNKNOWN_RUN = "Run ID not found"
LOST_AFTER = 150.0  # seconds in which a SuperLink notices by itself that a ServerApp is gone
STATUS_PAUSE = 1.0  # seconds between two calls for a run's status


@dataclass(frozen=True)
class Plan:
    """Which app is run with which settings, and how long to try again."""

    app: Path
    config: Mapping[str, Value] = field(default_factory=dict)  # of the run
    federation: Mapping[str, Value] = field(default_factory=dict)  # of a simulation
    backoff: Backoff = RUN_BACKOFF
    patience: float = 300.0  # seconds without a SuperLink that answers

    def __post_init__(self) -> None:
        if not (self.app / "pyproject.toml").exists():
            raise InputError(f"{self.app} is no Flower app: give the folder that holds the app's pyproject.toml.")


def run_until_finished(
    plan: Plan,
    control: Control,
    memo: Path,
    *,
    superlink: SupervisedProcess | None = None,
    say: Say = lambda _: None,
    hear: Hear = lambda _: None,
) -> int:
    """Run an app until it has finished, and submit it again whenever it fails.

    Args:
        plan: the app and its settings.
        control: the calls to the SuperLink.
        memo: the file that holds the id of the run in progress. A supervisor that is started after a crash follows that
            run, unless it ended together with a SuperLink of ours.
        superlink: the SuperLink's process, if it is ours.
        say: takes one sentence for the operator.
        hear: takes each line of the run's log.

    Returns:
        The id of the run that finished.

    Raises:
        DeploymentError: when the attempts are used up, or an operator stopped the run.
    """
    return _Supervisor(plan, control, memo, superlink, say, hear).run()


def wait_for_superlink(control: Control, patience: float, superlink: SupervisedProcess | None, say: Say) -> None:
    """Wait until the SuperLink answers.

    Args:
        control: the calls to the SuperLink.
        patience: seconds to wait at most.
        superlink: the SuperLink's process, if it is ours.
        say: takes one sentence for the operator.

    Raises:
        DeploymentError: when the time is up, or our SuperLink is no longer started.
    """
    deadline = time.monotonic() + patience
    reported = False
    while not control.healthy():
        if superlink and superlink.gave_up:
            raise DeploymentError(f"{superlink.gave_up}. Its log:\n{superlink.tail()}")
        if time.monotonic() > deadline:
            raise DeploymentError(f"no SuperLink answered on {control.address} for {patience:.0f} s: start it.")
        if not reported:
            say(f"waiting for the SuperLink on {control.address}.")
            reported = True
        time.sleep(0.5)


@dataclass(frozen=True)
class _Supervisor:
    plan: Plan
    control: Control
    memo: Path
    superlink: SupervisedProcess | None
    say: Say
    hear: Hear

    def run(self) -> int:
        pauses = iter(self.plan.backoff)
        run = _run_in_progress(self.memo)
        self._wait_for_superlink()
        if run is not None and self.superlink:
            self._give_up(run)
            run = None
        while True:
            self._wait_for_superlink()
            began = time.monotonic()
            starts = self._starts
            if run is None:
                run = self._submit()
            outcome = "it could not be submitted" if run is None else self._follow(run, starts)
            if run is not None and outcome == COMPLETED:
                self.say(f"run {run} has finished.")
                self.memo.unlink(missing_ok=True)
                return run
            if outcome == STOPPED:
                self.memo.unlink(missing_ok=True)
                raise DeploymentError(f"run {run} was stopped by an operator: start it again with the same command.")
            if time.monotonic() - began > LOST_AFTER:
                pauses = iter(self.plan.backoff)  # it made progress, so earlier failures no longer count
            pause = next(pauses, None)
            if pause is None:
                attempts = self.plan.backoff.attempts
                raise DeploymentError(f"run {run} is lost, as were {attempts} before it. The last: {outcome}")
            self.say(
                f"run {run} is lost ({outcome}): the next one starts in {pause:.0f} s and goes on from the state on "
                "disk."
            )
            time.sleep(pause)
            run = None

    @property
    def _starts(self) -> int:
        """How often our SuperLink has been started."""
        return self.superlink.starts if self.superlink else 0

    def _wait_for_superlink(self) -> None:
        wait_for_superlink(self.control, self.plan.patience, self.superlink, self.say)

    def _submit(self) -> int | None:
        """The id of a new run; None if the SuperLink went away meanwhile, even if it is back by now."""
        starts = self._starts
        try:
            run = self.control.submit(self.plan.app, self.plan.config, self.plan.federation)
        except DeploymentError:
            went_away = self.superlink is not None and (self._starts != starts or not self.superlink.running)
            if self.control.healthy() and not went_away:  # then the app is at fault, and would be the next time
                raise
            return None
        write_json(self.memo, {"run": str(run)})
        self.say(f"run {run} started.")
        return run

    def _give_up(self, run: int) -> None:
        """Stop a run that ended with its SuperLink, which would count as running for another minute."""
        with contextlib.suppress(DeploymentError):  # the SuperLink may know already
            self.control.stop(run)

    def _follow(self, run: int, starts: int) -> str:
        """Follow a run to its end; how it ended. A run also ends when its SuperLink has been started again."""
        failing_since: float | None = None
        while True:
            self._stream_log(run, starts)
            self._wait_for_superlink()
            if self._starts != starts:
                self._give_up(run)
                return "the SuperLink was started again"
            try:
                details = self.control.run(run)
            except DeploymentError as error:
                if UNKNOWN_RUN in str(error):
                    return "the SuperLink does not know it"
                patience = self.plan.patience
                if failing_since is None:  # the SuperLink may have gone away between two calls
                    failing_since = time.monotonic()
                    self.say(
                        f"what became of run {run} cannot be told: {error} It is asked for up to {patience:.0f} s."
                    )
                if time.monotonic() - failing_since > patience:
                    return f"nobody could tell for {patience:.0f} s what became of it: {error}"
                time.sleep(STATUS_PAUSE)
                continue
            failing_since = None
            status = str(details["status"])
            if status in (COMPLETED, STOPPED):
                return status
            if status.startswith("finished"):
                return f"{status}, {details.get('status-details', '')}"
            time.sleep(STATUS_PAUSE)  # the connection to the log broke, and the run goes on

    def _stream_log(self, run: int, starts: int) -> None:
        """Pass the log on until the run ends, the connection breaks, or our SuperLink has been started again."""
        lines: queue.Queue[str | None] = queue.Queue()
        with self.control.stream(run) as stream:
            reader = threading.Thread(target=_read_lines, args=(stream, lines), daemon=True)
            reader.start()
            try:
                while self._starts == starts:
                    with contextlib.suppress(queue.Empty):
                        line = lines.get(timeout=0.5)
                        if line is None:
                            return
                        self.hear(line)
            finally:
                stream.kill()
                reader.join()


def _read_lines(stream: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Put the lines of a process's output into a queue, and None after the last."""
    for line in stream.stdout or ():
        lines.put(COLOURS.sub("", line).rstrip())
    lines.put(None)


def _run_in_progress(memo: Path) -> int | None:
    """The run that an earlier supervisor was following, if any."""
    if not memo.exists():
        return None
    with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
        return int(read_json(memo)["run"])
    return None
