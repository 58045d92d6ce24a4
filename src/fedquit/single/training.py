# SPDX-License-Identifier: Apache-2.0
"""Train a copy of a model with a loss of its logits and labels: recovery, and methods without a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedquit.distill.batches import Batches, Collate, Data, Forward, Labels, Reader
from fedquit.distill.stepping import NewOptimizer, Steps, new_optimizer
from fedquit.distill.unlearning import (
    Callback,
    as_given,
    check_count,
    check_rate,
    copied,
    learner,
    place_of,
    student_logits,
    take_steps,
)
from fedquit.distill.virtual_teacher import check_labels
from fedquit.errors import NonFiniteError

Losses = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def trained_copy(  # noqa: D417 - the others are those of `fedquit.recover`
    model: nn.Module,
    data: Data,
    losses: Losses,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    optimizer: str | NewOptimizer,
    forward: Forward | None,
    labels: Labels | None,
    shift: bool | Literal["auto"],
    class_dim: int,
    ignore_index: int,
    collate: Collate | None,
    norm: str,
    dropout: bool,
    autocast: torch.dtype | None,
    seed: int,
    device: torch.device | str | None,
    callback: Callback | None,
    title: str,
) -> nn.Module:
    """Return a trained copy; the other arguments are those of `fedquit.recover`.

    Args:
        model: the model.
        data: to train on.
        losses: of logits (N, C), labels (N,) and the generator that the samples were shuffled with.
        title: of a progress bar; empty for none.
    """
    make = new_optimizer(optimizer, check_rate(lr))
    check_count("epochs", epochs)
    check_count("batch_size", batch_size)
    place = place_of(model, device)
    generator = torch.Generator().manual_seed(seed)
    batches = Batches(data, epochs, batch_size, generator, collate)
    reader = Reader(model, forward=forward, labels=labels, shift=shift, class_dim=class_dim, ignore_index=ignore_index)
    student = learner(copied(model, place), norm=norm, dropout=dropout)

    def losses_of(batch: object) -> Tensor | None:
        inputs, targets = reader.split(batch)
        logits = student_logits(reader, student, inputs)
        kept = reader.kept(targets)
        if kept is not None and targets.shape == logits.shape[:-1]:
            logits, targets = logits[kept], targets[kept]
            if not len(targets):
                return None
        check_labels(targets, logits)
        return losses(logits.flatten(0, -2).float(), targets.flatten(), generator)

    steps = Steps(student, make)
    take_steps(
        steps, losses_of, batches, student, seed=seed, place=place, autocast=autocast, callback=callback, title=title
    )
    if not all(weight.isfinite().all() for weight in (*student.parameters(), *student.buffers())):
        raise NonFiniteError(f"the weights are no longer finite after training with lr={lr}: lower it.")
    return as_given(student, model)
