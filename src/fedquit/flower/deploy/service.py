# SPDX-License-Identifier: Apache-2.0
"""What the operator of a server and the owner of a node run: a SuperLink with a run of the app, and a SuperNode.

Whoever can reach the port of the SuperLink can run code on the server and on every node (see SECURITY.md). `serve`
prints a warning where it listens on anything but loopback.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedquit.errors import InputError
from fedquit.flower.deploy.commands import Mode, Node, on_free_port, superlink_command, supernode_command
from fedquit.flower.deploy.control import Control
from fedquit.flower.deploy.environment import LOOPBACK, environment
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import NodeKey, Tls, make_tls
from fedquit.flower.deploy.processes import FOR_EVER, ProcessGroup, Say, SupervisedProcess
from fedquit.flower.deploy.standing import Standing, keep_open
from fedquit.flower.deploy.supervision import Hear, Plan, run_until_finished, wait_for_superlink
from fedquit.flower.outbox import NODE_FILE
from fedquit.flower.sqlite_wipe import DATABASE, wipe_traces
from fedquit.running.store import locked
from fedquit.utils.files import write_json

OPEN_PORT = (
    "warning: whoever can reach {address} can run code on this machine and on every node, with TLS and registered keys "
    "too, because Flower's control API asks for no authentication; use a closed federation (--project, see "
    "docs/operate.md), or keep the port behind a firewall or a tunnel (see SECURITY.md)."
)


INSECURE = (
    "{address} is not on this machine, and --insecure has no TLS and no keys: use it with 127.0.0.1 only, and with "
    "other machines a closed federation (docs/operate.md)."
)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach host:port. A name other than localhost may stand for any address."""
    host = address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Link:
    """A SuperLink: its address, its certificates, and whether it is ours to run."""

    address: str  # host:port
    tls: Tls | None = None  # to run one with TLS
    authority: Path | None = None  # to reach one that somebody else runs
    ours: bool = True
    mode: Mode = "secure"

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"{self.address!r} is no address: write host:port, for example {LOOPBACK}:9092.")
        if self.mode == "insecure" and not self.is_loopback:
            raise InputError(INSECURE.format(address=self.address))

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.address)


def serve(
    plan: Plan,
    link: Link,
    folder: Path,
    *,
    members: Mapping[str, Path] | None = None,
    standing: Standing | None = None,
    until_trained: bool = False,
    say: Say = lambda _: None,
    hear: Hear = lambda _: None,
) -> int:
    """Run a SuperLink, or attach to one, and run the app whenever there is something to do.

    Args:
        plan: the app and its settings.
        link: the SuperLink.
        folder: where the SuperLink's database and the logs lie.
        members: the public keys of the nodes that may take part, by name; keys that are registered already stay so.
        standing: what is watched after the training; as usual if None.
        until_trained: whether to end when training is over instead.
        say: takes one sentence for the operator.
        hear: takes each line of the run's log.

    Returns:
        The id of the run that finished, if `until_trained`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = link.tls.authority if link.tls else link.authority
    if link.ours:  # a SuperLink that was killed has left deleted messages in its database
        wipe_traces(folder / DATABASE, say)
    with locked(folder), ProcessGroup() as group:  # also between two runs: it tells that somebody serves
        control = Control(link.address, authority, folder / "flower-home", group.mark_of("control"))
        superlink = _start_superlink(group, link, folder, say) if link.ours else None
        try:
            wait_for_superlink(control, plan.patience, superlink, say)
            for name, public_key in (members or {}).items():
                _register(control, name, public_key, say)
            memo = folder / "run.json"
            return keep_open(
                partial(run_until_finished, plan, control, memo, superlink=superlink, say=say, hear=hear),
                standing or Standing(folder.parent),
                until_trained=until_trained,
                dead=lambda: superlink.gave_up if superlink else "",
                say=say,
            )
        finally:
            if superlink:
                superlink.stop()
                wipe_traces(folder / DATABASE, say)


def _start_superlink(group: ProcessGroup, link: Link, folder: Path, say: Say) -> SupervisedProcess:
    command = superlink_command(link.port, folder / DATABASE, link.tls, link.mode, link.host)
    log = folder / "logs" / "superlink.log"
    say(f"the SuperLink starts on {link.address}; its log is {log}.")
    if not link.is_loopback:
        say(OPEN_PORT.format(address=link.address))
    return SupervisedProcess(group, "superlink", command, log, environment(folder / "flower-home"), say=say).start()


def _register(control: Control, name: str, public_key: Path, say: Say) -> None:
    try:
        node_id = control.register(NodeKey(public_key.with_suffix(""), public_key), name)
    except DeploymentError as error:
        if "already" not in str(error).lower():
            raise
        say(f"{name} is registered already.")
    else:
        say(f"{name} is registered as node {node_id}.")


def run_node(node: Node, superlink: str, authority: Path | None, folder: Path, *, say: Say = lambda _: None) -> None:
    """Run a SuperNode and start it again when it ends, until this process is interrupted.

    A node that the server does not know yet, or whose server is off, tries for ever.

    Args:
        node: its key, port and configuration.
        superlink: host:port of the SuperLink.
        authority: the certificate of the authority that signed the SuperLink's; None for a connection without TLS,
            which must be to this machine.
        folder: where its logs and the certificates of its own API lie, in the home of its client.
        say: takes one sentence for the operator.
    """
    if authority is None and not is_loopback(superlink):
        raise InputError(INSECURE.format(address=superlink))
    log = folder / "logs" / f"{node.name}.log"
    write_json(folder.parent / NODE_FILE, {"name": node.name, "server": superlink, "started": time.time()})
    own_tls = make_tls(folder / "keys" / secrets.token_hex(8)) if authority else None
    command = partial(supernode_command, superlink=superlink, authority=authority, own=own_tls)
    with ProcessGroup() as group:
        process = SupervisedProcess(
            group,
            node.name,
            command(node),
            log,
            environment(folder / "flower-home"),
            backoff=FOR_EVER,
            command_on_other_port=lambda: command(on_free_port(node)),
            say=say,
        )
        say(f"{node.name} starts and goes to {superlink}; its log is {log}.")
        process.start()
        try:
            while True:
                time.sleep(0.5)
        finally:
            process.stop()
