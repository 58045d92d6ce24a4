# SPDX-License-Identifier: Apache-2.0
"""The tables for other programs: every row with its gaps and costs, and one line for each method."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fedquit.results import quantities
from fedquit.results.bundles import RETRAIN_FROM, bundle_notes
from fedquit.results.comparison import Comparison
from fedquit.results.folders import ResultSet, RunResults
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import AVERAGED, GAPS, ON_PATH, SCHEMA, THRESHOLDS, Row, labels, number
from fedquit.results.summary import MethodGroup, MethodSummary, group_by_method, mean_spreads, summarise_phase
from fedquit.results.verdicts import legend, mark, open_question
from fedquit.results.words import DASH, fixed

SHOWN = labels("test_acc", *GAPS)  # the measures of a line
_HEADS = ("Method", "Requests", *SHOWN.values(), "Avg. gap", "Rounds", "Communication", "Computation")
_EMPTY = [DASH] * 3  # of Original and Retrain: rounds, communication, computation
_SUMMED = ("bytes", "flops", "epochs")  # costs of several fields


def flat_rows(results: ResultSet) -> list[dict[str, Any]]:
    """Every row of every run without curves and densities, with its gaps to Retrain and the sums of its costs.

    Rows after recovery have the words of the verdicts, which are over all targets of the method, not of this row alone.
    """
    groups = group_by_method(results.runs, results.comparisons)
    group_of = {id(request): group for group in groups for request in group.requests}
    rows = []
    for run in results.runs:
        for event in run.events:
            for row in event.rows:
                group = group_of.get(id(event)) if row["phase"] == "recovered" else None
                words = _words(group) if group else {}
                rows.append({"run": run.folder} | _scalars(row) | _derived(event, row) | words)
    return rows


def _words(group: MethodGroup) -> dict[str, str]:
    """The words of a method's verdicts, by column: against Retrain, after the stop, and against Natural."""
    against_retrain = {f"{key}_verdict": verdict.word for key, verdict in group.verdicts.items()}
    lasting = {"durable_verdict": group.durable.word} if group.durable else {}
    return (
        against_retrain | lasting | {f"{key}_against_natural": verdict.word for key, verdict in group.leaving.items()}
    )


def _scalars(row: Row) -> dict[str, Any]:
    scalars = {key: value for key, value in row.items() if not isinstance(value, dict | list)}
    return scalars | {"clients": " ".join(map(str, row["clients"]))}


def _derived(event: RequestRows, row: Row) -> dict[str, float]:
    """The gaps of a row with their sign, the mean size of the paper's four, and its costs with the server's part."""
    budget = number(row.get("budget"))
    at = event if budget is None or row["phase"] != "budget" else event.budgets[budget]
    phase = "recovered" if row["phase"] == "budget" else row["phase"]
    columns: dict[str, float | None] = {kind: quantities.cost(at, phase, kind) for kind in _SUMMED}
    if phase in ("original", "unlearned", "recovered"):
        columns |= {f"{key}_gap": quantities.request_gap(at, phase, key) for key in SHOWN}
        columns["sample_memory"] = quantities.sample_memory(at, phase)
        columns["distribution_knowledge"] = quantities.distribution_knowledge(at, phase)
        sizes = {key: quantities.request_distance(at, phase, key) for key in AVERAGED.values()}
        columns["avg_gap"] = quantities.average_gap(sizes)
    if phase == "recovered":
        columns |= at.natural
        columns |= at.retrain_longer
    return {key: value for key, value in columns.items() if value is not None}


def to_csv(results: ResultSet) -> str:
    """Every row, one line each; a column for everything that some row has."""
    rows = flat_rows(results)
    file = io.StringIO()
    first = ("run", "method", "phase", "request", "clients")
    heads = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    writer = csv.DictWriter(file, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json(results: ResultSet) -> str:
    """Every row, one line for each method, and what comparisons say beyond them."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "summary": [_with_budgets(group) for group in group_by_method(results.runs, results.comparisons)],
        "rows": flat_rows(results),
        "comparisons": [_comparison(comparison) for comparison in results.comparisons],
    }
    notes = _bundle_notes(results)
    if notes:
        content[RETRAIN_FROM] = notes
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _bundle_notes(results: ResultSet) -> list[str]:
    """From which bundles Retrains came, and what is left empty for that."""
    return bundle_notes(run.extra.get(RETRAIN_FROM) for run in results.runs)


def _with_budgets(group: MethodGroup) -> dict[str, Any]:
    at_budgets = {}
    for share, ended in quantities.at_budgets(group.requests).items():
        within = [request for request in ended if quantities.affordable(request)]
        at_budgets[f"{share:g}"] = {
            **summary_fields(MethodGroup(group.label, within).summary),
            "spent": quantities.budget_spent(ended),
        }
    return summary_fields(group.summary) | {"budgets": at_budgets}


def summary_fields(summary: MethodSummary) -> dict[str, Any]:
    """The line of a method under the names of the JSON export, which are older than those of `comparison.json`."""
    fields: dict[str, Any] = {"method": summary.method, "requests": summary.runs}
    for key in (*SHOWN, *THRESHOLDS):
        fields[key] = summary.means.get(key)
        fields[f"{key}_gap"] = summary.gaps.get(key)
        fields[f"{key}_gap_std"] = summary.deviations.get(key)
        fields[f"{key}_floor"] = summary.spread.get(key)
    for key in ON_PATH:
        fields[f"natural_{key}"] = summary.natural.get(key)
        fields[f"natural_{key}_gap"] = summary.natural_gaps.get(key)
        fields[f"{key}_last"] = summary.last.get(key)
        fields[f"{key}_last_gap"] = summary.last_gaps.get(key)
        fields[f"natural_{key}_last"] = summary.natural_last.get(key)
        fields[f"natural_{key}_last_gap"] = summary.natural_last_gaps.get(key)
        fields[f"retrain_longer_{key}"] = summary.retrain_longer.get(key)
        fields[f"retrain_longer_{key}_last"] = summary.retrain_longer_last.get(key)
        fields |= {f"{key}_after_{end}": levels.get(key) for end, levels in summary.after.items()}
    return fields | {
        "rounds_from_request": summary.rounds_from_request,
        "last_rounds": summary.last_rounds,
        "avg_gap": summary.avg_gap,
        "avg_gap_floor": summary.spread.get("avg_gap"),
        "recovery_rounds": summary.recovery_rounds,
        "price_of_forgetting": summary.price_of_forgetting,
        "communication_percent": summary.bytes_percent,
        "computation_percent": summary.computing_percent,
        "seconds": summary.seconds,
        "bytes": summary.bytes,
        "flops": summary.flops,
        "epochs": summary.epochs,
        "tug_of_war": summary.tug_of_war,
        "tug_of_war_floor": summary.tug_of_war_spread,
        "tug_of_war_mia": summary.tug_of_war_mia,
        "tug_of_war_mia_floor": summary.tug_of_war_mia_spread,
        "sample_memory": summary.sample_memory,
        "distribution_knowledge": summary.distribution_knowledge,
        "holdout_verdicts": dict(summary.holdout_verdicts),
        "verdicts": {key: asdict(verdict) for key, verdict in summary.verdicts.items()},
        "leaving": {key: asdict(verdict) for key, verdict in summary.leaving.items()},
        "clients": {name: asdict(client) | {"outside": client.outside} for name, client in summary.clients.items()},
        "durable": None if summary.durable is None else asdict(summary.durable),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    """What a comparison says; its spreads and runs are in the other tables."""
    methods = comparison.methods
    pairs = {name: line.against_first for name, line in methods.items() if line.against_first}
    return {
        "folder": comparison.folder,
        "first": comparison.first,
        "code": comparison.code,
        "pairs": {name: {key: asdict(pair) for key, pair in each.items()} for name, each in pairs.items()},
        "many": {name: line.references for name, line in methods.items() if line.references},
        "failed": [asdict(failure) for failure in comparison.failures],
    }


def to_md(results: ResultSet) -> str:
    """One line for each method, as a Markdown table."""

    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

    heads = _heads(results.runs)
    rule = ["---", *["---:"] * (len(heads) - 1)]
    table = [heads, rule, *_lines(results, escaped)]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in table), "", _note(results), ""])


def to_latex(results: ResultSet) -> str:
    """One line for each method, as a LaTeX table."""
    special = {character: f"\\{character}" for character in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\n": " ",
    }

    def escaped(text: str) -> str:
        return "".join(special.get(character, character) for character in text)

    def row(cells: Sequence[str]) -> str:
        plain = [cell.replace("±", r"$\pm$").replace("−", "$-$").replace(DASH, "--") for cell in cells]
        plain = [cell.replace("≠", r"$\neq$") for cell in plain]
        return f"  {' & '.join(plain)} " + r"\\"

    heads = _heads(results.runs)
    start = [f"% {_note(results)}", r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"]
    head = [r"  \toprule", row([escaped(text) for text in heads]), r"  \midrule"]
    body = [row(cells) for cells in _lines(results, escaped)]
    return "\n".join([*start, *head, *body, r"  \bottomrule", r"\end{tabular}", ""])


_NOTE = (
    "After recovery, in percent, with the mean absolute gap to Retrain in points in brackets (± standard deviation); "
    "communication and computation of clients and server in percent of Retrain."
)


_CONTROL = {"test_acc": "Natural: Test", "forget_acc": "Natural: Forget", "holdout_acc": "Natural: Hold-out"}
_CONTROL_NOTE = (
    " Natural: no unlearning, training goes on without the client; after as many rounds from the request on as the "
    "method took, with its own gap to Retrain."
)


def _controlled(runs: Sequence[RunResults]) -> dict[str, str]:
    """The columns of the control, as far as some run has them."""
    requests = [request for run in runs for request in run.requests]
    return {key: head for key, head in _CONTROL.items() if any(f"natural_{key}" in r.natural for r in requests)}


def _heads(runs: Sequence[RunResults]) -> list[str]:
    return [*_HEADS, *_controlled(runs).values()]


def _note(results: ResultSet) -> str:
    """How to read the table, and why some gaps cannot be judged."""
    note = " ".join([_NOTE + (_CONTROL_NOTE if _controlled(results.runs) else ""), *_bundle_notes(results)])
    each = [group.verdicts for group in group_by_method(results.runs, results.comparisons)]
    if not any(each):
        return note
    why = open_question(each)
    return f"{note} Gaps: {legend(each)}." + (f" {why[:1].upper()}{why[1:]}." if why else "")


def _lines(results: ResultSet, escaped: Callable[[str], str]) -> list[list[str]]:
    """The cells of Original, Retrain, Retrain with another seed, and each method."""
    groups = group_by_method(results.runs, results.comparisons)
    shared = distinct(request for group in groups for request in group.requests)
    control = _controlled(results.runs)
    lines = [[*line, *[DASH] * len(control)] for line in _shared_lines(shared)] if shared else []
    return [*lines, *([*_line(group.summary, escaped), *_natural(group.summary, control)] for group in groups)]


def _shared_lines(shared: Sequence[RequestRows]) -> Iterator[list[str]]:
    """Original and Retrain, which serve all methods, and how far two Retrains lie apart."""
    runs = str(len(shared))
    for name, phase in (("Original", "original"), ("Retrain", "retrained")):
        summary = summarise_phase(name, phase, shared)
        cells = [_level(summary, key) for key in SHOWN]
        yield [name, runs, *cells, fixed(summary.avg_gap), *_EMPTY]
    spreads = mean_spreads(shared)
    if any(key in spreads for key in SHOWN):
        cells = [f"({fixed(spreads[key])})" if key in spreads else DASH for key in SHOWN]
        yield ["Retrain again", runs, *cells, fixed(spreads.get("avg_gap")), *_EMPTY]


def _natural(summary: MethodSummary, keys: Iterable[str]) -> list[str]:
    """Natural's accuracies at equal rounds, and in brackets its gaps to Retrain."""
    cells = []
    for key in keys:
        gap = summary.natural_gaps.get(key)
        level = fixed(summary.natural.get(key))
        cells.append(level if gap is None else f"{level} ({fixed(gap)})")
    return cells


def _level(summary: MethodSummary, key: str) -> str:
    """A measure, and in brackets the mark of its verdict and its gap to Retrain with the deviation."""
    level = fixed(summary.means.get(key))
    if key not in summary.gaps:
        return level
    methods_own = summary.phase == "recovered"  # Original's gaps come without a deviation
    deviation = f" ± {fixed(summary.deviations[key])}" if methods_own and key in summary.deviations else ""
    return f"{level} ({mark(summary.verdicts, key)}{fixed(summary.gaps[key])}{deviation})"


def _line(summary: MethodSummary, escaped: Callable[[str], str]) -> list[str]:
    shares = (summary.recovery_rounds, summary.bytes_percent, summary.computing_percent)
    return [
        escaped(summary.method),
        str(summary.runs),
        *(_level(summary, key) for key in SHOWN),
        mark(summary.verdicts, "avg_gap") + fixed(summary.avg_gap),
        *map(fixed, shares),
    ]
