# SPDX-License-Identifier: Apache-2.0
"""Which GPU computes, and in what: torch takes the first, and rounds float32 in convolutions, unless told otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquit.core import Model, Params

Precision = Literal["float32", "tf32", "bf16"]


def on_gpu(device: torch.device) -> bool:
    """Whether it is a GPU."""
    return device.type == "cuda"


@contextlib.contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """On that GPU, which may round the factors of float32 products to 19 bits unless float32 is asked for."""
    if not on_gpu(device):
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        with torch.cuda.device(device):  # recordings and kernels go to the current one, wherever the data lies
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Reading:
    """A network that is read on its GPU in a precision of its own; gradients are not covered."""

    model: Model
    precision: Precision
    device: torch.device

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""
        with computing(self.precision, self.device):
            return self.model(params, x)
