# SPDX-License-Identifier: Apache-2.0
"""Steps that are run one by one, as torch runs everything unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedquit.engine.stacked.schedule import Job, active_clients
from fedquit.engine.stacked.work import GradientFunction, Work


class Steps(Protocol):
    """A way to run the steps of some clients: eager, replayed on a CPU, or captured as CUDA graphs."""

    @property
    def work(self) -> Work:
        """The clients' state."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Run a round from its beginning; `jobs` are in the order of their steps, the most first."""


@dataclass(frozen=True)
class HostClock:
    """A step that the host knows.

    Attributes:
        index: Its place in the schedule, from 0.
        batch_size: The largest of its clients.
    """

    index: int
    batch_size: int
    lr: Tensor | None = None  # that of the task

    @property
    def number(self) -> int:
        """From 1."""
        return self.index + 1


@dataclass(frozen=True)
class EagerSteps:
    """Runs the steps of some clients one by one."""

    work: Work

    def run(self, jobs: Sequence[Job]) -> None:
        """Run a round."""
        run_eagerly(self.work, jobs, self.work.gradients)


def run_eagerly(work: Work, jobs: Sequence[Job], gradients_of: GradientFunction) -> None:
    """Run a round step by step.

    Args:
        work: The clients' state.
        jobs: The clients' work, in the order of their steps, the most first.
        gradients_of: What computes losses and gradients.
    """
    work.load(jobs)
    for t, width in enumerate(active_clients(jobs)):
        work.step(width, HostClock(t, work.inputs.batch_sizes[t]), gradients_of)
