# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K clients, each with weights of its own, as matrix products (implicit GEMM) in Triton.

Operation: out[k, p, o] = sum over (tap, i) of x[k, p moved by tap, i] * w[k, tap, i, o], and its two gradients. The
matrix of pixels by (tap, channel) is never written to memory: each program reads its tile from the image.
Shapes: images (K, B, H, H, I) in bfloat16, channels last; weights (K, S * S, I, O); outputs (K, B, H', H', O). S is 1
or 3, the stride 1 or 2, the padding S // 2. Sums are in float32.
Tiling: the grid is (output tiles, K clients, parts). A program computes an M x N tile of one client's product, M pixels
by N channels, in steps of K (one tap, some channels).
Limit: the tensor cores where channels are many. At 64 channels it is traffic from the L2 cache, since every pixel is
read once for each of nine taps.
Measured on an H200, ten ResNet-18 clients: 65 to 75 us for 24 GFLOP at 64 channels, 48 to 62 us deeper in the network,
380 TFLOP/s in the step (docs/engine.md). On Hopper the 3x3 convolutions go to `triton_tma`, which is as fast or faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedquit.engine.cuda import triton_tma as tma
from fedquit.engine.cuda.triton_common import (
    Tile,
    empty_output,
    launch,
    power_of_two_divisor,
    store_tile,
    sum_partials,
)

FEW_PROGRAMS = 64  # leave half of a GPU idle


@triton.jit
def _conv_kernel(
    x_ptr,
    w_ptr,
    addend_ptr,
    out_ptr,
    x_client_stride,
    w_client_stride,
    out_client_stride,
    rows,  # output pixels of a client: B * H' * H'
    width_in: tl.constexpr,  # of the image that is read: its height is the same
    width_out: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    w_tap_stride,
    w_in_stride,
    w_out_stride,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,  # output pixels
    BLOCK_N: tl.constexpr,  # output channels
    BLOCK_K: tl.constexpr,  # input channels
    TRANSPOSED: tl.constexpr,  # the weights lie with the input channels innermost
    ADD: tl.constexpr,
):
    """out[p, o] = sum over taps and input channels of x[p moved by tap, i] * w[tap, i, o], plus an addend.

    The gradient of the images at stride 1 is the same with the taps in reverse order and I and O exchanged.
    """
    client = tl.program_id(1).to(tl.int64)
    tiles_n: tl.constexpr = channels_out // BLOCK_N
    column0 = (tl.program_id(0) % tiles_n) * BLOCK_N
    row = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)  # (M,): output pixels
    column = column0 + tl.arange(0, BLOCK_N)  # (N,): output channels
    depth = tl.arange(0, BLOCK_K)
    image = row // (width_out * width_out)
    top = (row // width_out) % width_out * STRIDE - PAD
    left = row % width_out * STRIDE - PAD
    x_ptr += client * x_client_stride
    w_ptr += client * w_client_stride
    base = (image * width_in + top) * width_in + left
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slices: tl.constexpr = channels_in // BLOCK_K
    for i in range(SIZE * SIZE * slices):
        tap = i // slices
        r, s = tap // SIZE, tap % SIZE
        channel = (i % slices) * BLOCK_K + depth  # (K,): input channels
        y, z = top + r, left + s
        inside = (row < rows) & (y >= 0) & (y < width_in) & (z >= 0) & (z < width_in)
        pixels = (base + r * width_in + s) * channels_in
        a = tl.load(x_ptr + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)  # (M, K)
        if TRANSPOSED:
            b = tl.trans(
                tl.load(w_ptr + tap * w_tap_stride + column[:, None] * w_out_stride + channel[None, :] * w_in_stride)
            )  # (K, N)
        else:
            b = tl.load(
                w_ptr + tap * w_tap_stride + channel[:, None] * w_in_stride + column[None, :] * w_out_stride
            )  # (K, N)
        total = tl.dot(a, b, total)  # (M, N)
    offsets = client * out_client_stride + row[:, None] * channels_out + column[None, :]  # (M, N)
    store_tile(total, out_ptr, addend_ptr, offsets, (row < rows)[:, None], ADD)


@triton.jit
def _strided_input_gradient_kernel(
    g_ptr,
    w_ptr,
    addend_ptr,
    out_ptr,
    g_client_stride,
    w_client_stride,
    out_client_stride,
    rows,  # pixels of one parity
    width_g: tl.constexpr,  # of the gradient
    width: tl.constexpr,  # of the image: twice that
    channels_in: tl.constexpr,  # of the gradient
    channels_out: tl.constexpr,
    w_tap_stride,
    w_in_stride,
    w_out_stride,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pixels of the image
    BLOCK_N: tl.constexpr,  # channels of the image
    BLOCK_K: tl.constexpr,  # channels of the gradient
    ADD: tl.constexpr,
):
    """dx[p, i] = sum over taps and o of g[(p + pad - tap) / 2, o] * w[tap, i, o], plus an addend, for stride 2.

    Only taps with an even p + pad - tap contribute, so the pixels are split by the parity of row and column (axis 2 of
    the grid): those of one parity share the same taps, 1, 2 or 4 of the nine.
    """
    client = tl.program_id(1).to(tl.int64)
    parity = tl.program_id(2)
    py, px = parity // 2, parity % 2
    tiles_n: tl.constexpr = channels_out // BLOCK_N
    row = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)  # (M,)
    column = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)  # (N,)
    depth = tl.arange(0, BLOCK_K)
    half: tl.constexpr = width // 2
    image, y, z = row // (half * half), (row // half) % half * 2 + py, row % half * 2 + px
    g_ptr += client * g_client_stride
    w_ptr += client * w_client_stride
    first_r, first_s = (py + PAD) % 2, (px + PAD) % 2
    taps_r, taps_s = (SIZE - first_r + 1) // 2, (SIZE - first_s + 1) // 2
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slices: tl.constexpr = channels_in // BLOCK_K
    for i in range(taps_r * taps_s * slices):
        at = i // slices
        r, s = first_r + 2 * (at // taps_s), first_s + 2 * (at % taps_s)
        channel = (i % slices) * BLOCK_K + depth  # (K,)
        oy, oz = (y + PAD - r) // 2, (z + PAD - s) // 2
        inside = (row < rows) & (y + PAD >= r) & (z + PAD >= s) & (oy < width_g) & (oz < width_g)
        pixels = ((image * width_g + oy) * width_g + oz) * channels_in
        a = tl.load(g_ptr + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)  # (M, K)
        tap = r * SIZE + s
        b = tl.trans(
            tl.load(w_ptr + tap * w_tap_stride + column[:, None] * w_out_stride + channel[None, :] * w_in_stride)
        )  # (K, N)
        total = tl.dot(a, b, total)  # (M, N)
    pixel = (image * width + y) * width + z
    offsets = client * out_client_stride + pixel[:, None] * channels_out + column[None, :]  # (M, N)
    store_tile(total, out_ptr, addend_ptr, offsets, (row < rows)[:, None], ADD)


@triton.jit
def _weight_gradient_kernel(
    x_ptr,
    g_ptr,
    out_ptr,
    x_client_stride,
    g_client_stride,
    out_client_stride,
    out_part_stride,
    rows,  # output pixels of a client: B * H' * H'
    rows_each,  # of one part
    width_in: tl.constexpr,
    width_out: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,  # input channels
    BLOCK_N: tl.constexpr,  # output channels
    BLOCK_K: tl.constexpr,  # pixels
):
    """dw[tap, i, o] = sum over output pixels p of x[p moved by tap, i] * g[p, o], for one tap and a part of the pixels.

    There are few output tiles and many pixels, so the sum is split (axis 2 of the grid) and added up afterwards.
    """
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    tiles_n: tl.constexpr = channels_out // BLOCK_N
    tiles_m: tl.constexpr = channels_in // BLOCK_M
    tap = tl.program_id(0) // (tiles_n * tiles_m)
    channel = (tl.program_id(0) // tiles_n) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (M,)
    column = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)  # (N,)
    r, s = tap // SIZE - PAD, tap % SIZE - PAD
    x_ptr += client * x_client_stride
    g_ptr += client * g_client_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row0 in range(part * rows_each, min((part + 1) * rows_each, rows), BLOCK_K):
        row = row0 + tl.arange(0, BLOCK_K)  # (K,)
        image = row // (width_out * width_out)
        y, z = (row // width_out) % width_out * STRIDE + r, row % width_out * STRIDE + s
        inside = (row < rows) & (y >= 0) & (y < width_in) & (z >= 0) & (z < width_in)
        pixels = ((image * width_in + y) * width_in + z) * channels_in
        a = tl.load(x_ptr + pixels[:, None] + channel[None, :], mask=inside[:, None], other=0.0)  # (K, M)
        b = tl.load(
            g_ptr + row[:, None] * channels_out + column[None, :], mask=(row < rows)[:, None], other=0.0
        )  # (K, N)
        total = tl.dot(tl.trans(a), b, total)  # (M, N)
    out = out_ptr + client * out_client_stride + part * out_part_stride
    out += (tap * channels_in + channel)[:, None] * channels_out + column[None, :]  # (M, N)
    tl.store(out, total.to(out_ptr.dtype.element_ty))


def _chosen_tile(tile: Tile | None, rows: int, columns: int, depth: int, clients: int) -> Tile:
    """Choose a tile that divides columns and depth: a large one reads less per product, small ones fill the GPU."""
    if tile is None:
        wide = power_of_two_divisor(columns, 256 if columns >= 512 else 128)
        few = triton.cdiv(rows, 128) * (columns // wide) * clients < FEW_PROGRAMS
        tile = Tile(64, 64, 128, 4, 3) if few else Tile(128, wide, 64, 8 if wide >= 128 else 4, 3)
    n = power_of_two_divisor(columns, tile.n)
    k = power_of_two_divisor(depth, tile.k)
    return Tile(tile.m, n, k, tile.warps, tile.stages)


def conv_forward(x: Tensor, w: Tensor, stride: int, tile: Tile | None = None) -> Tensor:
    """Convolve each client's images with its weights; the padding keeps the size at stride 1.

    Args:
        x: Images (K, B, H, H, I), dense for each client.
        w: Weights (K, 1 or 9 taps, I, O), dense for each client.
        stride: 1 or 2.
        tile: For tests; None chooses one, or TMA.

    Returns:
        (K, B, H', H', O), with H' = ceil(H / stride).
    """
    clients, batch, width, _, channels = x.shape
    _, taps, _, out_channels = w.shape
    size = 1 if taps == 1 else 3
    if tile is None and tma.covers(x, w, size, stride, out_channels):
        return tma.conv(x, w)
    width_out = (width - 1) // stride + 1
    out = empty_output(clients, batch, width_out, width_out, out_channels, dtype=x.dtype, device=x.device)
    rows = batch * width_out * width_out
    t = _chosen_tile(tile, rows, out_channels, channels, clients)
    launch(
        _conv_kernel,
        (triton.cdiv(rows, t.m) * (out_channels // t.n), clients),
        *(x, w, x, out, x.stride(0), w.stride(0), out.stride(0), rows, width, width_out, channels, out_channels),
        *(w.stride(1), w.stride(2), w.stride(3)),
        SIZE=size,
        STRIDE=stride,
        PAD=size // 2,
        TRANSPOSED=False,
        ADD=False,
        BLOCK_M=t.m,
        BLOCK_N=t.n,
        BLOCK_K=t.k,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def conv_input_gradient(
    g: Tensor, w: Tensor, stride: int, width: int, tile: Tile | None = None, addend: Tensor | None = None
) -> Tensor:
    """Compute the gradient of the images, plus an addend.

    Args:
        g: The gradient of the output, (K, B, H', H', O).
        w: Weights (K, 1 or 9 taps, I, O).
        stride: 1 or 2.
        width: H.
        tile: For tests; None chooses one, or TMA.
        addend: (K, B, H, H, I), the gradient that reaches the images by another path; None for nothing.

    Returns:
        (K, B, H, H, I).
    """
    clients, batch, width_g, _, channels = g.shape
    _, taps, out_channels, _ = w.shape  # the convolution's I are the output's channels here
    size = 1 if taps == 1 else 3
    if tile is None and tma.covers(g, w, size, stride, out_channels):
        return tma.conv(g, w, backward=True, addend=addend)
    if tile is None and tma.covers_strided(g, w, size, stride):
        return tma.strided_input_gradient(g, w, addend=addend)
    out = empty_output(clients, batch, width, width, out_channels, dtype=g.dtype, device=g.device)
    rows = batch * width * width // (stride * stride)
    t = _chosen_tile(tile, rows, out_channels, channels, clients)
    blocks = triton.cdiv(rows, t.m) * (out_channels // t.n)
    added = g if addend is None else addend
    sizes = (g.stride(0), w.stride(0), out.stride(0), rows, width_g, width, channels, out_channels)
    options = {"SIZE": size, "PAD": size // 2, "ADD": addend is not None}
    options |= {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": t.k, "num_warps": t.warps, "num_stages": t.stages}
    if stride == 1:  # a convolution with the taps in reverse order
        last_tap = w[:, taps - 1 :]
        strides = (-w.stride(1), w.stride(3), w.stride(2))
        options |= {"STRIDE": 1, "TRANSPOSED": True}
        launch(_conv_kernel, (blocks, clients), g, last_tap, added, out, *sizes, *strides, **options)
    else:
        strides = (w.stride(1), w.stride(3), w.stride(2))
        launch(_strided_input_gradient_kernel, (blocks, clients, 4), g, w, added, out, *sizes, *strides, **options)
    return out


def conv_weight_gradient(
    x: Tensor, g: Tensor, size: int, stride: int, tile: Tile | None = None, split: int = 0, out: Tensor | None = None
) -> Tensor:
    """Compute the gradient of the weights.

    Args:
        x: Images (K, B, H, H, I).
        g: The gradient of the output, (K, B, H', H', O).
        size: S, 1 or 3.
        stride: 1 or 2.
        tile: For tests; None chooses one, or TMA.
        split: Into how many parts the sum over pixels is split; 0 chooses.
        out: Where to write it, in any type; None allocates it in float32.

    Returns:
        (K, S * S, I, O).
    """
    if tile is None and not split and tma.covers_weight_gradient(x, g, size, stride):
        return tma.weight_gradient(x, g, out)
    clients, batch, width, _, channels = x.shape
    width_out, out_channels = g.shape[2], g.shape[4]
    rows = batch * width_out * width_out
    tile = tile or Tile(min(channels, 128), min(out_channels, 128), 64, 4, 3)
    block_m = power_of_two_divisor(channels, tile.m)
    block_n = power_of_two_divisor(out_channels, tile.n)
    blocks = size * size * (channels // block_m) * (out_channels // block_n)
    split = split or max(1, min(rows // 1024, -(-1056 // (blocks * clients))))
    rows_each = triton.cdiv(triton.cdiv(rows, split), tile.k) * tile.k
    shape = size * size, channels, out_channels
    if out is None:
        out = empty_output(clients, *shape, dtype=torch.float32, device=x.device)
    if split > 1:
        partials = empty_output(clients, split, *shape, dtype=torch.float32, device=x.device)
    else:
        partials = out.unsqueeze(1)  # (K, 1, S * S, I, O)
    launch(
        _weight_gradient_kernel,
        (blocks, clients, split),
        *(x, g, partials, x.stride(0), g.stride(0), partials.stride(0), partials.stride(1), rows, rows_each),
        *(width, width_out, channels, out_channels),
        SIZE=size,
        STRIDE=stride,
        PAD=size // 2,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split > 1:
        sum_partials(partials, out)
    return out
