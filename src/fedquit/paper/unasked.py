# SPDX-License-Identifier: Apache-2.0
"""What the paper did not ask: what lasts, what it costs, and whether samples or classes are forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from fedquit.paper.records import Records
from fedquit.paper.settings import SETTINGS
from fedquit.report.drawing import Drawn, draw, style
from fedquit.report.tables import Cell, Line, Table
from fedquit.results.averages import mean
from fedquit.results.folders import RunResults
from fedquit.results.path import AFTER, WINDOW, Point, at_round
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import number
from fedquit.results.summary import MethodSummary, group_by_method, summarise_phase
from fedquit.results.words import DASH, count, fixed, share, signed

LASTS = "What lasts"
COSTS = "What it costs"
KINDS = "Samples or classes"
MISSING = {
    LASTS: "No record of the paper's settings has rounds after the stop beside Natural's: runs with "
    "`recover.follow = 20` and `recover.control = true` give them.",
    COSTS: "No record has the bytes of several methods and of their Retrain: `fedquit compare` gives them.",
    KINDS: "No record of the paper's settings has a hold-out: runs with `data.holdout = 0.2` tell memory of the "
    "samples from knowledge of the client's distribution.",
}


@dataclass(frozen=True)
class Group:
    """The methods of one federation: a line for each, and the requests behind it where the runs are at hand.

    Attributes:
        title: Of the federation.
        targets: How many clients, or groups of clients, left.
        original: The line of Original.
        lines: Of the methods.
        after: By method, its gap and Natural's in forget accuracy, by rounds after the stop.
    """

    title: str
    targets: int
    lines: Sequence[MethodSummary]
    original: MethodSummary | None = None
    after: Mapping[str, Mapping[int, tuple[float, float | None]]] = field(default_factory=dict)


def groups_of(records: Records) -> list[Group]:
    """The federations of all records: those of the paper's settings from their runs, others from comparisons."""
    groups = []
    for name, runs in records.runs.items():
        for held_out in sorted({_held_out(run) for run in runs}):
            title = SETTINGS[name].title + (f", hold-out {100 * held_out:g} %" if held_out else "")
            groups.append(_of_runs(title, [run for run in runs if _held_out(run) == held_out]))
    groups += [_of_runs(title, runs) for title, runs in records.others.items()]
    for comparison in records.comparisons.values():
        lines = [line for line in comparison.table if line.phase == "recovered" and line.runs]
        original = next((line for line in comparison.table if line.phase == "original"), None)
        title = str(comparison.recipe.get("title") or comparison.folder)
        if lines:
            groups.append(Group(title, comparison.targets or max(line.runs for line in lines), lines, original))
    return groups


def _held_out(run: RunResults) -> float:
    data = run.recipe.get("data")
    return (number(data.get("holdout")) or 0.0) if isinstance(data, Mapping) else 0.0


def _of_runs(title: str, runs: Sequence[RunResults]) -> Group:
    methods = group_by_method(runs)
    requests = distinct(request for group in methods for request in group.requests)
    after = {group.label: windows for group in methods if (windows := _after(group.requests))}
    targets = len({request.clients for request in requests})
    original = summarise_phase("Original", "original", requests)
    return Group(title, targets, [group.summary for group in methods], original, after)


def _after(requests: Sequence[RequestRows]) -> dict[int, tuple[float, float | None]]:
    """The mean gap in forget accuracy so many rounds after the stop, and Natural's after as many rounds."""
    windows: dict[int, tuple[float, float | None]] = {}
    for end in AFTER:
        own = mean(_gap(request, request.get("recovered", f"forget_acc_after_{end}")) for request in requests)
        natural = mean(_gap(request, _natural_after(request, end)) for request in requests)
        if own is not None:
            windows[end] = (own, natural)
    return windows


def _gap(request: RequestRows, level: float | None) -> float | None:
    retrain = request.get("retrained", "forget_acc")
    return None if level is None or retrain is None else abs(level - retrain)


def _natural_after(request: RequestRows, end: int) -> float | None:
    """Natural's mean forget accuracy over the same five rounds as the method's."""
    stop = request.rounds_from_request
    if stop is None:
        return None
    points: list[Point | None] = [
        at_round(request.natural_path, stop + end - WINDOW + 1 + step) for step in range(WINDOW)
    ]
    return mean(number(point.get("forget_acc")) for point in points if point) if all(points) else None


def _targets(group: Group) -> str:
    return count(group.targets, "target")


def what_lasts(group: Group) -> Table | None:
    """Each method's gap at the stop and later, beside Natural's at equal rounds: the method's part, and time's."""
    known = [line for line in group.lines if "forget_acc" in line.natural_gaps and line.method != "natural"]
    if not known:
        return None
    start = group.original.gaps.get("forget_acc") if group.original else None
    rows = []
    for line in sorted(known, key=lambda one: one.on_path_gaps.get("forget_acc", 0.0)):
        own, natural = line.on_path_gaps.get("forget_acc"), line.natural_gaps["forget_acc"]
        later = group.after.get(line.method, {})
        cells = [
            Cell(fixed(line.rounds_from_request, 0)),
            Cell(fixed(own)),
            Cell(fixed(natural)),
            Cell(signed(None if start is None else start - natural)),
            Cell(signed(None if own is None else natural - own)),
        ]
        for end in AFTER:
            gap = later.get(end)
            beside = (f"Natural {fixed(gap[1])}",) if gap and gap[1] is not None else ()
            cells.append(Cell(fixed(gap[0]) if gap else DASH, beside))
        leaving = line.leaving.get("forget_acc")
        verdicts = (leaving.word if leaving else DASH, line.durable.word if line.durable else DASH)
        rows.append(Line(line.method, [*cells, *(Cell(word, words=True) for word in verdicts)]))
    heads = ["Method", "Rounds", "Gap", "Natural's", "By time", "By the method", *(f"+{end}" for end in AFTER)]
    heads += ["Against leaving", "After the stop"]
    first = f" Original's gap is {fixed(start)} points." if start is not None else ""
    table = _without_empty(heads, rows)
    return Table(
        f"{LASTS}: {group.title}",
        f"Mean absolute gap to Retrain in forget accuracy, in points, over {_targets(group)}.{first}",
        table[0],
        table[1],
        "Natural unlearns nothing and trains on for as many rounds. By time: what Natural closes of Original's gap; by "
        "the method: what the method closes beyond it. These are means, and no verdicts." + _lasting_note(group),
    )


def _lasting_note(group: Group) -> str:
    """What the last columns are, or that nothing went on after the stop."""
    said = ""
    if any(line.leaving for line in group.lines):
        said += " Against leaving: the verdict on forget accuracy beside Natural's."
    if any(line.durable for line in group.lines):
        said += " After the stop: whether forget and hold-out accuracy stay at Retrain's, judged over several Retrains."
    elif not group.after:
        said += " None of these runs goes on after the stop."
    if group.after:
        said += " Retrain has no further rounds: a model that trains on can move away from it without remembering more."
    return said


def what_it_costs(group: Group) -> tuple[Table, Drawn] | None:
    """The gap against the bytes sent, and which methods no other one beats in both, as a table and a figure."""
    known = [line for line in group.lines if line.bytes_percent is not None and "forget_acc" in line.gaps]
    if len(known) < 2:
        return None
    most = max(line.runs for line in known)
    fewer = any(line.runs < most for line in known)
    points = {line.method: (line.bytes_percent or 0.0, line.gaps["forget_acc"]) for line in known}
    whole = {line.method: points[line.method] for line in known if line.runs == most}
    front = {name for name in whole if not _beaten(name, whole)}
    rows = [
        Line(
            line.method,
            [
                *([Cell(f"{line.runs}")] if fewer else []),
                Cell(fixed(line.gaps["forget_acc"])),
                Cell(fixed(line.avg_gap)),
                Cell(share(line.bytes_percent)),
                Cell(share(line.computing_percent)),
                Cell("yes" if line.method in front else "no", words=True, plain=line.method not in front),
            ],
        )
        for line in sorted(known, key=lambda one: points[one.method])
    ]
    table = Table(
        f"{COSTS}: {group.title}",
        f"After recovery, over {_targets(group)}: gaps to Retrain in points, costs in percent of Retrain's",
        ["Method", *(["Requests"] if fewer else []), "Forget gap", "Avg. gap", "Sent", "Computing", "On the front"],
        rows,
        "On the front: no other method has both a smaller forget gap and fewer bytes, by the means alone: that two "
        "gaps differ is not tested here."
        + (" A method with fewer requests than the others is left out of it." if fewer else ""),
    )

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, (name, (sent, gap)) in enumerate(points.items()):
            axes.plot([sent], [gap], **{**style(i), "linestyle": "none"}, markersize=8, label=name)
        ranked = sorted(points[name] for name in front)
        axes.step([x for x, _ in ranked], [y for _, y in ranked], where="post", color=style(0)["color"], linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("sent, in percent of Retrain's bytes")
        axes.set_ylabel("gap in forget accuracy (points)")

    words = "; ".join(f"{name}: {fixed(gap)} points at {share(sent)}" for name, (sent, gap) in points.items())
    rows_of_legend = -(-len(points) // 3)
    drawn = draw("front-" + _slug(group.title), paint, height=3.2 + 0.22 * rows_of_legend, legend=3)
    caption = "The line joins the methods on the front." if len(front) > 1 else ""
    return table, Drawn(f"Gap against cost: {group.title}", drawn, words, caption)


def _beaten(name: str, points: Mapping[str, tuple[float, float]]) -> bool:
    """Whether another method is at most as dear and at most as far from Retrain, and better in one of the two."""
    sent, gap = points[name]
    return any(x <= sent and y <= gap and (x, y) != (sent, gap) for other, (x, y) in points.items() if other != name)


def _slug(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def samples_or_classes(group: Group) -> Table | None:
    """How much of the gap is memory of the samples, and how much knowledge of the client's distribution."""
    every = [*([group.original] if group.original else []), *group.lines]
    known = [line for line in every if line.sample_memory is not None and line.distribution_knowledge is not None]
    if not known:
        return None
    rows = []
    for line in known:
        total = (line.sample_memory or 0.0) + (line.distribution_knowledge or 0.0)
        said = ", ".join(f"{word} {times:g}" for word, times in line.holdout_verdicts.items())
        cells = [Cell(signed(line.sample_memory)), Cell(signed(line.distribution_knowledge)), Cell(signed(total))]
        name = "Original" if line.phase == "original" else line.method
        rows.append(Line(name, [*cells, Cell(said or DASH, words=True)], reference=line.phase == "original"))
    return Table(
        f"{KINDS}: {group.title}",
        f"After recovery, beside Retrain, in points of accuracy; means over {_targets(group)}",
        ["Model", "Samples", "Distribution", "Together", "Own hold-out"],
        rows,
        "Samples: forget less hold-out accuracy, less Retrain's. Distribution: hold-out accuracy less Retrain's. "
        "Own hold-out: for how many requests the forgotten data is told from data of the same client that never "
        "trained; a verdict errs in at most 5 % of cases.",
    )


def _without_empty(heads: Sequence[str], rows: Sequence[Line]) -> tuple[list[str], list[Line]]:
    """Without the columns in which no line has a number."""
    kept = [i for i in range(len(heads) - 1) if any(row.cells[i].text != DASH for row in rows)]
    lines = [Line(row.head, [row.cells[i] for i in kept], note=row.note, reference=row.reference) for row in rows]
    return [heads[0], *(heads[i + 1] for i in kept)], lines
