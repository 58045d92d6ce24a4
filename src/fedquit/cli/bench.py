# SPDX-License-Identifier: Apache-2.0
"""`fedquit bench`: times and memory on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedquit.cli.data import DataDir
from fedquit.cli.screen import LOOK, PLAIN, AsJson
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedquit.bench.measure import Bench, Figure

app = typer.Typer(help="Measure times and memory on this machine.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(help="Also write the figures there, as JSON.")]
OutFolder = Annotated[Path | None, typer.Option(help="Also write JSON and a plot into this folder.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Repeats = Annotated[int, typer.Option(help="How often each is measured; the median counts.")]


@app.callback()
def benches() -> None:
    """Measure times and memory on this machine."""


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
    """Measure the evaluation, the support-vector attack and a report over many runs."""
    from fedquit.bench.evaluation import Sizes, measured

    show(measured(device, repeats, Sizes(images=images, steps=steps, runs=runs)), out, as_json=as_json)


@app.command(name="data")
def data(data_dir: DataDir = None, repeats: Repeats = 3, out: Out = None, as_json: AsJson = False) -> None:
    """Measure loading CIFAR-100, the memory of a hundred clients, and the input's part of a training step."""
    from fedquit.bench.data import measured

    show(measured(data_dir, repeats), out, as_json=as_json)


@app.command(name="round")
def round_(
    device: Device = "cpu",
    peers: Annotated[str, typer.Option(help="Other frameworks, with commas between: flower, pfl, fluke.")] = "",
    turns: Annotated[int, typer.Option(help="How often each is measured.")] = 7,
    steps: Annotated[int, typer.Option(help="On a CPU: steps a client of ResNet-18, from which to scale.")] = 10,
    large: Annotated[bool, typer.Option(help="Also the ResNet-18.")] = True,
    only: Annotated[str, typer.Option(help="One setting: digits, cifar, text or transformer.")] = "",
    out: OutFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure a round of training: our engines, a plain loop and other frameworks, taking turns."""
    from fedquit.bench.rounds import drawn, measured
    from fedquit.utils.files import write_json

    def written(bench: Bench) -> None:
        if out is not None:
            write_json(out / "round.json", bench.to_dict())

    others = [name.strip() for name in peers.split(",") if name.strip()]
    bench = measured(device, peers=others, only=only, turns=turns, steps=steps, large=large, tell=written)
    _write(bench, "round", out, as_json, drawn)


@app.command(name="unlearn")
def unlearn(
    device: Device = "cpu",
    repeats: Repeats = 3,
    steps: Annotated[int, typer.Option(help="On a CPU: steps of ResNet-18, from which to scale.")] = 10,
    out: OutFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure FedQUIT's unlearning round on 5,000 images and the evaluation of 60,000."""
    from fedquit.bench.scale import bars, unlearning

    _write(unlearning(device, repeats=repeats, steps=steps), "unlearn", out, as_json, bars)


@app.command(name="scale")
def scale(device: Device = "cpu", repeats: Repeats = 3, out: OutFolder = None, as_json: AsJson = False) -> None:
    """Check, with a thousand clients, that the cost grows linearly and the server holds few replies at once."""
    from fedquit.bench.scale import drawn, scaling

    _write(scaling(device, repeats=repeats), "scale", out, as_json, drawn)


@app.command(name="attached")
def attached(
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(help="Of each training; 0: 20 on a GPU, 6 on a CPU.")] = 0,
    steps: Annotated[int, typer.Option(help="On a CPU: steps of each of two clients of ResNet-18.")] = 10,
    folder: Annotated[Path | None, typer.Option(help="Where to write, and delete, what the methods keep.")] = None,
    out: OutFolder = None,
    as_json: AsJson = False,
) -> None:
    """What the methods that watch a training cost it: a round with and without them, taking turns."""
    from fedquit.bench.attached import measured

    _write(measured(device, rounds=rounds, steps=steps, folder=folder), "attached", out, as_json)


@app.command(name="agree")
def agree(device: Device = "cpu", out: OutFolder = None, as_json: AsJson = False) -> None:
    """Check that every engine computes what the sequential one does; exit code 1 where it does not."""
    from fedquit.bench.agree import measured

    _write(measured(device), "agree", out, as_json)


def _write(
    bench: Bench, name: str, out: Path | None, as_json: bool, drawn: Callable[[Bench, Path], None] | None = None
) -> None:
    """Show the figures; where a folder is given, write them there and draw them."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if drawn is not None:
            drawn(bench, out / f"{name}.png")
    show(bench, out / f"{name}.json" if out is not None else None, as_json=as_json)


def show(bench: Bench, out: Path | None, *, as_json: bool) -> None:
    """Print the figures, write them to `out` if given, and exit with code 1 where a limit was not kept."""
    from fedquit.utils.files import write_json

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
    record = bench.to_dict()
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in record["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    screen.print(f"On {machine}; {versions}.", **PLAIN)


def _cells(figure: Figure) -> list[str]:
    spread = f"{_short(min(figure.repeats))} to {_short(max(figure.repeats))}" if len(figure.repeats) > 1 else "once"
    limit = "" if figure.limit is None else f"{figure.limit:g} {figure.unit}"
    verdict = {None: "", True: "kept", False: "NOT KEPT"}[figure.kept]
    return [f"{_short(figure.value)} {figure.unit}", spread, limit, verdict]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
