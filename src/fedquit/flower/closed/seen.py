# SPDX-License-Identifier: Apache-2.0
"""When the front last heard of each site, and what the site said of itself: a file for the operator's commands."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError
from fedquit.flower.closed.greeting import Greeting
from fedquit.flower.closed.private_files import write_private_json
from fedquit.utils.files import read_json

FILE = "seen.json"
WRITE_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class Seen:
    """The last contact with a site, its versions and its clock."""

    time: float  # Unix time of its last request that was let in
    fedquit: str = ""  # its versions, as it last said
    flower: str = ""
    skew: float = 0.0  # seconds by which its clock was ahead of ours, as it last said


@dataclass
class SeenSites:
    """The last contacts of all sites, in memory, and every few seconds on disk."""

    folder: Path
    _sites: dict[str, Seen] = field(init=False)
    _written: float = 0.0  # Unix time
    _changed: bool = False

    def __post_init__(self) -> None:
        self._sites = read_seen(self.folder)

    def note(self, name: str, now: float) -> None:
        """Set the time of the last contact; what the site said of itself stays."""
        known = self._sites.get(name, Seen(now))
        self._sites[name] = dataclasses.replace(known, time=now)
        self._changed = True

    def note_greeting(self, name: str, said: Greeting, now: float) -> None:
        """Take the versions from a site's greeting, and how far its clock is ahead of ours."""
        self._sites[name] = Seen(now, said.fedquit, said.flower, round(said.time - now, 1))
        self._changed = True

    def write_if_due(self, now: float) -> None:
        """Write what has changed, `WRITE_EVERY` seconds after the last write, or at once if the clock went back."""
        if self._changed and not 0 <= now - self._written < WRITE_EVERY:
            self._written = now
            self._changed = False
            sites = {name: dataclasses.asdict(seen) for name, seen in sorted(self._sites.items())}
            write_private_json(self.folder / FILE, sites)


def read_seen(folder: Path) -> dict[str, Seen]:
    """What the front wrote; nothing where it wrote nothing that can be read, since it writes it anew."""
    sites: dict[str, Seen] = {}
    with contextlib.suppress(StoreError, TypeError, AttributeError, ValueError):
        content: dict[str, dict[str, Any]] = read_json(folder / FILE) if (folder / FILE).exists() else {}
        sites.update({name: Seen(**value) for name, value in content.items()})
    return sites
