# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: a file gets a temporary name, is flushed to the disk, and renamed into place.

Everything that this package writes goes through here. What root writes in the folder of another user becomes that
user's, so that the processes of that user can read it. This module needs no torch, so that a report can be made
without.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError

CHECKSUM = "sha256"  # in a JSON object: of everything else in it
HALF_WRITTEN = re.compile(r"\.[0-9a-f]{16}$")  # the ending of a temporary name


@contextlib.contextmanager
def _explain_write_error(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror or error}): nothing was changed; free space or take another place, "
            "then run the same command again to go on."
        ) from error


def owner_of(folder: Path) -> tuple[int, int] | None:
    """The user and group for whom root writes in a folder; None where we are that user, or not root."""
    if os.geteuid() != 0:
        return None
    status = folder.stat()
    return (status.st_uid, status.st_gid) if status.st_uid != 0 else None


def give_to_owner_of_folder(path: Path, descriptor: int | None = None) -> None:
    """Make the owner of its folder the owner of a file or folder that root has made there.

    Args:
        path: the file or folder.
        descriptor: of the open file, if it is open.
    """
    with contextlib.suppress(OSError):  # a file system without owners, or root without the right to give files away
        owner = owner_of(path.parent)
        if owner and descriptor is not None:
            os.fchown(descriptor, *owner)
        elif owner:
            os.chown(path, *owner, follow_symlinks=False)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, where they are not there; each belongs to the owner of the one above."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode, exist_ok=True)
        give_to_owner_of_folder(path)
    folder.mkdir(exist_ok=True)  # says so where a file is in the way


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file; its folder is made where it does not exist. What it held before stays until
            the new content is safe on the disk.
        content: all of its bytes.

    Raises:
        StoreError: if the disk is full or the folder cannot be written to; nothing has changed
            then.
    """
    _write(path, content, 0o666)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only the user who runs this can read, as `write_atomic` does."""
    _write(path, content, 0o600)


def _write(path: Path, content: bytes, mode: int) -> None:
    with _explain_write_error(path):
        make_folder(path.parent)
        beside = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                give_to_owner_of_folder(path, file.fileno())
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


@contextlib.contextmanager
def only_owner() -> Iterator[None]:
    """Let files and folders that this process and its children make be readable by their owner alone, for a while."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[Path]:
    """The files and folders in a folder, and itself, that other users than the owner may read or enter."""
    paths = [folder, *sorted(folder.rglob("*"))] if folder.exists() else []
    return [path for path in paths if not path.is_symlink() and path.stat().st_mode & 0o077]


def close_to_others(folder: Path) -> None:
    """Let nobody but its owner read a folder that is there, nor anything in it."""
    for path in open_to_others(folder):
        with _explain_write_error(path):
            path.chmod(path.stat().st_mode & 0o700)


def remove_half_written(folder: Path, spared: Collection[str] = ()) -> None:
    """Delete what killed writes left in a folder.

    Args:
        folder: the folder.
        spared: the names of files that others may be writing there now.
    """
    for path in folder.glob(".*"):
        name, ending = HALF_WRITTEN.sub("", path.name)[1:], HALF_WRITTEN.search(path.name)
        if ending and name not in spared:
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Append a line to a log in one write, so that a kill leaves all of the line or nothing."""
    with _explain_write_error(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            give_to_owner_of_folder(path, descriptor)
            content = f"{line}\n".encode()
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def json_bytes(value: object) -> bytes:
    """A value as indented JSON, as `write_json` writes it."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_atomic(path, json_bytes(value))


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """An object for a JSON file with the checksum of everything else in it, which finds a changed byte."""
    return {**content, CHECKSUM: hashlib.sha256(json_bytes(dict(content))).hexdigest()}


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """What `with_checksum` was given; an object that has no checksum is of an earlier version, and stays as it is.

    Raises:
        StoreError: if the checksum is that of something else.
    """
    plain = {key: value for key, value in content.items() if key != CHECKSUM}
    if CHECKSUM in content and with_checksum(plain) != dict(content):
        raise StoreError("its checksum is that of something else: a byte has changed.")
    return plain


def write_private_json(path: Path, value: object) -> None:
    """Write a value as indented JSON in a folder of its own, which only the user who runs this may enter."""
    with _explain_write_error(path):
        make_folder(path.parent)
        path.parent.chmod(0o700)
    write_json(path, value)


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is anything
    """Read a JSON file.

    Raises:
        StoreError: if the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot read {path} ({error}): restore it from a backup, and keep this file until then."
        ) from error


def read_json_rows(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Read a JSON list of objects; the list is empty where there is no file.

    Args:
        path: Of the file.
        keys: What every object must have.

    Raises:
        StoreError: if the file is anything else.
    """
    if not path.exists():
        return []
    advice = f"{path} is not what a run wrote: restore it from a copy, or move it away and run the same command again."
    try:
        rows = read_json(path)
    except StoreError as error:
        raise StoreError(advice) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= {*keys} for row in rows):
        raise StoreError(advice)
    return rows
