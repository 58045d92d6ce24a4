# SPDX-License-Identifier: Apache-2.0
"""How operations of torch are replaced for many clients, on a CPU and on a GPU, and the memory layout of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

Overrides = Mapping[Any, Callable[..., Any]]  # a replacement for each operation of torch


def channels_last(x: Tensor) -> Tensor:
    """Return (K, B, C, H, W) as contiguous (K, B, H, W, C); a view where the channels lie innermost already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def channels_first(x: Tensor) -> Tensor:
    """Return (K, B, H, W, C) as a view (K, B, C, H, W)."""
    return x.permute(0, 1, 4, 2, 3)


def square(value: int | Sequence[int] | str) -> int:
    """Return a stride, padding or dilation that is the same in both directions; -1 where it is not, or is a word."""
    if isinstance(value, int):
        return value
    return -1 if isinstance(value, str) or len(set(value)) > 1 else value[0]


class OperatorOverride(TorchFunctionMode):
    """While this mode is active, some operations of torch are replaced."""

    def __init__(self, overrides: Overrides) -> None:
        super().__init__()
        self._overrides = overrides

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Torch calls this for every operation; the mode is off inside."""
        operation: Callable[..., Any] = self._overrides.get(func, func)
        return operation(*args, **(kwargs or {}))
