# SPDX-License-Identifier: Apache-2.0
"""Networks of a user's own, for tests that name them in a recipe."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn


def batch_norm_net(input_shape: tuple[int, ...], classes: int, *, dropout: float = 0.0) -> nn.Module:
    """A convolution with BatchNorm, dropout where asked for, and a linear head."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * height * width, classes),
    )


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + x @ self.down.T @ self.up.T


def adapted_net(input_shape: tuple[int, ...], classes: int, *, rank: int = 2) -> nn.Module:
    """A frozen body with adapters, and a trained head."""
    return nn.Sequential(nn.Flatten(), Adapted(prod(input_shape), 12, rank), nn.ReLU(), nn.Linear(12, classes))
