# SPDX-License-Identifier: Apache-2.0
"""GroupNorm, shortcut and ReLU of K clients, each with weights of its own, in Triton: one kernel forward, two backward.

Operation: y = ReLU(weight * xhat + bias + shortcut), with xhat = (x - mean) * scale and scale = 1 / sqrt(var + eps),
where mean and variance are those of one group of channels of one image.
Shapes: x, y and shortcut (K, B, H, W, C) in bfloat16, channels last; weight and bias (K, C); mean and scale
(K * B, groups) in float32. `pixels` is H * W.
Tiling: a program computes one group of one image, (pixels, C / groups) numbers. Sides are powers of two.
Limit: HBM bandwidth.
Measured on an H200, ten ResNet-18 clients: normalisation is near the memory's speed and takes 0.31 of a step's 3.8 ms;
backward, one launch takes 56 us at 32x32 pixels, 11 us at 8x8 and 7 us at 4x4 (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedquit.engine.cuda.triton_common import empty_output, launch

# Batches of all sizes share a kernel: Triton specialises neither on their size nor on where means and scales lie.
ANY_BATCH: dict[str, Any] = {
    "do_not_specialize": ["images"],
    "do_not_specialize_on_alignment": ["mean_ptr", "scale_ptr"],
}


@triton.jit(**ANY_BATCH)
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weight_client_stride,
    shortcut_ptr,
    out_ptr,
    mean_ptr,
    scale_ptr,
    images,  # of one client: B
    pixels: tl.constexpr,
    channels: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
):
    """Compute y = ReLU(weight * xhat + bias + shortcut) for one group of one image, read once into registers."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group_channels: tl.constexpr = channels // GROUPS
    count: tl.constexpr = pixels * group_channels
    channel = group * group_channels + tl.arange(0, group_channels)  # (group_channels,)
    offsets = (image * pixels + tl.arange(0, pixels))[:, None] * channels + channel[None, :]  # (pixels, group_channels)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    mean = tl.sum(x) / count  # ()
    x -= mean
    scale = tl.rsqrt(tl.sum(x * x) / count + EPS)  # ()
    own = (image // images) * weight_client_stride + channel  # (group_channels,): of this client
    weight, bias = tl.load(weight_ptr + own).to(tl.float32), tl.load(bias_ptr + own).to(tl.float32)
    y = x * (scale * weight)[None, :] + bias[None, :]  # (pixels, group_channels)
    if SHORTCUT:
        y += tl.load(shortcut_ptr + offsets).to(tl.float32)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty))
    tl.store(mean_ptr + image * GROUPS + group, mean)
    tl.store(scale_ptr + image * GROUPS + group, scale)


@triton.jit
def _relu_gradient(
    g_ptr, y_ptr, offsets, xhat, weight, bias, RELU: tl.constexpr, SHORTCUT: tl.constexpr, EVICT: tl.constexpr
):
    """Return g where y > 0, else 0; without a shortcut the sign of y follows from xhat, and y is not read."""
    g = tl.load(g_ptr + offsets, eviction_policy=EVICT).to(tl.float32)
    if RELU:
        if SHORTCUT:
            g = tl.where(tl.load(y_ptr + offsets, eviction_policy=EVICT) > 0, g, 0.0)
        else:
            g = tl.where(xhat * weight[None, :] + bias[None, :] > 0, g, 0.0)
    return g


@triton.jit(**ANY_BATCH)
def _backward_kernel(
    g_ptr,
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    weight_client_stride,
    mean_ptr,
    scale_ptr,
    out_ptr,
    shortcut_ptr,
    sums_ptr,
    images,
    pixels: tl.constexpr,
    channels: tl.constexpr,
    GROUPS: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute dx = scale * (weight * g - mean(weight * g) - xhat * mean(weight * g * xhat)), one group of one image.

    Two passes over chunks of CHUNK pixels: first the sums over pixels of g and g * xhat by channel, stored for the
    gradients of weight and bias, then dx. The second pass reads from the L2 cache (evict_last, then evict_first): a
    whole group in registers was slower, 0.89 instead of 0.83 ms a step. The chunks are added elementwise and reduced
    once at the end: a reduction synchronises threads, and one per chunk had 13-way bank conflicts (24 instead of 7 us
    at 4x4 pixels).
    """
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group_channels: tl.constexpr = channels // GROUPS
    count: tl.constexpr = pixels * group_channels
    channel = group * group_channels + tl.arange(0, group_channels)  # (group_channels,)
    first = (image * pixels + tl.arange(0, CHUNK))[:, None] * channels + channel[None, :]  # (CHUNK, group_channels)
    mean, scale = tl.load(mean_ptr + image * GROUPS + group), tl.load(scale_ptr + image * GROUPS + group)
    own = (image // images) * weight_client_stride + channel  # (group_channels,)
    weight, bias = tl.load(weight_ptr + own).to(tl.float32), tl.load(bias_ptr + own).to(tl.float32)
    all_g, all_gx = tl.zeros((CHUNK, group_channels), tl.float32), tl.zeros((CHUNK, group_channels), tl.float32)
    for start in range(0, pixels, CHUNK):
        offsets = first + start * channels
        xhat = (tl.load(x_ptr + offsets, eviction_policy="evict_last").to(tl.float32) - mean) * scale
        g = _relu_gradient(g_ptr, y_ptr, offsets, xhat, weight, bias, RELU, SHORTCUT, "evict_last")
        all_g += g
        all_gx += g * xhat
    sum_g, sum_gx = tl.sum(all_g, axis=0), tl.sum(all_gx, axis=0)  # (group_channels,) each
    sums = sums_ptr + image * 2 * channels + channel
    tl.store(sums, sum_gx)
    tl.store(sums + channels, sum_g)
    mean_gx, mean_g = tl.sum(sum_gx * weight) / count, tl.sum(sum_g * weight) / count  # () each
    for start in range(0, pixels, CHUNK):
        offsets = first + start * channels
        xhat = (tl.load(x_ptr + offsets, eviction_policy="evict_first").to(tl.float32) - mean) * scale
        g = _relu_gradient(g_ptr, y_ptr, offsets, xhat, weight, bias, RELU, SHORTCUT, "evict_first")
        if SHORTCUT:
            tl.store(shortcut_ptr + offsets, g.to(shortcut_ptr.dtype.element_ty))
        dx = (g * weight[None, :] - mean_g - xhat * mean_gx) * scale  # (CHUNK, group_channels)
        tl.store(out_ptr + offsets, dx.to(out_ptr.dtype.element_ty))


@triton.jit(**ANY_BATCH)
def _sum_over_batch_kernel(
    sums_ptr, of_weight_ptr, of_bias_ptr, out_client_stride, images, channels: tl.constexpr, IMAGES: tl.constexpr
):
    """dweight[k, c] = sum over images of sums[k, b, 0, c], and dbias[k, c] that of sums[k, b, 1, c].

    Tiling: a program adds up 64 channels of one client, IMAGES images at a time.
    """
    client, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * 64 + tl.arange(0, 64)
    of_weight, of_bias = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for start in range(0, images, IMAGES):
        image = start + tl.arange(0, IMAGES)  # (IMAGES,)
        mask = (image < images)[:, None] & (channel < channels)[None, :]  # (IMAGES, 64)
        sums = sums_ptr + ((client * images + image) * 2 * channels)[:, None] + channel[None, :]  # (IMAGES, 64)
        of_weight += tl.sum(tl.load(sums, mask=mask, other=0.0), axis=0)  # (64,)
        of_bias += tl.sum(tl.load(sums + channels, mask=mask, other=0.0), axis=0)  # (64,)
    offsets = client * out_client_stride + channel
    tl.store(of_weight_ptr + offsets, of_weight.to(of_weight_ptr.dtype.element_ty), mask=channel < channels)
    tl.store(of_bias_ptr + offsets, of_bias.to(of_bias_ptr.dtype.element_ty), mask=channel < channels)


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, *, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ReLU(GroupNorm(x) + shortcut).

    Args:
        x: (K, B, H, W, C), dense.
        weight: (K, C), with stride 1 along C.
        bias: (K, C), with the strides of `weight`.
        shortcut: Shaped like x, or None.
        groups: How many groups of channels.
        eps: Added to the variance.
        relu: Whether to apply ReLU.

    Returns:
        The output, shaped like x; means and scales of the groups, (K * B, groups), in float32.
    """
    clients, batch, height, width, channels = x.shape
    out = empty_output(*x.shape, dtype=x.dtype, device=x.device)
    mean, scale = empty_output(2, clients * batch, groups, dtype=torch.float32, device=x.device)
    pixels = height * width
    addend = x if shortcut is None else shortcut
    launch(
        _forward_kernel,
        (clients * batch, groups),
        *(x, weight, bias, weight.stride(0), addend, out, mean, scale, batch, pixels, channels),
        GROUPS=groups,
        EPS=eps,
        RELU=relu,
        SHORTCUT=shortcut is not None,
        num_warps=max(1, min(16, pixels * (channels // groups) // 2048)),
    )
    return out, mean, scale


def norm_backward(
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
    """Compute the gradients of x and of the shortcut, and what those of weight and bias are sums of.

    Args:
        g: The gradient of the output, (K, B, H, W, C).
        x: The input of `norm_forward`.
        y: Its output.
        weight: (K, C).
        bias: (K, C).
        mean: As `norm_forward` returned it.
        scale: As `norm_forward` returned it.
        groups: How many groups of channels.
        relu: Whether ReLU was applied.
        shortcut: Whether a shortcut was added.

    Returns:
        The gradient of x; the sums over each image's pixels, (K, B, 2, C) in float32, for `norm_weight_gradients`; the
        gradient of the shortcut, or None.
    """
    clients, batch, height, width, channels = x.shape
    out = empty_output(*x.shape, dtype=x.dtype, device=x.device)
    of_shortcut = empty_output(*g.shape, dtype=g.dtype, device=g.device) if shortcut else None
    sums = empty_output(clients, batch, 2, channels, dtype=torch.float32, device=x.device)
    pixels = height * width
    group_channels = channels // groups
    count = pixels * group_channels
    warps = max(1, min(16, count // (2048 if count >= 16384 else 4096)))
    launch(
        _backward_kernel,
        (clients * batch, groups),
        *(g, x, y, weight, bias, weight.stride(0), mean, scale, out, g if of_shortcut is None else of_shortcut, sums),
        *(batch, pixels, channels),
        GROUPS=groups,
        RELU=relu,
        SHORTCUT=shortcut,
        CHUNK=max(1, min(pixels, 1024 * warps // group_channels)),
        num_warps=warps,
    )
    return out, sums, of_shortcut


def norm_weight_gradients(
    sums: Tensor, dtype: torch.dtype, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of weight and bias, (K, C) each.

    Args:
        sums: What `norm_backward` returned, (K, B, 2, C).
        dtype: The type of the gradients.
        out: Where to write both; None allocates them.
    """
    clients, batch, _, channels = sums.shape
    of_weight, of_bias = out or empty_output(2, clients, channels, dtype=dtype, device=sums.device)
    launch(
        _sum_over_batch_kernel,
        (clients, triton.cdiv(channels, 64)),
        *(sums, of_weight, of_bias, of_weight.stride(0), batch, channels),
        IMAGES=32,
        num_warps=4,
    )
    return of_weight, of_bias
