# SPDX-License-Identifier: Apache-2.0
"""What `fedquit.unlearn` can tell of its rate: three networks, unlearned at rates from healthy to destroying.

    OMP_NUM_THREADS=1 python benchmarks/destroying_rates.py

Each network has learnt 3,000 images of Fashion-MNIST with every fifth label wrong, and forgets the first 1,000. In a
row: the correlation of the student's logits of the wrong classes with the given model's, the KL divergence from the
virtual teacher beside that before, the test accuracy of the student and after three epochs of recovery, and whether
`unlearn` warned.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedquit
from fedquit.data import load_dataset
from fedquit.distill import virtual_logits
from fedquit.distill.damage import DamageWarning, relation
from fedquit.distill.losses import kl

RATES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0)
IMAGES = load_dataset("fashion_mnist_mini", noise=0.2)
FORGET = IMAGES.x[:1000], IMAGES.y[:1000]
RETAIN = IMAGES.x[1000:3000], IMAGES.y[1000:3000]


def networks() -> dict[str, nn.Module]:
    """Trained networks by name."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "mlp": nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        "batch norm": nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        ),
        "convolutions": nn.Sequential(
            nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Flatten(), nn.Linear(1152, 10),
        ),
    }  # fmt: skip
    for model in made.values():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(15):
            for x, y in zip(IMAGES.x[:3000].split(64), IMAGES.y[:3000].split(64), strict=True):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        model.eval()
    return made


def main() -> None:
    """Print the table."""
    x, y = FORGET
    print(
        f"{'network':14}{'rate':>8}{'correlation':>13}{'KL':>10}{'KL before':>11}{'test':>7}{'recovered':>11}  warned"
    )
    for name, model in networks().items():
        with torch.no_grad():
            before = model(x)
        target = virtual_logits(before, y)
        for rate in RATES:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", DamageWarning)
                student = fedquit.unlearn(model, FORGET, lr=rate)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamageWarning)
                recovered = fedquit.recover(student, RETAIN, lr=1e-3, epochs=3)
            with torch.no_grad():
                after = student(x)
            figures = (
                f"{relation(before, after, y):13.2f}{_mean_kl(target, after):10.2f}{_mean_kl(target, before):11.2f}"
                f"{_accuracy(student):7.0f}{_accuracy(recovered):11.0f}"
            )
            print(f"{name:14}{rate:8g}{figures}  {'yes' if told else 'no'}")


def _mean_kl(target: Tensor, logits: Tensor) -> float:
    return float(kl(target, logits).mean())


def _accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        right = model(IMAGES.test_x).argmax(1) == IMAGES.test_y
    return 100 * float(right.float().mean())


if __name__ == "__main__":
    main()
