# SPDX-License-Identifier: Apache-2.0
"""Commands that carry out recipes: run, demo, report, sweep, compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedquit.cli.options import Cache, on_a_recipe
from fedquit.cli.references import RetrainFrom
from fedquit.cli.screen import LOOK, PLAIN, AsJson, Bars
from fedquit.cli.screen import out as screen

if TYPE_CHECKING:
    from fedquit.results.requests import RequestRows
    from fedquit.results.summary import MethodSummary
    from fedquit.running.recipe import Recipe
    from fedquit.studies.sweep import HalfVerdict, Sweep


def _carry_out(
    recipe: Recipe, out: Path, cache: Path | None, *, as_json: bool, retrain_from: Path | None = None
) -> None:
    from fedquit.report import write_report
    from fedquit.running.runner import run as run_recipe

    _set_threads(recipe)
    with Bars() as bars:
        results = run_recipe(recipe, out, cache=cache, reporter=bars, retrain_from=retrain_from)
    write_report([out], out / "report.html")
    if as_json:
        typer.echo(json.dumps(results))
        return
    screen.print(_table(f"{escape(recipe.title) or 'Results'} (accuracies in %)", results["rows"]))
    _print_traces(out, results)
    _say_price(results["rows"])
    _say_canaries(results["rows"])
    _say_bundle([results.get("retrain_from")])
    screen.print(f"Report: {out / 'report.html'}\nResults: {out / 'results.json'}", **PLAIN)


def _set_threads(recipe: Recipe) -> None:
    import torch

    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    from fedquit.results.schema import ACCURACIES, number
    from fedquit.results.words import fixed

    table = Table(title=title, **LOOK, padding=(0, 0, 0, 1))  # fits 80 columns
    for name in ("phase", "method", "clients"):
        table.add_column(name)
    held_out = any(number(row.get("holdout_acc")) is not None for row in rows)
    shown = (*ACCURACIES, "holdout_acc") if held_out else ACCURACIES
    for name in (*(_COLUMNS[key] for key in shown), "rounds", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        measures = [fixed(number(row.get(key))) for key in shown]
        clients = ", ".join(map(str, row["clients"])) + (" (samples)" if row["samples"] else "")
        work = (str(row["rounds"]), f"{row['seconds']:.1f}")
        table.add_row(row["phase"], row["method"], clients, *measures, *work)
    return table


def _print_traces(out: Path, results: Mapping[str, Any]) -> None:
    """The verdict against the hold-out, and the two parts of the gap in forget accuracy, where there is a hold-out."""
    from fedquit.results.folders import OWNER_FOLDER, RunResults
    from fedquit.results.words import exposed

    requests = RunResults.read(str(out), results).requests
    table = trace_table(requests)
    if table.row_count:
        screen.print(table)
        screen.print(
            "samples: forget less hold-out accuracy, less Retrain's; distribution: hold-out accuracy less Retrain's; "
            "both in points. Together they are the gap in forget accuracy."
            if any(request.row("retrained") for request in requests)
            else "samples: forget less hold-out accuracy, in points."
        )
    for request in requests:
        if said := verdicts_in_short(request):
            screen.print(said, highlight=False, markup=False)
        if sentence := exposed(request.row("recovered")):
            names = f" The names are for their owners alone: {out / OWNER_FOLDER}" if "named" in sentence else ""
            screen.print(f"{sentence}{names}", **PLAIN)


def verdicts_in_short(request: RequestRows) -> str:
    """What the hold-out says of the method, of the control and of Original and Retrain, in one sentence.

    Args:
        request: With the rows of its phases; "" comes back where the method has no verdict.
    """
    from fedquit.results.words import holdout_verdict

    own = holdout_verdict(request.row("recovered"))
    if not own:
        return ""
    names = {"natural": "Natural, the control", "original": "Original", "retrained": "Retrain"}
    others = [f"{name}: {word}" for phase, name in names.items() if (word := holdout_verdict(request.row(phase)))]
    return f"Verdict on the samples of {request.target_in_short}: {'; '.join([f'{request.method}: {own}', *others])}."


def trace_table(requests: Sequence[RequestRows]) -> Table:
    """What each model remembers of the samples and knows of the clients' distribution, as a table for the terminal."""
    from fedquit.results.quantities import distribution_knowledge, sample_memory
    from fedquit.results.schema import PHASES
    from fedquit.results.words import holdout_verdict, signed

    table = Table(title="What is left of the forgotten clients", **LOOK)
    table.add_column("phase", no_wrap=True)
    table.add_column("clients")
    for name in ("samples", "distribution"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("forget data against the hold-out")
    for request in requests:
        for phase in (*PHASES, "natural"):
            verdict = holdout_verdict(request.row(phase), in_full=True)
            if verdict:
                points = (signed(sample_memory(request, phase)), signed(distribution_knowledge(request, phase)))
                table.add_row(phase, ", ".join(map(str, request.clients)), *points, escape(verdict))
    return table


def _say_price(rows: list[dict[str, Any]]) -> None:
    from fedquit.results.schema import ON_PATH, number
    from fedquit.results.words import fixed

    if any(row["phase"] == "natural" for row in rows):
        screen.print(
            "natural: the control, which unlearns nothing. The client leaves, and training goes on without it for as "
            "many rounds as unlearning and recovery took together."
        )
    for row in rows:
        longer = {key: number(row.get(f"retrain_longer_{key}")) for key in ON_PATH}
        if longer["test_acc"] is not None:
            levels = ", ".join(f"{ON_PATH[key].lower()} {fixed(level)}" for key, level in longer.items() if level)
            screen.print(f"Retrain after as many rounds in all as the method: {levels} %.", highlight=False)
    for row in rows:
        price = row.get("price_of_forgetting")
        if price is not None:
            screen.print(f"Price of forgetting: {price:+.3f} in the retained clients' loss.", highlight=False)


def _say_bundle(stored: Sequence[object]) -> None:
    """From which bundle Retrain came, and what is left empty for that; nothing where Retrain was trained."""
    from fedquit.results.bundles import bundle_notes

    for note in bundle_notes(stored):
        screen.print(note, **PLAIN)


def _say_canaries(rows: list[dict[str, Any]]) -> None:
    """The one-run audit of each model, where the recipe has canaries."""
    from fedquit.results.canaries import canary_audits
    from fedquit.results.schema import PHASES

    for audit in canary_audits(rows):
        model = f"{PHASES[audit.phase]}, {audit.kind} canaries"
        screen.print(f"One-run audit, {model}: {audit.verdict}. {audit.sentence}", **PLAIN)


@on_a_recipe
def run(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the run; the same command goes on where it stopped.")],
    cache: Cache = None,
    retrain_from: RetrainFrom = None,
    as_json: AsJson = False,
) -> None:
    """Carry out a recipe: train, take the request, retrain for comparison, unlearn, recover."""
    _carry_out(recipe, out, cache, as_json=as_json, retrain_from=retrain_from)


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("runs/demo"),
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """See a client forgotten, in under a minute: real images, four clients, FedQUIT, Retrain, Natural."""
    from fedquit.running.recipe import load

    _carry_out(load("demo"), out, cache, as_json=as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; else a report in the first folder.")] = None,
    format: Annotated[str | None, typer.Option(help="html, csv, md, latex or json; else as the file ends.")] = None,
    retrain_from: RetrainFrom = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page over one run or several, or their table in another format."""
    from fedquit.report import ENDINGS, write_report
    from fedquit.utils.names import lookup

    out = out or runs[0] / f"report{lookup(ENDINGS, format or 'html', 'format')}"
    write_report(runs, out, format, retrain_from)
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
    from fedquit.report import write_report
    from fedquit.results.folders import write_sweep
    from fedquit.studies.sweep import parse_rates, sweep_rates

    _set_threads(recipe)
    with Bars("Sweep") as bars:
        outcome = sweep_rates(recipe, parse_rates(lr), rounds, out, cache=cache, reporter=bars, overview=bars)
    write_sweep(out, outcome.to_dict())
    write_report([out], out / "report.html")
    if as_json:
        typer.echo(json.dumps(outcome.to_dict()))
    else:
        _print_sweep(outcome, rounds)
        screen.print(f"Report: {out / 'report.html'}", **PLAIN)


def _print_sweep(outcome: Sweep, rounds: int) -> None:
    after = f"{rounds} recovery round" + ("s" if rounds != 1 else "")
    from fedquit.results.words import holdout_verdict

    def said(half: HalfVerdict) -> str:
        return holdout_verdict({"holdout_verdict": half.verdict, "holdout_reason": half.reason})

    table = Table(title=f"Forget against holdout data, right after unlearning and after {after}", **LOOK)
    for name in ("lr", "unlearned", "forget", "holdout", "test", "AUC ± 95 %"):
        table.add_column(name, justify="right")
    table.add_column("one half")
    table.add_column("other half")
    for c in (outcome.before, *outcome.candidates):
        accuracies = [f"{a:.1f}" for a in (c.unlearned_acc, c.forget_acc, c.holdout_acc, c.test_acc)]
        auc = f"{c.auc:.3f} ± {(c.auc_high - c.auc_low) / 2:.3f}"
        mark = " ←" if c is outcome.chosen else ""
        confirmed = said(c.halves[1]) + mark if c is outcome.tried else ""
        table.add_row(f"{c.lr:g}" if c.lr else "before", *accuracies, auc, said(c.halves[0]), confirmed)
    screen.print(table)
    taken = f"Take lr = {outcome.chosen.lr:g}: " if outcome.chosen else "No rate can be named: "
    screen.print(f"{taken}{outcome.reason}.", highlight=False)


@on_a_recipe
def compare(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The folder of the comparison; the same command goes on where it stopped.")],
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    targets: Annotated[
        str | None,
        typer.Option(
            help="The clients that leave: 0,1,2 in turn, 0+1,2+3 together, or all in turn; else 0, or the recipe's."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds of each target, from the recipe's on.")] = 1,
    retrain_seeds: Annotated[
        int,
        typer.Option(
            help="Retrains with seeds of their own for each target; from 2 on each target has its own Original, too."
        ),
    ] = 1,
    margin: Annotated[
        str | None,
        typer.Option(
            help="The gap that would not matter, chosen before the runs: points as 2, or deviations of Retrain as 2s."
        ),
    ] = None,
    references: Annotated[
        int, typer.Option(help="More seeds of each erasure: permutation tests, U-LiRA, LiRA, RMIA.")
    ] = 0,
    jobs: Annotated[int, typer.Option(help="Worker processes; 0: one for each core where that pays.")] = 0,
    retrain_from: RetrainFrom = None,
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Run every method for several leaving clients and seeds, and print the table with the gaps to Retrain."""
    from fedquit.inference.gaps import Margin
    from fedquit.report import write_report
    from fedquit.studies.comparison import chosen_methods, default_targets, parse_targets
    from fedquit.studies.comparison import compare as compare_methods
    from fedquit.utils.files import read_json

    _set_threads(recipe)
    with Bars() as bars:
        names = chosen_methods(methods)
        leaving = default_targets(recipe) if targets is None else parse_targets(targets)
        lines, outcomes = compare_methods(
            recipe,
            names,
            leaving,
            seeds,
            out,
            overview=bars,
            cache=cache,
            references=references,
            jobs=jobs,
            retrain_seeds=retrain_seeds,
            margin=None if margin is None else Margin.parse(margin),
            retrain_from=retrain_from,
        )
    write_report([out], out / "report.html")
    if as_json:
        typer.echo(json.dumps(read_json(out / "comparison.json")))
    else:
        _print_comparison(recipe, lines, out)
        if retrain_from:
            _say_bundle(read_json(out / "comparison.json").get("retrain_from", {}).get("runs", []))
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(1)


_COLUMNS = {
    "test_acc": "test",
    "retain_acc": "retain",
    "forget_acc": "forget",
    "holdout_acc": "hold-out",
    "mia_song_svc": "Song",
    "mia_yeom": "Yeom",
    "backdoor_asr": "backdoor",  # where a recipe planted one
}


def _print_comparison(recipe: Recipe, lines: Sequence[MethodSummary], out: Path) -> None:
    from fedquit.results.summary import natural_averaged

    title = escape(recipe.title) or "Comparison"
    screen.print(short_table(title, lines))
    screen.print(
        "vs Retrain: over forget and retain accuracy and both attacks. forget gap: the mean absolute gap in forget "
        "accuracy to Retrain, in points. Natural is the control: nothing is "
        "unlearned, training goes on without the client for as many rounds. hold-out: forget data against data of the "
        "same clients that never trained; forgotten is within the margin."
    )
    if _fits(comparison_table("In %, (gap to Retrain ± deviation)", lines)):
        screen.print(
            "unlearned: test/forget accuracy before recovery; bytes, epochs, FLOPs: times cheaper than Retrain, with "
            "the work of clients and server, for unlearning and recovery together. retrain again: Retrain with another "
            "seed; its gaps are the Retrain-vs-Retrain spread."
        )
    _print_verdicts(lines)
    controlled = [line for line in lines if line.natural]
    if controlled:
        _fits(control_table(controlled, last=natural_averaged(controlled)))
        _print_leaving(controlled)
    if any(line.budgets for line in lines):
        _fits(budget_table(lines))
    _print_holdout_verdicts(lines)
    _print_paired(lines)
    _print_references(lines)
    for line in lines:
        for why in line.failures:
            screen.print(f"[bold]{escape(line.method)}[/] failed: {escape(why)}", highlight=False, soft_wrap=True)
    screen.print(f"Report: {out / 'report.html'}\nTable: {out / 'comparison.json'}", **PLAIN)


def _fits(table: Table) -> bool:
    """Print a table, or where the terminal cuts it, how many columns it needs; return whether it was printed."""
    needed = Measurement.get(screen, screen.options.update(max_width=10_000), table).maximum
    if needed <= screen.width or not screen.is_terminal:
        screen.print(table)
        return True
    screen.print(f"{table.title}: this table needs {needed} columns; the report has it, too.", highlight=False)
    return False


def short_table(title: str, lines: Sequence[MethodSummary]) -> Table:
    """Each method, its control and its verdicts in few words: a table for 80 columns.

    Args:
        title: In the markup of rich.
        lines: Of `comparison.json`.
    """
    from fedquit.results.short import SHORT_COLUMNS, in_short, short_cells

    method, against_retrain, *numbers, holdout = SHORT_COLUMNS
    table = Table(title=title, **LOOK, padding=(0, 0, 0, 1))
    table.add_column(method, no_wrap=True)
    table.add_column(against_retrain)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(holdout)
    for line in in_short(lines):
        table.add_row(*map(escape, short_cells(line)))
    return table


def _print_verdicts(lines: Sequence[MethodSummary]) -> None:
    """What the marks of the gaps mean, and which sizes would tell what these do not."""
    from fedquit.results.verdicts import clients_outside, forget_gap, legend, open_question

    each = [line.verdicts for line in lines]
    if any(each):
        screen.print(f"Gaps: {legend(each)}.", **PLAIN)
    for line in lines:
        verdict = line.verdicts.get("forget_acc")
        if verdict is not None and verdict.retrains > 1:
            screen.print(f"{line.method}: {forget_gap(verdict)}", **PLAIN)
    for line in lines:
        alone = clients_outside(line.clients)
        if alone:
            screen.print(f"{line.method}: {alone}, each judged by itself", **PLAIN)
        if line.durable is not None:
            screen.print(f"{line.method}, {line.durable.reason}", **PLAIN)
    why = open_question(each)
    if why:
        screen.print(f"{why[:1].upper()}{why[1:]} (--targets, --retrain-seeds, --margin).", **PLAIN)


def _print_leaving(lines: Sequence[MethodSummary]) -> None:
    """Whether each method does more than Natural, and which sizes would tell what these do not."""
    from fedquit.results.verdicts import leaving_sentence, open_question

    for line in lines:
        verdict = line.leaving.get("forget_acc")
        if verdict is not None:
            screen.print(f"{line.method}: {leaving_sentence(verdict)}", **PLAIN)
    why = open_question(line.leaving for line in lines)
    if why:
        screen.print(f"Against Natural, {why} (--targets, --seeds, --retrain-seeds, --margin).", **PLAIN)


def comparison_table(title: str, lines: Sequence[MethodSummary]) -> Table:
    """The lines of a comparison as a table for the terminal.

    Args:
        title: In the markup of rich.
        lines: Of `comparison.json`.
    """
    table = Table(title=title, **LOOK)
    table.add_column("method", no_wrap=True)
    planted = any("backdoor_asr" in line.means for line in lines)
    left_out = {"holdout_acc"} if planted else {"holdout_acc", "backdoor_asr"}
    shown = {key: head for key, head in _COLUMNS.items() if key not in left_out}
    heads = (*shown.values(), "Avg. gap", "unlearned", "rounds", "bytes", "epochs", "FLOPs")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        if not line.runs:
            table.add_row(escape(line.method), "failed", *[""] * (len(heads) - 1))
            continue
        levels = [_with_gap(line, key) for key in shown]
        average = "" if line.avg_gap is None else f"{_mark(line, 'avg_gap')}{line.avg_gap:.1f}"
        table.add_row(escape(line.method), *levels, average, _before(line), _rounds(line), *_cheaper(line))
    return table


def _before(line: MethodSummary) -> str:
    """Test and forget accuracy before recovery."""
    from fedquit.results.words import fixed

    levels = [line.unlearned.get(key) for key in ("test_acc", "forget_acc")]
    return "/".join(fixed(level, 0) for level in levels) if line.unlearned else ""


def _rounds(line: MethodSummary) -> str:
    return "" if line.recovery_rounds is None else f"{line.recovery_rounds:.1f}"


def control_table(lines: Sequence[MethodSummary], *, last: bool = False) -> Table:
    """Each method beside Natural at equal rounds, as a table for the terminal.

    Args:
        lines: Of `comparison.json`.
        last: Whether to show means over the last rounds instead of the recovery's stop.
    """
    from fedquit.results.path import LAST
    from fedquit.results.schema import ON_PATH
    from fedquit.results.words import fixed

    known = [line for line in lines if line.natural]
    shown = {key: label for key, label in ON_PATH.items() if any(key in line.natural for line in known)}
    when = f"as means over the last {LAST} rounds" if last else "after as many rounds from the request on"
    third = " / Retrain of as many rounds in all" if any(line.retrain_longer for line in known) else ""
    table = Table(title=f"The method / Natural {when}{third}, in % (gaps to Retrain)", **LOOK)
    table.add_column("method", no_wrap=True)
    for name in ("rounds", *(label.lower() for label in shown.values())):
        table.add_column(name, justify="right", no_wrap=True)
    for line in known:
        own = (line.last, line.last_gaps) if last else (line.on_path, line.on_path_gaps)
        control = (line.natural_last, line.natural_last_gaps) if last else (line.natural, line.natural_gaps)
        cells = []
        for key in shown:
            levels, gaps = [f"{fixed(a.get(key))} / {fixed(b.get(key))}" for a, b in zip(own, control, strict=True)]
            longer = line.retrain_longer_last if last else line.retrain_longer
            levels += f" / {fixed(longer.get(key))}" if third else ""
            cells.append(f"{levels} ({gaps})" if key in own[1] or key in control[1] else levels)
        table.add_row(escape(line.method), fixed(line.rounds_from_request), *cells)
    return table


def _cheaper(line: MethodSummary) -> list[str]:
    """How many times cheaper than Retrain in bytes, epochs and FLOPs."""
    from fedquit.results.words import times

    spent = {"bytes": line.bytes, "epochs": line.epochs, "flops": line.flops}
    if line.phase == "retrained":
        return ["" if amount is None else "1.0×" for amount in spent.values()]
    if line.phase != "recovered":
        return [""] * len(spent)
    saved = (line.bytes_saved, line.epochs_saved, line.flops_saved)
    return [times(ratio, amount) for ratio, amount in zip(saved, spent.values(), strict=True)]


def budget_table(lines: Sequence[MethodSummary]) -> Table:
    """What each share of Retrain's bytes pays for, as a table for the terminal."""
    known = [line for line in lines if line.budgets]
    shares = sorted({float(share) for line in known for share in line.budgets})
    table = Table(title="Avg. gap (test) within a share of Retrain's bytes", **LOOK)
    table.add_column("method", no_wrap=True)
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    for line in known:
        cells = [_at_budget(line.budgets.get(f"{share:g}")) for share in shares]
        table.add_row(escape(line.method), *cells)
    return table


def _at_budget(budget: Mapping[str, float] | None) -> str:
    from fedquit.results.quantities import OUT_OF_REACH
    from fedquit.results.words import fixed

    if budget is None:
        return ""
    if not budget.get("runs"):
        return OUT_OF_REACH
    gap = budget.get("avg_gap", budget.get("forget_acc_gap"))
    return f"{'' if gap is None else f'{gap:.1f} '}({fixed(budget.get('test_acc'))})"


def _print_holdout_verdicts(lines: Sequence[MethodSummary]) -> None:
    """How many requests have each verdict against the hold-out, and the two kinds of forgetting."""
    from fedquit.results.short import PARTS, parts_of_gap

    known = [line for line in lines if line.holdout_verdicts or line.sample_memory is not None]
    if not known:
        return
    table = Table(title="Forget data against data of the same clients that never trained", **LOOK)
    for name in ("method", "verdicts"):
        table.add_column(name, no_wrap=True)
    for name in PARTS:
        table.add_column(name, justify="right", no_wrap=True)
    for line in known:
        counts = ", ".join(f"{number:g} × {verdict}" for verdict, number in line.holdout_verdicts.items())
        table.add_row(escape(line.method), counts, *parts_of_gap(line))
    if not _fits(table):
        return
    screen.print(
        "samples: forget less hold-out accuracy, less Retrain's; distribution: hold-out accuracy less Retrain's; both "
        "in points."
    )


def _print_paired(lines: Sequence[MethodSummary]) -> None:
    """Whose gap in forget accuracy is larger than that of the first method, target by target; Holm over methods."""
    first = next((line.method for line in lines if line.phase == "recovered" and line.runs), "")
    for line in lines:
        pair = line.against_first.get("forget_acc")
        if pair:
            direction = "farther from Retrain" if pair.mean > 0 else "nearer to Retrain"
            verdict = direction if pair.different else "cannot tell"
            interval = f"95 % interval {pair.low:+.1f} to {pair.high:+.1f}"
            text = f"{line.method}: forget gap {pair.mean:+.1f} points against {first}'s ({interval}): {verdict}"
            screen.print(text, **PLAIN)


_MANY = {
    "LiRA AUC": ("lira_auc", "{:.3f}"),
    "LiRA": ("lira_finds", "{:.1%}"),
    "LiRA online AUC": ("lira_online_auc", "{:.3f}"),
    "RMIA AUC": ("rmia_auc", "{:.3f}"),
    "RMIA": ("rmia_finds", "{:.1%}"),
    "F": ("forgetting_quality", "{:.2f}"),
}


def _print_references(lines: Sequence[MethodSummary]) -> None:
    """What needs many models: first the tests with their verdicts, then what describes."""
    known = [line for line in lines if line.references]
    if not known:
        return
    _fits(models_table(known))
    for line in known:
        needed = line.references["tests"]["forget"].get("models_needed")
        if needed:
            text = (
                f"{line.method}: no outcome could differ over so many targets and methods; take --references {needed:g}"
            )
            screen.print(text, **PLAIN)
    screen.print("KLoM: on forget data, (mean over permuted labels); p: of the permutation test on forget data, times")
    screen.print("the targets (Bonferroni) and corrected for the methods (Holm); cannot tell is no proof of equality.")
    screen.print(
        "retain, test: p on these data; U-LiRA right: with Student's 95 % interval over models, 50 % is chance;"
    )
    screen.print("epsilon: 95 % lower bound (its ceiling); exposed: samples remembered/over-unlearned of all, each")
    screen.print("target and method by itself.")
    table = Table(title="Attacks on the first model, (Retrain in its place); F is descriptive", **LOOK)
    table.add_column("method", no_wrap=True)
    for head in _MANY:
        table.add_column(head, justify="right", no_wrap=True)
    for line in known:
        cells = []
        for name, form in _MANY.values():
            cells.append(form.format(_value(line.references[name])) + _of_retrain(line.references, name, form))
        table.add_row(escape(line.method), *cells)
    _fits(table)
    screen.print("LiRA, RMIA: TPR at 1 % FPR; F: 1 is alike, equal models get about 0.2.")


def models_table(known: Sequence[MethodSummary]) -> Table:
    """The tests over many models as a table for the terminal.

    Args:
        known: Lines of `comparison.json` with tests over many models.
    """
    table = Table(title=f"Over {known[0].references['models']:g} models of each kind", **LOOK)
    table.add_column("method", no_wrap=True)
    for head in ("against Retrain", "p", "KLoM", "retain", "test", "U-LiRA right", "epsilon", "exposed"):
        table.add_column(head, justify="right", no_wrap=True)
    for line in known:
        tests = line.references["tests"]
        forget = tests["forget"]
        bound = line.references.get("epsilon_bound")
        ulira = line.references["ulira"]
        exposed = line.references["exposed"]
        table.add_row(
            escape(line.method),
            forget["word"],
            f"{forget['p_holm']:.3f}",
            f"{forget['klom']:.2f} ({forget['klom_by_chance']:.2f})",
            *(f"{tests[name]['p_holm']:.3f}" for name in ("retain", "test")),
            f"{ulira['value']:.1%} ({ulira['low']:.0%} to {ulira['high']:.0%})",
            f"≥ {bound['value']:.2f} ({bound['ceiling']:.2f})" if bound else "",
            f"{exposed['remembered']:g}/{exposed['over_unlearned']:g} of {exposed['samples']:g}",
        )
    return table


def _of_retrain(references: Mapping[str, Any], name: str, form: str) -> str:
    """What Retrain gets in the method's place."""
    retrain = references.get(f"{name}_floor")
    return f" ({form.format(_value(retrain))})" if retrain is not None else ""


def _value(measured: float | Mapping[str, Any]) -> float:
    """A number, or the TPR at 1 % FPR."""
    return float(measured["at_1"]["value"]) if isinstance(measured, Mapping) else measured


def _with_gap(line: MethodSummary, key: str) -> str:
    """A measure, and in parentheses its gap to Retrain with the deviation."""
    if key not in line.means:
        return ""
    if key not in line.gaps:
        return f"{line.means[key]:.1f}"
    deviation = f"±{line.deviations[key]:.1f}" if key in line.deviations else ""
    return f"{line.means[key]:.1f} ({_mark(line, key)}{line.gaps[key]:.1f}{deviation})"


def _mark(line: MethodSummary, gap: str) -> str:
    """The mark of the verdict on a gap."""
    from fedquit.results.verdicts import mark

    return mark(line.verdicts, gap)
