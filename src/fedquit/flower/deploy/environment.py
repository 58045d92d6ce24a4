# SPDX-License-Identifier: Apache-2.0
"""What a process of Flower's needs to start: the program, its environment variables, a free port."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from fedquit.flower.deploy import reaper
from fedquit.flower.deploy.errors import DeploymentError

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 20_000
HIGHEST_PORT = 32_000  # exclusive; below the ports that systems give to outgoing connections
EXTRA_MISSING = "this needs Flower: pip install 'fedquit[flower]'."

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",  # many processes share few cores
    "PYTHONUNBUFFERED": "1",  # so that the log of a killed process is complete
}


def require_flower() -> None:
    """Raise `DeploymentError` with the command that installs Flower, if it is missing."""
    if not find_spec("flwr"):
        raise DeploymentError(EXTRA_MISSING)


def program(name: str) -> str:
    """The path of one of Flower's commands: in the directory of this Python's scripts, or on the PATH."""
    installed = Path(sysconfig.get_path("scripts")) / name
    path = str(installed) if installed.exists() else shutil.which(name)
    if not path:
        raise DeploymentError(EXTRA_MISSING)
    return path


def environment(home: Path, mark: str = "") -> dict[str, str]:
    """The environment variables of a process: no telemetry, no proxy for loopback, Flower's own files under `home`.

    Args:
        home: the directory for Flower's configuration.
        mark: the mark by which `reaper` finds the process and its children; none if empty.

    Returns:
        This process's environment with the changes.
    """
    inherited = os.environ
    paths = [sysconfig.get_path("scripts"), inherited.get("PATH", os.defpath)]  # Flower looks for its helpers there
    no_proxy = [LOOPBACK, "localhost"]
    inherited_no_proxy = inherited.get("NO_PROXY") or inherited.get("no_proxy")
    if inherited_no_proxy:
        no_proxy.append(inherited_no_proxy)
    changes = {
        **VARIABLES,
        "FLWR_HOME": str(home.resolve()),
        "PATH": os.pathsep.join(paths),
        "NO_PROXY": ",".join(no_proxy),
        "no_proxy": ",".join(no_proxy),
    }
    if "PYTHONPATH" in inherited:  # Flower changes the working directory, so relative entries must become absolute
        entries = filter(None, inherited["PYTHONPATH"].split(os.pathsep))
        changes["PYTHONPATH"] = os.pathsep.join(str(Path(entry).resolve()) for entry in entries)
    if mark:
        changes[reaper.VARIABLE] = mark
    return {**inherited, **changes}


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that are free now. Another process may still take one first: then try again."""
    ports: list[int] = []
    candidates = random.sample(range(LOWEST_PORT, HIGHEST_PORT), HIGHEST_PORT - LOWEST_PORT)
    with contextlib.ExitStack() as open_sockets:
        for port in candidates:
            if len(ports) == count:
                break
            probe = open_sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                ports.append(port)
    if len(ports) < count:
        raise DeploymentError(
            f"no {count} free ports between {LOWEST_PORT} and {HIGHEST_PORT}: stop other servers on this machine."
        )
    return ports
