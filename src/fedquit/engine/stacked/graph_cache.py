# SPDX-License-Identifier: Apache-2.0
"""The graphs that are kept from round to round: CUDA graphs on a GPU, traced steps on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedquit.engine.stacked.capture import CapturedSteps
from fedquit.engine.stacked.replay import TracedSteps

MAX_CAPTURED = 6  # kinds of work whose CUDA graphs are kept: a method has two or three, and each holds some gigabytes


@dataclass
class GraphCache:
    """Graphs that engines over the same data set share: CUDA graphs on a GPU, traced steps on a CPU.

    Attributes:
        captured: By all that a CUDA graph depends on; the last used is the last.
        traced: The same for steps on a CPU.
        told: Warnings that were given, and are not repeated.
        max_clients: How many clients fit into memory at once, known since memory ran out; 0: it never has.
    """

    captured: dict[object, CapturedSteps] = field(default_factory=dict)
    traced: dict[object, TracedSteps] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    max_clients: int = 0
    _stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the one stream for all captures: cuBLAS keeps a workspace for every stream that it was used on."""
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    def shrink(self, most: int) -> None:
        """Drop captured steps until so many are left: those that were used last."""
        for key in list(self.captured)[: max(0, len(self.captured) - most)]:
            del self.captured[key]

    def clear(self) -> None:
        """Drop all graphs."""
        self.captured.clear()
        self.traced.clear()
