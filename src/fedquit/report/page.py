# SPDX-License-Identifier: Apache-2.0
"""The page itself: its sections, and which of them are folded away where there are many runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquit.report import figures, tables
from fedquit.report.drawing import Drawn
from fedquit.report.sentences import sentences, sentences_over
from fedquit.results import quantities
from fedquit.results.averages import mean_request
from fedquit.results.comparison import Comparison, Failure
from fedquit.results.folders import ResultSet, RunResults
from fedquit.results.requests import RequestRows
from fedquit.results.schema import PHASES, Row, number
from fedquit.results.summary import MethodGroup, group_by_method
from fedquit.results.words import NBSP, fixed, signed

FEW = 3  # up to so many requests have sentences of their own
MANY = 6  # with more runs, figures show the mean of each method, and the runs are folded away
MOST = 16  # methods with figures of their own, at most


def page(results: ResultSet) -> str:
    """The whole page as HTML."""
    runs = results.runs
    requests = [(run, request) for run in runs for request in run.requests]
    names = _names(runs)
    folders = {run.folder for run in runs}
    groups = group_by_method(runs, results.comparisons)
    if len(requests) <= FEW:
        short = [(_label(names[run], run, request, len(requests)), sentences(request)) for run, request in requests]
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
            _glance(run, request, f"run{i}", several=len(folders) != len(runs))
            for i, run in enumerate(runs, 1)
            for request in run.requests
            if len(requests) > 1
        ],
        together=_together(runs, groups),
        comparisons=[_compared(one, several=len(results.comparisons) > 1) for one in results.comparisons],
        methods=_methods(groups) if many else [],
        left_out=max(0, len(groups) - MOST) if many else 0,
        many=many,
        runs=[_section(run, names[run], f"run{i}", drawn=not many) for i, run in enumerate(runs, 1)],
    )


def _names(runs: Sequence[RunResults]) -> dict[RunResults, str]:
    """The titles of the runs; with the folder where two are the same, and a number where that is the same, too."""
    titles = Counter(run.name for run in runs)
    names = {run: f"{run.name} ({run.folder})" if titles[run.name] > 1 else run.name for run in runs}
    again = Counter(names.values())
    return {run: f"{name}, run {i}" if again[name] > 1 else name for i, (run, name) in enumerate(names.items(), 1)}


def _label(name: str, run: RunResults, request: RequestRows, requests: int) -> str:
    if requests == 1:
        return ""
    return f"{name}, request {request.number + 1}" if len(run.events) > 1 else name


def _glance(run: RunResults, request: RequestRows, key: str, *, several: bool) -> dict[str, Any]:
    """One line of the table of all requests."""
    phases = ("original", "unlearned", "recovered", "retrained")
    forget = [fixed(request.get(phase, "forget_acc")) for phase in phases]
    test = [fixed(request.get(phase, "test_acc")) for phase in ("recovered", "retrained")]
    work = [fixed(request.get("recovered", "rounds"), 0), signed(request.get("unlearned", "price_of_forgetting"), 3)]
    name = f"{run.folder} ({key.replace('run', 'run ')})" if several else run.folder
    return {
        "key": key,
        "name": f"{name}, request {request.number + 1}" if len(run.events) > 1 else name,
        "method": request.method,
        "cells": [*forget, signed(quantities.request_gap(request, "recovered")), *test, *work],
    }


def _together(runs: Sequence[RunResults], groups: Sequence[MethodGroup]) -> dict[str, Any]:
    """Figures and tables over all methods."""
    drawn = [figures.radar(groups, "all-radar"), figures.over_v(runs, "all-v")]
    federations = {json.dumps(figures.label_counts(run.clients), sort_keys=True) for run in runs}
    drawn += [figures.labels_by_client(runs, "all-labels")] if len(federations) == 1 else []
    shown = [tables.gaps(groups), tables.thresholds(groups), tables.distances(groups)]
    shown += [tables.by_client(groups) if groups else None, tables.budgets(groups), tables.costs(groups)]
    return {"figures": [d for d in drawn if d], "tables": [t for t in shown if t]}


def _compared(comparison: Comparison, *, several: bool) -> dict[str, Any]:
    """What a comparison adds to its runs."""
    shown = [tables.pairwise(comparison), tables.many_models(comparison)]
    methods = {run.rpartition("/")[2] for run in comparison.runs or ()}
    return {
        "title": f"The comparison {comparison.folder}" if several else "The comparison",
        "tables": [table for table in shown if table],
        "alone": shown[0] is None and len(methods) > 1,
        "failed": _failures(comparison.failures),
    }


def _failures(failures: Sequence[Failure]) -> list[dict[str, str]]:
    """One entry for each method and reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        places.setdefault((failure.method, failure.why), []).append(failure.where)
    return [
        {"method": method, "why": why, "where": "; ".join(filter(None, where))}
        for (method, why), where in places.items()
    ]


def _methods(groups: Sequence[MethodGroup]) -> list[dict[str, Any]]:
    """Figures of the mean of each method."""
    sections = []
    for i, group in enumerate(groups[:MOST], 1):
        request = mean_request(group.requests)
        count = len(group.requests)
        sections.append(
            {
                "key": f"method{i}",
                "title": group.label,
                "over": f"Mean over {count} requests" if count > 1 else "One request",
                "figures": figures.of_request(request, f"method{i}"),
                "exposure": tables.exposure(request),
            }
        )
    return sections


def _section(run: RunResults, name: str, key: str, *, drawn: bool) -> dict[str, Any]:
    method = run.recipe.get("method")
    facts = [
        f"method {method['name']}" if isinstance(method, dict) and "name" in method else "",
        f"seed {run.recipe['seed']}" if "seed" in run.recipe else "",
        f"folder {run.folder}",
    ]
    many = len(run.events) > 1
    return {
        "key": key,
        "name": name,
        "facts": [fact for fact in facts if fact],
        "requests": [_request(each, f"{key}-request{each.number}", many=many) for each in run.requests if drawn],
        "groups": [_event(event, many=many) for event in run.events],
        "recipe": _toml(run.recipe),
        "versions": [*_code(run), *((str(name), str(version)) for name, version in run.versions.items())],
    }


def _code(run: RunResults) -> list[tuple[str, str]]:
    """The commit of the code, where the results name it."""
    commit = run.code.get("commit")
    if not isinstance(commit, str):
        return []
    return [("commit", commit + (" with uncommitted changes" if run.code.get("dirty") is True else ""))]


def _event(event: RequestRows, *, many: bool) -> dict[str, Any]:
    title = _heading(event, many=many) if many else ""
    return {"title": title, "rows": [_cells(event, row) for row in event.rows]}


def _heading(request: RequestRows, *, many: bool) -> str:
    return f"Request {request.number + 1}: {request.title[:1].lower()}{request.title[1:]}" if many else request.title


def _request(request: RequestRows, key: str, *, many: bool) -> dict[str, Any]:
    drawn: list[Drawn] = figures.of_request(request, key)
    return {
        "key": key,
        "title": _heading(request, many=many),
        "figures": drawn,
        "exposure": tables.exposure(request),
        "canaries": tables.canaries(request),
    }


def _cells(request: RequestRows, row: Row) -> dict[str, Any]:
    runs = number(row.get("runs")) or 1
    own_gap = row["phase"] in ("unlearned", "recovered")
    gap = quantities.request_gap(request, row["phase"]) if own_gap else None
    ended = request.budgets.get(number(row.get("budget")) or 0.0)
    if ended is not None:
        gap = quantities.request_gap(ended, "recovered")
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
