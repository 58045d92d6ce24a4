# SPDX-License-Identifier: Apache-2.0
"""Processes that are watched: their surroundings, their logs, how they are kept running, and how they end.

A `Guard` answers for everything that is started under it: nothing outlives it, whatever becomes of this process. A
`Keeper` keeps one process running: when it ends by itself it is started again, after a pause that grows.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedquit.errors import FedquitError
from fedquit.flower.deploy import reaper

Say = Callable[[str], None]

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",  # many processes share few cores
    "PYTHONUNBUFFERED": "1",  # a log that ends in the middle tells nothing
}
HERE = "127.0.0.1"
LOW, HIGH = 20_000, 32_000  # below the ports that systems give to outgoing connections
KNOWN = {
    "[code: 2004]": "the SuperLink refuses its key: it is not registered, or its node was killed in the last minute",
    "CERTIFICATE_VERIFY_FAILED": "the SuperLink's certificate is not from the authority that it trusts",
}
PORT_TAKEN = "address already in use"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
EXTRA = "this needs Flower: pip install -e '.[flower]' in the clone."


class DeploymentError(FedquitError):
    """A process that does not start, does not answer or does not go on."""


def require_flower() -> None:
    """Say at once what is missing."""
    if not find_spec("flwr"):
        raise DeploymentError(EXTRA)


def program(name: str) -> str:
    """Where one of Flower's commands is: beside this Python, else on the path."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise DeploymentError(EXTRA)
    return found


def environment(home: Path, mark: str = "") -> dict[str, str]:
    """The surroundings of everything that is started: nothing calls home, and Flower's own files lie under `home`."""
    inherited = os.environ
    paths = [sysconfig.get_path("scripts"), inherited.get("PATH", os.defpath)]  # Flower finds its helpers on the path
    direct = [HERE, "localhost", *filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy")])]
    changed = {
        **SWITCHES,
        "FLWR_HOME": str(home.resolve()),
        "PATH": os.pathsep.join(paths),
        "NO_PROXY": ",".join(direct),
        "no_proxy": ",".join(direct),
    }
    if "PYTHONPATH" in inherited:  # what is relative here would point elsewhere there
        entries = filter(None, inherited["PYTHONPATH"].split(os.pathsep))
        changed["PYTHONPATH"] = os.pathsep.join(str(Path(entry).resolve()) for entry in entries)
    if mark:
        changed[reaper.VARIABLE] = mark
    return {**inherited, **changed}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different. Another process may still be quicker: then try again."""
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(LOW, HIGH), HIGH - LOW):
            if len(chosen) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((HERE, port))
                chosen.append(port)
    if len(chosen) < count:
        raise DeploymentError(f"no {count} free ports between {LOW} and {HIGH}: stop other servers on this machine.")
    return chosen


@dataclass(frozen=True)
class Pauses:
    """How long to wait before the next attempt: longer each time, up to a most."""

    first: float = 1.0
    factor: float = 2.0
    most: float = 10.0
    attempts: int = 20  # in a row that lead to nothing; then it is given up

    def __iter__(self) -> Iterator[float]:
        for attempt in range(self.attempts):
            yield min(self.most, self.first * self.factor ** min(attempt, 60))


class Guard:
    """Answers for everything started under it; when this process dies in any way, a helper ends what is left."""

    def __init__(self, grace: float = 5.0) -> None:
        self.mark = secrets.token_hex(8)
        self._grace = grace  # seconds between a request to end and the kill
        self._reaper: subprocess.Popen[str] | None = None
        self._groups: list[int] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Guard:
        command = [sys.executable, "-I", reaper.__file__, self.mark]
        quiet = subprocess.DEVNULL
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        reaper.end(self.mark, self._groups, self._grace)
        if self._reaper:
            with self._reaper:  # closes the pipe and waits
                self._tell(reaper.DONE)

    def start(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that writes to a log, in a session of its own: Ctrl-C reaches us, and we stop it in order."""
        log.parent.mkdir(parents=True, exist_ok=True)
        marked = {**env, reaper.VARIABLE: self.mark_of(name)}
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, env=marked, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        with self._lock:  # keepers start processes in threads of their own
            self._groups.append(process.pid)
            self._tell(str(process.pid))
        return process

    def mark_of(self, name: str) -> str:
        """The mark of one process and of all that it starts."""
        return f"{self.mark}.{name}."

    def _tell(self, word: str) -> None:
        if self._reaper and self._reaper.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(word + "\n")
                self._reaper.stdin.flush()


class Keeper:
    """Keeps one process running, and all that it starts."""

    def __init__(
        self,
        guard: Guard,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        *,
        pauses: Pauses | None = None,
        elsewhere: Callable[[], Sequence[str]] | None = None,  # the command with another port, where its own is taken
        steady: float = 30.0,  # seconds after which a process counts as having come up: its failures are forgotten
        say: Say = lambda _: None,
    ) -> None:
        self.name, self.command, self.log = name, tuple(command), log
        self.starts = 0  # how often it was started
        self.gave_up = ""  # why it is no longer started again
        self._guard, self._env, self._say = guard, env, say
        self._elsewhere = elsewhere
        self._pauses, self._steady = pauses or Pauses(), steady
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Keeper:
        """Start it, and go on doing so."""
        self._unwanted.clear()
        self.gave_up = ""
        self._begin()
        self._thread = threading.Thread(target=self._watch, name=f"keeper of {self.name}", daemon=True)
        self._thread.start()
        return self

    @property
    def pid(self) -> int:
        """The process that runs now."""
        if not self._process:
            raise DeploymentError(f"{self.name} was not started yet.")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it runs now; between two starts it does not."""
        return self._process is not None and self._process.poll() is None

    def crash(self) -> None:
        """Kill it with all its children, as a power cut would; it is started again like after any other end."""
        os.kill(self.pid, signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """Ask it to stop for good, without waiting for it."""
        self._unwanted.set()
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace: float = 10.0) -> None:
        """Stop it for good: asked first, killed when it does not listen."""
        self.ask_to_stop()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._kill_all()
        if self._thread:
            self._thread.join()
            self._kill_all()  # started in the very last moment

    def kill(self) -> None:
        """End it at once and for good."""
        self._unwanted.set()
        self._kill_all()
        if self._thread:
            self._thread.join()
            self._kill_all()

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        return tail(self.log, lines)

    @property
    def port_taken(self) -> bool:
        """Whether its log says that somebody else was quicker."""
        return PORT_TAKEN in self.tail(40).lower()

    def _begin(self) -> None:
        self.starts += 1
        self._process = self._guard.start(self.name, self.command, self.log, self._env)

    def _kill_all(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        reaper.kill(self._guard.mark_of(self.name))

    def _watch(self) -> None:
        pauses = iter(self._pauses)
        while self._process and not self._unwanted.is_set():
            began = time.monotonic()
            code = self._process.wait()
            reaper.kill(self._guard.mark_of(self.name))  # an orphan must not go on writing beside its successor
            if self._unwanted.is_set():
                return
            if time.monotonic() - began >= self._steady:
                pauses = iter(self._pauses)
            pause, why = next(pauses, None), reason(self.log, code)
            if pause is None:
                self.gave_up = f"{self.name} ended {self.starts} times, the last time: {why}"
                self._say(f"{self.gave_up}: giving up; {self.log} says more.")
                return
            self._say(f"{self.name} ended ({why}): starting it again in {pause:.0f} s.")
            if self._unwanted.wait(pause):
                return
            if self._elsewhere and self.port_taken:
                self.command = tuple(self._elsewhere())
            self._begin()


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, without the colours."""
    try:
        text = log.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(COLOURS.sub("", text).splitlines()[-lines:])


def reason(log: Path, code: int) -> str:
    """Why a process of Flower's ended, in a few words: what it wrote below its exit code, or which signal it was."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    _, found, said = tail(log, 40).rpartition("Exit Code: ")
    known = next((why for sign, why in KNOWN.items() if sign in said), "")
    lines = [line.strip() for line in said.splitlines()[1:4] if not line.startswith(("INFO", "For more"))]
    return known or (" ".join(filter(None, lines)) if found and any(lines) else f"exit code {code}")


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: through every `with` on the way out, and undisturbed."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _frame: object) -> None:
        for which in watched:  # tidying up takes seconds: a second signal must not cut it short
            signal.signal(which, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {which: signal.signal(which, leave) for which in watched}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
