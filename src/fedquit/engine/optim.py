# SPDX-License-Identifier: Apache-2.0
"""Optimizers as pure functions on parameters: elementwise, hence the same for one client or many stacked.

Each is equal to its namesake in `torch.optim` (tested). Adam and AdamW use eps = 1e-7, as the authors of FedQUIT do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedquit.core import Local, Params
from fedquit.core.params import norm

Slots = dict[str, Params]  # an optimizer's memory: "velocity", "m", "v"


@dataclass(frozen=True)
class Signal:
    """The input of one optimizer step.

    Attributes:
        t: The step's number, from 1.
        gradient: By name.
        curvature: An estimate of the Hessian's diagonal, by name, for optimizers that want it.
        lr: The learning rate in memory, (), for steps that are captured as CUDA graphs; None for that of `Local`.
    """

    t: int | Tensor
    gradient: Params
    curvature: Params | None = None
    lr: Tensor | None = None


class Optimizer(Protocol):
    """An update rule: from parameters, slots and a gradient to new parameters and slots."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of what it keeps between steps."""

    @property
    def wants_curvature(self) -> bool:
        """Whether it needs the Hessian's diagonal."""

    def step(self, params: Params, slots: Slots, signal: Signal, local: Local) -> tuple[Params, Slots]:
        """Return new parameters and slots.

        Args:
            params: By name; not written to.
            slots: What the last step returned; zeros before the first.
            signal: The gradient.
            local: Learning rate, momentum and weight decay.
        """


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum and L2 weight decay, as `torch.optim.SGD`."""

    slots: tuple[str, ...] = ("velocity",)
    wants_curvature: bool = False

    def step(self, params: Params, slots: Slots, signal: Signal, local: Local) -> tuple[Params, Slots]:
        """W <- w - lr * velocity, with velocity <- momentum * velocity + gradient + weight_decay * w."""
        g = signal.gradient
        if local.weight_decay:
            g = {n: d + local.weight_decay * params[n] for n, d in g.items()}
        if local.momentum:
            slots = {"velocity": {n: local.momentum * slots["velocity"][n] + d for n, d in g.items()}}
            g = slots["velocity"]
        lr = local.lr if signal.lr is None else signal.lr
        moves = {n: lr * d for n, d in g.items()}
        new = {n: torch.sub(params[n], move, out=move) for n, move in moves.items()}  # in the memory of the moves
        return new, slots


@dataclass(frozen=True)
class Adam:
    """As `torch.optim.Adam`, or `AdamW` where the weight decay is decoupled.

    The second moment may be that of another quantity than the gradient: AdaHessian takes the
    Hessian's diagonal (Yao et al.: ADAHESSIAN. AAAI 2021).
    """

    decoupled: bool = False
    wants_curvature: bool = False
    eps: float = 1e-7
    beta1: float = 0.9
    beta2: float = 0.999
    slots: tuple[str, ...] = ("m", "v")

    def step(self, params: Params, slots: Slots, signal: Signal, local: Local) -> tuple[Params, Slots]:
        """W <- w - lr * m^ / (sqrt(v^) + eps)."""
        g: Params = signal.gradient
        decay: float | Tensor = 1.0
        lr = local.lr if signal.lr is None else signal.lr
        if self.decoupled:
            decay = 1 - lr * local.weight_decay
        elif local.weight_decay:
            g = {n: d + local.weight_decay * params[n] for n, d in g.items()}
        scale = signal.curvature if self.wants_curvature and signal.curvature is not None else g
        m = {n: self.beta1 * slots["m"][n] + (1 - self.beta1) * d for n, d in g.items()}
        v = {n: self.beta2 * slots["v"][n] + (1 - self.beta2) * d * d for n, d in scale.items()}
        c1, c2 = 1 - self.beta1**signal.t, 1 - self.beta2**signal.t
        new = {n: decay * p - lr * (m[n] / c1) / ((v[n] / c2).sqrt() + self.eps) for n, p in params.items()}
        return new, {"m": m, "v": v}


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(),
    "adam": Adam(),
    "adamw": Adam(decoupled=True),
    "adahessian": Adam(decoupled=True, wants_curvature=True, eps=1e-8),
}


def clipped(gradient: Params, local: Local) -> Params:
    """Return the gradient, scaled down where its norm, or that of one of its tensors, is larger than allowed.

    Args:
        gradient: By name.
        local: `clip_tensor` bounds the norm of each tensor, `clip` that of all; 0 bounds nothing.
    """
    if local.clip_tensor:
        gradient = {n: d * _factor(d.norm(), local.clip_tensor) for n, d in gradient.items()}
    if local.clip:
        factor = _factor(norm(gradient), local.clip)
        gradient = {n: d * factor for n, d in gradient.items()}
    return gradient


def _factor(length: Tensor, limit: float) -> Tensor:
    return (limit / (length + 1e-6)).clamp(max=1.0)
