# SPDX-License-Identifier: Apache-2.0
"""`fedquit study`: many runs from one file, on machines that may be taken away at any moment."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedquit.cli.data import DataDir
from fedquit.cli.options import study_names
from fedquit.cli.references import RetrainFrom
from fedquit.cli.screen import LOOK, PLAIN, AsJson, Bars, in_words
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.results.study_folder import StudyFolder, StudyStatus

app = typer.Typer(help="Carry out a study: many runs from one file, in several sittings.", no_args_is_help=True)
NOT_FINISHED = 3  # the exit code of a study whose time was up
SHOWN = 10  # failed units that are named, at most


@app.command()
def run(
    study: Annotated[
        str,
        typer.Argument(
            help="A .toml file, or the name of a study that comes with the package.", autocompletion=study_names
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the study; the same command goes on where it stopped.")],
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which to stop at the end of a round, with exit code 3.", min=0)
    ] = None,
    workers: Annotated[str, typer.Option(help="Processes that share the work; or ray, for a cluster.")] = "1",
    state: Annotated[
        Path | None, typer.Option(help="Where trainings and unfinished units are kept; else state in --out.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run units again that failed.")] = False,
    data_dir: DataDir = None,
    partition_dir: Annotated[
        Path | None, typer.Option(help="Where the partition files that the study names lie; else beside it.")
    ] = None,
    retrain_from: RetrainFrom = None,
    record_retrains: Annotated[
        bool, typer.Option("--record-retrains", help="Record Retrains that are trained in the folder of bundles.")
    ] = False,
    ray_address: Annotated[
        str, typer.Option(help="Of the Ray cluster; else the one that $RAY_ADDRESS names, or this machine alone.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Carry out a study, or go on with it: settings x targets x seeds x methods, each finished unit kept.

    Exit code 0: all is done. 1: units failed. 3: the time was up, and the same command goes on.
    """
    from fedquit.results.study_folder import StudyFolder
    from fedquit.studies.execution import run_study
    from fedquit.studies.plan import expand, load_study

    plan = expand(load_study(study), folder=Path(study).parent, data_dir=data_dir, partitions=partition_dir)
    with _stopped_by_signal() as stop, Bars("Study") as bars:
        outcome = run_study(
            plan,
            out,
            overview=bars,
            state=state,
            time_limit=time_limit,
            workers=workers,
            address=ray_address,
            retry_failed=retry_failed,
            is_stopped=stop.is_set,
            retrain_from=retrain_from,
            record=record_retrains,
        )
    _print(StudyFolder.read(out), outcome.status, as_json=as_json)
    if outcome.stopped:
        if not as_json:
            screen.print("Not finished: its time was up. The same command goes on.", **PLAIN)
        raise typer.Exit(NOT_FINISHED)
    if outcome.status.failed or outcome.status.blocked:
        raise typer.Exit(1)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    as_json: AsJson = False,
) -> None:
    """Say what of a study is done, missing and failed, and how long the rest should take."""
    from fedquit.results.study_folder import StudyFolder, study_status

    study = StudyFolder.read(folder)
    _print(study, study_status(study), as_json=as_json)


class _Stop:
    """Whether the process was asked to end."""

    def __init__(self) -> None:
        self._asked = False

    def is_set(self) -> bool:
        return self._asked

    def set(self, *_: object) -> None:
        self._asked = True


@contextmanager
def _stopped_by_signal() -> Iterator[_Stop]:
    """Take SIGTERM, which a machine that is taken away sends, as the end of the time."""
    stop = _Stop()
    before = signal.signal(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(study: StudyFolder, status: StudyStatus, *, as_json: bool) -> None:
    from fedquit.results.bundles import RETRAIN_FROM, bundle_notes

    if as_json:
        typer.echo(json.dumps(status.to_dict()))
        return
    screen.print(status_table(study, status))
    for name, why in list(status.failed.items())[:SHOWN]:
        screen.print(f"[bold]{escape(name)}[/] failed: {escape(why)}", highlight=False, soft_wrap=True)
    if len(status.failed) > SHOWN:
        screen.print(f"… and {len(status.failed) - SHOWN} more that failed.", **PLAIN)
    if status.failed:
        screen.print("`fedquit study run` with --retry-failed runs them again.", **PLAIN)
    if len(status.codes) > 1:
        screen.print(f"Made by {len(status.codes)} versions of fedquit: {', '.join(status.codes)}.", **PLAIN)
    records = (study.record(unit) for unit in study.units if unit.kind == "retrain")
    for note in bundle_notes(record.get(RETRAIN_FROM) for record in records if record):
        screen.print(note, **PLAIN)
    screen.print(time_left(status), **PLAIN)


def status_table(study: StudyFolder, status: StudyStatus) -> Table:
    """The units by setting and kind, as a table for the terminal.

    Args:
        study: With the plan.
        status: How far it is.
    """
    table = Table(title=escape(status.title) or "Study", **LOOK)
    for name in ("setting", "units"):
        table.add_column(name, no_wrap=True)
    for name in ("done", "missing", "failed", "waiting for a failed one"):
        table.add_column(name, justify="right")
    sets = (set(status.done), set(status.missing), set(status.failed), set(status.blocked))
    for setting, kind in dict.fromkeys((unit.setting, unit.kind) for unit in study.units):
        names = {unit.name for unit in study.units if (unit.setting, unit.kind) == (setting, kind)}
        counts = [str(len(names & those)) for those in sets]
        table.add_row(escape(setting), kind, *counts)
    return table


def time_left(status: StudyStatus) -> str:
    """The time that finished units took, and an estimate for the others, in a sentence."""
    if not status.done:
        return f"No unit is finished yet; {len(status.missing)} are left."
    spent = f"{len(status.done)} units took {in_words(status.seconds_spent)}"
    if not status.missing:
        return f"{spent}; nothing is left to run."
    if status.seconds_left is None:
        return f"{spent}; {len(status.missing)} are left, and none like them is finished yet."
    more = f", and {status.unknown} that none finished is like" if status.unknown else ""
    known = len(status.missing) - status.unknown
    return f"{spent}; {known} more should take one process about {in_words(status.seconds_left)}{more}."
