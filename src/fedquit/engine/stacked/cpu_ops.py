# SPDX-License-Identifier: Apache-2.0
"""Convolutions, group normalisation and ReLU of many clients on a CPU, for networks that know nothing of it.

What `vmap` makes of a convolution with each client's own weights, a grouped one, is slow on a CPU. Inside `Batched()`
small images are laid out as matrices and multiplied, all clients in one product; larger ones go to torch's own
convolution, client by client. Normalisation goes to torch's kernel for channels that lie innermost. What these do not
cover goes the ordinary way. `tests/engine/test_cpu_ops.py` compares each with what torch does for one client.
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

from fedquit.engine.stacked.rerouting import Rerouting, Ways, first, last, single
from fedquit.models.fused import conv_keeping, norm_relu

SMALL = 1 << 16  # numbers of one client's images, laid out as a matrix: beyond that, copying costs more than it saves
FEW_CHANNELS = 4  # so many or fewer gain nothing from lying innermost

_aten = torch.ops.aten


def _side(size: int, taps: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - taps) // stride + 1


def _windows(padded: Tensor, size: int, stride: int) -> Tensor:
    """What each output sees of (K, B, H, W, C): a view (K, B, H', W', size, size, C)."""
    k, b, high, wide, channels = padded.shape
    sides = _side(high, size, stride, 0), _side(wide, size, stride, 0)
    s = padded.stride()
    shape = (k, b, *sides, size, size, channels)
    return padded.as_strided(shape, (s[0], s[1], s[2] * stride, s[3] * stride, s[2], s[3], s[4]))


def _laid_last(like: Tensor, *shape: int) -> Tensor:
    """Room for (K, B, C, H, W) with channels innermost: no view of anything, so that a network may write into it."""
    return torch.empty_permuted(shape, (0, 1, 3, 4, 2), dtype=like.dtype, device=like.device)


class SmallConv(Function):
    """Images (K, B, I, H, W) and weights (K, O, I, S, S), as one product of matrices for each client."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:  # noqa: ANN401, D102
        size, pad = w.shape[-1], (0, 0, padding, padding, padding, padding)
        windows = _windows(functional.pad(last(x), pad), size, stride)
        columns = windows.reshape(len(x), -1, size * size * x.shape[2])
        taps = w.permute(0, 3, 4, 2, 1).reshape(len(w), -1, w.shape[1])
        ctx.save_for_backward(columns, taps)
        ctx.shape, ctx.sides, ctx.settings = x.shape, windows.shape[2:4], (size, stride, padding)
        out = _laid_last(x, *windows.shape[:2], w.shape[1], *windows.shape[2:4])
        torch.bmm(columns, taps, out=last(out).view(len(x), -1, w.shape[1]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401, D102
        columns, taps = ctx.saved_tensors
        size, stride, padding = ctx.settings
        k, b, channels, high, wide = ctx.shape
        g = last(gradients[0]).view(k, columns.shape[1], -1)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            of_w = torch.bmm(columns.transpose(1, 2), g).view(k, size, size, channels, -1).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            seen = torch.bmm(g, taps.transpose(1, 2)).view(k, b, *ctx.sides, size, size, channels)
            padded = _gathered(seen, high + 2 * padding, wide + 2 * padding, stride)
            of_x = first(padded[:, :, padding : padding + high, padding : padding + wide])
        return of_w, of_x, None, None


def _gathered(seen: Tensor, high: int, wide: int, stride: int) -> Tensor:
    """Add up what the windows say of each pixel; so many taps as a stride is long never meet, and go together."""
    k, b, rows, columns, size, _, channels = seen.shape
    last = (size - 1) // stride * stride
    into = seen.new_zeros(k, b, max(high, last + stride * rows), max(wide, last + stride * columns), channels)
    for i in range(0, size, stride):
        for j in range(0, size, stride):
            part = seen[:, :, :, :, i : i + stride, j : j + stride].transpose(3, 4)
            block = into[:, :, i : i + stride * rows, j : j + stride * columns]
            block = block.unflatten(3, (columns, stride)).unflatten(2, (rows, stride))
            block[:, :, :, : part.shape[3], :, : part.shape[5]] += part
    return into


class LargeConv(Function):
    """The same, client by client."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:  # noqa: ANN401, D102
        images = [_laid(part) for part in x.unbind()]
        ctx.save_for_backward(w, *images)
        ctx.settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
        return torch.stack([functional.conv2d(a, b, None, stride, padding) for a, b in zip(images, w, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401, D102
        w, *images = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[0], False]
        found = [
            _aten.convolution_backward(_laid(g), a, b, None, *ctx.settings, wanted)
            for g, a, b in zip(gradients[0].unbind(), images, w, strict=True)
        ]
        of_x, of_w = (torch.stack([f[i] for f in found]) if wanted[i] else None for i in (0, 1))
        return of_w, of_x, None, None


def _laid(images: Tensor) -> Tensor:
    many = images.shape[1] > FEW_CHANNELS
    return images.contiguous(memory_format=torch.channels_last if many else torch.contiguous_format)


class StackedNorm(Function):
    """Group normalisation of (K, B, C, H, W) with weights (K, C)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
    ) -> Tensor:
        k, b, channels, high, wide = x.shape
        images = last(x)
        sizes = k * b, channels, high * wide, groups
        flat = images.flatten(0, 1).permute(0, 3, 1, 2)
        plain, mean, scale = torch.native_group_norm(flat, None, None, *sizes, eps)
        normed = plain.permute(0, 2, 3, 1).reshape(k, -1, channels)
        ctx.save_for_backward(flat, normed, mean, scale, weight)
        ctx.sizes = sizes
        out = _laid_last(x, *x.shape)
        torch.addcmul(bias.unsqueeze(1), normed, weight.unsqueeze(1), out=last(out).view(normed.shape))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        flat, normed, mean, scale, weight = ctx.saved_tensors
        g = last(gradients[0])
        rows = g.view(normed.shape)
        of_bias, of_weight = rows.sum(1), (rows * normed).sum(1)
        onwards = (rows * weight.unsqueeze(1)).view(g.shape).flatten(0, 1).permute(0, 3, 1, 2)
        found = _aten.native_group_norm_backward(onwards, flat, mean, scale, None, *ctx.sizes, [True, False, False])
        of_x = first(found[0].permute(0, 2, 3, 1).view(g.shape))
        return of_x, of_weight, of_bias, None, None


class StackedRelu(Function):
    """ReLU of (K, B, C, H, W) with channels innermost; what comes back may lie otherwise, and is laid out so first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401, D102
        out = torch.relu(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401, D102
        (out,) = ctx.saved_tensors
        g = gradients[0] if gradients[0].stride(2) == 1 else first(last(gradients[0]))
        found: Tensor = _aten.threshold_backward(g, out, 0)
        return found


def _outermost() -> Any:  # noqa: ANN401 - torch gives it no name
    """The `vmap` around us, where it is the only transformation; else None."""
    found = peek_interpreter_stack()
    return found if found.level() == 1 and found.key() == TransformType.Vmap else None


def _own(mapped: Tensor) -> Tensor:
    """All clients' tensors, the clients in front."""
    dim: int = _C._functorch.maybe_get_bdim(mapped)
    whole: Tensor = _C._functorch.get_unwrapped(mapped)
    return whole.movedim(dim, 0) if dim else whole


def _one_client(function: type[Function], tensors: Sequence[Tensor], *settings: object) -> Tensor:
    """A function of many clients' tensors, seen from inside the `vmap` over them; what they share is repeated."""
    own = [_own(t) if _mapped(t) else t for t in tensors]
    own = [o if o is not t else t.expand(len(own[0]), *t.shape) for o, t in zip(own, tensors, strict=True)]
    with temporarily_pop_interpreter_stack():
        done = function.apply(*own, *settings)
    found: Tensor = _C._functorch._add_batch_dim(done, 0, 1)
    return found


def _mapped(*tensors: Tensor) -> bool:
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
    step, pad = single(stride), single(padding)
    square = w.shape[-1] == w.shape[-2] and step > 0 and pad >= 0
    if not (_mapped(w) and x.dim() == 4 and square and single(dilation) == groups == 1 and _outermost()):
        return functional.conv2d(x, w, bias, stride, padding, dilation, groups)
    size = w.shape[-1]
    outputs = len(x) * _side(x.shape[-2], size, step, pad) * _side(x.shape[-1], size, step, pad)
    small = outputs * size * size * w.shape[1] <= SMALL
    done = _one_client(SmallConv if small else LargeConv, (w, x), step, pad)
    return done if bias is None else done + bias.view(-1, 1, 1)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if weight is None or bias is None or x.dim() != 4 or not (_mapped(x, weight) and _outermost()):
        return functional.group_norm(x, groups, weight, bias, eps)
    return _one_client(StackedNorm, (x, weight, bias), groups, eps)


def _relu(x: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not (_mapped(x) and x.dim() == 4 and x.stride(1) == 1 and _outermost()):
        return functional.relu(x, inplace)
    return _one_client(StackedRelu, (x,))


def _norm_relu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> Tensor:
    normed = _group_norm(x, groups, weight, bias, eps)
    return _relu(normed if shortcut is None else normed + shortcut)


def _conv_keeping(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return _conv2d(x, weight, None, stride, weight.shape[-1] // 2), x


_WAYS: Ways = {
    functional.conv2d: _conv2d,
    conv_keeping: _conv_keeping,
    functional.group_norm: _group_norm,
    functional.relu: _relu,
    norm_relu: _norm_relu,
}


class Batched(Rerouting):
    """While it is active, the operations above take their own way."""

    def __init__(self) -> None:
        super().__init__(_WAYS)
