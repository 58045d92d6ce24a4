# SPDX-License-Identifier: Apache-2.0
"""3x3 convolutions of K clients for Hopper, whose tensor memory accelerator (TMA) copies tiles to shared memory.

Operation: as in `triton_gemm`, the same convolution and its two gradients, for 3x3 taps.
Shapes: images (K, B, H, H, I) in bfloat16 with H a power of two from 4 to 64; weights (K, 9, I, O); I and O are
multiples of 64. Sums are in float32.
Tiling: a tile of pixels is a TMA tile of images x rows x columns x channels, given by where it begins. For each tap the
tile is moved by a pixel, and TMA fills in zeros outside of an image, so a kernel computes no addresses and masks
nothing. The images are the right operand of the product, out^T = w^T x^T: a tile of more than two dimensions reaches
the left operand only through registers, where Triton 3.6 lets the next tile overwrite it too early. The weights'
gradient moves the images sideways and the gradient up and down, so that one tile of images serves three taps.
Limit: at 32x32 pixels and 64 channels the L2 cache, at 64 % of its bandwidth, with nothing else near its limit.
Measured on an H200 with ten ResNet-18 clients, in us, without TMA and with it: 16x16 pixels 49 and 45, 8x8 55 and 42,
4x4 59 and 46, 32x32 at 64 channels 65 and 65; the weights' gradient 78 and 47 at 32x32 (docs/engine.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedquit.engine.cuda.triton_common import (
    Tile,
    empty_output,
    launch,
    power_of_two_divisor,
    store_tile,
    sum_partials,
)

CHANNELS = 64  # innermost side of a TMA tile: 128 bytes, which the tensor cores read without bank conflicts
PIXELS = 64  # of one step of the weights' gradient
MANY_PROGRAMS, SOME_PROGRAMS = 96, 40  # with tiles of 128 by 128: enough to keep a GPU busy, and half of it
MULTIPROCESSORS = 132  # of an H200: the weights' gradient is split into one program for each
MIN_BLOCKS = 6  # of pixels, the fewest that make a program of its own worth its overhead


@triton.jit
def _tile_position(
    width: tl.constexpr, channels_out: tl.constexpr, IMAGES: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a program's first output channel, the number of its pixel tile, and that tile's first image and row."""
    tiles_m: tl.constexpr = channels_out // BLOCK_M
    tiles_high: tl.constexpr = width // HEIGHT
    block = tl.program_id(0) // tiles_m
    return tl.program_id(0) % tiles_m * BLOCK_M, block, block // tiles_high * IMAGES, block % tiles_high * HEIGHT


@triton.jit
def _conv_kernel(
    x,  # TMA descriptor of (K, B, H, H, I)
    w,  # TMA descriptor of (K, 9 * I, O)
    addend_ptr,
    out_ptr,
    out_client_stride,
    rows,  # output pixels of a client: B * H * H
    width: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    IMAGES: tl.constexpr,  # of a TMA tile
    HEIGHT: tl.constexpr,  # image rows of a TMA tile
    BLOCK_M: tl.constexpr,  # output channels
    BLOCK_K: tl.constexpr,  # input channels
    BACKWARD: tl.constexpr,  # taps in reverse order, weights (tap, output channels, input channels)
    ADD: tl.constexpr,
):
    """out[p, o] = sum over taps and input channels of x[p moved by tap, i] * w[tap, i, o], plus an addend.

    Computed as out^T (M, N) with M output channels and N = IMAGES * HEIGHT * width pixels. BACKWARD gives the gradient
    of the images from that of the output: the same with the taps in reverse order and I and O exchanged.
    """
    client = tl.program_id(1)
    BLOCK_N: tl.constexpr = IMAGES * HEIGHT * width
    column, block, image, top = _tile_position(width, channels_out, IMAGES, HEIGHT, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slices: tl.constexpr = channels_in // BLOCK_K
    for i in range(9 * slices):
        tap, channel = i // slices, i % slices * BLOCK_K
        if BACKWARD:
            a = w.load([client, (8 - tap) * channels_out + column, channel]).reshape(BLOCK_M, BLOCK_K)  # (M, K)
        else:
            a = w.load([client, tap * channels_in + channel, column]).reshape(BLOCK_K, BLOCK_M).T  # (M, K)
        b = x.load([client, image, top + tap // 3 - 1, tap % 3 - 1, channel]).reshape(BLOCK_N, BLOCK_K)  # (N, K)
        total = tl.dot(a, b.T, total)  # (M, N)
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)  # (N,)
    offsets = (
        client.to(tl.int64) * out_client_stride + row[:, None] * channels_out + column + tl.arange(0, BLOCK_M)[None, :]
    )  # (N, M)
    store_tile(total.T, out_ptr, addend_ptr, offsets, (row < rows)[:, None], ADD)


@triton.jit(do_not_specialize=["images"])
def _strided_input_gradient_kernel(
    g,  # TMA descriptor of (K, B, H', H', O)
    w,  # TMA descriptor of (K, 9 * I, O)
    addend_ptr,
    out_ptr,
    out_client_stride,
    images,  # B
    width: tl.constexpr,  # of the gradient: half of the image's
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    IMAGES: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # channels of the image
    BLOCK_K: tl.constexpr,  # channels of the gradient
    ADD: tl.constexpr,
):
    """dx[p, i] = sum over taps and o of g[(p + 1 - tap) / 2, o] * w[tap, i, o], plus an addend, for stride 2.

    Pixels are split by the parity of row and column (axis 2 of the grid), as in `triton_gemm`: an even one gets one tap
    in each direction, an odd one two. Those with the most taps come first.
    """
    client = tl.program_id(1)
    odd_y, odd_x = 1 - tl.program_id(2) // 2, 1 - tl.program_id(2) % 2
    BLOCK_N: tl.constexpr = IMAGES * HEIGHT * width
    column, _, image, top = _tile_position(width, channels_out, IMAGES, HEIGHT, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slices: tl.constexpr = channels_in // BLOCK_K
    for i in range((1 + odd_y) * (1 + odd_x) * slices):
        tap, channel = i // slices, i % slices * BLOCK_K
        down, right = tap // (1 + odd_x), tap % (1 + odd_x)  # an odd pixel was read from here, and from one further on
        r, s = 1 + odd_y - 2 * down, 1 + odd_x - 2 * right
        a = w.load([client, (3 * r + s) * channels_out + column, channel]).reshape(BLOCK_M, BLOCK_K)  # (M, K)
        b = g.load([client, image, top + down, right, channel]).reshape(BLOCK_N, BLOCK_K)  # (N, K)
        total = tl.dot(a, b.T, total)  # (M, N)
    row = tl.arange(0, BLOCK_N)  # (N,): pixels of the gradient in this tile
    of_image, y, x = row // (HEIGHT * width), row // width % HEIGHT, row % width
    pixel = ((image + of_image) * 2 * width + 2 * (top + y) + odd_y) * 2 * width + 2 * x + odd_x
    offsets = (
        client.to(tl.int64) * out_client_stride
        + pixel[:, None] * channels_out
        + column
        + tl.arange(0, BLOCK_M)[None, :]
    )  # (N, M)
    store_tile(total.T, out_ptr, addend_ptr, offsets, (image + of_image < images)[:, None], ADD)


@triton.jit(do_not_specialize=["images", "blocks_each"])
def _weight_gradient_kernel(
    x,  # TMA descriptor of (K, B, H, H, I)
    g,  # TMA descriptor of (K, B, H * H, O)
    out_ptr,
    out_client_stride,
    out_part_stride,
    images,  # B
    blocks_each,  # of pixels, in one part
    width: tl.constexpr,
    channels_in: tl.constexpr,
    channels_out: tl.constexpr,
    HEIGHT: tl.constexpr,  # image rows of a TMA tile
    BLOCK_M: tl.constexpr,  # output channels
    BLOCK_N: tl.constexpr,  # input channels
):
    """dw[tap, i, o] = sum over pixels p of x[p moved by tap, i] * g[p, o], for a column of three taps.

    Computed as dw^T: (output channels x pixels) (pixels x input channels). The tile of images is moved sideways by the
    column s of taps and loaded once; the gradient is loaded three times, a row of pixels below, level and above.
    All nine taps at once would share more and were slower (57 us at 32x32 instead of 47): too few registers.
    """
    client, part = tl.program_id(1), tl.program_id(2)
    BLOCK_K: tl.constexpr = HEIGHT * width
    tiles_n: tl.constexpr = channels_in // BLOCK_N
    tiles_m: tl.constexpr = channels_out // BLOCK_M
    tiles_high: tl.constexpr = width // HEIGHT
    s = tl.program_id(0) // (tiles_n * tiles_m)
    row = tl.program_id(0) // tiles_n % tiles_m * BLOCK_M
    column = tl.program_id(0) % tiles_n * BLOCK_N
    above = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    level = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    below = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(part * blocks_each, tl.minimum((part + 1) * blocks_each, images * tiles_high)):
        image, top = block // tiles_high, block % tiles_high * HEIGHT
        b = x.load([client, image, top, s - 1, column]).reshape(BLOCK_K, BLOCK_N)  # (K, N)
        under = g.load([client, image, (top + 1) * width, row]).reshape(BLOCK_K, BLOCK_M)  # (K, M)
        above = tl.dot(under.T, b, above)  # (M, N)
        same = g.load([client, image, top * width, row]).reshape(BLOCK_K, BLOCK_M)  # (K, M)
        level = tl.dot(same.T, b, level)  # (M, N)
        over = g.load([client, image, (top - 1) * width, row]).reshape(BLOCK_K, BLOCK_M)  # (K, M)
        below = tl.dot(over.T, b, below)  # (M, N)
    tap: tl.constexpr = channels_in * channels_out
    out = out_ptr + client.to(tl.int64) * out_client_stride + part * out_part_stride + s * tap
    out += (column + tl.arange(0, BLOCK_N))[:, None] * channels_out + row + tl.arange(0, BLOCK_M)[None, :]  # (N, M)
    tl.store(out, above.T.to(out_ptr.dtype.element_ty))
    tl.store(out + 3 * tap, level.T.to(out_ptr.dtype.element_ty))
    tl.store(out + 6 * tap, below.T.to(out_ptr.dtype.element_ty))


def covers(x: Tensor, other: Tensor, size: int, stride: int, out_channels: int) -> bool:
    """Return whether TMA can read the operands of a convolution, or of its images' gradient, at stride 1.

    Args:
        x: Images or a gradient, (K, B, H, H, channels).
        other: Weights, or a gradient.
        size: S, of S x S taps.
        stride: Of the convolution.
        out_channels: Of the output.
    """
    return size == 3 and stride == 1 and _is_readable(x, other, out_channels)


def covers_strided(g: Tensor, w: Tensor, size: int, stride: int) -> bool:
    """Return the same for the gradient of the images at stride 2."""
    return size == 3 and stride == 2 and _is_readable(g, w, w.shape[2])


def covers_weight_gradient(x: Tensor, g: Tensor, size: int, stride: int) -> bool:
    """Return the same for the gradient of the weights, whose steps take whole rows of one image."""
    return covers(x, g, size, stride, g.shape[-1]) and x.shape[2] ** 2 >= PIXELS


def _is_readable(x: Tensor, other: Tensor, out_channels: int) -> bool:
    width = x.shape[2]
    return (
        width & (width - 1) == 0
        and 4 <= width <= 64
        and x.shape[-1] % CHANNELS == out_channels % CHANNELS == 0
        and all(_is_aligned(t) for t in (x, other))
        and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] == 9)
    )


def _is_aligned(t: Tensor) -> bool:
    """Return whether address and strides are multiples of 16 bytes, as TMA requires."""
    return t.numel() > 0 and all(at % 16 == 0 for at in (t.data_ptr(), *(s * t.itemsize for s in t.stride()[:-1])))


def conv(
    x: Tensor, w: Tensor, tile: Tile | None = None, *, backward: bool = False, addend: Tensor | None = None
) -> Tensor:
    """Convolve images, or compute the images' gradient, plus an addend.

    Args:
        x: Images (K, B, H, H, I); backward, the gradient of the output, (K, B, H, H, O).
        w: Weights (K, 9, I, O).
        tile: M output channels by N pixels; None chooses.
        backward: Whether to compute the gradient of the images.
        addend: Shaped like the result; None for nothing.

    Returns:
        (K, B, H, H, O); backward, (K, B, H, H, I).
    """
    clients, batch, width, _, channels = x.shape
    out_channels = w.shape[2] if backward else w.shape[3]
    out = empty_output(clients, batch, width, width, out_channels, dtype=x.dtype, device=x.device)
    rows = batch * width * width
    t = tile or _chosen_tile(rows, channels, out_channels, clients)
    images, height = _tile_sides(width, t.n)
    launch(
        _conv_kernel,
        (triton.cdiv(batch, images) * (width // height) * (out_channels // t.m), clients),
        *(_image_tiles(x, images, height, t.k), _weight_tiles(w, *((t.m, t.k) if backward else (t.k, t.m)))),
        *(x if addend is None else addend, out, out.stride(0), rows, width, channels, out_channels),
        IMAGES=images,
        HEIGHT=height,
        BLOCK_M=t.m,
        BLOCK_K=t.k,
        BACKWARD=backward,
        ADD=addend is not None,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def strided_input_gradient(g: Tensor, w: Tensor, tile: Tile | None = None, addend: Tensor | None = None) -> Tensor:
    """Compute the gradient of the images of a convolution with stride 2, plus an addend.

    Args:
        g: The gradient of the output, (K, B, H', H', O).
        w: Weights (K, 9, I, O).
        tile: M channels of the image by N pixels of the gradient; None chooses.
        addend: Shaped like the result; None for nothing.

    Returns:
        (K, B, 2H', 2H', I).
    """
    clients, batch, width, _, channels = g.shape
    out_channels = w.shape[2]
    out = empty_output(clients, batch, 2 * width, 2 * width, out_channels, dtype=g.dtype, device=g.device)
    t = tile or _chosen_tile(batch * width * width, channels, out_channels, 4 * clients)
    images, height = _tile_sides(width, t.n)
    launch(
        _strided_input_gradient_kernel,
        (triton.cdiv(batch, images) * (width // height) * (out_channels // t.m), clients, 4),
        *(_image_tiles(g, images, height, t.k), _weight_tiles(w, t.m, t.k)),
        *(g if addend is None else addend, out, out.stride(0), batch, width, channels, out_channels),
        IMAGES=images,
        HEIGHT=height,
        BLOCK_M=t.m,
        BLOCK_K=t.k,
        ADD=addend is not None,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


def weight_gradient(x: Tensor, g: Tensor, out: Tensor | None = None, split: int = 0) -> Tensor:
    """Compute the gradient of the weights.

    Args:
        x: Images (K, B, H, H, I).
        g: The gradient of the output, (K, B, H, H, O).
        out: Where to write it, in any type; None allocates it in float32.
        split: Into how many parts the sum over pixels is split; 0 chooses.

    Returns:
        (K, 9, I, O).
    """
    clients, batch, width, _, channels = x.shape
    out_channels = g.shape[4]
    height = PIXELS // width
    block_n = power_of_two_divisor(channels, 128)
    blocks = batch * (width // height)
    tiles = 3 * (out_channels // CHANNELS) * (channels // block_n)
    programs = MULTIPROCESSORS * (2 if block_n == CHANNELS else 1)  # two of the small ones fit on a multiprocessor
    split = split or max(1, min(programs // (tiles * clients), blocks // MIN_BLOCKS))
    blocks_each = triton.cdiv(blocks, split)
    split = triton.cdiv(blocks, blocks_each)
    shape = 9, channels, out_channels
    if out is None:
        out = empty_output(clients, *shape, dtype=torch.float32, device=x.device)
    if split > 1:
        partials = empty_output(clients, split, *shape, dtype=torch.float32, device=x.device)
    else:
        partials = out.unsqueeze(1)  # (K, 1, 9, I, O)
    flat = g.flatten(2, 3)  # (K, B, H * H, O)
    launch(
        _weight_gradient_kernel,
        (tiles, clients, split),
        _image_tiles(x, 1, height, block_n),
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, PIXELS, CHANNELS]),
        *(partials, partials.stride(0), partials.stride(1), batch, blocks_each, width, channels, out_channels),
        HEIGHT=height,
        BLOCK_M=CHANNELS,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=3,
    )
    if split > 1:
        sum_partials(partials, out)
    return out


def _chosen_tile(rows: int, channels: int, out_channels: int, clients: int) -> Tile:
    """Choose the largest tile that still keeps all multiprocessors busy: a small one reads more per product."""
    if power_of_two_divisor(out_channels, 128) < 128:
        return Tile(64, 128, 64, 4, 3)
    programs = triton.cdiv(rows, 128) * (out_channels // 128) * clients
    if programs >= MANY_PROGRAMS:
        return Tile(128, 128, 64, 8, 3)
    deep = power_of_two_divisor(channels, 128)
    return Tile(64, 128, deep, 4, 3) if programs >= SOME_PROGRAMS else Tile(64, 64, deep, 4, 4)


def _tile_sides(width: int, pixels: int) -> tuple[int, int]:
    """Return how many images, and how many rows of each, make a TMA tile of so many pixels."""
    height = min(width, pixels // width)
    return pixels // (height * width), height


def _image_tiles(x: Tensor, images: int, height: int, channels: int) -> TensorDescriptor:
    """Describe images (K, B, H, H, C) to TMA, in tiles of (1, images, height, H, channels)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, images, height, x.shape[3], channels])


def _weight_tiles(w: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describe weights (K, 9, I, O) to TMA as (K, 9 * I, O), in tiles of (1, height, width)."""
    shape = [w.shape[0], 9 * w.shape[2], w.shape[3]]
    stride = [w.stride(0), w.shape[3], 1]
    return TensorDescriptor(w, shape, stride, [1, height, width])
