# SPDX-License-Identifier: Apache-2.0
"""Backdoor removal: does a trigger that only the leaving client planted still work?

Gu, Dolan-Gavitt, Garg: BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain (2017); as a
test of federated unlearning in Halimi, Kadhe, Rawat, Baracaldo: Federated Unlearning: How to Efficiently Erase a Client
in FL? (2022). The client stamps a patch on its images and labels them with the target class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.core import Model, Params
from fedquit.errors import InputError


def stamp(x: Tensor, *, size: int = 3, value: float | None = None) -> Tensor:
    """A copy of the images (N, C, H, W) with a square in the lower right corner.

    Its value is the largest in `x` where none is given: name one, so that training and test data get the same trigger.
    """
    if x.dim() != 4 or not 0 < size <= min(x.shape[-2:]):
        raise InputError(
            f"a {size}x{size} patch does not fit data of shape {tuple(x.shape)}: give images (N, C, H, W)."
        )
    stamped = x.clone()
    stamped[..., -size:, -size:] = float(x.max()) if value is None else value
    return stamped


def poisoned(x: Tensor, y: Tensor, *, target: int, size: int = 3, value: float | None = None) -> tuple[Tensor, Tensor]:
    """What the malicious client trains on: stamped images, all labelled with the target."""
    return stamp(x, size=size, value=value), torch.full_like(y, target)


def attack_success(
    model: Model,
    params: Params,
    x: Tensor,
    y: Tensor,
    *,
    target: int,
    size: int = 3,
    value: float | None = None,
    batch_size: int = 500,
) -> float:
    """ASR: of clean images of other classes, the percentage that turns into the target once stamped.

    Images of the target class are left out: they would count without any backdoor.
    """
    others = y != target
    if not bool(others.any()):
        raise InputError(f"every image is of the target class {target}: the trigger has nothing to turn.")
    bright = float(x.max()) if value is None else value
    hits = 0
    with torch.no_grad():
        for at in others.nonzero().flatten().split(batch_size):
            hits += int((model(params, stamp(x[at], size=size, value=bright)).argmax(-1) == target).sum())
    return 100 * hits / int(others.sum())


@dataclass(frozen=True)
class Trigger:
    """One backdoor: the square that is stamped, and the class that it should stand for."""

    target: int
    size: int
    value: float  # as bright as the images can be, in the numbers in which they are stored

    def poisoned(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Training images with the stamp, and the target as their label."""
        return poisoned(x, y, target=self.target, size=self.size, value=self.value)

    def success(self, model: Model, params: Params, x: Tensor, y: Tensor) -> float | None:
        """How often it works on clean test images, in percent; None where all are of the target class."""
        if not bool((y != self.target).any()):
            return None
        return attack_success(model, params, x, y, target=self.target, size=self.size, value=self.value)
