# SPDX-License-Identifier: Apache-2.0
"""`fedquit bench`: how fast, and how large, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.bench.measure import Bench, Figure

app = typer.Typer(help="Measure how fast and how large, on this machine.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(help="Also write the figures there, as JSON.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Repeats = Annotated[int, typer.Option(help="How often each is measured; the median counts.")]


@app.callback()
def benches() -> None:
    """Measure how fast and how large, on this machine."""


@app.command(name="eval")
def evaluation(
    device: Device = "cpu",
    repeats: Repeats = 3,
    images: Annotated[int, typer.Option(help="On a CPU: images for ResNet-18 to read, from which to scale.")] = 1_000,
    steps: Annotated[int, typer.Option(help="On a CPU: training steps, from which to scale.")] = 10,
    runs: Annotated[int, typer.Option(help="Runs in one report.")] = 200,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What the evaluation, the support-vector attack and a report over many runs cost."""
    from fedquit.bench.evaluation import Sizes, measured

    show(measured(device, repeats, Sizes(images=images, steps=steps, runs=runs)), out, as_json=as_json)


def show(bench: Bench, out: Path | None, *, as_json: bool) -> None:
    """Print the figures, and write them where asked; a limit that was not kept is exit code 1."""
    from fedquit.files import write_json

    if out is not None:
        write_json(out, bench.to_dict())
    if as_json:
        typer.echo(json.dumps(bench.to_dict()))
    else:
        _print(bench)
    if not bench.kept:
        raise typer.Exit(1)


def _print(bench: Bench) -> None:
    table = Table(title=bench.title, **LOOK)
    table.add_column("figure")
    for name in ("median", "lowest to highest", "limit", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("how")
    for figure in bench.figures:
        table.add_row(figure.name, *_cells(figure), figure.note)
    screen.print(table)
    told = bench.to_dict()
    on = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in told["machine"].items())
    screen.print(f"On {on}; {', '.join(f'{k} {v}' for k, v in told['versions'].items())}.", **PLAIN)


def _cells(figure: Figure) -> list[str]:
    spread = f"{_short(min(figure.repeats))} to {_short(max(figure.repeats))}" if len(figure.repeats) > 1 else "once"
    limit = "" if figure.limit is None else f"{figure.limit:g} {figure.unit}"
    verdict = {None: "", True: "kept", False: "NOT KEPT"}[figure.kept]
    return [f"{_short(figure.value)} {figure.unit}", spread, limit, verdict]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
