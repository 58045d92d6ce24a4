# SPDX-License-Identifier: Apache-2.0
"""The figures of the page, each with its numbers in words; None where the results lack what it needs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fedquit.report import paths
from fedquit.report.drawing import FORGET, INK, LINE, SOFT, TEST, Drawn, draw, style
from fedquit.results import quantities
from fedquit.results.averages import density_mean, density_of, mean, roc_of
from fedquit.results.folders import RunResults
from fedquit.results.path import mean_path
from fedquit.results.quantities import OUT_OF_REACH
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import MEASURES, NATURAL, PHASES, number, numbers
from fedquit.results.summary import MethodGroup, mean_spreads
from fedquit.results.words import NBSP, fixed, percent, share, signed

BUDGETS = (5, 10, 20, 25, 50)  # percent of Retrain's communication
KINDS = (("forget_acc", "forget", FORGET, "o"), ("test_acc", "test", TEST, "s"))
FPRS = (0.01, 0.001)
_LOWEST = 1e-4  # the left and the lower edge of the ROC
DOTS = 5_000  # of the labels by client, at most: each dot takes half a kilobyte


def _shortened(text: str, most: int = 44) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _accuracies(figure: Figure) -> Axes:
    axes = figure.add_subplot()
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("accuracy (%)")
    return axes


def _plain(text: str) -> str:
    """Not to be read as a formula, nor as a label that is left out."""
    return text.replace("$", r"\$").lstrip("_") or "unnamed"


# One request, or the mean of several


def of_request(request: RequestRows, key: str) -> list[Drawn]:
    """All figures of a request.

    Args:
        request: Or the mean of several.
        key: The prefix of their ids.
    """
    makers = (by_phase, recovery, communication, roc, entropy)
    return [drawn for make in makers if (drawn := make(request, f"{key}-{make.__name__}"))]


def by_phase(request: RequestRows, name: str) -> Drawn:
    """Bars of forget and test accuracy."""
    phases = {phase: title for phase, title in PHASES.items() if request.row(phase)}

    def paint(figure: Figure) -> None:
        axes = _accuracies(figure)
        for side, (key, label, colour, _) in zip((-1, 1), KINDS, strict=True):
            values = [request.get(phase, key) for phase in phases]
            places = [i + side * 0.21 for i in range(len(phases))]
            axes.bar(places, [v or 0 for v in values], width=0.38, color=colour, label=f"{label} accuracy")
            for x, value in zip(places, values, strict=True):
                axes.text(x, (value or 0) + 1.2, fixed(value), ha="center", va="bottom", fontsize=10.5)
        axes.set_xticks(range(len(phases)), list(phases.values()), fontsize=12)

    words = (
        f"{title}: forget {percent(request.get(phase, 'forget_acc'))}, test {percent(request.get(phase, 'test_acc'))}."
        for phase, title in phases.items()
    )
    text = " ".join(["Bar chart of forget and test accuracy by phase.", *words])
    return Drawn("Accuracy by phase", draw(name, paint), text)


def _paint_points(axes: Axes, request: RequestRows, points: Sequence[tuple[float, Mapping[str, Any]]]) -> None:
    """Forget and test accuracy along the recovery, and where Retrain lies."""
    for key, label, colour, marker in KINDS:
        known = [(x, v) for x, p in points if (v := number(p.get(key))) is not None]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            color=colour,
            marker=marker,
            markersize=5 if len(known) <= 30 else 0,
            linewidth=2,
            label=f"{label} accuracy",
        )
        level = request.get("retrained", key)
        if level is not None:
            axes.axhline(level, color=colour, linewidth=1.5, linestyle=(0, (5, 3)), label=f"Retrain, {label}")


def _say_points(request: RequestRows, points: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    step = max(1, math.ceil(len(points) / 8))
    words = (
        f"{where}: forget {percent(number(p.get('forget_acc')))}, test {percent(number(p.get('test_acc')))}."
        for where, p in [*points[:-1:step], points[-1]]
    )
    if not request.row("retrained"):
        return " ".join(words)
    forget, test = (percent(request.get("retrained", key)) for key in ("forget_acc", "test_acc"))
    return " ".join([*words, f"Retrain: forget {forget}, test {test}."])


def recovery(request: RequestRows, name: str) -> Drawn | None:
    """Accuracies round by round."""
    if not request.curve:
        return None

    def paint(figure: Figure) -> None:
        axes = _accuracies(figure)
        last = max(p["round"] for p in request.curve)
        _paint_points(axes, request, [(p["round"], p) for p in request.curve])
        axes.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel("recovery rounds")

    said = _say_points(request, [(f"Round {p['round']:g}", p) for p in request.curve])
    text = f"Line chart of forget and test accuracy during recovery. {said}"
    return Drawn("Accuracy during recovery", draw(name, paint), text)


def communication(request: RequestRows, name: str) -> Drawn | None:
    """Accuracies against what was sent, with the budgets."""
    points = quantities.sent_share(request)
    if not points:
        return None
    last = max(x for x, _ in points)
    wide = last > 110

    def paint(figure: Figure) -> None:
        axes = _accuracies(figure)
        _paint_points(axes, request, points)
        if wide:
            axes.set_xscale("log")
            axes.set_xlim(max(0.1, min(4.0, *(x for x, _ in points if x > 0))) / 1.2, last * 1.1)
        else:
            axes.set_xlim(-1.5, max(54.0, last * 1.04))
        axes.xaxis.set_major_locator(FixedLocator([*BUDGETS, *(t for t in (75, 100, 200, 500) if t <= last)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for budget in BUDGETS:
            axes.axvline(budget, color=SOFT, linewidth=1, linestyle=(0, (1, 3)), zorder=0.9)
        for key, _, colour, marker in KINDS:
            known = [
                (100 * b, v) for b, then in request.budgets.items() if (v := then.get("recovered", key)) is not None
            ]
            at = [share_sent for share_sent, _ in known]
            levels = [level for _, level in known]
            axes.scatter(at, levels, s=60, marker=marker, facecolors="none", edgecolors=colour, zorder=3)
        axes.set_xlabel("sent so far, in % of Retrain’s bytes")

    said = _say_points(request, [(f"At {share(x)} of Retrain’s bytes", p) for x, p in points])
    return Drawn(
        "Accuracy against communication",
        draw(name, paint),
        f"Line chart of forget and test accuracy by the bytes sent for unlearning and recovery. {said}",
        _within_budgets(request, points),
    )


def _within_budgets(request: RequestRows, points: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """What each budget pays for: as it was measured, or along the recovery as far as that went."""
    last = max(x for x, _ in points)
    words = []
    for budget in BUDGETS:
        ended = request.budgets.get(budget / 100)
        if ended is not None:
            reached = _both(ended.row("recovered")) if quantities.affordable(ended) else OUT_OF_REACH
            words.append(f"{budget}{NBSP}%: {reached}")
        elif budget <= last:
            point = quantities.last_within(request, budget / 100)
            words.append(f"{budget}{NBSP}%: {OUT_OF_REACH if point is None else _both(point)}")
    if not words:
        return f"The recovery was over at {share(last)} of Retrain’s bytes, before the smallest budget."
    over = f"; it was over at {share(last)}" if not request.budgets and last < BUDGETS[-1] else ""
    return f"Forget/test accuracy within budgets of {', '.join(words)}{over}."


def _both(point: Mapping[str, Any]) -> str:
    return "/".join(fixed(number(point.get(k))) for k in ("forget_acc", "test_acc"))


def roc(request: RequestRows, name: str) -> Drawn | None:
    """The ROC of telling the forget data from data that never trained."""
    known = {phase: r for phase in PHASES if (r := roc_of(request.row(phase)))}
    if not known:
        return None
    against = next((str(request.row(p).get("exposed_against")) for p in known), "test")
    other = {"holdout": "hold-out", "test": "test"}.get(against, "unseen")

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([_LOWEST, 1], [_LOWEST, 1], color=SOFT, linewidth=1, linestyle=(0, (1, 3)), label="chance")
        for i, (phase, curve) in enumerate(known.items()):
            inside = [(f, max(t, _LOWEST / 2)) for f, t in zip(curve["fpr"], curve["tpr"], strict=True) if f > 0]
            line_style = style(i) | {"marker": "", "linewidth": 2.4 if phase == "recovered" else 1.7}
            axes.plot([f for f, _ in inside], [t for _, t in inside], label=PHASES[phase], **line_style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(_LOWEST, 1.05)
        axes.set_ylim(_LOWEST, 1.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1, 1]))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(lambda x, _: f"{100 * x:g}")
        axes.grid(visible=True, axis="both")
        axes.set_xlabel(f"{other} data taken for forget data (%)")
        axes.set_ylabel("forget data found (%)")

    words = []
    for phase in known:
        rates = (f"{_tpr(request, phase, fpr)} at {100 * fpr:g}{NBSP}% FPR" for fpr in FPRS)
        words.append(f"{PHASES[phase]}: {' and '.join(rates)}.")
    scarce = [p for p in known if request.row(p).get("tpr_at_0.001_enough") is False]
    warning = f" Too few {other} samples to say much at 0.1{NBSP}%." if scarce else ""
    caption = f"TPR at 1{NBSP}% and 0.1{NBSP}% FPR, with 95{NBSP}% intervals, in the table below.{warning}"
    return Drawn(
        f"Forget data against {other} data",
        draw(name, paint, height=4.2),
        f"ROC on log axes: forget data found, by false positives among {other} data. {' '.join(words)}{warning}",
        caption if request.over == 1 else f"Mean over {request.over} requests.{warning}",
    )


def _tpr(request: RequestRows, phase: str, fpr: float) -> str:
    value, low, high = (request.get(phase, f"tpr_at_{fpr:g}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "not measured"
    interval = f" ({100 * low:.2f} to {100 * high:.2f})" if low is not None and high is not None else ""
    return f"{100 * value:.2f}{NBSP}%{interval}"


def entropy(request: RequestRows, name: str) -> Drawn | None:
    """The predictive entropy on forget and test data."""
    phases = ("original", "retrained", "recovered")
    known = {p: d for p in phases if (d := density_of(request.row(p), "entropy"))}
    if not known:
        return None

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(known), sharex=True, squeeze=False)
        for axes, (phase, density) in zip(grid[:, 0], known.items(), strict=True):
            for key, colour, dash in (("forget", FORGET, "-"), ("test", TEST, (0, (4, 2)))):
                if key in density:
                    outline = {"color": colour, "linestyle": dash, "linewidth": 1.8, "label": key}
                    axes.stairs(density[key], density["edges"], **outline)
                    axes.stairs(density[key], density["edges"], color=colour, alpha=0.18, fill=True)
            axes.set_title(PHASES[phase], loc="left")
            axes.set_yticks([])
            axes.set_ylim(bottom=0)
        grid[-1, 0].set_xlabel("predictive entropy (nats)")
        grid[-1, 0].set_xlim(left=0)

    words = []
    for phase, density in known.items():
        means = [f"{key} {density_mean(density, key):.3f}" for key in ("forget", "test") if key in density]
        words.append(f"{PHASES[phase]}: {', '.join(means)}.")
    return Drawn(
        "How uncertain the model is",
        draw(name, paint, height=1.0 + 1.25 * len(known)),
        f"Densities of the predictive entropy on forget and test data; means in nats. {' '.join(words)}",
        "Densities, each over an area of one; left is certain."
        + (" Recovered should look like Retrained." if "retrained" in known else ""),
    )


# Several methods, or several settings of one


def decision(groups: Sequence[MethodGroup], name: str) -> Drawn | None:
    """The picture that decides: the gap in forget accuracy against the cost, for all methods.

    Args:
        groups: The methods.
        name: The prefix of the ids in the SVG.
    """
    points: dict[str, tuple[float, float]] = {}
    for group in groups:
        sent = group.summary.bytes_percent
        gap = group.summary.gaps.get("forget_acc")
        if sent is not None and gap is not None:
            points[group.label] = (sent, gap)
    if not points:
        return None
    spread = mean_spreads(distinct(request for group in groups for request in group.requests)).get("forget_acc")
    natural = _natural_path(groups)
    cheapest = min(x for x, _ in points.values())
    wide = cheapest < 5
    left = max(0.05, cheapest) / 1.6 if wide else 0.0
    right = max(115.0, *(1.15 * x for x, _ in points.values()))
    levels = [1.0, spread or 0.0, *(y for _, y in points.values()), *(y for _, y in natural)]
    top = 1.15 * max(levels)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if spread is not None:
            axes.axhspan(0, spread, facecolor=TEST, alpha=0.22, label="Retrain again")
            axes.axhline(spread, color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
        if len(natural) > 1:
            inside = [(x, y) for x, y in natural if x >= left]
            axes.plot(
                [x for x, _ in inside],
                [y for _, y in inside],
                color=SOFT,
                linewidth=1.5,
                linestyle=(0, (4, 2)),
                label="Natural by round",
            )
        axes.scatter([100], [0], s=70, marker="*", color=INK, label="Retrain", zorder=3, clip_on=False)
        for i, (label, (x, y)) in enumerate(points.items()):
            look = {key: value for key, value in style(i).items() if key != "linestyle"}
            shown = f"{i + 1} {_plain(_shortened(label, 30))}" if len(points) > 1 else _plain(_shortened(label))
            axes.scatter([max(x, left)], [y], s=46, label=shown, zorder=3, clip_on=False, **look)
        if len(points) > 1:
            _number(axes, [(max(x, left), y) for x, y in points.values()], (left, right), top, log=wide)
        if wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator([t for t in _SHARES if left <= t]))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlim(left, right)
        axes.set_ylim(0, top)
        axes.set_xlabel("bytes sent, in % of Retrain’s")
        axes.set_ylabel("gap in forget accuracy (points)")

    words = [f"{label}: gap {gap:.1f} points at {share(x)} of Retrain’s bytes." for label, (x, gap) in points.items()]
    if spread is not None:
        words.append(f"Two Retrains differ by {spread:.1f} points.")
    if len(natural) > 1:
        words.append(f"Natural ends at {natural[-1][1]:.1f} points and {share(natural[-1][0])}.")
    longest = max(len(_shortened(label, 30)) for label in points) + 2
    columns = next((fitting for fitting, most in ((3, 14), (2, 18)) if longest <= most), 1)
    return Drawn(
        "Gap against cost",
        draw(name, paint, height=3.4 + 0.22 * math.ceil((len(points) + 3) / columns), legend=columns),
        f"Scatter chart: gap in forget accuracy to Retrain by the bytes sent. {' '.join(words)}",
        "Down and left is closer to Retrain, for less."
        + (" Grey band: how far two Retrains lie apart." if spread is not None else "")
        + (" Natural unlearns nothing: a method on its line is no closer than training on." if natural else ""),
    )


NUMBER = (7.0, 11.0)  # width of a digit and height of a number, in points
_PLOT = (300.0, 175.0)  # width and height of the axes in points, about


def _number(axes: Axes, at: Sequence[tuple[float, float]], ends: tuple[float, float], top: float, *, log: bool) -> None:
    """Write its number beside each point, where it covers neither another number nor a point.

    Args:
        axes: With the points.
        at: The points.
        ends: Of the horizontal axis.
        top: Of the vertical axis, which begins at zero.
        log: Whether the horizontal axis is logarithmic.
    """

    def placed(x: float, y: float) -> tuple[float, float]:
        low, high, here = (math.log(v) for v in (*ends, x)) if log else (*ends, x)
        return _PLOT[0] * (here - low) / (high - low), _PLOT[1] * y / top

    points = [placed(x, y) for x, y in at]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    angles = [math.radians(45 * step) for step in (1, 0, 7, 2, 6, 3, 5, 4)]
    places = [(radius * math.cos(a), radius * math.sin(a)) for radius in (11, 18, 26, 35, 45) for a in angles]
    for i, (x, y) in enumerate(points):
        half = NUMBER[0] * len(str(i + 1)) / 2
        boxes = [
            (x + dx - half, y + dy - NUMBER[1] / 2, x + dx + half, y + dy + NUMBER[1] / 2, dx, dy) for dx, dy in places
        ]
        free = [box for box in boxes if box[1] >= 0 and not any(_overlap(box, other) for other in taken)]
        *box, dx, dy = free[0] if free else boxes[0]
        taken.append((box[0], box[1], box[2], box[3]))
        far = math.hypot(dx, dy) > 12
        axes.annotate(
            str(i + 1),
            at[i],
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=10.5,
            arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7, "shrinkB": 3} if far else None,
        )


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two boxes (left, bottom, right, top) meet."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


_SHARES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # percent


def _natural_path(groups: Sequence[MethodGroup]) -> list[tuple[float, float]]:
    """Natural's gap round by round: the control of the requests, else the method of that name."""
    control = max((paths.gap_by_cost(group.requests, natural=True) for group in groups), key=len, default=[])
    if control:
        return control
    own = next((group for group in groups if group.label.partition(",")[0] == NATURAL), None)
    return paths.gap_by_cost(own.requests) if own else []


TOGETHER = 6  # methods whose paths are drawn in one panel, at most; of more, each has a panel of its own


def over_rounds(groups: Sequence[MethodGroup], name: str) -> list[Drawn]:
    """The paths of all methods beside Natural's: one figure for each accuracy.

    Args:
        groups: The methods.
        name: The prefix of the ids in the SVGs.
    """
    lines: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        averaged = mean_path([path for request in group.requests if (path := paths.path_of(request))])
        if len(averaged) > 1:
            lines[group.label] = averaged
    control = mean_path([path for group in groups for request in group.requests if (path := request.natural_path)])
    if len(control) > 1 and NATURAL not in lines:
        lines["Natural"] = control
    requests = [request for group in groups for request in group.requests]
    drawn = []
    for key, word in paths.KINDS.items():
        known = {
            label: [(float(p["round"]), p[key]) for p in own if key in p and "round" in p]
            for label, own in lines.items()
        }
        known = {label: own for label, own in known.items() if own}
        if known:
            level = mean(request.get("retrained", key) for request in requests)
            natural = [(float(p["round"]), p[key]) for p in control if key in p and "round" in p]
            drawn.append(_paths_of(known, natural, level, word, f"{name}-{word}"))
    return drawn


_Paths = Mapping[str, Sequence[tuple[float, float]]]


def _paths_of(
    known: _Paths, natural: Sequence[tuple[float, float]], level: float | None, word: str, name: str
) -> Drawn:
    """One accuracy by rounds.

    Args:
        known: Rounds and accuracies by method.
        natural: Those of the control; empty where there is none.
        level: Retrain's.
        word: The kind of data.
        name: The prefix of the ids in the SVG.
    """
    longest = max(len(_shortened(label, 30)) for label in known)
    columns = next((fitting for fitting, most in ((3, 13), (2, 24)) if longest <= most), 1)
    if len(known) <= TOGETHER:
        height = 2.5 + 0.22 * math.ceil((len(known) + 1) / columns)
        svg = draw(name, lambda figure: _in_one_panel(figure, known, level), height=height, legend=columns)
    else:
        height = 0.7 + 0.95 * math.ceil(len(known) / 3)
        svg = draw(name, lambda figure: _in_panels(figure, known, natural, level), height=height, legend=3)
    words = [f"{label} after {own[-1][0]:g} rounds: {percent(own[-1][1])}." for label, own in known.items()]
    words += [] if level is None else [f"Retrain: {percent(level)}."]
    return Drawn(
        f"{word[:1].upper()}{word[1:]} accuracy, round by round",
        svg,
        f"Line chart of {word} accuracy by rounds after the request. {' '.join(words)}",
        "In percent; means over requests, as far as all of them go."
        + ("" if level is None else " The goal is Retrain’s level."),
    )


def _in_one_panel(figure: Figure, known: _Paths, level: float | None) -> None:
    axes = figure.add_subplot()
    if level is not None:
        axes.axhline(level, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), label="Retrain")
    for i, (label, own) in enumerate(known.items()):
        look = style(i) | {"markersize": 4 if len(own) <= 30 else 0, "linewidth": 1.6}
        shown = _plain(_shortened(label, 30))
        axes.plot([at for at, _ in own], [value for _, value in own], label=shown, **look)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("rounds after the request")


def _in_panels(figure: Figure, known: _Paths, natural: Sequence[tuple[float, float]], level: float | None) -> None:
    """A small panel for each method: its path, Natural's and Retrain's level."""
    natural = natural or next((own for label, own in known.items() if label == NATURAL), [])
    grid = figure.subplots(math.ceil(len(known) / 3), 3, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, (label, own) in zip(panels, known.items(), strict=False):
        if level is not None:
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)), label="Retrain")
        if natural and label.lower() != NATURAL:
            rounds = [at for at, _ in natural]
            values = [value for _, value in natural]
            axes.plot(rounds, values, color=SOFT, linewidth=1.2, linestyle=(0, (4, 2)), label="Natural")
        axes.plot([at for at, _ in own], [value for _, value in own], color=FORGET, linewidth=2, label="the method")
        axes.set_title(_plain(_shortened(label, 22)), loc="left", fontsize=10.5, pad=3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        axes.tick_params(labelsize=10)
    for axes in panels[len(known) :]:
        axes.set_axis_off()
    figure.supxlabel("rounds after the request", fontsize=11, color=SOFT)


def traces(groups: Sequence[MethodGroup], name: str) -> Drawn | None:
    """The picture that decides where there is no Retrain: the AUC against the hold-out, before, after and of Natural.

    Args:
        groups: The methods; of one request each.
        name: The prefix of the ids in the SVG.
    """
    if not groups or any(len(group.requests) != 1 for group in groups):
        return None
    first = groups[0].requests[0]
    models = [("Original", first, "original"), *((group.label, group.requests[0], "recovered") for group in groups)]
    models += [("Natural", first, NATURAL)] if NATURAL not in {group.label for group in groups} else []
    known = []
    for label, request, phase in models:
        auc, low, high = (request.get(phase, key) for key in ("auc", "auc_low", "auc_high"))
        if auc is not None and low is not None and high is not None:
            known.append((label, auc, low, high))
    if len(known) < 2:
        return None
    margin = first.get("recovered", "holdout_margin")

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if margin is not None:
            axes.axvspan(0.5 - margin, 0.5 + margin, facecolor=TEST, alpha=0.22, label="margin")
        axes.axvline(0.5, color=SOFT, linewidth=1.2, linestyle=(0, (5, 3)), label="chance")
        places = range(len(known))
        axes.hlines(places, [low for *_, low, _ in known], [high for *_, high in known], color=FORGET, linewidth=2)
        areas = [auc for _, auc, *_ in known]
        axes.scatter(areas, places, color=FORGET, marker="o", label="AUC, 95 % interval", zorder=3)
        axes.set_yticks(places, [_plain(_shortened(label, 24)) for label, *_ in known])
        axes.set_ylim(len(known) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xlabel("AUC between forget and hold-out data")

    words = [f"{label}: {auc:.3f} ({low:.3f} to {high:.3f})." for label, auc, low, high in known]
    return Drawn(
        "Forget data against hold-out data, before and after",
        draw(name, paint, height=1.3 + 0.4 * len(known), legend=3),
        f"AUC between forget and hold-out data with 95{NBSP}% intervals. {' '.join(words)}",
        "At 0.5 the data to forget cannot be told from data of the same client that never trained. "
        + ("Natural unlearns nothing." if known[-1][0] == "Natural" else ""),
    )


def over_rates(sweep: Mapping[str, Any], name: str, margin: float | None = None) -> Drawn | None:
    """A sweep: accuracies and the AUC against the hold-out, by unlearning rate.

    Args:
        sweep: What `sweep.json` holds.
        name: The prefix of the ids in the SVG.
        margin: Around an AUC of one half; None where the results do not hold it.
    """
    stored = [rate for rate in sweep.get("rates", ()) if isinstance(rate, Mapping)]
    rates = sorted((rate for rate in stored if number(rate.get("lr"))), key=lambda rate: float(rate["lr"]))
    if len(rates) < 2:
        return None
    before = next((rate for rate in stored if number(rate.get("lr")) == 0), {})
    chosen = number(sweep.get("chosen"))
    at = [float(rate["lr"]) for rate in rates]
    kinds = {
        "unlearned_acc": "forget, unlearned",
        "forget_acc": "forget",
        "holdout_acc": "hold-out",
        "test_acc": "test",
    }

    def paint(figure: Figure) -> None:
        accuracies, areas = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        for i, (key, word) in enumerate(kinds.items()):
            levels = [number(rate.get(key)) for rate in rates]
            known = [(x, y) for x, y in zip(at, levels, strict=True) if y is not None]
            look = style(i) | {"markersize": 5, "linewidth": 1.6}
            accuracies.plot([x for x, _ in known], [y for _, y in known], label=word, **look)
        accuracies.set_title("accuracy (%)", loc="left")
        accuracies.set_ylim(0, 105)
        ends = [[number(rate.get(key)) for key in ("auc", "auc_low", "auc_high")] for rate in rates]
        whole = [
            (x, auc, low, high) for x, (auc, low, high) in zip(at, ends, strict=True) if None not in (auc, low, high)
        ]
        if margin is not None:
            areas.axhspan(0.5 - margin, 0.5 + margin, facecolor=TEST, alpha=0.22, label="margin")
        areas.axhline(0.5, color=SOFT, linewidth=1.2, linestyle=(0, (5, 3)), label="chance")
        areas.vlines([x for x, *_ in whole], [low for *_, low, _ in whole], [high for *_, high in whole], color=FORGET)
        areas.scatter([x for x, *_ in whole], [auc for _, auc, *_ in whole], color=FORGET, marker="o", label="AUC")
        areas.set_title("AUC against the hold-out, with 95 % intervals", loc="left")
        for axes in (accuracies, areas):
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_locator(FixedLocator(at))
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            if chosen:
                axes.axvline(chosen, color=INK, linewidth=1.2, linestyle=(0, (1, 2)), label="chosen")
        areas.set_xlabel("unlearning rate")

    words = []
    for rate in ([before] if before else []) + rates:
        lr = number(rate.get("lr"))
        levels = [f"{word} {percent(number(rate.get(key)))}" for key, word in kinds.items()]
        words.append(
            f"{f'Rate {lr:g}' if lr else 'Before'}: {', '.join(levels)}, AUC {fixed(number(rate.get('auc')), 3)}."
        )
    return Drawn(
        "By unlearning rate",
        draw(name, paint, height=4.4, legend=3),
        f"Line charts of accuracies and of the AUC against the hold-out by unlearning rate. {' '.join(words)}",
        "Forget and hold-out accuracy should end alike, with an AUC of 0.5, at the least loss of test accuracy.",
    )


_SPOKES = {
    "forget_acc": "forget",
    "retain_acc": "retain",
    "mia_song_svc": MEASURES["mia_song_svc"].label,
    "mia_yeom": MEASURES["mia_yeom"].label,
}


def radar(groups: Sequence[MethodGroup], name: str) -> Drawn | None:
    """Gaps and costs of every method: the smaller the polygon, the better."""
    measured: dict[str, list[float | None]] = {}
    for group in groups:
        summary = group.summary
        gaps = [summary.gaps.get(key) for key in _SPOKES]
        measured[group.label] = [*gaps, summary.bytes_percent, summary.computing_percent]
    labels = [f"{label} gap" for label in _SPOKES.values()] + ["communication", "computation"]
    usable = {m: v for m, v in measured.items() if any(x is not None for x in v)}
    spokes = [i for i in range(len(labels)) if all(v[i] is not None for v in usable.values())]
    if len(usable) < 2 or len(spokes) < 3:
        return None
    values = {m: [v[i] or 0.0 for i in spokes] for m, v in usable.items()}
    tops = [max(v[j] for v in values.values()) for j in range(len(spokes))]
    longest = max(len(_shortened(m)) for m in values)
    columns = next((fitting for fitting, most in ((3, 13), (2, 22)) if longest <= most), 1)
    units = ["points" if i < len(_SPOKES) else "%" for i in spokes]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(projection="polar")
        axes.set_theta_zero_location("N")  # type: ignore[attr-defined]
        axes.set_theta_direction(-1)  # type: ignore[attr-defined]
        angles = [2 * math.pi * j / len(spokes) for j in range(len(spokes))]
        for i, (method, own) in enumerate(values.items()):
            far = [v / top if top else 0.0 for v, top in zip(own, tops, strict=True)]
            line_style = style(i) | {"markersize": 4.5, "linewidth": 1.8}
            axes.plot(
                [*angles, angles[0]], [*far, far[0]], label=_plain(_shortened(method)), clip_on=False, **line_style
            )
            if len(values) <= 4:
                axes.fill(angles, far, color=line_style["color"], alpha=0.07)
        axes.set_ylim(0, 1.0)
        axes.set_yticks([0.25, 0.5, 0.75, 1.0], [""] * 4)
        axes.grid(visible=True, axis="both")
        axes.spines["polar"].set_color(LINE)
        ends = [f"{labels[i]}\n{top:.1f} {u}" for i, top, u in zip(spokes, tops, units, strict=True)]
        axes.set_xticks(angles, ends, fontsize=10.5)
        axes.tick_params(axis="x", pad=8)
        for angle, label in zip(angles, axes.get_xticklabels(), strict=True):
            right = round(math.sin(angle), 3)
            up = round(math.cos(angle), 3)
            label.set_verticalalignment("bottom" if up > 0.9 else ("top" if up < -0.9 else "center"))
            label.set_horizontalalignment("center" if not right else ("left" if right > 0 else "right"))

    words = []
    for method, own in values.items():
        each = (f"{labels[i]} {v:.1f} {u}" for i, v, u in zip(spokes, own, units, strict=True))
        words.append(f"{method}: {', '.join(each)}.")
    return Drawn(
        "Gaps and costs at a glance",
        draw(name, paint, height=4.2 + 0.22 * math.ceil(len(values) / columns), legend=columns),
        f"Radar chart after recovery; smaller is better; costs in percent of Retrain’s. {' '.join(words)}",
        "After recovery: gaps to Retrain in points, costs in % of Retrain’s. The centre is zero, the rim the largest "
        "of these methods; a smaller polygon is better.",
    )


@dataclass(frozen=True)
class _AtV:
    """One request that a fixed teacher served."""

    v: float
    gap: float
    rounds: float
    data: str  # a line joins requests on the same data only


_NEIGHBOURS = {"min": "the least logit", "entropy": "v*"}  # teachers that have no v of their own, but a gap


def over_v(runs: Sequence[RunResults], name: str) -> Drawn | None:
    """The gap in forget accuracy by the value that the fixed teacher gives to the true class."""
    points: list[_AtV] = []
    density = None
    others: dict[str, list[float]] = {}
    for run in runs:
        teacher = run.method_options.get("teacher", "min")
        v = number(run.method_options.get("v", 0.0))
        data = json.dumps(run.recipe.get("data"), sort_keys=True)
        for request in run.requests:
            gap = quantities.request_gap(request, "recovered")
            if gap is not None and teacher == "fixed" and v is not None:
                points.append(_AtV(v, gap, request.get("recovered", "rounds") or 0.0, data))
                density = density or density_of(request.row("original"), "true_logits")
            elif gap is not None and request.method == "fedquit" and teacher in _NEIGHBOURS:
                others.setdefault(_NEIGHBOURS[teacher], []).append(gap)
    if len({p.v for p in points}) < 2:
        return None
    points.sort(key=lambda p: (p.v, p.gap))
    levels = {label: mean(gaps) or 0.0 for label, gaps in others.items()}
    logits = next((d for k, d in density.items() if k != "edges"), None) if density else None
    low, high = _around(points, density["edges"] if density and logits else [])
    beyond = sorted({p.v for p in points if not low <= p.v <= high})

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if density and logits:
            behind = axes.twinx()
            behind.stairs(logits, density["edges"], color=TEST, alpha=0.3, fill=True, label="Original’s logits")
            behind.set_yticks([])
            behind.set_ylim(0, 1.15 * max(logits))
            axes.set_zorder(behind.get_zorder() + 1)
        axes.axhline(0, color=SOFT, linewidth=1.2, linestyle=(0, (5, 3)), label="Retrain")
        for i, (label, level) in enumerate(levels.items(), 2):
            line_style = style(i)
            axes.axhline(level, color=line_style["color"], linewidth=1.2, linestyle=(0, (2, 2)), label=label)
        inside = [p for p in points if p.v not in beyond]
        for data in sorted({p.data for p in inside}):
            line = _line_through([p for p in inside if p.data == data])
            axes.plot(list(line), list(line.values()), color=FORGET, linewidth=1.2)
        _dots(axes, inside, "o", [p.v for p in inside], points)
        left = [p for p in points if p.v < low]
        right = [p for p in points if p.v > high]
        _dots(axes, left, "<", [low] * len(left), points)
        _dots(axes, right, ">", [high] * len(right), points)
        axes.margins(x=0.08, y=0.18)
        axes.set_xlabel("v, the true class’s logit in the teacher")
        axes.set_ylabel("forget gap (points)")

    words = [f"v {p.v:g}: {signed(p.gap)} points after {p.rounds:g} rounds." for p in points]
    words += [f"Teacher with {label}: {signed(level)} points." for label, level in levels.items()]
    behind = (
        "The grey area is the density of Original’s true-class logits."
        if logits
        else "The density of Original’s true-class logits is not in these results."
    )
    edge = f" Triangles at the edge: v {', '.join(f'{v:g}' for v in beyond)}, far outside." if beyond else ""
    return Drawn(
        "Gap in forget accuracy by v",
        draw(name, paint, legend=3),
        f"Gap in forget accuracy to Retrain by v, the fixed teacher’s logit of the true class. {' '.join(words)}",
        f"Larger dots took more rounds of recovery. {behind}{edge}",
    )


def _around(points: Sequence[_AtV], edges: Sequence[float]) -> tuple[float, float]:
    """From where to where v is drawn: around the logits, so that one extreme value does not hide them."""
    if not edges:
        return points[0].v, points[-1].v
    span = edges[-1] - edges[0]
    near = [p.v for p in points if edges[0] - span <= p.v <= edges[-1] + span]
    return min([edges[0], *near]), max([edges[-1], *near])


def _line_through(points: Sequence[_AtV]) -> dict[float, float]:
    """The mean gap at each v."""
    return {v: statistics.fmean(p.gap for p in points if p.v == v) for v in sorted({p.v for p in points})}


def _dots(axes: Axes, some: Sequence[_AtV], marker: str, at: Sequence[float], points: Sequence[_AtV]) -> None:
    if some:
        most = max(p.rounds for p in points) or 1.0
        sizes = [25 + 200 * p.rounds / most for p in some]
        label = "gap" if marker == "o" else None
        axes.scatter(at, [p.gap for p in some], s=sizes, color=FORGET, alpha=0.75, marker=marker, label=label)


def label_counts(stored: object) -> dict[str, dict[str, float]]:
    """Samples by client and label, from an object of lists or objects, or from a list of `client` and `labels`."""
    if isinstance(stored, list):
        stored = {str(one.get("client", i)): one for i, one in enumerate(stored) if isinstance(one, dict)}
    counts = {}
    for client, held in stored.items() if isinstance(stored, dict) else ():
        labels = held.get("labels", held) if isinstance(held, dict) else held
        if isinstance(labels, list):
            labels = dict(enumerate(numbers(labels) or []))
        pairs = labels.items() if isinstance(labels, dict) else ()
        known = {str(k): n for k, v in pairs if (n := number(v)) is not None}
        if known:
            counts[str(client)] = known
    return counts


def labels_by_client(runs: Sequence[RunResults], name: str) -> Drawn | None:
    """The samples of each label at each client; the runs share one federation."""
    counts = label_counts(runs[0].clients)
    labels = sorted({k for held in counts.values() for k in held}, key=lambda k: (len(k), k))
    dots = sum(n > 0 for held in counts.values() for n in held.values())
    if not counts or len(counts) > 100 or dots > DOTS:
        return None
    leaving = {str(c) for run in runs for request in run.requests for c in request.rows[0]["clients"]}
    most = max(max(held.values()) for held in counts.values()) or 1.0
    clients = list(counts)
    row = 0.26 if len(clients) <= 40 else 0.1  # inches
    largest = 150 * (row / 0.26) ** 2

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for mine, colour, label in ((True, FORGET, "leaving"), (False, TEST, "staying")):
            at = [
                (labels.index(k), y, n)
                for y, c in enumerate(clients)
                for k, n in counts[c].items()
                if (c in leaving) == mine and n
            ]
            sizes = [4 + largest * n / most for *_, n in at]
            axes.scatter([x for x, *_ in at], [y for _, y, _ in at], s=sizes, color=colour, linewidth=0, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        if len(labels) <= 12:
            axes.set_xticks(range(len(labels)), [_plain(k) for k in labels])
        shown = range(0, len(clients), 1 if len(clients) <= 40 else 10)
        axes.set_yticks(shown, [_plain(clients[k]) for k in shown], fontsize=10)
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.set_xlabel("label")
        axes.set_ylabel("client")

    words = []
    for client, held in counts.items():
        top = sorted(held.items(), key=lambda kv: -kv[1])[:3]
        most_of = ", ".join(f"{n:g} of label {k}" for k, n in top if n)
        words.append(
            f"Client {client}{' (leaving)' if client in leaving else ''}: {sum(held.values()):g} samples, {most_of}."
        )
    return Drawn(
        "Labels by client",
        draw(name, paint, height=1.3 + row * len(clients)),
        f"Samples by client and label. {' '.join(words)}",
        f"A dot’s area is the number of samples; the largest stands for {most:g}.",
    )
