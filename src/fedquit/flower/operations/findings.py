# SPDX-License-Identifier: Apache-2.0
"""What a doctor finds: what is wrong, and what to do next. Shared by the server's doctor and the site's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedquit.flower.operations.observed import disks
from fedquit.utils.files import open_to_others

Level = Literal["error", "warning"]
LOW_FRACTION = 0.05  # of a disk that should be free
LOW_BYTES = 1 << 30
MOST_NAMED = 3  # files of a kind that are named


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    level: Level  # an error keeps the federation or a member from working, or opens it
    what: str  # a sentence without its full stop
    then: str  # what to do next, a sentence

    @property
    def sentence(self) -> str:
        """Both."""
        return f"{self.what}: {self.then}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def error(what: str, then: str) -> Finding:
    """Something that keeps the federation or a member from working, or opens it to others."""
    return Finding("error", what, then)


def warning(what: str, then: str) -> Finding:
    """Something that will do so, or may."""
    return Finding("warning", what, then)


def from_sentence(sentence: str) -> Finding:
    """An error's sentence, which says what to do after its first colon that ends a clause."""
    what, _, then = sentence.partition(": ")
    return error(what, then or "see the log.")


def wrong_modes(*folders: Path) -> Iterator[Finding]:
    """Files that other users of the machine can read."""
    for folder in folders:
        opened = open_to_others(folder)
        if opened:
            named = ", ".join(str(path) for path in opened[:MOST_NAMED])
            more = f" and {len(opened) - MOST_NAMED} more" if len(opened) > MOST_NAMED else ""
            yield error(f"other users of this machine can read {named}{more}", f"run `chmod -R go= {folder}`.")


def low_disks(*folders: Path) -> Iterator[Finding]:
    """File systems that are nearly full."""
    for disk in disks(*folders):
        if disk.free < LOW_BYTES or disk.free_fraction < LOW_FRACTION:
            yield warning(
                f"the disk of {disk.path} has {disk.free / LOW_BYTES:.1f} GiB left of {disk.total / LOW_BYTES:.0f}",
                "free space before it is full; nothing in the state directory may be deleted.",
            )
