# SPDX-License-Identifier: Apache-2.0
"""What the operations of many clients share, on a GPU and on a CPU: how images lie, and how calls are caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

Ways = Mapping[Any, Callable[..., Any]]  # by the operation that each takes the place of


def last(x: Tensor) -> Tensor:
    """(K, B, C, H, W) as (K, B, H, W, C) in memory; nothing moves where it lies so already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def first(x: Tensor) -> Tensor:
    """The other way round, as a view."""
    return x.permute(0, 1, 4, 2, 3)


def single(value: int | Sequence[int] | str) -> int:
    """A stride, padding or dilation that is the same in both directions; -1 where it is not, or is a word."""
    if isinstance(value, int):
        return value
    return -1 if isinstance(value, str) or len(set(value)) > 1 else value[0]


class Rerouting(TorchFunctionMode):
    """While it is active, some operations take another way."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self._ways = ways

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Torch calls this for every operation; the mode is off inside."""
        way: Callable[..., Any] = self._ways.get(func, func)
        return way(*args, **(kwargs or {}))
