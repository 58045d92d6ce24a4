# SPDX-License-Identifier: Apache-2.0
"""Operations of several layers as one function, so that an engine can replace each by a fused kernel."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function


def norm_relu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> Tensor:
    """Return ReLU(GroupNorm(x) + shortcut).

    Args:
        x: Images (B, C, H, W).
        groups: The number of groups that the channels are normalised in.
        weight: A factor for each channel, (C,).
        bias: A summand for each channel, (C,).
        eps: Added to the variance.
        shortcut: Added before ReLU, shaped like x; None for nothing.
    """
    if has_torch_function((x, weight, bias)):
        out: Tensor = handle_torch_function(
            norm_relu, (x, weight, bias), x, groups, weight, bias, eps, shortcut=shortcut
        )
        return out
    normed = functional.group_norm(x, groups, weight, bias, eps)
    return functional.relu(normed if shortcut is None else normed + shortcut)


def conv_with_input(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return a convolution of x, and x itself for a shortcut.

    The gradient of x is the sum of both paths. A kernel that computes the convolution's part adds the other at once.

    Args:
        x: Images (B, I, H, W).
        weight: (O, I, S, S), with S odd; the padding keeps the size at stride 1.
        stride: The same in both directions.

    Returns:
        The output (B, O, H', W'), and x.
    """
    if has_torch_function((x, weight)):
        out: tuple[Tensor, Tensor] = handle_torch_function(conv_with_input, (x, weight), x, weight, stride)
        return out
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2), x
