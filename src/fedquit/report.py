# SPDX-License-Identifier: Apache-2.0
"""One HTML page over one or more runs: two plain sentences, the figures, every number, and the recipe behind them.

The page needs nothing but itself: no network, no script. Figures are SVG whose colours are the page's own, so that they
follow it into the dark. The same runs give the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedquit.errors import StoreError

SCHEMA = 1
FEW = 3  # up to so many requests get their own two sentences
DASH, NBSP = "–", "\u00a0"
PHASES = {"original": "Original", "retrained": "Retrained", "unlearned": "Unlearned", "recovered": "Recovered"}

Row = Mapping[str, Any]
_NEEDED: dict[str, type] = {"method": str, "phase": str, "request": int, "clients": list}

# Colours that no figure would choose, and the colours of the page that take their place.
_INK, _SOFT, _LINE, _FORGET, _TEST = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
_COLOURS = {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _LINE: "var(--line)",
    _FORGET: "var(--accent)",
    _TEST: "var(--quiet)",
}
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedquit",
    "svg.fonttype": "none",
    "font.size": 12,
    "legend.fontsize": 11,
    "ytick.labelsize": 11,
    "axes.labelsize": 11,
    "axes.facecolor": "none",
    "xtick.major.pad": 6,
    "text.color": _INK,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 1,
    "xtick.color": _SOFT,
    "xtick.labelcolor": _INK,
    "ytick.color": _SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}


def load_results(folder: Path) -> dict[str, Any]:
    """What a run wrote into its folder."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"no results.json in {folder}: run `fedquit run RECIPE --out {folder}` first") from error
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}): make it readable and try again.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(results, dict):
        raise _damaged(path, "it is not an object")
    if results.get("schema") != SCHEMA:
        raise StoreError(
            f"{path} has schema {results.get('schema')!r} and this version of fedquit reads schema {SCHEMA} only: "
            "run the recipe again in another folder, or use the version that wrote it."
        )
    for key, kind in (("recipe", dict), ("versions", dict), ("rows", list)):
        if not isinstance(results.get(key), kind):
            raise _damaged(path, f"it has no usable {key}")
    for number, row in enumerate(results["rows"]):
        missing = [k for k, kind in _NEEDED.items() if not (isinstance(row, dict) and isinstance(row.get(k), kind))]
        if missing:
            raise _damaged(path, f"row {number} has no usable {missing[0]}")
    return results


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): delete it and run the same recipe in its folder again.")


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write one HTML file over these runs, whole or not at all."""
    if not folders:
        raise StoreError("a report needs at least one run: name its folder.")
    _write_atomic(out, _page([_Run(folder.resolve().name, load_results(folder)) for folder in folders]).encode())


def _write_atomic(path: Path, content: bytes) -> None:
    """The store's own function would bring torch along."""
    fresh = path.with_name(f".{path.name[:80]}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror or error}): what was there is unchanged; free space or choose "
            "another place, then try again."
        ) from error


# What a run holds


class _Run:
    """One run: its rows, request by request."""

    def __init__(self, folder: str, results: Mapping[str, Any]) -> None:
        self.folder = folder
        self.recipe: Mapping[str, Any] = results["recipe"]
        self.versions: Mapping[str, Any] = results["versions"]
        title = self.recipe.get("title")
        self.name = title if isinstance(title, str) and title.strip() else folder
        self.parts = [_Part(n, list(rows)) for n, rows in groupby(results["rows"], key=lambda row: int(row["request"]))]
        self.requests = [part for part in self.parts if part.forgets]


@dataclass(frozen=True)
class _Part:
    """The rows of one request, or of clients that joined."""

    number: int
    rows: Sequence[Row]

    @property
    def forgets(self) -> bool:
        """Whether this is a request to forget."""
        return any(row["phase"] in PHASES for row in self.rows)

    def get(self, phase: str, key: str) -> float | None:
        """A number, where the phase has one."""
        return next((_number(row.get(key)) for row in self.rows if row["phase"] == phase), None)

    def gap(self, phase: str) -> float | None:
        """How far the accuracy on the data to forget lies above Retrain's, in points."""
        return _minus(self.get(phase, "forget_acc"), self.get("retrained", "forget_acc"))

    @property
    def method(self) -> str:
        """The unlearning method."""
        return next(
            (str(row["method"]) for row in self.rows if row["phase"] in ("unlearned", "recovered")), "the method"
        )

    @property
    def who(self) -> str:
        """Whom it is about."""
        clients = self.rows[0]["clients"]
        some = f"{len(clients)} clients" if len(clients) > 5 else _and("client", clients)
        return f"chosen samples of {some}" if self.rows[0].get("samples") else some

    @property
    def title(self) -> str:
        """A heading."""
        return f"Forget {self.who}" if self.forgets else f"{self.who[:1].upper()}{self.who[1:]} joined"

    @property
    def curve(self) -> list[Mapping[str, Any]]:
        """The points of the recovery."""
        found = next((row.get("curve") for row in self.rows if row["phase"] == "recovered"), None)
        points = found if isinstance(found, list) else []
        return [p for p in points if isinstance(p, dict) and _number(p.get("round")) is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


# How numbers read


def _fixed(value: float | None, digits: int = 1) -> str:
    return DASH if value is None else f"{value:.{digits}f}".replace("-", "−")


def _signed(value: float | None, digits: int = 1) -> str:
    if value is None:
        return DASH
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


def _percent(value: float | None) -> str:
    return f"{_fixed(value)}{NBSP}%" if value is not None else "not measured"


def _and(noun: str, things: Sequence[object]) -> str:
    words = [str(t) for t in things]
    if len(words) == 1:
        return f"{noun} {words[0]}"
    return f"{noun}s " + " and ".join([", ".join(words[:-1]), words[-1]] if words else ["none"])


def _count(value: float | None, noun: str) -> str:
    if value is None:
        return f"an unknown number of {noun}s"
    return f"{value:g} {noun}" if value == 1 else f"{value:g} {noun}s"


def _seconds(*values: float | None) -> str:
    known = [v for v in values if v is not None]
    total = sum(known)
    if not known:
        return "an unknown time"
    return (
        f"{total:.1f}{NBSP}s"
        if total < 120
        else f"{total / 60:.0f}{NBSP}min"
        if total < 7200
        else f"{total / 3600:.1f}{NBSP}h"
    )


def _range(values: Iterable[float | None], digits: int = 1, unit: str = "") -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "not measured"
    low, high = (f"{edge(known):.{digits}f}" for edge in (min, max))
    return f"{low if low == high else f'{low}–{high}'}{unit}"


def _sentences(part: _Part) -> str:
    """What was forgotten, how close to Retrain, and at what cost."""
    before, after, now = (part.get(p, "forget_acc") for p in ("original", "unlearned", "recovered"))
    gap, there = part.gap("recovered"), _percent(part.get("retrained", "forget_acc"))
    if gap is None or round(gap, 1) == 0:
        close = f"and Retrain, which never saw that data, has {there}"
    else:
        close = f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'} Retrain, which never saw that data ({there})"
    price = part.get("unlearned", "price_of_forgetting")
    if price is None:
        cost = "The price of forgetting was not measured"
    elif round(price, 3) == 0:
        cost = "The price of forgetting was nil: the retained clients’ loss did not change"
    else:
        cost = (
            f"The price of forgetting: the retained clients’ loss {'rose' if price > 0 else 'fell'} by {abs(price):.3f}"
        )
    rounds = part.get("recovered", "rounds")
    test = {phase: _percent(part.get(phase, "test_acc")) for phase in PHASES}
    spent = _seconds(part.get("unlearned", "seconds"), part.get("recovered", "seconds"))
    return (
        f"Asked to forget {part.who}, {part.method} took the accuracy on the data to forget from {_percent(before)} "
        f"to {_percent(after)}; after {_count(rounds, 'round')} of recovery it is {_percent(now)}, {close}. "
        f"{cost}, and test accuracy went from {test['original']} to {test['unlearned']}, then to {test['recovered']} "
        f"with recovery, against Retrain’s {test['retrained']}; that took {spent} where Retrain took "
        f"{_seconds(part.get('retrained', 'seconds'))}."
    )


def _sentences_over(parts: Sequence[_Part], runs: int) -> str:
    """The same over many requests, as ranges."""

    def over(phase: str, key: str) -> str:
        return _range((p.get(phase, key) for p in parts), unit=f"{NBSP}%")

    gaps = [abs(g) for p in parts if (g := p.gap("recovered")) is not None]
    prices = [v for p in parts if (v := p.get("unlearned", "price_of_forgetting")) is not None]
    paid = f"between {_signed(min(prices), 3)} and {_signed(max(prices), 3)}" if prices else "not measured"
    return (
        f"Over {len(parts)} requests in {_count(runs, 'run')}, unlearning took the accuracy on the data to forget from "
        f"{over('original', 'forget_acc')} to {over('unlearned', 'forget_acc')}; after recovery it is "
        f"{over('recovered', 'forget_acc')}, and its distance to Retrain, which never saw that data, is "
        f"{_range(gaps)} points. The price of forgetting (the change of the retained clients’ loss) was {paid}, "
        f"recovery took {_range((p.get('recovered', 'rounds') for p in parts), 0)} rounds, and test accuracy ended at "
        f"{over('recovered', 'test_acc')}, against Retrain’s {over('retrained', 'test_acc')}."
    )


# Figures


def _draw(name: str, paint: Callable[[Axes], None]) -> Markup:
    """An SVG to set into the page, in the page's font and colours, with ids that are its own."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_ylim(0, 105)
        axes.set_yticks(range(0, 101, 20))
        axes.set_ylabel("accuracy (%)")
        paint(axes)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.8, columnspacing=1.6, borderaxespad=0.2)
        file = io.StringIO()
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]*)"', svg)
    svg = re.sub(r"^<svg[^>]*>", f'<svg viewBox="{size[1] if size else ""}" aria-hidden="true" focusable="false">', svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg).replace('href="#', f'href="#{name}-')
    svg = re.sub(r'font: ([\d.]+px) [^;"]*', r"font-size: \1", svg)
    svg = re.sub(r'font-family: [^;"]*;? ?', "", svg)
    for placeholder, colour in _COLOURS.items():
        svg = svg.replace(placeholder, colour)
    return Markup(re.sub(r"\n\s*\n+", "\n", svg))  # safe: drawn here, from numbers and fixed words


def _bars(part: _Part, name: str) -> Markup:
    def paint(axes: Axes) -> None:
        for side, key, label, colour in ((-1, "forget_acc", "forget", _FORGET), (1, "test_acc", "test", _TEST)):
            values = [part.get(phase, key) for phase in PHASES]
            places = [i + side * 0.21 for i in range(len(PHASES))]
            axes.bar(places, [v or 0 for v in values], width=0.38, color=colour, label=f"{label} accuracy")
            for x, value in zip(places, values, strict=True):
                axes.text(x, (value or 0) + 1.2, _fixed(value), ha="center", va="bottom", fontsize=10.5)
        axes.set_xticks(range(len(PHASES)), list(PHASES.values()))

    return _draw(name, paint)


def _curve(part: _Part, name: str) -> Markup:
    def paint(axes: Axes) -> None:
        last = max(p["round"] for p in part.curve)
        for key, label, colour, marker in (("forget_acc", "forget", _FORGET, "o"), ("test_acc", "test", _TEST, "s")):
            points = [(p["round"], v) for p in part.curve if (v := _number(p.get(key))) is not None]
            size = 5 if len(points) <= 30 else 0
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=colour,
                marker=marker,
                markersize=size,
                linewidth=2,
                label=f"{label} accuracy",
            )
            level = part.get("retrained", key)
            if level is not None:
                axes.axhline(level, color=colour, linewidth=1.5, linestyle=(0, (5, 3)), label=f"Retrain, {label}")
        axes.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel("recovery rounds")

    return _draw(name, paint)


def _say_bars(part: _Part) -> str:
    told = (
        f"{title}: forget {_percent(part.get(phase, 'forget_acc'))}, test {_percent(part.get(phase, 'test_acc'))}."
        for phase, title in PHASES.items()
    )
    return " ".join(["Bar chart of forget and test accuracy by phase.", *told])


def _say_curve(part: _Part) -> str:
    step = max(1, math.ceil(len(part.curve) / 8))
    points = [*part.curve[:-1:step], part.curve[-1]]
    told = (
        f"Round {p['round']:g}: forget {_percent(_number(p.get('forget_acc')))}, "
        f"test {_percent(_number(p.get('test_acc')))}."
        for p in points
    )
    forget, test = (_percent(part.get("retrained", key)) for key in ("forget_acc", "test_acc"))
    return " ".join(
        ["Line chart of forget and test accuracy during recovery.", *told, f"Retrain: forget {forget}, test {test}."]
    )


# The page


def _page(runs: Sequence[_Run]) -> str:
    requests = [(run, part) for run in runs for part in run.requests]
    names, folders = _names(runs), {run.folder for run in runs}
    if len(requests) <= FEW:
        short = [(_label(names[run], run, part, len(requests)), _sentences(part)) for run, part in requests]
    else:
        short = [("", _sentences_over([part for _, part in requests], len(runs)))]
    environment = Environment(
        loader=PackageLoader("fedquit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(
        title=names[runs[0]] if len(runs) == 1 else f"{len(runs)} runs",
        short=short,
        glance=[
            _glance(run, part, f"run{i}", several=len(folders) != len(runs))
            for i, run in enumerate(runs, 1)
            for part in run.requests
            if len(requests) > 1
        ],
        runs=[_section(run, names[run], f"run{i}") for i, run in enumerate(runs, 1)],
    )


def _names(runs: Sequence[_Run]) -> dict[_Run, str]:
    """Titles, told apart by the folder where two are the same, and by a number where that is the same, too."""
    titles = Counter(run.name for run in runs)
    names = {run: f"{run.name} ({run.folder})" if titles[run.name] > 1 else run.name for run in runs}
    again = Counter(names.values())
    return {run: f"{name}, run {i}" if again[name] > 1 else name for i, (run, name) in enumerate(names.items(), 1)}


def _label(name: str, run: _Run, part: _Part, requests: int) -> str:
    if requests == 1:
        return ""
    return f"{name}, request {part.number + 1}" if len(run.parts) > 1 else name


def _glance(run: _Run, part: _Part, key: str, *, several: bool) -> dict[str, Any]:
    """One line of the table that sets the requests side by side."""
    forget = [_fixed(part.get(phase, "forget_acc")) for phase in ("original", "unlearned", "recovered", "retrained")]
    test = [_fixed(part.get(phase, "test_acc")) for phase in ("recovered", "retrained")]
    work = [_fixed(part.get("recovered", "rounds"), 0), _signed(part.get("unlearned", "price_of_forgetting"), 3)]
    name = f"{run.folder} ({key.replace('run', 'run ')})" if several else run.folder
    return {
        "key": key,
        "name": f"{name}, request {part.number + 1}" if len(run.parts) > 1 else name,
        "method": part.method,
        "cells": [*forget, _signed(part.gap("recovered")), *test, *work],
    }


def _section(run: _Run, name: str, key: str) -> dict[str, Any]:
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
        "figures": [_figures(part, f"{key}-request{part.number}", many=many) for part in run.requests],
        "groups": [
            {"title": _heading(part, many=many) if many else "", "rows": [_cells(part, row) for row in part.rows]}
            for part in run.parts
        ],
        "recipe": _toml(run.recipe),
        "versions": [(str(k), str(v)) for k, v in run.versions.items()],
    }


def _heading(part: _Part, *, many: bool) -> str:
    return f"Request {part.number + 1}: {part.title[:1].lower()}{part.title[1:]}" if many else part.title


def _figures(part: _Part, key: str, *, many: bool) -> dict[str, Any]:
    return {
        "title": _heading(part, many=many),
        "bars": _bars(part, f"{key}-bars"),
        "bars_text": _say_bars(part),
        "curve": _curve(part, f"{key}-curve") if part.curve else None,
        "curve_text": _say_curve(part) if part.curve else "",
    }


def _cells(part: _Part, row: Row) -> dict[str, Any]:
    runs = _number(row.get("runs")) or 1
    gap = part.gap(row["phase"]) if row["phase"] in ("unlearned", "recovered") else None
    return {
        "phase": PHASES.get(row["phase"], str(row["phase"]).capitalize()),
        "note": f"mean of {runs:g}" if runs > 1 else "",
        "method": row["method"],
        "clients": ", ".join(map(str, row["clients"])) + (" (samples)" if row.get("samples") else ""),
        "numbers": [
            _fixed(_number(row.get("rounds")), 0),
            _fixed(_number(row.get("seconds"))),
            *(_fixed(_number(row.get(f"{kind}_acc"))) for kind in ("test", "retain", "forget", "holdout")),
            _signed(gap),
        ],
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
