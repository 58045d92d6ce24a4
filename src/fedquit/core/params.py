# SPDX-License-Identifier: Apache-2.0
"""Algebra on parameters. The functions are pure: they change none of their arguments in place.

BatchNorm's running statistics travel among the parameters, under the names that torch gives them. They are no weights:
no gradient moves them, they are averaged like weights, and differences, sums and lengths of updates leave them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedquit.core.types import STATISTICS, Params, Reply
from fedquit.errors import InputError, NoExamplesError, NonFiniteError, RepliesDifferError


def is_statistic(name: str) -> bool:
    """Return whether a tensor of this name is a running statistic, which no gradient moves."""
    return name.rpartition(".")[2] in STATISTICS


def weights_of(a: Params) -> Params:
    """Return the parameters that gradients move; `a` itself where there are no others."""
    return {n: p for n, p in a.items() if not is_statistic(n)} if any(map(is_statistic, a)) else a


def statistics_of(a: Params) -> Params:
    """Return BatchNorm's running statistics, of most models none."""
    return {n: p for n, p in a.items() if is_statistic(n)}


def mean(replies: Iterable[Reply]) -> Params:
    """Average replies with their numbers of examples as weights, as FedAvg does.

    It is one running sum, so that its memory does not grow with the number of clients.

    Raises:
        NoExamplesError: if no reply has any example behind it.
        RepliesDifferError: if the replies do not have the same tensors.
    """
    total: Params = {}
    weight = 0
    for reply in replies:
        if not total:
            total = {n: p * reply.examples for n, p in reply.params.items()}
        else:
            _require_same_tensors(reply, total)
            tensors = [reply.params[n] for n in total]
            torch._foreach_add_(list(total.values()), torch._foreach_mul(tensors, reply.examples))
        weight += reply.examples
    if weight == 0:
        raise NoExamplesError("no client that was asked has any data: there is nothing to average.")
    return {n: p / weight for n, p in total.items()}


def _require_same_tensors(reply: Reply, like: Params) -> None:
    try:
        require_same_shapes(reply.params, like, f"the reply of client {reply.client}")
    except InputError as error:
        raise RepliesDifferError(str(error)) from error


def mix(a: Params, b: Params, weight: float) -> Params:
    """Return weight * a + (1 - weight) * b; all have the same names and shapes."""
    return {n: weight * p + (1 - weight) * b[n] for n, p in a.items()}


def add(a: Params, b: Params, scale: float | Tensor = 1.0) -> Params:
    """Return a + scale * b; the result has the names of `a`, and its running statistics."""
    return {n: p if is_statistic(n) else p + scale * b[n] for n, p in a.items()}


def sub(a: Params, b: Params) -> Params:
    """Return a - b; the result has the names of `a`, without running statistics."""
    return {n: p - b[n] for n, p in weights_of(a).items()}


def foreach_sub(a: Params, b: Params) -> Params:
    """A - b, as `sub`, by one kernel for many tensors: for a server with large models, and never inside `vmap`."""
    a = weights_of(a)
    return _foreach(torch._foreach_sub, a, [b[name] for name in a])


def foreach_add(a: Params, b: Params) -> Params:
    """A + b in the same way."""
    return _foreach(torch._foreach_add, a, [b[name] for name in a])


def foreach_mul(a: Params, factor: float) -> Params:
    """A times a number in the same way."""
    return _foreach(torch._foreach_mul, a, factor)


def _foreach(operation: Callable[..., Sequence[Tensor]], a: Params, other: Sequence[Tensor] | float) -> Params:
    return dict(zip(a, operation(list(a.values()), other), strict=True)) if a else {}


def dot(a: Params, b: Params) -> Tensor:
    """Return the inner product over all weights."""
    return torch.stack([(p * b[n]).sum() for n, p in weights_of(a).items()]).sum()


def norm(a: Params) -> Tensor:
    """Return the Euclidean norm over all weights."""
    return dot(a, a).sqrt()


def placed(a: Params, device: torch.device) -> Params:
    """Return the parameters in that device's memory."""
    return {n: p.to(device) for n, p in a.items()}


def device_of(a: Params) -> torch.device:
    """Return the device of the first tensor; the CPU where there is none."""
    return next((p.device for p in a.values()), torch.device("cpu"))


def nbytes(a: Params) -> int:
    """Return the size of the tensors in bytes, without any header."""
    return sum(p.numel() * p.element_size() for p in a.values())


def fingerprint(a: Params) -> str:
    """Return a short hash of names, shapes and bits, which is equal where the parameters are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(a.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_finite(a: Params, whose: str) -> None:
    """Raise a NonFiniteError for the first tensor with NaN or infinity; `whose` begins it."""
    # One number first: a finite sum has finite terms, and asking a GPU once costs a hundredth of
    # asking for each.
    if not a or bool(torch.isfinite(torch.stack([p.sum(dtype=torch.float64) for p in a.values()]).sum())):
        return
    for name, tensor in a.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"{whose} holds NaN or infinity in {name!r}: lower the learning rate or clip the gradient."
            )


def require_same_shapes(a: Params, like: Mapping[str, Tensor], whose: str) -> None:
    """Raise an InputError where names or shapes differ from `like`; `whose` begins it."""
    if a.keys() != like.keys():
        differing = ", ".join(sorted(a.keys() ^ like.keys())[:3])
        raise InputError(f"{whose} has other parameters than expected ({differing}): are the models the same?")
    for name, tensor in a.items():
        if tensor.shape != like[name].shape:
            raise InputError(
                f"{whose} has shape {tuple(tensor.shape)} in {name!r} where {tuple(like[name].shape)} is expected: "
                "are the models the same?"
            )
