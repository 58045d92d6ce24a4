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
