# SPDX-License-Identifier: Apache-2.0
"""Convolution, GroupNorm and ReLU of many clients on a CPU, for networks that know nothing of it.

`vmap` turns a convolution with each client's own weights into a grouped one, which is slow on a CPU. Inside `CpuOps()`
small images are unfolded into matrices (im2col) and multiplied in one batched product; larger ones go to torch's own
convolution, client by client. GroupNorm goes to torch's channels-last kernel. What these do not cover is left to torch.
Each operation is defined as what torch computes for one client after the other (tests/engine/test_cpu_ops.py).

Shapes: K clients, B images, C channels (I in, O out), images of H x W, S x S taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.nn import functional

from fedquit.engine.overrides import OperatorOverride, Overrides, channels_first, channels_last, square
from fedquit.models.fused import conv_with_input, norm_relu

MAX_UNFOLDED = 1 << 16  # numbers of one client's unfolded images: beyond that, unfolding costs more than it saves
FEW_CHANNELS = 4  # so many or fewer gain nothing from channels_last

_aten = torch.ops.aten


def _output_size(size: int, taps: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - taps) // stride + 1


def _windows(padded: Tensor, size: int, stride: int) -> Tensor:
    """Unfold (K, B, H, W, C) into the window of each output pixel: a view (K, B, H', W', size, size, C)."""
    k, b, height, width, channels = padded.shape
    out_height = _output_size(height, size, stride, 0)
    out_width = _output_size(width, size, stride, 0)
    s = padded.stride()
    shape = (k, b, out_height, out_width, size, size, channels)
    return padded.as_strided(shape, (s[0], s[1], s[2] * stride, s[3] * stride, s[2], s[3], s[4]))


def _empty_channels_last(like: Tensor, *shape: int) -> Tensor:
    """Allocate (K, B, C, H, W) with channels innermost; no view of a tensor, so that a network may write into it."""
    return torch.empty_permuted(shape, (0, 1, 3, 4, 2), dtype=like.dtype, device=like.device)


class SmallConv(Function):
    """Convolution of images (K, B, I, H, W) with weights (K, O, I, S, S) as one matrix product for each client."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:  # noqa: ANN401, D102
        size = w.shape[-1]
        pad = (0, 0, padding, padding, padding, padding)
        windows = _windows(functional.pad(channels_last(x), pad), size, stride)  # (K, B, H', W', S, S, I)
        columns = windows.reshape(len(x), -1, size * size * x.shape[2])  # (K, B * H' * W', S * S * I)
        taps = w.permute(0, 3, 4, 2, 1).reshape(len(w), -1, w.shape[1])  # (K, S * S * I, O)
        ctx.save_for_backward(columns, taps)
        ctx.shape, ctx.sides, ctx.settings = x.shape, windows.shape[2:4], (size, stride, padding)
        out = _empty_channels_last(x, *windows.shape[:2], w.shape[1], *windows.shape[2:4])
        torch.bmm(columns, taps, out=channels_last(out).view(len(x), -1, w.shape[1]))  # (K, B * H' * W', O)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401, D102
        columns, taps = ctx.saved_tensors
        size, stride, padding = ctx.settings
        k, b, channels, height, width = ctx.shape
        g = channels_last(gradients[0]).view(k, columns.shape[1], -1)  # (K, B * H' * W', O)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            by_tap = torch.bmm(columns.transpose(1, 2), g).view(k, size, size, channels, -1)  # (K, S, S, I, O)
            of_w = by_tap.permute(0, 4, 3, 1, 2)  # (K, O, I, S, S)
        if ctx.needs_input_grad[1]:
            windows = torch.bmm(g, taps.transpose(1, 2)).view(k, b, *ctx.sides, size, size, channels)
            padded = _fold(windows, height + 2 * padding, width + 2 * padding, stride)
            inner = padded[:, :, padding : padding + height, padding : padding + width]  # (K, B, H, W, I)
            of_x = channels_first(inner)  # (K, B, I, H, W)
        return of_w, of_x, None, None


def _fold(windows: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Add up windows (K, B, H', W', S, S, C) into images (K, B, at least height, at least width, C).

    Blocks of stride x stride taps of neighbouring windows do not overlap, so one block of all windows is added at once.
    """
    k, b, rows, columns, size, _, channels = windows.shape
    reach = (size - 1) // stride * stride
    into = windows.new_zeros(k, b, max(height, reach + stride * rows), max(width, reach + stride * columns), channels)
    for i in range(0, size, stride):
        for j in range(0, size, stride):
            part = windows[:, :, :, :, i : i + stride, j : j + stride].transpose(3, 4)  # (K, B, H', s, W', s, C)
            block = into[:, :, i : i + stride * rows, j : j + stride * columns]
            block = block.unflatten(3, (columns, stride)).unflatten(2, (rows, stride))  # (K, B, H', s, W', s, C)
            block[:, :, :, : part.shape[3], :, : part.shape[5]] += part
    return into


class LargeConv(Function):
    """The same convolution by torch's own, client by client."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:  # noqa: ANN401, D102
        images = [_in_fast_layout(part) for part in x.unbind()]  # K times (B, I, H, W)
        ctx.save_for_backward(w, *images)
        ctx.settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
        return torch.stack([functional.conv2d(a, b, None, stride, padding) for a, b in zip(images, w, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401, D102
        w, *images = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[0], False]
        by_client = [
            _aten.convolution_backward(_in_fast_layout(g), a, b, None, *ctx.settings, wanted)
            for g, a, b in zip(gradients[0].unbind(), images, w, strict=True)
        ]
        of_x = torch.stack([one[0] for one in by_client]) if wanted[0] else None
        of_w = torch.stack([one[1] for one in by_client]) if wanted[1] else None
        return of_w, of_x, None, None


def _in_fast_layout(images: Tensor) -> Tensor:
    many = images.shape[1] > FEW_CHANNELS
    return images.contiguous(memory_format=torch.channels_last if many else torch.contiguous_format)


class StackedNorm(Function):
    """GroupNorm of (K, B, C, H, W) with weights and biases (K, C)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
    ) -> Tensor:
        k, b, channels, height, width = x.shape
        images = channels_last(x)  # (K, B, H, W, C)
        sizes = k * b, channels, height * width, groups
        flat = images.flatten(0, 1).permute(0, 3, 1, 2)  # (K * B, C, H, W), channels innermost
        plain, mean, scale = torch.native_group_norm(flat, None, None, *sizes, eps)
        normed = plain.permute(0, 2, 3, 1).reshape(k, -1, channels)  # (K, B * H * W, C)
        ctx.save_for_backward(flat, normed, mean, scale, weight)
        ctx.sizes = sizes
        out = _empty_channels_last(x, *x.shape)
        torch.addcmul(bias.unsqueeze(1), normed, weight.unsqueeze(1), out=channels_last(out).view(normed.shape))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        flat, normed, mean, scale, weight = ctx.saved_tensors
        g = channels_last(gradients[0])  # (K, B, H, W, C)
        rows = g.view(normed.shape)  # (K, B * H * W, C)
        of_bias = rows.sum(1)  # (K, C)
        of_weight = (rows * normed).sum(1)  # (K, C)
        scaled = (rows * weight.unsqueeze(1)).view(g.shape).flatten(0, 1).permute(0, 3, 1, 2)  # (K * B, C, H, W)
        wanted = [True, False, False]
        of_flat, _, _ = _aten.native_group_norm_backward(scaled, flat, mean, scale, None, *ctx.sizes, wanted)
        of_x = channels_first(of_flat.permute(0, 2, 3, 1).view(g.shape))  # (K, B, C, H, W)
        return of_x, of_weight, of_bias, None, None


class StackedRelu(Function):
    """ReLU of (K, B, C, H, W) with channels innermost; the incoming gradient is brought into that layout first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401, D102
        out = torch.relu(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401, D102
        (out,) = ctx.saved_tensors
        g = gradients[0] if gradients[0].stride(2) == 1 else channels_first(channels_last(gradients[0]))
        of_x: Tensor = _aten.threshold_backward(g, out, 0)
        return of_x


def _is_only_vmap() -> bool:
    """Return whether the `vmap` over clients is the only functorch transformation around us."""
    interpreter = peek_interpreter_stack()
    return bool(interpreter.level() == 1 and interpreter.key() == TransformType.Vmap)


def _all_clients(mapped: Tensor) -> Tensor:
    """Unwrap a tensor of one client inside `vmap` into that of all, (K, ...)."""
    dim: int = _C._functorch.maybe_get_bdim(mapped)
    whole: Tensor = _C._functorch.get_unwrapped(mapped)
    return whole.movedim(dim, 0) if dim else whole


def _apply_to_all(function: type[Function], tensors: Sequence[Tensor], *settings: object) -> Tensor:
    """From inside the `vmap` over clients, apply a function of all clients' tensors; shared ones are expanded."""
    whole = [_all_clients(t) if _is_mapped(t) else t for t in tensors]
    clients = len(whole[0])
    whole = [w if w is not t else t.expand(clients, *t.shape) for w, t in zip(whole, tensors, strict=True)]
    with temporarily_pop_interpreter_stack():
        out = function.apply(*whole, *settings)
    mapped: Tensor = _C._functorch._add_batch_dim(out, 0, 1)
    return mapped


def _is_mapped(*tensors: Tensor) -> bool:
    return all(_C._functorch.is_batchedtensor(t) for t in tensors)


def _conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    step = square(stride)
    pad = square(padding)
    covered = w.shape[-1] == w.shape[-2] and step > 0 and pad >= 0 and square(dilation) == groups == 1
    if not (_is_mapped(w) and x.dim() == 4 and covered and _is_only_vmap()):
        return functional.conv2d(x, w, bias, stride, padding, dilation, groups)
    size = w.shape[-1]
    outputs = len(x) * _output_size(x.shape[-2], size, step, pad) * _output_size(x.shape[-1], size, step, pad)
    small = outputs * size * size * w.shape[1] <= MAX_UNFOLDED
    out = _apply_to_all(SmallConv if small else LargeConv, (w, x), step, pad)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if weight is None or bias is None or x.dim() != 4 or not (_is_mapped(x) and _is_only_vmap()):
        return functional.group_norm(x, groups, weight, bias, eps)
    if not _is_mapped(weight) and x.stride(1) != 1:  # all share the weights; torch's `vmap` refuses channels innermost
        return functional.group_norm(x, groups, weight, bias, eps)
    return _apply_to_all(StackedNorm, (x, weight, bias), groups, eps)


def _relu(x: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not (_is_mapped(x) and x.dim() == 4 and x.stride(1) == 1 and _is_only_vmap()):
        return functional.relu(x, inplace)
    return _apply_to_all(StackedRelu, (x,))


def _norm_relu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> Tensor:
    normed = _group_norm(x, groups, weight, bias, eps)
    return _relu(normed if shortcut is None else normed + shortcut)


def _conv_with_input(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return _conv2d(x, weight, None, stride, weight.shape[-1] // 2), x


_OVERRIDES: Overrides = {
    functional.conv2d: _conv2d,
    conv_with_input: _conv_with_input,
    functional.group_norm: _group_norm,
    functional.relu: _relu,
    norm_relu: _norm_relu,
}


class CpuOps(OperatorOverride):
    """While this mode is active, the operations above replace torch's."""

    def __init__(self) -> None:
        super().__init__(_OVERRIDES)
