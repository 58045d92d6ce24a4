# SPDX-License-Identifier: Apache-2.0
"""Every quantity that is derived from rows, each in one function that all views call.

| quantity | function |
|---|---|
| gap to Retrain of one request, with its sign | `request_gap` |
| mean absolute gap to Retrain over requests, and its deviation | `absolute_gap` |
| Natural's gap to Retrain at equal rounds | `natural_distance` |
| Avg. gap | `average_gap` |
| memory of the forgotten samples: forget less hold-out accuracy, against Retrain's | `sample_memory` |
| knowledge of the client's distribution: hold-out accuracy, against Retrain's | `distribution_knowledge` |
| Retrain-vs-Retrain spread | `spread` |
| cost of a phase, with the server's part | `cost` |
| cost of unlearning and recovery together | `total_cost` |
| cost as a share of Retrain's, and how many times cheaper | `cost_share`, `times_cheaper` |
| computing as a share of Retrain's | `computing_share` |
| whether a budget pays for the unlearning, and what it spent | `affordable`, `budget_spent` |
| Tug-of-War, and that of two Retrains | `tug_of_war`, `spread_tug_of_war` |
| difference between two methods, target by target | `paired_difference` |

Means over requests are those of the requests that have the number. Gaps are in points, shares in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquit.results import gaps
from fedquit.results import tug_of_war as tug
from fedquit.results.averages import mean
from fedquit.results.requests import RequestRows
from fedquit.results.schema import AVERAGED, COMPARED, COSTS, DISTANCE, Row, number

WORK_PHASES = ("unlearned", "recovered")  # what a request costs
OUT_OF_REACH = "out of reach"  # a budget that does not pay for the unlearning


# Gaps


def request_gap(request: RequestRows, phase: str, key: str = "forget_acc") -> float | None:
    """How far a measure of one request lies above that of its Retrain, in points.

    Args:
        request: With its Retrain.
        phase: Whose measure.
        key: Which measure.

    Returns:
        The gap with its sign, or None where one of the two was not measured.
    """
    return gaps.signed_gap(request.get(phase, key), request.get("retrained", key))


def request_distance(request: RequestRows, phase: str, key: str) -> float | None:
    """The size of the gap of one request.

    Args:
        request: With its Retrain.
        phase: Whose measure.
        key: Which measure; `forget_js` is a distance to Retrain by itself.
    """
    if key == DISTANCE:
        return request.get(phase, key)
    gap = request_gap(request, phase, key)
    return None if gap is None else abs(gap)


def natural_distance(request: RequestRows, key: str) -> float | None:
    """The size of Natural's gap to Retrain after as many rounds from the request on as the method took.

    Args:
        request: With its Retrain and its control.
        key: An accuracy of `schema.ON_PATH`, with the suffix `_last` for the means over the last rounds.
    """
    gap = gaps.signed_gap(request.natural.get(f"natural_{key}"), request.get("retrained", key))
    return None if gap is None else abs(gap)


def absolute_gap(requests: Iterable[RequestRows], key: str, phase: str = "recovered") -> gaps.Gap | None:
    """The absolute gaps to the Retrain of the same request, over the requests that have both.

    Args:
        requests: Of one method.
        key: Which measure.
        phase: Whose measure.

    Returns:
        The gap of each request, with mean and standard deviation, or None where no request has both.
    """
    sizes = [size for request in requests if (size := request_distance(request, phase, key)) is not None]
    return gaps.gap(sizes, [0.0] * len(sizes)) if sizes else None


def average_gap(sizes: Mapping[str, float | None]) -> float | None:
    """The paper's Avg. gap from mean gaps by measure, or None where one of its four measures is missing."""
    four = {name: sizes.get(key) for name, key in AVERAGED.items()}
    known = {name: size for name, size in four.items() if size is not None}
    return gaps.avg_gap(**known) if len(known) == len(four) else None


def sample_memory(request: RequestRows, phase: str) -> float | None:
    """How much better a model does on the forgotten samples than on the same clients' hold-out, in points.

    Where there is a Retrain, its own difference is taken away: it never saw either, so that it shows how far the two
    sets differ by themselves. This and `distribution_knowledge` add up to the gap in forget accuracy.

    Args:
        request: With its Retrain, if there is one.
        phase: Whose accuracies; Retrain, the reference, has none.

    Returns:
        None where there is no hold-out.
    """
    own = _forget_less_holdout(request, phase)
    if own is None or phase == "retrained":
        return None
    return own - (_forget_less_holdout(request, "retrained") or 0.0)


def _forget_less_holdout(request: RequestRows, phase: str) -> float | None:
    return gaps.signed_gap(request.get(phase, "forget_acc"), request.get(phase, "holdout_acc"))


def distribution_knowledge(request: RequestRows, phase: str) -> float | None:
    """How much better a model does on the leaving clients' hold-out than Retrain, in points.

    Args:
        request: With its Retrain.
        phase: Whose accuracy; Retrain, the reference, has none.

    Returns:
        None where there is no hold-out or no Retrain.
    """
    return None if phase == "retrained" else request_gap(request, phase, "holdout_acc")


def spread(requests: Iterable[RequestRows], key: str) -> float | None:
    """The Retrain-vs-Retrain spread of a measure, as the mean over these requests.

    Args:
        requests: Those whose gap it is compared with.
        key: A measure, or `avg_gap`, which is averaged from four measures where it was not stored itself.
    """
    requests = list(requests)
    stored = mean(request.spread.get(key) for request in requests)
    if key != "avg_gap" or stored is not None:
        return stored
    return average_gap({measure: spread(requests, measure) for measure in AVERAGED.values()})


def spread_between(again: Row, retrained: Row) -> dict[str, float]:
    """How far two Retrains of one request lie apart, measure by measure; the divergence stands in the second one's row.

    Args:
        again: The row of Retrain with another seed.
        retrained: The row of Retrain.
    """
    sizes: dict[str, float] = {}
    for key in COMPARED:
        gap = gaps.signed_gap(number(again.get(key)), number(retrained.get(key)))
        if gap is not None:
            sizes[key] = abs(gap)
    apart = number(again.get(DISTANCE))
    return sizes if apart is None else {**sizes, DISTANCE: apart}


# Costs


def cost(request: RequestRows, phase: str, kind: str) -> float | None:
    """What one phase cost, clients and server together, or None where nothing was counted.

    Args:
        request: With the rows of its phases.
        phase: `retrained`, `unlearned`, `recovered`, ….
        kind: A key of `schema.COSTS`: `bytes` (both directions), `flops`, `epochs`, storage, or `seconds`.
    """
    parts = [part for field in COSTS[kind].fields if (part := request.get(phase, field)) is not None]
    return sum(parts) if parts else None


def total_cost(request: RequestRows, kind: str) -> float | None:
    """What unlearning and recovery cost together, or None where nothing was counted.

    Args:
        request: With the rows of both phases.
        kind: A key of `schema.COSTS`; of storage, the larger of the two phases counts.
    """
    spent = [amount for phase in WORK_PHASES if (amount := cost(request, phase, kind)) is not None]
    if not spent:
        return None
    return max(spent) if COSTS[kind].largest else sum(spent)


def mean_cost(requests: Iterable[RequestRows], kind: str, phase: str | None = None) -> float | None:
    """The mean cost over the requests in which it was counted.

    Args:
        requests: Of one method.
        kind: A key of `schema.COSTS`.
        phase: One phase; None for unlearning and recovery together.
    """
    if phase is None:
        return mean(total_cost(request, kind) for request in requests)
    return mean(cost(request, phase, kind) for request in requests)


def cost_share(requests: Iterable[RequestRows], kind: str) -> float | None:
    """The cost of unlearning and recovery in percent of Retrain's: the sum over requests over the sum of Retrain's.

    Args:
        requests: Of one method; those in which one of the two was not counted are left out.
        kind: A key of `schema.COSTS`.

    Returns:
        None where Retrain cost nothing or was not counted.
    """
    spent = 0.0
    whole = 0.0
    for request in requests:
        own, retrain = total_cost(request, kind), cost(request, "retrained", kind)
        if own is not None and retrain is not None:
            spent += own
            whole += retrain
    return 100 * spent / whole if whole else None


def times_cheaper(requests: Iterable[RequestRows], kind: str) -> float | None:
    """Retrain's cost over the method's.

    Args:
        requests: Of one method.
        kind: A key of `schema.COSTS`.

    Returns:
        None where the method cost nothing, or one of the two was not counted.
    """
    share = cost_share(requests, kind)
    return 100 / share if share else None


def computing_share(requests: Iterable[RequestRows]) -> float | None:
    """The computing in percent of Retrain's: by FLOPs, or by epochs where nobody counted FLOPs."""
    requests = list(requests)
    by_flops = cost_share(requests, "flops")
    return cost_share(requests, "epochs") if by_flops is None else by_flops


def sent_share(request: RequestRows) -> list[tuple[float, Mapping[str, Any]]]:
    """The points of the recovery, by all bytes that were sent until then in percent of Retrain's."""
    whole = cost(request, "retrained", "bytes")
    before = cost(request, "unlearned", "bytes") or 0.0
    if not whole:
        return []
    sent = [(number(point.get("bytes")), point) for point in request.curve]
    return [(100 * (before + so_far) / whole, point) for so_far, point in sent if so_far is not None]


# Budgets


def affordable(ended: RequestRows) -> bool:
    """The rule for "out of reach": a budget must pay at least for the unlearning.

    Args:
        ended: A request at a budget, from `RequestRows.budgets`.
    """
    budget = ended.get("recovered", "budget")
    spent = ended.get("recovered", "budget_spent")
    return budget is None or spent is None or pays_for(budget, spent)


def pays_for(budget: float, spent: float) -> bool:
    """Whether a budget covers what was spent, both as shares of Retrain's bytes."""
    return spent <= budget + 1e-9


def last_within(request: RequestRows, budget: float) -> Mapping[str, Any] | None:
    """The last point of the recovery that a budget pays for, or None where it does not pay for the unlearning.

    Args:
        request: With the curve of its recovery.
        budget: As a share of Retrain's bytes.
    """
    points = [point for percent, point in sent_share(request) if pays_for(budget, percent / 100)]
    return points[-1] if points else None


def at_budgets(requests: Sequence[RequestRows]) -> dict[float, list[RequestRows]]:
    """By share of Retrain's bytes, in rising order: the requests that have a row at that budget."""
    shares = sorted({share for request in requests for share in request.budgets})
    return {share: [request.budgets[share] for request in requests if share in request.budgets] for share in shares}


def budget_spent(ended: Sequence[RequestRows]) -> float | None:
    """The mean share of Retrain's bytes that was spent, over the requests that the budget pays for, else over all."""
    within = [request for request in ended if affordable(request)]
    return mean(request.get("recovered", "budget_spent") for request in within or ended)


# Tug-of-War


def request_tug_of_war(sizes: Iterable[float | None]) -> float | None:
    """Tug-of-War from three gaps in points (forget or attack, retain, test), or None where one is missing."""
    known = [size for size in sizes if size is not None]
    if len(known) != 3:
        return None
    forget, retain, test = known
    return tug.tug_of_war(forget=forget, retain=retain, test=test)


def tug_of_war(requests: Iterable[RequestRows], first: str = "forget_acc") -> float | None:
    """Tug-of-War request by request, then the mean: a product of means would hide a request that is wholly off.

    Args:
        requests: Of one method.
        first: `forget_acc`, or `mia_yeom` for ToW-MIA.
    """
    keys = (first, "retain_acc", "test_acc")
    return mean(request_tug_of_war(request_gap(request, "recovered", key) for key in keys) for request in requests)


def spread_tug_of_war(requests: Iterable[RequestRows], first: str = "forget_acc") -> float | None:
    """The Tug-of-War of two Retrains with different seeds, as the mean over requests.

    Args:
        requests: Those whose Tug-of-War it is compared with.
        first: `forget_acc`, or `mia_yeom` for ToW-MIA.
    """
    keys = (first, "retain_acc", "test_acc")
    return mean(request_tug_of_war(request.spread.get(key) for key in keys) for request in requests)


# Pairs of methods


@dataclass(frozen=True)
class PairedDifference:
    """A method's gap less that of the first method over the same targets, with Student's and a bootstrap interval.

    `p` and `different` of a comparison are corrected over its methods and measures (`verdicts.judged_pairs`).
    """

    mean: float
    low: float
    high: float
    bootstrap_low: float | None
    bootstrap_high: float | None
    units: int  # so many targets, or seeds of one target
    different: bool
    p: float | None = None  # of "the mean is 0"; None where targets share an Original, and in older comparisons

    @staticmethod
    def read(stored: object) -> PairedDifference | None:
        """From JSON, or None where a number is missing; what older versions called different was not corrected."""
        if not isinstance(stored, dict):
            return None
        ends = [number(stored.get(key)) for key in ("mean", "low", "high")]
        known = [end for end in ends if end is not None]
        if len(known) != len(ends):
            return None
        p = number(stored.get("p"))
        return PairedDifference(
            mean=known[0],
            low=known[1],
            high=known[2],
            bootstrap_low=number(stored.get("bootstrap_low")),
            bootstrap_high=number(stored.get("bootstrap_high")),
            units=int(number(stored.get("units")) or 0),
            different=stored.get("different") is True and p is not None,
            p=p,
        )


def paired_difference(method: Sequence[RequestRows], first: Sequence[RequestRows], key: str) -> PairedDifference | None:
    """The gap of a method less that of the first method, over the requests that both served.

    The seeds of one target are not independent of each other: they are averaged, and the targets compared. With one
    target, its seeds are all there is to compare. Targets that share a seed, and so an Original, are not independent
    either: their interval is too narrow, and they have no test.

    Args:
        method: The requests of the method.
        first: The requests of the method it is compared with.
        key: A measure, or `avg_gap`.

    Returns:
        None with fewer than two targets (or seeds of the one target) that both have.
    """
    ours = _gaps_by_place(method, key)
    theirs = _gaps_by_place(first, key)
    places = [place for place in ours if place in theirs]
    several_targets = len({clients for clients, _ in places}) > 1
    shared = several_targets and len({seed for _, seed in places}) < len(places)
    by_unit: dict[Any, list[_Place]] = {}
    for place in places:
        by_unit.setdefault(place[0] if several_targets else place[1], []).append(place)
    if len(by_unit) < 2:
        return None
    units = [by_unit[unit] for unit in sorted(by_unit)]
    result = gaps.paired(
        [mean(ours[place] for place in unit) or 0.0 for unit in units],
        [mean(theirs[place] for place in unit) or 0.0 for unit in units],
    )
    return PairedDifference(
        mean=result.mean,
        low=result.t.low,
        high=result.t.high,
        bootstrap_low=result.bootstrap.low,
        bootstrap_high=result.bootstrap.high,
        units=len(units),
        different=result.different and not shared,
        p=None if shared else result.p,
    )


_Place = tuple[tuple[Any, ...], Any]  # the clients that leave, and the seed


def _gaps_by_place(requests: Sequence[RequestRows], key: str) -> dict[_Place, float]:
    sizes: dict[_Place, float] = {}
    for request in requests:
        if key == "avg_gap":
            four = {measure: request_distance(request, "recovered", measure) for measure in AVERAGED.values()}
            size = average_gap(four)
        else:
            size = request_distance(request, "recovered", key)
        if size is not None:
            sizes[request.clients, request.seed] = size
    return sizes
