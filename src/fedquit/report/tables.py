# SPDX-License-Identifier: Apache-2.0
"""The tables of the page: gaps to Retrain beside the Retrain-vs-Retrain spread, costs, attacks, and client by client.

A table formats numbers and computes none: they come from `fedquit.results`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.canaries import canary_audits
from fedquit.results.comparison import Comparison
from fedquit.results.quantities import OUT_OF_REACH, PairedDifference
from fedquit.results.requests import RequestRows, distinct
from fedquit.results.schema import COSTS, GAPS, MEASURES, PHASES, THRESHOLDS, labels
from fedquit.results.summary import MethodGroup, MethodSummary, summarise, summarise_phase
from fedquit.results.verdicts import legend, mark, open_question
from fedquit.results.words import DASH, NBSP, count, fixed, holdout_verdict, scaled, share, signed

SHOWN = labels("test_acc", *GAPS)  # the columns of the table of gaps
_COSTS_SHOWN = ("bytes", "flops", "server_storage_bytes", "client_storage_bytes", "seconds")


@dataclass(frozen=True)
class Cell:
    """Some text, and smaller text below it."""

    text: str
    notes: tuple[str, ...] = ()
    plain: bool = False  # printed in grey: no difference is shown


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


def _requests(groups: Iterable[MethodGroup]) -> list[RequestRows]:
    return [request for group in groups for request in group.requests]


def _measured(groups: Sequence[MethodGroup], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns in which some method has a gap."""
    return {key: head for key, head in columns.items() if any(key in group.summary.gaps for group in groups)}


def gaps(groups: Sequence[MethodGroup]) -> Table | None:
    """Every method against Retrain."""
    if not _measured(groups, GAPS):
        return None
    shown = _measured(groups, SHOWN)
    shared = distinct(_requests(groups))
    number = Cell(str(len(shared)))
    original = summarise_phase("Original", "original", shared)
    retrain = summarise_phase("Retrain", "retrained", shared)
    lines = [
        Line("Retrain", [number, *_levels(retrain, shown), Cell(DASH)]),
        Line("Original", [number, *_levels(original, shown), Cell(fixed(original.avg_gap))]),
    ]
    for group in groups:
        summary = group.summary
        average = _gap_cell(summary, "avg_gap", summary.avg_gap)
        lines.append(Line(group.label, [Cell(str(summary.runs)), *_gap_cells(summary, shown), average]))
    spread_known = any(key in group.summary.spread for group in groups for key in shown)
    spread = "The spread is how far two Retrains with different seeds lie apart. " if spread_known else ""
    return Table(
        "Gaps to Retrain",
        "After recovery, in points; below, the measure itself in percent",
        ["Method", "Requests", *shown.values(), "Avg. gap"],
        lines,
        "Gap: mean absolute difference to the Retrain of the same request, ± its standard deviation over requests; "
        f"Avg. gap: the mean of the last four. {spread}{_judged(groups)}",
    )


def _judged(groups: Sequence[MethodGroup]) -> str:
    """How to read the verdicts, and which sizes would tell what these do not."""
    each = [group.verdicts for group in groups]
    if not any(each):
        return "Whether a gap is more than chance was not tested."
    why = open_question(each)
    return f"Gaps: {legend(each)}." + (f" {why[:1].upper()}{why[1:]}." if why else "")


def thresholds(groups: Sequence[MethodGroup]) -> Table | None:
    """Song's attacks with a threshold for each class."""
    shown = _measured(groups, THRESHOLDS)
    if not shown:
        return None
    shared = distinct(_requests(groups))
    lines = []
    for name, phase in (("Retrain", "retrained"), ("Original", "original")):
        lines.append(Line(name, _levels(summarise_phase(name, phase, shared), shown)))
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
    deviation = summary.deviations.get(key)
    spread = summary.spread.get(key)
    sign = mark(summary.verdicts, key)
    text = f"{sign}{fixed(gap)}" if deviation is None else f"{sign}{fixed(gap)} ± {fixed(deviation)}"
    notes = [level] if level else []
    if spread is not None:
        notes.append(f"spread {fixed(spread)}")
    return Cell(text, tuple(notes), key in summary.verdicts and sign != "≠")


def costs(groups: Sequence[MethodGroup]) -> Table | None:
    """Unlearning and recovery apart, and as a share of Retrain."""
    requests = _requests(groups)
    shown = [kind for kind in _COSTS_SHOWN if quantities.mean_cost(requests, kind) is not None]
    if not {"bytes", "flops"} & set(shown):
        return None
    shared = distinct(requests)
    lines = [Line("Retrain", [_amount(quantities.mean_cost(shared, kind, "retrained"), kind) for kind in shown])]
    for group in groups:
        lines.append(Line(group.label))
        for phase, title in (("unlearned", "Unlearning"), ("recovered", "Recovery")):
            amounts = [_amount(quantities.mean_cost(group.requests, kind, phase), kind) for kind in shown]
            lines.append(Line(title, amounts))
        shares = [Cell(share(quantities.cost_share(group.requests, kind))) for kind in shown]
        lines.append(Line("Share of Retrain", shares))
    return Table(
        "Costs",
        "Means over requests",
        ["", *(COSTS[kind].label for kind in shown)],
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
        ["Method", "Spent", *SHOWN.values(), "Avg. gap"],
        lines,
        "After the last round of recovery that the share pays for; unlearning counts, and a share that it alone "
        "exceeds is out of reach. Recovery goes on past Retrain’s accuracy here, to show what comes back with it.",
    )


def _at_budget(ended: Sequence[RequestRows]) -> list[Cell]:
    within = [request for request in ended if quantities.affordable(request)]
    fraction = quantities.budget_spent(ended)
    spent = share(None if fraction is None else 100 * fraction)
    if not within:
        return [Cell(spent, (OUT_OF_REACH,)), *[Cell(DASH)] * (len(SHOWN) + 1)]
    summary = summarise("", within)
    rounds = summary.recovery_rounds
    notes = [count(None if rounds is None else round(rounds, 1), "round")]
    if len(within) < len(ended):
        notes.append(f"{len(within)} of {len(ended)} requests")
    return [
        Cell(spent, tuple(notes)),
        *(Cell(fixed(summary.gaps.get(key)), (fixed(summary.means.get(key)),)) for key in SHOWN),
        Cell(fixed(summary.avg_gap)),
    ]


_EXPOSURE = {
    "tpr_at_0.01": f"TPR at 1{NBSP}% FPR (%)",
    "tpr_at_0.001": f"TPR at 0.1{NBSP}% FPR (%)",
    "auc": MEASURES["auc"].label,
    "mia_song_svc": MEASURES["mia_song_svc"].label,
    "mia_yeom": MEASURES["mia_yeom"].label,
    "backdoor_asr": "Backdoor works",
}


def exposure(request: RequestRows) -> Table | None:
    """What somebody who holds the model can tell about the forget data."""
    shown = [key for key in _EXPOSURE if any(request.get(phase, key) is not None for phase in PHASES)]
    if not shown:
        return None
    lines = []
    for phase, title in PHASES.items():
        if request.row(phase):
            lines.append(Line(title, [_exposed(request, phase, key) for key in shown]))
    scarce = any(request.row(phase).get(f"{key}_enough") is False for phase in PHASES for key in shown)
    several = request.over > 1
    few = " Few: fewer samples than that FPR needs." if scarce else ""
    backdoor = " Backdoor: test images of other classes that the planted trigger turns into its class."
    return Table(
        "What an attacker can tell",
        f"In percent; means over {request.over} requests" if several else f"In percent, with 95{NBSP}% intervals",
        ["Phase", *(_EXPOSURE[key] for key in shown)],
        lines,
        "Found: forget samples that the model gives away while that share of unseen data is taken for them; "
        "chance finds the same share. MIA: forget samples that the attack takes for training data. The closer to "
        f"Retrained, the better.{few}{backdoor if 'backdoor_asr' in shown else ''}",
    )


def _exposed(request: RequestRows, phase: str, key: str) -> Cell:
    times = 100 if key.startswith("tpr") else 1
    digits = {"tpr_at_0.01": 2, "tpr_at_0.001": 2, "auc": 3}.get(key, 1)
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
        cells = [Cell(guesses), Cell(fixed(audit.epsilon_low, 2)), Cell(fixed(audit.p, 3)), Cell(audit.verdict)]
        lines.append(Line(f"{PHASES[audit.phase]}, {audit.kind}", [*cells, Cell(audit.sentence)]))
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


def by_client(groups: Sequence[MethodGroup]) -> Table | None:
    """The gap in forget accuracy, client by client."""
    targets = dict.fromkeys(_heading(request) for request in _requests(groups))
    if len(targets) < 2 or max(len(group.requests) for group in groups) < 2 or len(groups) > 20:
        return None
    lines = []
    for target in sorted(targets, key=lambda name: (len(name), name)):
        by_method = [[request for request in group.requests if _heading(request) == target] for group in groups]
        shared = distinct(request for requests in by_method for request in requests)
        retrain = mean(request.get("retrained", "forget_acc") for request in shared)
        lines.append(Line(target, [Cell(fixed(retrain)), *(_client_cell(requests) for requests in by_method)]))
    return Table(
        "Client by client",
        "Recovered forget accuracy less Retrain’s, in points",
        ["Forgotten", "Retrain (%)", *(group.label for group in groups)],
        lines,
        "Means over seeds. Above zero something may be left, below zero the data is treated worse than unseen data. "
        "The gap of a single client is not judged: the verdicts are over all targets.",
    )


def _client_cell(requests: Sequence[RequestRows]) -> Cell:
    """The mean with its sign."""
    return Cell(signed(mean(quantities.request_gap(request, "recovered") for request in requests)))


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
    return Table(
        "Other distances to Retrain",
        "After recovery; means over requests",
        ["Method", *columns],
        lines,
        "Tug-of-War: 1 is alike in forget, retain and test accuracy (MIA: with Yeom’s attack in place of the forget "
        "accuracy). JS divergence: between the predictions on the "
        "forget data, in nats; the spread is that of two Retrains. Two snapshots: what somebody learns who holds the "
        "model before and after; an AUC of 0.5 is nothing, and Retrain gives away something as well. TPR: the share "
        f"of the forgotten found while the FPR’s share of the outsiders is taken for them, with 95{NBSP}% intervals."
        + (" Relearning: below 1, knowledge was left." if relearning in columns else ""),
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
    return Table(
        "Compared pairwise, target by target",
        f"The method’s gap to Retrain less that of {comparison.first}, in points, with 95{NBSP}% intervals",
        ["Method", *shown.values()],
        lines,
        f"Above zero the method is farther from Retrain than {comparison.first}, below zero nearer. It is called a "
        f"difference where neither Student’s interval (shown) nor a bootstrap one covers zero.{few}",
    )


def _pair_cell(pair: PairedDifference | None) -> Cell:
    if pair is None:
        return Cell(DASH)
    direction = "farther" if pair.mean > 0 else "nearer"
    verdict = direction if pair.different else "no difference"
    interval = f"{signed(pair.low)} to {signed(pair.high)}"
    return Cell(signed(pair.mean), (interval, verdict), not pair.different)


def many_models(comparison: Comparison) -> Table | None:
    """What needs many models of each kind: two procedures compared, not two models."""
    makers: dict[str, Callable[[Mapping[str, Any]], Cell]] = {
        "Against Retrain": lambda many: _model_test(many, "forget"),
        "KLoM, forget": lambda many: _klom(many, "forget"),
        "KLoM, retain": lambda many: _klom(many, "retain"),
        "KLoM, test": lambda many: _klom(many, "test"),
        "U\u2011LiRA right (%)": _ulira,
        "Epsilon at least": _epsilon_bound,
        "Exposed samples": _exposed_samples,
        "Forgetting quality (descriptive)": lambda many: Cell(fixed(many.get("forgetting_quality"), 2)),
        "LiRA, AUC": lambda many: _auc(many, "lira"),
        f"LiRA finds at 1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.01),
        f"LiRA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "lira", 0.001),
        "LiRA online, AUC": lambda many: Cell(fixed(many.get("lira_online_auc"), 3)),
        "RMIA, AUC": lambda many: _auc(many, "rmia"),
        f"RMIA finds at 1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.01),
        f"RMIA finds at 0.1{NBSP}% (%)": lambda many: _finds(many, "rmia", 0.001),
    }
    evidence = {name: line.references for name, line in comparison.methods.items() if line.references}
    columns = _filled({head: [make(many) for many in evidence.values()] for head, make in makers.items()})
    if not columns:
        return None
    lines = [Line(method, [cells[i] for cells in columns.values()]) for i, method in enumerate(evidence)]
    models = max(many.get("models", 0) for many in evidence.values())
    return Table(
        "Over many models",
        f"{models:g} unlearned models against {models:g} Retrains, all of other seeds; means over targets",
        ["Method", *columns],
        lines,
        f"Against Retrain: a permutation test over the models’ labels on the forget data, at 5{NBSP}% over all targets "
        "and methods; “cannot tell” is no proof of equality. KLoM: 0 is alike; below it, what equal models would give "
        f"by chance, and p. U-LiRA right: 50{NBSP}% cannot tell; Student’s 95{NBSP}% interval over models. Epsilon: a "
        f"lower bound with 95{NBSP}% confidence. Exposed: how many samples, not which. LiRA and RMIA: below each "
        "number, what Retrain gets in the method’s place; finds: the share of members found while that share of the "
        "outsiders is taken for them. Forgetting quality: 1 is alike; equal models get about 0.2.",
    )


def _model_test(many: Mapping[str, Any], name: str) -> Cell:
    """The verdict of the permutation test on a kind of data; older comparisons have none."""
    test = _object(_object(many.get("tests")).get(name))
    if not {"word", "p_holm"} <= test.keys():
        return Cell(DASH)
    notes = [f"p {fixed(test['p_holm'], 3)}"]
    if test.get("models_needed"):
        notes.append(f"take {test['models_needed']:g} models")
    return Cell(str(test["word"]), tuple(notes), test["word"] != "differs")


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
