# SPDX-License-Identifier: Apache-2.0
"""What every command shares: the terminal, progress bars, and the style of tables."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
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
    """Prints what the package logs, such as the engine it chose: each line once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message that was not printed before."""
        line = record.getMessage()
        if line not in self._printed:
            self._printed.add(line)
            err.print(line, **PLAIN)


class Pace:
    """How long all units of some work will take, from the time that the finished ones took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: tuple[float, int] | None = None  # when the first report came, and how many units were done then

    def left(self, done: int, total: int) -> float | None:
        """The seconds that are left, or None until a unit was finished, and at the end.

        Args:
            done: Units that are over.
            total: All units.
        """
        now = self._clock()
        if self._begun is None:
            self._begun = (now, done)
        since, before = self._begun
        if done <= before or done >= total:
            return None
        return (now - since) / (done - before) * (total - done)


class Bars:
    """Progress with an ETA on a terminal; plain lines elsewhere."""

    def __init__(self, name: str = "Comparison") -> None:
        """Prepare the bars.

        Args:
            name: Of the work that consists of several runs.
        """
        self._name = name
        self._pace = Pace()
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
        self._news = News()
        self._level = logging.NOTSET

    def __enter__(self) -> Bars:
        self._bars.start()
        logger = logging.getLogger("fedquit")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self._news)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        logger = logging.getLogger("fedquit")
        logger.removeHandler(self._news)
        logger.setLevel(self._level)
        self._bars.stop()
        if kind is KeyboardInterrupt:  # the command line turns it into exit code 130
            err.print("Stopped. The same command goes on where it stopped.", **PLAIN)

    def runs(self, done: int, total: int, title: str) -> None:
        """Show how many runs are over and how long the others will take, and remove the bars of the last run."""
        if self._overall is None:
            self._overall = self._bars.add_task(self._name, total=total, note="")
        self.lane(0).clear()
        left = self._pace.left(done, total)
        words = title if left is None else f"{title}; about {in_words(left)} left for all"
        self._bars.update(self._overall, completed=done, note=words)
        if not err.is_terminal:
            err.print(f"[{done}/{total}] {words}", **PLAIN)

    def lane(self, number: int) -> _Lane:
        """The bars of one of several processes, from 1 on; 0 is this process."""
        if number not in self._lanes:
            self._lanes[number] = _Lane(self._bars, f"({number}) " if number else "")
        return self._lanes[number]

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """Show that a phase begins, with so many rounds, of which some are done."""
        self.lane(0).phase(title, rounds, done)

    def round(self, done: int, note: str) -> None:
        """Show that so many rounds are done."""
        self.lane(0).round(done, note)


def in_words(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Lane:
    """The bars of the run in one process."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars = bars
        self._name = name
        self._tasks: list[TaskID] = []
        self._total = 0

    def clear(self) -> None:
        """Remove the bars of the run before."""
        for task in self._tasks:
            self._bars.remove_task(task)
        self._tasks = []

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """Add a bar for a phase; with several processes, in place of the one before."""
        self._total = rounds or 0
        if self._name:  # one of several processes: a line for each
            self.clear()
        self._tasks.append(self._bars.add_task(self._name + title, total=rounds, completed=done, note=""))
        if not err.is_terminal:
            ready = " (done already)" if rounds and done >= rounds else ""
            err.print(f"{self._name}{title}{ready}", **PLAIN)

    def round(self, done: int, note: str) -> None:
        """Move the bar, and print a line every ten rounds where there is no terminal."""
        if self._tasks:
            self._bars.update(self._tasks[-1], completed=done, note=note)
        if not err.is_terminal and (note or done % 10 == 0):
            of = f" of {self._total}" if self._total else ""
            err.print(f"  {self._name}round {done}{of} {note}".rstrip(), **PLAIN)
