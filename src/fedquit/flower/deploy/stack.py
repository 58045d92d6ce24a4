# SPDX-License-Identifier: Apache-2.0
"""A whole Flower deployment on this machine: a SuperLink and SuperNodes, with TLS and node keys, on loopback.

    with Stack(folder, [{"partition-id": i} for i in range(4)]) as stack:
        run = stack.control.submit(app, {"num-server-rounds": 3})
        stack.control.wait(run, timeout=300)

The processes are Flower's own and communicate over sockets; each of them can be killed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedquit.flower.deploy import reaper
from fedquit.flower.deploy.commands import Mode, Node, Value, on_free_port, superlink_command, supernode_command
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.environment import LOOPBACK, environment, free_ports
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import NodeKey, Tls, make_node_key, make_tls
from fedquit.flower.deploy.processes import Backoff, ProcessGroup, Say, SupervisedProcess
from fedquit.flower.sqlite_wipe import DATABASE, wipe_traces

TRIES = 3  # to find a port that stays free until it is taken

# A SuperLink refuses a killed node for about a minute: it takes the node for alive until two heartbeats are missing.
NODE_BACKOFF = Backoff(first=2.0, factor=1.5, longest=10.0, attempts=20)


class Stack:
    """A deployment on this machine, for as long as the `with` lasts.

    Args:
        folder: where keys, logs and the SuperLink's database lie.
        nodes: the configuration of each SuperNode.
        mode: with TLS and node keys, without, or a simulation, which has no SuperNodes.
        timeout: seconds for the SuperLink to answer and for the nodes to come online.
        say: takes one sentence for the operator.
        node_target: the address at which nodes connect, given the SuperLink's: its own, or that of a proxy before it.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Mapping[str, Value]] = (),
        *,
        mode: Mode = "secure",
        timeout: float = 120.0,
        say: Say = lambda _: None,
        node_target: Callable[[str], str] = lambda superlink: superlink,
    ) -> None:
        self.folder = folder.resolve()
        self.mode = mode
        self.timeout = timeout
        self.nodes: list[SupervisedProcess] = []
        self.tls: Tls | None = None
        self._node_configs = list(nodes)
        self._say = say
        self._node_target = node_target
        self._group = ProcessGroup()
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Stack:
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self._group)
            cleanup.callback(self._stop)
            self._start()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def logs(self) -> Path:
        """The folder of the logs, one for each process."""
        return self.folder / "logs"

    @property
    def process_ids(self) -> list[int]:
        """All processes of this deployment; none once it has ended."""
        return reaper.marked(self._group.mark)

    def _start(self) -> None:
        if self.mode == "secure":
            self.tls = make_tls(self.folder / "keys")
        self.superlink = self._start_superlink()
        ports = free_ports(len(self._node_configs))  # all at once: a node that was just started does not listen yet
        for number, (config, port) in enumerate(zip(self._node_configs, ports, strict=True)):
            key = make_node_key(self.folder / "keys", f"node-{number}") if self.tls else None
            if key:
                self.control.register(key, f"node-{number}")
            self.add_node(config, key, port=port)
        self.wait_online(len(self._node_configs))

    def _start_superlink(self) -> SupervisedProcess:
        authority = self.tls.authority if self.tls else None
        for _ in range(TRIES):
            (port,) = free_ports(1)
            self.control = Control(
                f"{LOOPBACK}:{port}", authority, self.folder / "flower-home", self._group.mark_of("control")
            )
            command = superlink_command(port, self.folder / DATABASE, self.tls, self.mode)
            superlink = self._supervised("superlink", command).start()
            with contextlib.suppress(_PortTaken):
                self._wait_healthy(superlink)
                return superlink
            superlink.kill()
        raise DeploymentError(f"other programs took every port that was free a moment before; {TRIES} tries failed.")

    def _supervised(
        self,
        name: str,
        command: Sequence[str],
        backoff: Backoff | None = None,
        command_on_other_port: Callable[[], Sequence[str]] | None = None,
    ) -> SupervisedProcess:
        return SupervisedProcess(
            self._group,
            name,
            command,
            self.logs / f"{name}.log",
            environment(self.folder / "flower-home"),
            backoff=backoff,
            command_on_other_port=command_on_other_port,
            say=self._say,
        )

    def _wait_healthy(self, superlink: SupervisedProcess) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.control.healthy():
            if superlink.starts > 1 and superlink.port_taken:
                raise _PortTaken
            if superlink.gave_up or time.monotonic() > deadline:
                raise DeploymentError(
                    f"the SuperLink does not answer on {self.control.address}. Its log:\n{superlink.tail()}"
                )
            time.sleep(0.2)

    def add_node(
        self,
        config: Mapping[str, Value],
        key: NodeKey | None,
        *,
        authority: Path | None = None,
        backoff: Backoff | None = None,
        port: int = 0,
    ) -> SupervisedProcess:
        """Start one more SuperNode.

        Args:
            config: its configuration.
            key: its key, where nodes are authenticated.
            authority: the authority that it trusts, if not this deployment's.
            backoff: the pauses before it is started again.
            port: of its own API; 0 for any free one.

        Returns:
            The node's process.
        """
        node = Node(f"node-{len(self.nodes)}", port or free_ports(1)[0], config, key)
        trusted = authority or (self.tls.authority if self.tls else None)
        target = self._node_target(self.control.address)
        command = partial(supernode_command, superlink=target, authority=trusted, own=self.tls)
        process = self._supervised(
            node.name, command(node), backoff or NODE_BACKOFF, lambda: command(on_free_port(node))
        )
        self.nodes.append(process.start())
        return process

    def wait_online(self, count: int) -> None:
        """Wait until so many nodes are online."""
        deadline = time.monotonic() + self.timeout
        while count and (online := self.control.online()) < count:
            failed = next((n for n in self.nodes if n.gave_up), None)
            if failed or time.monotonic() > deadline:
                culprit = failed or next((n for n in self.nodes if "SuperNode ID" not in n.tail(200)), self.nodes[0])
                raise DeploymentError(
                    f"only {online} of {count} nodes are there after {self.timeout:.0f} s. "
                    f"The log of {culprit.name}:\n{culprit.tail()}"
                )
            time.sleep(0.5)

    def _stop(self) -> None:
        """Stop the nodes first, so that they can sign off from a SuperLink that still listens."""
        for node in self.nodes:
            node.ask_to_stop()
        for node in self.nodes:
            node.stop()
        if hasattr(self, "superlink"):
            self.superlink.stop()
            wipe_traces(self.folder / DATABASE, self._say)


class _PortTaken(Exception):
    """Another program took the port first."""
