# SPDX-License-Identifier: Apache-2.0
"""The command line. Heavy imports stay inside the commands, so that `--help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from fedquit import __version__
from fedquit.cli import bench, data, flower, listing, references, runs, studies
from fedquit.cli.check import check
from fedquit.cli.doctor import doctor
from fedquit.cli.paper import paper
from fedquit.cli.request import request
from fedquit.cli.screen import err
from fedquit.errors import FedquitError

app = typer.Typer(
    help="Let a federation forget: train, take an erasure request, unlearn, recover, and see what was forgotten.",
    epilog="Begin with `fedquit demo`. For a model of your own without a federation: fedquit.forget, from Python.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does, too
)
START, RESEARCH, OPERATE = "Begin here", "Run, compare and report", "Run a federation"
app.command(rich_help_panel=START)(runs.demo)
app.command(rich_help_panel=START)(doctor)
app.command(name="list", rich_help_panel=START)(listing.list_)
for command in (runs.run, runs.compare, runs.sweep, runs.report, check, paper):
    app.command(rich_help_panel=RESEARCH)(command)
app.add_typer(studies.app, name="study", rich_help_panel=RESEARCH)
app.add_typer(data.app, name="data", rich_help_panel=RESEARCH)
app.add_typer(references.app, name="references", rich_help_panel=RESEARCH)
app.add_typer(bench.app, name="bench", rich_help_panel=RESEARCH)
app.add_typer(flower.app, name="flower", rich_help_panel=OPERATE)
app.command(rich_help_panel=OPERATE)(request)


def main() -> None:
    """Run a command; an error that a user can correct is one sentence and exit code 2."""
    try:
        app()
    except FedquitError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("stopped.")
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedquit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Let a federation forget."""
