# SPDX-License-Identifier: Apache-2.0
"""The processes of a server and of a site one by one, for a service manager that starts and supervises them.

prepare   writes what the parts need, as root or as the only user: copies of keys, and the command of each part
run       becomes the process of one part, as the user who owns what it reads

    server   superlink, superexec   run by the user of the app: they cannot read the project's keys
             front                  run by the owner of the project
    site     node                   run by the owner of the site's keys
             apps                   run by the user of the app: it cannot read the keys
             keeper                 run by the owner of the keys, who may look for requests in the home
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed import front
from fedquit.flower.closed.app_user import AppUser, hand_over, hand_over_tree, require_access, require_apart
from fedquit.flower.closed.apps import read_trust_file
from fedquit.flower.closed.private_files import make_private_folder, open_lock, write_private_json
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.service import NODE_LOCK, SiteRun, keep_in_touch, note_node, superlink_descriptions
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.commands import Node, Value
from fedquit.flower.deploy.environment import environment
from fedquit.flower.sqlite_wipe import DATABASE, FOLDER, wipe_traces
from fedquit.utils import files

NODE_PORT = 9094  # of the node's own API, on loopback
PREPARE = "run `fedquit flower prepare` first, as the units do."


def owner_of(path: Path) -> AppUser | None:
    """The user who owns a folder, for whom root writes something there; None where we are that user, or not root."""
    owner = files.owner_of(path)
    return AppUser(*owner) if owner else None


def prepare_server(project: Project, state: Path, app_user: AppUser | None) -> None:
    """Make the state directory ready, and write the commands of `superlink` and `superexec`.

    Args:
        project: the closed federation.
        state: its state directory, which becomes the app user's.
        app_user: who runs the SuperLink and the server app; the present user if None.
    """
    project = Project(project.folder.resolve())
    require_apart(project.server, state, "--state")
    hand_over(make_private_folder(project.server), owner_of(project.folder))
    folder = make_private_folder(make_private_folder(state.resolve()) / FOLDER)
    both = superlink_descriptions(project, folder, app_user)
    wipe_traces(folder / DATABASE, lambda _: None)
    for name, description in zip(("superlink", "superexec"), both, strict=True):
        write_private_json(_server_part(state, name), description)
    hand_over_tree(state, app_user)
    require_access(folder, app_user)


def prepare_site(
    site: SiteFolder, home: Path, settings: Mapping[str, Value], app_user: AppUser | None, port: int = NODE_PORT
) -> None:
    """Make a site's home ready, and write the commands of `node` and `apps`.

    Args:
        site: the folder of its keys.
        home: of the client app, which becomes the app user's.
        settings: that the node tells its app.
        app_user: who runs the app; the present user if None.
        port: of the node's own API, on loopback.
    """
    site = SiteFolder(site.folder.resolve())
    require_apart(site.folder, home, "--home")
    home = make_private_folder(home.resolve())
    read_trust_file(site.trust)
    run = SiteRun(site, home, settings, app_user)
    keeper = owner_of(site.folder)
    make_private_folder(run.folder)
    node = Node(str(site.about["name"]), port, {"fedquit-home": str(home), **settings}, site.node_key)
    of_node, of_apps = run.descriptions(node)
    write_private_json(_node_part(site), of_node)
    write_private_json(_apps_part(home), of_apps)
    note_node(run)
    hand_over_tree(run.folder, keeper)
    hand_over_tree(site.loopback().key.parent, keeper)
    hand_over(site.secret(), keeper)
    hand_over_tree(home, app_user)
    require_access(home, app_user)


def _server_part(state: Path, name: str) -> Path:
    return state / FOLDER / "run" / f"{name}.json"


def _node_part(site: SiteFolder) -> Path:
    return site.folder / "node" / "node.json"


def _apps_part(home: Path) -> Path:
    return home / "flower" / "apps.json"


def run_server_part(name: str, state: Path) -> NoReturn:
    """Become the SuperLink, or the process that runs server apps."""
    _become(_server_part(state, name))


def run_front(project: Path) -> None:
    """Run the front in this process."""
    front.main(str(project), str(Project.open(project).front_log))


def run_node(site: SiteFolder) -> NoReturn:
    """Become the SuperNode of a site; a second one does not start beside it."""
    read_trust_file(site.trust)
    site.require_keys()
    another = f"another node of {site.about['name']} runs on this machine: stop it first."
    _hold(site.folder / "node" / NODE_LOCK, another)
    _become(_node_part(site))


def run_keeper(site: SiteFolder, home: Path, say: Callable[[str], None]) -> None:
    """Renew the certificate, and tell the front of requests, until this process is interrupted."""
    keep_in_touch(SiteFolder(site.folder.resolve()), home.resolve(), say)


def run_apps(home: Path) -> NoReturn:
    """Become the process that runs client apps."""
    _become(_apps_part(home))


def _hold(path: Path, otherwise: str) -> None:
    """Take a lock that stays with the process that this one becomes."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreError(otherwise) from error
    os.set_inheritable(descriptor, True)


def _become(path: Path) -> NoReturn:
    """Replace this process by the one that `prepare` described."""
    try:
        description: dict[str, Any] = json.loads(path.read_text())
        command = [str(word) for word in description["command"]]
        variables = {str(name): str(value) for name, value in description["environment"].items()}
        folder = Path(description["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not say what to run: {PREPARE}") from error
    home = Path(variables.get("FLWR_HOME", str(folder / "flower-home")))
    os.chdir(folder)
    os.execve(command[0], command, {**environment(home), **variables})
