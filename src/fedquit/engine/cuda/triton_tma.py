# SPDX-License-Identifier: Apache-2.0
"""Convolutions of 3x3 for GPUs that copy boxes of a tensor by themselves: Hopper, the one these were tried on.

A tile of pixels is a box of images, rows and columns. For each tap the box is moved by a pixel, and what lies outside
an image is read as zero, so a kernel computes no addresses and masks nothing. Images are the product's right side:
what lies in more than two dimensions would reach the left one through registers only. A gradient of the weights moves
the images sideways and the gradient up and down, so that one box of images serves three taps.

`engine.triton_kernels` has the same for every GPU and every convolution; its tests hold both to plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedquit.engine.cuda.triton_common import Tiles, launch, new, power, stored, summed

CHANNELS = 64  # a box is so deep: 128 bytes, which the tensor cores read without conflicts
PIXELS = 64  # of one step of the weights' gradient
ENOUGH, SOME = 96, 40  # programs of 128 by 128 that keep a GPU busy, and half of it
PROGRAMS = 132  # that work on the weights' gradient: one on each of a GPU's processors
BLOCKS = 6  # of pixels, the fewest that a program of its own pays for


@triton.jit
def _tile(
    width: tl.constexpr, channels_out: tl.constexpr, IMAGES: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr
):
    """What a program computes: its first output channel, its number among the boxes, and where that box begins."""
    across: tl.constexpr = channels_out // COLUMNS
    tall: tl.constexpr = width // HIGH
    block = tl.program_id(0) // across
    return tl.program_id(0) % across * COLUMNS, block, block // tall * IMAGES, block % tall * HIGH


@triton.jit
def _conv(
    x,
    w,
    plus_at,
    out_at,
    out_client,
    rows,
    width: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    IMAGES: tl.constexpr,
    HIGH: tl.constexpr,
    COLUMNS: tl.constexpr,  # output channels
    DEPTH: tl.constexpr,  # input channels
    BACK: tl.constexpr,  # taps in reverse order, weights (tap, output channels, input channels)
    PLUS: tl.constexpr,
):
    client = tl.program_id(1)
    ROWS: tl.constexpr = IMAGES * HIGH * width
    column, block, image, top = _tile(width, channels_out, IMAGES, HIGH, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    slices: tl.constexpr = channels_in // DEPTH
    for i in range(9 * slices):
        tap, channel = i // slices, i % slices * DEPTH
        if BACK:
            a = w.load([client, (8 - tap) * channels_out + column, channel]).reshape(COLUMNS, DEPTH)
        else:
            a = w.load([client, tap * channels_in + channel, column]).reshape(DEPTH, COLUMNS).T
        b = x.load([client, image, top + tap // 3 - 1, tap % 3 - 1, channel]).reshape(ROWS, DEPTH)
        total = tl.dot(a, b.T, total)
    row = block * ROWS + tl.arange(0, ROWS)
    here = client.to(tl.int64) * out_client + row[:, None] * channels_out + column + tl.arange(0, COLUMNS)[None, :]
    stored(total.T, out_at, plus_at, here, (row < rows)[:, None], PLUS)


@triton.jit(do_not_specialize=["images"])
def _conv_back_strided(
    g,
    w,
    plus_at,
    out_at,
    out_client,
    images,
    width: tl.constexpr,  # of the gradient: half of the image's
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    IMAGES: tl.constexpr,
    HIGH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PLUS: tl.constexpr,
):
    """The way back through a stride of 2: pixels of each parity see only the taps that reached them."""
    client = tl.program_id(1)
    odd_y, odd_x = 1 - tl.program_id(2) // 2, 1 - tl.program_id(2) % 2  # those with the most taps first
    ROWS: tl.constexpr = IMAGES * HIGH * width
    column, _, image, top = _tile(width, channels_out, IMAGES, HIGH, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    slices: tl.constexpr = channels_in // DEPTH
    for i in range((1 + odd_y) * (1 + odd_x) * slices):
        tap, channel = i // slices, i % slices * DEPTH
        down, right = tap // (1 + odd_x), tap % (1 + odd_x)  # an odd pixel was seen from here, and from one further on
        r, s = 1 + odd_y - 2 * down, 1 + odd_x - 2 * right
        a = w.load([client, (3 * r + s) * channels_out + column, channel]).reshape(COLUMNS, DEPTH)
        b = g.load([client, image, top + down, right, channel]).reshape(ROWS, DEPTH)
        total = tl.dot(a, b.T, total)
    row = tl.arange(0, ROWS)
    of_image, y, x = row // (HIGH * width), row // width % HIGH, row % width
    pixel = ((image + of_image) * 2 * width + 2 * (top + y) + odd_y) * 2 * width + 2 * x + odd_x
    here = client.to(tl.int64) * out_client + pixel[:, None] * channels_out + column + tl.arange(0, COLUMNS)[None, :]
    stored(total.T, out_at, plus_at, here, (image + of_image < images)[:, None], PLUS)


@triton.jit(do_not_specialize=["images", "blocks_each"])
def _conv_weights(
    x,
    g,
    out_at,
    out_client,
    out_part,
    images,
    blocks_each,
    width: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,  # output channels
    COLUMNS: tl.constexpr,  # input channels
):
    """A column of three taps: for each, (output channels by pixels) times (pixels by input channels)."""
    client, part = tl.program_id(1), tl.program_id(2)
    DEPTH: tl.constexpr = HIGH * width
    across: tl.constexpr = channels_in // COLUMNS
    down: tl.constexpr = channels_out // ROWS
    tall: tl.constexpr = width // HIGH
    s = tl.program_id(0) // (across * down)
    row = tl.program_id(0) // across % down * ROWS
    column = tl.program_id(0) % across * COLUMNS
    above = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    level = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    below = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(part * blocks_each, tl.minimum((part + 1) * blocks_each, images * tall)):
        image, top = block // tall, block % tall * HIGH
        b = x.load([client, image, top, s - 1, column]).reshape(DEPTH, COLUMNS)
        under = g.load([client, image, (top + 1) * width, row]).reshape(DEPTH, ROWS)
        above = tl.dot(under.T, b, above)
        same = g.load([client, image, top * width, row]).reshape(DEPTH, ROWS)
        level = tl.dot(same.T, b, level)
        over = g.load([client, image, (top - 1) * width, row]).reshape(DEPTH, ROWS)
        below = tl.dot(over.T, b, below)
    tap: tl.constexpr = channels_in * channels_out
    here = out_at + client.to(tl.int64) * out_client + part * out_part + s * tap
    here += (column + tl.arange(0, COLUMNS))[:, None] * channels_out + row + tl.arange(0, ROWS)[None, :]
    tl.store(here, above.T.to(out_at.dtype.element_ty))
    tl.store(here + 3 * tap, level.T.to(out_at.dtype.element_ty))
    tl.store(here + 6 * tap, below.T.to(out_at.dtype.element_ty))


def fits(x: Tensor, other: Tensor, size: int, stride: int, out_channels: int) -> bool:
    """Whether images (K, B, H, H, I), and weights or a gradient, can be read as boxes, and the GPU does it."""
    return size == 3 and stride == 1 and _readable(x, other, out_channels)


def strided_fits(g: Tensor, w: Tensor, size: int, stride: int) -> bool:
    """The same for the way back through a stride of 2."""
    return size == 3 and stride == 2 and _readable(g, w, w.shape[2])


def _readable(x: Tensor, other: Tensor, out_channels: int) -> bool:
    width = x.shape[2]
    return (
        width & (width - 1) == 0
        and 4 <= width <= 64
        and x.shape[-1] % CHANNELS == out_channels % CHANNELS == 0
        and all(_aligned(t) for t in (x, other))
        and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] == 9)
    )


def _aligned(t: Tensor) -> bool:
    return t.numel() > 0 and all(at % 16 == 0 for at in (t.data_ptr(), *(s * t.itemsize for s in t.stride()[:-1])))


def weights_fit(x: Tensor, g: Tensor, size: int, stride: int) -> bool:
    """The same for the gradient of the weights, which takes whole rows of one image at a time."""
    return fits(x, g, size, stride, g.shape[-1]) and x.shape[2] ** 2 >= PIXELS


def conv(x: Tensor, w: Tensor, tiles: Tiles | None = None, *, back: bool = False, plus: Tensor | None = None) -> Tensor:
    """Images (K, B, H, H, I) by weights (K, 9, I, O); or back, from a gradient (K, B, H, H, O) to the images'.

    To that, another may be added.
    """
    clients, batch, width, _, channels = x.shape
    out_channels = w.shape[2] if back else w.shape[3]
    out = new(clients, batch, width, width, out_channels, dtype=x.dtype, device=x.device)
    rows = batch * width * width
    t = tiles or _tiles(rows, channels, out_channels, clients)
    images, high = _box(width, t.columns)
    launch(
        _conv,
        (triton.cdiv(batch, images) * (width // high) * (out_channels // t.rows), clients),
        *(_boxes(x, images, high, t.depth), _taps(w, *((t.rows, t.depth) if back else (t.depth, t.rows)))),
        *(x if plus is None else plus, out, out.stride(0), rows, width, channels, out_channels),
        IMAGES=images,
        HIGH=high,
        COLUMNS=t.rows,
        DEPTH=t.depth,
        BACK=back,
        PLUS=plus is not None,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def conv_back_strided(g: Tensor, w: Tensor, tiles: Tiles | None = None, plus: Tensor | None = None) -> Tensor:
    """The gradient of the images (K, B, 2H, 2H, I) from that of the output, (K, B, H, H, O), plus another."""
    clients, batch, width, _, channels = g.shape
    out_channels = w.shape[2]
    out = new(clients, batch, 2 * width, 2 * width, out_channels, dtype=g.dtype, device=g.device)
    t = tiles or _tiles(batch * width * width, channels, out_channels, 4 * clients)
    images, high = _box(width, t.columns)
    launch(
        _conv_back_strided,
        (triton.cdiv(batch, images) * (width // high) * (out_channels // t.rows), clients, 4),
        *(_boxes(g, images, high, t.depth), _taps(w, t.rows, t.depth)),
        *(g if plus is None else plus, out, out.stride(0), batch, width, channels, out_channels),
        IMAGES=images,
        HIGH=high,
        COLUMNS=t.rows,
        DEPTH=t.depth,
        PLUS=plus is not None,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def conv_weights(x: Tensor, g: Tensor, into: Tensor | None = None, split: int = 0) -> Tensor:
    """The gradient of the weights (K, 9, I, O), in float32; or written to where `into` says."""
    clients, batch, width, _, channels = x.shape
    out_channels = g.shape[4]
    high, columns = PIXELS // width, power(channels, 128)
    blocks, tiles = batch * (width // high), 3 * (out_channels // CHANNELS) * (channels // columns)
    programs = PROGRAMS * (2 if columns == CHANNELS else 1)  # two of the small ones fit on a processor
    split = split or max(1, min(programs // (tiles * clients), blocks // BLOCKS))
    each = triton.cdiv(blocks, split)
    split = triton.cdiv(blocks, each)
    shape = 9, channels, out_channels
    out = new(clients, *shape, dtype=torch.float32, device=x.device) if into is None else into
    parts = new(clients, split, *shape, dtype=torch.float32, device=x.device) if split > 1 else out.unsqueeze(1)
    flat = g.flatten(2, 3)
    launch(
        _conv_weights,
        (tiles, clients, split),
        _boxes(x, 1, high, columns),
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, PIXELS, CHANNELS]),
        *(parts, parts.stride(0), parts.stride(1), batch, each, width, channels, out_channels),
        HIGH=high,
        ROWS=CHANNELS,
        COLUMNS=columns,
        num_warps=4,
        num_stages=3,
    )
    if split > 1:
        summed(parts, out)
    return out


def _tiles(rows: int, channels: int, out_channels: int, clients: int) -> Tiles:
    """The largest that still keep all processors busy: a small tile reads more for each product."""
    if power(out_channels, 128) < 128:
        return Tiles(64, 128, 64, 4, 3)
    programs = triton.cdiv(rows, 128) * (out_channels // 128) * clients
    if programs >= ENOUGH:
        return Tiles(128, 128, 64, 8, 3)
    deep = power(channels, 128)
    return Tiles(64, 128, deep, 4, 3) if programs >= SOME else Tiles(64, 64, deep, 4, 4)


def _box(width: int, pixels: int) -> tuple[int, int]:
    """So many pixels as whole rows of one image, or as whole images: how many images, and rows of each."""
    high = min(width, pixels // width)
    return pixels // (high * width), high


def _boxes(x: Tensor, images: int, high: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, images, high, x.shape[3], depth])


def _taps(w: Tensor, high: int, wide: int) -> TensorDescriptor:
    """Weights (K, 9, I, O), where tap and input channel are one dimension."""
    shape, stride = [w.shape[0], 9 * w.shape[2], w.shape[3]], [w.stride(0), w.shape[3], 1]
    return TensorDescriptor(w, shape, stride, [1, high, wide])
