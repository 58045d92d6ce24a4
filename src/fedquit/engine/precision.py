# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes float32 in: torch lets its convolutions round their factors unless it is told not to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquit.core import Model, Params

Precision = Literal["float32", "tf32", "bf16"]


def rounds(device: torch.device) -> bool:
    """Whether torch may round float32 there."""
    return device.type == "cuda"


@contextlib.contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Whether a GPU may round the factors of float32 products to 19 bits: not where float32 is asked for."""
    if not rounds(device):
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Reading:
    """A network that is read in a precision of its own, whatever torch is set to; gradients are not covered."""

    model: Model
    precision: Precision
    device: torch.device

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""
        with arithmetic(self.precision, self.device):
            return self.model(params, x)
