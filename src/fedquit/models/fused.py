# SPDX-License-Identifier: Apache-2.0
"""What several layers do in one go, as a function that an engine may carry out in another way."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function


def norm_relu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> Tensor:
    """Group normalisation, then a shortcut added where there is one, then ReLU."""
    if has_torch_function((x, weight, bias)):
        done: Tensor = handle_torch_function(
            norm_relu, (x, weight, bias), x, groups, weight, bias, eps, shortcut=shortcut
        )
        return done
    normed = functional.group_norm(x, groups, weight, bias, eps)
    return functional.relu(normed if shortcut is None else normed + shortcut)


def conv_keeping(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """A convolution that keeps the size up to its stride, and its input once more, for a shortcut.

    What comes back through both is a sum, which is best added up where the convolution's part of it is computed.
    """
    if has_torch_function((x, weight)):
        done: tuple[Tensor, Tensor] = handle_torch_function(conv_keeping, (x, weight), x, weight, stride)
        return done
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2), x
