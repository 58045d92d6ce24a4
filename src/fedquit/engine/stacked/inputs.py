# SPDX-License-Identifier: Apache-2.0
"""The examples of a round as a network reads them; on a GPU all are preprocessed ahead of the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import AsStored
from fedquit.engine.stacked.schedule import Job, Schedule, step_of

MAX_PREPROCESSED_BYTES = 4 << 30  # of a round's examples that are preprocessed ahead of its steps
PREPROCESSED_AT_ONCE = 1 << 14  # examples


class Inputs:
    """The schedule of several clients and the examples that it names."""

    def __init__(self, dataset: Dataset, schedule: Schedule, draws: int, ahead: torch.dtype | None) -> None:
        """Allocate what the examples need.

        Args:
            dataset: All examples, on the device that computes.
            schedule: (T, K, B), on the same device.
            draws: How many uniform numbers augment one example; 0 for no augmentation.
            ahead: The type in which all examples of a round are preprocessed before its first step, where they fit;
                None preprocesses those of a step in the step.
        """
        self.dataset = dataset
        self.schedule = schedule
        self.batch_sizes: list[int] = []  # of each step: the largest of its clients
        self._draws = draws
        self.preprocessed = None if ahead is None else self._allocate(ahead)  # (T, K, B, *example) or None

    def _allocate(self, dtype: torch.dtype) -> Tensor | None:
        shape = *self.schedule.at.shape, *self.dataset.shape
        too_large = math.prod(shape) * dtype.itemsize > MAX_PREPROCESSED_BYTES
        if isinstance(self.dataset.look, AsStored) or too_large:
            return None
        return torch.zeros(shape, dtype=dtype, device=self.schedule.at.device)

    def load(self, jobs: Sequence[Job]) -> None:
        """Take the plans of a round, and preprocess its examples where that is done ahead."""
        self.schedule.fill(jobs)
        sizes_by_step = zip_longest(*(job.plan.sizes for job in jobs), fillvalue=0)
        self.batch_sizes = [max(sizes) for sizes in sizes_by_step]
        if self.preprocessed is not None:
            self._preprocess_all(self.preprocessed, steps=len(self.batch_sizes))

    def _preprocess_all(self, into: Tensor, steps: int) -> None:
        steps_at_once = max(1, PREPROCESSED_AT_ONCE // self.schedule.at[0].numel())
        for start in range(0, steps, steps_at_once):
            some = slice(start, min(start + steps_at_once, steps))
            part = into[some]
            part.copy_(self._preprocess(self.schedule.at[some], self.schedule.variation[some]).view(part.shape))

    def _preprocess(self, at: Tensor, variation: Tensor) -> Tensor:
        """Return the examples at these positions, flattened to (number of positions, *example)."""
        stored = self.dataset.x[at.flatten()]
        look = self.dataset.look
        return look.varied(stored, variation.flatten(0, -2)) if self._draws else look.plain(stored)

    def x(self, plan: Schedule, t: int | Tensor) -> Tensor:
        """Return the examples of step t, (width, B, *example), for its part of the schedule."""
        width = len(plan.at)
        if self.preprocessed is None:
            x = self._preprocess(plan.at, plan.variation)  # (width * B, *example)
        else:
            x = step_of(self.preprocessed, t, width)  # (width, B, *example)
        return x.view(width, -1, *self.dataset.shape)
