# SPDX-License-Identifier: Apache-2.0
"""The command lines that start a SuperLink and a SuperNode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedquit.errors import InputError
from fedquit.flower.deploy.environment import LOOPBACK, free_ports, program
from fedquit.flower.deploy.keys import NodeKey, Tls

Mode = Literal["secure", "insecure", "simulation"]
Value = str | int | float | bool


@dataclass(frozen=True)
class Node:
    """A SuperNode."""

    name: str
    port: int  # of its own API, on loopback
    config: Mapping[str, Value]  # what it tells its app
    key: NodeKey | None = None  # where nodes are authenticated


def on_free_port(node: Node) -> Node:
    """The same node with another port."""
    return replace(node, port=free_ports(1)[0])


def superlink_command(port: int, database: Path, tls: Tls | None, mode: Mode, host: str = LOOPBACK) -> list[str]:
    """The command that starts a SuperLink. It installs nothing: apps run with the packages that are there.

    Args:
        port: where it listens.
        database: the SQLite file for its messages and runs.
        tls: its certificate and key; required in the mode `secure`.
        mode: `secure` is TLS with registered node keys; `insecure` has neither; `simulation` has no nodes.
        host: the address of this machine on which it listens.

    Returns:
        The program and its arguments.
    """
    if mode == "secure":
        if not tls:
            raise InputError("a secure SuperLink needs certificates: give an authority, a certificate and its key.")
        security = [*_tls_arguments(tls), "--enable-supernode-auth"]
    elif mode == "simulation":
        security = ["--insecure", "--simulation"]
    else:
        security = ["--insecure"]
    place = ["--host", host, "--port", str(port), "--database", str(database)]
    return [program("flower-superlink"), *security, *place, "--disable-runtime-dependency-installation"]


def supernode_command(node: Node, superlink: str, authority: Path | None, own: Tls | None) -> list[str]:
    """The command that starts a SuperNode.

    Args:
        node: its key, port and configuration.
        superlink: host:port of the SuperLink.
        authority: the certificate of the authority that signed the SuperLink's; None for a connection without TLS.
        own: certificate and key of the node's own API, which its app calls.

    Returns:
        The program and its arguments.
    """
    arguments = ["--root-certificates", str(authority)] if authority else ["--insecure"]
    if node.key:
        arguments += ["--auth-supernode-private-key", str(node.key.private)]
    if own:
        arguments += _tls_arguments(own)
    arguments += ["--superlink", superlink, "--host", LOOPBACK, "--port", str(node.port)]
    if node.config:
        arguments += ["--node-config", as_toml(node.config)]
    return [program("flower-supernode"), *arguments]


def _tls_arguments(tls: Tls) -> list[str]:
    files = {"ca-certfile": tls.authority, "certfile": tls.certificate, "keyfile": tls.key}
    arguments = []
    for name, path in files.items():
        arguments += [f"--ssl-{name}", str(path)]
    return arguments


def as_toml(values: Mapping[str, Value]) -> str:
    """Settings as Flower's command line takes them: `name=value name=value`."""
    return " ".join(f"{name}={_toml(value)}" for name, value in values.items())


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    return repr(value)


def _escaped(character: str) -> str:
    """A character of a TOML string. Flower splits settings at quotation marks and line ends, so these are escaped."""
    if character.isprintable() and character not in '"\\':
        return character
    return f"\\U{ord(character):08x}"
