# SPDX-License-Identifier: Apache-2.0
"""Attention of torch's own layers, computed by operations that can be differentiated and vectorised.

Where nothing requires a gradient, `torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoderLayer` in evaluation
mode go to fused operations that have no derivative and no batching rule. Inside `torch.func.vmap` tensors do not say
that they require one. Torch leaves its fused operations alone while a mode listens to its functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import _C
from torch.overrides import BaseTorchFunctionMode


def plain_in_transforms() -> AbstractContextManager[object]:
    """Return a context that keeps attention plain inside `torch.func`'s transforms, and does nothing elsewhere."""
    inside = _C._functorch.peek_interpreter_stack() is not None
    listened_to = _C._len_torch_function_stack() > 0  # by an engine's own mode
    return BaseTorchFunctionMode() if inside and not listened_to else nullcontext()
