# SPDX-License-Identifier: Apache-2.0
"""`fedquit data`: fetch the published data sets, and check whether those on disk are complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson, err
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.data.published import Finding

app = typer.Typer(help="Fetch and check the published data sets.", no_args_is_help=True)

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data lies; else $FEDQUIT_DATA, else the user's cache folder.")
]
LINES = 10  # that a step prints where there is no terminal
COLOURS = {"complete": "green", "absent": "dim", "damaged": "red"}


class Steps:
    """Progress of one step after another: a bar with an ETA on a terminal, a few plain lines elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bars = Progress(
            TextColumn("{task.description:<40}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} % of {task.fields[amount]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, int] = {}

    def __enter__(self) -> Steps:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` of a step is done."""
        if not err.is_terminal:
            self._print(what, done, total)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(f"{self._title}: {what}", total=None, amount="")
        self._bars.update(self._tasks[what], completed=done, total=total or None, amount=_amount(total))

    def _print(self, what: str, done: int, total: int) -> None:
        step = done * LINES // total if total else 0
        if step > self._printed.get(what, -1):
            self._printed[what] = step
            share = f" {100 * done // total} % of {_amount(total)}" if total else ""
            err.print(f"{self._title}: {what}{share}", **PLAIN)


def _amount(total: int) -> str:
    """Format a count, or megabytes where it is large."""
    return f"{total / 1e6:,.1f} MB" if total >= 1e6 else f"{total:,}"


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, cub200, shakespeare or sotu.")],
    data_dir: DataDir = None,
    url: Annotated[str, typer.Option(help="Another address of the publisher's file; its checksum must fit.")] = "",
    as_json: AsJson = False,
) -> None:
    """Fetch a data set from its publisher. The same command goes on where it stopped."""
    from fedquit.data import published
    from fedquit.data.catalog import data_folder

    folder = data_folder(data_dir)
    source = published.find(name).source
    with Steps(name) as steps:
        fetched = published.get(name, folder, url=url, progress=steps)
    place = source.place(folder)
    if as_json:
        typer.echo(json.dumps({"name": name, "path": str(place), "fetched": fetched}))
        return
    screen.print(f"{source.title} is {'now' if fetched else 'already'} in {place}.", **PLAIN)


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all unless given.")] = None,
    data_dir: DataDir = None,
    fast: Annotated[bool, typer.Option("--fast", help="Do not decode every image.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check which published data sets are here and complete; exit code 1 where one is damaged."""
    from fedquit.data import published
    from fedquit.data.catalog import data_folder

    wanted = names or list(published.PUBLISHED)
    folder = data_folder(data_dir)
    findings = []
    for name in wanted:
        published.find(name)  # a wrong name is an error before the first long check
    for name in wanted:
        with Steps(name) as steps:
            findings.append(published.check(name, folder, fast=fast, progress=steps))
    if as_json:
        typer.echo(json.dumps([{**asdict(f), "path": str(f.path)} for f in findings]))
    else:
        screen.print(_table(findings))
    if any(f.state == "damaged" for f in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table(**LOOK)
    for column in ("set", "state", "where", "details"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = f"[{COLOURS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, state, escape(str(finding.path)), escape(finding.details))
    return table
