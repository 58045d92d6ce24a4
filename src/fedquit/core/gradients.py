# SPDX-License-Identifier: Apache-2.0
"""Gradients of single examples, for measurements such as the Fisher information's diagonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedquit.core.types import Batch, Params


def per_example_gradients(loss: Callable[[Params, Batch], Tensor], params: Params, batch: Batch) -> Params:
    """Return the gradient of each example's loss.

    It takes one forward and one backward pass, and as much memory as B models. All examples are
    computed at once; those of a network that `torch.func.vmap` does not take, one after the other.

    Args:
        loss: gives the loss of each example, `(B,)`, from parameters and a batch.
        params: where the gradients are taken.
        batch: B examples.

    Returns:
        By the names of `params`, tensors `(B, *shape)`.
    """
    examples = [getattr(batch, f.name) for f in fields(Batch)]

    def loss_of_one(at: Params, *example: Tensor) -> Tensor:
        return loss(at, Batch(*(tensor.unsqueeze(0) for tensor in example))).sum()

    gradient = grad(loss_of_one)
    try:
        gradients: Params = vmap(gradient, in_dims=(None, *(0 for _ in examples)))(params, *examples)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the network branches on what it computes, or has an operation without a batching rule
        one_by_one = [gradient(params, *example) for example in zip(*examples, strict=True)]
        return {name: torch.stack([g[name] for g in one_by_one]) for name in params}
    return gradients
