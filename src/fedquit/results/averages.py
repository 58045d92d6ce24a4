# SPDX-License-Identifier: Apache-2.0
"""Means of rows, curves, ROC curves and densities.

Which fields of a row are averaged, and over what, stands in the table of measures (`schema.MEASURES`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedquit.results.requests import RequestRows, curve_points
from fedquit.results.schema import MEASURES, PHASES, REQUIRED, Row, number, numbers

BINS = 40  # of a mean density

Curve = dict[str, list[float]]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what was measured, or None where nothing was."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def mean_measure(rows: Sequence[Row], key: str) -> float | None:
    """The mean of one field over the rows that have it.

    Args:
        rows: Of any phases.
        key: The field.

    Returns:
        None where no row has a number there.
    """
    return mean(number(row.get(key)) for row in rows)


def mean_of_recoveries(rows: Sequence[Row]) -> dict[str, Any]:
    """One row for several recoveries of a request: the first, with the measures averaged over all.

    Costs, lists and verdicts are those of the first recovery; `runs` counts the recoveries.
    """
    keys = [key for key in rows[0] if key in MEASURES and MEASURES[key].over_recoveries]
    means = {key: average for key in keys if (average := mean_measure(rows, key)) is not None}
    return {**rows[0], **means, "runs": len(rows)}


def mean_of_requests(rows: Sequence[Row]) -> dict[str, Any]:
    """One row for the same phase of several requests: means of the numbers, curves and densities."""
    averaged: dict[str, Any] = {key: rows[0][key] for key in REQUIRED}
    for key, measure in MEASURES.items():
        average = mean_measure(rows, key)
        if measure.over_requests and average is not None:
            averaged[key] = average
    outsiders = {row.get("exposed_against") for row in rows}
    averaged["exposed_against"] = outsiders.pop() if len(outsiders) == 1 else None
    averaged["roc"] = mean_roc([curve for row in rows if (curve := roc_of(row))])
    averaged["entropy"] = mean_density([density for row in rows if (density := density_of(row, "entropy"))])
    averaged["curve"] = mean_curve([row["curve"] for row in rows if isinstance(row.get("curve"), list)])
    return averaged


def mean_request(requests: Sequence[RequestRows]) -> RequestRows:
    """The same phases and budgets over several requests."""
    rows: list[Row] = []
    for phase in PHASES:
        measured = [row for request in requests if (row := request.row(phase))]
        if measured:
            rows.append(mean_of_requests(measured))
    for budget in sorted({budget for request in requests for budget in request.budgets}):
        ended = [request.budgets[budget].row("recovered") for request in requests if budget in request.budgets]
        rows.append({**mean_of_requests(ended), "phase": "budget"})
    return RequestRows(0, rows, requests[0].spreads, over=len(requests))


def mean_curve(curves: Sequence[Sequence[Any]]) -> list[dict[str, float]]:
    """The mean of several recoveries, round by round; one that was over sooner stays where it ended.

    Args:
        curves: For each recovery its points, which are objects with `round` and other numbers.

    Returns:
        As many points as the longest curve has, each with the numbers that all curves have there.
    """
    usable = [points for curve in curves if (points := curve_points(list(curve)))]
    if not usable:
        return []
    longest = max(usable, key=len)
    averaged = []
    for index, point in enumerate(longest):
        at = [curve[min(index, len(curve) - 1)] for curve in usable]
        keys = [key for key in at[0] if all(number(other.get(key)) is not None for other in at)]
        means = {key: statistics.fmean(other[key] for other in at) for key in keys}
        averaged.append(means | {"round": float(point["round"])})
    return averaged


def mean_roc(curves: Sequence[Curve]) -> Curve:
    """The mean true-positive rate at each false-positive rate, over the curves with the first one's rates."""
    same = [curve for curve in curves if curve["fpr"] == curves[0]["fpr"]]
    if not same:
        return {}
    rates = zip(*(curve["tpr"] for curve in same), strict=True)
    return {"fpr": same[0]["fpr"], "tpr": [statistics.fmean(rate) for rate in rates]}


def mean_density(densities: Sequence[Curve], bins: int = BINS) -> Curve:
    """The mean of several densities over common bins, each of which takes the mass that falls into it.

    Args:
        densities: Each with `edges` and one or more densities over them.
        bins: Of the mean; they reach from the lowest edge to the highest.
    """
    names = [name for name in densities[0] if all(name in density for density in densities)] if densities else []
    names = [name for name in names if name != "edges"]
    if not names:
        return {}
    low = min(density["edges"][0] for density in densities)
    high = max(density["edges"][-1] for density in densities)
    edges = [low + (high - low) * index / bins for index in range(bins + 1)]
    averaged: Curve = {"edges": edges}
    for name in names:
        below = [_masses_below(density["edges"], density[name], edges) for density in densities]
        masses = [statistics.fmean(mass[index + 1] - mass[index] for mass in below) for index in range(bins)]
        averaged[name] = [mass * bins / (high - low) for mass in masses]
    return averaged


def _masses_below(edges: Sequence[float], density: Sequence[float], points: Sequence[float]) -> list[float]:
    """The mass of a histogram below each of some points."""
    bins = list(zip(edges, edges[1:], density, strict=False))

    def below(point: float) -> float:
        return sum(height * (min(right, point) - left) for left, right, height in bins if left < point)

    return [below(point) for point in points]


def roc_of(row: Row) -> Curve | None:
    """The ROC of a row, or None where it is missing or damaged."""
    stored = row.get("roc")
    if not isinstance(stored, dict):
        return None
    fpr = numbers(stored.get("fpr"))
    tpr = numbers(stored.get("tpr"))
    return {"fpr": fpr, "tpr": tpr} if fpr and tpr and len(fpr) == len(tpr) else None


def density_of(row: Row, key: str) -> Curve | None:
    """Densities over common edges, or None where they are missing or damaged.

    Args:
        row: Of the results.
        key: `entropy` or `true_logits`.

    Returns:
        `edges`, and one list for each density, shorter by one.
    """
    stored = row.get(key)
    if not isinstance(stored, dict):
        return None
    edges = numbers(stored.get("edges"))
    if not edges or len(edges) < 2 or edges[-1] <= edges[0]:
        return None
    usable: Curve = {}
    for name, heights in stored.items():
        density = numbers(heights)
        if name != "edges" and density and len(density) == len(edges) - 1:
            usable[name] = density
    return {"edges": edges, **usable} if usable else None


def density_mean(density: Mapping[str, Sequence[float]], name: str) -> float:
    """The mean of one density, in the unit of its edges.

    Args:
        density: From `density_of`.
        name: Which of its densities.
    """
    edges = density["edges"]
    bins = list(zip(edges, edges[1:], density[name], strict=False))
    mass = sum(height * (right - left) for left, right, height in bins) or 1.0
    return sum(height * (right - left) * (left + right) / 2 for left, right, height in bins) / mass
