# SPDX-License-Identifier: Apache-2.0
"""The tables for other programs: every row, and one line for each method."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedquit.report.reading import GAPS, Comparison, Found, Part, Row, Run, mean
from fedquit.report.tables import Group, grouped, once
from fedquit.report.words import DASH

_SHOWN = {"test_acc": "Test", **GAPS}
_HEADS = ("Method", "Requests", *_SHOWN.values(), "Avg. gap", "Rounds", "Communication", "Computation")


def flat_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every row of every run, without curves and densities."""
    return [{"run": run.folder} | _scalars(row) for run in runs for row in run.rows]


def _scalars(row: Row) -> dict[str, Any]:
    found = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    return found | {"clients": " ".join(map(str, row["clients"]))}


def to_csv(found: Found) -> str:
    """Every row, one line each; a column for everything that some row has."""
    rows = flat_rows(found.runs)
    file = io.StringIO()
    heads = list(dict.fromkeys(["run", "method", "phase", "request", "clients", *(k for row in rows for k in row)]))
    writer = csv.DictWriter(file, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json(found: Found) -> str:
    """Both tables, and what comparisons say beyond them."""
    both = {"summary": [_with_budgets(group) for group in grouped(found.runs)], "rows": flat_rows(found.runs)}
    said = [_said(comparison) for comparison in found.comparisons]
    return json.dumps({"schema": 1, **both, "comparisons": said}, indent=2, ensure_ascii=False) + "\n"


def _with_budgets(group: Group) -> dict[str, Any]:
    bought = {f"{share:g}": Group(group.label, parts).summary() for share, parts in group.bought().items()}
    return group.summary() | {"budgets": bought}


def _said(found: Comparison) -> dict[str, Any]:
    """What a comparison says; its floors and runs are in the other tables."""
    return {k: v for k, v in asdict(found).items() if k not in ("floors", "own_floors", "runs")}


def to_md(found: Found) -> str:
    """One line for each method, as a Markdown table."""

    def safe(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

    lines = [list(_HEADS), ["---", *["---:"] * (len(_HEADS) - 1)], *_lines(found.runs, safe)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", _NOTE, ""])


def to_latex(found: Found) -> str:
    """One line for each method, as a LaTeX table."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\n": " ",
    }

    def safe(text: str) -> str:
        return "".join(special.get(c, c) for c in text)

    def row(cells: Sequence[str]) -> str:
        return "  " + " & ".join(c.replace("±", r"$\pm$").replace(DASH, "--") for c in cells) + r" \\"

    body = [row(line) for line in _lines(found.runs, safe)]
    start = [f"% {_NOTE}", r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(_HEADS) - 1)}}}"]
    head = [r"  \toprule", row([safe(h) for h in _HEADS]), r"  \midrule"]
    return "\n".join([*start, *head, *body, r"  \bottomrule", r"\end{tabular}", ""])


_NOTE = (
    "After recovery, in percent, with the mean absolute gap to Retrain in points in brackets (± standard deviation; "
    "* inside the noise floor: not a difference); communication and computation in percent of Retrain."
)


def _lines(runs: Sequence[Run], safe: Callable[[str], str]) -> list[list[str]]:
    groups = grouped(runs)
    methods = [group.summary() for group in groups]
    every = [part for group in groups for part in group.parts]
    return [*_yardsticks(every, methods), *(_line(found, safe) for found in methods)]


def _yardsticks(every: Sequence[Part], methods: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Original and Retrain, which serve all methods, and how far two Retrains lie apart."""
    known = Group("", once(every))
    lines = []
    for name, phase in (("Original", "original"), ("Retrain", "retrained")):
        levels = {k: mean(part.get(phase, k) for part in known.parts) for k in _SHOWN}
        apart = {k: mean(known.deltas(k, phase)) if phase == "original" else None for k in _SHOWN}
        average = DASH if None in (each := [apart[k] for k in GAPS]) else f"{mean(each):.1f}"
        cells = [_number(levels[k]) + ("" if apart[k] is None else f" ({apart[k]:.1f})") for k in _SHOWN]
        lines.append([name, str(len(known.parts)), *cells, average, *[DASH] * 3])
    floors = {k: mean(found[f"{k}_floor"] for found in methods) for k in _SHOWN}
    if any(floor is not None for floor in floors.values()):
        average = _number(mean(found["avg_gap_floor"] for found in methods))
        cells = [DASH if floor is None else f"({floor:.1f})" for floor in floors.values()]
        lines.append(["Retrain again", str(len(known.parts)), *cells, average, *[DASH] * 3])
    return lines if known.parts else []


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}"


def _line(found: dict[str, Any], safe: Callable[[str], str]) -> list[str]:
    def plain(key: str) -> str:
        return _number(found[key])

    def star(key: str) -> str:
        gap, floor = found[key], found[f"{key}_floor" if key == "avg_gap" else key.replace("_gap", "_floor")]
        return "*" if gap is not None and floor is not None and gap <= floor else ""

    cells = [safe(found["method"]), str(found["requests"])]
    for key in _SHOWN:
        spread = "" if found[f"{key}_gap_std"] is None else f" ± {found[f'{key}_gap_std']:.1f}"
        missing = found[f"{key}_gap"] is None
        cells.append(plain(key) + ("" if missing else f" ({plain(f'{key}_gap')}{spread}{star(f'{key}_gap')})"))
    shares = (plain(k) for k in ("recovery_rounds", "communication_percent", "computation_percent"))
    return [*cells, plain("avg_gap") + star("avg_gap"), *shares]
