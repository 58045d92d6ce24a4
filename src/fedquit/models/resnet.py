# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 for small images (He et al., 2016), with GroupNorm where the original has BatchNorm."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from fedquit.errors import InputError
from fedquit.models.fused import conv_with_input, norm_relu

WIDTHS = (64, 128, 256, 512)
BLOCKS = 2  # in each stage
TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut off at two standard deviations


def resnet18(input_shape: tuple[int, ...], classes: int, *, groups: int = 2) -> nn.Module:
    """ResNet-18 for small images: a 3x3 stem, four stages of two basic blocks, the mean, a linear.

    Args:
        input_shape: (channels, height, width) of one image.
        classes: the number of classes, C.
        groups: of each GroupNorm; must divide 64.
    """
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise InputError(f"resnet18 needs images (channels, height, width), not {tuple(input_shape)}: use mlp.")
    if groups < 1 or WIDTHS[0] % groups:
        raise InputError(f"resnet18 has groups={groups}: it must divide {WIDTHS[0]}, the channels of its first layer.")
    return ResNet(input_shape[0], classes, groups)


class ResNet(nn.Module):
    """The stem, the blocks and the head, in the order of their parameters."""

    def __init__(self, channels: int, classes: int, groups: int) -> None:
        super().__init__()
        self.stem = _conv(channels, WIDTHS[0], 3)
        self.norm = nn.GroupNorm(groups, WIDTHS[0])
        blocks = [BasicBlock(WIDTHS[0], WIDTHS[0], 1, groups) for _ in range(BLOCKS)]
        for before, width in pairwise(WIDTHS):
            blocks += [BasicBlock(before, width, 2, groups)]
            blocks += [BasicBlock(width, width, 1, groups) for _ in range(BLOCKS - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTHS[-1], classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, C) of images (B, channels, H, W)."""
        x = _normed(self.norm, self.stem(x))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two convolutions of 3x3 and a shortcut; the last activation comes after the sum."""

    def __init__(self, channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels, width, 3, stride), nn.GroupNorm(groups, width)
        self.conv2, self.norm2 = _conv(width, width, 3), nn.GroupNorm(groups, width)
        shorter = nn.Sequential(_conv(channels, width, 1, stride), nn.GroupNorm(groups, width))
        self.shortcut = shorter if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner, x = conv_with_input(x, self.conv1.weight, self.conv1.stride[0])
        return _normed(self.norm2, self.conv2(_normed(self.norm1, inner)), self.shortcut(x))


def _normed(norm: nn.GroupNorm, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Apply GroupNorm, add the shortcut, and apply ReLU."""
    return norm_relu(x, norm.num_groups, norm.weight, norm.bias, norm.eps, shortcut)


def _conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias; He's normal weights, cut off at two standard deviations, as Keras draws them."""
    conv = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    std = math.sqrt(2 / (channels * size * size)) / TRUNCATED_STD
    nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std)
    return conv
