# SPDX-License-Identifier: Apache-2.0
"""Processes that are restarted when they end, and none of which outlives this one.

A `ProcessGroup` ends everything that was started in it, also when this process is killed. A `SupervisedProcess` is
started again when it ends by itself, after a pause that grows (`Backoff`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedquit.flower.deploy import reaper
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.logs import PORT_TAKEN, end_reason, tail
from fedquit.utils import rotating_log
from fedquit.utils.files import make_folder

LOG_PATIENCE = 5.0  # seconds for what a process has printed to be in its log
Say = Callable[[str], None]  # takes one sentence for the operator


@dataclass(frozen=True)
class Backoff:
    """Pauses before the next attempt, in seconds: each longer than the last, up to a limit."""

    first: float = 1.0
    factor: float = 2.0
    longest: float = 10.0
    attempts: int = 20  # in a row without success, after which no other is made

    def __iter__(self) -> Iterator[float]:
        for attempt in range(self.attempts):
            yield min(self.longest, self.first * self.factor ** min(attempt, 60))


FOR_EVER = Backoff(first=2.0, factor=1.5, longest=60.0, attempts=10**9)  # of what must run whatever happens


class LogWriter:
    """A process that writes what comes through a pipe to a log, and is started again if it is killed.

    This side keeps the reading end of the pipe open: whoever prints does not notice, and what is in the pipe waits.

    Args:
        log: the file.
        reading: the end of the pipe, which this object closes when all who could write have ended.
        say: takes one sentence for the operator.
    """

    def __init__(self, log: Path, reading: int, say: Say) -> None:
        self._log = log
        self._reading = reading
        self._say = say
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor of {log.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The id of the process that writes."""
        return self._process.pid

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, so many seconds at most."""
        self._thread.join(seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        """It has no mark, by which it would be ended before it has written everything."""
        command = [sys.executable, "-I", "-S", rotating_log.__file__, str(self._log)]
        env = {key: value for key, value in os.environ.items() if key != reaper.VARIABLE}
        return subprocess.Popen(
            command, env=env, stdin=self._reading, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _supervise(self) -> None:
        for pause in FOR_EVER:
            if self._process.wait() == 0:
                break
            self._say(f"what writes {self._log} was killed and is started again; some of its last lines may be lost.")
            time.sleep(pause)
            with contextlib.suppress(OSError):  # no process can be started now: later
                self._process = self._start()
        os.close(self._reading)


class ProcessGroup:
    """Ends all processes that were started in it. If this process is killed, a helper process does so (`reaper`)."""

    def __init__(self, grace: float = 5.0) -> None:
        self.mark = secrets.token_hex(8)
        self._grace = grace  # seconds between SIGTERM and SIGKILL
        self._reaper: subprocess.Popen[str] | None = None
        self._groups: list[int] = []
        self._log_writers: dict[Path, LogWriter] = {}  # the last one of each log
        self._lock = threading.Lock()

    def __enter__(self) -> ProcessGroup:
        command = [sys.executable, "-I", reaper.__file__, self.mark]
        self._reaper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        reaper.end(self.mark, self._groups, self._grace)
        for log in list(self._log_writers):
            self.wait_for_log(log)
        if self._reaper:
            with self._reaper:  # closes the pipe and waits
                self._notify_reaper(reaper.DONE)

    def start(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], say: Say = lambda _: None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that Ctrl-C reaches only this process, which stops the others.

        Args:
            name: its name in this group.
            command: the program and its arguments.
            log: the file to which its output is appended, of bounded size (`rotating_log`).
            env: its environment variables.
            say: takes one sentence for the operator, if the log's writer is killed.

        Returns:
            The process, which runs.
        """
        make_folder(log.parent, 0o700)
        marked_env = {**env, reaper.VARIABLE: self.mark_of(name)}
        with self._log_writer(log, say) as writer:
            process = subprocess.Popen(
                command, env=marked_env, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True
            )
        with self._lock:  # supervised processes are restarted from threads
            self._groups.append(process.pid)
            self._notify_reaper(str(process.pid))
        return process

    @contextlib.contextmanager
    def _log_writer(self, log: Path, say: Say) -> Iterator[int]:
        """The end of a pipe for a process to print to; another process writes what comes to a log."""
        reading, writing = os.pipe()
        try:
            writer = LogWriter(log, reading, say)
            with self._lock:
                self._log_writers[log] = writer
            yield writing
        finally:
            os.close(writing)

    def wait_for_log(self, log: Path) -> None:
        """Wait until everything that a process has printed, which has ended, is in its log."""
        with self._lock:
            writer = self._log_writers.get(log)
        if writer is not None:
            writer.wait(LOG_PATIENCE)  # not longer: somebody without our mark may still print

    def mark_of(self, name: str) -> str:
        """The mark of one process and of all that it starts."""
        return f"{self.mark}.{name}."

    def _notify_reaper(self, line: str) -> None:
        if self._reaper and self._reaper.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(line + "\n")
                self._reaper.stdin.flush()


class SupervisedProcess:
    """A process that is started again whenever it ends by itself. Its children end with it.

    Args:
        group: the group that ends it at the latest.
        name: its name in the group and in sentences to the operator.
        command: the program and its arguments.
        log: the file to which its output is appended.
        env: its environment variables.
        backoff: the pauses before it is started again.
        command_on_other_port: makes the command with another port, for the case that its own is taken.
        steady: seconds after which a process counts as running, and earlier failures no longer count.
        say: takes one sentence for the operator.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        *,
        backoff: Backoff | None = None,
        command_on_other_port: Callable[[], Sequence[str]] | None = None,
        steady: float = 30.0,
        say: Say = lambda _: None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log
        self.starts = 0  # how often it was started
        self.gave_up = ""  # why it is no longer started again
        self._group = group
        self._env = env
        self._say = say
        self._command_on_other_port = command_on_other_port
        self._backoff = backoff or Backoff()
        self._steady = steady
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> SupervisedProcess:
        """Start the process, and a thread that starts it again when it ends."""
        self._stopping.clear()
        self.gave_up = ""
        self._start_process()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor of {self.name}", daemon=True)
        self._thread.start()
        return self

    @property
    def pid(self) -> int:
        """The id of the process that runs now, or that ran last."""
        if not self._process:
            raise DeploymentError(f"{self.name} was not started yet.")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it runs now; between two starts it does not."""
        return self._process is not None and self._process.poll() is None

    def crash(self) -> None:
        """Kill it with all its children, as a power cut would; it is started again as after any other end."""
        os.kill(self.pid, signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """Send SIGTERM and do not start it again; returns at once."""
        self._stopping.set()
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace: float = 10.0) -> None:
        """Stop it for good: SIGTERM first, SIGKILL after `grace` seconds."""
        self.ask_to_stop()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._kill_all()
        self._end_supervision()

    def kill(self) -> None:
        """End it at once and for good."""
        self._stopping.set()
        self._kill_all()
        self._end_supervision()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return tail(self.log, lines)

    @property
    def port_taken(self) -> bool:
        """Whether its log says that another process has its port."""
        return PORT_TAKEN in self.tail(40).lower()

    def _start_process(self) -> None:
        self.starts += 1
        self._process = self._group.start(self.name, self.command, self.log, self._env, self._say)

    def _end_supervision(self) -> None:
        if self._thread:
            self._thread.join()
            self._kill_all()  # the thread may have started it once more in the last moment

    def _kill_all(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        reaper.kill(self._group.mark_of(self.name))

    def _supervise(self) -> None:
        """Start the process again each time it ends, until it is stopped or the attempts are used up."""
        pauses = iter(self._backoff)
        while self._process and not self._stopping.is_set():
            began = time.monotonic()
            exit_code = self._process.wait()
            reaper.kill(self._group.mark_of(self.name))  # its children must not write next to its successor's
            self._group.wait_for_log(self.log)
            if self._stopping.is_set():
                return
            if time.monotonic() - began >= self._steady:
                pauses = iter(self._backoff)
            pause = next(pauses, None)
            reason = end_reason(self.log, exit_code)
            if pause is None:
                self.gave_up = f"{self.name} ended {self.starts} times, the last time: {reason}"
                self._say(f"{self.gave_up}: giving up; {self.log} says more.")
                return
            self._say(f"{self.name} ended ({reason}): starting it again in {pause:.0f} s.")
            if self._stopping.wait(pause):
                return
            if self._command_on_other_port and self.port_taken:
                self.command = tuple(self._command_on_other_port())
            self._start_process()


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: through every `with` block, and only once."""
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _frame: object) -> None:
        for other in handled:  # the clean-up takes seconds, and a second signal must not interrupt it
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
