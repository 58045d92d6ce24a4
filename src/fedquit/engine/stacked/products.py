# SPDX-License-Identifier: Apache-2.0
"""Linear layers and convolutions of any network as matrix products that `vmap` makes one product of all clients.

A linear layer on (B, T, D) is one product for each client on B * T rows. For inputs that do not lie in one piece torch
would make B products, with B copies of the weights and of their gradient. The gradient of the weights sums over all
rows: where the weights are small, a GPU's product would use a few of its multiprocessors, so that the rows are divided
into parts, each a product of its own.

A convolution with each client's own weights becomes a grouped one under `vmap`. For a compiler it is written out: one
matrix product for each client on the windows of the images, or the sum of shifted images, one for each tap, where
every channel is convolved for itself. A compiler fuses the shifts; without one they would cost more than they save, so
that `convolutions` is only set for steps that are compiled.

Shapes: B images, C channels (I in, O out), images of H x W, R x S taps; N rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fedquit.engine.overrides import OperatorOverride, Overrides
from fedquit.models.fused import conv_with_input

Pair = tuple[int, int]
TILE = 128  # rows and columns of an output that one multiprocessor computes
MULTIPROCESSORS = 32  # that a client's product should keep busy
MIN_ROWS = 1024  # of a part: shorter ones cost more than they save


def parts_of(rows: int, inputs: int, outputs: int) -> int:
    """Return into how many equal parts rows are divided for the gradient of weights (inputs, outputs)."""
    tiles = -(-inputs // TILE) * -(-outputs // TILE)
    parts = 1
    while 2 * parts * tiles <= MULTIPROCESSORS and rows % (2 * parts) == 0 and rows // (2 * parts) >= MIN_ROWS:
        parts *= 2
    return parts


class RowProduct(Function):
    """The product of rows (N, D) with weights (D, O), whose gradient is summed up in parts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:  # noqa: D102
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401, D102
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401, D102
        x, w = ctx.saved_tensors
        g = gradients[0]
        of_x = g @ w.t() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None
        parts = parts_of(len(x), *w.shape)
        if parts == 1:
            return of_x, x.t() @ g
        divided = x.unflatten(0, (parts, -1)).transpose(1, 2) @ g.unflatten(0, (parts, -1))  # (parts, D, O)
        return of_x, divided.sum(0)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply (..., D) with (D, O)."""
    out: Tensor = RowProduct.apply(x.flatten(0, -2), w)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], w.shape[-1])


def _linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, on rows."""
    if x.dim() <= 2:
        return functional.linear(x, w, bias)
    out = _product(x, w.t())
    return out if bias is None else out + bias


def _conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    by_channel = groups == x.shape[1] == w.shape[0] if x.dim() == 4 else False
    if x.dim() != 4 or isinstance(padding, str) or not (groups == 1 or by_channel):
        return functional.conv2d(x, w, bias, stride, padding, dilation, groups)
    step = _pair(stride)
    (rows, columns), spread = _pair(padding), _pair(dilation)
    images = x.permute(0, 2, 3, 1)  # (B, H, W, C)
    if rows or columns:
        images = functional.pad(images, (0, 0, columns, columns, rows, rows))
    out = _by_channel(images, w, step, spread) if by_channel else _by_windows(images, w, step, spread)
    return (out if bias is None else out + bias).permute(0, 3, 1, 2)


def _pair(value: int | Sequence[int]) -> Pair:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _windows(images: Tensor, size: Pair, step: Pair, spread: Pair) -> Tensor:
    """Return the pixels that each tap meets, (B, H', W', R, S, C), a view of (B, H, W, C).

    One view of all taps, where a slice for each would give a compiler nine times the operations. The compiler also has
    to keep the images in memory then, which it else would compute anew for every tap.
    """
    height, width = (
        (side - reach * (taps - 1) - 1) // stride + 1
        for side, taps, stride, reach in zip(images.shape[1:3], size, step, spread, strict=True)
    )
    batch, down, right, channel = images.stride()
    shape = (images.shape[0], height, width, *size, images.shape[3])
    strides = (batch, step[0] * down, step[1] * right, spread[0] * down, spread[1] * right, channel)
    return images.as_strided(shape, strides)


class Windows(Function):
    """The windows (B, H', W', R, S, C) of images (B, H, W, C), at any stride.

    The gradient of the images adds the taps up in a fixed order, which that of an overlapping view would not.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, size: Pair, step: Pair, spread: Pair) -> Tensor:  # noqa: D102
        return _windows(images, size, step, spread).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Pair, Pair, Pair], output: Tensor) -> None:  # noqa: ANN401, D102
        ctx.shape = tuple(inputs[0].shape)
        ctx.sizes = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:  # noqa: ANN401, D102
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        g, (size, step, spread) = gradients[0], ctx.sizes
        batch, _, width, channels = ctx.shape
        place = torch.ops.aten.slice_backward  # a part of a tensor of zeros
        rows = []
        for r in range(size[0]):
            wide = (batch, g.shape[1], width, channels)
            reaches = [_reach(s, g.shape[2], step[1], spread[1]) for s in range(size[1])]
            row = _sum([place(g[:, :, :, r, s], wide, 2, *reach) for s, reach in enumerate(reaches)])
            rows.append(place(row, ctx.shape, 1, *_reach(r, g.shape[1], step[0], spread[0])))
        return _sum(rows), None, None, None


def _reach(tap: int, count: int, stride: int, spread: int) -> tuple[int, int, int]:
    """Return begin, end and step of the pixels that a tap meets along one side."""
    first = tap * spread
    return first, first + stride * (count - 1) + 1, stride


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class ChannelConvolution(Function):
    """Every channel of images (B, H, W, C) convolved for itself with taps (R, S, C), `down` and `right` apart.

    The stride is 1. The gradient of the images is a convolution with the taps reversed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, taps: Tensor, down: int, right: int) -> Tensor:  # noqa: D102
        return _convolved(images, taps, (down, right))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:  # noqa: ANN401, D102
        ctx.save_for_backward(*inputs[:2])
        ctx.spread = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401, D102
        images, taps = ctx.saved_tensors
        g, size, spread = gradients[0], (taps.shape[0], taps.shape[1]), ctx.spread
        of_images = of_taps = None
        if ctx.needs_input_grad[0]:
            rows, columns = spread[0] * (size[0] - 1), spread[1] * (size[1] - 1)
            padded = functional.pad(g, (0, 0, columns, columns, rows, rows))
            of_images = _convolved(padded, taps.flip(0, 1), spread)
        if ctx.needs_input_grad[1]:
            windows = _windows(images, size, (1, 1), spread)
            sums = [(g * windows[:, :, :, r, s]).sum((0, 1, 2)) for r in range(size[0]) for s in range(size[1])]
            of_taps = torch.stack(sums).view(taps.shape)
        return of_images, of_taps, None, None


def _convolved(images: Tensor, taps: Tensor, spread: Pair) -> Tensor:
    """Convolve every channel of (B, H, W, C) for itself with taps (R, S, C), at stride 1."""
    windows = _windows(images, (taps.shape[0], taps.shape[1]), (1, 1), spread)
    return (windows * taps).sum((3, 4))  # (B, H', W', C)


def _by_channel(images: Tensor, w: Tensor, step: Pair, spread: Pair) -> Tensor:
    """Convolve every channel of (B, H, W, C) for itself, with weights (C, 1, R, S)."""
    taps = w.squeeze(1).permute(1, 2, 0)  # (R, S, C)
    out: Tensor
    if step == (1, 1):
        out = ChannelConvolution.apply(images, taps, *spread)  # type: ignore[no-untyped-call]
        return out
    out = Windows.apply(images, (taps.shape[0], taps.shape[1]), step, spread)  # type: ignore[no-untyped-call]
    return (out * taps).sum((3, 4))


def _by_windows(images: Tensor, w: Tensor, step: Pair, spread: Pair) -> Tensor:
    """Convolve (B, H, W, I) with weights (O, I, R, S), as a product of the windows with the weights."""
    outputs, size = w.shape[0], (w.shape[2], w.shape[3])
    taps = w.permute(2, 3, 1, 0).reshape(-1, outputs)  # (R * S * I, O)
    windows: Tensor
    if size == step and spread == (1, 1):  # windows that do not overlap
        height, width = images.shape[1] // size[0], images.shape[2] // size[1]
        whole = images[:, : height * size[0], : width * size[1]]
        windows = whole.unflatten(2, (width, size[1])).unflatten(1, (height, size[0])).transpose(2, 3)
    else:
        windows = Windows.apply(images, size, step, spread)  # type: ignore[no-untyped-call]
    return _product(windows.flatten(3), taps)  # (B, H', W', R * S * I) to (B, H', W', O)


def _conv_with_input(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return _conv2d(x, weight, None, stride, weight.shape[-1] // 2), x


_LINEAR: Overrides = {functional.linear: _linear}
_ALL: Overrides = {
    **_LINEAR,
    functional.conv2d: _conv2d,
    conv_with_input: _conv_with_input,
}


class ProductOps(OperatorOverride):
    """While this mode is active, linear layers, and convolutions where that is asked for, are the ones above."""

    def __init__(self, *, convolutions: bool) -> None:
        super().__init__(_ALL if convolutions else _LINEAR)
