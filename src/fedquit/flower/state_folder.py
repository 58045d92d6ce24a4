# SPDX-License-Identifier: Apache-2.0
"""The files of the server's state folder, and which of them must not outlive an erasure.

Every step is on disk before the next. No checkpoint from before an unlearning survives it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError
from fedquit.flower import membership, notices
from fedquit.flower.log_lines import timestamp
from fedquit.flower.sqlite_wipe import DATABASE, FOLDER, wipe_traces
from fedquit.flower.twice import TwinStateFile
from fedquit.flower.wire import PHASE_PLACES
from fedquit.running.lifecycle import Phase
from fedquit.running.session import Event
from fedquit.running.store import END, Bounds, DiskMemory, Journal, PrefixedMemory
from fedquit.utils.files import append_line, read_json, remove_half_written, write_json
from fedquit.utils.rotating_log import MAX_BYTES, rotate
from fedquit.utils.version import package_version

SETTINGS = "settings.json"
EVENTS = "events.jsonl"
PUBLISHED = "model.safetensors"  # the model at the end of a run
SERVE_LOCK = f"{FOLDER}/.lock"  # held by `fedquit flower serve` of a federation that is not closed
OF_OPERATOR = (membership.FILE, notices.FILE)  # which `fedquit flower serve` writes here at any time


class PhaseMemory(DiskMemory):
    """One memory for all phases: the places of a later phase come after those of an earlier one."""

    def __init__(self, folder: Path, number: int, bounds: Bounds | None = None) -> None:
        super().__init__(folder, bounds=bounds)
        self._offset = number * PHASE_PLACES

    def move(self, place: int) -> None:
        """Go to a place of the phase."""
        super().move(place if place == END else self._offset + place)

    def shelf(self, method: str) -> PrefixedMemory:
        """The part of one method."""
        return PrefixedMemory(self, f"{method}/")

    def stored(self, method: str) -> tuple[int, int]:
        """The bytes that a method keeps at the server, and at the clients, which the server does not know."""
        return sum(self.size_of(key) for key in self if key.startswith(f"{method}/")), 0


class StateFolder:
    """Where the server keeps models, the methods' memory, and what happened.

    Args:
        path: the folder.
        say: takes a sentence where a damaged checkpoint was read from its copy.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._say = say

    def model(self, phase: Phase) -> TwinStateFile:
        """The model of a phase, after its last round that was committed."""
        return TwinStateFile(self._of(phase) / "state.safetensors", self._say)

    def journal(self, phase: Phase) -> Journal:
        """The replies of the round at hand."""
        return Journal(self._of(phase) / "journal")

    def memory(self, phase: Phase, bounds: Bounds | None = None) -> PhaseMemory:
        """What methods keep at the server, as a phase sees it.

        Args:
            phase: which phase reads and writes it.
            bounds: how much stays in RAM until the state of the phase is stored; None: every write is on disk at once.
        """
        return PhaseMemory(self.path / "memory", phase.number, bounds)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a phase other than the first has left a checkpoint here."""
        return any(folder.name != "000000" for folder in (self.path / "phases").glob("*"))

    def _of(self, phase: Phase) -> Path:
        return self.path / "phases" / f"{phase.number:06d}"

    @property
    def before(self) -> TwinStateFile:
        """The model that a request found: methods look back at it while they unlearn; then it is deleted."""
        return TwinStateFile(self.path / "before.safetensors", self._say)

    @property
    def published(self) -> Path:
        """The model at the end of a run."""
        return self.path / PUBLISHED

    @property
    def result(self) -> Path:
        """What a run led to, as JSON."""
        return self.path / "result.json"

    def note_settings(self, config: Mapping[str, Any], started: float) -> None:
        """Write with which settings and version the server runs now, for the operator's commands."""
        write_json(self.path / SETTINGS, {"fedquit": package_version(), "started": started, "config": dict(config)})

    @property
    def last_start(self) -> float | None:
        """When the server was started the last time before `note_settings` (Unix time); None if that is not known."""
        with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
            return float(read_json(self.path / SETTINGS)["started"])
        return None

    def append(self, event: Event) -> None:
        """Add a line to the log, with the time. A log that is full becomes `events.jsonl.1`, as others do."""
        path = self.path / EVENTS
        append_line(path, json.dumps({"time": timestamp(time.time()), **event}))
        if path.stat().st_size >= MAX_BYTES:
            rotate(str(path))

    def clean(self, phase: Phase) -> None:
        """Delete every checkpoint that the phase at hand has left behind, also one that a kill left half-way."""
        current = self._of(phase)
        for folder in sorted((self.path / "phases").glob("*")):
            if folder != current:
                shutil.rmtree(folder)
        remove_half_written(self.path, OF_OPERATOR)
        remove_half_written(self.path / "memory")
        if phase.kind in ("train", "erase"):
            self.before.delete()
        if phase.kind in ("recover", "erase"):  # a model that was withdrawn goes to `erase` without a recovery
            self.published.unlink(missing_ok=True)

    def wipe_messages(self, say: Callable[[str], None]) -> bool:
        """Wipe what Flower's own database still holds of messages that it has deleted; whether that succeeded."""
        return wipe_traces(self.path / FOLDER / DATABASE, say)
