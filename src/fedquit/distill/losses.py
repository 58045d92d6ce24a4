# SPDX-License-Identifier: Apache-2.0
"""The divergence of the student from the virtual teacher, for each sample.

kl      Kullback-Leibler divergence KL(teacher || student), FedQUIT's own; its gradient in the student's logits is
        p_student - p_teacher
ce      cross-entropy of the student under the teacher: kl plus a constant, with the same gradient
mse     mean over the classes of the squared difference of the probabilities
cosine  minus the cosine similarity of the two probability vectors, from -1 (equal) to 0

All take logits `(…, C)` and `(…, C)`, return `(…)`, and are computed from log-probabilities that
are never clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedquit.distill.virtual_teacher import at_least_single, teach


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log softmax over the last dimension, in float32 at least."""
    return at_least_single(logits).log_softmax(-1)


def kl(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """KL(teacher || student), summed over the classes."""
    teacher = log_probabilities(teacher_logits)
    return (teacher.exp() * (teacher - log_probabilities(student_logits))).sum(-1)


def ce(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Cross-entropy of the student under the teacher, summed over the classes."""
    return -(log_probabilities(teacher_logits).exp() * log_probabilities(student_logits)).sum(-1)


def mse(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Squared difference of the probabilities, averaged over the classes."""
    return (log_probabilities(teacher_logits).exp() - log_probabilities(student_logits).exp()).square().mean(-1)


def cosine(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Minus the cosine similarity of the probabilities, whose norms are never below C to the power of -1/2."""
    teacher = log_probabilities(teacher_logits).exp()
    student = log_probabilities(student_logits).exp()
    return -(teacher * student).sum(-1) * (teacher.square().sum(-1) * student.square().sum(-1)).rsqrt()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "ce": ce, "mse": mse, "cosine": cosine}


def distillation_loss(
    student_logits: Tensor,
    global_logits: Tensor,
    labels: Tensor,
    u: Tensor,
    *,
    teacher: str,
    loss: str,
    v: float,
    tau: float,
    k: int,
) -> Tensor:
    """Return the loss of each sample against the virtual teacher; nothing is checked.

    Args:
        student_logits: `(B, C)`, or `(B, T, C)` for sequences.
        global_logits: the global model's logits, of the same shape. No gradient flows into them.
        labels: the true classes, `(B,)` or `(B, T)`.
        u: uniform numbers in [0, 1) of the labels' shape, for the teacher `random`.
        teacher: a name from `fedquit.distill.TEACHERS`.
        loss: a name from `LOSSES`.
        v: the true logit of the teacher `fixed`.
        tau: the temperature of the teacher `temperature`.
        k: how many classes the teacher `topk` keeps.

    Returns:
        The losses, `(B,)`; of a sequence, the mean over its T positions.
    """
    virtual = teach(teacher, global_logits.detach(), labels, u, v=v, tau=tau, k=k)
    losses = LOSSES[loss](virtual, student_logits)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


LARGE = 2**24  # numbers of logits that are worked on at once, at most
CHUNK = 2**22  # of larger ones, those that are worked on at a time


class _RowByRow(torch.autograd.Function):
    """Losses of rows of logits, some rows at a time; the gradient is taken at once, so that no chunk is remembered."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses_of: Callable[[Tensor, slice], Tensor], rows: int) -> Tensor:  # noqa: ANN401
        wide = at_least_single(logits[:0]).dtype
        ctx.gradient = torch.empty(logits.shape, dtype=wide, device=logits.device)
        ctx.given = logits.dtype
        losses = torch.empty(len(logits), dtype=wide, device=logits.device)
        for begin in range(0, len(logits), rows):
            at = slice(begin, begin + rows)
            part = logits[at].detach().requires_grad_()
            with torch.enable_grad():
                some = losses_of(part, at)
                (ctx.gradient[at],) = torch.autograd.grad(some.sum(), part)
            losses[at] = some.detach()
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        gradient: Tensor = ctx.gradient.mul_(upstream[0].unsqueeze(-1))
        return gradient.to(ctx.given), None, None


def distillation_in_chunks(
    student_logits: Tensor,
    global_logits: Tensor,
    labels: Tensor,
    u: Tensor,
    *,
    teacher: str,
    loss: str,
    v: float,
    tau: float,
    k: int,
    large: int = LARGE,
    chunk: int = CHUNK,
) -> Tensor:
    """As `distillation_loss`, in little more memory than the logits and their gradient where these are large.

    The logits of a language model are (B, T, vocabulary), and the loss on all of them at once needs about eight copies.
    Up to `large` numbers are computed as `distillation_loss` does; beyond, the gradient can be taken once.

    Args:
        student_logits: `(B, C)`, or `(B, T, C)` for sequences.
        global_logits: the global model's logits, of the same shape.
        labels: the true classes, `(B,)` or `(B, T)`.
        u: uniform numbers in [0, 1) of the labels' shape.
        teacher: a name from `fedquit.distill.TEACHERS`.
        loss: a name from `LOSSES`.
        v: the true logit of the teacher `fixed`.
        tau: the temperature of the teacher `temperature`.
        k: how many classes the teacher `topk` keeps.
        large: how many numbers of logits to work on at once, at most.
        chunk: how many of larger ones to work on at a time.

    Returns:
        The losses, `(B,)`; of a sequence, the mean over its T positions.
    """
    if student_logits.numel() <= large:
        return distillation_loss(
            student_logits, global_logits, labels, u, teacher=teacher, loss=loss, v=v, tau=tau, k=k
        )  # fmt: skip
    flat_teacher = global_logits.detach().flatten(0, -2)
    flat_labels, flat_u = labels.flatten(), u.flatten()

    def losses_of(part: Tensor, at: slice) -> Tensor:
        virtual = teach(teacher, flat_teacher[at], flat_labels[at], flat_u[at], v=v, tau=tau, k=k)
        return LOSSES[loss](virtual, part)

    rows = max(1, chunk // student_logits.shape[-1])
    flat: Tensor = _RowByRow.apply(student_logits.flatten(0, -2), losses_of, rows)  # type: ignore[no-untyped-call]
    losses = flat.view(labels.shape)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
