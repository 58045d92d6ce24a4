# SPDX-License-Identifier: Apache-2.0
"""BatchNorm averaged and local (FedBN) where clients' features differ: accuracies before and after an erasure.

    python benchmarks/local_batchnorm.py [seeds]

Four clients have the same task of ten classes; client k sees its inputs scaled by 1 + 0.8 k and shifted by 0.8 k. The
last one leaves. FedQUIT serves it, one round of recovery follows. Means over seeds, in percent: the retained data of
the three others, the leaver's training data and its hold-out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fedquit

CLASSES, FEATURES, CLIENTS, EXAMPLES = 10, 24, 4, 250
PHASES = ("original", "retrained", "unlearned", "recovered")
COLUMNS = ("retain_acc", "forget_acc", "holdout_acc")


def network() -> nn.Module:
    """Two hidden layers with BatchNorm."""
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def clients_of(seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Each client's examples."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    data = {}
    for k in range(CLIENTS):
        y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        x = centres[y] + 1.2 * torch.randn(EXAMPLES, FEATURES, generator=generator)
        data[k] = x * (1 + 0.8 * k) + 0.8 * k, y
    return data


def measured(batchnorm: str, seed: int, folder: Path) -> dict[str, list[float]]:
    """The accuracies after each phase."""
    data = clients_of(seed)
    settings = {
        "model.batchnorm": batchnorm, "seed": seed, "train.rounds": 10, "train.lr": 0.05, "train.momentum": 0.9,
        "method.lr": 2e-3, "method.epochs": 2.0, "recover.until": "rounds", "recover.max_rounds": 1,
        "evaluate.attacks": [],
    }  # fmt: skip
    setting = fedquit.Setting(network, data, data[0], settings=settings)
    fedquit.run(setting, forget=CLIENTS - 1, out=folder)
    rows = {row["phase"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}
    return {phase: [rows[phase][column] for column in COLUMNS] for phase in PHASES}


def main() -> None:
    """Print the table."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{'':24}" + "".join(f"{column:>13}" for column in COLUMNS))
    for batchnorm in ("averaged", "local"):
        with tempfile.TemporaryDirectory() as folder:
            runs = [measured(batchnorm, seed, Path(folder) / str(seed)) for seed in range(seeds)]
        for phase in PHASES:
            means = torch.tensor([run[phase] for run in runs]).mean(0)
            print(f"{batchnorm + ' ' + phase:24}" + "".join(f"{mean:13.1f}" for mean in means.tolist()))


if __name__ == "__main__":
    main()
