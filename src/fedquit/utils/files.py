# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or not there: written beside their place, flushed to the disk, and renamed.

Everything that this package writes goes through here. It needs no torch, so that a report can be made without it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError

HALF_WRITTEN = re.compile(r"\.[0-9a-f]{16}$")  # how a file is called until it is whole


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into a sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror or error}): nothing was changed; free space or take another place, "
            "then run the same command again to go on."
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; what was there before stays until the new content is safe on the disk."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}")
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


def remove_half_written(folder: Path) -> None:
    """Delete what writes that were killed have left in a folder; nobody else may be writing there."""
    for path in folder.glob(".*"):
        if HALF_WRITTEN.search(path.name):
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Let what was renamed in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Add a line to a log, in one write: a kill leaves all of it or nothing."""
    with _told(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = f"{line}\n".encode()
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write JSON that people can read, atomically."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is anything
    """Read JSON, or say that the file is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path} ({error}): delete it and run the same command again.") from error
