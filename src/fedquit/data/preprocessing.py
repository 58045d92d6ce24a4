# SPDX-License-Identifier: Apache-2.0
"""Preprocessing and augmentation: images are stored as bytes, and normalised on the device.

A preprocessing has two functions. `plain` is deterministic: evaluation and unlearning use it.
`varied` augments, and takes all its randomness as uniform numbers from outside, so that runs repeat
and engines agree: ordinary training uses it (`Task.augments`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedquit.errors import InputError

ROTATION = 0.06 * 2 * math.pi  # at most, either way: 21.6 degrees
PADDING = 2  # on each side of a 32x32 image, before it is cropped to 32x32 again
ENLARGED = 244 / 224  # an image is first made so much larger than what is cropped from it
AREA = (0.08, 1.0)  # of a random resized crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # its width over its height

Vary = Literal["none", "rotate-pad-crop-flip", "enlarge-crop-flip", "resized-crop-flip"]
DRAWS: dict[Vary, int] = {
    "none": 0,
    "rotate-pad-crop-flip": 4,
    "enlarge-crop-flip": 3,
    "resized-crop-flip": 5,
}


class Preprocessing(Protocol):
    """How a batch of stored examples becomes what a network reads."""

    @property
    def draws(self) -> int:
        """Uniform numbers that `varied` needs for each example; 0 where nothing is augmented."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one example as the network reads it, from its shape as stored."""

    def plain(self, x: Tensor) -> Tensor:
        """Return the examples `(B, …)` as the network reads them, without augmentation."""

    def varied(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the examples `(B, …)` as the network reads them, augmented.

        Args:
            x: the examples as stored.
            u: uniform numbers in [0, 1), `(B, draws)`.
        """


Look = Preprocessing  # its former name


@dataclass(frozen=True)
class AsStored:
    """No preprocessing: the examples are stored as the network reads them, as floats or tokens."""

    draws: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def plain(self, x: Tensor) -> Tensor:
        return x

    def varied(self, x: Tensor, u: Tensor) -> Tensor:
        return x


AS_STORED = AsStored()


@dataclass(frozen=True)
class Pixels:
    """Images (N, C, H, W) of bytes: scaled to 0..1, normalised, and resized to what the network reads.

    The augmentations (`vary`) are those of FedQUIT's authors. Each is one bilinear sampling of the stored image:
    `rotate-pad-crop-flip` turns it by up to 21.6 degrees (what comes in from outside is mirrored), pads it by 2 zeros
    on each side, crops it to its size and flips it; `enlarge-crop-flip` resizes it to 244/224 of `size` and crops that;
    `resized-crop-flip` stretches a part of 8 to 100 % of its area, of ratio 3/4 to 4/3, to `size`.

    Attributes:
        mean: of the pixels of each channel, scaled to 0..1.
        std: their standard deviations.
        size: the side in pixels of what the network reads; 0 keeps the size as stored.
        vary: the augmentation, or "none".
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int = 0
    vary: Vary = "none"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(s > 0 for s in self.std):
            raise InputError("an image needs one mean and one standard deviation above 0 for each channel.")
        if self.vary not in DRAWS:
            raise InputError(f"there is no augmentation {self.vary!r}: choose one of {', '.join(DRAWS)}.")

    @property
    def draws(self) -> int:
        return DRAWS[self.vary]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape (C, size, size) of one image as the network reads it."""
        return (stored[0], self.size, self.size) if self.size else stored

    def plain(self, x: Tensor) -> Tensor:
        """Return images (B, C, H, W) of bytes normalised and resized, without augmentation."""
        x = self._normalised(x)
        if self.size and x.shape[-2:] != (self.size, self.size):
            x = functional.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return x

    def varied(self, x: Tensor, u: Tensor) -> Tensor:
        """Return images normalised, resized and augmented.

        Args:
            x: images (B, C, H, W) of bytes.
            u: uniform numbers in [0, 1), (B, draws): the only randomness.
        """
        if self.vary == "rotate-pad-crop-flip":
            return _turned_and_shifted(self._normalised(x), u)
        if self.vary == "enlarge-crop-flip":
            side = self.size or x.shape[-1]
            margin = round(side * (ENLARGED - 1))
            corner = (u[:, :2] * (margin + 1)).floor().clamp(max=margin) / max(margin, 1)  # whole pixels
            return self._cropped(x, torch.full_like(corner, side / (side + margin)), corner, u[:, 2])
        if self.vary == "resized-crop-flip":
            return self._cropped(x, _random_sides(u[:, 0], u[:, 1]), u[:, 2:4], u[:, 4])
        return self.plain(x)

    def _normalised(self, x: Tensor) -> Tensor:
        mean, std = (_for_channels(v, x.device) for v in (self.mean, self.std))
        return (x.float() / 255 - mean) / std

    def _cropped(self, x: Tensor, sides: Tensor, corner: Tensor, flip: Tensor) -> Tensor:
        """Crop (sides and corner as shares of height and width), flip, and resize to `size`."""
        high, wide = x.shape[-2:]
        centre = sides - 1 + 2 * corner * (1 - sides)  # in the grid's coordinates, from -1 to 1
        rows = _centres(self.size or high, sides)
        columns = _centres(self.size or wide, sides)
        y = centre[:, 0, None] + sides[:, 0, None] * rows
        at = centre[:, 1, None] + sides[:, 1, None] * columns * _sign(flip)[:, None]
        grid = torch.stack(torch.broadcast_tensors(at[:, None, :], y[:, :, None]), -1)
        return functional.grid_sample(self._normalised(x), grid, padding_mode="border", align_corners=False)


@cache  # a CUDA graph must find its constants on the device
def _for_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


def _turned_and_shifted(x: Tensor, u: Tensor) -> Tensor:
    """Rotate, pad with zeros, crop and flip, as one sampling of the source."""
    high, wide = x.shape[-2:]
    angle = (2 * u[:, 0] - 1) * ROTATION
    offset = (u[:, 1:3] * (2 * PADDING + 1)).floor().clamp(max=2 * PADDING) - PADDING  # whole pixels, y and x
    rows = _pixels(high, u) + offset[:, 0, None]  # in the padded image, relative to the unpadded one
    columns = torch.where(u[:, 3, None] < 0.5, _pixels(wide, u), _pixels(wide, u).flip(0)) + offset[:, 1, None]
    inside = _within(rows, high)[:, :, None] & _within(columns, wide)[:, None, :]
    dy, dx = (rows - (high - 1) / 2)[:, :, None], (columns - (wide - 1) / 2)[:, None, :]  # from the centre
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    grid = torch.stack([(cos * dx - sin * dy) * (2 / wide), (sin * dx + cos * dy) * (2 / high)], -1)
    turned = functional.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    return turned * inside.unsqueeze(1)


def _pixels(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=like.dtype)


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _centres(count: int, like: Tensor) -> Tensor:
    """Return the centres of `count` pixels in the grid's coordinates, from -1 to 1."""
    return (2 * _pixels(count, like) + 1) / count - 1


def _sign(flip: Tensor) -> Tensor:
    return torch.where(flip < 0.5, 1.0, -1.0)


def _random_sides(area: Tensor, ratio: Tensor) -> Tensor:
    """Return height and width as shares of the image's, `(B, 2)`, of random area and ratio."""
    share = AREA[0] + (AREA[1] - AREA[0]) * area
    wide_to_high = torch.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * ratio)
    return torch.stack([(share / wide_to_high).sqrt(), (share * wide_to_high).sqrt()], -1).clamp(max=1.0)
