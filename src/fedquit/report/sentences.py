# SPDX-License-Identifier: Apache-2.0
"""The sentences at the top of the page: what was forgotten, how close to Retrain, at what cost, on what evidence."""

from __future__ import annotations

from collections.abc import Sequence

from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.requests import MANY_CLIENTS, RequestRows
from fedquit.results.summary import MethodGroup, MethodSummary
from fedquit.results.words import NBSP, count, duration, fixed, percent, share, signed
from fedquit.utils.names import each_named

VERDICTS = {
    "forgotten within the margin": "its samples are told from data of the same clients that never trained by no more "
    "than the margin",
    "cannot tell": "whether its samples are still told from data of the same clients that never trained cannot be said",
    "no trace": "no trace of it shows against data of the same clients that never trained",
    "remembered": "it is still told from data of the same clients that never trained",
    "over-unlearned": "it is treated worse than data of the same clients that never trained, which gives it away, too",
}
_NAMES = {"avg_gap": "average gap", "forget_acc": "gap in forget accuracy"}
_UNKNOWN = "whether that is chance was not measured: there is neither a hold-out nor a second Retrain to compare with"


def sentences(request: RequestRows) -> str:
    """One request: what was forgotten and how close to Retrain; at what cost, and on what evidence."""
    before, after, now = (request.get(phase, "forget_acc") for phase in ("original", "unlearned", "recovered"))
    rounds = request.get("recovered", "rounds")
    spent = duration(request.get(phase, "seconds") for phase in ("unlearned", "recovered"))
    retrain_took = duration([request.get("retrained", "seconds")])
    return (
        f"Asked to forget {request.target_in_short}, {request.method} took the accuracy on the data to forget from "
        f"{percent(before)} to {percent(after)}; after {count(rounds, 'round')} of recovery it is {percent(now)}, "
        f"{_closeness(request)}. {_price(request)}, test accuracy ended at "
        f"{percent(request.get('recovered', 'test_acc'))} against Retrain’s "
        f"{percent(request.get('retrained', 'test_acc'))}, and that took {spent} where Retrain took {retrain_took}"
        f"{_shares(request)}; {_evidence(request)}."
    )


def _closeness(request: RequestRows) -> str:
    gap = quantities.request_gap(request, "recovered")
    retrain = percent(request.get("retrained", "forget_acc"))
    if gap is None or round(gap, 1) == 0:
        return f"and Retrain, which never saw that data, has {retrain}"
    side = "above" if gap > 0 else "below"
    return f"{abs(gap):.1f} points {side} Retrain, which never saw that data ({retrain})"


def _shares(request: RequestRows) -> str:
    costs = {
        "communication": quantities.cost_share([request], "bytes"),
        "computing": quantities.computing_share([request]),
    }
    parts = [f"{share(value)} of its {what}" for what, value in costs.items() if value]
    return f", with {' and '.join(parts)}" if parts else ""


def _price(request: RequestRows) -> str:
    price = request.get("unlearned", "price_of_forgetting")
    if price is None:
        return "The price of forgetting was not measured"
    if round(price, 3) == 0:
        return "The price of forgetting was nil: the retained clients’ loss did not change"
    direction = "rose" if price > 0 else "fell"
    return f"The price of forgetting: the retained clients’ loss {direction} by {abs(price):.3f}"


def _evidence(request: RequestRows) -> str:
    """What the hold-out and the second Retrain say, or that neither is there."""
    parts = []
    row = request.row("recovered")
    verdict = VERDICTS.get(str(row.get("holdout_verdict")))
    auc, low, high = (request.get("recovered", key) for key in ("auc", "auc_low", "auc_high"))
    if verdict and auc is not None:
        interval = f", 95{NBSP}% interval {low:.3f} to {high:.3f}" if low is not None and high is not None else ""
        reason = f": {row['holdout_reason']}" if isinstance(row.get("holdout_reason"), str) else ""
        parts.append(f"{verdict} (AUC {auc:.3f}{interval}){reason}")
    spread = request.spread.get("forget_acc")
    if spread is not None and quantities.request_gap(request, "recovered") is not None:
        parts.append(f"two Retrains differ by {spread:.1f} points, and one request cannot tell a gap from chance")
    return ", and ".join(parts) if parts else _UNKNOWN


def sentences_over(groups: Sequence[MethodGroup]) -> str:
    """Several requests: the method nearest to Retrain speaks for all; the tables have the others."""
    judged = [group for group in groups if "forget_acc" in group.summary.gaps]
    if not judged:
        return "None of these requests has a Retrain to compare with; the tables tell what was measured."
    by = "avg_gap" if all(group.summary.avg_gap is not None for group in judged) else "forget_acc"
    judged.sort(key=lambda group: _gap(group.summary, by))
    best = judged[0]
    summary = best.summary
    nearest = f", {best.label}"
    if len(judged) > 1:
        others = ", ".join(f"{group.label} {fixed(_gap(group.summary, by))}" for group in judged[1:3])
        article = "an" if by == "avg_gap" else "a"
        nearest = (
            f", of {len(judged)} methods “{best.label}” came nearest to Retrain, by {article} {_NAMES[by]} of "
            f"{fixed(_gap(summary, by))} points (then {others}): it"
        )
    costs = {"communication": summary.bytes_percent, "computing": summary.computing_percent}
    shares = [f"{share(value)} of Retrain’s {what}" for what, value in costs.items() if value is not None]
    price = summary.price_of_forgetting
    rounds = summary.recovery_rounds
    return (
        f"Asked to forget {_targets(best.requests)}{nearest} took the accuracy on the data to forget from "
        f"{percent(_level(best, 'original', 'forget_acc'))} to {percent(_level(best, 'unlearned', 'forget_acc'))}; "
        f"after recovery it is {percent(summary.means.get('forget_acc'))}, where Retrain, which never saw that data, "
        f"has {percent(_level(best, 'retrained', 'forget_acc'))}. Recovery took "
        f"{count(None if rounds is None else round(rounds, 1), 'round')}"
        f"{', with ' if shares else ''}{' and '.join(shares)}, the price of forgetting (the change of the retained "
        f"clients’ loss) was {'not measured' if price is None else signed(price, 3)}, and test accuracy ended at "
        f"{percent(summary.means.get('test_acc'))} against Retrain’s "
        f"{percent(_level(best, 'retrained', 'test_acc'))}; {_evidence_over(best, by)}."
    )


def _gap(summary: MethodSummary, by: str) -> float:
    gap = summary.avg_gap if by == "avg_gap" else summary.gaps.get(by)
    return float("inf") if gap is None else gap


def _level(group: MethodGroup, phase: str, key: str) -> float | None:
    return mean(request.get(phase, key) for request in group.requests)


def _targets(requests: Sequence[RequestRows]) -> str:
    """The clients of several requests, and how many requests there are."""
    targets = {request.target for request in requests}
    clients = sorted({c for request in requests for c in request.clients}, key=lambda c: (str(type(c)), c))
    if len(targets) == 1:
        named = requests[0].target_in_short
    else:
        samples = "chosen samples of " if requests[0].samples else ""
        several = len(clients) > MANY_CLIENTS
        named = samples + (f"{len(clients)} clients" if several else each_named("client", clients))
    if len(requests) == 1:
        return named
    grouping = "one by one, " if len(targets) == len(clients) else "in groups, "
    return f"{named} ({'' if len(targets) == 1 else grouping}on average over {len(requests)} requests)"


def _evidence_over(group: MethodGroup, by: str) -> str:
    """What the second Retrains and the hold-outs say, or that neither is there."""
    summary = group.summary
    gap = _gap(summary, by)
    spread = summary.spread.get(by)
    parts = []
    verdict = summary.verdicts.get(by)
    if verdict is not None or spread is not None:
        beside = "" if spread is None else f" where two Retrains differ by {fixed(spread)}"
        judged = "whether that is chance was not tested" if verdict is None else verdict.reason
        parts.append(f"the {_NAMES[by]} is {fixed(gap)} points{beside}: {judged}")
    if summary.holdout_verdicts:
        counts = ", ".join(f"{number:g} × {word}" for word, number in summary.holdout_verdicts.items())
        parts.append(f"the verdicts against data of the same clients that never trained are {counts}")
    return ", and ".join(parts) if parts else f"the {_NAMES[by]} is {fixed(gap)} points; {_UNKNOWN}"
