# SPDX-License-Identifier: Apache-2.0
"""BatchNorm averaged and local (FedBN) where clients' features differ: accuracies before and after an erasure.

    python benchmarks/local_batchnorm.py [seeds] [rate]
    python benchmarks/local_batchnorm.py sweep [seeds]

Four clients have the same task of ten classes; client k sees its inputs scaled by 1 + 0.8 k and shifted by 0.8 k. The
last one leaves. FedQUIT serves it, one round of recovery follows; Natural trains for as many rounds without unlearning.
Means over seeds, in percent: the retained data of the three others, the leaver's training data and its hold-out.

Where BatchNorm is local, Original reads the leaver's data with the leaver's own layers. These leave with the client,
and all other models read it with the layers of a newcomer. `original-newcomer` is Original with those: the same shared
parameters as `original`, and the same layers as all the others.

`sweep` chooses FedQUIT's rate by the rule of `fedquit sweep`, one seed after the other, on 600 training and 2,400
hold-out examples of each client, of which every fifth label is drawn anew, so that there is something to remember.
Beside the chosen rate stand the same accuracies of FedQUIT at that rate, of Retrain and of Natural.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import fedquit
from fedquit.running.in_memory import at_hand
from fedquit.studies import Sweep, sweep_rates

CLASSES, FEATURES, CLIENTS, EXAMPLES = 10, 24, 4, 250
PHASES = ("original", "retrained", "unlearned", "recovered", "natural")
NEWCOMER = "original-newcomer"
COLUMNS = ("retain_acc", "forget_acc", "holdout_acc")
RATE = 2e-3
RATES = (2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 1.5e-2)  # that the sweep tries
MORE, WRONG, ROUNDS = 3000, 0.2, 60  # the sweep's examples of a client, drawn labels, and rounds of training


def network() -> nn.Module:
    """Two hidden layers with BatchNorm."""
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def clients_of(seed: int, examples: int = EXAMPLES, wrong: float = 0.0) -> dict[int, tuple[Tensor, Tensor]]:
    """Each client's examples.

    Args:
        seed: of all draws.
        examples: of a client.
        wrong: the share of labels that are drawn anew.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    data = {}
    for k in range(CLIENTS):
        y = torch.randint(CLASSES, (examples,), generator=generator)
        x = centres[y] + 1.2 * torch.randn(examples, FEATURES, generator=generator)
        if wrong:
            drawn = torch.randint(CLASSES, (examples,), generator=generator)
            y = torch.where(torch.rand(examples, generator=generator) < wrong, drawn, y)
        data[k] = x * (1 + 0.8 * k) + 0.8 * k, y
    return data


def measured(batchnorm: str, seed: int, rate: float, folder: Path) -> dict[str, list[float]]:
    """The accuracies after each phase, and where BatchNorm is local those of Original to a newcomer."""
    data = clients_of(seed)
    settings = {
        "model.batchnorm": batchnorm, "seed": seed, "train.rounds": 10, "train.lr": 0.05, "train.momentum": 0.9,
        "method.lr": rate, "method.epochs": 2.0, "recover.until": "rounds", "recover.max_rounds": 1,
        "recover.control": True, "evaluate.attacks": [],
    }  # fmt: skip
    setting = fedquit.Setting(network, data, data[0], settings=settings)
    fedquit.run(setting, forget=CLIENTS - 1, out=folder / "fedquit")
    rows = rows_of(folder / "fedquit")
    accuracies = {phase: rows[phase] for phase in PHASES}
    if batchnorm == "local":  # what Natural has unlearned, nothing, is Original without the leaver's layers
        left_out = ("method.lr", "method.epochs", "recover.control")
        untouched = {key: value for key, value in settings.items() if key not in left_out}
        plain = fedquit.Setting(network, data, data[0], settings=untouched | {"method.name": "natural"})
        fedquit.run(plain, forget=CLIENTS - 1, out=folder / "natural")
        accuracies = {"original": rows["original"], NEWCOMER: rows_of(folder / "natural")["unlearned"]} | accuracies
    return accuracies


def rows_of(folder: Path) -> dict[str, list[float]]:
    """The accuracies of a run, by phase."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {row["phase"]: [row[column] for column in COLUMNS] for row in rows}


def swept(batchnorm: str, seed: int, folder: Path) -> tuple[Sweep, dict[str, list[float]]]:
    """The sweep over the rates; and the accuracies of a run at the chosen one, empty where none was."""
    data = clients_of(seed, MORE, WRONG)
    settings = {
        "model.batchnorm": batchnorm, "seed": seed, "train.rounds": ROUNDS, "train.lr": 0.05, "train.momentum": 0.9,
        "method.epochs": 2.0, "data.holdout": 0.8, "recover.until": "rounds", "recover.max_rounds": 1,
        "evaluate.attacks": [],
    }  # fmt: skip
    setting = fedquit.Setting(network, data, data[0], settings=settings)
    request = replace(setting.recipe.request[0], clients=(CLIENTS - 1,))
    with at_hand(setting.objects):
        sweep = sweep_rates(replace(setting.recipe, request=(request,)), RATES, 1, folder / "sweep")
    if sweep.chosen is None:
        return sweep, {}
    fedquit.run(setting, settings={"method.lr": sweep.chosen.lr}, forget=CLIENTS - 1, out=folder / "chosen")
    return sweep, rows_of(folder / "chosen")


def print_sweeps(seeds: int) -> None:
    """Print what the rule chooses for each seed, and the accuracies at that rate."""
    print(f"{'':26}{'rate':>8}" + "".join(f"{column:>13}" for column in COLUMNS))
    for batchnorm in ("averaged", "local"):
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                sweep, rows = swept(batchnorm, seed, Path(folder))
            rate = f"{sweep.chosen.lr:g}" if sweep.chosen else "none"
            print(f"{batchnorm + f', seed {seed}':26}{rate:>8}" + ("" if sweep.chosen else f"  {sweep.reason}"))
            for phase in (phase for phase in PHASES if phase in rows):
                print(f"  {phase:32}" + "".join(f"{value:13.1f}" for value in rows[phase]))


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["sweep"]:
        print_sweeps(int(sys.argv[2]) if len(sys.argv) > 2 else 5)
        return
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else RATE
    print(f"{'':26}" + "".join(f"{column:>13}" for column in COLUMNS))
    for batchnorm in ("averaged", "local"):
        with tempfile.TemporaryDirectory() as folder:
            runs = [measured(batchnorm, seed, rate, Path(folder) / str(seed)) for seed in range(seeds)]
        for phase in runs[0]:
            means = torch.tensor([run[phase] for run in runs]).mean(0)
            print(f"{batchnorm + ' ' + phase:26}" + "".join(f"{mean:13.1f}" for mean in means.tolist()))


if __name__ == "__main__":
    main()
