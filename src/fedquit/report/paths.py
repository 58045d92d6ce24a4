# SPDX-License-Identifier: Apache-2.0
"""The rounds after a request, for the figures: the path of a method, and Natural's.

Results of older versions hold the rounds of the recovery alone (`curve`), and no control.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedquit.results import quantities
from fedquit.results.path import Point
from fedquit.results.requests import RequestRows
from fedquit.results.schema import number

KINDS = {"forget_acc": "forget", "holdout_acc": "hold-out", "retain_acc": "retain", "test_acc": "test"}


def path_of(request: RequestRows) -> list[Point]:
    """The accuracies round by round: from the request on where they are stored, else during recovery."""
    return request.path or request.curve


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
    stored = request.natural_path if natural else request.path
    sent = [(number(point.get("bytes")), point) for point in stored]
    shares = [(100 * so_far / whole, point) for so_far, point in sent if so_far is not None]
    if not shares and not natural:
        shares = quantities.sent_share(request)
    levels = [(x, number(point.get("forget_acc"))) for x, point in shares]
    return [(x, abs(level - retrain)) for x, level in levels if level is not None]
