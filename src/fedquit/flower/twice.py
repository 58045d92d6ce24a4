# SPDX-License-Identifier: Apache-2.0
"""Files that are kept twice, so that one bad sector ends nothing: checkpoints, the ledger, the list of clients.

Both copies hold the same round. An older checkpoint would not do: clients and methods have deleted what only an older
round could need. A kill between the two writes leaves the state that a kill before the first one leaves.

A write replaces the file, then its copy; a read takes the copy where the file is damaged or missing. Whatever deletes
a checkpoint deletes both, so that no copy brings a forgotten client's influence back.

Checkpoints hold a checksum of themselves. That of a JSON file lies beside it and is written first: a changed byte that
leaves valid JSON, such as another number, is found as well. A kill after it leaves two equal files, which count.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.core import State
from fedquit.errors import StoreError
from fedquit.running.params_file import Meta
from fedquit.running.store import StateFile
from fedquit.utils.files import json_bytes, read_json, write_atomic, write_json

Say = Callable[[str], None]
RESTORE_STATE = (
    "restore the whole state directory from a backup that was made after the last erasure, and keep this one: it says "
    "who was forgotten"
)


def copy_of(path: Path) -> Path:
    """Where the second copy of a file lies."""
    return path.with_name(f"{path.stem}.copy{path.suffix}")


def kept(path: Path) -> bool:
    """Whether a file, or its copy, is there."""
    return path.exists() or copy_of(path).exists()


def checksum_of(path: Path) -> Path:
    """Where the checksum of a JSON file lies."""
    return path.with_suffix(".sha256")


def write_json_twice(path: Path, value: object) -> None:
    """Write a value as JSON to a file and then to its copy, after the checksum of both."""
    write_atomic(checksum_of(path), _checksum(json_bytes(value)))
    write_json(path, value)
    write_json(copy_of(path), value)


def _checksum(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}\n".encode()


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def _in_order(path: Path) -> tuple[Path, Path]:
    """The file and its copy; the copy first where its checksum fits and that of the file does not."""
    copy = copy_of(path)
    expected = _content(checksum_of(path))
    is_intact = [_checksum(_content(file)) == expected for file in (path, copy)]
    return (copy, path) if is_intact == [False, True] else (path, copy)


def read_json_either(path: Path, holds: str, kind: type = dict, say: Say = lambda _: None) -> Any:  # noqa: ANN401 - JSON is anything
    """Read what `write_json_twice` wrote, from whichever of the two is intact.

    Args:
        path: the file.
        holds: what would be lost with it, as the end of the sentence "it says …".
        kind: of what is written there, `dict` or `list`.
        say: takes a sentence where the copy was used.

    Raises:
        StoreError: if neither can be read.
    """
    damaged: list[StoreError] = []
    for file in _in_order(path):
        try:
            content = _read(file, kind)
        except StoreError as error:
            damaged.append(error)
            continue
        if file != path:
            say(f"{path} is damaged or gone, and its copy is used instead: look after the disk.")
        return content
    raise StoreError(
        f"{path} cannot be read: restore it from a backup. Do not delete it: it says {holds}."
    ) from damaged[0]


def read_json_mended(path: Path, holds: str, kind: type = dict, say: Say = lambda _: None) -> Any:  # noqa: ANN401 - JSON is anything
    """Read what `write_json_twice` wrote, and write whatever differs anew.

    For the one process that may write there. A kill between two writes leaves an older copy; a bad sector leaves one
    that cannot be read, and the operator is told.
    """
    content = read_json_either(path, holds, kind, say)
    checksum = _checksum(json_bytes(content))
    if _content(checksum_of(path)) != checksum:
        write_atomic(checksum_of(path), checksum)
    for file in (path, copy_of(path)):
        try:
            is_same = _read(file, kind) == content
        except StoreError:
            is_same = False
            if file != path:
                say(f"{file} cannot be read and is written anew from {path.name}: look after the disk.")
        if not is_same:
            write_json(file, content)
    return content


def _read(path: Path, kind: type) -> Any:  # noqa: ANN401 - JSON is anything
    content = read_json(path)
    if not isinstance(content, kind):
        raise StoreError(f"{path} holds something else.")
    return content


@dataclass(frozen=True)
class TwinStateFile(StateFile):
    """A checkpoint that is kept twice."""

    say: Say = lambda _: None

    @property
    def copy(self) -> StateFile:
        """The second copy."""
        return StateFile(copy_of(self.path))

    @property
    def exists(self) -> bool:
        """Whether one of the two is there."""
        return kept(self.path)

    def save(self, state: State, seconds: float, costs: Meta | None = None) -> None:
        super().save(state, seconds, costs)
        self.copy.save(state, seconds, costs)

    def load(self) -> tuple[State, float, Meta] | None:
        damaged: list[StoreError] = []
        for file in (StateFile(self.path), self.copy):
            try:
                stored = file.load()
            except StoreError as error:
                damaged.append(error)
                continue
            if stored is not None:
                if damaged or file.path != self.path:
                    self.say(f"the checkpoint {self.path} is damaged or gone; its copy is used: look after the disk.")
                    super().save(*stored)
                return stored
        if damaged:
            sentence = f"the checkpoint {self.path} cannot be read, nor its copy: {RESTORE_STATE}."
            raise StoreError(sentence) from damaged[0]
        return None

    def delete(self) -> None:
        """Delete the file and its second copy."""
        self.path.unlink(missing_ok=True)
        self.copy.path.unlink(missing_ok=True)
