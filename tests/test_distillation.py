# SPDX-License-Identifier: Apache-2.0
"""The losses between virtual teacher and student: textbook formulas, gradients, extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.distill.losses import LOSSES, ce, cosine, distillation_loss, kl, mse
from fedquit.distill.virtual_teacher import TEACHERS, virtual_logits


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    C = draw(st.integers(2, 9))
    row = st.lists(st.floats(-9, 9), min_size=C, max_size=C)
    return torch.tensor(draw(row), dtype=torch.float64), torch.tensor(draw(row), dtype=torch.float64)


def textbook(loss: str, teacher: Tensor, student: Tensor) -> float:
    p = [math.exp(z) / sum(math.exp(other) for other in teacher.tolist()) for z in teacher.tolist()]
    q = [math.exp(z) / sum(math.exp(other) for other in student.tolist()) for z in student.tolist()]
    both = list(zip(p, q, strict=True))
    if loss == "kl":
        return sum(a * math.log(a / b) for a, b in both)
    if loss == "ce":
        return -sum(a * math.log(b) for a, b in both)
    if loss == "mse":
        return sum((a - b) ** 2 for a, b in both) / len(both)
    return -sum(a * b for a, b in both) / math.hypot(*p) / math.hypot(*q)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=60)
@given(pair=pairs())
def test_every_loss_is_its_textbook_formula(loss: str, pair: tuple[Tensor, Tensor]) -> None:
    teacher, student = pair
    assert float(LOSSES[loss](teacher, student)) == pytest.approx(textbook(loss, teacher, student), rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(pair=pairs())
def test_gradient_of_kl_is_student_minus_teacher_and_that_of_ce_is_the_same(pair: tuple[Tensor, Tensor]) -> None:
    teacher, student = pair
    expected = student.softmax(-1) - teacher.softmax(-1)
    for loss in (kl, ce):
        logits = student.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(teacher, logits), logits)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_gradients_of_the_other_losses_are_those_of_finite_differences(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    student = torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: LOSSES[loss](teacher, logits), student)


@settings(max_examples=60)
@given(pair=pairs())
def test_kl_is_zero_for_the_teacher_itself_and_never_below(pair: tuple[Tensor, Tensor]) -> None:
    teacher, student = pair
    assert kl(teacher, teacher + 3.0).abs() <= 1e-14  # rounding; softmax does not see the shift
    assert kl(teacher, student) >= -1e-14
    assert mse(teacher, teacher) == 0
    assert -1 - 1e-14 <= cosine(teacher, student) <= 0
    assert abs(cosine(teacher, teacher) + 1) <= 1e-14


def test_kl_and_ce_differ_by_the_entropy_of_the_teacher() -> None:
    teacher, student = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[3.0, 0.5, 0.0]])
    p = teacher.softmax(-1)
    torch.testing.assert_close(ce(teacher, student) - kl(teacher, student), -(p * p.log()).sum(-1))


@pytest.mark.parametrize("C", [2, 10, 10_000])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_ten_thousand_apart_give_finite_losses_and_gradients(loss: str, C: int, dtype: torch.dtype) -> None:
    up = torch.linspace(-5e3, 5e3, C, dtype=dtype)
    down = up.flip(0)
    far = torch.full((C,), -1e4, dtype=dtype)
    far[0] = 0
    for teacher in (up, down, far):
        for given_student in (up, down, far):
            student = given_student.clone().requires_grad_()
            value = LOSSES[loss](teacher, student)
            (gradient,) = torch.autograd.grad(value, student)
            assert value.isfinite()
            assert gradient.isfinite().all()


def test_kl_is_not_clipped_where_the_student_gives_nearly_nothing() -> None:
    teacher = torch.tensor([0.0, -1e4])
    student = torch.tensor([-1e4, 0.0], requires_grad=True)
    value = kl(teacher, student)
    (gradient,) = torch.autograd.grad(value, student)
    assert value == 1e4
    assert gradient.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(loss: str, half: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    teacher, student = torch.randn(4, 7, generator=generator), torch.randn(4, 7, generator=generator).to(half)
    value = LOSSES[loss](teacher, student)
    assert value.dtype == torch.float32
    assert torch.equal(value, LOSSES[loss](teacher, student.float()))
    both = LOSSES[loss](teacher.to(half), student)
    assert both.dtype == torch.float32
    assert torch.equal(both, LOSSES[loss](teacher.to(half).float(), student.float()))


OPTIONS: dict[str, dict[str, float]] = {"fixed": {"v": -2.0}, "temperature": {"tau": 3.0}, "topk": {"k": 2}}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("teacher", [name for name in TEACHERS if name != "random"])
def test_distillation_loss_is_the_loss_of_each_sample_against_the_virtual_teacher(teacher: str, loss: str) -> None:
    generator = torch.Generator().manual_seed(3)
    student, said = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    y, u = torch.randint(5, (6,), generator=generator), torch.zeros(6)
    losses = distillation_loss(student, said, y, u, teacher=teacher, loss=loss, v=-2.0, tau=3.0, k=2)
    virtual = virtual_logits(said, y, teacher, **OPTIONS.get(teacher, {}))
    assert losses.shape == (6,)
    torch.testing.assert_close(losses, LOSSES[loss](virtual, student), rtol=0, atol=0)


def test_distillation_loss_of_the_random_teacher_is_drawn_from_u() -> None:
    student, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(4)), torch.zeros(4, dtype=torch.int64)
    u = torch.tensor([0.1, 0.3, 0.6, 0.9])
    losses = distillation_loss(student, torch.zeros(4, 4), y, u, teacher="random", loss="kl", v=0.0, tau=1.0, k=1)
    torch.testing.assert_close(losses, -student.log_softmax(-1).diagonal(), rtol=1e-6, atol=1e-6)


def test_a_sequence_counts_with_the_mean_over_its_positions() -> None:
    generator = torch.Generator().manual_seed(5)
    student, said = torch.randn(2, 3, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)
    y, u = torch.randint(4, (2, 3), generator=generator), torch.zeros(2, 3)
    losses = distillation_loss(student, said, y, u, teacher="min", loss="kl", v=0.0, tau=1.0, k=1)
    by_position = [
        distillation_loss(student[:, t], said[:, t], y[:, t], u[:, t], teacher="min", loss="kl", v=0.0, tau=1.0, k=1)
        for t in range(3)
    ]
    torch.testing.assert_close(losses, torch.stack(by_position, -1).mean(-1))


def test_no_gradient_flows_into_the_global_model_and_all_of_it_into_the_student() -> None:
    generator = torch.Generator().manual_seed(6)
    student = torch.randn(2, 4, generator=generator).requires_grad_()
    said = torch.randn(2, 4, generator=generator).requires_grad_()
    y = torch.tensor([1, 3])
    losses = distillation_loss(student, said, y, torch.zeros(2), teacher="min", loss="kl", v=0.0, tau=1.0, k=1)
    losses.sum().backward()
    assert said.grad is None
    expected = student.softmax(-1) - virtual_logits(said.detach(), y).softmax(-1)
    assert student.grad is not None
    torch.testing.assert_close(student.grad, expected)


def test_distillation_loss_is_the_same_under_vmap() -> None:
    generator = torch.Generator().manual_seed(7)
    student, said = torch.randn(3, 6, 5, generator=generator), torch.randn(3, 6, 5, generator=generator)
    y, u = torch.randint(5, (3, 6), generator=generator), torch.rand(3, 6, generator=generator)
    for teacher in TEACHERS:

        def per_client(student: Tensor, said: Tensor, y: Tensor, u: Tensor, teacher: str = teacher) -> Tensor:
            return distillation_loss(student, said, y, u, teacher=teacher, loss="kl", v=0.0, tau=2.0, k=2)

        one_by_one = torch.stack([per_client(*client) for client in zip(student, said, y, u, strict=True)])
        torch.testing.assert_close(torch.func.vmap(per_client)(student, said, y, u), one_by_one, rtol=1e-6, atol=1e-6)
