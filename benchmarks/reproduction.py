# SPDX-License-Identifier: Apache-2.0
"""Set recorded runs beside the paper's rows: `python benchmarks/reproduction.py results/cifar100-lda0.1`.

It prints the tables of docs/reproduction.md. A record is the results.json of a run; the tables are computed from
records alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

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
CLOSE, CLOSE_GAP = 5.0, 4.0  # points: what counts as agreeing, of means and of gaps to Retrain

Row = dict[str, Any]


def records(folder: Path) -> list[dict[str, Any]]:
    """What was recorded, in the order of the file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _rows(runs: Iterable[dict[str, Any]], method: str, phase: str) -> list[Row]:
    found = {
        tuple(row["clients"]): row
        for run in runs
        for row in run["rows"]
        if row["phase"] == phase and row["method"] == method
    }
    return [found[key] for key in sorted(found)]


def rows_table(runs: list[dict[str, Any]]) -> str:
    """Means over the clients that left, ours and the paper's."""
    head = "| | whose | " + " | ".join(MEASURES.values()) + " | rounds |"
    lines = [head, "|---|---|" + "---:|" * (len(MEASURES) + 1)]
    for (method, phase), theirs in PAPER.items():
        rows = _rows(runs, method, phase)
        ours = [mean(row[m] for row in rows) for m in MEASURES]
        rounds = f"{mean(row['rounds'] for row in rows):.1f}" if phase == "recovered" else ""
        each = "; ".join(_named(row) for row in rows)
        title = phase if method in ("original", "retrain") else f"{method}, {phase}"
        lines.append(f"| {title} | ours ({each}) | " + " | ".join(f"{v:.1f}" for v in ours) + f" | {rounds} |")
        lines.append("| | paper | " + " | ".join("" if v is None else f"{v:.1f}" for v in theirs) + " | |")
    return "\n".join(lines)


def _named(row: Row) -> str:
    return f"client {', '.join(map(str, row['clients']))}"


def gaps_table(runs: list[dict[str, Any]]) -> str:
    """Mean absolute gaps to Retrain after recovery, ours and the paper's."""
    lines = ["| method | whose | " + " | ".join(MEASURES.values()) + " |", "|---|---|" + "---:|" * len(MEASURES)]
    gold = {tuple(r["clients"]): r for r in _rows(runs, "retrain", "retrained")}
    for method, theirs in PAPER_GAPS.items():
        rows = _rows(runs, method, "recovered")
        ours = [mean(abs(r[m] - gold[tuple(r["clients"])][m]) for r in rows) for m in MEASURES]
        lines.append(f"| {method} | ours | " + " | ".join(f"{v:.1f}" for v in ours) + " |")
        lines.append("| | paper | " + " | ".join("" if v is None else f"{v:.1f}" for v in theirs) + " |")
    return "\n".join(lines)


def verdict(runs: list[dict[str, Any]]) -> str:
    """Whether means and gaps agree with the paper's, and by how much at most they differ."""
    apart = [
        abs(mean(row[m] for row in _rows(runs, *key)) - theirs)
        for key, row_of_paper in PAPER.items()
        for m, theirs in zip(list(MEASURES)[:2], row_of_paper, strict=False)
        if theirs is not None
    ]
    gold = {tuple(r["clients"]): r for r in _rows(runs, "retrain", "retrained")}
    gaps = [
        abs(mean(abs(r[m] - gold[tuple(r["clients"])][m]) for r in _rows(runs, method, "recovered")) - theirs)
        for method, row_of_paper in PAPER_GAPS.items()
        for m, theirs in zip(MEASURES, row_of_paper, strict=True)
        if theirs is not None
    ]
    agree = "agree" if max(apart) <= CLOSE and max(gaps) <= CLOSE_GAP else "do NOT agree"
    return (
        f"Test and retain accuracy differ from the paper's means by at most {max(apart):.1f} points (allowed "
        f"{CLOSE:g}), the gaps to Retrain by at most {max(gaps):.1f} (allowed {CLOSE_GAP:g}): they {agree}."
    )


def computed(runs: list[dict[str, Any]]) -> str:
    """With what, and how long it took."""
    run = runs[0]
    (original,), retrained = _rows(runs[:1], "original", "original"), _rows(runs, "retrain", "retrained")
    versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
    seconds = ", ".join(f"{r['seconds']:.0f} s without {_named(r)}" for r in retrained)
    return (
        f"{run['computed']['device']}, {run['computed']['precision']}; {versions}. 200 rounds took "
        f"{original['seconds']:.0f} s with all ten clients, {seconds}. Recipe hashes: "
        + ", ".join(f"`{r['recipe_hash']}`" for r in runs)
        + "."
    )


def main() -> None:
    """Print everything."""
    runs = records(Path(sys.argv[1]))
    print("\n\n".join([rows_table(runs), gaps_table(runs), verdict(runs), computed(runs)]))


if __name__ == "__main__":
    main()
