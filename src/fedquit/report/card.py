# SPDX-License-Identifier: Apache-2.0
"""The top of the page: what was asked and done, the verdict, its price and cost, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquit.report.figures import label_counts
from fedquit.report.paths import mean_natural
from fedquit.report.verdicts import TRACES, Judged, Verdicts, headline, trace_reasons, traces
from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.folders import RunResults
from fedquit.results.requests import MANY_CLIENTS, RequestRows
from fedquit.results.schema import COSTS, number
from fedquit.results.summary import MethodGroup, MethodSummary
from fedquit.results.words import NBSP, count, duration, fixed, percent, scaled, share, signed
from fedquit.utils.names import each_named

NOTE = "This is approximate unlearning: behaving like Retrain is evidence that the data was forgotten, not proof."
TRAINED = 0.1  # of the way from guessing to every answer right: below it, Original counts as untrained
WORDS = ("differs", "equivalent", "cannot tell")


@dataclass(frozen=True)
class Entry:
    """One line of the card: its label, and what it says."""

    label: str
    says: Sequence[str]


def card(
    groups: Sequence[MethodGroup], verdicts: Mapping[str, Verdicts], sweeps: Sequence[Mapping[str, Any]]
) -> list[Entry]:
    """The verdict card, entry by entry.

    Args:
        groups: The methods.
        verdicts: By label, what the results conclude from each gap.
        sweeps: What `sweep.json` holds, for each sweep.
    """
    if not groups:
        return []
    judged = [chosen_rate(sweep) for sweep in sweeps]
    judged += _one(groups[0], verdicts.get(groups[0].label, {})) if len(groups) == 1 else _several(groups, verdicts)
    entries = [
        Entry("Asked", [f"Forget {targets(groups)}."]),
        Entry("Done", [_done(groups)]),
        Entry("Verdict", judged),
        Entry("Price", _price(groups)),
        Entry("Cost", _cost(groups)),
        Entry("Cannot be told", unknowns(groups, verdicts)),
    ]
    return [entry for entry in entries if entry.says]


def lead(groups: Sequence[MethodGroup]) -> str:
    """What happened to the data to forget, in one sentence."""
    before = mean(request.get("original", "forget_acc") for request in _requests(groups))
    retrain = mean(request.get("retrained", "forget_acc") for request in _requests(groups))
    levels = {group.label: group.summary.means.get("forget_acc") for group in groups}
    known = {label: level for label, level in levels.items() if level is not None}
    if before is None or not known:
        return ""
    if len(known) == 1:
        label, level = next(iter(known.items()))
        now = f"{label} took the accuracy on the data to forget from {percent(before)} to {percent(level)}"
    else:
        ends = _range(known, percent)
        now = f"{len(known)} methods took the accuracy on the data to forget from {percent(before)} to {ends}"
    return f"{now}." if retrain is None else f"{now}; Retrain, which never saw it, has {percent(retrain)}."


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
    rounds = {group.label: group.summary.recovery_rounds for group in groups}
    known = {label: value for label, value in rounds.items() if value is not None}
    names = groups[0].label if len(groups) == 1 else f"{len(groups)} methods: {', '.join(g.label for g in groups)}"
    recovery = f"; then {_range(known, lambda n: count(round(n, 1), 'round'))} of recovery" if known else ""
    counts = {len(group.requests) for group in groups}
    most = max(counts)
    each = " each" if len(groups) > 1 else ""
    over = f", over {'up to ' if len(counts) > 1 else ''}{most} requests{each}" if most > 1 else ""
    against = ", compared with Retrain" if _has_retrain(groups) else ""
    return f"{names}{recovery}{over}{against}."


def _has_retrain(groups: Sequence[MethodGroup]) -> bool:
    return any(request.row("retrained") for request in _requests(groups))


# The verdict


def _one(group: MethodGroup, verdicts: Verdicts) -> list[str]:
    """What is concluded about one method: the gap to Retrain, its samples, the client's kind of data, the control."""
    says = [_against_retrain(group, headline(verdicts))]
    found = traces(group.requests)
    if len(group.requests) == 1 and found:
        word = next(iter(found))
        says.append(f"Its samples: {_trace(word)}{_auc(group.requests[0])}.")
    elif found:
        parts = [f"{_trace(word)} ({n} of {found.total()})" for word, n in found.most_common()]
        says.append(f"Its samples: {'; '.join(parts)}.")
    held = _level(group, "recovered", "holdout_acc")
    retrain = _level(group, "retrained", "holdout_acc")
    if held is not None and retrain is not None:
        beside = _beside(held - retrain)
        says.append(f"The client’s kind of data: accuracy on its hold-out is {percent(held)}, {beside} Retrain’s.")
    natural = mean_natural(group.requests, "forget_acc")
    now = group.summary.means.get("forget_acc")
    if natural is not None and now is not None:
        says.append(
            f"The control: Natural, which does not unlearn, has {percent(natural)} forget accuracy after as many "
            f"rounds, {group.label} {percent(now)}."
        )
    return [line for line in says if line]


def _trace(word: str) -> str:
    explained = TRACES[word]
    return explained if word in ("cannot tell", "no trace") else f"{word} ({explained})"


def _beside(difference: float) -> str:
    if round(difference, 1) == 0:
        return "the same as"
    return f"{abs(difference):.1f} points {'above' if difference > 0 else 'below'}"


def _auc(request: RequestRows) -> str:
    auc, low, high = (request.get("recovered", key) for key in ("auc", "auc_low", "auc_high"))
    if auc is None:
        return ""
    interval = f", 95{NBSP}% interval {low:.3f} to {high:.3f}" if low is not None and high is not None else ""
    return f" (AUC {auc:.3f}{interval})"


def _against_retrain(group: MethodGroup, judged: Judged | None) -> str:
    gap, name = _headline_gap(group.summary)
    if gap is None:
        return ""
    if judged is None:
        spread = group.summary.spread.get("avg_gap" if group.summary.avg_gap is not None else "forget_acc")
        beside = "" if spread is None else f"; two Retrains differ by {fixed(spread)}"
        return f"The {name} to Retrain is {fixed(gap)} points{beside}. No test was made."
    certainty = _certainty(judged)
    if judged.word == "differs":
        return f"It differs from Retrain: the {name} is {fixed(judged.gap or gap)} points{certainty}."
    if judged.word == "equivalent":
        margin = "the margin" if judged.margin is None else f"{fixed(judged.margin)} points"
        return (
            f"It is equivalent to Retrain within {margin}: the {name} is {fixed(judged.gap or gap)} points{certainty}."
        )
    return (
        f"Whether it differs from Retrain cannot be told: the {name} is {fixed(judged.gap or gap)} points{certainty}."
    )


def _headline_gap(summary: MethodSummary) -> tuple[float | None, str]:
    if summary.avg_gap is not None:
        return summary.avg_gap, "average gap"
    return summary.gaps.get("forget_acc"), "gap in forget accuracy"


def _certainty(judged: Judged) -> str:
    """The interval, the p-value and the sizes behind a verdict."""
    parts = []
    if judged.low is not None and judged.high is not None:
        parts.append(f"95{NBSP}% interval {fixed(judged.low)} to {fixed(judged.high)}")
    if judged.p is not None:
        parts.append("p < 0.001" if judged.p < 0.001 else f"p = {judged.p:.3f}")
    if judged.targets is not None:
        parts.append(count(judged.targets, "target"))
    if judged.retrains is not None:
        parts.append(f"{judged.retrains:g} Retrain{'' if judged.retrains == 1 else 's'} each")
    return f" ({', '.join(parts)})" if parts else ""


def _several(groups: Sequence[MethodGroup], verdicts: Mapping[str, Verdicts]) -> list[str]:
    """All methods by verdict, so that none is hidden: against Retrain, and of their samples."""
    says = []
    by_word: dict[str, list[str]] = {word: [] for word in WORDS}
    for group in groups:
        judged = headline(verdicts.get(group.label, {}))
        if judged:
            by_word[judged.word].append(group.label)
    if any(by_word.values()):
        says.append(f"Against Retrain: {_listed(by_word)}.")
    gaps = {group.label: gap for group in groups if (gap := _headline_gap(group.summary)[0]) is not None}
    if gaps and not says:
        name = _headline_gap(groups[0].summary)[1]
        says.append(f"The {name} to Retrain is {_range(gaps, lambda gap: f'{fixed(gap)} points')}. No test was made.")
    by_trace: dict[str, list[str]] = {word: [] for word in TRACES}
    for group in groups:
        found = traces(group.requests)
        for word, n in found.items():
            part = "" if len(found) == 1 else f" ({n} of {found.total()})"
            by_trace[word].append(f"{group.label}{part}")
    if any(by_trace.values()):
        says.append(f"The samples, against the clients’ own hold-out: {_listed(by_trace)}.")
    controls = {g.label: level for g in groups if (level := mean_natural(g.requests, "forget_acc")) is not None}
    if controls:
        says.append(
            f"The control: Natural, which does not unlearn, has {_range(controls, percent)} forget accuracy after as "
            "many rounds."
        )
    return says


def _listed(by_word: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{word}: {', '.join(labels)}" for word, labels in by_word.items() if labels)


def _level(group: MethodGroup, phase: str, key: str) -> float | None:
    return mean(request.get(phase, key) for request in group.requests)


# Price, cost, and what is left open


def _price(groups: Sequence[MethodGroup]) -> list[str]:
    prices = {g.label: price for g in groups if (price := g.summary.price_of_forgetting) is not None}
    says = []
    if len(groups) == 1 and prices:
        says.append(_change(next(iter(prices.values()))))
    elif prices:
        says.append(f"The retained clients’ loss changed by {_range(prices, lambda price: signed(price, 3))}.")
    tests = {g.label: level for g in groups if (level := g.summary.means.get("test_acc")) is not None}
    retrain = mean(request.get("retrained", "test_acc") for request in _requests(groups))
    before = mean(request.get("original", "test_acc") for request in _requests(groups))
    if tests:
        beside = f"; Retrain has {percent(retrain)}" if retrain is not None else ""
        beside = f"; before it was {percent(before)}" if retrain is None and before is not None else beside
        says.append(f"Test accuracy ended at {_range(tests, percent)}{beside}.")
    return says


def _change(price: float) -> str:
    if round(price, 3) == 0:
        return "The retained clients’ loss did not change."
    return f"The retained clients’ loss {'rose' if price > 0 else 'fell'} by {abs(price):.3f}."


def _cost(groups: Sequence[MethodGroup]) -> list[str]:
    sent = {g.label: part for g in groups if (part := g.summary.bytes_percent) is not None}
    computed = {g.label: part for g in groups if (part := g.summary.computing_percent) is not None}
    shares = {"communication": sent, "computing": computed}
    says = [f"{_range(parts, share)} of Retrain’s {what}." for what, parts in shares.items() if parts]
    if not says:
        says = [*_spent(groups, "bytes", "sent"), *_spent(groups, "flops", "computed")]
    seconds = {g.label: took for g in groups if (took := g.summary.seconds) is not None}
    retrain = mean(request.get("retrained", "seconds") for request in _requests(groups))
    if seconds:
        beside = f" here; Retrain took {duration([retrain])}" if retrain is not None else " here"
        says.append(f"{_range(seconds, lambda took: duration([took]))}{beside}.")
    return [f"{line[:1].upper()}{line[1:]}" for line in says]


def _spent(groups: Sequence[MethodGroup], kind: str, verb: str) -> list[str]:
    """What a cost amounts to where there is no Retrain to measure it by.

    Args:
        groups: The methods.
        kind: Of `COSTS`.
        verb: What was done with it.
    """
    spent = {g.label: amount for g in groups if (amount := quantities.mean_cost(g.requests, kind)) is not None}
    return [f"{_range(spent, lambda amount: scaled(amount, COSTS[kind].unit))} {verb}."] if spent else []


def unknowns(groups: Sequence[MethodGroup], verdicts: Mapping[str, Verdicts]) -> list[str]:
    """What these results leave open, and what would tell it.

    Args:
        groups: The methods.
        verdicts: By label, what the results conclude from each gap.
    """
    says = []
    requests = _requests(groups)
    judged = [found for group in groups if (found := headline(verdicts.get(group.label, {})))]
    if not _has_retrain(groups):
        says.append("How close this is to a model that never saw the data: there is no Retrain to compare with.")
    elif not judged:
        spread = any(group.summary.spread for group in groups)
        says.append(
            "Whether a gap is more than chance: "
            + ("these results hold no test of it." if spread else "there is one Retrain for each target, and no other.")
        )
    reasons = dict.fromkeys(found.reason for found in judged if found.word == "cannot tell" and found.reason)
    says += [f"Whether it differs from Retrain: {_ended(reason)}" for reason in reasons]
    if not any(traces([request]) for request in requests):
        says.append("Whether its samples are remembered: none of the clients’ data was held out (data.holdout).")
    says += [f"Whether its samples are remembered: {_ended(reason)}" for reason in trace_reasons(requests)]
    return says


def _ended(reason: str) -> str:
    return reason if reason.endswith(".") else f"{reason}."
