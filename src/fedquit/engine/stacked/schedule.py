# SPDX-License-Identifier: Apache-2.0
"""The plans of several clients as tables of the same shape, which a step reads from memory.

Clients differ in how many steps they take and in the size of their last batch. They are sorted by their number of
steps, the most first, so that those that still train are always the first rows. A batch that is not full is padded,
and the padding has weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from fedquit.core import ClientId, Params, Sent
from fedquit.engine.api import ClientIndices
from fedquit.engine.plan import Plan


@dataclass(frozen=True)
class Job:
    """One client's work in a round.

    Attributes:
        client: Whose work it is.
        indices: Its examples.
        plan: Its steps.
        sent: What it was sent, what it had in its memory, and what the task prepared from that.
        start: The parameters that it begins with.
        seed: Of the random numbers inside a network that drops.
        layers: The client's own BatchNorm as it begins, where that is local.
    """

    client: ClientId
    indices: ClientIndices
    plan: Plan
    sent: Sent
    start: Params
    seed: int = 0
    layers: Params = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps the client takes."""
        return len(self.plan.sizes)


def active_clients(jobs: Sequence[Job]) -> list[int]:
    """Return for each step how many clients take it; `jobs` are in the order of their steps, the most first."""
    steps = [job.steps for job in jobs]
    return [sum(1 for s in steps if s > t) for t in range(steps[0])]


@dataclass(frozen=True)
class Schedule:
    """The plans of K clients, padded to (T steps, K, B, ...); a slice of it for one step is (K, B, ...).

    Attributes:
        at: Positions in the data set, (T, K, B).
        share: The weight of each example in the mean of its batch, (T, K, B); 0 for padding.
        u: Uniform numbers of the step, (T, K, B, *label shape).
        fixed: Uniform numbers of the example, (T, K, B, *label shape).
        forget: Whether the example is marked to be forgotten, (T, K, B).
        variation: Uniform numbers for the augmentation, (T, K, B, draws).
    """

    at: Tensor
    share: Tensor
    u: Tensor
    fixed: Tensor
    forget: Tensor
    variation: Tensor

    @classmethod
    def empty(cls, steps: int, clients: int, batch: int, label_shape: Sequence[int], draws: int) -> Schedule:
        """Return a schedule that is all padding, in the host's memory.

        Args:
            steps: T.
            clients: K.
            batch: B.
            label_shape: The shape of one label.
            draws: How many uniform numbers augment one example.
        """
        shape = (steps, clients, batch)
        return cls(
            at=torch.zeros(shape, dtype=torch.long),
            share=torch.zeros(shape, dtype=torch.float64),
            u=torch.zeros(*shape, *label_shape),
            fixed=torch.zeros(*shape, *label_shape),
            forget=torch.zeros(shape, dtype=torch.bool),
            variation=torch.zeros(*shape, draws),
        )

    @property
    def tables(self) -> list[Tensor]:
        """All tables, in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self)]

    def to(self, device: torch.device) -> Schedule:
        """Return the schedule in that device's memory."""
        return Schedule(*(table.to(device) for table in self.tables))

    def fill(self, jobs: Sequence[Job]) -> None:
        """Write these clients' plans in place. All but the drawing of random numbers happens on the device."""
        device = self.at.device
        batches = [(t, k, size) for k, job in enumerate(jobs) for t, size in enumerate(job.plan.sizes)]
        step, row, sizes = torch.tensor(batches, dtype=torch.long).view(-1, 3).to(device).unbind(1)  # (batches,) each
        at = torch.cat([job.indices.at[job.plan.order] for job in jobs]).to(device)  # (examples,)
        first = sizes.cumsum(0) - sizes  # (batches,): where each begins in `at`
        numbers = torch.arange(len(sizes), device=device)
        batch = numbers.repeat_interleave(sizes, output_size=len(at))  # (examples,): the batch of each
        place = step[batch], row[batch], torch.arange(len(at), device=device) - first[batch]
        for table in self.tables:
            table.zero_()
        # Padding repeats an example of the same batch: the loss of another client's example may overflow.
        self.at[step, row] = at[first].unsqueeze(-1)
        self.at[place] = at
        self.share[place] = 1 / sizes.double()[batch]
        self.u[place] = torch.cat([job.plan.uniforms for job in jobs]).to(device)
        self.fixed[place] = torch.cat([job.indices.fixed[job.plan.order] for job in jobs]).to(device)
        self.forget[place] = torch.cat([job.indices.forget[job.plan.order] for job in jobs]).to(device)
        self.variation[place] = torch.cat([job.plan.draws for job in jobs]).to(device)

    def at_step(self, t: int | Tensor, width: int, batch: int) -> Schedule:
        """Return one step of the first clients, (width, batch, ...).

        Args:
            t: The step, from 0; as a tensor (1,), whatever it holds when a captured graph runs.
            width: How many clients.
            batch: How many examples of each batch.
        """
        return Schedule(*(step_of(table, t, width)[:, :batch] for table in self.tables))


def step_of(table: Tensor, t: int | Tensor, width: int) -> Tensor:
    """Return step t of the first clients from a table (T, K, ...) as (width, ...)."""
    return table[t, :width] if isinstance(t, int) else table.index_select(0, t)[0, :width]
