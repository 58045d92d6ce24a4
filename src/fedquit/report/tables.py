# SPDX-License-Identifier: Apache-2.0
"""The tables of the page: gaps to Retrain beside the Retrain-vs-Retrain spread, costs, attacks, and client by client.

A table formats numbers and computes none: they come from `fedquit.results`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedquit.inference.durable import DurableVerdict
from fedquit.inference.gaps import DIFFERS, ClientGap
from fedquit.inference.leaving import LeavingVerdict
from fedquit.report.verdicts import trace_words
from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.canaries import canary_audits
from fedquit.results.comparison import Comparison
from fedquit.results.path import AFTER, LAST
from fedquit.results.quantities import OUT_OF_REACH, PairedDifference
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import COSTS, GAPS, MEASURES, NATURAL, PHASES, THRESHOLDS, Row, labels, number
from fedquit.results.summary import (
    MethodGroup,
    MethodSummary,
    mean_spreads,
    natural_averaged,
    summarise,
    summarise_phase,
)
from fedquit.results.verdicts import headline, legend, mark
from fedquit.results.words import DASH, NBSP, count, fixed, holdout_verdict, scaled, share, signed
from fedquit.utils.names import each_named

COLUMNS = labels("forget_acc", "retain_acc", "mia_song_svc", "mia_yeom", "test_acc")  # the columns of the table of gaps
SPREAD_LINE = "Retrain again"
LONG = 12  # lines of a table that the first printed page has room for, with the smaller text of their cells
WIDEST = 8  # columns beside the heading that fit a printed page
_COSTS_SHOWN = ("bytes", "flops", "server_storage_bytes", "client_storage_bytes", "seconds")


@dataclass(frozen=True)
class Cell:
    """Some text, and smaller text below it."""

    text: str
    notes: tuple[str, ...] = ()
    plain: bool = False  # printed in grey: no difference is shown
    words: bool = False  # words, not a number

    @property
    def classes(self) -> str:
        """What the style sheet is to know: words, where no difference is shown, and what was not measured."""
        named = {"words": self.words, "calm": self.plain, "nothing": self.text == DASH and not self.notes}
        return " ".join(name for name, applies in named.items() if applies)


@dataclass(frozen=True)
class Line:
    """A row with its heading; `head` alone spans the table."""

    head: str
    cells: Sequence[Cell] = ()
    href: str = ""  # where on the page its heading leads
    note: str = ""  # smaller text below the heading
    reference: bool = False  # what the others are compared with: it stays on top however the table is sorted


@dataclass(frozen=True)
class Table:
    """A table of the page, with a sentence on how to read it."""

    title: str
    caption: str
    heads: Sequence[str]
    lines: Sequence[Line]
    note: str = ""
    below: str = ""  # what the smaller text of its cells is; a long table is printed without it

    @property
    def long(self) -> bool:
        """Whether it fits the first printed page only without the smaller text of its cells."""
        return len(self.lines) > LONG

    @property
    def sortable(self) -> bool:
        """Whether its lines may change places: several, and none that heads a group."""
        return all(line.cells for line in self.lines) and sum(not line.reference for line in self.lines) > 1

    def words_in(self, column: int) -> bool:
        """Whether a column holds words; column 0 is the heading of the lines."""
        return any(line.cells[column - 1].words for line in self.lines if line.cells)

    @property
    def blocks(self) -> list[list[Line]]:
        """The lines in the bodies of the table: the references, then the others; a heading opens a body of its own."""
        bodies: list[list[Line]] = [[]]
        for line in self.lines:
            after_references = bool(bodies[-1]) and bodies[-1][-1].reference and not line.reference
            if not line.cells or after_references:
                bodies.append([])
            bodies[-1].append(line)
        return [body for body in bodies if body]


def _requests(groups: Iterable[MethodGroup]) -> list[RequestRows]:
    return [request for group in groups for request in group.requests]


def _measured(groups: Sequence[MethodGroup], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns in which some method has a gap."""
    return {key: head for key, head in columns.items() if any(key in group.summary.gaps for group in groups)}


def gaps(groups: Sequence[MethodGroup]) -> Table | None:
    """Every method against Retrain: the verdict, the average gap and the forget gap first."""
    if not _measured(groups, GAPS):
        return None
    shown = _measured(groups, COLUMNS)
    shared = distinct(_requests(groups))
    traces = {group.label: trace_words(group.requests) for group in groups}
    traced = any(traces.values())
    judged = any(group.verdicts for group in groups)
    natural = any("forget_acc" in group.summary.natural_gaps for group in groups)
    counts = {len(shared), *(group.summary.runs for group in groups)}

    def line(head: str, own: Sequence[Cell], control: Cell, verdict: str, trace: str, sent: str, runs: int) -> Line:
        """One line with the columns that the table has."""
        cells = [Cell(verdict or DASH, words=True)] if judged else []
        cells += own[:2]
        cells += [control] if natural else []
        cells += own[2:]
        cells += [Cell(trace or DASH, words=True)] if traced else []
        cells += [Cell(sent)]
        cells += [Cell(str(runs))] if len(counts) > 1 else []
        return Line(head, cells)

    lines = []
    for name, phase in (("Retrain", "retrained"), ("Original", "original")):
        summary = summarise_phase(name, phase, shared)
        cells = [Cell(DASH if phase == "retrained" else fixed(summary.avg_gap)), *_levels(summary, shown)]
        lines.append(line(name, cells, Cell(DASH), "", trace_words(shared, phase), DASH, len(shared)))
    spreads = mean_spreads(shared)
    if any(key in spreads for key in (*shown, "avg_gap")):
        cells = [Cell(fixed(spreads.get(key))) for key in ("avg_gap", *shown)]
        lines.append(line(SPREAD_LINE, cells, Cell(DASH), "", "", DASH, len(shared)))
    lines = [replace(one, reference=True) for one in lines]
    for group in groups:
        summary = group.summary
        cells = [_gap_cell(summary, "avg_gap", summary.avg_gap), *_gap_cells(summary, shown)]
        control = Cell(fixed(summary.natural_gaps.get("forget_acc")), (fixed(summary.natural.get("forget_acc")),))
        verdict = headline(group.verdicts)
        word = "not tested" if verdict is None else verdict.word
        sent = share(summary.bytes_percent)
        lines.append(line(group.label, cells, control, word, traces[group.label], sent, summary.runs))
    first, *others = shown.values()
    heads = ["Method", *(["Verdict"] if judged else []), "Avg. gap", first]
    heads += [*([f"{first}, Natural"] if natural else []), *others]
    heads += [*(["Own hold-out"] if traced else []), "Sent", *(["Requests"] if len(counts) > 1 else [])]
    over = f" over {len(shared)} requests" if len(counts) == 1 and len(shared) > 1 else ""
    return Table(
        "Gaps to Retrain",
        f"After recovery: the mean absolute gap in points{over} ± its standard deviation"
        if len(shared) > 1
        else "After recovery: the absolute gap in points",
        heads,
        lines,
        _how_to_read(groups, spread_known=bool(spreads), natural=natural, traced=traced),
        "; below, the measure in percent",
    )


def without_retrain(groups: Sequence[MethodGroup]) -> Table | None:
    """Every method where there is no Retrain: what the client's own hold-out says, and what it cost."""
    if not groups or any(request.row("retrained") for request in _requests(groups)):
        return None

    def level(group: MethodGroup, phase: str, key: str, digits: int = 1) -> Cell:
        return Cell(fixed(mean(request.get(phase, key) for request in group.requests), digits))

    makers: dict[str, Callable[[MethodGroup], Cell]] = {
        "Own hold-out": lambda group: Cell(trace_words(group.requests) or DASH, words=True),
        "AUC": lambda group: level(group, "recovered", "auc", 3),
        "Forget": lambda group: level(group, "recovered", "forget_acc"),
        "Hold-out": lambda group: level(group, "recovered", "holdout_acc"),
        "Test": lambda group: level(group, "recovered", "test_acc"),
        "Forget before": lambda group: level(group, "original", "forget_acc"),
        "Test before": lambda group: level(group, "original", "test_acc"),
        "Price": lambda group: Cell(signed(group.summary.price_of_forgetting, 3)),
        "Sent": lambda group: Cell(scaled(group.summary.bytes, "B")),
    }
    if len({group.summary.runs for group in groups}) > 1:
        makers["Requests"] = lambda group: Cell(str(group.summary.runs))
    columns = _filled({head: [make(group) for group in groups] for head, make in makers.items()})
    return Table(
        "Without Retrain",
        "After recovery, accuracies in percent; before: Original",
        ["Method", *columns],
        [Line(group.label, [cells[i] for cells in columns.values()]) for i, group in enumerate(groups)],
        "Own hold-out: forgotten data against data of the same clients that never trained; an AUC of 0.5 cannot tell "
        "them apart. Price of forgetting: the change of the retained clients’ loss through unlearning.",
    )


def control(groups: Sequence[MethodGroup]) -> Table | None:
    """Each method beside Natural after as many rounds, and beside Retrain."""
    known = [group for group in groups if group.summary.natural]
    if not known:
        return None
    last = natural_averaged([group.summary for group in known])
    suffix = "_last" if last else ""
    columns: dict[str, list[Cell]] = {}
    for key, head in labels("forget_acc", "holdout_acc", "test_acc").items():
        own = [group.summary.last if last else group.summary.on_path for group in known]
        natural = [group.summary.natural_last if last else group.summary.natural for group in known]
        columns[head] = [Cell(fixed(levels.get(key))) for levels in own]
        columns[f"{head}, Natural"] = [Cell(fixed(levels.get(key))) for levels in natural]
        columns[f"{head}, Retrain"] = [Cell(fixed(_mean_level(group, "retrained", key + suffix))) for group in known]
    columns["Against leaving"] = [_leaving_cell(group.leaving.get("forget_acc")) for group in known]
    shown = _filled(columns)
    averaged = f"; means over the last {LAST} rounds" if last else ""
    judged = any(group.leaving for group in known)
    return Table(
        "Beside Natural after as many rounds",
        f"Accuracies in percent, after unlearning and recovery{averaged}",
        ["Method", *shown],
        [Line(group.label, [cells[i] for cells in shown.values()]) for i, group in enumerate(known)],
        "Natural is the control: the client leaves, nothing is unlearned, and training goes on for as many rounds, "
        "those of unlearning included." + (_LEAVING_NOTE if judged else ""),
    )


_LEAVING_NOTE = (
    f" Against leaving: forget accuracy less Natural’s in points, with its 95{NBSP}% interval; the chance of any false "
    f"“differs” or “no benefit” among all methods and measures is at most 5{NBSP}% each."
)


def _leaving_cell(verdict: LeavingVerdict | None) -> Cell:
    """The verdict against Natural, and the difference that it rests on."""
    if verdict is None:
        return Cell(DASH, words=True)
    size = signed(verdict.difference)
    if verdict.low is not None and verdict.high is not None:
        size += f" ({signed(verdict.low)} to {signed(verdict.high)})"
    return Cell(verdict.word, (size,), words=True)


def two_kinds(groups: Sequence[MethodGroup]) -> Table | None:
    """Memory of the samples and knowledge of the clients' distribution, of the methods and of Original and Natural."""
    shared = distinct(_requests(groups))
    references = [summarise_phase(name, phase, shared) for name, phase in _UNTOUCHED.items()]
    summaries = [*references, *(group.summary for group in groups)]
    known = [one for one in summaries if (one.sample_memory, one.distribution_knowledge) != (None, None)]
    columns = _filled(
        {
            "Samples": [Cell(signed(one.sample_memory)) for one in known],
            "Distribution": [Cell(signed(one.distribution_knowledge)) for one in known],
        }
    )
    if not columns:
        return None
    retrain = any(request.row("retrained") for request in shared)
    return Table(
        "What is left of the clients",
        f"After recovery, in points{' beside Retrain' if retrain else ''}; means over requests",
        ["Method", *columns],
        [
            Line(one.method, [cells[i] for cells in columns.values()], reference=one.phase != "recovered")
            for i, one in enumerate(known)
        ],
        "Samples: forget less hold-out accuracy, less Retrain’s. Distribution: hold-out accuracy less Retrain’s. "
        "Together they are the gap in forget accuracy."
        if retrain
        else "Samples: forget less hold-out accuracy.",
    )


_UNTOUCHED = {"Original": "original", "Natural": NATURAL}  # models in which nothing was unlearned


def durability(groups: Sequence[MethodGroup]) -> Table | None:
    """The forget accuracy when training goes on after the recovery."""
    if not any(group.summary.after for group in groups):
        return None
    lines = [group.summary for group in groups]
    columns = {
        "At the stop": [line.on_path.get("forget_acc") for line in lines],
        **{f"+{end}": [line.after.get(str(end), {}).get("forget_acc") for line in lines] for end in AFTER},
        "Last rounds": [line.last.get("forget_acc") for line in lines],
        "Retrain": [_mean_level(group, "retrained", "forget_acc") for group in groups],
    }
    cells = {head: [Cell(fixed(level)) for level in levels] for head, levels in columns.items()}
    cells["After the stop"] = [_durable_cell(group.durable) for group in groups]
    shown = _filled(cells)
    judged = any(group.durable for group in groups)
    return Table(
        "Does it last",
        "Accuracy on the data to forget in percent, as training goes on",
        ["Method", *shown],
        [Line(group.label, [cells[i] for cells in shown.values()]) for i, group in enumerate(groups)],
        f"+5, +10, +20: means over five rounds up to so many after the stop; last rounds: over the last {LAST}."
        + (" After the stop: the verdict over all these windows, in forget and hold-out accuracy." if judged else ""),
    )


def _durable_cell(verdict: DurableVerdict | None) -> Cell:
    """The verdict over all windows, and why it is so."""
    if verdict is None:
        return Cell(DASH, words=True)
    why = verdict.reason.removeprefix(f"{verdict.word}: ")
    return Cell(verdict.word, (why,) if why != verdict.word else (), words=True)


def by_rate(sweep: Mapping[str, Any]) -> Table | None:
    """The rates of a sweep.

    Args:
        sweep: What `sweep.json` holds.
    """
    rates = [
        rate for rate in sweep.get("rates", ()) if isinstance(rate, Mapping) and number(rate.get("lr")) is not None
    ]
    if not rates:
        return None
    chosen = number(sweep.get("chosen"))
    kinds = {
        "forget_acc": "Forget",
        "holdout_acc": "Hold-out",
        "test_acc": "Test",
        "unlearned_acc": "Forget, unlearned",
    }
    halved = any(_half(rate, 0) for rate in rates)
    tried = number(sweep.get("tried"))
    lines = []
    for rate in rates:
        ends = {end: number(rate.get(f"auc_{end}")) for end in ("low", "high")}
        spanned = f"{fixed(ends['low'], 3)}{NBSP}to{NBSP}{fixed(ends['high'], 3)}"
        interval = (spanned,) if None not in ends.values() else ()
        words = holdout_verdict({"holdout_verdict": rate.get("verdict"), "holdout_reason": rate.get("reason")})
        asked = bool(tried) and rate["lr"] == tried
        halves = [_half(rate, 0), _half(rate, 1) if asked else ""] if halved else []
        cells = [
            *(Cell(said or DASH, words=True) for said in (*halves, words)),
            Cell(fixed(number(rate.get("auc")), 3), interval),
            *(Cell(fixed(number(rate.get(key)))) for key in kinds),
        ]
        taken = bool(chosen) and rate["lr"] == chosen
        name = f"{rate['lr']:g}" if rate["lr"] else "Before"
        lines.append(Line(name, cells, note="chosen" if taken else "", reference=not rate["lr"]))
    return Table(
        "Rates",
        f"After recovery, in percent; the AUC against the hold-out with its 95{NBSP}% interval",
        ["Rate", *(["One half", "Other half", "Whole hold-out"] if halved else ["Verdict"]), "AUC", *kinds.values()],
        lines,
        ("The rate is chosen on one half of the hold-out, and the other half must confirm it. " if halved else "")
        + "An AUC of 0.5 cannot tell forgotten data from data of the same client that never trained.",
    )


def _half(rate: Mapping[str, Any], which: int) -> str:
    """The verdict of a rate against one half of the hold-out; "" in older sweeps.

    Args:
        rate: Of `sweep.json`.
        which: 0 for the half that chooses, 1 for the half that confirms.
    """
    halves = rate.get("halves")
    half = halves[which] if isinstance(halves, list) and len(halves) == 2 else None
    if not isinstance(half, Mapping):
        return ""
    return holdout_verdict({"holdout_verdict": half.get("verdict"), "holdout_reason": half.get("reason")})


def _mean_level(group: MethodGroup, phase: str, key: str) -> float | None:
    return mean(request.get(phase, key) for request in group.requests)


def _how_to_read(groups: Sequence[MethodGroup], *, spread_known: bool, natural: bool, traced: bool) -> str:
    sentences = ["Avg. gap: the mean of the gaps in forget and retain accuracy and in both attacks."]
    each = [group.verdicts for group in groups]
    if any(each):
        sentences.append(f"Gaps: {legend(each)}.")
    else:
        sentences.append("Whether a gap is more than chance was not tested.")
    if spread_known:
        sentences.append(f"{SPREAD_LINE}: the gap between two Retrains with different seeds.")
    if natural:
        sentences.append("Natural: the control, which unlearns nothing, after as many rounds.")
    if traced:
        sentences.append(
            "Own hold-out: forgotten data against data of the same clients that never trained; forgotten means within "
            "the margin."
        )
    sentences.append("Sent: bytes in percent of Retrain’s.")
    return " ".join(sentences)


def thresholds(groups: Sequence[MethodGroup]) -> Table | None:
    """Song's attacks with a threshold for each class."""
    shown = _measured(groups, THRESHOLDS)
    if not shown:
        return None
    shared = distinct(_requests(groups))
    lines = []
    for name, phase in (("Retrain", "retrained"), ("Original", "original")):
        lines.append(Line(name, _levels(summarise_phase(name, phase, shared), shown), reference=True))
    for group in groups:
        lines.append(Line(group.label, _gap_cells(group.summary, shown)))
    return Table(
        "Attacks with a threshold for each class",
        "Gaps to Retrain after recovery, in points; below, the forget data taken for training data, in percent",
        ["Method", *shown.values()],
        lines,
        "Song and Mittal’s attacks: what counts as a member is learnt for each class from retained and test data.",
    )


def _levels(summary: MethodSummary, keys: Iterable[str]) -> list[Cell]:
    """The gaps of Original (Retrain has none), and below them the measures."""
    return [Cell(fixed(summary.gaps.get(key)), (fixed(summary.means.get(key)),)) for key in keys]


def _gap_cells(summary: MethodSummary, keys: Iterable[str]) -> list[Cell]:
    return [_gap_cell(summary, key, summary.gaps.get(key), fixed(summary.means.get(key))) for key in keys]


def _gap_cell(summary: MethodSummary, key: str, gap: float | None, level: str = "") -> Cell:
    """The gap with the mark of its verdict and its deviation in one short cell; below, the measure itself."""
    deviation = summary.deviations.get(key)
    sign = mark(summary.verdicts, key)
    text = f"{sign}{fixed(gap)}" + (f"{NBSP}±{NBSP}{fixed(deviation)}" if deviation is not None else "")
    none_shown = key in summary.verdicts and summary.verdicts[key].word != DIFFERS
    return Cell(text, (level,) if level else (), none_shown)


def costs(groups: Sequence[MethodGroup]) -> Table | None:
    """Unlearning and recovery apart, and as a share of Retrain."""
    requests = _requests(groups)
    shown = [kind for kind in _COSTS_SHOWN if quantities.mean_cost(requests, kind) is not None]
    if not {"bytes", "flops"} & set(shown):
        return None
    shared = distinct(requests)
    lines = []
    if any(quantities.mean_cost(shared, kind, "retrained") is not None for kind in shown):
        lines.append(
            Line("Retrain", [_amount(quantities.mean_cost(shared, kind, "retrained"), kind) for kind in shown])
        )
    for group in groups:
        lines.append(Line(group.label))
        for phase, title in (("unlearned", "Unlearning"), ("recovered", "Recovery")):
            amounts = [_amount(quantities.mean_cost(group.requests, kind, phase), kind) for kind in shown]
            lines.append(Line(title, amounts))
        if lines[0].head == "Retrain":
            shares = [Cell(share(quantities.cost_share(group.requests, kind))) for kind in shown]
            lines.append(Line("Share of Retrain", shares))
    return Table(
        "Costs",
        "Means over requests",
        ["Work", *(COSTS[kind].label for kind in shown)],
        lines,
        "Communication counts both directions; computing counts clients and server, two FLOP for a multiplication with "
        "an addition; storage is the most that lay there at the beginning of a phase or at the end of a round, for the "
        "share the larger of both.",
    )


def _amount(value: float | None, kind: str) -> Cell:
    if kind == "seconds" and value is not None:
        return Cell(f"{fixed(value)}{NBSP}s")
    return Cell(scaled(value, COSTS[kind].unit))


def budgets(groups: Sequence[MethodGroup]) -> Table | None:
    """What each share of Retrain's communication pays for."""
    lines = []
    for group in groups:
        at_budgets = quantities.at_budgets(group.requests)
        lines.append(Line(group.label))
        lines += [Line(f"{100 * budget:g}{NBSP}%", _at_budget(ended)) for budget, ended in at_budgets.items()]
    if not any(line.cells for line in lines):
        return None
    return Table(
        "Fixed budgets",
        "Gaps to Retrain, in points, at a share of Retrain’s communication; below, the measure itself in percent",
        ["Budget", "Spent", "Avg. gap", *COLUMNS.values()],
        lines,
        "After the last round of recovery that the share pays for; unlearning counts, and a share that it alone "
        "exceeds is out of reach. Recovery goes on past Retrain’s accuracy here, to show what comes back with it.",
    )


def _at_budget(ended: Sequence[RequestRows]) -> list[Cell]:
    within = [request for request in ended if quantities.affordable(request)]
    fraction = quantities.budget_spent(ended)
    spent = share(None if fraction is None else 100 * fraction)
    if not within:
        return [Cell(spent, (OUT_OF_REACH,)), *[Cell(DASH)] * (len(COLUMNS) + 1)]
    summary = summarise("", within)
    rounds = summary.recovery_rounds
    notes = [count(None if rounds is None else round(rounds, 1), "round")]
    if len(within) < len(ended):
        notes.append(f"{len(within)} of {len(ended)} requests")
    return [
        Cell(spent, tuple(notes)),
        Cell(fixed(summary.avg_gap)),
        *(Cell(fixed(summary.gaps.get(key)), (fixed(summary.means.get(key)),)) for key in COLUMNS),
    ]


def requests_at_a_glance(lines: Sequence[tuple[str, str, RequestRows]]) -> Table:
    """One line for each request.

    Args:
        lines: For each request its name, the id of its run on the page, and its rows.
    """
    cells = [[Cell(request.method, words=True), *map(Cell, _glance(request))] for _, _, request in lines]
    heads = ["Method", "Gap", "Recovered", "Retrain", "Unlearned", "Original"]
    heads += ["Test", "Retrain’s test", "Rounds", "Price"]
    columns = _filled({head: [line[i] for line in cells] for i, head in enumerate(heads)})
    shown = [heads.index(head) for head in columns]
    rows = [
        Line(name, [own[i] for i in shown], href=f"#{key}") for (name, key, _), own in zip(lines, cells, strict=True)
    ]
    gap = "Gap: recovered forget accuracy less Retrain’s, in points; the closer to zero, the more alike. "
    return Table(
        "All requests",
        "Accuracy on the data to forget in percent, unless it says test",
        ["Run", *columns],
        rows,
        (gap if "Gap" in columns else "")
        + "Rounds: of recovery. Price of forgetting: the change of the retained clients’ loss through unlearning.",
    )


def _glance(request: RequestRows) -> list[str]:
    forget = [fixed(request.get(phase, "forget_acc")) for phase in ("recovered", "retrained", "unlearned", "original")]
    test = [fixed(request.get(phase, "test_acc")) for phase in ("recovered", "retrained")]
    work = [fixed(request.get("recovered", "rounds"), 0), signed(request.get("unlearned", "price_of_forgetting"), 3)]
    return [signed(quantities.request_gap(request, "recovered")), *forget, *test, *work]


def all_numbers(events: Sequence[tuple[str, RequestRows]]) -> Table:
    """Every row of a run.

    Args:
        events: For each request its heading, or "" for the only one, and its rows.
    """
    lines = []
    for heading, event in events:
        lines += [Line(heading)] if heading else []
        lines += [_numbers(event, row) for row in event.rows]
    heads = [
        "Phase",
        "Method",
        "Clients",
        "Rounds",
        "Seconds",
        "Test",
        "Retain",
        "Forget",
        "Hold-out",
        "Gap to Retrain",
    ]
    known = any(event.row("retrained") for _, event in events)
    if not known:
        heads = heads[:-1]
        lines = [replace(line, cells=line.cells[:-1]) for line in lines]
    note = "Gap: forget accuracy less Retrain’s, in points; the closer to zero, the more alike." if known else ""
    return Table("All numbers", "Accuracies in percent", heads, lines, note)


def _numbers(request: RequestRows, row: Row) -> Line:
    runs = number(row.get("runs")) or 1
    own_gap = row["phase"] in ("unlearned", "recovered", NATURAL)
    gap = quantities.request_gap(request, row["phase"]) if own_gap else None
    ended = request.budgets.get(number(row.get("budget")) or 0.0)
    if ended is not None:
        gap = quantities.request_gap(ended, "recovered")
    clients = ", ".join(map(str, row["clients"])) + (" (samples)" if row.get("samples") else "")
    cells = [
        Cell(str(row["method"]), words=True),
        Cell(clients, words=True),
        Cell(fixed(number(row.get("rounds")), 0)),
        Cell(fixed(number(row.get("seconds")))),
        *(Cell(fixed(number(row.get(f"{kind}_acc")))) for kind in ("test", "retain", "forget", "holdout")),
        Cell(signed(gap)),
    ]
    return Line(_phase(row), cells, note=f"mean of {runs:g}" if runs > 1 else "")


def _phase(row: Row) -> str:
    budget = number(row.get("budget"))
    own = str(row["phase"]).capitalize()
    return f"{own} {100 * budget:g}{NBSP}%" if budget is not None else PHASES.get(row["phase"], own)


_EXPOSURE = {
    "tpr_at_0.05": f"TPR at 5{NBSP}% FPR (%)",
    "tpr_at_0.01": f"TPR at 1{NBSP}% FPR (%)",
    "tpr_at_0.001": f"TPR at 0.1{NBSP}% FPR (%)",
    "auc": MEASURES["auc"].label,
    "mia_song_svc": MEASURES["mia_song_svc"].label,
    "mia_yeom": MEASURES["mia_yeom"].label,
    "backdoor_asr": "Backdoor works",
}


def exposure(request: RequestRows) -> Table | None:
    """What somebody who holds the model can tell about the forget data."""
    phases = PHASES | {NATURAL: "Natural"}
    shown = [key for key in _EXPOSURE if any(request.get(phase, key) is not None for phase in phases)]
    if not shown:
        return None
    lines = []
    for phase, title in phases.items():
        if request.row(phase):
            lines.append(Line(title, [_exposed(request, phase, key) for key in shown]))
    scarce = any(request.row(phase).get(f"{key}_enough") is False for phase in phases for key in shown)
    several = request.over > 1
    few = " Few: fewer samples than that FPR needs." if scarce else ""
    closer = " The closer to Retrained, the better." if request.row("retrained") else ""
    backdoor = " Backdoor: test images of other classes that the planted trigger turns into its class."
    return Table(
        "What an attacker can tell",
        f"In percent; means over {request.over} requests" if several else f"In percent, with 95{NBSP}% intervals",
        ["Phase", *(_EXPOSURE[key] for key in shown)],
        lines,
        "TPR: the share of the forget samples found while the FPR’s share of unseen data is taken for them; chance "
        f"finds the same share. MIA: forget samples that the attack takes for training data."
        f"{closer}{few}{backdoor if 'backdoor_asr' in shown else ''}",
    )


def _exposed(request: RequestRows, phase: str, key: str) -> Cell:
    times = 100 if key.startswith("tpr") else 1
    digits = {"tpr_at_0.05": 2, "tpr_at_0.01": 2, "tpr_at_0.001": 2, "auc": 3}.get(key, 1)
    value = request.get(phase, key)
    if value is None:
        return Cell(DASH)
    notes = []
    low = request.get(phase, f"{key}_low")
    high = request.get(phase, f"{key}_high")
    if low is not None and high is not None:
        notes.append(f"{times * low:.{digits}f} to {times * high:.{digits}f}")
    fpr_high = request.get(phase, f"{key}_fpr_high")
    if fpr_high is not None:
        notes.append(f"FPR up to {_in_percent(fpr_high)}{NBSP}%")
    if request.row(phase).get(f"{key}_enough") is False:
        notes.append("few")
    if key == "auc" and (verdict := holdout_verdict(request.row(phase))):
        notes.append(verdict)
    return Cell(fixed(times * value, digits), tuple(notes))


def canaries(request: RequestRows) -> Table | None:
    """The one-run audit of each model by the leaving clients' canaries."""
    lines = []
    for audit in canary_audits(request.rows):
        guesses = f"{fixed(audit.correct, 0)} of {fixed(audit.guesses, 0)}"
        cells = [
            Cell(guesses),
            Cell(fixed(audit.epsilon_low, 2)),
            Cell(fixed(audit.p, 3)),
            Cell(audit.verdict, words=True),
        ]
        lines.append(Line(f"{PHASES[audit.phase]}, {audit.kind}", [*cells, Cell(audit.sentence, words=True)]))
    if not lines:
        return None
    return Table(
        "One-run audit",
        "Guesses which canaries were trained on",
        ["Model, canaries", "Correct", "Epsilon, at least", "p", "Verdict", "In words"],
        lines,
        "Fair coins decided before training which canaries were trained on; Retrain cannot depend on them, and half of "
        f"the guesses on it are correct by chance. Everything said about one model holds with 95{NBSP}% confidence. "
        "Not detected is no proof, and blind means that the audit does not catch Original either.",
    )


def by_client(groups: Sequence[MethodGroup]) -> list[Table]:
    """The gap in forget accuracy, client by client; the longer of clients and methods goes down the page."""
    targets = dict.fromkeys(_heading(request) for request in _requests(groups))
    if len(targets) < 2 or max(len(group.requests) for group in groups) < 2 or len(groups) > 20:
        return []
    if not _measured(groups, {"forget_acc": ""}):
        return []
    retrain = []
    columns: list[list[Cell]] = [[] for _ in groups]
    ordered = sorted(targets, key=lambda name: (len(name), name))
    for target in ordered:
        by_method = [[request for request in group.requests if _heading(request) == target] for group in groups]
        shared = distinct(request for requests in by_method for request in requests)
        retrain.append(Cell(fixed(mean(request.get("retrained", "forget_acc") for request in shared))))
        for column, group, requests in zip(columns, groups, by_method, strict=True):
            column.append(_client_cell(requests, group.clients))
    names = [group.label for group in groups]
    if len(groups) < WIDEST or len(groups) <= len(targets):
        rows = [Line(target, list(cells)) for target, *cells in zip(ordered, retrain, *columns, strict=True)]
        return _in_parts("Forgotten", ["Retrain (%)", *names], rows)
    rows = [Line("Retrain (%)", retrain, reference=True)]
    rows += [Line(name, column) for name, column in zip(names, columns, strict=True)]
    return _in_parts("Method", ordered, rows)


def _in_parts(corner: str, heads: Sequence[str], rows: Sequence[Line]) -> list[Table]:
    """The table of all clients, in as many parts as its columns need.

    Args:
        corner: The heading of the first column.
        heads: Of the other columns.
        rows: With as many cells.
    """
    parts = []
    for start in range(0, len(heads), WIDEST):
        shown = slice(start, start + WIDEST)
        lines = [replace(row, cells=row.cells[shown]) for row in rows]
        parts.append(
            Table(
                "Client by client" if not start else "Client by client, continued",
                "Recovered forget accuracy less Retrain’s, in points",
                [corner, *heads[shown]],
                lines,
                "Means over seeds. Above zero something may be left, below zero the data is treated worse than unseen "
                f"data. *: outside where another Retrain of these clients would lie in 95{NBSP}% of cases; of twenty "
                "numbers without a difference, one is expected to be. The verdicts are over all targets.",
            )
        )
    return parts


def _client_cell(requests: Sequence[RequestRows], judged: Mapping[str, ClientGap]) -> Cell:
    """The mean with its sign, marked where it lies outside the prediction interval of another Retrain."""
    alone = judged.get(each_named("client", requests[0].clients)) if requests else None
    star = "*" if alone is not None and alone.outside else ""
    return Cell(signed(mean(quantities.request_gap(request, "recovered") for request in requests)) + star)


def _heading(request: RequestRows) -> str:
    return f"{request.target[:1].upper()}{request.target[1:]}"


def distances(groups: Sequence[MethodGroup]) -> Table | None:
    """What else tells a method from Retrain, beyond the gaps that the paper reports."""
    relearning = "Relearning, × Retrain"
    makers: dict[str, Callable[[MethodGroup], Cell]] = {
        "Tug\u2011of\u2011War": lambda group: _tug_cell(group.summary.tug_of_war, group.summary.tug_of_war_spread),
        "Tug\u2011of\u2011War, MIA": lambda group: _tug_cell(
            group.summary.tug_of_war_mia, group.summary.tug_of_war_mia_spread
        ),
        "JS divergence": _divergence,
        "Two snapshots, AUC": _leaked,
        f"Two snapshots, TPR at 1{NBSP}% FPR (%)": lambda group: _leaked_at(group, 0.01),
        f"Two snapshots, TPR at 0.1{NBSP}% FPR (%)": lambda group: _leaked_at(group, 0.001),
        relearning: _relearning,
    }
    columns = _filled({head: [make(group) for group in groups] for head, make in makers.items()})
    if not columns:
        return None
    lines = [Line(group.label, [cells[i] for cells in columns.values()]) for i, group in enumerate(groups)]
    said = {
        "Tug": "Tug-of-War: 1 is alike in forget, retain and test accuracy (MIA: with Yeom’s attack in place of the "
        "forget accuracy).",
        "JS": "JS divergence: between the predictions on the forget data, in nats; the spread is that of two Retrains.",
        "Two": "Two snapshots: what somebody learns who holds the model before and after; an AUC of 0.5 is nothing, "
        "and Retrain gives away something as well.",
        f"Two snapshots, TPR at 1{NBSP}%": "TPR: the share of the forgotten found while the FPR’s share of the "
        f"outsiders is taken for them, with 95{NBSP}% intervals.",
        relearning: "Relearning: below 1, knowledge was left.",
    }
    compared = any(request.row("retrained") for request in _requests(groups))
    return Table(
        "Other distances to Retrain" if compared else "What two snapshots give away",
        "After recovery; means over requests",
        ["Method", *columns],
        lines,
        " ".join(text for start, text in said.items() if any(head.startswith(start) for head in columns)),
    )


def _filled(columns: Mapping[str, Sequence[Cell]]) -> dict[str, Sequence[Cell]]:
    """The columns in which some cell says something."""
    return {head: cells for head, cells in columns.items() if any(cell.text != DASH or cell.notes for cell in cells)}


def _tug_cell(value: float | None, spread: float | None) -> Cell:
    if value is None or spread is None:
        return Cell(fixed(value, 3))
    return Cell(fixed(value, 3), (f"spread {fixed(spread, 3)}",))


def _divergence(group: MethodGroup) -> Cell:
    summary = group.summary
    value = summary.gaps.get("forget_js")
    spread = summary.spread.get("forget_js")
    if value is None or spread is None:
        return Cell(fixed(value, 3))
    return Cell(fixed(value, 3), (f"spread {fixed(spread, 3)}",))


def _relearning(group: MethodGroup) -> Cell:
    """The mean, and whether it is one: where the forgotten did not come back in time, there is only a bound."""
    ratio = mean(request.get("recovered", "relearn_ratio") for request in group.requests)
    bounds = {request.row("recovered").get("relearn_bound") for request in group.requests}
    signs = [sign for bound, sign in {"at least": "≥ ", "at most": "≤ "}.items() if bound in bounds]
    if ratio is None or not signs:
        return Cell(fixed(ratio, 3))
    return Cell((signs[0] if len(signs) == 1 else "about ") + fixed(ratio, 3), ("a bound",))


_OUTSIDERS = {"holdout": "hold-out data", "test": "test data"}


def _leaked(group: MethodGroup) -> Cell:
    """What both snapshots give away together, beside Retrain's, and against whom."""
    value = mean(request.get("recovered", "leakage_auc") for request in group.requests)
    retrain = mean(request.get("retrained", "leakage_auc") for request in group.requests)
    notes = [] if value is None or retrain is None else [f"Retrain {fixed(retrain, 3)}"]
    outsiders = {request.row("recovered").get("leakage_against") for request in group.requests}
    against = " and ".join(words for name, words in _OUTSIDERS.items() if name in outsiders)
    if against:
        notes.append(f"against {against}")
    return Cell(fixed(value, 3), tuple(notes))


def _leaked_at(group: MethodGroup, rate: float) -> Cell:
    """The share of the forgotten that both snapshots find together at a false positive rate."""
    key = f"leakage_tpr_at_{rate:g}"

    def averaged(phase: str) -> dict[str, Any]:
        ends = {"value": key, "low": f"{key}_low", "high": f"{key}_high"}
        means = {end: mean(request.get(phase, name) for request in group.requests) for end, name in ends.items()}
        enough = all(request.row(phase).get(f"{key}_enough") is not False for request in group.requests)
        return {**means, "enough": enough}

    return _rate_cell(averaged("recovered"), averaged("retrained"), rate)


def _rate_cell(members: Mapping[str, Any], retrain: Mapping[str, Any], rate: float) -> Cell:
    """A share of members with its interval, beside Retrain's; or that the outsiders are too few to say."""
    if members.get("enough") is False:
        return Cell(DASH, (f"too few outsiders for {100 * rate:g}{NBSP}%",))
    if members.get("value") is None:
        return Cell(DASH)
    notes = [interval] if (interval := _interval(members)) else []
    if retrain.get("value") is not None:
        beside = _interval(retrain)
        notes.append(f"Retrain {_in_percent(retrain['value'])}" + (f" ({beside})" if beside else ""))
    return Cell(_in_percent(members["value"]), tuple(notes))


def _interval(ends: Mapping[str, Any]) -> str:
    low = ends.get("low")
    high = ends.get("high")
    return "" if low is None or high is None else f"{_in_percent(low)} to {_in_percent(high)}"


def _in_percent(value: float | None) -> str:
    return fixed(None if value is None else 100 * value)


_PAIRED = {"avg_gap": "Avg. gap", **GAPS, **labels("test_acc", "backdoor_asr")}


def pairwise(comparison: Comparison) -> Table | None:
    """Every method against the first one, over the same targets."""
    pairs = {name: line.against_first for name, line in comparison.methods.items() if line.against_first}
    shown = {key: head for key, head in _PAIRED.items() if any(key in each for each in pairs.values())}
    if not shown:
        return None
    lines = [Line(method, [_pair_cell(each.get(key)) for key in shown]) for method, each in pairs.items()]
    most = max(pair.units for each in pairs.values() for pair in each.values())
    few = " Two or three targets make wide intervals: take more before ranking methods." if most < 5 else ""
    shared = any(pair.p is None for each in pairs.values() for key, pair in each.items() if key in shown)
    open_ = " Targets that share an Original are not independent: nothing is called of them." if shared else ""
    return Table(
        "Compared pairwise, target by target",
        f"The method’s gap to Retrain less that of {comparison.first}, in points, with 95{NBSP}% intervals",
        ["Method", *shown.values()],
        lines,
        f"Above zero the method is farther from Retrain than {comparison.first}, below zero nearer. Each interval is "
        f"Student’s, for itself alone. It is called farther or nearer where a bootstrap interval does not cover zero "
        f"either and p ≤{NBSP}0.05 by Holm’s rule over all methods and columns.{open_}{few}",
    )


def _pair_cell(pair: PairedDifference | None) -> Cell:
    if pair is None:
        return Cell(DASH)
    direction = "farther" if pair.mean > 0 else "nearer"
    verdict = direction if pair.different else "cannot tell"
    interval = f"{signed(pair.low)} to {signed(pair.high)}"
    return Cell(signed(pair.mean), (interval, verdict), not pair.different)


def many_models(comparison: Comparison) -> list[Table]:
    """What needs many models of each kind: two procedures compared, not two models."""
    distances_between: _Columns = {
        "Against Retrain": lambda many: _model_test(many, "forget"),
        "KLoM, forget": lambda many: _klom(many, "forget"),
        "KLoM, retain": lambda many: _klom(many, "retain"),
        "KLoM, test": lambda many: _klom(many, "test"),
        "U\u2011LiRA right (%)": _ulira,
        "Epsilon at least": _epsilon_bound,
        "Exposed samples": _exposed_samples,
        "Forgetting quality (descriptive)": lambda many: Cell(fixed(many.get("forgetting_quality"), 2)),
    }
    found_by_attacks: _Columns = {
        "LiRA, AUC": lambda many: _auc(many, "lira"),
        f"LiRA finds at 1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.01),
        f"LiRA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.001),
        "LiRA online, AUC": lambda many: Cell(fixed(many.get("lira_online_auc"), 3)),
        "RMIA, AUC": lambda many: _auc(many, "rmia"),
        f"RMIA finds at 1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.01),
        f"RMIA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.001),
    }
    tables = [
        _over_models(
            comparison,
            "Over many models",
            distances_between,
            f"Against Retrain: a permutation test over the models’ labels on the forget data, at 5{NBSP}% over all "
            "targets and methods; “cannot tell” is no proof of equality. KLoM: 0 is alike; below it, what equal models "
            f"would give by chance, and p. U-LiRA right: 50{NBSP}% cannot tell; Student’s 95{NBSP}% interval over "
            f"models. Epsilon: a lower bound with 95{NBSP}% confidence. Exposed: how many samples, not which. "
            "Forgetting quality: 1 is alike; equal models get about 0.2.",
        ),
        _over_models(
            comparison,
            "Members found over many models",
            found_by_attacks,
            "Finds: the share of members found while that share of the outsiders is taken for them, with "
            f"95{NBSP}% intervals. Below each number, what Retrain gets in the method’s place.",
        ),
    ]
    return [table for table in tables if table]


_Columns = dict[str, Callable[[Mapping[str, Any]], Cell]]


def _over_models(comparison: Comparison, title: str, makers: _Columns, note: str) -> Table | None:
    """Some columns of what many models say.

    Args:
        comparison: With the evidence of each method.
        title: Of the table.
        makers: By heading, what makes a cell of a method's evidence.
        note: How to read it.
    """
    evidence = {name: line.references for name, line in comparison.methods.items() if line.references}
    columns = _filled({head: [make(many) for many in evidence.values()] for head, make in makers.items()})
    if not columns:
        return None
    lines = [Line(method, [cells[i] for cells in columns.values()]) for i, method in enumerate(evidence)]
    models = max(many.get("models", 0) for many in evidence.values())
    caption = f"{models:g} unlearned models against {models:g} Retrains, all of other seeds; means over targets"
    return Table(title, caption, ["Method", *columns], lines, note)


def _model_test(many: Mapping[str, Any], name: str) -> Cell:
    """The verdict of the permutation test on a kind of data; older comparisons have none."""
    test = _object(_object(many.get("tests")).get(name))
    if not {"word", "p_holm"} <= test.keys():
        return Cell(DASH)
    notes = [f"p {fixed(test['p_holm'], 3)}"]
    if test.get("models_needed"):
        notes.append(f"take {test['models_needed']:g} models")
    return Cell(str(test["word"]), tuple(notes), test["word"] != DIFFERS, words=True)


def _klom(many: Mapping[str, Any], name: str) -> Cell:
    """KLoM with what chance alone gives; older comparisons have it on the forget data alone."""
    test = _object(_object(many.get("tests")).get(name))
    if not {"klom", "klom_by_chance", "klom_p"} <= test.keys():
        return Cell(fixed(many.get("klom") if name == "forget" else None, 2))
    notes = (f"by chance {fixed(test['klom_by_chance'], 2)}", f"p {fixed(test['klom_p'], 3)}")
    return Cell(fixed(test["klom"], 2), notes)


def _ulira(many: Mapping[str, Any]) -> Cell:
    """How often U-LiRA is right, with its interval over models; older comparisons have no interval."""
    found = _object(many.get("ulira"))
    if not {"value", "low", "high"} <= found.keys():
        return Cell(_in_percent(many.get("ulira_accuracy")))
    return Cell(_in_percent(found["value"]), (_interval(found),))


def _epsilon_bound(many: Mapping[str, Any]) -> Cell:
    bound = _object(many.get("epsilon_bound"))
    if not {"value", "ceiling"} <= bound.keys():
        return Cell(DASH)
    return Cell(fixed(bound["value"], 2), (f"at most {fixed(bound['ceiling'], 2)} can be shown",))


def _exposed_samples(many: Mapping[str, Any]) -> Cell:
    exposed = _object(many.get("exposed"))
    if not {"samples", "remembered", "over_unlearned"} <= exposed.keys():
        return Cell(DASH)
    notes = (f"of {exposed['samples']:g}", f"over-unlearned {exposed['over_unlearned']:g}")
    return Cell(f"{exposed['remembered']:g}", notes)


def _auc(many: Mapping[str, Any], attack: str) -> Cell:
    retrain = many.get(f"{attack}_auc_floor")
    notes = () if retrain is None else (f"Retrain {fixed(retrain, 3)}",)
    return Cell(fixed(many.get(f"{attack}_auc"), 3), notes)


def _finds(many: Mapping[str, Any], attack: str, rate: float) -> Cell:
    """The members that an attack finds; older comparisons have the share at 1 % alone, without its interval."""
    name = "at_1" if rate == 0.01 else "at_tenth"
    members = _object(_object(many.get(f"{attack}_finds")).get(name))
    retrain = _object(_object(many.get(f"{attack}_finds_floor")).get(name))
    if not members and name == "at_1":
        members = {"value": many.get(f"{attack}_tpr_at_1")}
        retrain = {"value": many.get(f"{attack}_tpr_at_1_floor")}
    return _rate_cell(members, retrain, rate)


def _object(stored: object) -> Mapping[str, Any]:
    return stored if isinstance(stored, dict) else {}
