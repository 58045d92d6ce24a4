# SPDX-License-Identifier: Apache-2.0
"""The chunked loss of a language model: the plain loss and its gradients, without a tensor of all logits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedquit.core.projection import Projection
from fedquit.distill import chunked
from fedquit.distill.chunked import chunked_distillation_loss, distillation_in_chunks
from fedquit.distill.losses import LOSSES, Rule, distillation_loss
from fedquit.distill.virtual_teacher import TEACHERS
from fedquit.errors import InputError

B, T, D, C = 3, 5, 6, 11


def projections(bias: bool, seed: int = 0) -> tuple[Projection, Projection, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = [drawn(B, T, D), drawn(C, D), drawn(C) if bias else None]
    for tensor in student:
        if tensor is not None:
            tensor.requires_grad_()
    teacher = Projection(drawn(B, T, D), drawn(C, D), drawn(C) if bias else None)
    labels = torch.randint(C, (B, T), generator=generator)
    return Projection(*student), teacher, labels, torch.rand(B, T, generator=generator)  # type: ignore[arg-type]


def leaves(student: Projection) -> list[Tensor]:
    return [t for t in (student.hidden, student.weight, student.bias) if t is not None]


@pytest.mark.parametrize("weights", [None, [0.2, 0.0, 0.8]], ids=["mean", "padded"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("teacher", "loss"), [*((t, "kl") for t in TEACHERS), *(("min", name) for name in LOSSES)])
def test_it_is_the_plain_loss_with_its_gradients(
    teacher: str, loss: str, bias: bool, weights: list[float] | None
) -> None:
    """With chunks of two positions; the examples of a batch count the same, or not."""
    student, global_model, y, u = projections(bias)
    importance = torch.full((B,), 1 / B) if weights is None else torch.tensor(weights)
    rule = Rule(teacher, loss, v=-3.0, tau=2.0, k=3)
    with mock.patch.object(chunked, "MAX_NUMBERS", 2 * C):
        losses = chunked_distillation_loss(student, global_model, y, u, rule)
        gradients = torch.autograd.grad((losses * importance).sum(), leaves(student))
    options = {"teacher": teacher, "loss": loss, "v": -3.0, "tau": 2.0, "k": 3}
    plain = distillation_loss(student.logits, global_model.logits, y, u, **options)  # type: ignore[arg-type]
    expected = torch.autograd.grad((plain * importance).sum(), leaves(student))
    torch.testing.assert_close(losses, plain, rtol=1e-12, atol=1e-12)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_a_second_backward_pass_through_large_logits_is_refused() -> None:
    """Their gradient is scaled in place: a second pass would scale it again. Small logits are computed by autograd."""
    student, global_model, y, u = projections(bias=True)
    rule = Rule("min", "kl", v=0.0, tau=1.0, k=5)
    for large in (1, B * T * C):
        logits = student.logits.detach().requires_grad_()
        loss = 3 * distillation_in_chunks(logits, global_model.logits, y, u, rule, large=large).sum()
        (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
        if large == 1:
            with pytest.raises(InputError, match="compute the loss again before the second backward pass"):
                torch.autograd.grad(loss, logits)
        else:
            torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], first, rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient() -> None:
    student, global_model, y, u = projections(bias=False)
    student = Projection(student.hidden, student.weight.detach())
    losses = chunked_distillation_loss(student, global_model, y, u, Rule("min", "kl", 0.0, 1.0, 5))
    (gradient,) = torch.autograd.grad(losses.sum(), [student.hidden])
    assert bool(gradient.abs().sum() > 0)
    assert losses.requires_grad


def test_clients_under_vmap_are_computed_one_by_one() -> None:
    both = [projections(bias=True, seed=seed) for seed in (0, 1)]
    rule = Rule("min", "kl", 0.0, 1.0, 5)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, known: Tensor, y: Tensor, u: Tensor) -> Tensor:
        teacher = Projection(known, both[0][1].weight, both[0][1].bias)  # all share the head of the global model
        return chunked_distillation_loss(Projection(hidden, weight, bias), teacher, y, u, rule)

    stacked = [
        torch.stack(parts)
        for parts in zip(
            *[(s.hidden, s.weight, s.bias, g.hidden, y, u) for s, g, y, u in both],
            strict=True,
        )
    ]
    stacked = [t.detach().requires_grad_(t.is_floating_point()) for t in stacked]
    losses = vmap(loss)(*stacked)
    gradients = torch.autograd.grad(losses.sum(), stacked[:3])
    for client, (student, global_model, y, u) in enumerate(both):
        teacher = Projection(global_model.hidden, both[0][1].weight, both[0][1].bias)
        expected = chunked_distillation_loss(student, teacher, y, u, rule)
        torch.testing.assert_close(losses[client], expected)
        for mine, wanted in zip(gradients, torch.autograd.grad(expected.sum(), leaves(student)), strict=True):
            torch.testing.assert_close(mine[client], wanted)


@pytest.mark.parametrize("classes", [64, 4096])
def test_no_tensor_is_as_large_as_all_logits(classes: int) -> None:
    """The largest tensor that the loss makes is a chunk, or a gradient of the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> object:
            out = func(*args, **(kwargs or {}))  # type: ignore[operator]
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    self.numbers = max(self.numbers, tensor.numel())
            return out

    positions, features = 256, 4
    hidden = torch.randn(4, positions // 4, features, requires_grad=True)
    weight = torch.randn(classes, features, requires_grad=True)
    teacher = Projection(torch.randn(4, positions // 4, features), torch.randn(classes, features))
    y = torch.randint(classes, (4, positions // 4))
    with mock.patch.object(chunked, "MAX_NUMBERS", 1 << 13), Largest() as largest:  # type: ignore[no-untyped-call]
        losses = chunked_distillation_loss(
            Projection(hidden, weight), teacher, y, y.float(), Rule("min", "kl", 0.0, 1.0, 5)
        )
        torch.autograd.grad(losses.mean(), [hidden, weight])
    assert largest.numbers <= max(1 << 13, classes * features)
    assert largest.numbers < positions * classes
