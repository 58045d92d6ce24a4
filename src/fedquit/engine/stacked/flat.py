# SPDX-License-Identifier: Apache-2.0
"""A step's gradients as a function from a flat list of tensors to another, which can be traced and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from fedquit.core import Params, Sent
from fedquit.engine.stacked.work import GradientFunction, StepResult, StepTensors


def flattened(step: StepTensors) -> list[Tensor]:
    """Return all tensors of a step, always in the same order."""
    return [
        step.share,
        *step.batch,
        *step.params.values(),
        *step.copies.values(),
        *_tensors(step.shared),
        *_tensors(step.shared_low),
        *_tensors(step.per_client),
        *step.statistics.values(),
        *([] if step.keys is None else [step.keys]),
    ]


def computed(gradients_of: GradientFunction, like: StepTensors, *tensors: Tensor) -> list[Tensor | None]:
    """Compute losses, gradients and statistics, in this order, from a flat list of tensors.

    Args:
        gradients_of: What computes them.
        like: A step whose names the tensors get.
        tensors: As `flattened` returns them; parameters and copies become leaves of autograd.
    """
    given = iter(tensors)
    step = StepTensors(
        share=next(given),
        batch=tuple(next(given) for _ in like.batch),
        params=_leaves(like.params, given),
        copies=_leaves(like.copies, given),
        shared=_sent(like.shared, given),
        shared_low=_sent(like.shared_low, given),
        per_client=_sent(like.per_client, given),
        statistics=_params(like.statistics, given),
        keys=None if like.keys is None else next(given),
    )
    loss, gradients, statistics = gradients_of(step)
    return [loss.detach(), *gradients, *statistics.values()]


def result_of(outputs: Sequence[Tensor | None], like: StepTensors) -> StepResult:
    """Return what `computed` returned, with its names."""
    loss = outputs[0]
    assert loss is not None
    leaves = len(like.copies) + len(like.params)
    statistics = dict(zip(like.statistics, outputs[1 + leaves :], strict=True))
    return StepResult(loss, outputs[1 : 1 + leaves], {n: s for n, s in statistics.items() if s is not None})


def _tensors(sent: Sent) -> list[Tensor]:
    return [p for params in sent.values() for p in params.values()]


def _params(like: Mapping[str, Tensor], given: Iterator[Tensor]) -> Params:
    return {n: next(given) for n in like}


def _leaves(like: Mapping[str, Tensor], given: Iterator[Tensor]) -> Params:
    return {n: next(given).detach().requires_grad_() for n in like}


def _sent(like: Sent, given: Iterator[Tensor]) -> Sent:
    return {name: _params(params, given) for name, params in like.items()}
