# SPDX-License-Identifier: Apache-2.0
"""Print each baseline's unlearned test accuracy and recovery rounds beside those of FedQUIT's paper.

    python benchmarks/unlearned_table.py results/unlearned-accuracy

The records come from benchmarks/unlearned_accuracy.py. The paper prints the test accuracy after unlearning and the
forget gap after recovery; its recovery rounds follow from the bytes that it prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RATE = 1e-3  # FedOSD's default
FEDOSD = {"name": "fedosd", "lr": RATE, "recovery": "projected", "recovery_lr": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "`fedquit`": {"name": "fedquit"},
    "`pga`": {"name": "pga"},
    "`mode`": {"name": "mode"},
    "`fedau`": {"name": "fedau"},
    "`not`": {"name": "not"},
    "`fedosd`": FEDOSD,
    "`fedosd`, `lr = 4e-4`": {**FEDOSD, "lr": 4e-4},
}
PAPER = {  # unlearned test accuracy, recovery rounds, forget gap
    "cifar100-lda0.1": {
        "fedquit": (45.2, 3.7, 3.5),
        "pga": (1.0, 7.0, 4.3),
        "mode": (17.5, 10.0, 8.4),
        "fedau": (4.8, 16.0, 4.5),
        "not": (9.5, 12.8, 9.9),
        "fedosd": (49.5, 2.0, 3.8),
    },
    "cifar100-iid": {
        "fedquit": (25.5, 10.0, 1.4),
        "pga": (1.0, 12.1, 14.8),
        "mode": (36.8, 4.5, 11.1),
        "fedau": (4.2, 3.3, 16.8),
        "not": (12.2, 6.5, 12.6),
        "fedosd": (4.5, 3.0, 13.1),
    },
}
TITLES = {"cifar100-lda0.1": "CIFAR-100, LDA 0.1", "cifar100-iid": "CIFAR-100, IID"}


def lines(record: dict[str, Any], paper: dict[str, tuple[float, float, float]]) -> list[str]:
    """The table of one setting, in Markdown."""
    table = [
        "| method | unlearned test accuracy | paper | recovery rounds | paper | forget gap | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, method in METHODS.items():
        runs = sorted((run for run in record["runs"] if run["method"] == method), key=lambda run: int(run["target"]))
        gaps = [_gap(run, record) for run in runs]
        unlearned, rounds, gap = paper[method["name"]]
        cells = [
            ", ".join(f"{run['unlearned']['test_acc']:.1f}" for run in runs),
            f"{unlearned:.1f}",
            ", ".join(str(run["recovery"][-1]["round"]) for run in runs),
            f"{rounds:.1f}",
            ", ".join(f"{gap:.1f}" for gap in gaps),
            f"{gap:.1f}",
        ]
        table.append(f"| {title} | {' | '.join(cells)} |")
    return table


def _gap(run: dict[str, Any], record: dict[str, Any]) -> float:
    """How far the forget accuracy after recovery lies from Retrain's, in points."""
    retrained = record["references"][str(run["target"])]["retrained"]["forget_acc"]
    return abs(float(run["recovery"][-1]["forget_acc"]) - float(retrained))


def main() -> None:
    """Print the tables of all settings."""
    folder = Path(sys.argv[1])
    for name, title in TITLES.items():
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        both = " and ".join(record["references"])
        accuracy = [f"{key} {record['references']['0'][key]['test_acc']:.1f}" for key in ("original", "retrained")]
        print(f"**{title}**, clients {both} (test accuracy for client 0: {', '.join(accuracy)}):\n")
        print("\n".join(lines(record, PAPER[name])), end="\n\n")


if __name__ == "__main__":
    main()
