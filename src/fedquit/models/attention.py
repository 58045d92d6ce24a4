# SPDX-License-Identifier: Apache-2.0
"""Attention of torch's own layers, computed by operations that can be differentiated and vectorised.

Where nothing requires a gradient, `torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoderLayer` in evaluation
mode go to fused operations that have no derivative and no batching rule. Inside `torch.func.vmap` tensors do not say
that they require one. Torch leaves its fused operations alone while a mode listens to its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import _C
from torch.overrides import TorchFunctionMode


class _Listening(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch's function returns
        return func(*args, **(kwargs or {}))


def plain_in_transforms() -> AbstractContextManager[object]:
    """Return a context that keeps attention plain inside `torch.func`'s transforms, and does nothing elsewhere."""
    inside = _C._functorch.peek_interpreter_stack() is not None
    listened_to = _C._len_torch_function_stack() > 0  # by an engine's own mode
    return _Listening() if inside and not listened_to else nullcontext()
