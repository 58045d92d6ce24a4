# SPDX-License-Identifier: Apache-2.0
"""Two networks that a laptop trains in seconds. Normalisation, where there is any, is GroupNorm."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from fedquit.errors import InputError

GROUPS = 2  # as in the authors' networks


def mlp(input_shape: tuple[int, ...], classes: int, *, hidden: int = 64, layers: int = 1) -> nn.Module:
    """A multilayer perceptron: `layers` hidden layers of `hidden` units, for inputs of any shape.

    Args:
        input_shape: of one example, without the batch dimension.
        classes: the number of classes, C.
        hidden: units of a hidden layer.
        layers: hidden layers.
    """
    if hidden < 1 or layers < 1:
        raise InputError(f"mlp has hidden={hidden} and layers={layers}: both must be 1 or more.")
    widths = [math.prod(input_shape), *[hidden] * layers]
    body = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(hidden, classes))


def cnn(input_shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """Two blocks of strided convolution, GroupNorm and ReLU, then a linear layer; for images.

    Args:
        input_shape: (channels, height, width) of one image.
        classes: the number of classes, C.
        width: channels of the first block; the second has twice as many.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise InputError(f"cnn needs images (channels, height, width) from 4x4 on, not {tuple(input_shape)}: use mlp.")
    if width < GROUPS or width % GROUPS:
        raise InputError(f"cnn has width={width}: it must be a multiple of {GROUPS}, the groups of its GroupNorm.")
    channels, high, wide = input_shape
    pixels = math.ceil(high / 4) * math.ceil(wide / 4)  # after two strides of 2
    return nn.Sequential(
        *_block(channels, width), *_block(width, 2 * width), nn.Flatten(), nn.Linear(2 * width * pixels, classes)
    )


def _block(channels: int, width: int) -> list[nn.Module]:
    # A stride costs a fifth of what pooling after a full convolution does on a CPU, and learns as
    # well here.
    return [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, width), nn.ReLU()]
