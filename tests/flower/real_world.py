# SPDX-License-Identifier: Apache-2.0
"""A federation of real processes for tests: a SuperLink, SuperNodes, the example app, and a supervisor.

with Federation(folder, nodes=3) as fed:
    fed.begin()
    fed.until("training round 1")
    fed.ask(0)
    fed.finish()
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from fedquit.flower.deploy.commands import Mode, Value
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.processes import Backoff
from fedquit.flower.deploy.stack import Stack
from fedquit.flower.deploy.supervision import STATE, Plan, run_until_finished
from fedquit.flower.outbox import Entry, Outbox

SHORT: dict[str, Value] = {"fedquit.train.rounds": 2, "fedquit.recover-rounds": 1}
LONG = 600.0  # seconds: nothing takes so long, but a busy machine may be slow


def running_in(folder: Path) -> list[str]:
    """The processes whose Flower keeps its files below that folder."""
    sign = f"FLWR_HOME={folder.resolve()}".encode()
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sign in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return commands


def places_in(trace: str) -> set[str]:
    """The addresses that a trace of strace names, of either kind: it writes the two differently."""
    return set(re.findall(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', trace))


class Federation:
    """One federation, for as long as the `with` lasts; every node has a home of its own."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        settings: Mapping[str, Value] | None = None,
        mode: Mode = "secure",
        app: Path | None = None,
        node_target: Callable[[str], str] = str,
    ) -> None:
        self.folder, self.state, self.app = folder, folder / "state", app or app_folder()
        self.homes = [folder / "homes" / f"partition-{i}" for i in range(nodes)]
        own: list[dict[str, Value]] = [
            {"partition-id": i, "num-partitions": nodes, "fedquit-home": str(home)} for i, home in enumerate(self.homes)
        ]
        self.virtual: dict[str, Value] = {}  # what makes the nodes of a simulation
        if mode == "simulation":
            own, self.virtual = [], {"num-supernodes": nodes, "client-resources-num-cpus": 1}
        given = {f"fedquit.{name}": value for name, value in (settings or {}).items()}
        self.settings: dict[str, Value] = {
            **SHORT,
            "partitions": nodes,
            "fedquit.min-nodes": nodes,
            "fedquit.floor": 1,  # of two nodes one may leave
            STATE: str(self.state),
            **given,
        }
        if mode == "simulation":
            self.settings["fedquit.home"] = str(folder / "homes")
        self.stack = Stack(folder / "stack", own, mode=mode, timeout=LONG, say=self._say, node_target=node_target)
        self.said: list[str] = []  # by those who keep things running
        self.heard: list[str] = []  # from the run's log
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.stack.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.__exit__()
        if self._thread:
            self._thread.join(60)

    def _say(self, line: str) -> None:
        self.said.append(line)

    def begin(self, *, attempts: int = 5) -> None:
        """Submit the run, and see it through in the background."""
        backoff = Backoff(1.0, 1.0, attempts=attempts)
        plan = Plan(self.app, self.settings, self.virtual, backoff=backoff, patience=LONG)
        memo, link = self.folder / "run.json", self.stack.superlink

        def work() -> None:
            try:
                run_until_finished(
                    plan, self.stack.control, memo, superlink=link, say=self._say, hear=self.heard.append
                )
            except BaseException as error:
                self.failure = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def finish(self, seconds: float = LONG) -> None:
        """Wait for the end of the run, and raise what went wrong."""
        assert self._thread
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.report()
        if self.failure:
            raise self.failure

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the server wrote down."""
        file = self.state / "events.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def notes(self) -> list[str]:
        """What it told the operator."""
        return [e["text"] for e in self.events if e["event"] == "note"]

    def until(self, words: str, seconds: float = LONG) -> None:
        """Wait for a note with these words."""
        self.wait(lambda: any(words in note for note in self.notes), f"the server never said {words!r}", seconds)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = LONG) -> None:
        """Wait for something."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.failure or time.monotonic() > deadline:
                raise DeploymentError(f"{what}: {self.failure or 'time is up'}\n{self.report()}")
            time.sleep(0.1)

    def ask(self, node: int) -> Entry:
        """The owner of a node's data asks to be forgotten."""
        return Outbox(self.homes[node]).file()

    @property
    def ledger(self) -> dict[str, Any]:
        """The server's ledger."""
        content: dict[str, Any] = json.loads((self.state / "ledger.json").read_text())
        return content

    def number(self, node: int) -> int:
        """The client behind a node: its name is in the roster, or in a simulation its partition."""
        roster = json.loads((self.state / "clients.json").read_text())
        keys = (f"node-{node}", f"partition:{node}")
        (number,) = [m["number"] for m in roster if m["name"] == keys[0] or m["key"] == keys[1]]
        return int(number)

    def report(self) -> str:
        """What is known, for a test that failed."""
        return "\n".join([*self.said, "--", *self.notes, "--", *self.heard[-20:]])
