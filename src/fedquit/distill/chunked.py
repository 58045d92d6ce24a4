# SPDX-License-Identifier: Apache-2.0
"""FedQUIT's loss of a language model in memory that does not grow with the vocabulary.

Logits of N positions and C tokens take N * C numbers, and the plain loss holds about eight such tensors. Here a few
positions are computed at a time, from the states before the head. The gradient with respect to states and head is
written in the same pass, since p_student - p_teacher is known as soon as both are: nothing of size N * C is ever kept,
and nothing is computed twice.

Shapes: N positions, D features, C tokens. In a pass, `MAX_NUMBERS / C` positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fedquit.core.projection import Projection
from fedquit.distill.losses import LOSSES, log_probabilities
from fedquit.distill.virtual_teacher import at_least_single, teach

MAX_NUMBERS = 1 << 20  # logits of student or teacher at a time: 4 MB in float32


@dataclass(frozen=True)
class Rule:
    """The virtual teacher and the divergence, as `fedquit.distill.losses.distillation_loss` takes them."""

    teacher: str
    loss: str
    v: float
    tau: float
    k: int


def chunked_distillation_loss(
    student: Projection, global_model: Projection, labels: Tensor, u: Tensor, rule: Rule
) -> Tensor:
    """Return the loss of each sequence, as `distillation_loss` does, without holding all logits.

    Args:
        student: states `(B, T, D)` and head of the student.
        global_model: those of the global model. No gradient flows into them.
        labels: the true tokens, `(B, T)`.
        u: uniform numbers of the labels' shape, for the teacher `random`.
        rule: the virtual teacher and the divergence.

    Returns:
        The losses, `(B,)`: of a sequence, the mean over its T positions.
    """
    hidden = student.hidden.flatten(0, -2)  # (N, D)
    known = global_model.hidden.detach().flatten(0, -2)
    weight, bias = global_model.weight.detach(), global_model.bias
    losses: Tensor = TokenDistillation.apply(  # type: ignore[no-untyped-call]
        hidden,
        student.weight,
        student.bias,
        known,
        weight,
        None if bias is None else bias.detach(),
        labels.flatten(),
        u.flatten(),
        rule,
    )[0]
    return losses.view(labels.shape).flatten(1).mean(1)


def _chunks(positions: int, classes: int) -> Iterator[slice]:
    size = max(1, MAX_NUMBERS // classes)
    return (slice(start, min(start + size, positions)) for start in range(0, positions, size))


def _loss_and_gradient(z: Tensor, virtual: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Return the loss of each row (n, C) and its gradient with respect to the student's logits z."""
    if loss in ("kl", "ce"):
        student = log_probabilities(z)
        teacher = log_probabilities(virtual)
        share = teacher.exp()
        difference = teacher - student if loss == "kl" else -student
        return (share * difference).sum(-1), student.exp() - share
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        losses = LOSSES[loss](virtual, leaf)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


class TokenDistillation(Function):
    """The loss of each position, and the gradients of states, head and bias where every position counts the same."""

    @staticmethod
    def forward(  # noqa: D102
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        known: Tensor,
        known_weight: Tensor,
        known_bias: Tensor | None,
        labels: Tensor,
        u: Tensor,
        rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ones = at_least_single(hidden.new_ones(len(hidden)))
        return _computed(hidden, weight, bias, known, known_weight, known_bias, labels, u, rule, ones)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401, D102
        *tensors, ctx.rule = inputs
        _, of_hidden, of_weight, of_bias = output
        ctx.mark_non_differentiable(of_hidden, of_weight, of_bias)
        ctx.save_for_backward(*tensors, of_hidden, of_weight, of_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        *inputs, of_hidden, of_weight, of_bias = ctx.saved_tensors
        g = gradients[0]  # (N,)
        if _all_equal(g):
            of_weight, of_bias = of_weight * g[0], of_bias * g[0]
        elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            hidden, weight, bias, known, known_weight, known_bias, labels, u = inputs
            again = _computed(hidden, weight, bias, known, known_weight, known_bias, labels, u, ctx.rule, g)
            _, _, of_weight, of_bias = again
        of_hidden = of_hidden * g.unsqueeze(1).to(of_hidden.dtype)
        of_bias = of_bias if ctx.needs_input_grad[2] else None
        return of_hidden, of_weight if ctx.needs_input_grad[1] else None, of_bias, *[None] * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:  # noqa: ANN401 - torch's protocol
        """One client after the other: so many logits are held as for one."""
        results = []
        for client in range(info.batch_size):
            mine = [
                x if dim is None or not isinstance(x, Tensor) else x.select(dim, client)
                for x, dim in zip(inputs, in_dims, strict=True)
            ]
            results.append(TokenDistillation.apply(*mine))  # type: ignore[no-untyped-call]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0, 0, 0)


def _all_equal(g: Tensor) -> bool:
    """Return whether all positions count the same; while a CUDA graph is captured nobody can look, so no."""
    if g.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool((g == g[0]).all())


def _computed(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    known: Tensor,
    known_weight: Tensor,
    known_bias: Tensor | None,
    labels: Tensor,
    u: Tensor,
    rule: Rule,
    importance: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses (N,), and the gradients of states (N, D), head (C, D) and bias (C,).

    The gradient of a position's states is that of its own loss; those of head and bias are of the sum of all losses,
    each multiplied by its `importance` (N,). Of a frozen head there is none, but an empty tensor.
    """
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    losses = torch.empty_like(importance)
    of_hidden = torch.empty_like(hidden)
    of_weight = torch.zeros_like(weight) if trained else weight.new_zeros(0)
    of_bias = torch.zeros_like(weight[:, 0]) if trained else weight.new_zeros(0)
    for some in _chunks(len(hidden), len(weight)):
        z = at_least_single(functional.linear(hidden[some], weight, bias))  # (n, C)
        virtual = functional.linear(known[some], known_weight, known_bias)
        virtual = teach(rule.teacher, virtual, labels[some], u[some], v=rule.v, tau=rule.tau, k=rule.k)
        losses[some], g = _loss_and_gradient(z, virtual, rule.loss)
        of_hidden[some] = g.to(weight.dtype) @ weight
        if not trained:
            continue
        g = (g * importance[some].unsqueeze(1)).to(hidden.dtype)
        of_weight.addmm_(g.T, hidden[some])
        of_bias += g.sum(0)
    return losses, of_hidden, of_weight, of_bias
