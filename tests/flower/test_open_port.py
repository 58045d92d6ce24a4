# SPDX-License-Identifier: Apache-2.0
"""The SuperLink's port is open to whoever reaches it: the warning is printed, and it is true of the pinned Flower."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedquit.cli import app as fedquit
from fedquit.errors import InputError
from fedquit.flower.deploy import service
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.environment import environment, free_ports, program
from fedquit.flower.deploy.keys import make_node_key
from fedquit.flower.deploy.service import Link, serve
from fedquit.flower.deploy.stack import Stack
from fedquit.flower.deploy.supervision import Plan
from flower.real_world import LONG

pytestmark = pytest.mark.flower
ROOT = Path(__file__).parents[2]
WARNING = "can run code on the server and on every node"

LOOPBACK = ["127.0.0.1:9092", "127.8.8.8:9092", "localhost:9092", "[::1]:9092"]
REACHABLE = ["0.0.0.0:9092", "192.0.2.7:9092", "[::]:9092", "hospital.example:9092", "localhost.example:9092"]


@pytest.mark.parametrize("address", [*LOOPBACK, *REACHABLE])
def test_serve_warns_where_other_machines_can_reach_the_superlink(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(service, "run_until_finished", lambda *_, **__: 1)
    monkeypatch.setattr(service, "superlink_command", lambda *_: ["sleep", "1000"])
    monkeypatch.setattr(Control, "healthy", lambda _: True)
    said: list[str] = []
    serve(Plan(tmp_path), Link(address), tmp_path / "state", until_trained=True, say=said.append)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == (address in REACHABLE), said
    assert all(f"whoever can reach {address} can run code" in line for line in warnings)


@pytest.mark.parametrize("address", REACHABLE)
def test_without_tls_and_keys_nothing_leaves_this_machine(address: str, tmp_path: Path) -> None:
    common = ["--insecure", "--log", "json"]
    app, home, state = (str(tmp_path / name) for name in ("app", "home", "state"))
    for words in (
        ["serve", app, "--state", state, "--address", address],
        ["serve", app, "--state", state, "--address", address, "--attach"],
        ["node", "--home", home, "--superlink", address],
    ):
        refused = CliRunner().invoke(fedquit, ["flower", *words, *common]).exception
        assert isinstance(refused, InputError)
        assert f"{address} is not on this machine, and --insecure has no TLS" in str(refused)
    assert list(tmp_path.iterdir()) == []
    assert all(Link(own, mode="insecure").is_loopback for own in LOOPBACK)


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/flower.md"])
def test_the_pages_that_an_operator_reads_say_so_at_the_top(page: str) -> None:
    text = (ROOT / page).read_text()
    assert WARNING in " ".join(text[:1000].split())
    assert "account authentication is set up" not in text, "Flower 1.41 has none to set up"


APP = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "stranger"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "stranger.server_app:app"
clientapp = "stranger.client_app:app"
[tool.flwr.app.config]
out = ""
""",
    "stranger/__init__.py": "",
    "stranger/client_app.py": """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.query()
def query(message, context):
    Path(context.run_config["out"], "node").touch()
    return Message(RecordDict(), reply_to=message)
""",
    "stranger/server_app.py": """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    Path(context.run_config["out"], "server").touch()
    messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    list(grid.send_and_receive(messages, timeout=120))
""",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stranger_runs_code_on_the_server_and_on_a_node_and_registers_a_key(tmp_path: Path) -> None:
    """When this fails after an upgrade of Flower, its control API may be closed: check, and change the two pages."""
    for name, text in APP.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    ran_at = tmp_path / "ran-at"
    ran_at.mkdir()
    with Stack(tmp_path / "stack", [{}], mode="secure", timeout=LONG) as stack:
        assert stack.tls
        stranger = Control(stack.control.address, stack.tls.authority, tmp_path / "stranger")  # no key, no account
        run = stranger.submit(tmp_path / "app", {"out": str(ran_at)})
        assert stranger.wait(run, LONG) == "finished:completed"
        assert {path.name for path in ran_at.iterdir()} == {"server", "node"}
        assert stranger.register(make_node_key(tmp_path / "keys", "intruder"), "hospital-0")


@pytest.mark.slow
def test_account_authentication_cannot_be_switched_on(tmp_path: Path) -> None:
    place = ["--host", "127.0.0.1", "--port", str(free_ports(1)[0])]
    env = environment(tmp_path) | {"FLWR_OIDC_ENABLED": "1"}
    command = [program("flower-superlink"), "--insecure", *place]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode != 0
    assert "unavailable in this Flower distribution" in done.stdout + done.stderr
