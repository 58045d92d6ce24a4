# SPDX-License-Identifier: Apache-2.0
"""Convolutions and group normalisation of many clients in one kernel, for networks that know nothing of it.

Inside `Rerouted()`, `conv2d`, `group_norm` and `norm_relu` under `vmap` are carried out by the kernels of
`engine.triton_kernels`: bfloat16 in, float32 sums inside, bfloat16 out. What the kernels do not cover goes the ordinary
way. The plain-torch meaning of each is what torch itself does with one client after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fedquit.engine.stacked.rerouting import Rerouting, Ways, first, last, single
from fedquit.models.fused import conv_keeping, norm_relu

HALVES = (torch.bfloat16, torch.float16)
CHANNELS = 16  # a kernel's tile is at least so deep
LARGEST_GROUP = 32768  # numbers of one group of one image that a program can hold


@cache
def kernels_at_hand() -> bool:
    """Whether there is a GPU that the kernels were written for, and Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _taps(w: Tensor) -> Tensor:
    """(K, O, I, S, S) as (K, S * S, I, O), dense for each client; nothing moves where it lies so already."""
    taps = w.permute(0, 3, 4, 2, 1)
    return (taps if _dense(taps) else taps.contiguous()).flatten(1, 2)


def _dense(taps: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(taps.shape[1:]), reversed(taps.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class Room:
    """A place for gradients that lies like the weights, so that a kernel writes each where the optimizer reads it.

    Nothing on the way back waits for them, so a GPU computes them beside it, on a stream of their own. Torch never sees
    them: it might add to one, or read a part of one, before it is there.
    """

    def __init__(self, weights: Tensor, extents: Mapping[int, int]) -> None:
        """The rows of all clients' weights; how many numbers each parameter has, by where it begins in a row."""
        self.weights, self.gradients, self._extents = weights, torch.zeros_like(weights), extents
        self.claimed: set[int] = set()  # where the parameters begin whose gradients kernels write
        self._beside = torch.cuda.Stream(weights.device) if weights.is_cuda else None
        self._in_use: list[Tensor] = []  # until the streams meet: memory that is let go of is written anew

    def open(self) -> None:
        """Before each step."""
        self.claimed.clear()
        self._in_use.clear()

    def places(self, *weights: Tensor) -> tuple[Tensor, ...] | None:
        """Where the gradients of these belong; None where one is not a whole parameter, or its place is given away."""
        starts = [int(w.storage_offset()) for w in weights]
        storage = self.weights.untyped_storage().data_ptr()
        if not all(
            w.untyped_storage().data_ptr() == storage and self._extents.get(start) == w[0].numel()
            for w, start in zip(weights, starts, strict=True)
        ):
            return None
        if len(set(starts)) < len(starts) or not self.claimed.isdisjoint(starts):
            return None
        self.claimed.update(starts)
        return tuple(
            self.gradients.as_strided(w.shape, w.stride(), start) for w, start in zip(weights, starts, strict=True)
        )

    @contextlib.contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """What is launched inside reads these and writes to its place; the way back goes on meanwhile."""
        if self._beside is None:
            yield
            return
        self._in_use.extend(read)
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        with torch.cuda.stream(self._beside):
            yield

    def meet(self) -> None:
        """From here on all gradients are there."""
        if self._beside is not None and self._in_use:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
            self._in_use.clear()


class StackedConv(Function):
    """Images (K, B, I, H, H) and weights (K, O, I, S, S): each client's images with its own weights.

    Where it is `keeping`, it gives the images as well, and adds what comes back for them to its own.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        x: Tensor,
        w: Tensor,
        stride: int,
        room: Room | None,
        keeping: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One kernel."""
        from fedquit.engine.cuda import triton_gemm as kernels

        images, taps = last(x), _taps(w)
        short = -images.shape[-1] % CHANNELS
        if short:  # the three colours of a first layer
            images, taps = functional.pad(images, (0, short)), functional.pad(taps, (0, 0, 0, short))
        ctx.save_for_backward(images, taps)
        ctx.stride, ctx.size, ctx.channels, ctx.room = stride, w.shape[-1], w.shape[2], room
        out = first(kernels.conv(images, taps, stride))
        return (out, x.view_as(x)) if keeping else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Two kernels: the way back to the images, and to the weights."""
        from fedquit.engine.cuda import triton_gemm as kernels

        images, taps = ctx.saved_tensors
        g, size = last(gradients[0]), ctx.size
        of_x = of_w = None
        if ctx.needs_input_grad[1]:
            places = ctx.room.places(taps) if ctx.room else None
            if places:
                with ctx.room.beside(images, g):
                    kernels.conv_weights(images, g, size, ctx.stride, into=places[0])
            else:
                found = kernels.conv_weights(images, g, size, ctx.stride)[:, :, : ctx.channels]
                of_w = found.unflatten(1, (size, size)).permute(0, 4, 3, 1, 2).to(taps.dtype)
        if ctx.needs_input_grad[0]:
            plus = last(gradients[1]) if len(gradients) > 1 else None
            if plus is not None and images.shape[-1] > ctx.channels:  # padding by nothing would be a copy
                plus = functional.pad(plus, (0, images.shape[-1] - ctx.channels))
            of_x = first(kernels.conv_back(g, taps, ctx.stride, images.shape[2], plus=plus))[:, :, : ctx.channels]
        return of_x, of_w, None, None, None


class StackedNorm(Function):
    """Group normalisation of (K, B, C, H, W) with weights (K, C), a shortcut, and ReLU."""

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
        room: Room | None,
    ) -> Tensor:
        from fedquit.engine.cuda import triton_gemm as kernels

        images, through = last(x), None if shortcut is None else last(shortcut)
        if weight.stride() != bias.stride() or weight.stride(1) != 1:
            weight, bias = weight.contiguous(), bias.contiguous()
        out, mean, scale = kernels.norm(images, weight, bias, through, groups, eps, relu=relu)
        ctx.save_for_backward(images, out, weight, bias, mean, scale)
        ctx.groups, ctx.relu, ctx.shortcut, ctx.room = groups, relu, shortcut is not None, room
        return first(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        from fedquit.engine.cuda import triton_gemm as kernels

        images, out, weight, bias, mean, scale = ctx.saved_tensors
        of_x, sums, through = kernels.norm_back(
            *(last(gradients[0]), images, out, weight, bias, mean, scale, ctx.groups),
            relu=ctx.relu,
            shortcut=ctx.shortcut,
        )
        of_weight = of_bias = None
        places = ctx.room.places(weight, bias) if ctx.room else None
        if places:
            with ctx.room.beside(sums):
                kernels.norm_sums(sums, weight.dtype, places)
        else:
            of_weight, of_bias = kernels.norm_sums(sums, weight.dtype)
        of_shortcut = None if through is None else first(through)
        return (first(of_x), of_weight, of_bias, of_shortcut, None, None, None, None)


def _together(tensors: Sequence[Tensor | None], dims: Sequence[int | None], size: int) -> list[Tensor | None]:
    """With the clients in front; what they share is repeated without a copy."""
    out: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None:
            out.append(None)
        else:
            out.append(tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0))
    return out


class Conv(Function):
    """A convolution of one client, whose meaning under `vmap` is `StackedConv`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, room: Room | None, keeping: bool) -> Tensor:  # noqa: D102
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
        room: Room | None,
        keeping: bool,
    ) -> tuple[Any, Any]:
        if in_dims[1] is None:  # the same weights for all: one large batch
            x = x.movedim(in_dims[0] or 0, 0)
            done = _applied(StackedConv, x.flatten(0, 1).unsqueeze(0), w.unsqueeze(0), stride, None)
            done = done.squeeze(0).unflatten(0, x.shape[:2])
            return ((done, x), (0, 0)) if keeping else (done, 0)
        images, weights = _together((x, w), in_dims[:2], info.batch_size)
        return _applied(StackedConv, images, weights, stride, room, keeping), (0, 0) if keeping else 0


class Norm(Function):
    """A normalisation of one client, whose meaning under `vmap` is `StackedNorm`."""

    @staticmethod
    def forward(  # noqa: D102
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
        room: Room | None,
    ) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401, D102
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:  # noqa: ANN401, D102
        tensors = _together(inputs[:4], in_dims[:4], info.batch_size)
        return _applied(StackedNorm, *tensors, *inputs[4:]), 0


def _conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    room: Room | None = None,
) -> Tensor:
    size, step = w.shape[-1], single(stride)
    plain = bias is None and not isinstance(padding, str) and single(padding) == size // 2
    if not (plain and single(dilation) == groups == 1 and _covered(x, w, step)):
        return functional.conv2d(x, w, bias, stride, padding, dilation, groups)
    if _mapped(x, w):
        return _applied(Conv, x, w, step, room, False)
    return _applied(StackedConv, x.unsqueeze(0), w.unsqueeze(0), step, None).squeeze(0)


def _conv_keeping(x: Tensor, w: Tensor, stride: int, *, room: Room | None = None) -> tuple[Tensor, Tensor]:
    if not (_covered(x, w, stride) and _mapped(x, w)):
        return _conv2d(x, w, None, stride, w.shape[-1] // 2, room=room), x
    return cast("tuple[Tensor, Tensor]", _applied(Conv, x, w, stride, room, True))


def _covered(x: Tensor, w: Tensor, stride: int) -> bool:
    """Whether the kernels do it: an image that is square, a padding that keeps its size up to the stride."""
    return (
        x.dtype == w.dtype
        and x.dtype in HALVES
        and x.dim() == 4
        and x.shape[-1] == x.shape[-2]
        and w.shape[-1] == w.shape[-2]
        and w.shape[-1] in (1, 3)
        and stride in (1, 2)
        and x.shape[-1] % stride == 0
        and w.shape[0] % CHANNELS == 0
    )


def _normed(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    shortcut: Tensor | None,
    *,
    relu: bool,
    room: Room | None,
) -> Tensor | None:
    each = x.shape[1] // groups * x.shape[-1] * x.shape[-2] if x.dim() == 4 else 0
    powers = x.dim() == 4 and all(n & (n - 1) == 0 for n in (each, x.shape[1] // groups))
    if not (x.dtype in HALVES and powers and 0 < each <= LARGEST_GROUP):
        return None
    if _mapped(x, weight, bias):
        return _applied(Norm, x, weight, bias, shortcut, groups, eps, relu, room)
    own = x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0), None if shortcut is None else shortcut.unsqueeze(0)
    return _applied(StackedNorm, *own, groups, eps, relu, None).squeeze(0)


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    room: Room | None = None,
) -> Tensor:
    done = None
    if weight is not None and bias is not None:
        done = _normed(x, groups, weight, bias, eps, None, relu=False, room=room)
    return functional.group_norm(x, groups, weight, bias, eps) if done is None else done


def _norm_relu(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    shortcut: Tensor | None = None,
    *,
    room: Room | None = None,
) -> Tensor:
    done = _normed(x, groups, weight, bias, eps, shortcut, relu=True, room=room)
    return norm_relu(x, groups, weight, bias, eps, shortcut) if done is None else done


def _mapped(*tensors: Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(t) for t in tensors)


def _applied(function: type[Function], *inputs: Any) -> Tensor:  # noqa: ANN401
    done: Tensor = function.apply(*inputs)
    return done


def _relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Never in place: what a kernel gave is a view, and is needed on the way back."""
    return functional.relu(x)


class Rerouted(Rerouting):
    """While it is active, the operations above go to the kernels."""

    def __init__(self, room: Room | None = None) -> None:
        ways: Ways = {
            functional.conv2d: _conv2d,
            conv_keeping: _conv_keeping,
            functional.group_norm: _group_norm,
            norm_relu: _norm_relu,
        }
        kernels = {operation: partial(way, room=room) for operation, way in ways.items()}
        super().__init__({**kernels, functional.relu: _relu})
