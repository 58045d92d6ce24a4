# SPDX-License-Identifier: Apache-2.0
"""The two sentences over many requests: who was forgotten and which method came nearest, at what cost and how sure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedquit.report.reading import Part, mean
from fedquit.report.tables import Group
from fedquit.report.words import VERDICTS, count, fixed, percent, share, signed
from fedquit.utils.names import each_named

_NAMES = {"avg_gap": "an average gap", "forget_acc_gap": "a gap in forget accuracy"}


def sentences_over(groups: Sequence[Group]) -> str:
    """The nearest of several methods stands for them; the tables have the others."""
    judged = [(group, found) for group in groups if (found := group.summary())["forget_acc_gap"] is not None]
    if not judged:
        return "None of these requests has a Retrain to compare with; the tables tell what was measured."
    by = "avg_gap" if all(found["avg_gap"] is not None for _, found in judged) else "forget_acc_gap"
    judged.sort(key=lambda one: float(one[1][by]))
    best, found = judged[0]
    nearest = f", {best.label}"
    if len(judged) > 1:
        others = ", ".join(f"{group.label} {fixed(other[by])}" for group, other in judged[1:3])
        nearest = (
            f", of {len(judged)} methods “{best.label}” came nearest to Retrain, by {_NAMES[by]} of "
            f"{fixed(found[by])} points (then {others}): it"
        )
    costs = ((found["communication_percent"], "communication"), (found["computation_percent"], "computing"))
    shares = [f"{share(v)} of Retrain’s {what}" for v, what in costs if v is not None]
    price = found["price_of_forgetting"]
    rounds = found["recovery_rounds"]
    return (
        f"Asked to forget {_whom(best.parts)}{nearest} took the accuracy on the data to forget from "
        f"{percent(_mean(best, 'original', 'forget_acc'))} to {percent(_mean(best, 'unlearned', 'forget_acc'))}; after "
        f"recovery it is {percent(found['forget_acc'])}, where Retrain, which never saw that data, has "
        f"{percent(_mean(best, 'retrained', 'forget_acc'))}. Recovery took "
        f"{count(None if rounds is None else round(rounds, 1), 'round')}"
        f"{', with ' if shares else ''}{' and '.join(shares)}, the price of forgetting (the change of the retained "
        f"clients’ loss) was {'not measured' if price is None else signed(price, 3)}, and test accuracy ended at "
        f"{percent(found['test_acc'])} against Retrain’s {percent(_mean(best, 'retrained', 'test_acc'))}; "
        f"{_how_sure(best, found, by)}."
    )


def _mean(group: Group, phase: str, key: str) -> float | None:
    return mean(part.get(phase, key) for part in group.parts)


def _whom(parts: Sequence[Part]) -> str:
    who = {part.target for part in parts}
    clients = sorted({c for part in parts for c in part.rows[0]["clients"]}, key=lambda c: (str(type(c)), c))
    several = f"{len(clients)} clients" if len(clients) > 5 else each_named("client", clients)
    some = parts[0].who if len(who) == 1 else several
    chosen = "chosen samples of " if len(who) > 1 and parts[0].rows[0].get("samples") else ""
    if len(parts) == 1:
        return some
    together = "" if len(who) == 1 else "one by one, " if len(who) == len(clients) else "in groups, "
    return f"{chosen}{some} ({together}on average over {len(parts)} requests)"


def _how_sure(group: Group, found: dict[str, Any], by: str) -> str:
    """From the noise floor and the hold-out, or that neither is there."""
    told = []
    gap, floor = found[by], found["avg_gap_floor" if by == "avg_gap" else "forget_acc_floor"]
    what = f"the {_NAMES[by].partition(' ')[2]}"
    if floor is not None:
        judged = "which is not a difference" if gap <= floor else "which is more than chance explains"
        told.append(f"{what} is {fixed(gap)} points where two Retrains differ by {fixed(floor)}, {judged}")
    verdicts = Counter(
        str(v) for part in group.parts if (v := part.row("recovered").get("holdout_verdict")) in VERDICTS
    )
    if verdicts:
        told.append(
            f"against data of the same clients that never trained, {verdicts['no trace']} of {verdicts.total()} show "
            f"no trace, {verdicts['remembered']} are remembered and {verdicts['over-unlearned']} over-unlearned"
        )
    if told:
        return f"how sure: {', and '.join(told)}"
    return (
        f"{what} is {fixed(gap)} points, and how sure is open, without a hold-out or a second Retrain to compare with"
    )
