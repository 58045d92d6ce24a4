# SPDX-License-Identifier: Apache-2.0
"""`fedquit check`: the acceptance test of an unlearning method, whoever wrote it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson, err
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.check.report import Report

COLOURS = {"kept": "green", "broken": "bold red", "skipped": "dim", "shown": "none"}


def check(
    method: Annotated[
        str, typer.Argument(help="module:Class, found on PYTHONPATH, or a name of `fedquit list methods`.")
    ],
    settings: Annotated[list[str], typer.Option("--set", help="Change an option of the method: --set lr=3e-4")] = [],  # noqa: B006 - typer copies it
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds: without processes that are killed, Flower and the embedded data.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check an unlearning method: what it reads, keeps and costs, and whether it repeats and survives kills.

    Exit code 1 where a contract is broken.
    """
    from fedquit.check.suite import check_method

    try:
        with err.status("contract") as status:
            report = check_method(method, settings, quick=quick, tell=status.update)
    except KeyboardInterrupt:
        err.print("stopped; the same command begins anew.")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print(report)
    if not report.kept:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    options = ", ".join(f"{key} = {value}" for key, value in report.options.items())
    screen.print(f"{report.method}: {options or 'no options'}", **PLAIN)
    screen.print(_parts(report))
    for violation in report.violations:
        line = f"[bold red]{escape(violation.part)}[/]: {escape(violation.line)}"
        screen.print(line, highlight=False, soft_wrap=True)
    if report.violations:
        screen.print("", **PLAIN)
    for outcome in report.requests:
        if outcome.outcome == "refused":
            screen.print(f"{outcome.request} is refused: {outcome.reason}", **PLAIN)
    if report.costs:
        screen.print(_costs(report))
    if report.behaviour:
        screen.print(_behaviour(report))
        screen.print(report.part("behaviour").note[:1].upper() + report.part("behaviour").note[1:] + ".", **PLAIN)
    screen.print(_verdict(report), **PLAIN)


def _parts(report: Report) -> Table:
    table = Table(title=f"fedquit check, {report.form} form, {report.seconds:.0f} s", **LOOK)
    for name in ("part", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("what was looked at, or why not")
    for part in report.parts:
        colour = COLOURS[part.status]
        table.add_row(part.name, f"[{colour}]{part.status}[/]", escape(part.note))
    return table


def _costs(report: Report) -> Table:
    from fedquit.results.words import scaled

    table = Table(title="Costs from the meter, in the small federation", **LOOK)
    for name in ("request", "phase"):
        table.add_column(name, no_wrap=True)
    heads = ("rounds", "down", "up", "participations", "client epochs", "server epochs", "FLOPs")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for line in report.costs:
        table.add_row(
            line.request,
            line.phase,
            str(line.rounds),
            scaled(line.down_bytes, "B"),
            scaled(line.up_bytes, "B"),
            str(line.participations),
            f"{line.client_epochs:g}",
            f"{line.server_epochs:g}",
            scaled(line.client_flops + line.server_flops, ""),
        )
    return table


def _behaviour(report: Report) -> Table:
    from fedquit.results.words import fixed, scaled

    title = "Fashion-MNIST with wrong labels, one of four clients leaves (accuracies in %)"
    table = Table(title=title, **LOOK)
    for name in ("method", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("test", "forget", "rounds", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in report.behaviour:
        accuracies = fixed(line.test_accuracy), fixed(line.forget_accuracy)
        table.add_row(escape(line.method), line.phase, *accuracies, str(line.rounds), scaled(line.bytes, "B"))
    return table


def _verdict(report: Report) -> str:
    skipped = [part.name for part in report.parts if part.status == "skipped"]
    without = f" Not judged: {', '.join(skipped)}." if skipped else ""
    broken = len(report.violations)
    if not broken:
        return f"Every contract that was looked at is kept.{without}"
    return f"{broken} contract{'s are' if broken > 1 else ' is'} broken.{without}"
