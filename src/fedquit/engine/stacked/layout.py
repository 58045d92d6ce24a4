# SPDX-License-Identifier: Apache-2.0
"""Where each parameter lies in a client's row of the stacked buffer."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fedquit.core import Params

# Numbers. Every parameter begins at a multiple of this, so that loads are vectorised and TMA can read the weights:
# SGD took 0.88 ms with rows of 11,220,132 numbers and takes 0.32 ms with aligned ones (docs/engine.md).
ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """The layout of one client's parameters in a row of numbers.

    Attributes:
        shapes: The shape of each parameter, in the order of the row.
        output_channels_last: Whether weights of convolutions (O, I, S, S) lie as (S, S, I, O), as kernels read them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    output_channels_last: bool

    @cached_property
    def starts(self) -> list[int]:
        """Where each parameter begins; the last entry is the size of a row."""
        aligned = (-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes.values())
        return list(accumulate(aligned, initial=0))

    @property
    def row_size(self) -> int:
        """How many numbers a row has, with the gaps that align its parameters."""
        return self.starts[-1]

    @property
    def sizes(self) -> dict[int, int]:
        """How many numbers each parameter has, by where it begins."""
        return dict(zip(self.starts, map(math.prod, self.shapes.values()), strict=False))

    def views(self, rows: Tensor) -> Params:
        """Return the parameters of K clients by name, as views (K, *shape) of their rows (K, row_size)."""
        views: Params = {}
        for (name, shape), start in zip(self.shapes.items(), self.starts, strict=False):
            part = rows[:, start : start + math.prod(shape)]  # (K, numbers)
            if self.output_channels_last and len(shape) == 4:
                out_channels, in_channels, height, width = shape
                taps = part.view(-1, height, width, in_channels, out_channels)  # (K, S, S, I, O)
                views[name] = taps.permute(0, 4, 3, 1, 2)  # (K, O, I, S, S)
            else:
                views[name] = part.view(-1, *shape)
        return views

    def fill(self, rows: Tensor, params: Mapping[str, Tensor | None], add_at: Container[int] = ()) -> None:
        """Write parameters, or gradients, into rows.

        Args:
            rows: Written to, (K, row_size).
            params: By name, (K, *shape) or (1, *shape) for the same in every row; None stands for zeros.
            add_at: Parameters that begin here are added to what the rows hold, instead of replacing it.
        """
        targets = []
        sources = []
        for (name, view), start in zip(self.views(rows).items(), self.starts, strict=False):
            values = params[name]
            if start in add_at:
                if values is not None:
                    view.add_(values)
            elif values is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(values.expand_as(view))
        if targets:
            torch._foreach_copy_(targets, sources)
