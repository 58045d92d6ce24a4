# SPDX-License-Identifier: Apache-2.0
"""The user that runs app code, who cannot read the keys. Only root can start a process as another user."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fedquit.errors import InputError
from fedquit.flower.closed.private_files import make_private_folder, read_private, write_private

REQUESTS = ("ledger.json", "outbox")  # what a state directory and a home keep requests in
RESTORE = "restore the folder from a backup, as it was copied in part."
SAME_USER = (
    "warning: app code runs as the user who owns the keys and could read them; start this as root with --app-user to "
    "separate the two."
)


@dataclass(frozen=True)
class AppUser:
    """A user of this machine."""

    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> AppUser:
        """The user with that name, who must be another than the present one."""
        if os.geteuid() != 0:
            raise InputError("only root can run app code as another user: start this as root, or leave --app-user out.")
        try:
            entry = pwd.getpwnam(name)
        except KeyError as error:
            raise InputError(f"there is no user {name!r}: make one, for example with `useradd --system`.") from error
        if entry.pw_uid == 0:
            raise InputError("app code must not run as root: give --app-user another user.")
        return cls(entry.pw_uid, entry.pw_gid)


def hand_over(path: Path, user: AppUser | None) -> Path:
    """Make a user the owner of a file or folder; nothing changes without a user."""
    if user:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)  # a link could point anywhere
    return path


def hand_over_tree(folder: Path, user: AppUser | None) -> Path:
    """Make a user the owner of a folder and of all that is in it; nothing changes without a user."""
    for path in [folder, *folder.rglob("*")] if user else []:
        hand_over(path, user)
    return folder


def require_apart(keys: Path, folder: Path, option: str) -> None:
    """Raise `InputError` where a folder that app code gets is one that it must not get, or holds it.

    Args:
        keys: a folder with keys, of a project or a site.
        folder: the state directory or the home.
        option: which the folder was given with.
    """
    if not keys.resolve().is_relative_to(folder.resolve()):
        return
    if any((folder / name).exists() for name in REQUESTS):
        raise InputError(
            f"{folder} has requests, but also {keys}, and app code gets it: stop everything, move the keys' folder out "
            f"of it, name its new place, and keep {folder} for {option}."
        )
    raise InputError(f"{folder} is or holds {keys}, and app code gets it: give {option} a folder of its own.")


def copy_for(user: AppUser | None, folder: Path, *files: Path) -> list[Path]:
    """Copy files to a folder that only the user can enter.

    Args:
        user: the reader; None for the present user.
        folder: is made, or closed to others.
        files: are replaced where they are there already.

    Returns:
        The copies.
    """
    hand_over(make_private_folder(folder), user)
    copies = []
    for file in files:
        copies.append(hand_over(write_private(folder / file.name, read_private(file, RESTORE)), user))
    return copies


def require_access(path: Path, user: AppUser | None) -> None:
    """Raise `InputError` unless the user can write in a folder, which other folders above it may prevent."""
    if user is None:
        return
    check = "import os, sys; sys.exit(0 if os.access(sys.argv[1], os.R_OK | os.W_OK | os.X_OK) else 3)"
    command = [sys.executable, "-I", "-c", check, str(path.resolve())]
    try:
        code = subprocess.run(
            command,
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            cwd="/",
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
    except PermissionError:
        code = -1
    if code == 3:
        raise InputError(f"the user of --app-user cannot write in {path}: give that user the folder, and a way to it.")
    if code:
        raise InputError(
            f"the user of --app-user cannot run {sys.executable}: install fedquit and its Python where all users can "
            "read them."
        )
