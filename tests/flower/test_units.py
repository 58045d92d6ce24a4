# SPDX-License-Identifier: Apache-2.0
"""The systemd units: systemd accepts them, they are confined, and the commands in them run a federation."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from typer.testing import CliRunner

from fedquit import __version__
from fedquit.cli import app as fedquit
from fedquit.errors import InputError
from fedquit.flower.closed import apps, service
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.environment import free_ports
from fedquit.flower.operations.status import locate, status_of
from fedquit.flower.operations.units import ServerUnits, SiteUnits
from fedquit.utils.files import open_to_others
from flower.closed_world import enrolled, new_project

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
SOURCES = Path(__file__).parents[2] / "src"
LONG = 200.0
OWNER, APP_USER = "daemon", "nobody"
SERVER_UNITS = {
    "fedquit-front.socket",
    "fedquit-front.service",
    "fedquit-superlink.service",
    "fedquit-superexec.service",
    "fedquit-serve.service",
}
SITE_UNITS = {"fedquit-node.service", "fedquit-apps.service", "fedquit-keeper.service"}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """All units of a server and of a site, in one folder."""
    project = new_project(tmp_path / "project")
    server = ["--project", str(project.folder), "--state", str(tmp_path / "state"), "--app", str(app_folder())]
    site = ["--site", str(tmp_path / "site"), "--home", str(tmp_path / "home"), "--set", "partition-id=0"]
    site += ["--data", "/srv"]
    out = ["--out", str(tmp_path / "units")]
    for words in (server, site):
        done = CliRunner().invoke(fedquit, ["flower", "units", *words, *out], catch_exceptions=False)
        assert done.exit_code == 0, done.stdout
    return tmp_path / "units"


def test_systemd_accepts_the_units(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == SERVER_UNITS | SITE_UNITS
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    units = sorted(str(path) for path in written.iterdir())
    done = subprocess.run([program, "verify", *units], capture_output=True, text=True, timeout=120, check=False)
    about_ours = [line for line in done.stderr.splitlines() if "fedquit" in line]
    assert about_ours == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("fedquit-front.service", 2.0),
        ("fedquit-superlink.service", 2.0),
        ("fedquit-superexec.service", 2.0),
        ("fedquit-serve.service", 3.5),
        ("fedquit-node.service", 3.0),
        ("fedquit-apps.service", 3.0),
        ("fedquit-keeper.service", 3.0),
    ],
)
def test_the_units_are_confined(name: str, most: float, written: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    command = [program, "security", "--offline=true", "--no-pager", str(written / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= most


def test_app_code_has_neither_the_keys_nor_a_network(written: Path, tmp_path: Path) -> None:
    superexec = (written / "fedquit-superexec.service").read_text().splitlines()
    assert f"InaccessiblePaths={tmp_path / 'project'}" in superexec
    assert "PrivateNetwork=yes" in superexec
    assert "JoinsNamespaceOf=fedquit-superlink.service" in superexec
    apps_unit = (written / "fedquit-apps.service").read_text().splitlines()
    assert f"InaccessiblePaths={tmp_path / 'site'}" in apps_unit
    assert "IPAddressDeny=any" in apps_unit
    assert "User=fedquit-app" in apps_unit
    assert "User=fedquit" in (written / "fedquit-node.service").read_text().splitlines()


def test_no_unit_of_the_server_sees_a_key_that_it_does_not_need(written: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    front = (written / "fedquit-front.service").read_text().splitlines()
    assert f"InaccessiblePaths=-{project}/release.key" in front
    serve = (written / "fedquit-serve.service").read_text().splitlines()
    assert f"InaccessiblePaths=-{project}/release.key {project}/ca.key" in serve


def test_units_and_containers_leave_supervision_to_others(written: Path) -> None:
    """Each command is one part, what makes it ready, or `serve` beside parts that run already."""
    commands = []
    for path in written.glob("*.service"):
        lines = re.findall(r"^ExecStart(?:Pre)?=(.*)$", path.read_text(), re.MULTILINE)
        commands += [shlex.split(line.removeprefix("+")) for line in lines]
    words = [command[command.index("flower") + 1 :] for command in commands]
    yaml = pytest.importorskip("yaml")
    for path in (SOURCES.parent / "examples" / "containers").glob("*.yaml"):
        services = yaml.safe_load(path.read_text())["services"].values()
        words += [list(map(str, service["command"])) for service in services if service.get("command")]
    assert len(words) >= 15
    for command in words:
        assert command[0] in ("part", "prepare") or (command[0] == "serve" and "--attach" in command), command


def test_serve_beside_parts_that_run_already_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_supervisor(*_: object, **__: object) -> None:
        raise AssertionError("a supervisor of ours")

    for name in ("ProcessGroup", "SupervisedProcess"):
        monkeypatch.setattr(service, name, no_supervisor)
    monkeypatch.setattr(Control, "healthy", lambda _: True)
    project = new_project(tmp_path / "project")
    with service.open_federation(project, tmp_path / "state", attach=True) as federation:
        assert (federation.superlink, federation.front) == (None, None)
    with pytest.raises(AssertionError, match="a supervisor of ours"), service.open_federation(project, tmp_path / "s"):
        pass


def test_what_cannot_stand_in_a_unit_is_refused(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    with pytest.raises(InputError, match="without spaces"):
        SiteUnits(spaced, tmp_path / "home").render()
    with pytest.raises(InputError, match="without line ends"):
        SiteUnits(tmp_path / "site", tmp_path / "home", {"a": "b"}, app_user="x\nUser=root").render()
    percent = SiteUnits(tmp_path / "100%", tmp_path / "home").render()["fedquit-node.service"]
    assert "100%%" in percent
    done = CliRunner().invoke(fedquit, ["flower", "units", "--out", str(tmp_path)])
    assert isinstance(done.exception, InputError)


def test_the_front_takes_the_socket_that_systemd_passes_on(tmp_path: Path) -> None:
    """In a namespace of its own the front has no port but this one."""
    program = shutil.which("systemd-socket-activate")
    if program is None:
        pytest.skip("needs systemd-socket-activate")
    project = new_project(tmp_path / "project")
    site = enrolled(project, tmp_path / "site", "hospital-0")
    project.server.mkdir(mode=0o700)
    port = project.settings.port
    inside = [sys.executable, "-m", "fedquit", "flower", "part", "front", "--project", str(project.folder)]
    namespace = ["unshare", "--net"] if _can_unshare() else []
    command = [program, f"--listen=127.0.0.1:{port}", "--setenv=PYTHONPATH", *namespace, *inside]
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(lambda: _listens(port))
            from fedquit.flower.closed.greeting import greet

            assert greet(site) == []
            assert status_of(locate(project.folder, project.folder)).front is True
        finally:
            process.terminate()


def _can_unshare() -> bool:
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return done.returncode == 0


def _listens(port: int) -> bool:
    from fedquit.flower.operations.observed import listeners

    return bool(listeners(port))


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# The commands of the units, run by hand ------------------------------------------------------------------------------


def commands(unit: str) -> list[tuple[str, list[str], str]]:
    """The commands of a unit: which they are, their words, and the user who runs them."""
    user = re.search(r"^User=(.*)$", unit, re.MULTILINE)
    found = []
    for kind, value in re.findall(r"^(ExecStartPre|ExecStart)=(.*)$", unit, re.MULTILINE):
        words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(value.removeprefix("+"))]
        found.append((kind, words, "" if value.startswith("+") or not user else user[1]))
    return found


class ByHand:
    """Starts what units would start, and starts it again where they say so."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}

    def start(self, name: str, unit: str) -> None:
        for kind, words, user in commands(unit):
            start = partial(self._start, name, words, user)
            process = start()
            if kind == "ExecStartPre" or "Type=oneshot" in unit:
                assert process.wait(LONG) == 0, self.report()
                continue
            self.processes[name] = process
            if "Restart=always" in unit:
                self._restarts[name] = start

    def _start(self, name: str, words: list[str], user: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        env.pop("HOME", None)
        number = pwd.getpwnam(user) if user and os.geteuid() == 0 else None
        options: dict[str, Any] = {}
        if number:
            options = {"user": number.pw_uid, "group": number.pw_gid, "extra_groups": []}
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(words, env=env, stdout=log, stderr=log, cwd="/", **options)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait, and start processes again that end before."""
        deadline = time.monotonic() + LONG
        while not holds():
            assert time.monotonic() < deadline, self.report()
            for other, start in self._restarts.items():
                if self.processes[other].poll() is not None:
                    self.processes[other] = start()
            time.sleep(1)

    def report(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self.logs.iterdir()))


@contextlib.contextmanager
def by_hand(logs: Path) -> Iterator[ByHand]:
    machine = ByHand(logs)
    try:
        yield machine
    finally:
        for process in machine.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in machine.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="fedquit-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _separated() -> bool:
    """Whether other users can be started here, and can read this Python."""
    if os.geteuid() != 0:
        return False
    entry = pwd.getpwnam(APP_USER)
    command = [sys.executable, "-c", "import flwr, torch"]
    try:
        return subprocess.run(command, user=entry.pw_uid, cwd="/", capture_output=True, check=False).returncode == 0
    except PermissionError:
        return False


@pytest.mark.slow
def test_the_commands_of_the_units_run_a_federation(open_folder: Path) -> None:
    separated = _separated()
    users = {
        "user": OWNER if separated else pwd.getpwuid(os.geteuid()).pw_name,
        "app_user": APP_USER if separated else "",
    }
    project = new_project(open_folder / "project", 14 * 86_400.0)
    app = Path(shutil.copytree(app_folder(), open_folder / "app"))
    apps.sign(app, apps.load_release_key(project.folder / "release.key"), project.apps)
    sites = [enrolled(project, open_folder / f"site-{i}", f"hospital-{i}") for i in range(2)]
    if separated:
        entry = pwd.getpwnam(OWNER)
        for folder in (project.folder, *(site.folder for site in sites)):
            for path in (folder, *folder.rglob("*")):
                os.chown(path, entry.pw_uid, entry.pw_gid)
    (project.folder / "release.key").unlink()  # which no unit sees
    state = open_folder / "state"
    settings = {"fedquit.train.rounds": 1, "fedquit.min-nodes": 2, "fedquit.floor": 2, "partitions": 2}
    server = ServerUnits(project.folder, state, app, settings, **users).render()
    logs = open_folder / "logs"
    logs.mkdir()
    with by_hand(logs) as machine:
        for name in ("superlink", "superexec", "front"):
            machine.start(name, server[f"fedquit-{name}.service"])
        machine.start("serve", server["fedquit-serve.service"])
        _wait(lambda: "hospital-1 is registered" in (logs / "serve.log").read_text())
        for i, (site, port) in enumerate(zip(sites, free_ports(2), strict=True)):
            own = {"partition-id": i, "num-partitions": 2}
            home = open_folder / f"home-{i}"
            units = SiteUnits(site.folder, home, own, users["user"], users["app_user"], port).render()
            for name in ("node", "apps", "keeper"):
                machine.start(f"{name}-{i}", units[f"fedquit-{name}.service"])
        machine.wait_until(lambda: "the federation stays open" in (logs / "serve.log").read_text())
        status = status_of(locate(project.folder, state))
        assert (status.front, status.superlink, status.trained) == (True, True, 1)
        assert [m.state for m in status.members] == ["here", "here"]
        assert [m.fedquit for m in status.members] == [__version__] * 2, "the keepers have greeted the front"
        running = {name for name, process in machine.processes.items() if process.poll() is None}
        assert running == set(machine.processes), machine.report()
    for folder in (project.folder, state, *(open_folder / f"home-{i}" for i in range(2)), *(s.folder for s in sites)):
        assert open_to_others(folder) == []
    if separated:
        uid = pwd.getpwnam(APP_USER).pw_uid
        written = list(state.rglob("*.safetensors"))
        assert written
        assert {p.stat().st_uid for p in written} == {uid}, "the server app ran as the app's user"
