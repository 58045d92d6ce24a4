# SPDX-License-Identifier: Apache-2.0
"""An operator's calls to a running SuperLink, made with Flower's own command line (`flwr`)."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.flower.deploy.commands import Value, as_toml
from fedquit.flower.deploy.environment import environment, program
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import NodeKey

CONNECTION = "fedquit"  # the name of the SuperLink in Flower's configuration
CALL_TIMEOUT = 90.0  # seconds
PROTOBUF = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}
MAX_REASON = 500  # characters of Flower's error message


class Control:
    """What an operator can ask of a SuperLink.

    Args:
        address: host:port of the SuperLink.
        authority: the certificate of the authority that signed the SuperLink's; None for a connection without TLS.
        home: the directory for Flower's configuration.
        mark: the mark by which `reaper` finds the processes of these calls.
    """

    def __init__(self, address: str, authority: Path | None, home: Path, mark: str = "") -> None:
        self.address = address
        self.authority = authority
        self.home = home
        self._env = environment(home, mark)
        self._write_configuration()

    def _write_configuration(self) -> None:
        security = "insecure = true"
        if self.authority:
            security = f"root-certificates = {json.dumps(str(self.authority.resolve()))}"
        lines = [
            "[superlink]",
            f'default = "{CONNECTION}"',
            "",
            f"[superlink.{CONNECTION}]",
            f'address = "{self.address}"',
            security,
        ]
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text("\n".join(lines) + "\n")

    def healthy(self, timeout: float = 3.0) -> bool:
        """Whether the SuperLink answers within `timeout` seconds."""
        try:
            with self._open("/health", timeout) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _open(self, path: str, timeout: float) -> Any:  # noqa: ANN401 - http.client's
        """The SuperLink's answer to a GET request."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        scheme = "http"
        if self.authority:
            scheme = "https"
            context = ssl.create_default_context(cafile=str(self.authority))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers).open(f"{scheme}://{self.address}{path}", timeout=timeout)

    def call(self, *arguments: str, timeout: float = 90.0) -> dict[str, Any]:
        """Run `flwr` with these arguments; its answer as JSON. Raises `DeploymentError` where it fails."""
        command = [program("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeploymentError(
                f"`flwr {arguments[0]}` got no answer from {self.address} in {timeout:.0f} s."
            ) from error
        answer = _last_json(done.stdout)
        if done.returncode or not answer.get("success", True):
            reason = answer.get("error-message") or done.stderr.strip() or done.stdout.strip()
            raise DeploymentError(f"`flwr {arguments[0]}` failed: {' '.join(str(reason).split())[-MAX_REASON:]}")
        return answer

    def register(self, key: NodeKey, name: str) -> int:
        """Admit the node with this public key under this name; its node id."""
        return int(self.call("supernode", "register", str(key.public), CONNECTION, "--name", name)["node-id"])

    def nodes(self) -> list[dict[str, Any]]:
        """The SuperNodes that the SuperLink knows."""
        return list(self.call("supernode", "list", CONNECTION)["nodes"])

    def node_of(self, public_key: bytes) -> int | None:
        """The id of the node that is registered with a public key (PEM), which `flwr supernode list` does not tell."""
        with self.connected() as connection:
            return connection.nodes().get(public_key.strip())

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """One connection for many calls of the HTTP API, where a process of `flwr` for each would take a second."""
        host, _, port = self.address.rpartition(":")
        place = (host.strip("[]"), int(port))
        if self.authority:
            context = ssl.create_default_context(cafile=str(self.authority))
            http_connection: http.client.HTTPConnection
            http_connection = http.client.HTTPSConnection(*place, timeout=CALL_TIMEOUT, context=context)
        else:
            http_connection = http.client.HTTPConnection(*place, timeout=CALL_TIMEOUT)
        with contextlib.closing(http_connection):
            yield Connection(http_connection, self.address)

    def online(self) -> int:
        """How many SuperNodes are online now."""
        return sum(node["status"] == "online" for node in self.nodes())

    def submit(
        self, app: Path, config: Mapping[str, Value] | None = None, federation: Mapping[str, Value] | None = None
    ) -> int:
        """Start a run of an app.

        Args:
            app: the directory of the app.
            config: settings of the run; each key must stand in the app's own configuration.
            federation: settings of the federation, such as the number of nodes of a simulation.

        Returns:
            The id of the run.
        """
        arguments = ["run", str(app), CONNECTION]
        if config:
            arguments += ["--run-config", as_toml(config)]
        if federation:
            arguments += ["--federation-config", as_toml(federation)]
        return int(self.call(*arguments)["run-id"])

    def run(self, run: int) -> dict[str, Any]:
        """All that the SuperLink knows of a run."""
        return dict(self.call("list", CONNECTION, "--run-id", str(run))["runs"][0])

    def status(self, run: int) -> str:
        """`pending`, `starting`, `running`, `finished:completed`, `finished:failed` or `finished:stopped`."""
        return str(self.run(run)["status"])

    def stop(self, run: int) -> None:
        """Stop a run."""
        self.call("stop", str(run), CONNECTION)

    def stream(self, run: int) -> subprocess.Popen[str]:
        """A process that prints a run's log; it ends with the run, or when the connection breaks."""
        command = [program("flwr"), "log", str(run), CONNECTION, "--stream"]
        return subprocess.Popen(
            command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, run: int, timeout: float, every: float = 3.0) -> str:
        """Wait for the end of a run.

        Args:
            run: its id.
            timeout: seconds to wait at most.
            every: seconds between two calls.

        Returns:
            Its final status.
        """
        deadline = time.monotonic() + timeout
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() > deadline:
                raise DeploymentError(f"run {run} is still {status} after {timeout:.0f} s: see its log.")
            time.sleep(every)
        return status


class AlreadyRegistered(DeploymentError):
    """The SuperLink knows a node key already, or knew it: a key that was unregistered is never taken again."""


class UnknownNode(DeploymentError):
    """The SuperLink has no node with this id."""


@dataclass(frozen=True)
class Connection:
    """Calls of a SuperLink's control API over one connection, with Flower's own messages."""

    connection: http.client.HTTPConnection
    address: str

    def register(self, public_key: bytes, name: str) -> int:
        """Admit the node with this public key (PEM) under this name; its node id."""
        from flwr.proto.control_pb2 import RegisterNodeRequest, RegisterNodeResponse

        answer = self._post("register-node", RegisterNodeRequest(public_key=public_key, name=name))
        return int(RegisterNodeResponse.FromString(answer).node_id)

    def unregister(self, node: int) -> None:
        """Remove a node; its key is never taken again.

        Raises:
            UnknownNode: if the SuperLink has none with this id.
            DeploymentError: if it does not answer, or refuses for another reason.
        """
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._post("unregister-node", UnregisterNodeRequest(node_id=node))

    def nodes(self) -> dict[bytes, int]:
        """The id of each node that is registered, by its public key (PEM)."""
        from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse

        listed = ListNodesResponse.FromString(self._post("list-nodes", ListNodesRequest())).nodes_info
        return {node.public_key.strip(): int(node.node_id) for node in listed if node.status != "unregistered"}

    def _post(self, call: str, message: Any) -> bytes:  # noqa: ANN401 - protobuf's classes are not typed
        body = message.SerializeToString()
        try:
            self.connection.request("POST", f"/v1/control/{call}", body, PROTOBUF)
            response = self.connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise DeploymentError(f"the SuperLink at {self.address} does not answer to {call}: {error}") from error
        if response.status != http.client.OK:
            reason = " ".join(answer.decode(errors="replace").split())[:MAX_REASON]
            kind = _kind_of_refusal(response.status, reason.lower())
            raise kind(f"the SuperLink at {self.address} refuses {call}: {reason or response.reason}")
        return answer


def _last_json(text: str) -> dict[str, Any]:
    """The JSON object at the end of a command's output; empty if there is none."""
    start = text.find("{")
    if start < 0:
        return {}
    with contextlib.suppress(ValueError):
        content = json.loads(text[start:])
        if isinstance(content, dict):
            return content
    return {}


def _kind_of_refusal(status: int, reason: str) -> type[DeploymentError]:
    if status == http.client.NOT_FOUND and "node" in reason:
        return UnknownNode
    return AlreadyRegistered if "already" in reason else DeploymentError
