# SPDX-License-Identifier: Apache-2.0
"""Methods for one model: FedQUIT, and those it is compared with where they make sense without a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedquit.distill.batches import Batches, Data, Reader, mapped
from fedquit.distill.stepping import check_gradient, trainable_parameters
from fedquit.distill.unlearning import as_given, copied, place_of, unlearn
from fedquit.errors import InputError
from fedquit.methods.scrub import divergence
from fedquit.methods.ssd import dampened
from fedquit.single.recovery import cross_entropy_losses
from fedquit.single.training import Drawn, trained_copy

How = dict[str, Any]  # the options of `fedquit.forget` that say how to read data and to take steps
READING = ("forward", "labels", "shift", "class_dim", "ignore_index")


@dataclass(frozen=True)
class SingleMethod:
    """A way to unlearn.

    Attributes:
        run: (model, forget, retain, how, options) -> the unlearned model.
        has_rate: whether it takes steps at a rate, which can be chosen with the hold-out.
        needs_retain: whether it uses the retain data itself, or leaves a model that must be trained again.
        options: of its own, with their defaults; None where `unlearn` checks them.
    """

    run: Callable[[nn.Module, Data, Data | None, How, Mapping[str, Any]], nn.Module]
    has_rate: bool = True
    needs_retain: bool = False
    options: Mapping[str, float] | None = None

    def checked(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the defaults of those that were not given.

        Raises:
            InputError: for an option that the method does not have.
        """
        if self.options is None:
            return dict(options)
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = f"choose from {', '.join(self.options)}" if self.options else "leave it out"
            raise InputError(f"the method {name!r} has no option {', '.join(map(repr, unknown))}: {known}.")
        return {**self.options, **options}


def ascent_losses(logits: Tensor, targets: Tensor, _drawn: Drawn) -> Tensor:
    """Gradient ascent on the cross-entropy: minus the loss of each label."""
    return -cross_entropy(logits, targets, reduction="none")


def random_label_losses(logits: Tensor, targets: Tensor, drawn: Drawn) -> Tensor:
    """The cross-entropy of labels drawn uniformly from the wrong classes, anew at each step."""
    draws = torch.rand(targets.shape, generator=drawn.generator).to(targets.device)
    others = (draws * (logits.shape[-1] - 1)).long().clamp(max=logits.shape[-1] - 2)
    return cross_entropy(logits, others + (others >= targets).long(), reduction="none")


def _fedquit(model: nn.Module, forget: Data, _retain: Data | None, how: How, options: Mapping[str, Any]) -> nn.Module:
    return unlearn(model, forget, **how, **options)


def _ascent(model: nn.Module, forget: Data, _retain: Data | None, how: How, _options: Mapping[str, Any]) -> nn.Module:
    return trained_copy(model, forget, ascent_losses, **_titled(how))


def _random_labels(
    model: nn.Module, forget: Data, _retain: Data | None, how: How, _options: Mapping[str, Any]
) -> nn.Module:
    return trained_copy(model, forget, random_label_losses, **_titled(how))


def _not(model: nn.Module, _forget: Data, _retain: Data | None, how: How, _options: Mapping[str, Any]) -> nn.Module:
    """NoT (Khalil et al. 2025): negate the weights of the first layer; recovery does the rest."""
    student = copied(model, place_of(model, how["device"]), share_frozen=how.get("share_frozen", False))
    first = next((p for p in student.parameters() if p.requires_grad and p.ndim >= 2), None)
    if first is None:
        raise InputError("the model has no trainable layer with weights to negate: thaw its first layer.")
    with torch.no_grad():
        first.neg_()
    return as_given(student, model)


def _scrub(model: nn.Module, forget: Data, retain: Data | None, how: How, options: Mapping[str, Any]) -> nn.Module:
    """SCRUB (Kurmanji et al. 2023): epochs away from the teacher on the forget data, and back on the retain data."""
    assert retain is not None
    settings = _titled(how) | {"epochs": 1, "teacher": model}
    if settings["optimizer"] == "adam":  # where student and teacher are equal, weight decay takes the first step
        settings["optimizer"] = lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, weight_decay=5e-4)
    temperature = options["temperature"]

    def away(logits: Tensor, _targets: Tensor, drawn: Drawn) -> Tensor:
        assert drawn.taught is not None
        return -divergence(drawn.taught, logits, temperature)

    def back(logits: Tensor, targets: Tensor, drawn: Drawn) -> Tensor:
        assert drawn.taught is not None
        near = divergence(drawn.taught, logits, temperature)
        return near.mul(options["alpha"]) + cross_entropy_losses(logits, targets, drawn).mul(options["gamma"])

    if not 0 <= options["max_steps"] <= options["min_steps"]:
        raise InputError("scrub has more max_steps than min_steps: a min epoch follows each max epoch.")
    student = model
    for step in range(int(options["min_steps"])):
        seeded = settings | {"seed": settings["seed"] + step}
        if step < options["max_steps"]:
            student = trained_copy(student, forget, away, **seeded)
        student = trained_copy(student, retain, back, **seeded)
    return student


def _ssd(model: nn.Module, forget: Data, retain: Data | None, how: How, options: Mapping[str, Any]) -> nn.Module:
    """Selective synaptic dampening (Foster et al. 2024): scale down weights that matter more to the forget data."""
    assert retain is not None
    student = copied(model, place_of(model, how["device"]), share_frozen=how.get("share_frozen", False)).eval()
    own, others = (_fisher_diagonal(student, data, how) for data in (forget, retain))
    moving = {name: p for name, p in student.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in moving.items()}
    scaled = dampened(weights, own, others, options["alpha"], options["dampening"])
    with torch.no_grad():
        for name, parameter in moving.items():
            parameter.copy_(scaled[name])
    return as_given(student, model)


def _fisher_diagonal(model: nn.Module, data: Data, how: How) -> dict[str, Tensor]:
    """The mean over the examples of the squared gradient of the loss, one backward pass for each example.

    Args:
        model: in evaluation mode, on its device.
        data: the examples.
        how: to read them.
    """
    reader = Reader(model, **{name: how[name] for name in READING})
    place = place_of(model)
    moving = trainable_parameters(model)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in moving.items()}
    count = 0
    with torch.enable_grad():
        for batch in Batches(data, 1, 1, collate=how["collate"]):
            inputs, targets = reader.split(mapped(batch, lambda tensor: tensor.to(place)))
            if len(targets) != 1:
                raise InputError("ssd needs the gradient of single examples: give a DataLoader with batch_size=1.")
            logits, kept = reader.logits(model, inputs), reader.kept(targets)
            logits, targets = (logits, targets) if kept is None else (logits[kept], targets[kept])
            if not targets.numel():
                continue
            loss = cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            check_gradient(loss)
            gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient.float().square())
            count += 1
    return {name: total / max(count, 1) for name, total in sums.items()}


def _titled(how: How) -> How:
    return {name: value for name, value in how.items() if name != "progress"} | {
        "title": "Unlearning" if how["progress"] else ""
    }


METHODS: dict[str, SingleMethod] = {
    "fedquit": SingleMethod(_fedquit),
    "ascent": SingleMethod(_ascent, options={}),
    "random-labels": SingleMethod(_random_labels, options={}),
    "not": SingleMethod(_not, has_rate=False, needs_retain=True, options={}),
    "scrub": SingleMethod(
        _scrub,
        needs_retain=True,
        options={"max_steps": 2, "min_steps": 3, "alpha": 0.001, "gamma": 0.99, "temperature": 4.0},
    ),
    "ssd": SingleMethod(_ssd, has_rate=False, needs_retain=True, options={"alpha": 2.0, "dampening": 1.0}),
}
