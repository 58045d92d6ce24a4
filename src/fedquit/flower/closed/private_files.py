# SPDX-License-Identifier: Apache-2.0
"""Folders and files that only the user who runs this can read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fedquit.errors import StoreError
from fedquit.utils.files import give_to_owner_of_folder, make_folder, write_secret

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def make_private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, or close one that is there."""
    if path.is_symlink():  # whoever made it could point it anywhere
        raise StoreError(f"{path} is a link: give the folder itself.")
    try:
        make_folder(path, FOLDER_MODE)
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise StoreError(f"cannot make the folder {path} ({error.strerror}): take another place.") from error
    return path


def close_files(folder: Path) -> None:
    """Let only the owner read the files of a folder."""
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(FILE_MODE)


def write_private(path: Path, content: bytes | str) -> Path:
    """Write a file that only its owner can read, whole or not at all."""
    write_secret(path, content.encode() if isinstance(content, str) else content)
    return path


def write_private_json(path: Path, value: object) -> Path:
    """Write a value as indented JSON that only its owner can read."""
    return write_private(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_private(path: Path, what_to_do: str) -> bytes:
    """The content of a file.

    Args:
        path: the file.
        what_to_do: the end of the sentence that says what to do when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}): {what_to_do}") from error


def holds(path: Path, content: bytes) -> bool:
    """Whether a file holds just this; its folder may be another user's: no link is followed, nothing waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        try:
            return file.read(len(content) + 1) == content
        except OSError:  # a bad sector
            return False


def open_lock(path: Path) -> int:
    """The descriptor of a lock file, which is made where it is not there, for the owner of its folder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise StoreError(
            f"cannot open the lock {path} ({error.strerror}): let the user who runs this own the folder and its files."
        ) from error
    give_to_owner_of_folder(path, descriptor)
    return descriptor


@contextlib.contextmanager
def exclusive(path: Path, patience: float) -> Iterator[None]:
    """Hold a lock file for as long as the `with` lasts; wait for another process that has it.

    Args:
        path: the lock file.
        patience: seconds after which it is given up: the other process may have been stopped (Ctrl-Z).

    Raises:
        StoreError: if the other process still has it then.
    """
    descriptor = open_lock(path)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"another command holds {path}, and nothing was changed: let it end, or end it, and run this "
                        "again."
                    ) from error
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_one(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock file for as long as the `with` lasts, which no other process may have.

    Args:
        path: the lock file.
        otherwise: the sentence of the `StoreError` where another process has it.
    """
    descriptor = open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(otherwise) from error
        yield
    finally:
        os.close(descriptor)
