# SPDX-License-Identifier: Apache-2.0
"""What root writes for a closed federation belongs to the user who runs it, so that the front can read it."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedquit.errors import StoreError
from fedquit.flower.closed.courier import Courier
from fedquit.flower.closed.greeting import greet
from fedquit.flower.closed.notice_board import read_told, write_told
from fedquit.flower.closed.private_files import make_private_folder, only_one
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.service import STATE_LOCK
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.outbox import Inbox
from fedquit.utils.files import append_line, only_owner, write_atomic
from flower.closed_world import enrolled, new_project, running

pytestmark = [
    pytest.mark.flower,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for another user"),
]
SOURCES = Path(__file__).parents[2] / "src"
OWNER = pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="fedquit-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def give(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OWNER, OWNER)


def of_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_uid != OWNER]


def fedquit(*words: object) -> None:
    """Run a command of the operator as root."""
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-m", "fedquit", "flower", *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def lines(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def refusal(site: SiteFolder) -> str:
    try:
        greet(site)
    except DeploymentError as error:
        return str(error)
    return ""


@pytest.fixture
def project(folder: Path) -> Project:
    made = new_project(folder / "project", 86_400.0)
    make_private_folder(made.server)
    return made


def test_what_root_writes_in_the_folder_of_another_user_is_that_user_s(folder: Path) -> None:
    give(folder)
    write_atomic(folder / "a" / "b" / "file", b"")
    append_line(folder / "log", "line")
    make_private_folder(folder / "private" / "inner")
    with only_one(folder / "lock", ""):
        pass
    with only_owner():
        Inbox(folder).file("hospital-0")
    assert of_others(folder) == []
    assert Path(folder / "requests").stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_a_link_is_not_followed(folder: Path) -> None:
    (folder / STATE_LOCK).symlink_to(folder / "elsewhere")
    with pytest.raises(StoreError, match="cannot open the lock"), only_one(folder / STATE_LOCK, ""):
        pass
    assert not (folder / "elsewhere").exists()


def test_the_operator_s_commands_as_root_leave_every_file_to_the_owner(project: Project, folder: Path) -> None:
    joined = [SiteFolder(folder / f"site-{i}") for i in range(2)]
    for site in joined:
        site.join()
    app = app_folder()
    for owned in (project.folder, *(site.folder for site in joined)):
        give(owned)
    at = ("--project", project.folder)
    for i, site in enumerate(joined):
        bundle = folder / f"{i}.tar"
        fedquit("enrol", f"hospital-{i}", site.request, *at, "--examples", 10, "--out", bundle)
        fedquit("join", site.folder, "--bundle", bundle)
        assert of_others(site.folder) == []
    fedquit("join", joined[0].folder, "--new")
    fedquit("rotate", "hospital-0", joined[0].request, *at, "--out", folder / "rotated.tar")
    fedquit("sign", app, *at)
    fedquit("revoke", "hospital-1", *at)
    write_told(project.server, "training pauses")
    assert of_others(project.folder) == []
    assert of_others(joined[0].folder) == []


def test_a_front_of_another_user_follows_what_root_does(project: Project, folder: Path) -> None:
    site = enrolled(project, folder / "site", "hospital-0")
    give(project.folder)
    said: list[str] = []
    with running(project, project.front_log, OWNER):
        project.agree_examples("hospital-0", 12)
        write_told(project.server, "training pauses: 2 may take part")
        site.renew()
        assert greet(site) == []
        Courier(site, folder / "home", folder / "record.json", said.append).step()
        assert "the server says: training pauses: 2 may take part." in said
        project.revoke("hospital-0")
        eventually(lambda: bool(refusal(site)), 3.0)
    assert read_told(project.server)


def test_a_front_that_cannot_read_its_files_says_so_and_lets_nobody_in(project: Project, folder: Path) -> None:
    site = enrolled(project, folder / "site", "hospital-0")
    give(project.folder)
    listed = project.folder / "sites.json"
    with running(project, project.front_log, OWNER):
        os.chown(project.folder / "sites.lock", 0, 0)
        with pytest.raises(DeploymentError, match="refuses: the server cannot do this now: its operator finds"):
            site.renew()
        assert "let the user who runs this own" in str(lines(project.front_log)[-1]["refused"])
        os.chown(project.folder / "sites.lock", OWNER, OWNER)
        project.agree_examples("hospital-0", 12)  # another list, which the front must read
        os.chown(listed, 0, 0)
        os.utime(listed)
        eventually(lambda: bool(refusal(site)))
        assert any("cannot read" in str(line.get("cannot", "")) for line in lines(project.front_log))
        assert any("cannot read its list of sites" in str(line.get("refused")) for line in lines(project.front_log))
        os.chown(listed, OWNER, OWNER)
        eventually(lambda: not refusal(site))
        listed.rename(folder / "away")
        eventually(lambda: bool(refusal(site)))
        (folder / "away").rename(listed)
        eventually(lambda: not refusal(site))
