# SPDX-License-Identifier: Apache-2.0
"""The precision that a GPU computes in, as torch's switches: float32, TF32 or bfloat16.

Torch alone rounds the factors of float32 convolutions to TF32 (19 bits), and computes on the first GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


def on_gpu(device: torch.device) -> bool:
    """Return whether it is a GPU."""
    return device.type == "cuda"


@contextlib.contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Make a GPU the current one and set whether float32 products may use TF32; a no-op on a CPU.

    Args:
        precision: TF32 is allowed unless this is "float32".
        device: Where the data lies: kernels and CUDA graphs go to the current GPU, not to that of their arguments.
    """
    if not on_gpu(device):
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        with torch.cuda.device(device):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
