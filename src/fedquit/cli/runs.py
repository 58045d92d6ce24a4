# SPDX-License-Identifier: Apache-2.0
"""Commands that carry out recipes: run, demo, report, sweep, compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedquit.cli.options import Cache, on_a_recipe
from fedquit.cli.screen import LOOK, PLAIN, AsJson, Bars
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.running.recipe import Recipe
    from fedquit.studies.comparison_table import Line
    from fedquit.studies.sweep import Sweep


def _carry_out(recipe: Recipe, out: Path, cache: Path | None, *, as_json: bool) -> None:
    from fedquit.report import write_report
    from fedquit.running.runner import run as run_recipe

    _set_threads(recipe)
    with Bars() as bars:
        results = run_recipe(recipe, out, cache=cache, reporter=bars)
    write_report([out], out / "report.html")
    if as_json:
        typer.echo(json.dumps(results))
        return
    screen.print(_table(f"{escape(recipe.title) or 'Results'} (accuracies in %)", results["rows"]))
    _say_price(results["rows"])
    screen.print(f"Report: {out / 'report.html'}\nResults: {out / 'results.json'}", **PLAIN)


def _set_threads(recipe: Recipe) -> None:
    import torch

    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, **LOOK)
    for name in ("phase", "method", "clients"):
        table.add_column(name)
    for name in ("test", "retain", "forget", "rounds", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        measures = [f"{v:.1f}" if (v := row[k]) is not None else "–" for k in ("test_acc", "retain_acc", "forget_acc")]
        clients = ", ".join(map(str, row["clients"])) + (" (samples)" if row["samples"] else "")
        table.add_row(row["phase"], row["method"], clients, *measures, str(row["rounds"]), f"{row['seconds']:.1f}")
    return table


def _say_price(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        price = row.get("price_of_forgetting")
        if price is not None:
            screen.print(f"Price of forgetting: {price:+.3f} in the retained clients' loss.", highlight=False)


@on_a_recipe
def run(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the run; the same command goes on where it stopped.")],
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Carry out a recipe: train, take the request, retrain for comparison, unlearn, recover."""
    _carry_out(recipe, out, cache, as_json=as_json)


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("runs/demo"),
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """See a client forgotten, in under a minute: real images, ten clients, FedQUIT, and Retrain beside it."""
    from fedquit.running.recipe import load

    _carry_out(load("demo"), out, cache, as_json=as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; else a report in the first folder.")] = None,
    format: Annotated[str | None, typer.Option(help="html, csv, md, latex or json; else as the file ends.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page over one run or several, or their table in another format."""
    from fedquit.report import ENDINGS, write_report
    from fedquit.utils.names import lookup

    out = out or runs[0] / f"report{lookup(ENDINGS, format or 'html', 'format')}"
    write_report(runs, out, format)
    typer.echo(json.dumps({"report": str(out)}) if as_json else f"Report: {out}")


@on_a_recipe
def sweep(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the sweep; one run for each rate lies below it.")],
    lr: Annotated[str, typer.Option(help="Rates to try, with commas between.")] = "1e-5,3e-5,1e-4,3e-4,1e-3",
    rounds: Annotated[int, typer.Option(help="Recovery rounds before the comparison.")] = 1,
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Choose the unlearning rate without a Retrain: compare the forget data with the client's own holdout."""
    from fedquit.studies.sweep import parse_rates, sweep_rates

    _set_threads(recipe)
    with Bars() as bars:
        found = sweep_rates(recipe, parse_rates(lr), rounds, out, cache=cache, reporter=bars)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        _print_sweep(found, rounds)


def _print_sweep(found: Sweep, rounds: int) -> None:
    after = f"{rounds} recovery round" + ("s" if rounds != 1 else "")
    table = Table(title=f"Forget against holdout data, right after unlearning and after {after}", **LOOK)
    for name in ("lr", "unlearned", "forget", "holdout", "test", "AUC ± 95 %"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for c in (found.before, *found.candidates):
        accuracies = [f"{a:.1f}" for a in (c.unlearned_acc, c.forget_acc, c.holdout_acc, c.test_acc)]
        auc = f"{c.auc:.3f} ± {(c.auc_high - c.auc_low) / 2:.3f}"
        mark = " ←" if c is found.chosen else ""
        table.add_row(f"{c.lr:g}" if c.lr else "before", *accuracies, auc, c.verdict + mark)
    screen.print(table)
    taken = f"Take lr = {found.chosen.lr:g}: " if found.chosen else "No rate can be named: "
    screen.print(f"{taken}{found.reason}.", highlight=False)


@on_a_recipe
def compare(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the comparison; the same command goes on where it stopped.")],
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    targets: Annotated[
        str | None,
        typer.Option(
            help="Who leaves: 0,1,2 in turn, 0+1,2+3 together, or all in turn; else 0, or the recipe's group."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from the recipe's on.")] = 1,
    references: Annotated[int, typer.Option(help="More seeds of each erasure: RMIA, LiRA, U-LiRA, KLoM, epsilon.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes side by side; 0: one for each core where that pays.")] = 0,
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Run every method for several leaving clients and seeds, and print the table with the gaps to Retrain."""
    from fedquit.report import write_report
    from fedquit.studies.comparison import chosen_methods, default_targets, parse_targets
    from fedquit.studies.comparison import compare as compare_methods
    from fedquit.utils.files import read_json

    _set_threads(recipe)
    with Bars() as bars:
        names = chosen_methods(methods)
        leaving = default_targets(recipe) if targets is None else parse_targets(targets)
        lines, outcomes = compare_methods(
            recipe, names, leaving, seeds, out, overview=bars, cache=cache, references=references, jobs=jobs
        )
    write_report([out], out / "report.html")
    if as_json:
        typer.echo(json.dumps(read_json(out / "comparison.json")))
    else:
        _print_comparison(recipe, lines, out)
    if any(o.failure for o in outcomes):
        raise typer.Exit(1)


_COLUMNS = {
    "test_acc": "test",
    "retain_acc": "retain",
    "forget_acc": "forget",
    "mia_song_svc": "Song",
    "mia_yeom": "Yeom",
    "backdoor_asr": "backdoor",  # where a recipe planted one
}


def _print_comparison(recipe: Recipe, lines: list[Line], out: Path) -> None:
    title = f"{escape(recipe.title) or 'Comparison'}: in %, (gap to Retrain ± deviation)"
    table = Table(title=title, **LOOK)
    table.add_column("method", no_wrap=True)
    shown = {m: head for m, head in _COLUMNS.items() if m != "backdoor_asr" or any(m in line.means for line in lines)}
    heads = (*shown.values(), "Avg. gap", "unlearned", "rounds", "bytes", "epochs", "FLOPs")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        if not line.means:
            table.add_row(line.method, "failed", *[""] * (len(heads) - 1))
            continue
        cells = [_with_gap(line, m) for m in shown]
        average = "" if line.avg_gap is None else f"{_mark(line, 'avg_gap')}{line.avg_gap:.1f}"
        before = f"{line.unlearned['test_acc']:.0f}/{line.unlearned['forget_acc']:.0f}" if line.unlearned else ""
        rounds = "" if line.recovery_rounds is None else f"{line.recovery_rounds:.1f}"
        saved = [_times(line, s) for s in (line.bytes_saved, line.epochs_saved, line.flops_saved)]
        table.add_row(line.method, *cells, average, before, rounds, *saved)
    screen.print(table)
    screen.print("unlearned: test/forget accuracy before recovery; bytes, epochs, FLOPs: times cheaper than Retrain.")
    screen.print("retrain again: another seed, the noise floor; a gap marked ≈ is no larger, hence no difference.")
    _print_budgets(lines)
    _print_paired(lines)
    _print_references(lines)
    for line in lines:
        for why in line.failures:
            screen.print(f"[bold]{line.method}[/] failed: {escape(why)}", highlight=False, soft_wrap=True)
    screen.print(f"Report: {out / 'report.html'}\nTable: {out / 'comparison.json'}", **PLAIN)


def _print_budgets(lines: list[Line]) -> None:
    """What each share of Retrain's bytes pays for."""
    known = [line for line in lines if line.budgets]
    if not known:
        return
    shares = sorted({float(share) for line in known for share in line.budgets})
    table = Table(title="Avg. gap (test) within a share of Retrain's bytes", **LOOK)
    table.add_column("method", no_wrap=True)
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    for line in known:
        bought = [line.budgets.get(f"{share:g}", {}) for share in shares]
        table.add_row(line.method, *(_bought(one) for one in bought))
    screen.print(table)


def _bought(found: dict[str, float]) -> str:
    if not found.get("runs"):
        return "out of reach"
    gap = found.get("avg_gap", found.get("forget_acc_gap"))
    return f"{'' if gap is None else f'{gap:.1f} '}({found['test_acc']:.1f})"


def _print_paired(lines: list[Line]) -> None:
    """Whose gap in forget accuracy is larger than that of the first method, target by target."""
    first = next((line.method for line in lines if line.phase == "recovered" and line.runs), "")
    for line in lines:
        found = line.against_first.get("forget_acc")
        if found:
            verdict = "a difference" if found["different"] else "not a difference"
            interval = f"95 % interval {found['low']:+.1f} to {found['high']:+.1f}"
            text = f"{line.method}: forget gap {found['mean']:+.1f} points against {first}'s ({interval}): {verdict}"
            screen.print(text, **PLAIN)


_MANY = {
    "KLoM": ("klom", "{:.2f}"),
    "F": ("forgetting_quality", "{:.2f}"),
    "epsilon": ("epsilon", "{:.1f}"),
    "U-LiRA right": ("ulira_accuracy", "{:.1%}"),
    "U-LiRA": ("ulira_finds", "{:.1%}"),
    "LiRA AUC": ("lira_auc", "{:.3f}"),
    "LiRA": ("lira_finds", "{:.1%}"),
    "RMIA AUC": ("rmia_auc", "{:.3f}"),
    "RMIA": ("rmia_finds", "{:.1%}"),
}


def _print_references(lines: list[Line]) -> None:
    """What needs many models."""
    known = [line for line in lines if line.references]
    if not known:
        return
    table = Table(title=f"Over {known[0].references['models']:g} models of each kind, (Retrain in its place)", **LOOK)
    table.add_column("method", no_wrap=True)
    for head in _MANY:
        table.add_column(head, justify="right", no_wrap=True)
    for line in known:
        cells = []
        for name, form in _MANY.values():
            cells.append(form.format(_number(line.references[name])) + _in_its_place(line.references, name, form))
        table.add_row(line.method, *cells)
    screen.print(table)
    if any("halves" in line.references for line in known):
        screen.print("KLoM, F, epsilon: (the method/Retrain with half the models, ≈ where that is no difference).")
    screen.print("U-LiRA, LiRA, RMIA: found at 1 % false alarms; U-LiRA right: 50 % cannot tell; F: 1 is alike.")


def _in_its_place(found: dict[str, Any], name: str, form: str) -> str:
    """What Retrain gets, beside the method's where both are measured with half of the models."""
    half, floor = found.get("halves", {}).get(name), found.get(f"{name}_floor")
    if half:
        mark = "" if half["different"] else "≈"
        return f" ({mark}{form.format(half['method'])}/{form.format(half['retrain'])})"
    return f" ({form.format(_number(floor))})" if floor is not None else ""


def _number(found: float | dict[str, Any]) -> float:
    """Itself, or the share found at 1 % false alarms."""
    return float(found["at_1"]["value"]) if isinstance(found, dict) else found


def _with_gap(line: Line, metric: str) -> str:
    if metric not in line.means:
        return ""
    if metric not in line.gaps:
        return f"{line.means[metric]:.1f}"
    spread = f"±{line.deviations[metric]:.1f}" if metric in line.deviations else ""
    return f"{line.means[metric]:.1f} ({_mark(line, metric)}{line.gaps[metric]:.1f}{spread})"


def _mark(line: Line, gap: str) -> str:
    return "≈" if gap in line.inside_floor else ""


def _times(line: Line, saved: float | None) -> str:
    if line.phase != "recovered":
        return "1.0×" if line.phase == "retrained" else ""
    return f"{saved:.1f}×" if saved else "free"
