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
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (runs.demo, runs.run, runs.compare, runs.sweep, runs.report):
    app.command()(command)
app.command()(check)
app.command()(doctor)
app.command()(paper)
app.command(name="list")(listing.list_)
app.command()(request)
app.add_typer(studies.app, name="study")
app.add_typer(data.app, name="data")
app.add_typer(references.app, name="references")
app.add_typer(bench.app, name="bench")
app.add_typer(flower.app, name="flower")


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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Let a federation forget."""
