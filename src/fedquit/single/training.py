# SPDX-License-Identifier: Apache-2.0
"""Train a copy of a model with a loss of its logits and labels: recovery, and methods without a teacher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedquit.distill.batches import Batches, Collate, Data, Forward, Labels, Reader
from fedquit.distill.damage import DamageWarning, Sample, training_damage
from fedquit.distill.stepping import NewOptimizer, Steps, new_optimizer
from fedquit.distill.unlearning import (
    Callback,
    as_given,
    check_count,
    check_first_logits,
    check_options,
    check_rate,
    check_taken,
    copied,
    is_finite,
    learner,
    norms_at_rest,
    place_of,
    take_steps,
)
from fedquit.distill.virtual_teacher import check_labels
from fedquit.errors import NonFiniteError

Losses = Callable[[Tensor, Tensor, "Drawn"], Tensor]


@dataclass(frozen=True)
class Drawn:
    """What a loss may use beside logits and labels.

    Attributes:
        generator: which also shuffled the samples.
        taught: the teacher's logits on the same examples; None without a teacher.
    """

    generator: torch.Generator
    taught: Tensor | None = None


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
    share_frozen: bool,
    teacher: nn.Module | None = None,
    tell_damage: bool = False,
) -> nn.Module:
    """Return a trained copy; the other arguments are those of `fedquit.recover`.

    Args:
        model: the model.
        data: to train on.
        losses: of logits (N, C), labels (N,), and what else a loss may use.
        title: of a progress bar; empty for none.
        teacher: whose logits the loss gets too, in evaluation mode.
        tell_damage: whether a warning says that the model guesses on this data after the training.
    """
    make = new_optimizer(optimizer, check_rate(lr))
    epochs = check_count("epochs", epochs)
    batch_size = check_count("batch_size", batch_size)
    seed = check_options(seed, autocast, callback)
    place = place_of(model, device)
    generator = torch.Generator().manual_seed(seed)
    batches = Batches(data, epochs, batch_size, generator, collate)
    reader = Reader(model, forward=forward, labels=labels, shift=shift, class_dim=class_dim, ignore_index=ignore_index)
    student = learner(copied(model, place, share_frozen=share_frozen), norm=norm, dropout=dropout)
    teaching = copied(teacher, place, share_frozen=True).eval() if teacher is not None else None

    sample = Sample()

    def losses_of(batch: object) -> Tensor | None:
        inputs, targets = reader.split(batch)
        with norms_at_rest(student) if len(targets) == 1 else nullcontext():
            logits = reader.logits(student, inputs)
        taught: Tensor | None = None
        if teaching is not None:
            with torch.no_grad():
                taught = reader.logits(teaching, inputs)
        kept = reader.kept(targets)
        if kept is not None and targets.shape == logits.shape[:-1]:
            logits, targets = logits[kept], targets[kept]
            taught = taught[kept] if taught is not None else None
            if not len(targets):
                return None
        check_labels(targets, logits)
        if not steps.taken:
            check_first_logits(logits.detach(), forward)
        if tell_damage:
            sample.add(inputs, kept, targets, logits)
        flat = taught.flatten(0, -2).float() if taught is not None else None
        return losses(logits.flatten(0, -2).float(), targets.flatten(), Drawn(generator, flat))

    steps = Steps(student, make)
    take_steps(
        steps, losses_of, batches, student, seed=seed, place=place, autocast=autocast, callback=callback, title=title
    )
    check_taken(steps, ignore_index)
    if not is_finite(student):
        raise NonFiniteError(f"the weights are no longer finite after training with lr={lr}: lower it.")
    damage = training_damage(sample, student, reader, lr)
    if damage:
        warnings.warn(damage, DamageWarning, stacklevel=3)
    return as_given(student, model)
