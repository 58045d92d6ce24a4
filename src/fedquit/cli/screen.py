# SPDX-License-Identifier: Apache-2.0
"""What every command shares: where it prints, how it shows progress, how its tables look."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

err = Console(stderr=True)
out = Console() if sys.stdout.isatty() else Console(width=170)  # a file has no width; tables want some
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
LOOK: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": SIMPLE, "pad_edge": False}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class News(logging.Handler):
    """What the package reports beside its results, such as the engine it chose: each line once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            err.print(line, **PLAIN)


class Bars:
    """Progress with an ETA on a terminal; plain lines elsewhere."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<40}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=err,
            disable=not err.is_terminal,
        )
        self._overall: TaskID | None = None
        self._lanes: dict[int, _Lane] = {}
        self._news, self._level = News(), logging.NOTSET

    def __enter__(self) -> Bars:
        self._bars.start()
        logger = logging.getLogger("fedquit")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self._news)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("fedquit")
        logger.removeHandler(self._news)
        logger.setLevel(self._level)
        self._bars.stop()

    def runs(self, done: int, total: int, title: str) -> None:
        """So many runs of a comparison are over; the bars of the one that ran here go, the overall one stays."""
        if self._overall is None:
            self._overall = self._bars.add_task("Comparison", total=total, note="")
        self.lane(0).clear()
        self._bars.update(self._overall, completed=done, note=title)
        if not err.is_terminal:
            err.print(f"[{done}/{total}] {title}", **PLAIN)

    def lane(self, number: int) -> _Lane:
        """Where the work of one of several processes is shown; 0 is also this one's."""
        if number not in self._lanes:
            self._lanes[number] = _Lane(self._bars, f"({number}) " if number else "")
        return self._lanes[number]

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins."""
        self.lane(0).phase(title, rounds, done)

    def round(self, done: int, note: str) -> None:
        """A round is over."""
        self.lane(0).round(done, note)


class _Lane:
    """The bars of one run."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars, self._name = bars, name
        self._tasks: list[TaskID] = []
        self._total = 0

    def clear(self) -> None:
        """A new run begins."""
        for task in self._tasks:
            self._bars.remove_task(task)
        self._tasks = []

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins."""
        self._total = rounds or 0
        if self._name:  # one of several: a line for each
            self.clear()
        self._tasks.append(self._bars.add_task(self._name + title, total=rounds, completed=done, note=""))
        if not err.is_terminal:
            ready = " (done already)" if rounds and done >= rounds else ""
            err.print(f"{self._name}{title}{ready}", **PLAIN)

    def round(self, done: int, note: str) -> None:
        """A round is over."""
        if self._tasks:
            self._bars.update(self._tasks[-1], completed=done, note=note)
        if not err.is_terminal and (note or done % 10 == 0):
            of = f" of {self._total}" if self._total else ""
            err.print(f"  {self._name}round {done}{of} {note}".rstrip(), **PLAIN)
