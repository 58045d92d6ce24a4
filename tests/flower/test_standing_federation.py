# SPDX-License-Identifier: Apache-2.0
"""A closed federation of real processes that stands: started, asked after its training, killed whole, and asked again.

Certificates are valid for seconds, which stands for the weeks of real ones: when the federation is started again, all
of them have expired, as after a year.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedquit.flower.closed import apps
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.outbox import Entry, Outbox
from flower.closed_world import enrolled, new_project

pytestmark = [pytest.mark.flower, pytest.mark.faults, pytest.mark.timeout(1500)]
NAMES = [f"hospital-{i}" for i in range(4)]
LIFETIME = 60.0  # seconds of a certificate
LONG = 600.0


class World:
    """The processes of a closed federation: its server, and its sites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.app = Path(shutil.copytree(app_folder(), folder / "app"))
        self.project = new_project(folder / "project", LIFETIME)
        apps.sign(self.app, apps.load_release_key(self.project.folder / "release.key"), self.project.apps)
        self.sites = [enrolled(self.project, folder / name / "site", name) for name in NAMES]
        self.env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def home(self, number: int) -> Path:
        return self.folder / NAMES[number] / "home"

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def command(self, name: str, *words: object) -> None:
        """Start a command of fedquit in the background."""
        command = [sys.executable, "-m", "fedquit", *map(str, words)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def start_site(self, number: int) -> None:
        settings = ["--set", f"partition-id={number}", "--set", f"num-partitions={len(NAMES)}"]
        folder = self.sites[number].folder
        self.command(NAMES[number], "flower", "node", "--site", folder, "--home", self.home(number), *settings)

    def start_server(self, rounds: int) -> None:
        given = {"train.rounds": rounds, "recover-rounds": 1, "min-nodes": 3, "timeout": 120.0, "deadline": 400.0}
        words = [word for name, value in given.items() for word in ("--set", f"fedquit.{name}={value}")]
        place = ["--project", self.project.folder, "--state", self.state, "--sweep", "100000"]
        self.command("serve", "flower", "serve", self.app, *place, *words, "--set", f"partitions={len(NAMES)}")

    def request(self, number: int, *words: object) -> str:
        command = [sys.executable, "-m", "fedquit", "request", "--home", str(self.home(number)), *map(str, words)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def kill(self) -> None:
        """A power cut: every process of this federation ends at once."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()
        self.wait(lambda: not self.left(), "processes are left")

    def left(self) -> list[str]:
        """Processes of Flower's that work in this folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (process / "cmdline").read_bytes():
                    found.append(process.name)
        return found

    def stop(self, *names: str) -> None:
        ending = [self.processes.pop(name) for name in names or tuple(self.processes)]
        for process in ending:
            process.send_signal(signal.SIGTERM)
        for process in ending:
            process.wait(LONG)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = LONG) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}\n{self.log('serve')[-6000:]}"
            time.sleep(0.3)

    def until(self, words: str, name: str = "serve", seconds: float = LONG) -> None:
        self.wait(lambda: words in self.log(name), f"{name} never said {words!r}", seconds)

    @property
    def entries(self) -> list[dict[str, Any]]:
        path = self.state / "ledger.json"
        return list(json.loads(path.read_text())["entries"]) if path.exists() else []

    def served(self, number: int) -> bool:
        return any(e["status"] == "done" and self.name_of(e["client"]) == NAMES[number] for e in self.entries)

    def name_of(self, client: int) -> str:
        listed = json.loads((self.state / "clients.json").read_text())
        return next(str(member["name"]) for member in listed if member["number"] == client)

    def outbox(self, number: int) -> list[Entry]:
        return Outbox(self.home(number)).entries()

    def certificates(self) -> float:
        """When the last certificate of a site expires (Unix time)."""
        return max(c.not_after for site in self.project.sites.values() for c in site.certificates)


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    try:
        yield made
    finally:
        made.stop()


def rotated(project: Project, site: SiteFolder, name: str) -> None:
    """What a site and its operator do when the site's certificate has expired."""
    site.join()
    site.install(project.rotate(name, site.request.read_bytes()))


def test_a_federation_stands_is_killed_whole_and_serves_the_request_that_waited(tmp_path: Path) -> None:
    with world(tmp_path) as fed:
        for number in range(4):
            fed.start_site(number)  # before there is any server
        first = {name: site.certificates[-1].sha256 for name, site in fed.project.sites.items()}
        time.sleep(5)
        fed.start_server(rounds=2)
        fed.until("the federation stays open")
        renewed = {name for name, site in fed.project.sites.items() if site.certificates[-1].sha256 != first[name]}
        assert renewed == set(NAMES), "every node renewed its certificate while it trained"
        assert "training round 2 of 2 (4 replies" in fed.log("serve")

        # A request after the training, which nobody asks for: the site gives notice of it.
        assert "nobody has received it yet" in fed.request(0)
        fed.wait(lambda: fed.served(0), "the request was not served")
        fed.wait(lambda: fed.outbox(0)[0].status == "served", "the owner was not told")
        assert "a site has given notice of a request" in fed.log("serve")
        assert "has noted request" in fed.log(NAMES[0])
        (entry,) = fed.outbox(0)
        assert entry.receipt is not None
        assert entry.receipt.number == "r0001"

        # The power goes; a year passes, for certificates.
        fed.wait(lambda: fed.log("serve").count("has finished") >= 2, "the run did not end")
        (tmp_path / "which.txt").write_text("0 1 2")
        fed.kill()
        assert "nobody has received it yet" in fed.request(1, "--samples", tmp_path / "which.txt")
        while time.time() < fed.certificates() + 1:
            time.sleep(1)
        for name in ("serve", *NAMES):
            (tmp_path / f"{name}.log").rename(tmp_path / f"{name}.log.before")
        fed.start_server(rounds=2)
        for number in (1, 2, 3):
            fed.start_site(number)
        fed.until("HAS EXPIRED", NAMES[1])
        fed.until(f"warning: {NAMES[1]} was last seen")
        assert "Its certificate has expired" in fed.log("serve")
        for number in (1, 2, 3):
            rotated(fed.project, fed.sites[number], NAMES[number])
        fed.wait(lambda: fed.served(1), "the request that waited was not served")
        assert {e["status"] for e in fed.entries} == {"done"}
        fed.wait(lambda: fed.outbox(1)[0].status == "served", "the owner was not told")

        # Training is extended; a site is revoked, which leaves too few.
        fed.until("the federation stays open")
        fed.stop("serve")
        fed.start_server(rounds=40)
        fed.until("training round 3 of 40")
        before = fed.log("serve").count("training round")
        fed.project.revoke(NAMES[3])
        fed.until("training pauses: 2 may take part, and the floor is 3")
        assert fed.log("serve").count("training round") <= before + 1, "within a round"
        fed.until("the server says: training pauses", NAMES[1])
