# SPDX-License-Identifier: Apache-2.0
"""The rounds after a request, for the page: the path of a method, and Natural's after as many rounds.

Results of older versions hold the rounds of the recovery alone (`curve`), and no control.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.requests import RequestRows, curve_points
from fedquit.results.schema import number

Point = Mapping[str, Any]

KINDS = {"forget_acc": "forget", "holdout_acc": "hold-out", "retain_acc": "retain", "test_acc": "test"}
NATURAL = "natural"


def path_of(request: RequestRows) -> list[Point]:
    """The accuracies round by round: from the request on where they are stored, else during recovery."""
    return curve_points(request.row("recovered").get("path")) or request.curve


def natural_path_of(request: RequestRows) -> list[Point]:
    """Natural's rounds for the same request; empty where no control was run."""
    stored = request.row(NATURAL).get("path") or getattr(request, "control", ())
    return curve_points(list(stored)) if isinstance(stored, list | tuple) else []


def natural_of(request: RequestRows, key: str) -> float | None:
    """Natural's number after as many rounds as the method took, or None where no control was run.

    Args:
        request: Of the method.
        key: The measure.
    """
    fields = getattr(request, "natural", None)
    from_path = number(fields.get(f"natural_{key}")) if isinstance(fields, Mapping) else None
    return request.get("recovered", f"natural_{key}") if from_path is None else from_path


def mean_natural(requests: Sequence[RequestRows], key: str) -> float | None:
    """The mean of Natural's numbers over the requests that have a control.

    Args:
        requests: Of one method.
        key: The measure.
    """
    return mean(natural_of(request, key) for request in requests)


def mean_points(paths: Sequence[Sequence[Point]]) -> list[dict[str, float]]:
    """The mean path, round by round, as far as all of them go."""
    averaged = []
    for at in zip(*paths, strict=False):
        values = {key: [number(point.get(key)) for point in at] for key in ("round", "bytes", *KINDS)}
        whole = {key: [v for v in own if v is not None] for key, own in values.items()}
        averaged.append({key: statistics.fmean(own) for key, own in whole.items() if len(own) == len(at)})
    return averaged


def gap_by_cost(requests: Sequence[RequestRows], *, natural: bool = False) -> list[tuple[float, float]]:
    """Along the rounds: the bytes sent in percent of Retrain's, and the absolute gap in forget accuracy; means.

    Args:
        requests: Of one method.
        natural: Whether the control of these requests is meant.
    """
    paths = [path for request in requests if (path := _gaps_of(request, natural=natural))]
    steps = zip(*paths, strict=False)
    return [(statistics.fmean(x for x, _ in step), statistics.fmean(y for _, y in step)) for step in steps]


def _gaps_of(request: RequestRows, *, natural: bool) -> list[tuple[float, float]]:
    retrain = request.get("retrained", "forget_acc")
    whole = quantities.cost(request, "retrained", "bytes")
    if retrain is None or not whole:
        return []
    stored = natural_path_of(request) if natural else curve_points(request.row("recovered").get("path"))
    sent = [(number(point.get("bytes")), point) for point in stored]
    shares = [(100 * so_far / whole, point) for so_far, point in sent if so_far is not None]
    if not shares and not natural:
        shares = quantities.sent_share(request)
    levels = [(x, number(point.get("forget_acc"))) for x, point in shares]
    return [(x, abs(level - retrain)) for x, level in levels if level is not None]
