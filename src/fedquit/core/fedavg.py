# SPDX-License-Identifier: Apache-2.0
"""FedAvg: ordinary training, and the recovery after every unlearning.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. Each round: a cohort, local epochs from the global model, the
mean of the replies with weights n_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core.params import mean
from fedquit.core.types import Batch, ClientId, Federation, Model, Params, Reply, Sent, Split, State, Task, Training

Watch = Callable[[int, Params, Reply], None]  # (round, start, reply)
AfterRound = Callable[[int, Mapping[ClientId, int]], None]  # (round, examples of each client that took part)
Replace = Callable[[Task, ClientId], Task]


@dataclass(frozen=True)
class Learn(Task):
    """Cross-entropy on the client's own labels."""

    augments: ClassVar[bool] = True

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), batch.y)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example.

    Args:
        logits: `(B, C)`, or `(B, T, C)` for sequences.
        labels: integers, `(B,)` or `(B, T)`.

    Returns:
        The losses, `(B,)`; of a sequence, the mean over its T positions.
    """
    losses = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def cohort(clients: Sequence[ClientId], size: int, seed: int) -> list[ClientId]:
    """Draw the clients of one round, without replacement.

    Args:
        clients: all that can be asked.
        size: how many to draw; 0 means all of them.
        seed: fixes the draw.

    Returns:
        The drawn clients, in the order of `clients`.
    """
    if size == 0 or size >= len(clients):
        return list(clients)
    drawn = torch.randperm(len(clients), generator=torch.Generator().manual_seed(seed))[:size]
    return [clients[i] for i in sorted(drawn.tolist())]


def fedavg(
    fed: Federation,
    state: State,
    training: Training,
    clients: Sequence[ClientId],
    *,
    split: Split = "all",
    watch: Watch | None = None,
    after_round: AfterRound | None = None,
    replace_task: Replace | None = None,
) -> State:
    """Do one round of FedAvg.

    Args:
        fed: the federation.
        state: where training stands.
        training: the clients' task, the size of the cohort and the schedule of the learning rate.
        clients: those from whom the cohort is drawn.
        split: which part of their data they train on.
        watch: called with the round, the parameters it started from, and each reply as it arrives.
        after_round: called once with the round and the number of examples of each client that took
            part.
        replace_task: called with the task and each client of the cohort; returns the task that the
            client gets.

    Returns:
        The state after the round, with the mean of the replies, weighted by their numbers of
        examples.

    Raises:
        NoExamplesError: if no client of the cohort has any data.
    """
    examples: dict[ClientId, int] = {}
    by_task: dict[Task, list[ClientId]] = {}
    for c in cohort(clients, training.clients_per_round, fed.seed):
        task = replace_task(training.task, c) if replace_task else training.task
        by_task.setdefault(training.task_at(state.clock, task), []).append(c)

    def replies() -> Iterator[Reply]:
        for task, members in by_task.items():
            for reply in fed.run(task, members, split=split, start=state.params):
                examples[reply.client] = reply.examples
                if watch:
                    watch(state.clock, state.params, reply)
                yield reply

    w = mean(replies())
    if after_round:
        after_round(state.clock, examples)
    return state.next(w).tick()
