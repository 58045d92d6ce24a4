# SPDX-License-Identifier: Apache-2.0
"""A model forgets some of its training samples: no federation, no configuration.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedquit


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Some model that somebody trained on everything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model(x).argmax(-1) == y).float().mean())


def main() -> None:
    """Train on digits, forget the samples of one person, and look at both models."""
    digits = load_digits()
    x, y = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    model = trained(x[:1500], y[:1500])
    forget, others, unseen = slice(0, 150), slice(150, 1500), slice(1500, None)

    unlearned = fedquit.unlearn(model, (x[forget], y[forget]), lr=5e-3)

    print(f"{'':16}{'forgotten':>12}{'retained':>12}{'unseen':>12}")
    for name, found in (("before", model), ("after", unlearned)):
        scores = [accuracy(found, x[part], y[part]) for part in (forget, others, unseen)]
        print(f"{name:16}" + "".join(f"{s:11.1f}%" for s in scores))

    logits = model(x[:1]).detach()
    z_virt = fedquit.virtual_logits(logits, y[:1], teacher="min")  # the virtual teacher itself
    print(f"true class of the first sample: {logits.softmax(-1)[0, y[0]]:.4f} before, ", end="")
    print(f"{z_virt.softmax(-1)[0, y[0]]:.4f} for the virtual teacher")


if __name__ == "__main__":
    main()
