# SPDX-License-Identifier: Apache-2.0
"""What a stranger can do to a SuperLink that he reaches, tried against a closed federation with Flower's own commands.

`test_open_port.py` shows that the same steps succeed where the SuperLink itself can be reached.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse

from fedquit.errors import StoreError
from fedquit.flower.closed import apps
from fedquit.flower.closed.private_files import write_private_json
from fedquit.flower.closed.project import Admission, Project
from fedquit.flower.closed.service import Federation, Registrar, open_federation
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.commands import Value
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.environment import environment, free_ports, program
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import make_node_key
from flower.closed_world import CUT, connect, enrolled, new_project, post, with_certificate, without_certificate
from flower.real_world import LONG

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(600)]
ACQUIRE = AcquireTaskRequest(supported_task_types=["flwr-serverapp"]).SerializeToString()
CONTROL_PATHS = ("start-run", "stop-run", "list-runs", "register-node", "unregister-node", "list-nodes", "stream-logs")


@dataclass(frozen=True)
class Scene:
    """A federation that runs, with a run in progress, and those who knock at its front."""

    project: Project
    federation: Federation
    folder: Path
    site: SiteFolder
    revoked: SiteFolder
    foreign: SiteFolder
    run: int

    @property
    def contexts(self) -> dict[str, ssl.SSLContext]:
        """The strangers, by what they show."""
        return {
            "no certificate": without_certificate(self.project),
            "a foreign certificate": with_certificate(self.project, self.foreign.tls),
            "a revoked certificate": with_certificate(self.project, self.revoked.tls),
        }

    def superlink_bytes(self) -> int:
        """The memory that the SuperLink uses."""
        total = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_text()
                if "flower-superlink" in command and str(self.folder) in command and "pair.py" not in command:
                    total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("closed")
    project = new_project(folder / "project")
    site = enrolled(project, folder / "site", "hospital-0")
    revoked = enrolled(project, folder / "revoked", "hospital-1")
    for name in ("hospital-2", "hospital-3"):  # as many as the floor: with fewer, training pauses and the run ends
        enrolled(project, folder / name, name)
    foreign = enrolled(new_project(folder / "other"), folder / "foreign", "hospital-0")
    for each in (foreign, revoked):  # they know where the front is, and whom to trust
        (each.folder / "ca.crt").write_bytes((project.folder / "ca.crt").read_bytes())
    apps.sign(app_folder(), apps.load_release_key(project.folder / "release.key"), project.apps)
    with open_federation(project, folder / "state", patience=LONG) as federation:
        project.revoke("hospital-1")
        settings: dict[str, Value] = {"fedquit.state": str(folder / "state"), "fedquit.wait": LONG}
        run = federation.control.submit(app_folder(), settings)
        yield Scene(project, federation, folder, site, revoked, foreign, run)


def test_flower_s_commands_get_nothing_from_the_front(scene: Scene) -> None:
    stranger = Control(scene.project.settings.address, scene.project.folder / "ca.crt", scene.folder / "stranger")
    key = make_node_key(scene.folder / "intruder", "intruder")
    before = scene.federation.control.nodes()
    steps: dict[str, Callable[[], object]] = {
        "register a node": lambda: stranger.register(key, "hospital-0"),
        "list the nodes": stranger.nodes,
        "submit a run": lambda: stranger.submit(app_folder(), {"fedquit.state": str(scene.folder / "taken")}),
        "stop the run": lambda: stranger.stop(scene.run),
    }
    assert not stranger.healthy()
    for name, step in steps.items():
        with pytest.raises(DeploymentError):
            pytest.fail(f"{name}: {step()}")
    assert [node["node-id"] for node in scene.federation.control.nodes()] == [node["node-id"] for node in before]
    assert not scene.federation.control.status(scene.run).startswith("finished"), "the run goes on"
    assert not (scene.folder / "taken").exists()


def test_no_path_answers_a_stranger_whatever_he_shows(scene: Scene) -> None:
    key = {"flwr-public-key": scene.project.sites["hospital-1"].key}
    fleet = ("register-node", "activate-node", "pull-messages", "get-fab", "push-object")
    paths = [f"/v1/control/{name}" for name in CONTROL_PATHS]
    paths += [f"/v1/fleet/{name}" for name in fleet]
    paths += ["/v1/runtime/acquire-task", "/health", "/fedquit/v1/renew"]
    for context in scene.contexts.values():
        for path in paths:
            with pytest.raises(CUT), contextlib.closing(connect(scene.project, context)) as connection:
                post(connection, path, ACQUIRE, key)


def test_an_enrolled_site_reaches_the_fleet_service_and_nothing_else(scene: Scene) -> None:
    key = {"flwr-public-key": scene.project.sites["hospital-0"].key}
    paths = [f"/v1/control/{name}" for name in CONTROL_PATHS]
    paths += ["/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/runtime/acquire-task", "/health", "/docs"]
    for path in paths:
        with contextlib.closing(connect(scene.project, scene.site.context())) as connection:
            assert post(connection, path, ACQUIRE, key)[0] == 403, path
    with contextlib.closing(connect(scene.project, scene.site.context())) as connection:
        assert post(connection, "/v1/fleet/pull-messages", b"", key)[0] == 401, (
            "the SuperLink still asks for a signature"
        )


def test_the_server_task_is_not_given_away_even_on_loopback(scene: Scene) -> None:
    context = ssl.create_default_context(cafile=str(scene.project.loopback.authority))
    port = scene.project.settings.superlink_port
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)) as connection:
        status, body = post(connection, "/v1/runtime/acquire-task", ACQUIRE)
    assert status == 401, AcquireTaskResponse.FromString(body)


@pytest.mark.parametrize("who", ["stock", "foreign", "revoked"])
def test_a_supernode_of_a_stranger_does_not_come_online(scene: Scene, who: str) -> None:
    folder = {"stock": scene.foreign, "foreign": scene.foreign, "revoked": scene.revoked}[who]
    settings = scene.project.settings
    node = ["--superlink", settings.address, "--root-certificates", str(scene.project.folder / "ca.crt")]
    node += ["--auth-supernode-private-key", str(folder.node_key.private), "--max-retries", "1"]
    node += ["--port", str(free_ports(1)[0]), "--isolation", "process", "--trusted-entities", str(folder.trust)]
    launcher = [sys.executable, "-m", "fedquit.flower.closed.supernode", str(folder.folder)]
    command = [program("flower-supernode"), *node] if who == "stock" else [*launcher, *node]
    env = environment(scene.folder / "stranger-home")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode != 0
    assert "Failed to initialize the connection" in done.stdout + done.stderr
    assert scene.federation.control.online() == 0


def test_much_data_from_nobody_costs_the_server_nothing(scene: Scene) -> None:
    before = scene.superlink_bytes()
    assert before > 10_000_000, "it was found"
    body = bytes(2**20) * 100
    for context in scene.contexts.values():
        with pytest.raises(CUT), contextlib.closing(connect(scene.project, context)) as connection:
            post(connection, "/v1/fleet/push-object", body)
    key = {"flwr-public-key": scene.project.sites["hospital-0"].key}
    connection = connect(scene.project, scene.site.context())
    with contextlib.closing(connection), contextlib.suppress(*CUT):  # it may be cut before all is sent
        assert post(connection, "/v1/fleet/push-object", body, key)[0] == 413
    assert scene.superlink_bytes() < before + 50_000_000


def test_a_second_server_on_the_same_state_is_refused_at_once(scene: Scene) -> None:
    said: list[str] = []
    second = open_federation(scene.project, scene.folder / "state", say=said.append)
    with pytest.raises(StoreError, match="another `fedquit flower serve` runs"):
        second.__enter__()
    assert not any("the SuperLink starts" in line for line in said)


def test_a_key_that_the_superlink_does_not_know_by_its_number_is_registered_again(scene: Scene) -> None:
    (fingerprint,) = scene.project.sites["hospital-0"].fingerprints
    memo = scene.folder / "memo" / "registered.json"
    write_private_json(memo, {fingerprint: 1})  # of a database that was replaced
    said: list[str] = []
    registrar = Registrar(scene.project, scene.folder / "memo", scene.federation.control, memo, None, said.append)
    registrar.forget_unknown_nodes()
    registrar.bring_up_to_date()
    node = scene.federation.control.node_of(scene.project.sites["hospital-0"].key_pem)
    assert f"hospital-0 is registered already, as node {node}." in said, "the SuperLink was asked"
    assert node is not None
    assert json.loads(memo.read_text())[fingerprint] == node, "so that it can be unregistered"
    assert scene.federation.control.node_of(b"another key") is None


def test_many_sites_are_registered_over_one_connection(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flwr supernode register` would start a process for each. Flower's list shows them afterwards."""
    project = new_project(tmp_path / "project")
    names = [f"site-{number}" for number in range(40)]
    for name in names:
        SiteFolder(tmp_path / name).join()
    project.enrol_many([Admission(name, (tmp_path / name / "request.csr").read_bytes(), 10) for name in names])
    control, memo = scene.federation.control, tmp_path / "registered.json"
    said: list[str] = []
    registrar = Registrar(project, tmp_path, control, memo, None, said.append)

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process of its own")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", no_process)
        registrar.bring_up_to_date()
        registered = json.loads(memo.read_text())
        project.revoke("site-7")
        registrar.bring_up_to_date()
        registrar.bring_up_to_date()
    assert len(said) == 41, "the third time there is nothing to do"
    listed = {int(node["node-id"]) for node in control.nodes() if node["status"] != "unregistered"}
    nodes = {name: registered[project.sites[name].fingerprints[0]] for name in names}
    assert len(set(nodes.values())) == 40
    assert listed >= set(nodes.values()) - {nodes["site-7"]}, "as Flower's own list shows them"
    assert nodes["site-7"] not in listed, "who was revoked is unregistered"
    memo.unlink()  # as after a kill in the middle: the SuperLink is asked
    registrar.bring_up_to_date()
    again = json.loads(memo.read_text())
    assert {key: node for key, node in registered.items() if key in again} == again
