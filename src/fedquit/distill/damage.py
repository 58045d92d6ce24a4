# SPDX-License-Identifier: Apache-2.0
"""Whether a rate was too large, as far as the data that a model was changed on can tell.

Unlearning brings the student nearer to its virtual teacher, and leaves the relations among the wrong classes as they
were, so that what the student says of them still goes with what the given model said. Training makes a model better
than guessing on the data that it is trained on. Where one of these fails, the rate was too large; few examples show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedquit.distill.batches import Reader
from fedquit.distill.losses import Rule, kl
from fedquit.distill.virtual_teacher import TEACHERS

MOST_ROWS = 256  # labels that are looked at
MOST_LOGITS = 2**22  # of these rows together
FEWEST = 20  # labels, below which nothing is told
LEAST = 0.2  # correlation; docs/your-model.md has what it is at healthy and at destroying rates
NOTHING = 0.1  # nats: a model this near to its teacher hardly tells classes apart; a loss this near to log C is a guess
FARTHER = 1.1  # times the distance to the teacher before, which moved statistics and rounding may reach
ONE_CLASS = 0.5  # the share of labels that the one class which a model names must have


class DamageWarning(UserWarning):
    """A rate has destroyed a model."""


@dataclass
class Sample:
    """The first examples that a model is changed on, and what the model said of them before.

    Attributes:
        inputs: of each batch, as the reader gives them to a model.
        kept: of each batch, the mask of the labels that count; None where all do.
        labels: of each batch, those that count, (n,).
        logits: of each batch, the given model's at these labels, (n, C).
    """

    inputs: list[Any] = field(default_factory=list)
    kept: list[Tensor | None] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    rows: int = 0

    def add(self, inputs: Any, kept: Tensor | None, labels: Tensor, logits: Tensor) -> None:  # noqa: ANN401
        """Remember a batch, as long as there are too few rows.

        Args:
            inputs: of the batch.
            kept: the mask of its labels that count.
            labels: those that count, (…).
            logits: at these labels, (…, C).
        """
        most = min(MOST_ROWS, MOST_LOGITS // logits.shape[-1]) - self.rows
        if most <= 0 or not labels.numel():
            return
        rows = logits.detach().flatten(0, -2)[:most].float()
        self.inputs.append(inputs)
        self.kept.append(kept)
        self.labels.append(labels.flatten()[:most])
        self.logits.append(rows.clone())
        self.rows += len(rows)

    def logits_of(self, model: nn.Module, reader: Reader) -> Tensor:
        """What a model says of the same rows, (n, C), in evaluation mode, in which it is left."""
        model.eval()
        parts = []
        with torch.no_grad():
            for inputs, kept, labels in zip(self.inputs, self.kept, self.labels, strict=True):
                logits = reader.logits(model, inputs)
                rows = logits.flatten(0, -2) if kept is None else logits[kept]
                parts.append(rows[: len(labels)].detach().float())
        return torch.cat(parts)


def unlearning_damage(sample: Sample, student: nn.Module, reader: Reader, rule: Rule, lr: float) -> str:
    """A sentence where a student left its teacher, or lost what the given model knew of the wrong classes; else "".

    Args:
        sample: examples of the data to forget, with the given model's logits.
        student: after the unlearning; it is left in evaluation mode.
        reader: gives it the examples.
        rule: has the virtual teacher.
        lr: the rate, for the sentence.
    """
    if sample.rows < FEWEST or rule.teacher == "random":  # which draws another target at every step
        return ""
    labels, before = torch.cat(sample.labels), torch.cat(sample.logits)
    after = sample.logits_of(student, reader)
    target = rule.virtual(before, labels, torch.zeros_like(labels, dtype=before.dtype))
    was, now = (float(kl(target, logits).mean()) for logits in (before, after))
    if was < NOTHING:
        return ""
    if now > FARTHER * was:
        return (
            f"After unlearning with lr={lr:g} the model is farther from its virtual teacher than before "
            f"(KL divergence {now:.3g}, was {was:.3g}): the rate is too large, lower it."
        )
    related = relation(before, after, labels) if TEACHERS[rule.teacher].keeps_relations else None
    if related is None or related >= LEAST:
        return ""
    return (
        f"After unlearning with lr={lr:g} what the model says of the wrong classes has no relation left to what the "
        f"given one said (correlation {related:.2f}): the rate destroys the model, lower it."
    )


def relation(before: Tensor, after: Tensor, labels: Tensor) -> float | None:
    """The correlation of two models' logits of the wrong classes, beyond the mean of each row and of each class.

    Args:
        before: one model's logits, (n, C).
        after: the other's.
        labels: the true classes, (n,).

    Returns:
        From -1 to 1; None where there are less than two wrong classes, or the first model says the same of every
        example.
    """
    if before.shape[-1] < 3:
        return None
    wrong = torch.ones_like(before).scatter_(1, labels.unsqueeze(1), 0.0)
    one, other = (_centred(logits.double(), wrong.double()) for logits in (before, after))
    if float(one.norm()) < 1e-6:
        return None
    return float((one * other).sum() / (one.norm() * other.norm()).clamp_min(1e-12))


def _centred(logits: Tensor, wrong: Tensor) -> Tensor:
    """Logits (n, C) of the wrong classes, less the means of their rows and then of their columns; 0 at the true."""
    rows = (logits * wrong).sum(1, keepdim=True) / wrong.sum(1, keepdim=True)
    deviations = (logits - rows) * wrong
    columns = deviations.sum(0) / wrong.sum(0).clamp_min(1.0)
    return (deviations - columns) * wrong


def training_damage(sample: Sample, model: nn.Module, reader: Reader, lr: float) -> str:
    """A sentence where a model guesses on the very data that it was trained on; "" elsewhere.

    Args:
        sample: examples of that data.
        model: after the training; it is left in evaluation mode.
        reader: gives it the examples.
        lr: the rate, for the sentence.
    """
    if sample.rows < FEWEST:
        return ""
    labels = torch.cat(sample.labels)
    logits = sample.logits_of(model, reader)
    loss = float(nn.functional.cross_entropy(logits, labels))
    even = math.log(logits.shape[-1])
    named = logits.argmax(1)
    share = float((labels == named[0]).float().mean())
    if loss > even + NOTHING:
        what = f"the loss on the data it was trained on is {loss:.2f}, above that of an even guess ({even:.2f})"
    elif bool((named == named[0]).all()) and share < ONE_CLASS:
        what = f"the model names class {int(named[0])} for all of {len(labels)} examples it was trained on"
    else:
        return ""
    return f"After training with lr={lr:g} {what}: lower the rate, or, if it is small, give more epochs."
