# SPDX-License-Identifier: Apache-2.0
"""Methods that need nothing but the model and the data to forget, and the names of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedquit.distill.batches import Data
from fedquit.distill.unlearning import as_given, copied, place_of, unlearn
from fedquit.errors import InputError
from fedquit.single.training import Losses, trained_copy


def ascent_losses(logits: Tensor, targets: Tensor, _generator: torch.Generator) -> Tensor:
    """Gradient ascent on the cross-entropy: minus the loss of each label."""
    return -cross_entropy(logits, targets, reduction="none")


def random_label_losses(logits: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """The cross-entropy of labels drawn uniformly from the wrong classes, anew at each step."""
    draws = torch.rand(targets.shape, generator=generator).to(targets.device)
    others = (draws * (logits.shape[-1] - 1)).long().clamp(max=logits.shape[-1] - 2)
    return cross_entropy(logits, others + (others >= targets).long(), reduction="none")


def _with_losses(name: str, losses: Losses, model: nn.Module, data: Data, **options: Any) -> nn.Module:  # noqa: ANN401
    """A method that takes steps on the forget data with a loss of its own.

    Args:
        name: of the method.
        losses: of logits (N, C), labels (N,) and a generator.
        model: the model.
        data: to forget.
        options: those of `fedquit.forget`.
    """
    unknown = sorted(set(options) - set(inspect.signature(unlearn).parameters))
    if unknown or {"teacher", "loss"} & set(options):
        wrong = unknown or sorted({"teacher", "loss"} & set(options))
        raise InputError(f"the method {name!r} has no option {', '.join(map(repr, wrong))}: leave it out.")
    title = "Unlearning" if options.pop("progress") else ""
    return trained_copy(model, data, losses, title=title, **options)


def negate(model: nn.Module, _data: Data, *, device: torch.device | str | None = None, **options: object) -> nn.Module:
    """NoT (Khalil et al. 2025): negate the weights of the first layer; recovery does the rest.

    Args:
        model: whose first parameter of two dimensions or more is negated.
        device: where the copy is returned.
        options: those of other methods, which it does not use.
    """
    student = copied(model, place_of(model, device))
    first = next((p for p in student.parameters() if p.requires_grad and p.ndim >= 2), None)
    if first is None:
        raise InputError("the model has no trainable layer with weights to negate: thaw its first layer.")
    with torch.no_grad():
        first.neg_()
    return as_given(student, model)


METHODS: dict[str, Callable[..., nn.Module]] = {
    "fedquit": unlearn,
    "ascent": partial(_with_losses, "ascent", ascent_losses),
    "random-labels": partial(_with_losses, "random-labels", random_label_losses),
    "not": negate,
}
