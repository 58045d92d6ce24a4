# SPDX-License-Identifier: Apache-2.0
"""How far the student is from the virtual teacher.

kl      Kullback-Leibler divergence KL(teacher || student), FedQUIT's own; its gradient in the student's logits is
        p_student - p_teacher
ce      cross-entropy of the student under the teacher: kl plus a constant, with the same gradient
mse     mean over the classes of the squared difference of the probabilities
cosine  minus the cosine similarity of the two probability vectors, from -1 (equal) to 0

All are per sample, `[..., C]` and `[..., C]` to `[...]`, and computed from log-probabilities that are never clipped.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedquit.distill.virtual_teacher import at_least_single, teach


def log_probabilities(logits: Tensor) -> Tensor:
    """Log softmax, in float32 at least."""
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
    teacher, student = log_probabilities(teacher_logits).exp(), log_probabilities(student_logits).exp()
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
    """The loss of each sample, `[B]`, unchecked; a sequence, `[B, T, C]`, counts with the mean over its positions.

    The global model is no part of what is learned: no gradient flows into `global_logits`.
    """
    virtual = teach(teacher, global_logits.detach(), labels, u, v=v, tau=tau, k=k)
    losses = LOSSES[loss](virtual, student_logits)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
