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
        self._task: TaskID | None = None
        self._overall: TaskID | None = None
        self._title, self._total = "", 0
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
        """One run of a comparison begins: the bars of the last one go, the overall one stays."""
        if self._overall is None:
            self._overall = self._bars.add_task("Comparison", total=total, note="")
        for task in [t.id for t in self._bars.tasks if t.id != self._overall]:
            self._bars.remove_task(task)
        self._bars.update(self._overall, completed=done, note=title)
        if not err.is_terminal:
            err.print(f"[{done}/{total}] {title}", **PLAIN)

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins."""
        self._title, self._total = title, rounds or 0
        self._task = self._bars.add_task(title, total=rounds, completed=done, note="")
        if not err.is_terminal:
            ready = " (done already)" if rounds and done >= rounds else ""
            err.print(f"{title}{ready}", **PLAIN)

    def round(self, done: int, note: str) -> None:
        """A round is over."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, note=note)
        if not err.is_terminal and (note or done % 10 == 0):
            of = f" of {self._total}" if self._total else ""
            err.print(f"  round {done}{of} {note}".rstrip(), **PLAIN)
