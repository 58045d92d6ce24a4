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
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.distill.virtual_teacher import at_least_single, teach


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log softmax over the last dimension, in float32 at least."""
    return at_least_single(logits).log_softmax(-1)


def kl(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """KL(teacher || student), summed over the classes."""
    return _kl(log_probabilities(teacher_logits), log_probabilities(student_logits))


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def ce(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Cross-entropy of the student under the teacher, summed over the classes."""
    return _ce(log_probabilities(teacher_logits), log_probabilities(student_logits))


def _ce(teacher: Tensor, student: Tensor) -> Tensor:
    return -(teacher.exp() * student).sum(-1)


def mse(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Squared difference of the probabilities, averaged over the classes."""
    return (log_probabilities(teacher_logits).exp() - log_probabilities(student_logits).exp()).square().mean(-1)


def cosine(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Minus the cosine similarity of the probabilities, whose norms are never below C to the power of -1/2."""
    teacher = log_probabilities(teacher_logits).exp()
    student = log_probabilities(student_logits).exp()
    return -(teacher * student).sum(-1) * (teacher.square().sum(-1) * student.square().sum(-1)).rsqrt()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "ce": ce, "mse": mse, "cosine": cosine}
# From log-probabilities: those whose gradient in the student's logits is p_student - p_teacher.
_OF_LOG_PROBABILITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": _kl, "ce": _ce}


@dataclass(frozen=True)
class Rule:
    """FedQUIT's loss: the virtual teacher, and the divergence from it.

    Attributes:
        teacher: a name from `fedquit.distill.TEACHERS`.
        loss: a name from `LOSSES`.
        v: the true logit of the teacher `fixed`.
        tau: the temperature of the teacher `temperature`.
        k: how many classes the teacher `topk` keeps.
    """

    teacher: str
    loss: str
    v: float
    tau: float
    k: int

    def virtual(self, global_logits: Tensor, labels: Tensor, u: Tensor) -> Tensor:
        """Return the virtual teacher's logits; no gradient flows through them."""
        return teach(self.teacher, global_logits.detach(), labels, u, v=self.v, tau=self.tau, k=self.k)

    def losses(self, student_logits: Tensor, global_logits: Tensor, labels: Tensor, u: Tensor) -> Tensor:
        """Return the loss of each prediction, `(…)`.

        Args:
            student_logits: `(…, C)`.
            global_logits: the global model's, `(…, C)`.
            labels: the true classes, `(…)`.
            u: uniform numbers in [0, 1), `(…)`, for the teacher `random`.
        """
        return LOSSES[self.loss](self.virtual(global_logits, labels, u), student_logits)

    def losses_with_gradient(
        self, student_logits: Tensor, global_logits: Tensor, labels: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of N predictions, `(N,)`, and their gradient in the student's logits, `(N, C)`.

        Both are without a graph: who computes a few predictions at a time keeps nothing of them. Arguments as in
        `losses`.
        """
        virtual = self.virtual(global_logits, labels, u)
        if self.loss in _OF_LOG_PROBABILITIES:
            with torch.no_grad():
                teacher, student = log_probabilities(virtual), log_probabilities(student_logits)
                losses = _OF_LOG_PROBABILITIES[self.loss](teacher, student)
                return losses, student.exp_().sub_(teacher.exp_())
        with torch.enable_grad():
            leaf = student_logits.detach().requires_grad_()
            losses = LOSSES[self.loss](virtual, leaf)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient


def of_examples(losses: Tensor) -> Tensor:
    """Return the loss of each example, `(B,)`, from those of its predictions, `(B,)` or `(B, T)`: their mean."""
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


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
    rule = Rule(teacher, loss, v, tau, k)
    return of_examples(rule.losses(student_logits, global_logits, labels, u))
