# SPDX-License-Identifier: Apache-2.0
"""A model of one's own forgets a part of its training data, with a verdict: no federation, no configuration.

python examples/own_model.py [REPORT.html]
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedquit
from fedquit.data import load_dataset


def trained(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Some model that somebody trained on everything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def main() -> None:
    """Train on images of which every fifth has a wrong label, which a network learns by heart; then forget some."""
    images = load_dataset("fashion_mnist_mini", noise=0.2)
    order = torch.randperm(len(images.x), generator=torch.Generator().manual_seed(0))
    forget, holdout, retain = ((images.x[at], images.y[at]) for at in order.split([800, 1200, 3000]))
    model = trained(torch.cat([forget[0], retain[0]]), torch.cat([forget[1], retain[1]]), epochs=40)

    result = fedquit.forget(
        model,
        forget,
        retain,
        holdout,  # never trained on
        test=(images.test_x, images.test_y),
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        recover_lr=1e-3,
        recover_epochs=5,
    )

    print(result)
    for report in sys.argv[1:]:
        print(f"Report: {result.report(report)}")


if __name__ == "__main__":
    main()
