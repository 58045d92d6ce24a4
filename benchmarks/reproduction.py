# SPDX-License-Identifier: Apache-2.0
"""Set recorded runs beside the paper's rows: `python benchmarks/reproduction.py results/cifar100-lda0.1`.

It prints the tables of docs/reproduction.md. A record is the results.json of a run; the tables are computed from
records alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedquit.results import quantities
from fedquit.results.folders import RunResults, read_record
from fedquit.results.requests import RequestRows

MEASURES = {
    "test_acc": "test",
    "retain_acc": "retain",
    "forget_acc": "forget",
    "mia_song_svc": "Song",
    "mia_yeom": "Yeom",
}
# CIFAR-100, non-IID, ResNet-18, 10 clients: the paper's means over ten clients (its tables of results after recovery
# and after unlearning). Where a cell is empty, the paper gives none.
PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("original", "original"): (53.8, 63.8, 62.9, 75.4, 61.0),
    ("retrain", "retrained"): (51.0, 64.6, 33.5, 44.0, 32.0),
    ("fedquit", "unlearned"): (45.2, 55.8, 8.0, None, None),
    ("fedquit", "recovered"): (52.0, 63.2, 34.6, 49.7, 33.9),
    ("not", "unlearned"): (9.5, None, None, None, None),
    ("not", "recovered"): (51.3, 57.8, 43.3, 55.7, 44.3),
}
PAPER_GAPS: dict[str, tuple[float | None, ...]] = {
    "fedquit": (None, 1.4, 3.5, 5.5, 3.8),
    "not": (None, 6.8, 9.9, 11.7, 12.3),
}
CLOSE, CLOSE_GAP = 5.0, 4.0  # points: how far means and gaps to Retrain may lie from the paper's


def records(folder: Path) -> list[RunResults]:
    """What was recorded, in the order of the file names."""
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def _requests(runs: Sequence[RunResults], method: str) -> list[RequestRows]:
    """The requests that a method served, by client; Original and Retrain are rows of every request."""
    shared = method in ("original", "retrain")
    every = [request for run in runs for request in run.requests if shared or request.method == method]
    by_clients = {request.clients: request for request in every}
    return [by_clients[clients] for clients in sorted(by_clients)]


def _levels(requests: Sequence[RequestRows], phase: str, measure: str) -> list[float]:
    levels = [request.get(phase, measure) for request in requests]
    return [level for level in levels if level is not None]


def _gap(requests: Sequence[RequestRows], measure: str) -> float:
    gap = quantities.absolute_gap(requests, measure)
    if gap is None:
        raise SystemExit(f"the records have no gap in {measure}: take records with a Retrain.")
    return gap.mean


def rows_table(runs: Sequence[RunResults]) -> str:
    """Means over the clients that left, ours and the paper's."""
    head = "| | whose | " + " | ".join(MEASURES.values()) + " | rounds |"
    lines = [head, "|---|---|" + "---:|" * (len(MEASURES) + 1)]
    for (method, phase), theirs in PAPER.items():
        requests = _requests(runs, method)
        ours = [fmean(_levels(requests, phase, measure)) for measure in MEASURES]
        rounds = f"{fmean(_levels(requests, phase, 'rounds')):.1f}" if phase == "recovered" else ""
        each = "; ".join(request.target for request in requests)
        title = phase if method in ("original", "retrain") else f"{method}, {phase}"
        lines.append(f"| {title} | ours ({each}) | {_cells(ours)} | {rounds} |")
        lines.append(f"| | paper | {_cells(theirs)} | |")
    return "\n".join(lines)


def _cells(values: Sequence[float | None]) -> str:
    return " | ".join("" if value is None else f"{value:.1f}" for value in values)


def gaps_table(runs: Sequence[RunResults]) -> str:
    """Mean absolute gaps to Retrain after recovery, ours and the paper's."""
    lines = ["| method | whose | " + " | ".join(MEASURES.values()) + " |", "|---|---|" + "---:|" * len(MEASURES)]
    for method, theirs in PAPER_GAPS.items():
        requests = _requests(runs, method)
        lines.append(f"| {method} | ours | {_cells([_gap(requests, measure) for measure in MEASURES])} |")
        lines.append(f"| | paper | {_cells(theirs)} |")
    return "\n".join(lines)


def verdict(runs: Sequence[RunResults]) -> str:
    """How far means and gaps lie from the paper's at most, and whether that is within the limits."""
    apart = []
    for (method, phase), row_of_paper in PAPER.items():
        requests = _requests(runs, method)
        for measure, theirs in zip(list(MEASURES)[:2], row_of_paper, strict=False):
            if theirs is not None:
                apart.append(abs(fmean(_levels(requests, phase, measure)) - theirs))
    gaps = []
    for method, row_of_paper in PAPER_GAPS.items():
        requests = _requests(runs, method)
        for measure, theirs in zip(MEASURES, row_of_paper, strict=True):
            if theirs is not None:
                gaps.append(abs(_gap(requests, measure) - theirs))
    within = max(apart) <= CLOSE and max(gaps) <= CLOSE_GAP
    limits = "" if within else " They are NOT within these limits."
    return (
        f"Test and retain accuracy differ from the paper's means by at most {max(apart):.1f} points (at most {CLOSE:g} "
        f"were allowed), the gaps to Retrain by at most {max(gaps):.1f} (at most {CLOSE_GAP:g}).{limits} With two "
        "clients of ten this is a check of the implementation, not a test that both are equal."
    )


def computed(runs: Sequence[RunResults]) -> str:
    """The machine and versions of the runs, and how long they took."""
    run = runs[0]
    machine = run.extra["computed"]
    original = fmean(_levels(run.requests, "original", "seconds"))
    requests = _requests(runs, "retrain")
    took = zip(requests, _levels(requests, "retrained", "seconds"), strict=True)
    retrains = ", ".join(f"{seconds:.0f} s without {request.target}" for request, seconds in took)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    hashes = ", ".join(f"`{each.extra['recipe_hash']}`" for each in runs)
    return (
        f"{machine['device']}, {machine['precision']}; {versions}. 200 rounds took "
        f"{original:.0f} s with all ten clients, {retrains}. Recipe hashes: {hashes}."
    )


def main() -> None:
    """Print everything."""
    runs = records(Path(sys.argv[1]))
    print("\n\n".join([rows_table(runs), gaps_table(runs), verdict(runs), computed(runs)]))


if __name__ == "__main__":
    main()
