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
