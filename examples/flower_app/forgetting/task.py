# SPDX-License-Identifier: Apache-2.0
"""The network and the data: the handwritten digits of scikit-learn, divided among clients with skewed labels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedquit.data import federate, load_dataset
from fedquit.data.federated import FederatedData


class Net(nn.Sequential):
    """Two convolutions and a linear layer. GroupNorm, not BatchNorm: running statistics would not be forgotten."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(2, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 10),
        )


@cache
def dealt(partitions: int) -> FederatedData:
    """The digits, divided among so many clients."""
    return federate(load_dataset("digits"), partition="lda", alpha=0.3, clients=partitions, seed=0)


def load_partition(number: int, partitions: int) -> tuple[Tensor, Tensor]:
    """The images (n, 1, 8, 8) and labels (n,) of one client."""
    data = dealt(partitions)
    return data.x[data.train[number]], data.y[data.train[number]]


def accuracy(params: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    """The accuracy of a model on these images, in percent."""
    with torch.no_grad():
        predictions = functional_call(Net(), params, (x,)).argmax(-1)
    return 100 * float((predictions == y).float().mean())


def test_accuracy(params: dict[str, Tensor]) -> float:
    """The accuracy of a model on images that no client has, in percent."""
    data = load_dataset("digits")
    return accuracy(params, data.test_x, data.test_y)
