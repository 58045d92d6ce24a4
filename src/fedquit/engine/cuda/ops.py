# SPDX-License-Identifier: Apache-2.0
"""Convolution, GroupNorm, shortcut and ReLU of K clients in one kernel each, for networks that know nothing of it.

Inside `CudaOps()` a network under `vmap` calls `conv2d`, `conv_with_input`, `group_norm` and `norm_relu` as ever, and
the Triton kernels of this package compute them for all clients at once: inputs and outputs in bfloat16, sums in
float32. What the kernels do not cover (dilation, other sizes, a bias unless `biases` is set) is left to torch. Each
operation is defined as what torch computes for one client after the other (tests/engine/test_kernels.py).

Shapes: K clients, B images, C channels (I in, O out), images of H x H, S x S taps. Networks use (K, B, C, H, W); the
kernels use (K, B, H, W, C), channels last, and weights (K, S * S, I, O).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.overrides import OperatorOverride, Overrides, channels_first, channels_last, square
from fedquit.models.fused import conv_with_input, norm_relu

HALF_TYPES = (torch.bfloat16, torch.float16)
MIN_CHANNELS = 16  # channels come in multiples of this: the shortest side of a tensor core's tile
MAX_GROUP = 32768  # numbers of one group of one image that a GroupNorm program can hold in registers


@cache
def kernels_available() -> bool:
    """Return whether there is a GPU that the kernels were written for (compute capability 8 or more), and Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _by_tap(w: Tensor) -> Tensor:
    """Return weights (K, O, I, S, S) as (K, S * S, I, O), dense for each client; a view where they lie so already."""
    taps = w.permute(0, 3, 4, 2, 1)  # (K, S, S, I, O)
    return (taps if _is_dense(taps) else taps.contiguous()).flatten(1, 2)  # (K, S * S, I, O)


def _is_dense(taps: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(taps.shape[1:]), reversed(taps.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class StackedConv(Function):
    """Convolution of each client's images (K, B, I, H, H) with its own weights (K, O, I, S, S).

    With `return_input` it returns its images as well, for a shortcut, and adds the gradient that comes back for them
    inside the kernel that computes its own.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        x: Tensor,
        w: Tensor,
        stride: int,
        buffer: GradientBuffer | None,
        return_input: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Launch one kernel; returns (K, B, O, H', H')."""
        from fedquit.engine.cuda import triton_gemm as gemm

        images = channels_last(x)  # (K, B, H, H, I)
        taps = _by_tap(w)  # (K, S * S, I, O)
        missing = -images.shape[-1] % MIN_CHANNELS
        if missing:  # the three colours of a first layer
            images = functional.pad(images, (0, missing))
            taps = functional.pad(taps, (0, 0, 0, missing))
        ctx.save_for_backward(images, taps)
        ctx.stride, ctx.size, ctx.channels, ctx.buffer = stride, w.shape[-1], w.shape[2], buffer
        out = channels_first(gemm.conv_forward(images, taps, stride))
        return (out, x.view_as(x)) if return_input else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Launch two kernels: the gradient of the weights, on the side stream, and that of the images."""
        from fedquit.engine.cuda import triton_gemm as gemm

        images, taps = ctx.saved_tensors
        g = channels_last(gradients[0])  # (K, B, H', H', O)
        size = ctx.size
        of_x = of_w = None
        if ctx.needs_input_grad[1]:
            claimed = ctx.buffer.claim(taps) if ctx.buffer else None
            if claimed:
                with ctx.buffer.side_stream(images, g):
                    gemm.conv_weight_gradient(images, g, size, ctx.stride, out=claimed[0])
            else:
                by_tap = gemm.conv_weight_gradient(images, g, size, ctx.stride)[:, :, : ctx.channels]
                of_w = by_tap.unflatten(1, (size, size)).permute(0, 4, 3, 1, 2).to(taps.dtype)  # (K, O, I, S, S)
        if ctx.needs_input_grad[0]:
            addend = channels_last(gradients[1]) if len(gradients) > 1 else None
            if addend is not None and images.shape[-1] > ctx.channels:  # padding by nothing would be a copy
                addend = functional.pad(addend, (0, images.shape[-1] - ctx.channels))
            padded = gemm.conv_input_gradient(g, taps, ctx.stride, images.shape[2], addend=addend)
            of_x = channels_first(padded)[:, :, : ctx.channels]
        return of_x, of_w, None, None, None


class StackedNorm(Function):
    """GroupNorm of (K, B, C, H, W) with weights and biases (K, C), plus a shortcut, then ReLU."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
        buffer: GradientBuffer | None,
    ) -> Tensor:
        from fedquit.engine.cuda import triton_norm

        images = channels_last(x)
        addend = None if shortcut is None else channels_last(shortcut)
        if weight.stride() != bias.stride() or weight.stride(1) != 1:
            weight = weight.contiguous()
            bias = bias.contiguous()
        out, mean, scale = triton_norm.norm_forward(images, weight, bias, addend, groups, eps, relu=relu)
        ctx.save_for_backward(images, out, weight, bias, mean, scale)
        ctx.groups, ctx.relu, ctx.shortcut, ctx.buffer = groups, relu, shortcut is not None, buffer
        return channels_first(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        from fedquit.engine.cuda import triton_norm

        images, out, weight, bias, mean, scale = ctx.saved_tensors
        of_x, sums, of_addend = triton_norm.norm_backward(
            *(channels_last(gradients[0]), images, out, weight, bias, mean, scale, ctx.groups),
            relu=ctx.relu,
            shortcut=ctx.shortcut,
        )
        of_weight = of_bias = None
        claimed = ctx.buffer.claim(weight, bias) if ctx.buffer else None
        if claimed:
            with ctx.buffer.side_stream(sums):
                triton_norm.norm_weight_gradients(sums, weight.dtype, claimed)
        else:
            of_weight, of_bias = triton_norm.norm_weight_gradients(sums, weight.dtype)
        of_shortcut = None if of_addend is None else channels_first(of_addend)
        return (channels_first(of_x), of_weight, of_bias, of_shortcut, None, None, None, None)


def _clients_in_front(tensors: Sequence[Tensor | None], dims: Sequence[int | None], size: int) -> list[Tensor | None]:
    """Move `vmap`'s dimension to the front; what all clients share is expanded to (K, ...) without a copy."""
    out: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None:
            out.append(None)
        else:
            out.append(tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0))
    return out


class VmapConv(Function):
    """A convolution of one client; `vmap` over clients makes it a `StackedConv`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, buffer: GradientBuffer | None, return_input: bool) -> Tensor:  # noqa: D102
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401, D102
        pass

    @staticmethod
    def vmap(  # noqa: D102
        info: Any,  # noqa: ANN401
        in_dims: tuple[int | None, ...],
        x: Tensor,
        w: Tensor,
        stride: int,
        buffer: GradientBuffer | None,
        return_input: bool,
    ) -> tuple[Any, Any]:
        if in_dims[1] is None:  # the same weights for all: one large batch
            x = x.movedim(in_dims[0] or 0, 0)  # (K, B, I, H, H)
            out = _apply(StackedConv, x.flatten(0, 1).unsqueeze(0), w.unsqueeze(0), stride, None)  # (1, K * B, ...)
            out = out.squeeze(0).unflatten(0, x.shape[:2])  # (K, B, O, H', H')
            return ((out, x), (0, 0)) if return_input else (out, 0)
        images, weights = _clients_in_front((x, w), in_dims[:2], info.batch_size)
        return _apply(StackedConv, images, weights, stride, buffer, return_input), (0, 0) if return_input else 0


class VmapNorm(Function):
    """A GroupNorm of one client; `vmap` over clients makes it a `StackedNorm`."""

    @staticmethod
    def forward(  # noqa: D102
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
        buffer: GradientBuffer | None,
    ) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401, D102
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:  # noqa: ANN401, D102
        tensors = _clients_in_front(inputs[:4], in_dims[:4], info.batch_size)
        return _apply(StackedNorm, *tensors, *inputs[4:]), 0


def _conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    buffer: GradientBuffer | None = None,
    biases: bool = False,
) -> Tensor:
    size = w.shape[-1]
    step = square(stride)
    keeps_size = not isinstance(padding, str) and square(padding) == size // 2
    plain = (bias is None or biases) and keeps_size and square(dilation) == groups == 1
    if not (plain and _covers_conv(x, w, step)):
        return functional.conv2d(x, w, bias, stride, padding, dilation, groups)
    if _is_mapped(x, w):
        out = _apply(VmapConv, x, w, step, buffer, False)
    else:
        out = _apply(StackedConv, x.unsqueeze(0), w.unsqueeze(0), step, None).squeeze(0)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _conv_with_input(
    x: Tensor, w: Tensor, stride: int, *, buffer: GradientBuffer | None = None
) -> tuple[Tensor, Tensor]:
    if not (_covers_conv(x, w, stride) and _is_mapped(x, w)):
        return _conv2d(x, w, None, stride, w.shape[-1] // 2, buffer=buffer), x
    return cast("tuple[Tensor, Tensor]", _apply(VmapConv, x, w, stride, buffer, True))


def _covers_conv(x: Tensor, w: Tensor, stride: int) -> bool:
    """Return whether the kernels cover it: square images and taps, a size that the stride divides, 16 bits."""
    return (
        x.dtype == w.dtype
        and x.dtype in HALF_TYPES
        and x.dim() == 4
        and x.shape[-1] == x.shape[-2]
        and w.shape[-1] == w.shape[-2]
        and w.shape[-1] in (1, 3)
        and stride in (1, 2)
        and x.shape[-1] % stride == 0
        and w.shape[0] % MIN_CHANNELS == 0
    )


def _stacked_norm(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    shortcut: Tensor | None,
    *,
    relu: bool,
    buffer: GradientBuffer | None,
) -> Tensor | None:
    """Normalise by the kernel, or return None where it does not cover the shape: sides are powers of two."""
    if not (x.dtype in HALF_TYPES and x.dim() == 4):
        return None
    channels = x.shape[1] // groups
    numbers = channels * x.shape[-1] * x.shape[-2]
    if not (_is_power_of_two(numbers) and _is_power_of_two(channels) and 0 < numbers <= MAX_GROUP):
        return None
    if _is_mapped(x, weight, bias):
        return _apply(VmapNorm, x, weight, bias, shortcut, groups, eps, relu, buffer)
    addend = None if shortcut is None else shortcut.unsqueeze(0)
    tensors = x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0), addend
    return _apply(StackedNorm, *tensors, groups, eps, relu, None).squeeze(0)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    buffer: GradientBuffer | None = None,
) -> Tensor:
    normed = None
    if weight is not None and bias is not None:
        normed = _stacked_norm(x, groups, weight, bias, eps, None, relu=False, buffer=buffer)
    return functional.group_norm(x, groups, weight, bias, eps) if normed is None else normed


def _norm_relu(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    shortcut: Tensor | None = None,
    *,
    buffer: GradientBuffer | None = None,
) -> Tensor:
    normed = _stacked_norm(x, groups, weight, bias, eps, shortcut, relu=True, buffer=buffer)
    return norm_relu(x, groups, weight, bias, eps, shortcut) if normed is None else normed


def _is_mapped(*tensors: Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(t) for t in tensors)


def _apply(function: type[Function], *inputs: Any) -> Tensor:  # noqa: ANN401
    out: Tensor = function.apply(*inputs)
    return out


def _relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Never in place: what a kernel returned is a view, and the backward pass needs it."""
    return functional.relu(x)


class CudaOps(OperatorOverride):
    """While this mode is active, the operations above go to the Triton kernels."""

    def __init__(self, buffer: GradientBuffer | None = None, *, biases: bool = False) -> None:
        """Choose what goes to the kernels.

        Args:
            buffer: Where they write gradients of weights; None for autograd's way.
            biases: Whether convolutions with a bias are among it.
        """
        overrides: Overrides = {
            functional.conv2d: partial(_conv2d, biases=biases),
            conv_with_input: _conv_with_input,
            functional.group_norm: _group_norm,
            norm_relu: _norm_relu,
        }
        kernels = {operation: partial(kernel, buffer=buffer) for operation, kernel in overrides.items()}
        super().__init__({**kernels, functional.relu: _relu})
