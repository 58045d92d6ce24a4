# SPDX-License-Identifier: Apache-2.0
"""`fedquit references`: make reference bundles, and show what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedquit.cli.options import on_a_recipe
from fedquit.cli.screen import LOOK, PLAIN, AsJson, Bars
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.results.bundles import Bundle, Reference
    from fedquit.running.recipe import Recipe

app = typer.Typer(help="Record Original and Retrain once, for everybody to judge methods by.", no_args_is_help=True)

RetrainFrom = Annotated[
    Path | None,
    typer.Option(help="A folder of reference bundles: Retrain is taken from it, not trained (docs/references.md)."),
]


@app.command()
@on_a_recipe
def make(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the bundle; the same command goes on where it stopped.")],
    targets: Annotated[str, typer.Option(help="Whose Retrains: 0,1,2, or 0+1,2+3 for pairs, or all.")] = "all",
    retrain_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the Retrains of each target, as 0,1,2; else the recipe's.")
    ] = None,
    original_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the Originals, as 0,1,2; else the recipe's.")
    ] = None,
    without_original: Annotated[bool, typer.Option("--without-original", help="Record Retrains alone.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which training stops at the end of its round.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where unfinished trainings lie, with weights; else beside --out.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that train at once.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Train Original and Retrains, and record their last ten rounds and per-example scores."""
    from fedquit.cli.runs import _set_threads
    from fedquit.running.setup import build_setup
    from fedquit.studies.bundles import make_bundle, units_of
    from fedquit.studies.comparison import parse_targets

    _set_threads(recipe)
    chosen = parse_targets(targets)
    leaving = list(build_setup(recipe).data.clients) if chosen is None else chosen
    originals = [] if without_original else _seeds(original_seeds, recipe.seed, "--original-seeds")
    units = units_of(recipe, leaving, _seeds(retrain_seeds, recipe.seed, "--retrain-seeds"), originals)
    with Bars("References") as bars:
        made = make_bundle(
            recipe,
            units,
            leaving,
            out,
            state=state,
            time_limit=time_limit,
            jobs=max(1, jobs),
            reporter=bars,
            lane=bars.lane,
        )
    if as_json:
        typer.echo(json.dumps({"done": [unit.name for unit in made.done], "left": [unit.name for unit in made.left]}))
        return
    screen.print(f"Recorded {len(made.done)} of {len(units)}: {out}", **PLAIN)
    if made.left:
        screen.print("The time is up; the same command goes on.", **PLAIN)


def _seeds(text: str | None, default: int, option: str) -> list[int]:
    """The seeds in "0,1,2"."""
    from fedquit.errors import InputError

    if text is None:
        return [default]
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise InputError(f"{option} {text!r} is not a list of seeds: write, for example, 0,1,2.") from error


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A bundle, or a folder of bundles.")],
    as_json: AsJson = False,
) -> None:
    """Check a bundle, scores included, and list its models."""
    from fedquit.results.bundles import read_bundle

    bundle = read_bundle(folder)
    lines = [_line(bundle, reference) for reference in bundle.references]
    if as_json:
        typer.echo(json.dumps(lines))
        return
    table = Table(title=f"References in {escape(str(folder))} (accuracies in %)", **LOOK)
    for name in ("bundle", "model", "without", "seed"):
        table.add_column(name, no_wrap=True)
    for name in ("rounds", "test", "forget", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("made by")
    for line in lines:
        accuracies = ["" if line[key] is None else f"{line[key]:.1f}" for key in ("test_acc", "forget_acc")]
        size = f"{line['bytes'] / 1e6:.2f} MB"
        words = [line["bundle"], line["model"], line["without"], str(line["seed"]), str(line["rounds"])]
        table.add_row(*map(escape, words), *accuracies, size, escape(line["made_by"]))
    screen.print(table)
    total = sum(line["bytes"] for line in lines)
    screen.print(f"{len(lines)} models, {total / 1e6:.1f} MB, all of them whole.", **PLAIN)
    off = [line["auc_off"] for line in lines if line["auc_off"] is not None]
    if off:
        screen.print(f"Half precision moves an AUC of forget data by at most {max(off):.5f}.", **PLAIN)


def _line(bundle: Bundle, reference: Reference) -> dict[str, Any]:
    """What is shown of a model; its scores are read, and so checked."""
    from fedquit.audit.half_precision import auc_uncertainty
    from fedquit.results.bundles import target_name
    from fedquit.results.schema import number

    scores = reference.scores
    forget = scores.get("forget")
    outsiders = scores.get("holdout", scores.get("test"))
    last = next(iter(reference.rows.values()))[-1]
    retrain = reference.role == "retrained"
    folder = reference.file.parent
    return {
        "bundle": folder.name if folder == bundle.folder else str(folder.relative_to(bundle.folder)),
        "file": str(reference.file.relative_to(bundle.folder)),
        "model": "Retrain" if retrain else "Original",
        "without": target_name(reference.clients) + (" (samples)" if reference.samples else ""),
        "seed": reference.seed,
        "rounds": reference.final_rounds,
        "recorded": len(next(iter(reference.rows.values()))),
        "test_acc": number(last.get("test_acc")),
        "forget_acc": number(last.get("forget_acc")) if retrain else None,
        "auc_off": auc_uncertainty(forget["phi"], outsiders["phi"]) if forget and outsiders else None,
        "bytes": reference.file.stat().st_size + reference.scores_file.stat().st_size,
        "key": None if reference.key is None else vars(reference.key),
        "training_hash": reference.stored.get("training_hash"),
        "made_by": reference.made_by,
    }
