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

from fedquit.paper.numbers import Key, load_paper
from fedquit.running.paper_costs import SETTINGS as SETTINGS_OF_COSTS
from fedquit.running.paper_costs import bill

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
TITLES = {"cifar100-lda0.1": "CIFAR-100, LDA 0.1", "cifar100-iid": "CIFAR-100, IID"}
SETTINGS = {"cifar100-lda0.1": "cifar100-lda", "cifar100-iid": "cifar100-iid"}


def paper_row(setting: str, method: str) -> tuple[float, float, float]:
    """The paper's unlearned test accuracy, recovery rounds and forget gap; the rounds follow from the bytes printed."""
    printed = {key: cell.printed for key, cell in load_paper().by_key.items()}
    here = Key(setting, "client", method, "recovered", "forget_acc")
    federation = SETTINGS_OF_COSTS["cifar100"]
    charged = bill(method, federation)
    unlearning = charged.unlearning.bytes if charged.in_total else 0.0
    a_round = 2 * federation.model_bytes * federation.stay(1)
    rounds = (printed[here._replace(phase="total", measure="bytes")].value - unlearning) / a_round
    unlearned = printed[here._replace(phase="unlearned", measure="test_acc")].value
    return unlearned, rounds, printed[here].gap or 0.0


def lines(record: dict[str, Any], setting: str) -> list[str]:
    """The table of one setting, in Markdown."""
    table = [
        "| method | unlearned test accuracy | paper | recovery rounds | paper | forget gap | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, method in METHODS.items():
        runs = sorted((run for run in record["runs"] if run["method"] == method), key=lambda run: int(run["target"]))
        gaps = [_gap(run, record) for run in runs]
        unlearned, rounds, gap = paper_row(setting, method["name"])
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
        print("\n".join(lines(record, SETTINGS[name])), end="\n\n")


if __name__ == "__main__":
    main()
