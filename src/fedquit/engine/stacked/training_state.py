# SPDX-License-Identifier: Apache-2.0
"""What stacked clients need for a network with dropout or BatchNorm: seeds, and running statistics of each client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedquit.core import Model, Params, Task
from fedquit.core.params import placed, statistics_of
from fedquit.engine.plan import step_key
from fedquit.engine.stacked.schedule import Job
from fedquit.engine.stacked.sent import stacked
from fedquit.engine.training import training_form


class TrainingState:
    """The seeds (K,) and the running statistics (K, *shape) of K clients.

    A captured CUDA graph reads fixed addresses, so a round's values are copied into the tensors of the round before.
    """

    def __init__(self, form: Model | None, jobs: Sequence[Job], device: torch.device) -> None:
        """Allocate.

        Args:
            form: The network as ordinary training computes it; None where the task or the network has no such form.
            jobs: The clients' work; of all rounds the number of clients and the shapes are the same.
            device: Where they are computed with.
        """
        self.form = form
        self.seeds = torch.zeros(len(jobs), dtype=torch.long, device=device)
        self.statistics = stacked([placed(statistics_of(job.start), device) for job in jobs])

    @classmethod
    def of(cls, model: Model, task: Task, jobs: Sequence[Job], x: Tensor) -> TrainingState | None:
        """Return the state that a task needs; None for networks that compute the same in training and evaluation.

        Args:
            model: The network.
            task: What is done.
            jobs: The clients' work.
            x: The examples of all clients, (N, ...), on the device that computes.
        """
        form = training_form(model, x) if task.augments else None
        if form is None and not statistics_of(jobs[0].start):
            return None
        return cls(form, jobs, x.device)

    def load(self, jobs: Sequence[Job]) -> None:
        """Take what the clients of a round begin with."""
        device = self.seeds.device
        self.seeds.copy_(torch.tensor([job.seed for job in jobs]))
        for row, job in enumerate(jobs):
            for name, tensor in placed(statistics_of(job.start), device).items():
                self.statistics[name][row].copy_(tensor)

    def keys(self, width: int, step: int | Tensor) -> Tensor:
        """Return the keys of the first clients in a step, (width,)."""
        return step_key(self.seeds[:width], step)

    def of_clients(self, width: int) -> Params:
        """Return the statistics of the first clients, (width, *shape)."""
        return {n: p[:width] for n, p in self.statistics.items()}

    def update(self, new: Params, width: int) -> None:
        """Take the statistics after a step of the first clients."""
        for name, tensor in new.items():
            self.statistics[name][:width].copy_(tensor)

    def of_row(self, row: int) -> Params:
        """Return one client's statistics at the end of a round."""
        return {n: p[row].clone() for n, p in self.statistics.items()}
