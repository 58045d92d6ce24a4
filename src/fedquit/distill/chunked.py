# SPDX-License-Identifier: Apache-2.0
"""FedQUIT's loss of a language model a few positions at a time: loss and gradient in one pass (`losses.Rule`).

Logits of N positions and C tokens take N * C numbers, and the plain loss holds about eight such tensors. Where a
network tells its head and the states before it, `chunked_distillation_loss` computes the logits of a chunk from them,
and writes the gradients of states and head in the same pass: nothing of size N * C is ever kept, and nothing is
computed twice. Where the logits are there already, `distillation_in_chunks` adds their gradient, and little more.

Shapes: N positions, D features, C tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fedquit.core.projection import Projection
from fedquit.distill.losses import Rule, of_examples
from fedquit.distill.virtual_teacher import at_least_single
from fedquit.errors import InputError

MAX_NUMBERS = 1 << 20  # logits of student or teacher at a time: 4 MB in float32
LARGE = 1 << 24  # logits that are there already: so many are worked on at once


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
    return of_examples(losses.view(labels.shape))


def distillation_in_chunks(
    student_logits: Tensor,
    global_logits: Tensor,
    labels: Tensor,
    u: Tensor,
    rule: Rule,
    *,
    large: int = LARGE,
) -> Tensor:
    """Return the loss of each example, in little more memory than the logits and their gradient where these are large.

    Up to `large` logits are computed as `distillation_loss` does; beyond, the gradient can be taken once.

    Args:
        student_logits: `(B, C)`, or `(B, T, C)` for sequences.
        global_logits: the global model's logits, of the same shape. No gradient flows into them.
        labels: the true classes, `(B,)` or `(B, T)`.
        u: uniform numbers in [0, 1) of the labels' shape.
        rule: the virtual teacher and the divergence.
        large: how many logits to work on at once, at most.

    Returns:
        The losses, `(B,)`; of a sequence, the mean over its T positions.
    """
    if student_logits.numel() <= large:
        return of_examples(rule.losses(student_logits, global_logits, labels, u))
    student, teacher = student_logits.flatten(0, -2), global_logits.detach().flatten(0, -2)  # (N, C)
    losses: Tensor = LogitDistillation.apply(  # type: ignore[no-untyped-call]
        student, teacher, labels.flatten(), u.flatten(), rule
    )
    return of_examples(losses.view(labels.shape))


def _chunks(positions: int, classes: int) -> Iterator[slice]:
    size = max(1, MAX_NUMBERS // classes)
    return (slice(start, min(start + size, positions)) for start in range(0, positions, size))


class LogitDistillation(Function):
    """The loss of each row of given logits; the gradient is taken in the same pass, so that no chunk is remembered."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, u: Tensor, rule: Rule) -> Tensor:  # noqa: ANN401, D102
        wide = at_least_single(student[:0]).dtype
        ctx.gradient = torch.empty(student.shape, dtype=wide, device=student.device)
        ctx.given = student.dtype
        losses = torch.empty(len(student), dtype=wide, device=student.device)
        for some in _chunks(*student.shape):
            part = rule.losses_with_gradient(student[some], teacher[some], labels[some], u[some])
            losses[some], ctx.gradient[some] = part
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401, D102
        if ctx.gradient is None:
            raise InputError(
                "the gradient of this loss was taken already, in place: compute the loss again before the second "
                "backward pass, or give distillation_in_chunks a `large` of at least so many logits."
            )
        gradient: Tensor = ctx.gradient.mul_(upstream[0].unsqueeze(-1))
        ctx.gradient = None  # a second backward pass would multiply it again
        return gradient.to(ctx.given), None, None, None, None


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
        teacher = functional.linear(known[some], known_weight, known_bias)
        losses[some], g = rule.losses_with_gradient(z, teacher, labels[some], u[some])
        of_hidden[some] = g.to(weight.dtype) @ weight
        if not trained:
            continue
        g = (g * importance[some].unsqueeze(1)).to(hidden.dtype)
        of_weight.addmm_(g.T, hidden[some])
        of_bias += g.sum(0)
    return losses, of_hidden, of_weight, of_bias
