# SPDX-License-Identifier: Apache-2.0
"""Files that are kept twice, so that one bad sector ends nothing: checkpoints, the ledger, the list of clients.

Both copies hold the same round. An older checkpoint would not do: clients and methods have deleted what only an older
round could need. A kill between the two writes leaves the state that a kill before the first one leaves.

A write replaces the file, then its copy; a read takes the copy where the file is damaged or missing. Whatever deletes
a checkpoint deletes both, so that no copy brings a forgotten client's influence back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.core import State
from fedquit.errors import StoreError
from fedquit.running.params_file import Meta
from fedquit.running.store import StateFile
from fedquit.utils.files import read_json, write_json

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


def write_json_twice(path: Path, value: object) -> None:
    """Write a value as JSON to a file and then to its copy."""
    write_json(path, value)
    write_json(copy_of(path), value)


def read_json_either(path: Path, holds: str, kind: type = dict, say: Say = lambda _: None) -> Any:  # noqa: ANN401 - JSON is anything
    """Read what `write_json_twice` wrote, from whichever of the two can be read.

    Args:
        path: the file.
        holds: what would be lost with it, as the end of the sentence "it says …".
        kind: of what is written there, `dict` or `list`.
        say: takes a sentence where the copy was used.

    Raises:
        StoreError: if neither can be read.
    """
    try:
        return _read(path, kind)
    except StoreError as error:
        try:
            content = _read(copy_of(path), kind)
        except StoreError:
            raise StoreError(
                f"{path} cannot be read: restore it from a backup. Do not delete it: it says {holds}."
            ) from error
        say(f"{path} cannot be read, and its copy is used instead: look after the disk.")
        return content


def read_json_mended(path: Path, holds: str, kind: type = dict, say: Say = lambda _: None) -> Any:  # noqa: ANN401 - JSON is anything
    """Read what `write_json_twice` wrote, and write whichever of the two differs anew.

    For the one process that may write there. A kill between the two writes leaves an older copy; a bad sector leaves
    one that cannot be read, and the operator is told.
    """
    content = read_json_either(path, holds, kind, say)
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
