# SPDX-License-Identifier: Apache-2.0
"""Logits as a product that has not been computed yet: hidden states times the rows of a head.

The logits of a language model take B * T * V numbers, far more than all else that a step holds. A loss that knows the
two factors computes a few rows at a time (`fedquit.distill.chunked`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fedquit.core.types import Model, Params


@dataclass(frozen=True)
class Projection:
    """What a network ends with.

    Attributes:
        hidden: the states before the head, `(B, T, D)`.
        weight: of the head, `(C, D)`.
        bias: of the head, `(C,)`, or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The product, `(B, T, C)`."""
        return functional.linear(self.hidden, self.weight, self.bias)


def projection_of(model: Model, params: Params, x: Tensor) -> Projection | None:
    """Return the factors of a network's logits; None for a network that does not tell them.

    Args:
        model: the network.
        params: its parameters.
        x: the examples, `(B, …)`.
    """
    tell = getattr(model, "projection", None)
    return None if tell is None else tell(params, x)
