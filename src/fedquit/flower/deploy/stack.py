# SPDX-License-Identifier: Apache-2.0
"""A whole Flower deployment on this machine: a SuperLink, SuperNodes, TLS, node keys, runs; and its orderly end.

    with Stack(folder, [{"partition-id": i} for i in range(4)]) as stack:
        run = stack.control.submit(app, {"num-server-rounds": 3})
        stack.control.wait(run, timeout=300)

Everything is real: the processes are Flower's own, they speak over sockets, and each can be killed.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedquit.errors import InputError
from fedquit.flower.deploy import reaper
from fedquit.flower.deploy.keys import NodeKey, Tls, make_node_key, make_tls
from fedquit.flower.deploy.processes import (
    HERE,
    DeploymentError,
    Guard,
    Keeper,
    Pauses,
    Say,
    environment,
    free_ports,
    program,
)

Mode = Literal["secure", "insecure", "simulation"]
Value = str | int | float | bool
TRIES = 3  # to find ports that stay free until they are taken
CONNECTION = "fedquit"  # the name of the SuperLink in Flower's configuration


def as_toml(values: Mapping[str, Value]) -> str:
    """Settings as Flower's command line takes them: `name=value name=value`."""
    return " ".join(f"{name}={_toml(value)}" for name, value in values.items())


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    return repr(value)


def _character(one: str) -> str:
    """As TOML writes it. Flower cuts its settings apart at quotation marks and line ends, so those go by number."""
    return one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}"


@dataclass(frozen=True)
class Node:
    """A SuperNode: its name, where its own API listens, what it tells its app, and its key where nodes have keys."""

    name: str
    port: int
    config: Mapping[str, Value]
    key: NodeKey | None = None


def elsewhere(node: Node) -> Node:
    """The same node, on another port."""
    return replace(node, port=free_ports(1)[0])


def superlink_command(port: int, database: Path, tls: Tls | None, mode: Mode, host: str = HERE) -> list[str]:
    """How to start a SuperLink. It installs nothing: apps run with what is there."""
    if mode == "secure":
        if not tls:
            raise InputError("a secure SuperLink needs certificates: give an authority, a certificate and its key.")
        safety = ["--ssl-ca-certfile", str(tls.authority), "--ssl-certfile", str(tls.certificate)]
        safety += ["--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
    else:
        safety = ["--insecure", *(["--simulation"] if mode == "simulation" else [])]
    place = ["--host", host, "--port", str(port), "--database", str(database)]
    return [program("flower-superlink"), *safety, *place, "--disable-runtime-dependency-installation"]


def supernode_command(node: Node, superlink: str, authority: Path | None, own: Tls | None) -> list[str]:
    """How to start a SuperNode. `authority` vouches for the SuperLink; `own` is for the node's API to its own app."""
    safety = ["--root-certificates", str(authority)] if authority else ["--insecure"]
    if node.key:
        safety += ["--auth-supernode-private-key", str(node.key.private)]
    if own:
        safety += ["--ssl-ca-certfile", str(own.authority), "--ssl-certfile", str(own.certificate)]
        safety += ["--ssl-keyfile", str(own.key)]
    place = ["--superlink", superlink, "--host", HERE, "--port", str(node.port)]
    settings = ["--node-config", as_toml(node.config)] if node.config else []
    return [program("flower-supernode"), *safety, *place, *settings]


class Control:
    """What an operator can ask of a SuperLink, over Flower's command line."""

    def __init__(self, address: str, authority: Path | None, home: Path, mark: str = "") -> None:
        self.address, self.authority, self.home = address, authority, home
        self._env = environment(home, mark)
        self._write_configuration()

    def _write_configuration(self) -> None:
        safety = (
            f"root-certificates = {json.dumps(str(self.authority.resolve()))}" if self.authority else "insecure = true"
        )
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{safety}\n'
        )

    def healthy(self, timeout: float = 3.0) -> bool:
        """Whether the SuperLink answers."""
        context = ssl.create_default_context(cafile=str(self.authority)) if self.authority else None
        url = f"{'https' if self.authority else 'http'}://{self.address}/health"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        try:
            with urllib.request.build_opener(*handlers).open(url, timeout=timeout) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def ask(self, *words: str, timeout: float = 90.0) -> dict[str, Any]:
        """Call Flower's command line; its answer as JSON."""
        command = [program("flwr"), *words, "--format", "json"]
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeploymentError(f"`flwr {words[0]}` got no answer from {self.address} in {timeout:.0f} s.") from error
        answer = _last_json(done.stdout)
        if done.returncode or not answer.get("success", True):
            said = answer.get("error-message") or done.stderr.strip() or done.stdout.strip()
            raise DeploymentError(f"`flwr {words[0]}` failed: {' '.join(str(said).split())[-500:]}")
        return answer

    def register(self, key: NodeKey, name: str) -> int:
        """Let the node with this public key in; its node id."""
        return int(self.ask("supernode", "register", str(key.public), CONNECTION, "--name", name)["node-id"])

    def nodes(self) -> list[dict[str, Any]]:
        """The SuperNodes that the SuperLink knows."""
        return list(self.ask("supernode", "list", CONNECTION)["nodes"])

    def online(self) -> int:
        """How many of them are there now."""
        return sum(node["status"] == "online" for node in self.nodes())

    def submit(
        self, app: Path, config: Mapping[str, Value] | None = None, federation: Mapping[str, Value] | None = None
    ) -> int:
        """Start a run of an app; its number. The keys of `config` must stand in the app's own configuration."""
        words = ["run", str(app), CONNECTION]
        words += ["--run-config", as_toml(config)] if config else []
        words += ["--federation-config", as_toml(federation)] if federation else []
        return int(self.ask(*words)["run-id"])

    def run(self, run: int) -> dict[str, Any]:
        """All that the SuperLink knows of a run."""
        return dict(self.ask("list", CONNECTION, "--run-id", str(run))["runs"][0])

    def status(self, run: int) -> str:
        """`pending`, `starting`, `running`, `finished:completed`, `finished:failed` or `finished:stopped`."""
        return str(self.run(run)["status"])

    def stop(self, run: int) -> None:
        """Stop a run."""
        self.ask("stop", str(run), CONNECTION)

    def stream(self, run: int) -> subprocess.Popen[str]:
        """Follow a run's log; the process ends when the run does, or when the connection breaks."""
        command = [program("flwr"), "log", str(run), CONNECTION, "--stream"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self._env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def wait(self, run: int, timeout: float, every: float = 3.0) -> str:
        """Wait for the end of a run; how it ended."""
        deadline = time.monotonic() + timeout
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() > deadline:
                raise DeploymentError(f"run {run} is still {status} after {timeout:.0f} s: see its log.")
            time.sleep(every)
        return status


def _last_json(text: str) -> dict[str, Any]:
    """The JSON at the end of what a command printed, or nothing."""
    start = text.find("{")
    with contextlib.suppress(ValueError):
        found = json.loads(text[start:]) if start >= 0 else {}
        return found if isinstance(found, dict) else {}
    return {}


class Stack:
    """A deployment on this machine, for as long as the `with` lasts."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Mapping[str, Value]] = (),
        *,
        mode: Mode = "secure",
        timeout: float = 120.0,
        say: Say = lambda _: None,
        way: Callable[[str], str] = lambda superlink: superlink,
    ) -> None:
        """`way` is where nodes connect to reach the SuperLink: at its own address, or at that of a proxy before it."""
        self.folder, self.mode, self.timeout, self._way = folder.resolve(), mode, timeout, way
        self.nodes: list[Keeper] = []
        self.keys: list[NodeKey] = []
        self.tls: Tls | None = None
        self._wanted, self._say = list(nodes), say
        self._guard = Guard()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Stack:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._guard)
            undo.callback(self._stop)
            self._start()
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def logs(self) -> Path:
        """The folder of the logs, one for each process."""
        return self.folder / "logs"

    @property
    def left(self) -> list[int]:
        """Every process that runs in its name; none once it is over."""
        return reaper.marked(self._guard.mark)

    def _start(self) -> None:
        if self.mode == "secure":
            self.tls = make_tls(self.folder / "keys")
        self.superlink = self._start_superlink()
        ports = free_ports(len(self._wanted))  # at once: a node that has just been started does not listen yet
        for number, (config, port) in enumerate(zip(self._wanted, ports, strict=True)):
            key = make_node_key(self.folder / "keys", f"node-{number}") if self.tls else None
            if key:
                self.control.register(key, f"node-{number}")
            self.add_node(config, key, port=port)
        self.wait_online(len(self._wanted))

    def _start_superlink(self) -> Keeper:
        for _ in range(TRIES):
            (port,) = free_ports(1)
            address, home = f"{HERE}:{port}", self.folder / "flower-home"
            authority = self.tls.authority if self.tls else None
            self.control = Control(address, authority, home, self._guard.mark_of("control"))
            command = superlink_command(port, self.folder / "superlink.db", self.tls, self.mode)
            link = self._keeper("superlink", command).start()
            with contextlib.suppress(_PortTaken):
                self._wait_healthy(link)
                return link
            link.kill()
        raise DeploymentError(f"other programs took every port that was free a moment before; {TRIES} tries failed.")

    def _keeper(
        self,
        name: str,
        command: Sequence[str],
        pauses: Pauses | None = None,
        elsewhere: Callable[[], Sequence[str]] | None = None,
    ) -> Keeper:
        env, log = environment(self.folder / "flower-home"), self.logs / f"{name}.log"
        return Keeper(self._guard, name, command, log, env, pauses=pauses, elsewhere=elsewhere, say=self._say)

    def _wait_healthy(self, link: Keeper) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.control.healthy():
            if link.starts > 1 and link.port_taken:
                raise _PortTaken
            if link.gave_up or time.monotonic() > deadline:
                raise DeploymentError(
                    f"the SuperLink does not answer on {self.control.address}. Its log:\n{link.tail()}"
                )
            time.sleep(0.2)

    def add_node(
        self,
        config: Mapping[str, Value],
        key: NodeKey | None,
        *,
        authority: Path | None = None,
        pauses: Pauses | None = None,
        port: int = 0,
    ) -> Keeper:
        """Start one more SuperNode; it may trust another authority, or be less patient. Without a port it takes one."""
        node = Node(f"node-{len(self.nodes)}", port or free_ports(1)[0], config, key)
        trusted = authority or (self.tls.authority if self.tls else None)
        command = partial(supernode_command, superlink=self._way(self.control.address), authority=trusted, own=self.tls)
        keeper = self._keeper(node.name, command(node), pauses or REFUSED, lambda: command(elsewhere(node))).start()
        self.nodes.append(keeper)
        return keeper

    def wait_online(self, count: int) -> None:
        """Wait until so many nodes are there."""
        deadline = time.monotonic() + self.timeout
        while count and (there := self.control.online()) < count:
            lost = next((n for n in self.nodes if n.gave_up), None)
            if lost or time.monotonic() > deadline:
                silent = lost or next((n for n in self.nodes if "SuperNode ID" not in n.tail(200)), self.nodes[0])
                raise DeploymentError(
                    f"only {there} of {count} nodes are there after {self.timeout:.0f} s. "
                    f"The log of {silent.name}:\n{silent.tail()}"
                )
            time.sleep(0.5)

    def _stop(self) -> None:
        """Nodes first, so that they take their leave of a SuperLink that listens."""
        for keeper in self.nodes:
            keeper.ask_to_stop()
        for keeper in self.nodes:
            keeper.stop()
        if hasattr(self, "superlink"):
            self.superlink.stop()


class _PortTaken(Exception):
    """Somebody else was quicker."""


# A SuperLink refuses a killed node for about a minute: it takes the node for alive until two heartbeats are missing.
REFUSED = Pauses(first=2.0, factor=1.5, most=10.0, attempts=20)
