# SPDX-License-Identifier: Apache-2.0
"""The page itself: what stands where, and how much of it where there are many runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquit.report import figures, tables
from fedquit.report.drawing import Drawn
from fedquit.report.reading import PHASES, Comparison, Failed, Found, Part, Row, Run, mean_part, number
from fedquit.report.summary import sentences_over
from fedquit.report.words import NBSP, fixed, sentences, signed

FEW = 3  # up to so many requests get their own two sentences
MANY = 6  # with more runs, figures show the mean of each method, and the runs are folded away
MOST = 16  # so many methods get figures of their own


def page(found: Found) -> str:
    """All of it."""
    runs = found.runs
    requests = [(run, part) for run in runs for part in run.requests]
    names, folders = _names(runs), {run.folder for run in runs}
    groups = tables.grouped(runs)
    if len(requests) <= FEW:
        short = [(_label(names[run], run, part, len(requests)), sentences(part)) for run, part in requests]
    else:
        short = [("", sentences_over(groups))]
    many = len(runs) > MANY
    environment = Environment(
        loader=PackageLoader("fedquit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(
        title=names[runs[0]] if len(runs) == 1 else f"{len(runs) or 'no'} runs",
        short=short,
        glance=[
            _glance(run, part, f"run{i}", several=len(folders) != len(runs))
            for i, run in enumerate(runs, 1)
            for part in run.requests
            if len(requests) > 1
        ],
        together=_together(runs, groups),
        comparisons=[_compared(one, several=len(found.comparisons) > 1) for one in found.comparisons],
        methods=_methods(groups) if many else [],
        left_out=max(0, len(groups) - MOST) if many else 0,
        many=many,
        runs=[_section(run, names[run], f"run{i}", drawn=not many) for i, run in enumerate(runs, 1)],
    )


def _names(runs: Sequence[Run]) -> dict[Run, str]:
    """Titles, told apart by the folder where two are the same, and by a number where that is the same, too."""
    titles = Counter(run.name for run in runs)
    names = {run: f"{run.name} ({run.folder})" if titles[run.name] > 1 else run.name for run in runs}
    again = Counter(names.values())
    return {run: f"{name}, run {i}" if again[name] > 1 else name for i, (run, name) in enumerate(names.items(), 1)}


def _label(name: str, run: Run, part: Part, requests: int) -> str:
    if requests == 1:
        return ""
    return f"{name}, request {part.number + 1}" if len(run.parts) > 1 else name


def _glance(run: Run, part: Part, key: str, *, several: bool) -> dict[str, Any]:
    """One line of the table that sets the requests side by side."""
    forget = [fixed(part.get(phase, "forget_acc")) for phase in ("original", "unlearned", "recovered", "retrained")]
    test = [fixed(part.get(phase, "test_acc")) for phase in ("recovered", "retrained")]
    work = [fixed(part.get("recovered", "rounds"), 0), signed(part.get("unlearned", "price_of_forgetting"), 3)]
    name = f"{run.folder} ({key.replace('run', 'run ')})" if several else run.folder
    return {
        "key": key,
        "name": f"{name}, request {part.number + 1}" if len(run.parts) > 1 else name,
        "method": part.method,
        "cells": [*forget, signed(part.gap("recovered")), *test, *work],
    }


def _together(runs: Sequence[Run], groups: Sequence[tables.Group]) -> dict[str, Any]:
    """What sets the methods side by side."""
    parts = {group.label: group.parts for group in groups}
    drawn = [figures.radar(parts, "all-radar"), figures.over_v(runs, "all-v")]
    federations = {json.dumps(figures.label_counts(run.clients), sort_keys=True) for run in runs}
    drawn += [figures.labels_by_client(runs, "all-labels")] if len(federations) == 1 else []
    shown = [tables.gaps(groups), tables.thresholds(groups), tables.distances(groups)]
    shown += [tables.by_client(groups) if groups else None, tables.budgets(groups), tables.costs(groups)]
    return {"figures": [d for d in drawn if d], "tables": [t for t in shown if t]}


def _compared(found: Comparison, *, several: bool) -> dict[str, Any]:
    """What a comparison adds to its runs."""
    shown = [tables.pairwise(found), tables.many_models(found)]
    title = f"The comparison {found.folder}" if several else "The comparison"
    alone = shown[0] is None and len({run.rpartition("/")[2] for run in found.runs or ()}) > 1
    return {"title": title, "tables": [t for t in shown if t], "alone": alone, "failed": _gathered(found.failed)}


def _gathered(failed: Sequence[Failed]) -> list[dict[str, str]]:
    """One entry for each method and reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for one in failed:
        where.setdefault((one.method, one.why), []).append(one.where)
    return [{"method": m, "why": why, "where": "; ".join(w for w in at if w)} for (m, why), at in where.items()]


def _methods(groups: Sequence[tables.Group]) -> list[dict[str, Any]]:
    """The mean of each method."""
    found = []
    for i, group in enumerate(groups[:MOST], 1):
        part = mean_part(group.parts)
        count = len(group.parts)
        found.append(
            {
                "key": f"method{i}",
                "title": group.label,
                "over": f"Mean over {count} requests" if count > 1 else "One request",
                "figures": figures.of_part(part, f"method{i}"),
                "exposure": tables.exposure(part),
            }
        )
    return found


def _section(run: Run, name: str, key: str, *, drawn: bool) -> dict[str, Any]:
    method = run.recipe.get("method")
    facts = [
        f"method {method['name']}" if isinstance(method, dict) and "name" in method else "",
        f"seed {run.recipe['seed']}" if "seed" in run.recipe else "",
        f"folder {run.folder}",
    ]
    many = len(run.parts) > 1
    return {
        "key": key,
        "name": name,
        "facts": [fact for fact in facts if fact],
        "requests": [_request(part, f"{key}-request{part.number}", many=many) for part in run.requests if drawn],
        "groups": [
            {"title": _heading(part, many=many) if many else "", "rows": [_cells(part, row) for row in part.rows]}
            for part in run.parts
        ],
        "recipe": _toml(run.recipe),
        "versions": [(str(k), str(v)) for k, v in run.versions.items()],
    }


def _heading(part: Part, *, many: bool) -> str:
    return f"Request {part.number + 1}: {part.title[:1].lower()}{part.title[1:]}" if many else part.title


def _request(part: Part, key: str, *, many: bool) -> dict[str, Any]:
    drawn: list[Drawn] = figures.of_part(part, key)
    return {"key": key, "title": _heading(part, many=many), "figures": drawn, "exposure": tables.exposure(part)}


def _cells(part: Part, row: Row) -> dict[str, Any]:
    runs = number(row.get("runs")) or 1
    gap = part.gap(row["phase"]) if row["phase"] in ("unlearned", "recovered") else None
    if (bought := part.budgets.get(number(row.get("budget")) or 0.0)) is not None:
        gap = bought.gap("recovered")
    return {
        "phase": _phase(row),
        "note": f"mean of {runs:g}" if runs > 1 else "",
        "method": row["method"],
        "clients": ", ".join(map(str, row["clients"])) + (" (samples)" if row.get("samples") else ""),
        "numbers": [
            fixed(number(row.get("rounds")), 0),
            fixed(number(row.get("seconds"))),
            *(fixed(number(row.get(f"{kind}_acc"))) for kind in ("test", "retain", "forget", "holdout")),
            signed(gap),
        ],
    }


def _phase(row: Row) -> str:
    budget = number(row.get("budget"))
    own = str(row["phase"]).capitalize()
    return f"{own} {100 * budget:g}{NBSP}%" if budget is not None else PHASES.get(row["phase"], own)


def _toml(recipe: Mapping[str, Any]) -> str:
    """The recipe as one would write it."""

    def value(v: object) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f"{key(k)} = {value(x)}" for k, x in v.items()) + " }" if v else "{}"
        if isinstance(v, list):
            return "[" + ", ".join(map(value, v)) + "]"
        return json.dumps(v, ensure_ascii=False)

    def key(k: str) -> str:
        return k if re.fullmatch(r"[A-Za-z0-9_-]+", k) else json.dumps(k)

    def lines(table: Mapping[str, Any]) -> list[str]:
        return [f"{key(k)} = {value(v)}" for k, v in table.items() if v is not None]

    tables: list[tuple[str, Mapping[str, Any]]] = []
    plain: dict[str, Any] = {}
    for k, v in recipe.items():
        if isinstance(v, dict):
            tables.append((f"[{key(k)}]", v))
        elif isinstance(v, list) and v and all(isinstance(x, dict) for x in v):
            tables += [(f"[[{key(k)}]]", x) for x in v]
        else:
            plain[k] = v
    blocks = [lines(plain), *([head, *lines(table)] for head, table in tables)]
    return "\n\n".join("\n".join(block) for block in blocks if block)
