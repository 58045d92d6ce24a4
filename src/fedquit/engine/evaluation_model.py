# SPDX-License-Identifier: Apache-2.0
"""A network wrapped so that it computes in a given precision: in bfloat16, and on a GPU for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.core import Model, Params
from fedquit.core.projection import Projection, projection_of
from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.cuda.ops import CudaOps, kernels_available
from fedquit.engine.precision import Precision, computing, on_gpu


@dataclass(frozen=True)
class Bfloat16Model:
    """A network that computes in bfloat16 and returns logits in float32.

    Attributes:
        model: The network.
        copies: Pairs of parameters and their copy in bfloat16, which is used where those parameters are given
            (compared by identity); others are cast on every call.
        use_kernels: Whether convolutions and GroupNorm go to the Triton kernels.
        gradient_buffer: Where the kernels write gradients of weights; None for autograd's way.
        kernel_biases: Whether convolutions with a bias go to the kernels too.
    """

    model: Model
    copies: Sequence[tuple[Params, Params]] = ()
    use_kernels: bool = False
    gradient_buffer: GradientBuffer | None = None
    kernel_biases: bool = False

    def init(self, seed: int) -> Params:
        """Return fresh parameters, in the network's own precision."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits, in float32."""
        low = self._low(params)
        with self._operations():
            return self.model(low, x).float()

    def projection(self, params: Params, x: Tensor) -> Projection | None:
        """Return the factors of the logits where the network tells them, in bfloat16."""
        low = self._low(params)
        with self._operations():
            return projection_of(self.model, low, x)

    def _operations(self) -> contextlib.AbstractContextManager[object]:
        if not self.use_kernels:
            return contextlib.nullcontext()
        return CudaOps(self.gradient_buffer, biases=self.kernel_biases)

    def _low(self, params: Params) -> Params:
        low = next((copy for original, copy in self.copies if original is params), None)
        return {n: p.to(torch.bfloat16) for n, p in params.items()} if low is None else low


@dataclass(frozen=True)
class EvaluationModel:
    """A network whose forward pass runs on a given GPU in a given precision; a backward pass is not covered."""

    model: Model
    precision: Precision
    device: torch.device

    def init(self, seed: int) -> Params:
        """Return fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits."""
        with computing(self.precision, self.device):
            return self.model(params, x)


def evaluation_model_of(model: Model, precision: Precision, device: torch.device) -> Model:
    """Return a network for evaluation, which computes in the precision in which it was trained.

    Args:
        model: The network.
        precision: "bf16" computes in bfloat16 on any device; "float32" and "tf32" differ on a GPU only.
        device: Where the data lies.
    """
    if precision == "bf16":
        model = Bfloat16Model(model, use_kernels=on_gpu(device) and kernels_available())
    return EvaluationModel(model, precision, device) if on_gpu(device) else model
