# SPDX-License-Identifier: Apache-2.0
"""systemd units that run a server or a site: systemd starts, supervises and confines each part.

The parts of the server share a network namespace without any interface but loopback. Its only opening is the socket on
which systemd listens for the front: no other user of the machine reaches the SuperLink, and no app code gets out.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedquit.errors import InputError
from fedquit.flower.closed.project import Project
from fedquit.flower.deploy.commands import Value, as_toml
from fedquit.flower.operations.parts import NODE_PORT
from fedquit.utils.files import write_atomic

Sections = Mapping[str, Sequence[str]]

CONFINED = (  # of every service
    "UMask=0077",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "ProtectProc=invisible",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectControlGroups=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "RemoveIPC=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "LogRateLimitIntervalSec=0",  # the journal has a size of its own, and keeps every line until then
)
WITHOUT_RIGHTS = ("CapabilityBoundingSet=", "AmbientCapabilities=")
ALWAYS = ("Restart=always", "RestartSec=5")
IN_NAMESPACE = "PrivateNetwork=yes"
ONLY_LOOPBACK = ("IPAddressDeny=any", "IPAddressAllow=localhost")
OWNER_RIGHTS = "CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER"


def _program() -> list[str]:
    """How fedquit is run by this installation."""
    return [sys.executable, "-m", "fedquit", "flower"]


def _command(*words: object, root: bool = False) -> str:
    """The value of ExecStart: systemd splits it like a shell, and takes % and $ for its own."""
    quoted = [_quoted(str(word)) for word in (*_program(), *words)]
    return ("+" if root else "") + " ".join(quoted)


def _quoted(word: str) -> str:
    if any(character in word for character in "\n\r\0"):
        raise InputError(f"{word!r} cannot stand in a unit: give a name without line ends.")
    return shlex.quote(word.replace("%", "%%").replace("$", "$$"))


def _path(path: Path) -> str:
    """A path as ReadWritePaths and its like take it."""
    text = str(path.resolve())
    if any(character.isspace() or character in "\"'\\" for character in text):
        raise InputError(f"{text!r} cannot stand in a unit: take folders without spaces and quotation marks.")
    return text.replace("%", "%%")


def _unit(sections: Sections) -> str:
    lines = ["# Written by `fedquit flower units`; write it again after a change."]
    for name, entries in sections.items():
        lines += ["", f"[{name}]", *entries]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ServerUnits:
    """What the units of a server are made from."""

    project: Path
    state: Path
    app: Path
    settings: Mapping[str, Value] = field(default_factory=dict)
    user: str = "fedquit"  # owns the project
    app_user: str = "fedquit-app"  # owns the state directory, and runs the server app; empty: `user` does

    def render(self) -> dict[str, str]:
        """The content of each unit, by file name."""
        project, state = _path(self.project), _path(self.state)
        settings = Project.open(self.project).settings
        separated = ["--app-user", self.app_user] if self.app_user else []
        prepare = _command("prepare", "--project", project, "--state", state, *separated, root=bool(separated))
        app_user = self.app_user or self.user
        hidden = [f"InaccessiblePaths={project}"] if separated else []
        release_key = f"-{project}/release.key"  # which may be kept elsewhere
        joined = ("JoinsNamespaceOf=fedquit-superlink.service", "After=fedquit-superlink.service")
        serve = ["serve", self.app.resolve(), "--attach", "--project", project, "--state", state]
        serve += separated
        for name, value in self.settings.items():
            serve += ["--set", f"{name}={as_toml({name: value}).partition('=')[2]}"]
        host = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
        return {
            "fedquit-front.socket": _unit(
                {
                    "Unit": ["Description=fedquit: the only port that sites reach (mutual TLS)"],
                    "Socket": [f"ListenStream={host}:{settings.port}", "Backlog=128", "NoDelay=true"],
                    "Install": ["WantedBy=sockets.target"],
                }
            ),
            "fedquit-front.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: the front, which passes the fleet service to sites with a certificate",
                        "Requires=fedquit-front.socket",
                        "After=fedquit-front.socket",
                        *joined,
                    ],
                    "Service": [
                        f"ExecStart={_command('part', 'front', '--project', project)}",
                        *ALWAYS,
                        f"User={self.user}",
                        f"ReadWritePaths={project}",
                        f"InaccessiblePaths={release_key}",  # it needs the authority's key, to renew certificates
                        IN_NAMESPACE,
                        *CONFINED,
                        *WITHOUT_RIGHTS,
                        "MemoryMax=1G",
                        "TasksMax=64",
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
            "fedquit-superlink.service": _unit(
                {
                    "Unit": ["Description=fedquit: Flower's SuperLink, which only the front and the operator reach"],
                    "Service": [
                        f"ExecStartPre={prepare}",
                        f"ExecStart={_command('part', 'superlink', '--state', state)}",
                        *ALWAYS,
                        f"User={app_user}",
                        f"ReadWritePaths={state}",
                        *hidden,
                        IN_NAMESPACE,
                        *CONFINED,
                        *WITHOUT_RIGHTS,
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
            "fedquit-superexec.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: runs the server app (cannot read the project's keys, has no network)",
                        "Requires=fedquit-superlink.service",
                        "PartOf=fedquit-superlink.service",
                        *joined,
                    ],
                    "Service": [
                        f"ExecStart={_command('part', 'superexec', '--state', state)}",
                        *ALWAYS,
                        f"User={app_user}",
                        f"ReadWritePaths={state}",
                        *hidden,
                        IN_NAMESPACE,
                        *CONFINED,
                        *WITHOUT_RIGHTS,
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
            "fedquit-serve.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: registers the sites and sees the run through",
                        "Requires=fedquit-superlink.service",
                        "Wants=fedquit-front.service fedquit-superexec.service",
                        *joined,
                    ],
                    "Service": [
                        f"ExecStart={_command(*serve)}",
                        "Restart=on-failure",
                        "RestartSec=30",
                        *([] if separated else [f"User={self.user}"]),
                        f"ReadWritePaths={project} {state} {_path(self.app)}",  # Flower packs the app in its folder
                        f"InaccessiblePaths={release_key} {project}/ca.key",
                        IN_NAMESPACE,
                        *CONFINED,
                        OWNER_RIGHTS,  # it writes the list of sites into the app user's folder
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
        }


@dataclass(frozen=True)
class SiteUnits:
    """What the units of a site are made from."""

    site: Path
    home: Path
    settings: Mapping[str, Value] = field(default_factory=dict)
    user: str = "fedquit"  # owns the keys
    app_user: str = "fedquit-app"  # owns the home, and runs the app; empty: `user` does
    port: int = NODE_PORT  # of the node's own API, on loopback
    data: tuple[Path, ...] = ()  # which the app may read

    def render(self) -> dict[str, str]:
        """The content of each unit, by file name."""
        site, home = _path(self.site), _path(self.home)
        separated = ["--app-user", self.app_user] if self.app_user else []
        app_user = self.app_user or self.user
        prepare = ["prepare", "--site", site, "--home", home, "--port", self.port, *separated]
        for name, value in self.settings.items():
            prepare += ["--set", f"{name}={as_toml({name: value}).partition('=')[2]}"]
        readable = [f"BindReadOnlyPaths={_path(folder)}" for folder in self.data]
        return {
            "fedquit-node.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: the SuperNode of this site (has the keys, runs no app code)",
                        "After=network-online.target",
                        "Wants=network-online.target fedquit-apps.service fedquit-keeper.service",
                    ],
                    "Service": [
                        f"ExecStartPre={_command(*prepare, root=bool(separated))}",
                        f"ExecStart={_command('part', 'node', '--site', site)}",
                        *ALWAYS,
                        f"User={self.user}",
                        f"ReadWritePaths={site} {home}",
                        *CONFINED,
                        *WITHOUT_RIGHTS,
                        "MemoryMax=4G",
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
            "fedquit-apps.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: runs signed apps on this site's data (no keys, loopback only)",
                        "Requires=fedquit-node.service",
                        "PartOf=fedquit-node.service",
                        "After=fedquit-node.service",
                    ],
                    "Service": [
                        f"ExecStart={_command('part', 'apps', '--home', home)}",
                        *ALWAYS,
                        f"User={app_user}",
                        f"ReadWritePaths={home}",
                        *([f"InaccessiblePaths={site}"] if separated else []),
                        *readable,
                        *ONLY_LOOPBACK,
                        *(entry for entry in CONFINED if entry != "PrivateDevices=yes"),  # an app may need a GPU
                        *WITHOUT_RIGHTS,
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
            "fedquit-keeper.service": _unit(
                {
                    "Unit": [
                        "Description=fedquit: renews this site's certificate, and tells the server of requests",
                        "After=network-online.target fedquit-node.service",
                        "Wants=network-online.target",
                        "PartOf=fedquit-node.service",
                    ],
                    "Service": [
                        f"ExecStart={_command('part', 'keeper', '--site', site, '--home', home)}",
                        *ALWAYS,
                        f"User={self.user}",
                        f"ReadWritePaths={site}",
                        *CONFINED,
                        "CapabilityBoundingSet=CAP_DAC_READ_SEARCH",  # the names of requests in the app user's home
                        "AmbientCapabilities=CAP_DAC_READ_SEARCH",
                        "MemoryMax=1G",
                    ],
                    "Install": ["WantedBy=multi-user.target"],
                }
            ),
        }


def write_units(units: Mapping[str, str], folder: Path) -> list[Path]:
    """Write units to a folder; their paths."""
    paths = []
    for name, content in units.items():
        path = folder / name
        write_atomic(path, content.encode())
        path.chmod(0o644)
        paths.append(path)
    return paths
