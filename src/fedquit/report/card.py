# SPDX-License-Identifier: Apache-2.0
"""The top of the page: what was asked and done, the verdict, its price and cost, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedquit.inference.gaps import CANNOT_TELL, DIFFERS, EQUIVALENT, WORDS, GapVerdict, rounded_p
from fedquit.inference.leaving import DIFFERS_FROM_LEAVING
from fedquit.report.figures import label_counts
from fedquit.report.verdicts import TRACES, headline, trace_reasons, trace_word, trace_words, traces
from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.canaries import canary_audits
from fedquit.results.folders import RunResults
from fedquit.results.requests import MANY_CLIENTS, RequestRows, distinct
from fedquit.results.schema import COSTS, NATURAL, number
from fedquit.results.summary import MethodGroup, MethodSummary
from fedquit.results.verdicts import forget_gap, leaving_sentence, open_question
from fedquit.results.words import NBSP, NOT_JUDGED, count, duration, fixed, percent, scaled, share, signed
from fedquit.utils.names import each_named

NOTE = "This is approximate unlearning: what is measured here is evidence that the data was forgotten, not proof."
NOTHING_TESTED = "No verdict: nothing here was tested."
LISTED = 6  # methods that share a verdict and are named; the largest group of more is counted
TRAINED = 0.1  # of the way from guessing to every answer right: below it, Original counts as untrained


@dataclass(frozen=True)
class Entry:
    """One line of the card: its label, and what it says."""

    label: str
    says: Sequence[str]


def card(groups: Sequence[MethodGroup], sweeps: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The verdict card, entry by entry.

    Args:
        groups: The methods.
        sweeps: What `sweep.json` holds, for each sweep.
    """
    if not groups:
        return []
    rates = _by_rate(groups) if len(sweeps) == 1 else {}
    if rates:
        return _of_sweep(rates, sweeps[0])
    judged = [chosen_rate(sweep) for sweep in sweeps]
    judged += _one(groups[0]) if len(groups) == 1 else _several(groups)
    entries = [
        Entry("Asked", [f"Forget {targets(groups)}."]),
        Entry("Done", [_done(groups), *_forgot(groups)]),
        Entry("Verdict", judged),
        Entry("Price", _price(groups)),
        Entry("Cost", _cost(groups)),
        Entry("Cannot be told", unknowns(groups)),
    ]
    return [entry for entry in entries if entry.says]


def _forgot(groups: Sequence[MethodGroup]) -> list[str]:
    """What happened to the accuracy on the data to forget, in one sentence."""
    before = mean(request.get("original", "forget_acc") for request in _requests(groups))
    retrain = mean(request.get("retrained", "forget_acc") for request in _requests(groups))
    known = {g.label: level for g in groups if (level := g.summary.means.get("forget_acc")) is not None}
    if before is None or not known:
        return []
    now = f"Accuracy on the data to forget: {percent(before)} before, {_range(known, percent)} now"
    return [f"{now}." if retrain is None else f"{now}; Retrain, which never saw it, has {percent(retrain)}."]


# A sweep


def _by_rate(groups: Sequence[MethodGroup]) -> dict[float, MethodGroup]:
    """The groups by their unlearning rate, called by it; empty where they differ in anything else."""
    rates: dict[float, MethodGroup] = {}
    for group in groups:
        stem, found, rate = group.label.partition(", lr=")
        if not found or stem != group.requests[0].method:
            return {}
        try:
            rates[float(rate)] = replace(group, label=f"{float(rate):g}")
        except ValueError:
            return {}
    return rates


def _of_sweep(rates: Mapping[float, MethodGroup], sweep: Mapping[str, Any]) -> list[Entry]:
    """The card of a sweep: the rate that is taken, and what this one costs.

    Args:
        rates: The runs by rate.
        sweep: What `sweep.json` holds.
    """
    groups = list(rates.values())
    chosen = rates.get(number(sweep.get("chosen")) or 0.0)
    taken = [chosen] if chosen else groups
    at = f" at {chosen.label}" if chosen else ""
    rate_by_rate = _by_trace(groups)
    traced = [f"Rate by rate, against the whole hold-out: {_listed(rate_by_rate)}."] if rate_by_rate else []
    names = ", ".join(group.label for group in groups)
    entries = [
        Entry("Asked", [f"Which unlearning rate forgets {targets(groups)}?"]),
        Entry("Done", [f"{groups[0].requests[0].method} with {len(groups)} rates: {names}{_recovery(groups)}."]),
        Entry("Verdict", [chosen_rate(sweep), *traced]),
        Entry(f"Price{at}", [*_forgot(taken), *_price(taken)]),
        Entry(f"Cost{at}", _cost(taken)),
        Entry("Cannot be told", unknowns(taken)),
    ]
    return [entry for entry in entries if entry.says]


def chosen_rate(sweep: Mapping[str, Any]) -> str:
    """Which rate a sweep takes, and why."""
    chosen = number(sweep.get("chosen"))
    taken = "No rate can be named" if chosen is None else f"Take lr = {chosen:g}"
    reason = sweep.get("reason")
    return f"{taken}: {reason}." if isinstance(reason, str) and reason else f"{taken}."


def targets(groups: Sequence[MethodGroup]) -> str:
    """The clients of all requests, and how they were asked for."""
    requests = _requests(groups)
    distinct_targets = {request.target for request in requests}
    if len(distinct_targets) == 1:
        return requests[0].target_in_short
    clients = sorted({c for request in requests for c in request.clients}, key=lambda c: (str(type(c)), c))
    samples = "chosen samples of " if requests[0].samples else ""
    named = f"{len(clients)} clients" if len(clients) > MANY_CLIENTS else each_named("client", clients)
    return f"{samples}{named}, {'one by one' if len(distinct_targets) == len(clients) else 'in groups'}"


def untrained(run: RunResults, request: RequestRows) -> bool:
    """The rule for "hardly trained": at most one round, or less than a tenth of the way from guessing to all right.

    Args:
        run: With its recipe and the label counts of its clients; what it does not hold says nothing.
        request: With Original's test accuracy.
    """
    train = run.recipe.get("train")
    rounds = number(train.get("rounds")) if isinstance(train, dict) else None
    if rounds is not None and rounds <= 1:
        return True
    accuracy = request.get("original", "test_acc")
    labels = {label for held in label_counts(run.clients).values() for label, size in held.items() if size}
    if accuracy is None or len(labels) < 2:
        return False
    guessing = 100 / len(labels)
    return accuracy < guessing + TRAINED * (100 - guessing)


def warnings(runs: Sequence[RunResults]) -> list[str]:
    """What makes the page worth little: an Original that learnt nothing has nothing to forget."""
    pairs = [(run, request) for run in runs for request in run.requests]
    hardly = [request for run, request in pairs if untrained(run, request)]
    if not hardly:
        return []
    accuracy = mean(request.get("original", "test_acc") for request in hardly)
    level = "" if accuracy is None else f": its test accuracy is {percent(accuracy)}"
    return [
        f"Original is hardly trained{level}. There is little to forget yet, and these numbers show only that the "
        "recipe runs."
    ]


def _requests(groups: Iterable[MethodGroup]) -> list[RequestRows]:
    return [request for group in groups for request in group.requests]


def _range(values: Mapping[str, float], say: Callable[[float], str]) -> str:
    """The least and the greatest of some values with their names, or the only one."""
    low = min(values, key=lambda label: values[label])
    high = max(values, key=lambda label: values[label])
    if say(values[low]) == say(values[high]):
        return say(values[low])
    return f"between {say(values[low])} ({low}) and {say(values[high])} ({high})"


def _done(groups: Sequence[MethodGroup]) -> str:
    named = f": {', '.join(g.label for g in groups)}" if len(groups) <= LISTED else ""
    names = groups[0].label if len(groups) == 1 else f"{len(groups)} methods{named}"
    counts = {len(group.requests) for group in groups}
    most = max(counts)
    each = " each" if len(groups) > 1 else ""
    over = f", over {'up to ' if len(counts) > 1 else ''}{most} requests{each}" if most > 1 else ""
    against = ", compared with Retrain" if _has_retrain(groups) else ""
    return f"{names}{_recovery(groups)}{over}{against}."


def _recovery(groups: Sequence[MethodGroup]) -> str:
    """How many rounds the recovery took, as a clause."""
    known = {round(n, 1) for group in groups if (n := group.summary.recovery_rounds) is not None}
    if not known:
        return ""
    rounds = count(max(known), "round") if len(known) == 1 else f"{min(known):g} to {max(known):g} rounds"
    return f"; then {rounds} of recovery"


def _has_retrain(groups: Sequence[MethodGroup]) -> bool:
    return any(request.row("retrained") for request in _requests(groups))


# The verdict


def _one(group: MethodGroup) -> list[str]:
    """What is concluded about one method: the gap to Retrain, its samples, the client's kind of data, the control.

    What was tested comes first, and a gap that was not after it.
    """
    against = _against_retrain(group)
    samples = []
    found = traces(group.requests)
    if len(group.requests) == 1 and found:
        samples += _trace_of(group.requests[0])
    elif found:
        parts = [f"{_trace(word)} ({n} of {sum(found.values())})" for word, n in found.items()]
        samples.append(f"Its samples: {'; '.join(parts)}.")
    tested = bool(headline(group.verdicts))
    says = [*against, *samples] if tested else [*(samples or [NOTHING_TESTED]), *against]
    held = _level(group, "recovered", "holdout_acc")
    knowledge = group.summary.distribution_knowledge
    if held is not None and knowledge is not None:
        beside = _beside(knowledge)
        says.append(f"The client’s kind of data: accuracy on its hold-out is {percent(held)}, {beside} Retrain’s.")
    if len(group.requests) == 1:
        audits = [audit for audit in canary_audits(group.requests[0].rows) if audit.phase == "recovered"]
        says += [f"The one-run audit by {audit.kind} canaries: {audit.verdict}." for audit in audits]
    natural = group.summary.natural.get("forget_acc")
    now = group.summary.means.get("forget_acc")
    if natural is not None and now is not None:
        says.append(
            f"The control: Natural, which does not unlearn, has {percent(natural)} forget accuracy after as many "
            f"rounds, {group.label} {percent(now)}{_control_traces(group)}."
        )
    leaving = group.leaving.get("forget_acc")
    if leaving is not None and leaving.difference is not None:
        clause = leaving_sentence(leaving)
        says.append(f"{clause[:1].upper()}{clause[1:]}.")
    if group.durable is not None:
        says.append(f"After the stop, {group.durable.reason}.")
    return says


def _control_traces(group: MethodGroup) -> str:
    """What the hold-outs say of Natural's samples, as a clause; "" where they were not asked."""
    found = trace_words(group.requests, NATURAL)
    auc = _auc(group.requests[0], NATURAL) if len(group.requests) == 1 else ""
    return f"; Natural’s samples: {found}{auc}" if found else ""


def _trace(verdict: str) -> str:
    word = trace_word(verdict)
    return TRACES[word] if word in (CANNOT_TELL, NOT_JUDGED) else f"{word}, {TRACES[word]}"


def _trace_of(request: RequestRows) -> list[str]:
    """The verdict on the samples of one request, and what it rests on: the stored reason, or the AUC of older ones."""
    row = request.row("recovered")
    word = trace_word(str(row.get("holdout_verdict")))
    reason = row.get("holdout_reason")
    if word in (CANNOT_TELL, NOT_JUDGED):
        return [f"Its samples: {TRACES[word]}{_auc(request)}."]
    because = f": {reason}; such a verdict errs in at most 5{NBSP}% of cases" if reason else _auc(request)
    return [f"Its samples: {word}.", f"They are {TRACES[word]}{because}."]


def _beside(difference: float) -> str:
    if round(difference, 1) == 0:
        return "the same as"
    return f"{abs(difference):.1f} points {'above' if difference > 0 else 'below'}"


def _auc(request: RequestRows, phase: str = "recovered") -> str:
    auc, low, high = (request.get(phase, key) for key in ("auc", "auc_low", "auc_high"))
    if auc is None:
        return ""
    row = request.row(phase)
    if (
        row.get("holdout_reason") and row.get("holdout_verdict") != NOT_JUDGED
    ):  # the reason holds the interval that decides, which is another one
        return f" (AUC {auc:.3f})"
    interval = f", 95{NBSP}% interval {low:.3f} to {high:.3f}" if low is not None and high is not None else ""
    return f" (AUC {auc:.3f}{interval})"


def _against_retrain(group: MethodGroup) -> list[str]:
    """The verdict on the gaps of one method, and where the forget accuracy lies."""
    gap, name = _headline_gap(group.summary)
    if gap is None:
        return []
    judged = headline(group.verdicts)
    size = f"the {name} is {fixed(gap)} points"
    if judged is None:
        spread = group.summary.spread.get("avg_gap" if group.summary.avg_gap is not None else "forget_acc")
        beside = "" if spread is None else f"; two Retrains differ by {fixed(spread)}"
        own_gap = group.summary.gaps.get("forget_acc")
        own = f" ({fixed(own_gap)} in forget accuracy)" if own_gap is not None and name == "average gap" else ""
        return [f"The {name} to Retrain is {fixed(gap)} points{own}{beside}. No test was made."]
    margin = "the margin" if judged.margin is None else f"{fixed(judged.margin)} points"
    said = {
        DIFFERS: "It differs from Retrain",
        EQUIVALENT: f"It is equivalent to Retrain within {margin}",
        CANNOT_TELL: "Whether it differs from Retrain cannot be told",
    }
    says = [f"{said[judged.word]}: {size}{_certainty(judged)}."]
    forget = group.verdicts.get("forget_acc")
    if forget is not None and forget.gap is not None and forget.retrains > 1:
        clause = forget_gap(forget)
        says.append(f"{clause[:1].upper()}{clause[1:]}.")
    return says


def _headline_gap(summary: MethodSummary) -> tuple[float | None, str]:
    if summary.avg_gap is not None:
        return summary.avg_gap, "average gap"
    return summary.gaps.get("forget_acc"), "gap in forget accuracy"


def _certainty(judged: GapVerdict) -> str:
    """The p-value and the sizes behind a verdict."""
    p = {DIFFERS: judged.p, EQUIVALENT: judged.equivalence_p}.get(judged.word)
    parts = [] if p is None else [rounded_p(p)]
    parts += [count(judged.targets, "target"), f"{count(judged.retrains, 'Retrain')} each"]
    return f" ({', '.join(parts)})"


def _several(groups: Sequence[MethodGroup]) -> list[str]:
    """All methods by verdict, so that none is hidden: against Retrain, of their samples, and of the control."""
    says = []
    by_word: dict[str, list[str]] = {word: [] for word in WORDS}
    sizes = set()
    for group in groups:
        judged = headline(group.verdicts)
        if judged:
            by_word[judged.word].append(group.label)
            sizes.add(f"{count(judged.targets, 'target')}, {count(judged.retrains, 'Retrain')} each")
    if any(by_word.values()):
        over = f" ({sizes.pop()})" if len(sizes) == 1 else ""
        says.append(f"Against Retrain{over}: {_listed(by_word)}.")
    gaps = {group.label: gap for group in groups if (gap := _headline_gap(group.summary)[0]) is not None}
    if gaps and not says:
        name = _headline_gap(groups[0].summary)[1]
        says.append(f"The {name} to Retrain is {_range(gaps, lambda gap: f'{fixed(gap)} points')}. No test was made.")
    by_trace = _by_trace(groups)
    if not by_trace and not any(by_word.values()):
        says.insert(0, NOTHING_TESTED)
    if by_trace:
        says.append(f"The samples, against the clients’ own hold-out: {_listed(by_trace)}.")
    controls = {g.label: level for g in groups if (level := g.summary.natural.get("forget_acc")) is not None}
    if controls:
        own = [group for group in groups if group.label == NATURAL]
        found_in_control = trace_words(distinct(_requests(groups)), NATURAL)
        found_in_control = found_in_control or (trace_words(own[0].requests) if own else "")
        traced = f"; its samples: {found_in_control}" if found_in_control else ""
        says.append(
            f"The control: Natural, which does not unlearn, has {_span(controls.values())} forget accuracy after as "
            f"many rounds{traced}."
        )
    by_leaving = _by_leaving(groups)
    if by_leaving:
        says.append(f"Forget accuracy beside the control’s: {_listed(by_leaving)}.")
    lasting: dict[str, list[str]] = {}
    for group in groups:
        if group.durable:
            lasting.setdefault(group.durable.word, []).append(group.label)
    if lasting:
        says.append(f"In the rounds after the stop: {_listed(lasting)}.")
    return says


def _by_leaving(groups: Sequence[MethodGroup]) -> dict[str, list[str]]:
    """The methods by their verdict against Natural, with the side on which those that differ lie."""
    by_word: dict[str, list[str]] = {}
    for group in groups:
        verdict = group.leaving.get("forget_acc")
        if verdict is None:
            continue
        side = "lower" if (verdict.difference or 0.0) < 0 else "higher"
        word = f"{verdict.word}, {side}" if verdict.word == DIFFERS_FROM_LEAVING else verdict.word
        by_word.setdefault(word, []).append(group.label)
    return by_word


def _by_trace(groups: Sequence[MethodGroup]) -> dict[str, list[str]]:
    """The methods by what the hold-outs say of their samples; where requests differ, how many have the first word."""
    by_trace: dict[str, list[str]] = {}
    for group in groups:
        found = traces(group.requests)
        ordered = sorted(found, key=lambda verdict: list(TRACES).index(trace_word(verdict)))
        if len(found) == 1:
            by_trace.setdefault(ordered[0], []).append(group.label)
        elif found:
            rest = dict.fromkeys(map(trace_word, ordered[1:]))
            others = f"{ordered[0]} for some requests, {' or '.join(rest)} for the others"
            part = f"{found[ordered[0]]} of {sum(found.values())}"
            by_trace.setdefault(others, []).append(f"{group.label} ({part})")
    return dict(sorted(by_trace.items(), key=lambda item: list(TRACES).index(_first_word(item[0]))))


def _first_word(verdicts: str) -> str:
    return trace_word(verdicts).partition(" for some requests")[0]


def _listed(by_word: Mapping[str, Sequence[str]]) -> str:
    """The methods of each verdict; the largest group of many is counted, after the others that are named."""
    filled = {word: labels for word, labels in by_word.items() if labels}
    largest = max(filled, key=lambda word: len(filled[word]))
    if len(filled[largest]) <= LISTED:
        return "; ".join(f"{word}: {', '.join(labels)}" for word, labels in filled.items())
    which = "all" if len(filled) == 1 else "the other"
    named = [f"{word}: {', '.join(labels)}" for word, labels in filled.items() if word != largest]
    return "; ".join([*named, f"{largest}: {which} {len(filled[largest])} methods"])


def _span(values: Iterable[float], say: Callable[[float], str] = percent) -> str:
    """The least and the greatest of some values, or the only one.

    Args:
        values: One at least.
        say: How one is printed.
    """
    known = list(values)
    ends = [say(min(known)), say(max(known))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _level(group: MethodGroup, phase: str, key: str) -> float | None:
    return mean(request.get(phase, key) for request in group.requests)


# Price, cost, and what is left open


def _price(groups: Sequence[MethodGroup]) -> list[str]:
    prices = {g.label: price for g in groups if (price := g.summary.price_of_forgetting) is not None}
    says = []
    if len(groups) == 1 and prices:
        says.append(_change(next(iter(prices.values()))))
    elif prices:
        says.append(f"Unlearning changed the retained clients’ loss by {_range(prices, _loss)}.")
    kept = [*_kept(groups, "retain_acc", "the retained clients’ data"), *_kept(groups, "test_acc", "test data")]
    return [*says, f"Accuracy after recovery: {', '.join(kept)}."] if kept else says


def _kept(groups: Sequence[MethodGroup], key: str, name: str) -> list[str]:
    """An accuracy after recovery, beside Retrain's or beside what it was before, as a clause.

    Args:
        groups: The methods.
        key: Of the accuracy.
        name: The data that it is on.
    """
    levels = [level for g in groups if (level := g.summary.means.get(key)) is not None]
    if not levels:
        return []
    retrain = mean(request.get("retrained", key) for request in _requests(groups))
    before = mean(request.get("original", key) for request in _requests(groups))
    beside = f" (Retrain {percent(retrain)})" if retrain is not None else ""
    beside = f" (before {percent(before)})" if retrain is None and before is not None else beside
    return [f"{_span(levels)} on {name}{beside}"]


def _loss(change: float) -> str:
    return signed(change, 3 if abs(change) < 100 else 0)


def _change(price: float) -> str:
    if round(price, 3) == 0:
        return "Unlearning did not change the retained clients’ loss."
    way = "raised" if price > 0 else "lowered"
    return f"Unlearning {way} the retained clients’ loss by {_loss(abs(price)).lstrip('+')}."


def _cost(groups: Sequence[MethodGroup]) -> list[str]:
    sent = [part for g in groups if (part := g.summary.bytes_percent) is not None]
    computed = [part for g in groups if (part := g.summary.computing_percent) is not None]
    shares = {"communication": sent, "computing": computed}
    parts = [f"{_span(values, share)} of Retrain’s {what}" for what, values in shares.items() if values]
    if not parts:
        parts = [*_spent(groups, "bytes", "sent"), *_spent(groups, "flops", "computed")]
    seconds = [took for g in groups if (took := g.summary.seconds) is not None]
    retrain = mean(request.get("retrained", "seconds") for request in _requests(groups))
    if seconds:
        beside = f" (Retrain {duration([retrain])})" if retrain is not None else ""
        parts.append(f"{_span(seconds, lambda took: duration([took]))} where it ran{beside}")
    return [f"{', '.join(parts)}."] if parts else []


def _spent(groups: Sequence[MethodGroup], kind: str, verb: str) -> list[str]:
    """What a cost amounts to where there is no Retrain to measure it by.

    Args:
        groups: The methods.
        kind: Of `COSTS`.
        verb: What was done with it.
    """
    spent = [amount for g in groups if (amount := quantities.mean_cost(g.requests, kind)) is not None]
    return [f"{_span(spent, lambda amount: scaled(amount, COSTS[kind].unit))} {verb}"] if spent else []


def unknowns(groups: Sequence[MethodGroup]) -> list[str]:
    """What these results leave open, and what would tell it."""
    says = []
    requests = _requests(groups)
    verdicts = [group.verdicts for group in groups]
    if not _has_retrain(groups):
        says.append("How close this is to a model that never saw the data: there is no Retrain to compare with.")
    elif not any(verdicts):
        says.append(
            "Whether a gap is more than chance: that takes several Retrains of each target "
            "(fedquit compare --retrain-seeds)."
        )
    why = open_question(verdicts).removeprefix(f"{CANNOT_TELL}: ")
    if why:
        undecided = any(judged and judged.word == CANNOT_TELL for judged in map(headline, verdicts))
        it = "it differs" if len(groups) == 1 else "each of them differs"
        what = f"{it} from Retrain" if undecided else "the unmarked gaps are differences"
        says.append(f"Whether {what}: {_for_example(groups, why)}{_ended(why)}")
    its = "its" if len(groups) == 1 else "their"
    if not any(traces([request]) for request in requests):
        says.append(f"Whether {its} samples are remembered: none of the clients’ data was held out (data.holdout).")
    says += [f"Whether {its} samples are remembered: {_ended(reason)}" for reason in trace_reasons(requests)]
    return says


def _for_example(groups: Sequence[MethodGroup], why: str) -> str:
    """Whose gap a reason is about, where there are several methods."""
    if len(groups) == 1:
        return ""
    reasons = [(group.label, verdict.reason) for group in groups for verdict in group.verdicts.values()]
    label = next((label for label, reason in reasons if reason.endswith(why)), "")
    return f"for example of {label}, " if label else ""


def _ended(reason: str) -> str:
    return reason if reason.endswith(".") else f"{reason}."
