# SPDX-License-Identifier: Apache-2.0
"""The tables: gaps to Retrain beside the noise floor, costs, what an attacker can tell, and client by client."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedquit.report.reading import GAPS, PHASES, THRESHOLDS, Comparison, Pair, Part, Run, affords, mean
from fedquit.report.words import DASH, NBSP, count, fixed, scaled, share, signed

_ASIDE = ("title", "seed", "request", "engine", "method.name")  # in these, runs of one method may differ
_SHOWN = {"test_acc": "Test", **GAPS}
COSTS = {
    "bytes": ("Communication", "B"),
    "flops": ("Computing", "FLOP"),
    "server_storage_bytes": ("Server storage", "B"),
    "client_storage_bytes": ("Client storage", "B"),
    "seconds": ("Time", "s"),
}


@dataclass(frozen=True)
class Cell:
    """Some text, and smaller text below it."""

    text: str
    notes: tuple[str, ...] = ()
    plain: bool = False  # inside the noise floor: not a difference


@dataclass(frozen=True)
class Line:
    """A row with its heading; `head` alone spans the table."""

    head: str
    cells: Sequence[Cell] = ()


@dataclass(frozen=True)
class Table:
    """A table of the page, with a sentence on how to read it."""

    title: str
    caption: str
    heads: Sequence[str]
    lines: Sequence[Line]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """All requests that one method served under the same settings."""

    label: str
    parts: list[Part] = field(default_factory=list)

    def deltas(self, key: str, phase: str = "recovered") -> list[float]:
        """The absolute gaps to Retrain, request by request."""
        return [abs(gap) for part in self.parts if (gap := part.gap(phase, key)) is not None]

    def summary(self) -> dict[str, Any]:
        """Means over the requests, gaps to Retrain, the floor beside them, and the costs."""
        found: dict[str, Any] = {"method": self.label, "requests": len(self.parts)}
        sizes, floors = [], []
        for key in ("test_acc", *GAPS, *THRESHOLDS):
            deltas = self.deltas(key)
            floor = mean(part.floor.get(key) for part in self.parts)
            gap = mean(deltas)
            found |= {
                key: mean(part.get("recovered", key) for part in self.parts),
                f"{key}_gap": gap,
                f"{key}_gap_std": statistics.stdev(deltas) if len(deltas) > 1 else None,
                f"{key}_floor": floor,
            }
            if key in GAPS:
                sizes.append(gap)
                floors.append(floor)
        given = mean(part.floor.get("avg_gap") for part in self.parts)
        return found | {
            "avg_gap": None if None in sizes else mean(sizes),
            "avg_gap_floor": given if given is not None else None if None in floors else mean(floors),
            "recovery_rounds": mean(part.get("recovered", "rounds") for part in self.parts),
            "price_of_forgetting": mean(part.get("unlearned", "price_of_forgetting") for part in self.parts),
            "communication_percent": mean(part.share("bytes") for part in self.parts),
            "computation_percent": mean(part.work for part in self.parts),
            "seconds": mean(part.whole("seconds") for part in self.parts),
        }

    def bought(self) -> dict[float, list[Part]]:
        """What each share of Retrain's communication pays for, request by request."""
        asked = sorted({b for part in self.parts for b in part.budgets})
        return {b: [part.budgets[b] for part in self.parts if b in part.budgets] for b in asked}


def grouped(runs: Sequence[Run]) -> list[Group]:
    """By method; settings in which the runs of a method differ become part of its name."""
    flat = {id(run): _flat(run.recipe) for run in runs}
    methods: dict[str, list[tuple[Run, Part]]] = {}
    for run in runs:
        for part in run.requests:
            methods.setdefault(part.method, []).append((run, part))
    groups: dict[str, Group] = {}
    for method, mine in methods.items():
        recipes = {id(run): flat[id(run)] for run, _ in mine}
        keys = dict.fromkeys(k for recipe in recipes.values() for k in recipe)
        varied = [k for k in keys if len({r.get(k) for r in recipes.values()}) > 1]
        for run, part in mine:
            own = (f"{k.split('.')[-1]}={flat[id(run)].get(k, 'default')}" for k in varied)
            label = ", ".join([method, *own])
            groups.setdefault(label, Group(label)).parts.append(part)
    return list(groups.values())


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        if name in _ASIDE:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value if isinstance(value, str) else json.dumps(value)
    return found


def gaps(groups: Sequence[Group]) -> Table | None:
    """Every method against Retrain."""
    if not any(group.deltas(key) for group in groups for key in GAPS):
        return None
    shown = {k: head for k, head in _SHOWN.items() if any(group.deltas(k) for group in groups)}
    every = [part for group in groups for part in group.parts]
    known = once(every)
    apart = [mean(Group("", known).deltas(key, "original")) for key in GAPS]
    lines = [
        Line("Retrain", [Cell(str(len(known))), *(_level(known, "retrained", k) for k in shown), Cell(DASH)]),
        Line(
            "Original",
            [
                Cell(str(len(known))),
                *(_level(known, "original", k) for k in shown),
                Cell(DASH if None in apart else fixed(mean(apart))),
            ],
        ),
    ]
    floor = False
    for group in groups:
        found = group.summary()
        floor = floor or any(found[f"{k}_floor"] is not None for k in shown)
        cells = _gap_cells(found, shown)
        average = _gap_cell(found["avg_gap"], found["avg_gap_floor"], None, "")
        lines.append(Line(group.label, [Cell(str(found["requests"])), *cells, average]))
    judged = (
        "The floor is how far two Retrains with other seeds lie apart: a gap inside it is not a difference."
        if floor
        else "How far two Retrains lie apart was not measured, so that small gaps may be chance."
    )
    return Table(
        "Gaps to Retrain",
        "After recovery, in points; below, the measure itself in percent",
        ["Method", "Requests", *shown.values(), "Avg. gap"],
        lines,
        "Gap: mean absolute difference to the Retrain of the same request, ± its standard deviation over requests; "
        f"Avg. gap: the mean of the last four. {judged}",
    )


def thresholds(groups: Sequence[Group]) -> Table | None:
    """Song's attacks with a threshold for each class."""
    shown = {k: head for k, head in THRESHOLDS.items() if any(group.deltas(k) for group in groups)}
    if not shown:
        return None
    known = once([part for group in groups for part in group.parts])
    lines = [
        Line(name, [_level(known, phase, k) for k in shown])
        for name, phase in (("Retrain", "retrained"), ("Original", "original"))
    ]
    for group in groups:
        lines.append(Line(group.label, _gap_cells(group.summary(), shown)))
    return Table(
        "Attacks with a threshold for each class",
        "Gaps to Retrain after recovery, in points; below, the forget data taken for training data, in percent",
        ["Method", *shown.values()],
        lines,
        "Song and Mittal’s attacks: what counts as a member is learnt for each class from retained and test data.",
    )


def once(parts: Sequence[Part]) -> list[Part]:
    """Original and Retrain serve all methods: each request once."""
    found: dict[str, Part] = {}
    for part in parts:
        gold = part.row("retrained")
        key = [part.number, part.rows[0]["clients"], gold.get("seed"), gold.get("forget_acc")]
        found.setdefault(json.dumps(key), part)
    return list(found.values())


def _level(parts: Sequence[Part], phase: str, key: str) -> Cell:
    level = fixed(mean(part.get(phase, key) for part in parts))
    apart = mean(abs(g) for part in parts if (g := part.gap(phase, key)) is not None)
    return Cell(DASH, (level,)) if phase == "retrained" else Cell(fixed(apart), (level,))


def _gap_cells(found: Mapping[str, Any], keys: Iterable[str]) -> list[Cell]:
    return [_gap_cell(found[f"{k}_gap"], found[f"{k}_floor"], found[f"{k}_gap_std"], fixed(found[k])) for k in keys]


def _gap_cell(gap: float | None, floor: float | None, deviation: float | None, level: str) -> Cell:
    text = fixed(gap) + (f" ± {fixed(deviation)}" if gap is not None and deviation is not None else "")
    notes = [level] if level else []
    inside = gap is not None and floor is not None and gap <= floor
    if floor is not None:
        notes.append(f"floor {fixed(floor)}" + (": no difference" if inside else ""))
    return Cell(text, tuple(notes), inside)


def costs(groups: Sequence[Group]) -> Table | None:
    """Unlearning and recovery apart, and as a share of Retrain."""
    shown = {k: v for k, v in COSTS.items() if any(p.whole(k) is not None for g in groups for p in g.parts)}
    if not {"bytes", "flops"} & set(shown):
        return None

    def amount(value: float | None, kind: str) -> Cell:
        in_seconds = kind == "seconds" and value is not None
        return Cell(f"{fixed(value)}{NBSP}s" if in_seconds else scaled(value, COSTS[kind][1]))

    known = once([part for group in groups for part in group.parts])
    lines = [Line("Retrain", [amount(mean(p.cost("retrained", k) for p in known), k) for k in shown])]
    for group in groups:
        lines.append(Line(group.label))
        for phase, title in (("unlearned", "Unlearning"), ("recovered", "Recovery")):
            lines.append(Line(title, [amount(mean(p.cost(phase, k) for p in group.parts), k) for k in shown]))
        lines.append(Line("Share of Retrain", [Cell(share(mean(p.share(k) for p in group.parts))) for k in shown]))
    return Table(
        "Costs",
        "Means over requests",
        ["", *(head for head, _ in shown.values())],
        lines,
        "Communication counts both directions; computing counts clients and server, two FLOP for a multiplication with "
        "an addition; storage is the most that lay there at the beginning of a phase or at the end of a round, for the "
        "share the larger of both.",
    )


def budgets(groups: Sequence[Group]) -> Table | None:
    """What each share of Retrain's communication pays for."""
    if not any(group.bought() for group in groups):
        return None
    lines = []
    for group in groups:
        lines.append(Line(group.label))
        lines += [Line(f"{100 * b:g}{NBSP}%", _paid_for(parts)) for b, parts in group.bought().items()]
    return Table(
        "Fixed budgets",
        "Gaps to Retrain, in points, at a share of Retrain’s communication; below, the measure itself in percent",
        ["Method", "Spent", *_SHOWN.values(), "Avg. gap"],
        lines,
        "After the last round of recovery that the share pays for; unlearning counts, and what it alone costs more "
        "than is out of reach. Recovery goes on past Retrain’s accuracy here, so that what comes back with it is seen. "
        "≈: inside the noise floor, not a difference.",
    )


def _paid_for(parts: Sequence[Part]) -> list[Cell]:
    within = [part for part in parts if affords(part)]
    spent = share(mean(100 * s for part in parts if (s := part.get("recovered", "budget_spent")) is not None))
    if not within:
        return [Cell(spent, ("out of reach",)), *[Cell(DASH)] * (len(_SHOWN) + 1)]
    found = Group("", within).summary()
    notes = [count(_rounded(found["recovery_rounds"]), "round")]
    notes += [] if len(within) == len(parts) else [f"{len(within)} of {len(parts)} requests"]
    return [
        Cell(spent, tuple(notes)),
        *(_marked(found[f"{k}_gap"], found[f"{k}_floor"], fixed(found[k])) for k in _SHOWN),
        _marked(found["avg_gap"], found["avg_gap_floor"], ""),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _marked(gap: float | None, floor: float | None, level: str) -> Cell:
    """Shorter than `_gap_cell`, for many columns."""
    inside = gap is not None and floor is not None and gap <= floor
    return Cell(f"{'≈' if inside else ''}{fixed(gap)}", (level,) if level else (), inside)


def exposure(part: Part) -> Table | None:
    """What somebody who holds the model can tell about the forget data."""
    asked = ("tpr_at_0.01", "tpr_at_0.001", "auc", "mia_song_svc", "mia_yeom", "backdoor_asr")
    shown = [k for k in asked if any(part.get(phase, k) is not None for phase in PHASES)]
    if not shown:
        return None
    heads = {
        "tpr_at_0.01": f"Found at 1{NBSP}% false alarms",
        "tpr_at_0.001": f"Found at 0.1{NBSP}% false alarms",
        "auc": "AUC against hold-out",
        "mia_song_svc": "MIA Song",
        "mia_yeom": "MIA Yeom",
        "backdoor_asr": "Backdoor works",
    }
    planted = "backdoor_asr" in shown
    lines = []
    for phase, title in PHASES.items():
        if part.row(phase):
            lines.append(Line(title, [_exposed(part, phase, key) for key in shown]))
    scarce = any(part.row(p).get(f"{k}_enough") is False for p in PHASES for k in shown)
    return Table(
        "What an attacker can tell",
        f"In percent, with 95{NBSP}% intervals" if part.over == 1 else f"In percent; means over {part.over} requests",
        ["Phase", *(heads[k] for k in shown)],
        lines,
        "Found: forget samples that the model gives away while that share of unseen data is taken for them; "
        "chance finds the same share. MIA: forget samples that the attack takes for training data. The closer to "
        "Retrained, the better."
        + (" Few: fewer samples than that rate of false alarms needs." if scarce else "")
        + (" Backdoor: test images of other classes that the planted trigger turns into its class." if planted else ""),
    )


def _exposed(part: Part, phase: str, key: str) -> Cell:
    times, digits = (100, 2) if key.startswith("tpr") else (1, 3 if key == "auc" else 1)
    value, low, high = (part.get(phase, f"{key}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return Cell(DASH)
    notes = []
    if low is not None and high is not None:
        notes.append(f"{times * low:.{digits}f} to {times * high:.{digits}f}")
    if part.row(phase).get(f"{key}_enough") is False:
        notes.append("few")
    if key == "auc" and isinstance(part.row(phase).get("holdout_verdict"), str):
        notes.append(part.row(phase)["holdout_verdict"])
    return Cell(fixed(times * value, digits), tuple(notes))


def by_client(groups: Sequence[Group]) -> Table | None:
    """The gap in forget accuracy, client by client."""
    whom = dict.fromkeys(_name(part) for group in groups for part in group.parts)
    if len(whom) < 2 or max(len(group.parts) for group in groups) < 2 or len(groups) > 20:
        return None
    lines = []
    for who in sorted(whom, key=lambda w: (len(w), w)):
        mine = [[p for p in group.parts if _name(p) == who] for group in groups]
        gold = mean(p.get("retrained", "forget_acc") for p in once([p for parts in mine for p in parts]))
        lines.append(Line(who, [Cell(fixed(gold)), *(_client_cell(parts) for parts in mine)]))
    return Table(
        "Client by client",
        "Recovered forget accuracy less Retrain’s, in points",
        ["Forgotten", "Retrain (%)", *(group.label for group in groups)],
        lines,
        "Means over seeds. Above zero something may be left, below zero the data is treated worse than unseen data. No "
        "difference: no larger than between two Retrains, of this client or of all on average, whichever differ more.",
    )


def distances(groups: Sequence[Group]) -> Table | None:
    """What else tells a method from Retrain, beyond the gaps that the paper reports."""
    makers: dict[str, Callable[[Group], Cell]] = {
        "Tug\u2011of\u2011War": lambda g: _tug_cell(g, "forget_acc"),
        "Tug\u2011of\u2011War, MIA": lambda g: _tug_cell(g, "mia_yeom"),
        "JS divergence": lambda g: _beside(g, "forget_js", mean(p.floor.get("forget_js") for p in g.parts), "floor"),
        "Two snapshots, AUC": _leaked,
        f"Two snapshots find at 1{NBSP}% (%)": lambda g: _leaked_to(g, 0.01),
        f"Two snapshots find at 0.1{NBSP}% (%)": lambda g: _leaked_to(g, 0.001),
        "Relearning, × Retrain": _relearning,
    }
    made = {head: [make(group) for group in groups] for head, make in makers.items()}
    shown = {head: cells for head, cells in made.items() if any(cell.text != DASH or cell.notes for cell in cells)}
    if not shown:
        return None
    lines = [Line(group.label, [cells[i] for cells in shown.values()]) for i, group in enumerate(groups)]
    return Table(
        "Other distances to Retrain",
        "After recovery; means over requests",
        ["Method", *shown],
        lines,
        "Tug-of-War: 1 is alike in forget, retain and test accuracy (MIA: with Yeom’s attack in place of the forget "
        "accuracy). JS divergence: between the predictions on the "
        "forget data, in nats; the floor is that of two Retrains. Two snapshots: what somebody learns who holds the "
        "model before and after; an AUC of 0.5 is nothing, and Retrain gives away something as well. Find: the share "
        f"of the forgotten found while that share of the outsiders is taken for them, with 95{NBSP}% intervals."
        + (" Relearning: below 1, knowledge was left." if "Relearning, × Retrain" in shown else ""),
    )


def _tug_cell(group: Group, first: str) -> Cell:
    keys = (first, "retain_acc", "test_acc")
    value = mean(_tug_of_war(part.gap("recovered", key) for key in keys) for part in group.parts)
    floor = mean(_tug_of_war(part.floor.get(key) for key in keys) for part in group.parts)
    if value is None or floor is None:
        return Cell(fixed(value, 3))
    inside = value >= floor
    return Cell(fixed(value, 3), (f"floor {fixed(floor, 3)}{': no difference' if inside else ''}",), inside)


def _tug_of_war(gaps: Iterable[float | None]) -> float | None:
    each = [None if gap is None else 1 - abs(gap) / 100 for gap in gaps]
    known = [one for one in each if one is not None]
    return math.prod(known) if len(known) == len(each) else None


def _relearning(group: Group) -> Cell:
    """The mean, and whether it is one: where the forgotten did not come back in time, there is only a bound."""
    cell = _beside(group, "relearn_ratio", None, "")
    bounds = {part.row("recovered").get("relearn_bound") for part in group.parts}
    sign = {"at least": "≥ ", "at most": "≤ "}
    signs = [sign[b] for b in bounds if b in sign]
    if cell.text == DASH or not signs:
        return cell
    return Cell((signs[0] if len(signs) == 1 else "about ") + cell.text, ("a bound",))


def _beside(group: Group, key: str, other: float | None, word: str) -> Cell:
    value = mean(part.get("recovered", key) for part in group.parts)
    inside = word == "floor" and value is not None and other is not None and value <= other
    notes = (
        () if value is None or other is None else (f"{word} {fixed(other, 3)}{': no difference' if inside else ''}",)
    )
    return Cell(fixed(value, 3), notes, inside)


_OUTSIDERS = {"holdout": "hold-out data", "test": "test data"}


def _leaked(group: Group) -> Cell:
    """What both snapshots give away together, beside Retrain's, and against whom."""
    cell = _beside(group, "leakage_auc", mean(p.get("retrained", "leakage_auc") for p in group.parts), "Retrain")
    known = {part.row("recovered").get("leakage_against") for part in group.parts}
    against = " and ".join(words for name, words in _OUTSIDERS.items() if name in known)
    return Cell(cell.text, (*cell.notes, f"against {against}")) if against else cell


def _leaked_to(group: Group, rate: float) -> Cell:
    """Who is found by both snapshots together at so many false alarms."""
    name = f"leakage_tpr_at_{rate:g}"

    def found(phase: str) -> dict[str, Any]:
        ends = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
        enough = all(part.row(phase).get(f"{name}_enough") is not False for part in group.parts)
        return {end: mean(part.get(phase, key) for part in group.parts) for end, key in ends.items()} | {
            "enough": enough
        }

    return _found_cell(found("recovered"), found("retrained"), rate)


def _found_cell(found: Mapping[str, Any], retrain: Mapping[str, Any], rate: float) -> Cell:
    """A share of members with its interval, beside Retrain's; or that the outsiders are too few to say."""
    if found.get("enough") is False:
        return Cell(DASH, (f"too few outsiders for {100 * rate:g}{NBSP}%",))
    if found.get("value") is None:
        return Cell(DASH)
    interval, beside = _interval(found), _interval(retrain)
    there = f"Retrain {_in_percent(retrain.get('value'))}" + (f" ({beside})" if beside else "")
    notes = (interval, there if retrain.get("value") is not None else "")
    return Cell(_in_percent(found["value"]), tuple(note for note in notes if note))


def _interval(found: Mapping[str, Any]) -> str:
    low, high = found.get("low"), found.get("high")
    return "" if low is None or high is None else f"{_in_percent(low)} to {_in_percent(high)}"


def _in_percent(value: float | None) -> str:
    return fixed(None if value is None else 100 * value)


_PAIRED = {"avg_gap": "Avg. gap", **GAPS, "test_acc": "Test", "backdoor_asr": "Backdoor"}


def pairwise(found: Comparison) -> Table | None:
    """Every method against the first one, over the same targets."""
    shown = {k: head for k, head in _PAIRED.items() if any(k in pairs for pairs in found.pairs.values())}
    if not shown:
        return None
    lines = [Line(method, [_pair_cell(pairs.get(k)) for k in shown]) for method, pairs in found.pairs.items()]
    most = max(pair.units for pairs in found.pairs.values() for pair in pairs.values())
    few = " Two or three targets make wide intervals: take more before ranking methods." if most < 5 else ""
    return Table(
        "Compared pairwise, target by target",
        f"The method’s gap to Retrain less that of {found.first}, in points, with 95{NBSP}% intervals",
        ["Method", *shown.values()],
        lines,
        f"Above zero the method is farther from Retrain than {found.first}, below zero nearer. It is called a "
        f"difference where neither Student’s interval (shown) nor a bootstrap one covers zero.{few}",
    )


def _pair_cell(pair: Pair | None) -> Cell:
    if pair is None:
        return Cell(DASH)
    verdict = "no difference" if not pair.different else "farther" if pair.mean > 0 else "nearer"
    interval = f"{signed(pair.low)} to {signed(pair.high)}"
    return Cell(signed(pair.mean), (interval, verdict), not pair.different)


def many_models(found: Comparison) -> Table | None:
    """What needs many models of each kind: two procedures compared, not two models."""
    makers: dict[str, Callable[[Mapping[str, Any]], Cell]] = {
        "KLoM": lambda many: _halved(many, "klom", 2),
        f"KLoM, 95{NBSP}%": lambda many: _halved(many, "klom_p95", 2),
        "Forgetting quality": lambda many: _halved(many, "forgetting_quality", 2),
        "Epsilon": lambda many: _halved(many, "epsilon", 1),
        "U\u2011LiRA right (%)": lambda many: Cell(_in_percent(many.get("ulira_accuracy"))),
        f"U\u2011LiRA finds at 1{NBSP}% (%)": lambda many: _finds(many, "ulira", 0.01),
        f"U\u2011LiRA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "ulira", 0.001),
        "LiRA, AUC": lambda many: _auc(many, "lira"),
        f"LiRA finds at 1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.01),
        f"LiRA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.001),
        "RMIA, AUC": lambda many: _auc(many, "rmia"),
        f"RMIA finds at 1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.01),
        f"RMIA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.001),
    }
    made = {head: [make(many) for many in found.many.values()] for head, make in makers.items()}
    shown = {head: cells for head, cells in made.items() if any(cell.text != DASH or cell.notes for cell in cells)}
    if not shown:
        return None
    lines = [Line(method, [cells[i] for cells in shown.values()]) for i, method in enumerate(found.many)]
    models = max(many.get("models", 0) for many in found.many.values())
    return Table(
        "Over many models",
        f"{models:g} unlearned models against {models:g} Retrains, all of other seeds; means over targets",
        ["Method", *shown],
        lines,
        "Below each number, what Retrain gets in the method’s place, where that is not known beforehand: the closer, "
        f"the better. KLoM: 0 is alike. Forgetting quality: 1 is alike, 0 told apart. U-LiRA right: 50{NBSP}% cannot "
        f"tell. Finds: the share of members found while that share of the outsiders is taken for them, with 95{NBSP}% "
        "intervals. KLoM, forgetting quality and epsilon depend on how many models there are, and Retrain against "
        "Retrain has half of them: below, both are measured with so many, as means over halvings, and where the method "
        "is no farther than the farthest of Retrain’s it is not a difference.",
    )


def _auc(many: Mapping[str, Any], attack: str) -> Cell:
    floor = many.get(f"{attack}_auc_floor")
    return Cell(fixed(many.get(f"{attack}_auc"), 3), (f"Retrain {fixed(floor, 3)}",) if floor is not None else ())


def _finds(many: Mapping[str, Any], attack: str, rate: float) -> Cell:
    """Whom an attack finds; older comparisons have the share at 1 % alone, without its interval."""
    name = "at_1" if rate == 0.01 else "at_tenth"
    found, floor = (_object(_object(many.get(f"{attack}_finds{end}")).get(name)) for end in ("", "_floor"))
    if not found and name == "at_1":
        found, floor = ({"value": many.get(f"{attack}_tpr_at_1{end}")} for end in ("", "_floor"))
    return _found_cell(found, floor, rate)


def _object(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _halved(many: Mapping[str, Any], key: str, digits: int) -> Cell:
    """The measure over all models, and below it the method and Retrain with half of them each."""
    text = fixed(many.get(key), digits)
    half = _object(_object(many.get("halves")).get(key))
    if not {"method", "retrain", "farthest", "different"} <= half.keys():
        return Cell(text)
    method, retrain, farthest = (fixed(half[k], digits) for k in ("method", "retrain", "farthest"))
    bound = "at least" if half["farthest"] < half["retrain"] else "at most"
    verdict = "a difference" if half["different"] else "no difference"
    at = f"at {many.get('models', 0) // 2:g}: {method}"
    return Cell(text, (at, f"Retrain {retrain}, {bound} {farthest}", verdict), not half["different"])


def _client_cell(parts: Sequence[Part]) -> Cell:
    """The mean with its sign; seeds that lie on either side of Retrain do not make up for each other."""
    gap = mean(p.gap("recovered") for p in parts)
    size, floor = mean(Group("", list(parts)).deltas("forget_acc")), mean(p.doubt("forget_acc") for p in parts)
    inside = size is not None and floor is not None and size <= floor
    return Cell(signed(gap), ("no difference",) if inside else (), inside)


def _name(part: Part) -> str:
    return f"{part.target[:1].upper()}{part.target[1:]}"
