# SPDX-License-Identifier: Apache-2.0
"""Convolution and group normalisation of many clients at once, each with weights of its own, in Triton.

Clients are a dimension of the grid. A convolution is a matrix product whose left side is never written down: pixels by
(tap, channel), read from the image as it lies (channels last). `engine.stacked_ops` holds the plain-torch meaning of
every function here, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedquit.engine.cuda import triton_tma as boxes
from fedquit.engine.cuda.triton_common import Tiles, launch, new, power, stored, summed

FEW = 64  # programs that leave half of a GPU idle

# Batches of all sizes share a kernel, whatever divides them and wherever their means lie.
ANY_BATCH: dict[str, Any] = {
    "do_not_specialize": ["images"],
    "do_not_specialize_on_alignment": ["mean_at", "scale_at"],
}


@triton.jit
def _conv(
    x_at,
    w_at,
    plus_at,
    out_at,
    x_client,
    w_client,
    out_client,
    rows,
    width_in: tl.constexpr,  # of the image that is read: its height is the same
    width_out: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    w_tap,
    w_in,
    w_out,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the weights lie with the depth innermost
    PLUS: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = channels_out // COLUMNS
    column0 = (tl.program_id(0) % across) * COLUMNS
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = column0 + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    image = row // (width_out * width_out)
    top = (row // width_out) % width_out * STRIDE - PAD
    left = row % width_out * STRIDE - PAD
    x_at += client * x_client
    w_at += client * w_client
    base = (image * width_in + top) * width_in + left
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    slices: tl.constexpr = channels_in // DEPTH
    for i in range(SIZE * SIZE * slices):
        tap = i // slices
        r, s = tap // SIZE, tap % SIZE
        channel = (i % slices) * DEPTH + depth
        y, z = top + r, left + s
        inside = (row < rows) & (y >= 0) & (y < width_in) & (z >= 0) & (z < width_in)
        pixels = (base + r * width_in + s) * channels_in
        a = tl.load(x_at + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
        if TRANSPOSED:
            b = tl.trans(tl.load(w_at + tap * w_tap + column[:, None] * w_out + channel[None, :] * w_in))
        else:
            b = tl.load(w_at + tap * w_tap + channel[:, None] * w_in + column[None, :] * w_out)
        total = tl.dot(a, b, total)
    here = client * out_client + row[:, None] * channels_out + column[None, :]
    stored(total, out_at, plus_at, here, (row < rows)[:, None], PLUS)


@triton.jit
def _conv_back_strided(
    g_at,
    w_at,
    plus_at,
    out_at,
    g_client,
    w_client,
    out_client,
    rows,  # pixels of one parity
    width_g: tl.constexpr,  # of the gradient
    width: tl.constexpr,  # of the image: twice that
    channels_in: tl.constexpr,  # of the gradient
    channels_out: tl.constexpr,
    w_tap,
    w_in,
    w_out,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PLUS: tl.constexpr,
):
    """The way back through a stride of 2: pixels of each parity see only the taps that reached them."""
    client = tl.program_id(1).to(tl.int64)
    parity = tl.program_id(2)
    py, px = parity // 2, parity % 2
    across: tl.constexpr = channels_out // COLUMNS
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    half: tl.constexpr = width // 2
    image, y, z = row // (half * half), (row // half) % half * 2 + py, row % half * 2 + px
    g_at += client * g_client
    w_at += client * w_client
    first_r, first_s = (py + PAD) % 2, (px + PAD) % 2
    many_r, many_s = (SIZE - first_r + 1) // 2, (SIZE - first_s + 1) // 2
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    slices: tl.constexpr = channels_in // DEPTH
    for i in range(many_r * many_s * slices):
        at = i // slices
        r, s = first_r + 2 * (at // many_s), first_s + 2 * (at % many_s)
        channel = (i % slices) * DEPTH + depth
        oy, oz = (y + PAD - r) // 2, (z + PAD - s) // 2
        inside = (row < rows) & (y + PAD >= r) & (z + PAD >= s) & (oy < width_g) & (oz < width_g)
        pixels = ((image * width_g + oy) * width_g + oz) * channels_in
        a = tl.load(g_at + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
        tap = r * SIZE + s
        b = tl.trans(tl.load(w_at + tap * w_tap + column[:, None] * w_out + channel[None, :] * w_in))
        total = tl.dot(a, b, total)
    pixel = (image * width + y) * width + z
    here = client * out_client + pixel[:, None] * channels_out + column[None, :]
    stored(total, out_at, plus_at, here, (row < rows)[:, None], PLUS)


@triton.jit
def _conv_weights(
    x_at,
    g_at,
    out_at,
    x_client,
    g_client,
    out_client,
    out_part,
    rows,
    rows_each,
    width_in: tl.constexpr,
    width_out: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,  # input channels
    COLUMNS: tl.constexpr,  # output channels
    DEPTH: tl.constexpr,  # pixels
):
    """The gradient of the weights: for each tap, (input channels by pixels) times (pixels by output channels)."""
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    across: tl.constexpr = channels_out // COLUMNS
    down: tl.constexpr = channels_in // ROWS
    tap = tl.program_id(0) // (across * down)
    channel = (tl.program_id(0) // across) % down * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    r, s = tap // SIZE - PAD, tap % SIZE - PAD
    x_at += client * x_client
    g_at += client * g_client
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for row0 in range(part * rows_each, min((part + 1) * rows_each, rows), DEPTH):
        row = row0 + tl.arange(0, DEPTH)
        image = row // (width_out * width_out)
        y, z = (row // width_out) % width_out * STRIDE + r, row % width_out * STRIDE + s
        inside = (row < rows) & (y >= 0) & (y < width_in) & (z >= 0) & (z < width_in)
        pixels = ((image * width_in + y) * width_in + z) * channels_in
        a = tl.load(x_at + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(g_at + row[:, None] * channels_out + column[None, :], mask=(row < rows)[:, None], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    here = out_at + client * out_client + part * out_part
    here += (tap * channels_in + channel)[:, None] * channels_out + column[None, :]
    tl.store(here, total.to(out_at.dtype.element_ty))


@triton.jit(**ANY_BATCH)
def _norm(
    x_at,
    weight_at,
    bias_at,
    own_client,
    shortcut_at,
    out_at,
    mean_at,
    scale_at,
    images,
    pixels: tl.constexpr,
    channels: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
):
    """One group of one image: it fits into the registers, so it is read once."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each: tl.constexpr = channels // GROUPS
    count: tl.constexpr = pixels * each
    channel = group * each + tl.arange(0, each)
    here = (image * pixels + tl.arange(0, pixels))[:, None] * channels + channel[None, :]
    x = tl.load(x_at + here).to(tl.float32)
    mean = tl.sum(x) / count
    x -= mean
    scale = tl.rsqrt(tl.sum(x * x) / count + EPS)
    own = (image // images) * own_client + channel
    weight, bias = tl.load(weight_at + own).to(tl.float32), tl.load(bias_at + own).to(tl.float32)
    y = x * (scale * weight)[None, :] + bias[None, :]
    if SHORTCUT:
        y += tl.load(shortcut_at + here).to(tl.float32)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(out_at + here, y.to(out_at.dtype.element_ty))
    tl.store(mean_at + image * GROUPS + group, mean)
    tl.store(scale_at + image * GROUPS + group, scale)


@triton.jit
def _gradient_here(g_at, y_at, here, x, weight, bias, RELU: tl.constexpr, SHORTCUT: tl.constexpr, EVICT: tl.constexpr):
    """What comes back through ReLU: where there was no shortcut, the sign follows from the normalised x."""
    g = tl.load(g_at + here, eviction_policy=EVICT).to(tl.float32)
    if RELU:
        if SHORTCUT:
            g = tl.where(tl.load(y_at + here, eviction_policy=EVICT) > 0, g, 0.0)
        else:
            g = tl.where(x * weight[None, :] + bias[None, :] > 0, g, 0.0)
    return g


@triton.jit(**ANY_BATCH)
def _norm_back(
    g_at,
    x_at,
    y_at,
    weight_at,
    bias_at,
    own_client,
    mean_at,
    scale_at,
    out_at,
    shortcut_at,
    sums_at,
    images,
    pixels: tl.constexpr,
    channels: tl.constexpr,
    GROUPS: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Twice over one group of one image, the second time from the cache: first the sums, then the gradient."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each: tl.constexpr = channels // GROUPS
    count: tl.constexpr = pixels * each
    channel = group * each + tl.arange(0, each)
    first = (image * pixels + tl.arange(0, CHUNK))[:, None] * channels + channel[None, :]
    mean, scale = tl.load(mean_at + image * GROUPS + group), tl.load(scale_at + image * GROUPS + group)
    own = (image // images) * own_client + channel
    weight, bias = tl.load(weight_at + own).to(tl.float32), tl.load(bias_at + own).to(tl.float32)
    all_g, all_gx = tl.zeros((CHUNK, each), tl.float32), tl.zeros((CHUNK, each), tl.float32)
    for start in range(0, pixels, CHUNK):
        here = first + start * channels
        x = (tl.load(x_at + here, eviction_policy="evict_last").to(tl.float32) - mean) * scale
        g = _gradient_here(g_at, y_at, here, x, weight, bias, RELU, SHORTCUT, "evict_last")
        all_g += g
        all_gx += g * x
    sum_g, sum_gx = tl.sum(all_g, axis=0), tl.sum(all_gx, axis=0)  # once: threads meet for it
    partial = sums_at + image * 2 * channels + channel
    tl.store(partial, sum_gx)
    tl.store(partial + channels, sum_g)
    along, total = tl.sum(sum_gx * weight) / count, tl.sum(sum_g * weight) / count
    for start in range(0, pixels, CHUNK):
        here = first + start * channels
        x = (tl.load(x_at + here, eviction_policy="evict_first").to(tl.float32) - mean) * scale
        g = _gradient_here(g_at, y_at, here, x, weight, bias, RELU, SHORTCUT, "evict_first")
        if SHORTCUT:
            tl.store(shortcut_at + here, g.to(shortcut_at.dtype.element_ty))
        back = (g * weight[None, :] - total - x * along) * scale
        tl.store(out_at + here, back.to(out_at.dtype.element_ty))


@triton.jit(**ANY_BATCH)
def _norm_sums(sums_at, weight_at, bias_at, out_client, images, channels: tl.constexpr, MANY: tl.constexpr):
    """The gradients of weights and biases: the sums of a client's images."""
    client, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * 64 + tl.arange(0, 64)
    of_weight, of_bias = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for start in range(0, images, MANY):
        image = start + tl.arange(0, MANY)
        inside = (image < images)[:, None] & (channel < channels)[None, :]
        here = sums_at + ((client * images + image) * 2 * channels)[:, None] + channel[None, :]
        of_weight += tl.sum(tl.load(here, mask=inside, other=0.0), axis=0)
        of_bias += tl.sum(tl.load(here + channels, mask=inside, other=0.0), axis=0)
    into = client * out_client + channel
    tl.store(weight_at + into, of_weight.to(weight_at.dtype.element_ty), mask=channel < channels)
    tl.store(bias_at + into, of_bias.to(bias_at.dtype.element_ty), mask=channel < channels)


def _fitting(tiles: Tiles | None, rows: int, columns: int, depth: int, clients: int) -> Tiles:
    """Large tiles read less for each product; small ones keep a GPU busy where there is little to do."""
    if tiles is None:
        wide = power(columns, 256 if columns >= 512 else 128)
        few = triton.cdiv(rows, 128) * (columns // wide) * clients < FEW
        tiles = Tiles(64, 64, 128, 4, 3) if few else Tiles(128, wide, 64, 8 if wide >= 128 else 4, 3)
    return Tiles(tiles.rows, power(columns, tiles.columns), power(depth, tiles.depth), tiles.warps, tiles.stages)


def conv(x: Tensor, w: Tensor, stride: int, tiles: Tiles | None = None) -> Tensor:
    """Images (K, B, H, H, I) by weights (K, taps, I, O); as much padding as keeps the size at stride 1."""
    clients, batch, width, _, channels = x.shape
    _, taps, _, out_channels = w.shape
    size = 1 if taps == 1 else 3
    if tiles is None and boxes.fits(x, w, size, stride, out_channels):
        return boxes.conv(x, w)
    pad, width_out = size // 2, (width - 1) // stride + 1
    out = new(clients, batch, width_out, width_out, out_channels, dtype=x.dtype, device=x.device)
    rows = batch * width_out * width_out
    t = _fitting(tiles, rows, out_channels, channels, clients)
    grid = (triton.cdiv(rows, t.rows) * (out_channels // t.columns), clients)
    launch(
        _conv,
        grid,
        *(x, w, x, out, x.stride(0), w.stride(0), out.stride(0), rows, width, width_out, channels, out_channels),
        *(w.stride(1), w.stride(2), w.stride(3)),
        SIZE=size,
        STRIDE=stride,
        PAD=pad,
        TRANSPOSED=False,
        PLUS=False,
        ROWS=t.rows,
        COLUMNS=t.columns,
        DEPTH=t.depth,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def conv_back(
    g: Tensor, w: Tensor, stride: int, width: int, tiles: Tiles | None = None, plus: Tensor | None = None
) -> Tensor:
    """The gradient of the images (K, B, H, H, I) from that of the output, (K, B, H', H', O); plus another."""
    clients, batch, width_g, _, channels = g.shape
    _, taps, out_channels, _ = w.shape  # I of the convolution is what comes out here
    size = 1 if taps == 1 else 3
    if tiles is None and boxes.fits(g, w, size, stride, out_channels):
        return boxes.conv(g, w, back=True, plus=plus)
    if tiles is None and boxes.strided_fits(g, w, size, stride):
        return boxes.conv_back_strided(g, w, plus=plus)
    out = new(clients, batch, width, width, out_channels, dtype=g.dtype, device=g.device)
    rows = batch * width * width // (stride * stride)
    t = _fitting(tiles, rows, out_channels, channels, clients)
    tiled = {"ROWS": t.rows, "COLUMNS": t.columns, "DEPTH": t.depth, "num_warps": t.warps, "num_stages": t.stages}
    tiled["PLUS"], more = plus is not None, g if plus is None else plus
    blocks = triton.cdiv(rows, t.rows) * (out_channels // t.columns)
    places = (g.stride(0), w.stride(0), out.stride(0), rows)
    if stride == 1:  # a convolution with the taps in reverse order
        last = w[:, taps - 1 :]  # where the first tap lies when one goes backwards
        launch(
            _conv,
            (blocks, clients),
            *(g, last, more, out, *places, width_g, width, channels, out_channels),
            *(-w.stride(1), w.stride(3), w.stride(2)),
            **{"SIZE": size, "STRIDE": 1, "PAD": size // 2, "TRANSPOSED": True, **tiled},
        )
    else:
        launch(
            _conv_back_strided,
            (blocks, clients, 4),
            *(g, w, more, out, *places, width_g, width, channels, out_channels, w.stride(1), w.stride(3), w.stride(2)),
            **{"SIZE": size, "PAD": size // 2, **tiled},
        )
    return out


def conv_weights(
    x: Tensor, g: Tensor, size: int, stride: int, tiles: Tiles | None = None, split: int = 0, into: Tensor | None = None
) -> Tensor:
    """The gradient of the weights (K, taps, I, O), in float32; or written to where `into` says."""
    if tiles is None and not split and boxes.weights_fit(x, g, size, stride):
        return boxes.conv_weights(x, g, into)
    clients, batch, width, _, channels = x.shape
    width_out, out_channels = g.shape[2], g.shape[4]
    rows = batch * width_out * width_out
    tiles = tiles or Tiles(min(channels, 128), min(out_channels, 128), 64, 4, 3)
    high, wide = power(channels, tiles.rows), power(out_channels, tiles.columns)
    blocks = size * size * (channels // high) * (out_channels // wide)
    split = split or max(1, min(rows // 1024, -(-1056 // (blocks * clients))))
    rows_each = triton.cdiv(triton.cdiv(rows, split), tiles.depth) * tiles.depth
    shape = size * size, channels, out_channels
    out = new(clients, *shape, dtype=torch.float32, device=x.device) if into is None else into
    parts = new(clients, split, *shape, dtype=torch.float32, device=x.device) if split > 1 else out.unsqueeze(1)
    launch(
        _conv_weights,
        (blocks, clients, split),
        *(x, g, parts, x.stride(0), g.stride(0), parts.stride(0), parts.stride(1), rows, rows_each),
        *(width, width_out, channels, out_channels),
        SIZE=size,
        STRIDE=stride,
        PAD=size // 2,
        ROWS=high,
        COLUMNS=wide,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if split > 1:
        summed(parts, out)
    return out


def _warps(pixels: int, channels: int) -> int:
    return max(1, min(16, pixels * channels // 2048))


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, *, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalisation of (K, B, H, W, C), plus a shortcut, rectified; also the groups' means and scales.

    Weights and biases (K, C) lie anywhere, but a client's are dense, and both in the same way.
    """
    clients, batch, high, wide, channels = x.shape
    out = new(*x.shape, dtype=x.dtype, device=x.device)
    mean, scale = new(2, clients * batch, groups, dtype=torch.float32, device=x.device)
    through = x if shortcut is None else shortcut
    launch(
        _norm,
        (clients * batch, groups),
        *(x, weight, bias, weight.stride(0), through, out, mean, scale, batch, high * wide, channels),
        GROUPS=groups,
        EPS=eps,
        RELU=relu,
        SHORTCUT=shortcut is not None,
        num_warps=_warps(high * wide, channels // groups),
    )
    return out, mean, scale


def norm_back(
    g: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    *,
    relu: bool,
    shortcut: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the images and of the shortcut; between them, what those of weights and biases are sums of."""
    clients, batch, high, wide, channels = x.shape
    out = new(*x.shape, dtype=x.dtype, device=x.device)
    through = new(*g.shape, dtype=g.dtype, device=g.device) if shortcut else None
    sums = new(clients, batch, 2, channels, dtype=torch.float32, device=x.device)
    pixels, each = high * wide, channels // groups
    count = pixels * each
    warps = max(1, min(16, count // (2048 if count >= 16384 else 4096)))
    chunk = max(1, min(pixels, 1024 * warps // each))
    launch(
        _norm_back,
        (clients * batch, groups),
        *(g, x, y, weight, bias, weight.stride(0), mean, scale, out, g if through is None else through, sums),
        *(batch, pixels, channels),
        GROUPS=groups,
        RELU=relu,
        SHORTCUT=shortcut,
        CHUNK=chunk,
        num_warps=warps,
    )
    return out, sums, through


def norm_sums(sums: Tensor, dtype: torch.dtype, into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The gradients of the weights and the biases (K, C) from what `norm_back` found; or `into` a place."""
    clients, batch, _, channels = sums.shape
    of_weight, of_bias = into or new(2, clients, channels, dtype=dtype, device=sums.device)
    launch(
        _norm_sums,
        (clients, triton.cdiv(channels, 64)),
        *(sums, of_weight, of_bias, of_weight.stride(0), batch, channels),
        MANY=32,
        num_warps=4,
    )
    return of_weight, of_bias


@triton.jit
def _sgd(rows_at, low_at, g_at, lr_at, count, DECAY: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    p = tl.load(rows_at + place, mask=inside)
    g = tl.load(g_at + place, mask=inside).to(tl.float32)
    p -= tl.load(lr_at).to(tl.float32) * (g + DECAY * p)
    tl.store(rows_at + place, p, mask=inside)
    tl.store(low_at + place, p.to(low_at.dtype.element_ty), mask=inside)


def sgd_(rows: Tensor, low: Tensor, gradient: Tensor, lr: Tensor, weight_decay: float) -> None:
    """W <- w - lr * (gradient + weight_decay * w), and the copy in lower precision, all in one pass."""
    count = rows.numel()
    grid = (triton.cdiv(count, 2048),)
    launch(_sgd, grid, rows, low, gradient, lr, count, DECAY=weight_decay, BLOCK=2048, num_warps=8)
