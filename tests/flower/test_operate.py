# SPDX-License-Identifier: Apache-2.0
"""docs/operate.md, from nothing to a forgotten site: every command of the page, in its order, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.environment import free_ports
from fedquit.flower.outbox import Outbox
from fedquit.utils.files import open_to_others

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
BLOCK = re.compile(r"```sh (operator|site)( background)?\n(.*?)\n```", re.DOTALL)
NAMES = ("hospital-0", "hospital-1", "hospital-2")
LONG = 600.0
BEFORE_CLOSED = Path(__file__).parent / "recorded" / "before_closed.tar.gz"


class Page:
    """The commands of the page, and the machines on which they are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = BLOCK.findall(PAGE.read_text())
        self.port, self.superlink_port = free_ports(2)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "fedquit").write_text(f'#!/bin/sh\nexec {sys.executable} -m fedquit "$@"\n')
        (programs / "fedquit").chmod(0o755)
        sources = Path(__file__).parents[2] / "src"
        self.env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(sources)}
        self.processes: list[subprocess.Popen[bytes]] = []
        for name in ("operator", *NAMES):
            (folder / name).mkdir()

    def log(self, who: str) -> Path:
        return self.folder / f"{who}.log"

    def _take(self, side: str, background: bool) -> list[str]:
        """The commands of the next block, which must be of this kind."""
        assert self.left, "the page has no more commands"
        kind, marked, text = self.left.pop(0)
        assert (kind, bool(marked)) == (side, background), text
        return str(text).splitlines()

    def _adapted(self, line: str, who: str) -> str:
        number = NAMES.index(who) if who in NAMES else 0
        changes = {
            "fed.example.org": "127.0.0.1 --listen 127.0.0.1",
            "--port 9443": f"--port {self.port}",
            "--superlink-port 9092": f"--superlink-port {self.superlink_port}",
            "partition-id=0": f"partition-id={number}",
            "fedquit.train.rounds=3": "fedquit.train.rounds=2 --set fedquit.recover-rounds=1 --set partitions=3",
        }
        if who in NAMES:
            changes["hospital-0"] = who
        for old, new in changes.items():
            line = line.replace(old, new)
        return line

    def run(self, side: str, *whos: str, name: str = "") -> None:
        """Run the next block: at the operator's, once for each name, or at each of the sites."""
        lines = self._take(side, background=False)
        for who in whos or ("operator",):
            for line in lines:
                command = self._adapted(line, who)
                if name:
                    command = command.replace("hospital-0", name)
                self._run(command, "operator" if side == "operator" else who)

    def run_as_it_stands(self, side: str, who: str) -> None:
        """Run the next block without putting the site's own name into it."""
        for line in self._take(side, background=False):
            self._run(line, who)

    def run_for_each_site(self) -> None:
        """Run the operator's next block once for each site."""
        (line,) = self._take("operator", background=False)
        for who in NAMES:
            self._run(self._adapted(line, who), "operator")

    def _run(self, command: str, who: str) -> None:
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder / who, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def start(self, side: str, *whos: str) -> None:
        """Start the next block in the background."""
        (line,) = self._take(side, background=True)
        for who in whos or ("operator",):
            with self.log(who).open("ab") as log:
                command = ["sh", "-c", f"exec {self._adapted(line, who)}"]
                process = subprocess.Popen(
                    command, cwd=self.folder / who, env=self.env, stdout=log, stderr=log, start_new_session=True
                )
            self.processes.append(process)

    def wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not holds():
            assert time.monotonic() < deadline, self.log("operator").read_text()[-5000:]
            time.sleep(0.2)

    def stop(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(LONG)

    @property
    def state(self) -> Path:
        return self.folder / "operator" / "state"

    @property
    def entries(self) -> list[dict[str, str]]:
        path = self.state / "ledger.json"
        return list(json.loads(path.read_text())["entries"]) if path.exists() else []


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    made = Page(folder)
    try:
        yield made
    finally:
        made.stop(made.processes)


def test_three_sites_from_nothing_as_the_page_says(tmp_path: Path) -> None:
    with page(tmp_path) as machines:
        operator = tmp_path / "operator"
        shutil.copytree(app_folder(), operator / "app")
        machines.run("operator")  # init, sign
        machines.run("site", *NAMES)  # join
        for name in NAMES:
            shutil.copy(tmp_path / name / "site" / "request.csr", operator / f"{name}.csr")
        machines.run_for_each_site()  # enrol
        for name in NAMES:
            shutil.copy(operator / f"{name}.tar", tmp_path / name)
        machines.run("site", *NAMES)  # join --bundle
        machines.start("site", *NAMES)
        machines.start("operator")
        machines.wait(lambda: "training round 1 " in machines.log("operator").read_text())
        machines.run("site", "hospital-0")  # request
        machines.run("site", "hospital-0")  # request --show
        machines.run("site", "hospital-1")  # renew
        assert len(json.loads((operator / "project" / "sites.json").read_text())["sites"][1]["certificates"]) == 2
        machines.run("operator")  # status, as a table, as JSON, as metrics
        assert "fedquit_members_here 3.0" in (operator / "fedquit.prom").read_text()
        machines.run("operator")  # doctor: no error while all is well
        machines.run("site", "hospital-1")  # doctor
        machines.run("operator")  # units
        machines.run("site", "hospital-1")  # units
        serve = machines.processes[-1]
        machines.wait(lambda: "the federation stays open" in machines.log("operator").read_text())
        machines.wait(lambda: [e["status"] for e in machines.entries] == ["done"])
        assert serve.poll() is None, "it takes requests until it is stopped"
        (filed,) = Outbox(tmp_path / "hospital-0" / "home").entries()
        machines.wait(lambda: Outbox(tmp_path / "hospital-0" / "home").get(filed.id).status == "served")

        (entry,) = json.loads((machines.state / "ledger.json").read_text())["entries"]
        roster = json.loads((machines.state / "clients.json").read_text())
        names = {member["number"]: member["name"] for member in roster}
        assert sorted(names.values()) == list(NAMES)
        assert (names[entry["client"]], entry["status"], entry["authenticated"]) == ("hospital-0", "done", True)
        machines.stop(machines.processes)

        for folder in (operator / "project", machines.state, *(tmp_path / n / "site" for n in NAMES)):
            assert open_to_others(folder) == [], "every file is its owner's alone"
        for name in NAMES:
            assert open_to_others(tmp_path / name / "home") == []
        machines.run("site", "hospital-1")  # join --new
        shutil.copy(tmp_path / "hospital-1" / "site" / "request.csr", operator / "hospital-1.csr")
        machines.run("operator", name="hospital-1")  # rotate
        shutil.copy(operator / "hospital-1-new.tar", tmp_path / "hospital-1")
        machines.run("site", "hospital-1")  # join --bundle
        machines.run("operator")  # revoke hospital-2
        machines.run("operator")  # request --server
        SiteFolder(operator / "another").join()
        (operator / "sites.csv").write_text("name,csr,examples\nhospital-9,another/request.csr,70\n")
        machines.run("operator")  # enrol --table
        machines.run("operator")  # examples
        sites = {site["name"]: site for site in json.loads((operator / "project" / "sites.json").read_text())["sites"]}
        assert len(sites["hospital-1"]["keys"]) == 2
        assert sites["hospital-2"]["revoked"] is not None
        assert (sites["hospital-9"]["examples"], sites["hospital-1"]["examples"]) == (70, 1200)
        with tarfile.open(BEFORE_CLOSED) as tar:
            tar.extractall(tmp_path / "before", filter="data")
        shutil.copytree(tmp_path / "before" / "state", operator / "old-state")
        shutil.copytree(tmp_path / "before" / "keys", tmp_path / "hospital-0" / "old-keys")
        machines.run("operator")  # init, sign, takeover
        machines.run_as_it_stands("site", "hospital-0")  # join --node-key
        shutil.copy(tmp_path / "hospital-0" / "taken" / "request.csr", operator / "clinic-0.csr")
        machines.run("operator")  # rotate
        taken = json.loads((operator / "taken" / "sites.json").read_text())["sites"]
        assert [(site["name"], len(site["keys"]), len(site["certificates"])) for site in taken] == [
            ("clinic-0", 1, 1),
            ("clinic-1", 1, 0),
            ("clinic-2", 1, 0),
        ]
        assert not machines.left, "every command of the page was run"
