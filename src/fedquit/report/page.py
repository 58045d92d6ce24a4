# SPDX-License-Identifier: Apache-2.0
"""The page itself: its sections, and which of them are folded away where there are many runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquit.report import card, figures, tables
from fedquit.report.drawing import Drawn
from fedquit.results.averages import mean, mean_request
from fedquit.results.bundles import RETRAIN_FROM, bundle_notes
from fedquit.results.comparison import Comparison, Failure
from fedquit.results.folders import ResultSet, RunResults
from fedquit.results.requests import RequestRows
from fedquit.results.summary import MethodGroup, group_by_method

MANY = 6  # with more runs, figures show the mean of each method, and the runs are folded away
MOST = 16  # methods with figures of their own, at most
NAMED = 3  # values of a fact that are named; more are counted


def page(results: ResultSet) -> str:
    """The whole page as HTML."""
    runs = results.runs
    requests = [(run, request) for run in runs for request in run.requests]
    groups = group_by_method(runs, results.comparisons)
    names = _names(runs)
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
        title=_title(results),
        facts=_facts(results, groups),
        warnings=[*card.warnings(runs), *bundle_notes(run.extra.get(RETRAIN_FROM) for run in runs)],
        card=card.card(groups, results.sweeps),
        note=card.NOTE,
        nothing="Nothing was to be forgotten: no request is in these results."
        if runs
        else "No run came through: what failed, and why, is below.",
        first=_first(groups, results.sweeps),
        paths=_paths(groups),
        together=_together(runs, groups),
        glance=_glance(runs) if len(requests) > 1 else None,
        comparisons=[_compared(one, several=len(results.comparisons) > 1) for one in results.comparisons],
        methods=_methods(groups) if many else [],
        left_out=max(0, len(groups) - MOST) if many else 0,
        many=many,
        runs=[_section(run, names[run], f"run{i}", drawn=not many) for i, run in enumerate(runs, 1)],
    )


def _title(results: ResultSet) -> str:
    """The recipe's title; of several, the first, and how many others there are."""
    stored = [comparison.recipe.get("title") for comparison in results.comparisons]
    titles = [title for title in stored if isinstance(title, str) and title.strip()]
    titles = list(dict.fromkeys([*titles, *(run.name for run in results.runs)]))
    if not titles:
        return "No runs"
    return titles[0] if len(titles) == 1 else f"{titles[0]}, and {len(titles) - 1} more"


def _facts(results: ResultSet, groups: Sequence[MethodGroup]) -> list[tuple[str, str]]:
    """Targets, seeds, data and code version, each with what all runs have in common, or how many there are."""
    runs = results.runs
    requests = [request for run in runs for request in run.requests]
    seeds = [str(seed) for seed in dict.fromkeys(request.seed for request in requests) if seed is not None]
    codes = [_version(run.code, run.versions) for run in runs]
    codes += [_version(comparison.code, {}) for comparison in results.comparisons]
    found = {
        "Forgotten": [card.targets(groups)] if groups else [],
        "Seeds" if len(seeds) > 1 else "Seed": [", ".join(seeds)]
        if len(seeds) <= 2 * NAMED
        else [f"{len(seeds)} seeds"],
        "Data": [_data(run.recipe) for run in runs],
        "Code": codes,
    }
    facts = []
    for label, values in found.items():
        distinct = list(dict.fromkeys(value for value in values if value))
        if distinct:
            more = f", and {len(distinct) - NAMED} more" if len(distinct) > NAMED else ""
            facts.append((label, "; ".join(distinct[:NAMED]) + more))
    return [(label, f"{value[:1].upper()}{value[1:]}" if label == "Forgotten" else value) for label, value in facts]


def _data(recipe: Mapping[str, Any]) -> str:
    """The data set and how it is divided."""
    data = recipe.get("data")
    if not isinstance(data, dict):
        return ""
    parts = [str(data.get("name", ""))]
    parts += [f"{data['clients']} clients"] if "clients" in data else []
    partition = str(data.get("partition", ""))
    skew = f" {data['alpha']:g}" if partition == "lda" and isinstance(data.get("alpha"), int | float) else ""
    parts += [f"{partition}{skew}"] if partition else []
    parts += (
        [f"hold-out {data['holdout']:g}"] if isinstance(data.get("holdout"), int | float) and data["holdout"] else []
    )
    return ", ".join(part for part in parts if part)


def _version(code: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The version of fedquit, and the commit where the results name it."""
    version = code.get("version", versions.get("fedquit"))
    commit = code.get("commit")
    parts = [f"fedquit {version}"] if isinstance(version, str) else []
    if isinstance(commit, str):
        parts.append(f"commit {commit[:12]}" + (" with uncommitted changes" if code.get("dirty") is True else ""))
    return ", ".join(parts)


def _first(groups: Sequence[MethodGroup], sweeps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What decides, on the first page: the gap against the cost, or the rates of a sweep, and the table."""
    margin = mean(request.get("recovered", "holdout_margin") for group in groups for request in group.requests)
    drawn = [figures.over_rates(sweep, f"sweep{i}", margin) for i, sweep in enumerate(sweeps, 1)]
    deciding = figures.decision(groups, "decision")
    drawn += [deciding if deciding or sweeps else figures.traces(groups, "traces")]
    rates = [tables.by_rate(sweep) for sweep in sweeps]
    shown = [*rates, tables.gaps(groups), tables.without_retrain(groups) if not any(rates) else None]
    return {"figures": [one for one in drawn if one], "tables": [table for table in shown if table]}


def _paths(groups: Sequence[MethodGroup]) -> list[Drawn]:
    """The rounds of several methods, or of one beside its control; a run alone has its own figure."""
    has_control = any(request.natural_path for group in groups for request in group.requests)
    return figures.over_rounds(groups, "paths-drawn") if len(groups) > 1 or has_control else []


def _names(runs: Sequence[RunResults]) -> dict[RunResults, str]:
    """The titles of the runs; with the folder where two are the same, and a number where that is the same, too."""
    titles = Counter(run.name for run in runs)
    names = {run: f"{run.name} ({run.folder})" if titles[run.name] > 1 else run.name for run in runs}
    again = Counter(names.values())
    return {run: f"{name}, run {i}" if again[name] > 1 else name for i, (run, name) in enumerate(names.items(), 1)}


def _glance(runs: Sequence[RunResults]) -> tables.Table:
    """The table of all requests."""
    several = len({run.folder for run in runs}) != len(runs)
    lines = []
    for i, run in enumerate(runs, 1):
        name = f"{run.folder} (run {i})" if several else run.folder
        for request in run.requests:
            own = f"{name}, request {request.number + 1}" if len(run.events) > 1 else name
            lines.append((own, f"run{i}", request))
    return tables.requests_at_a_glance(lines)


def _together(runs: Sequence[RunResults], groups: Sequence[MethodGroup]) -> dict[str, Any]:
    """More figures and tables over all methods."""
    drawn = [figures.radar(groups, "all-radar"), figures.over_v(runs, "all-v")]
    federations = {json.dumps(figures.label_counts(run.clients), sort_keys=True) for run in runs}
    drawn += [figures.labels_by_client(runs, "all-labels")] if len(federations) == 1 else []
    shown = [tables.two_kinds(groups), tables.control(groups), tables.durability(groups), tables.costs(groups)]
    shown += [tables.thresholds(groups), tables.distances(groups)]
    shown += [*(tables.by_client(groups) if groups else []), tables.budgets(groups)]
    return {"figures": [d for d in drawn if d], "tables": [t for t in shown if t]}


def _compared(comparison: Comparison, *, several: bool) -> dict[str, Any]:
    """What a comparison adds to its runs."""
    pairwise = tables.pairwise(comparison)
    shown = [pairwise, *tables.many_models(comparison)]
    methods = {run.rpartition("/")[2] for run in comparison.runs or ()}
    return {
        "title": f"The comparison {comparison.folder}" if several else "The comparison",
        "tables": [table for table in shown if table],
        "alone": pairwise is None and len(methods) > 1,
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
        "numbers": tables.all_numbers([(_heading(event, many=True) if many else "", event) for event in run.events]),
        "recipe": _toml(run.recipe),
        "versions": [*_code(run), *((str(name), str(version)) for name, version in run.versions.items())],
    }


def _code(run: RunResults) -> list[tuple[str, str]]:
    """The commit of the code, where the results name it."""
    commit = run.code.get("commit")
    if not isinstance(commit, str):
        return []
    return [("commit", commit + (" with uncommitted changes" if run.code.get("dirty") is True else ""))]


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
