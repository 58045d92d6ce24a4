# SPDX-License-Identifier: Apache-2.0
"""The tables for other programs: every row with its gaps and costs, and one line for each method."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fedquit.results import quantities
from fedquit.results.comparison import Comparison
from fedquit.results.folders import ResultSet, RunResults
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import AVERAGED, GAPS, SCHEMA, THRESHOLDS, Row, labels, number
from fedquit.results.summary import MethodGroup, MethodSummary, group_by_method, mean_spreads, summarise_phase
from fedquit.results.words import DASH, fixed

SHOWN = labels("test_acc", *GAPS)  # the measures of a line
_HEADS = ("Method", "Requests", *SHOWN.values(), "Avg. gap", "Rounds", "Communication", "Computation")
_EMPTY = [DASH] * 3  # of Original and Retrain: rounds, communication, computation
_SUMMED = ("bytes", "flops", "epochs")  # costs of several fields


def flat_rows(runs: Sequence[RunResults]) -> list[dict[str, Any]]:
    """Every row of every run without curves and densities, with its gaps to Retrain and the sums of its costs."""
    rows = []
    for run in runs:
        for event in run.events:
            rows += [{"run": run.folder} | _scalars(row) | _derived(event, row) for row in event.rows]
    return rows


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
        sizes = {key: quantities.request_distance(at, phase, key) for key in AVERAGED.values()}
        columns["avg_gap"] = quantities.average_gap(sizes)
    return {key: value for key, value in columns.items() if value is not None}


def to_csv(results: ResultSet) -> str:
    """Every row, one line each; a column for everything that some row has."""
    rows = flat_rows(results.runs)
    file = io.StringIO()
    first = ("run", "method", "phase", "request", "clients")
    heads = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    writer = csv.DictWriter(file, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json(results: ResultSet) -> str:
    """Every row, one line for each method, and what comparisons say beyond them."""
    content = {
        "schema": SCHEMA,
        "summary": [_with_budgets(group) for group in group_by_method(results.runs)],
        "rows": flat_rows(results.runs),
        "comparisons": [_comparison(comparison) for comparison in results.comparisons],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


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
    return fields | {
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
        "inside_floor": list(summary.inside_floor),
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

    rule = ["---", *["---:"] * (len(_HEADS) - 1)]
    table = [list(_HEADS), rule, *_lines(results.runs, escaped)]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in table), "", _NOTE, ""])


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
        return f"  {' & '.join(plain)} " + r"\\"

    start = [f"% {_NOTE}", r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(_HEADS) - 1)}}}"]
    head = [r"  \toprule", row([escaped(text) for text in _HEADS]), r"  \midrule"]
    body = [row(cells) for cells in _lines(results.runs, escaped)]
    return "\n".join([*start, *head, *body, r"  \bottomrule", r"\end{tabular}", ""])


_NOTE = (
    "After recovery, in percent, with the mean absolute gap to Retrain in points in brackets (± standard deviation; "
    "* no larger than the Retrain-vs-Retrain spread: not a difference); communication and computation of clients and "
    "server in percent of Retrain."
)


def _lines(runs: Sequence[RunResults], escaped: Callable[[str], str]) -> list[list[str]]:
    """The cells of Original, Retrain, Retrain with another seed, and each method."""
    groups = group_by_method(runs)
    shared = distinct(request for group in groups for request in group.requests)
    lines = list(_shared_lines(shared)) if shared else []
    return [*lines, *(_line(group.summary, escaped) for group in groups)]


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


def _level(summary: MethodSummary, key: str) -> str:
    """A measure, and in brackets its gap to Retrain with deviation and star."""
    level = fixed(summary.means.get(key))
    if key not in summary.gaps:
        return level
    methods_own = summary.phase == "recovered"  # Original's gaps come without a deviation
    deviation = f" ± {fixed(summary.deviations[key])}" if methods_own and key in summary.deviations else ""
    return f"{level} ({fixed(summary.gaps[key])}{deviation}{_star(summary, key)})"


def _star(summary: MethodSummary, key: str) -> str:
    return "*" if key in summary.inside_floor else ""


def _line(summary: MethodSummary, escaped: Callable[[str], str]) -> list[str]:
    shares = (summary.recovery_rounds, summary.bytes_percent, summary.computing_percent)
    return [
        escaped(summary.method),
        str(summary.runs),
        *(_level(summary, key) for key in SHOWN),
        fixed(summary.avg_gap) + _star(summary, "avg_gap"),
        *map(fixed, shares),
    ]
