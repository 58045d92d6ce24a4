# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import fields
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.audit.scores import Scores, js_of_logits, logits_of, score_examples
from fedquit.core.fedavg import cross_entropy
from fedquit.errors import InputError, NonFiniteError
from signal_world import Given, drawn, of_logits

quick = settings(max_examples=40)
rows = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=6)


def same(a: Scores, b: Scores, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    for f in fields(Scores):
        np.testing.assert_allclose(getattr(a, f.name), getattr(b, f.name), rtol=rtol, atol=atol, err_msg=f.name)


def exactly(z: list[float], y: int) -> dict[str, Decimal]:
    """With 80 digits, straight from the definitions."""
    getcontext().prec = 80
    e = [Decimal(v).exp() for v in z]
    p = [v / sum(e) for v in e]
    wrong = sum((-p[i] * (1 - p[i]).ln() for i in range(len(p)) if i != y), Decimal(0))
    return {
        "confidence": p[y],
        "loss": -p[y].ln(),
        "phi": p[y].ln() - (1 - p[y]).ln(),
        "entropy": -sum((v * v.ln() for v in p), Decimal(0)),
        "modified_entropy": -(1 - p[y]) * p[y].ln() + wrong,
    }


def test_three_classes_worked_out_by_hand() -> None:
    found = of_logits(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([1]))
    assert found.label.tolist() == [1]
    assert found.correct.tolist() == [0.0]
    assert found.confidence[0] == pytest.approx(0.3, rel=1e-6)
    assert found.loss[0] == pytest.approx(-math.log(0.3), rel=1e-6)
    assert found.phi[0] == pytest.approx(math.log(0.3 / 0.7), rel=1e-6)
    assert found.entropy[0] == pytest.approx(-0.5 * math.log(0.5) - 0.3 * math.log(0.3) - 0.2 * math.log(0.2), rel=1e-6)
    by_hand = -0.7 * math.log(0.3) - 0.5 * math.log(0.5) - 0.2 * math.log(0.8)
    assert found.modified_entropy[0] == pytest.approx(by_hand, rel=1e-6)


@quick
@given(z=rows, pick=st.integers(0, 5))
def test_every_number_agrees_with_eighty_digits(z: list[float], pick: int) -> None:
    y = pick % len(z)
    found = of_logits(torch.tensor([z], dtype=torch.float32), torch.tensor([y]))
    for name, value in exactly(z, y).items():
        got = getattr(found, name)[0]
        assert got == pytest.approx(float(value), rel=1e-9, abs=1e-13), name


def test_logits_ten_thousand_apart_stay_finite_and_exact() -> None:
    z = torch.tensor([[1e4, 0.0, 0.0], [1e4, 0.0, 0.0], [-1e4, 1e4, 0.0]])
    found = of_logits(z, torch.tensor([0, 1, 0]))
    assert found.phi.tolist() == pytest.approx([1e4 - math.log(2), -1e4, -2e4], rel=1e-15)
    assert found.loss.tolist() == [0.0, 1e4, 2e4]
    assert found.confidence.tolist() == [1.0, 0.0, 0.0]
    assert found.entropy.tolist() == [0.0, 0.0, 0.0]
    assert found.modified_entropy[0] == 0.0
    assert found.modified_entropy[1] == pytest.approx(2e4 - math.log(2), rel=1e-15)
    assert found.modified_entropy[2] == pytest.approx(3e4, rel=1e-15)


def test_phi_does_not_round_to_certainty_where_the_probability_does() -> None:
    found = of_logits(torch.tensor([[100.0, 0.0], [200.0, 0.0]]), torch.tensor([0, 0]))
    assert found.confidence.tolist() == [1.0, 1.0]
    assert found.phi.tolist() == [100.0, 200.0]


@quick
@given(seed=st.integers(0, 999), size=st.integers(1, 40), sequence=st.booleans())
def test_neither_batches_nor_the_order_matter(seed: int, size: int, sequence: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    shape = (23, 4) if sequence else (23,)
    z, y = 5 * torch.randn(*shape, 5, generator=g), torch.randint(5, shape, generator=g)
    whole = of_logits(z, y)
    same(of_logits(z, y, size), whole)
    order = torch.randperm(23, generator=g)
    same(of_logits(z[order], y[order]), whole.take(order.numpy()))


@quick
@given(z=rows, pick=st.integers(0, 5), shift=st.floats(-1000, 1000))
def test_a_constant_added_to_all_logits_changes_nothing(z: list[float], pick: int, shift: float) -> None:
    x, y = torch.tensor([z], dtype=torch.float64), torch.tensor([pick % len(z)])
    same(of_logits(x, y), of_logits(x + shift, y), rtol=1e-9, atol=1e-11)


@quick
@given(z=rows, pick=st.integers(0, 5))
def test_every_number_lies_in_its_range(z: list[float], pick: int) -> None:
    found = of_logits(torch.tensor([z]), torch.tensor([pick % len(z)]))
    assert 0 <= found.confidence[0] <= 1
    assert found.loss[0] >= 0
    assert -1e-12 <= found.entropy[0] <= math.log(len(z)) + 1e-12
    assert found.modified_entropy[0] >= 0
    assert math.isfinite(found.phi[0])


def test_float32_logits_give_float64_signals_with_the_loss_of_training() -> None:
    g = torch.Generator().manual_seed(0)
    z, y = torch.randn(50, 7, generator=g), torch.randint(7, (50,), generator=g)
    found = of_logits(z, y)
    assert {getattr(found, f.name).dtype for f in fields(Scores)} == {np.dtype(np.float64), np.dtype(np.int64)}
    np.testing.assert_allclose(found.loss, cross_entropy(z, y).numpy(), rtol=1e-5)
    np.testing.assert_array_equal(found.correct, (z.argmax(1) == y).double().numpy())


def test_a_sequence_is_one_example_with_means_over_its_positions() -> None:
    z = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]], dtype=torch.float64).log()
    found = of_logits(z, torch.tensor([[1, 0]]))
    mean = (math.log(0.5) + math.log(0.9)) / 2
    assert found.label.tolist() == [-1]
    assert found.correct.tolist() == [0.5]
    assert found.loss[0] == pytest.approx(-mean)
    assert found.confidence[0] == pytest.approx(math.exp(mean))
    assert found.phi[0] == pytest.approx(mean - math.log(1 - math.exp(mean)))
    ones = [of_logits(z[:, t], torch.tensor([y])) for t, y in ((0, 1), (1, 0))]
    assert found.entropy[0] == pytest.approx(np.mean([s.entropy[0] for s in ones]))
    assert found.modified_entropy[0] == pytest.approx(np.mean([s.modified_entropy[0] for s in ones]))


@quick
@given(z=st.lists(st.floats(-3000, 3000), min_size=2, max_size=5), pick=st.integers(0, 4))
def test_a_sequence_of_one_position_is_like_a_single_label(z: list[float], pick: int) -> None:
    x, y = torch.tensor([z], dtype=torch.float64), torch.tensor([pick % len(z)])
    short = of_logits(x.unsqueeze(1), y.unsqueeze(1))
    plain = of_logits(x, y)
    for name in ("correct", "confidence", "loss", "entropy", "modified_entropy"):
        np.testing.assert_allclose(getattr(short, name), getattr(plain, name), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(short.phi, plain.phi, rtol=1e-8, atol=1e-10)


def test_a_sequence_of_certain_positions_keeps_a_finite_phi() -> None:
    z = torch.tensor([[[1e4, 0.0], [1e4, 0.0]], [[1e4, 0.0], [50.0, 0.0]]], dtype=torch.float64)
    found = of_logits(z, torch.zeros(2, 2, dtype=torch.long))
    assert found.phi.tolist() == pytest.approx([1e4, 50 + math.log(2)], rel=1e-12)


def test_nothing_at_all_gives_empty_signals() -> None:
    assert len(of_logits(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))) == 0


def test_signals_can_be_cut_and_joined() -> None:
    whole = drawn(12, 3.0, seed=1)
    assert len(whole) == 12
    same(Scores.joined(whole[:5], whole[5:]), whole)
    same(whole[whole.label == whole.label[0]], whole.take(np.flatnonzero(whole.label == whole.label[0])))
    with pytest.raises(InputError, match="no per-example scores to join"):
        Scores.joined()


def test_what_cannot_be_scored_is_refused() -> None:
    two = torch.zeros(2, dtype=torch.long)
    with pytest.raises(NonFiniteError, match="not finite"):
        of_logits(torch.tensor([[0.0, math.nan], [0.0, 1.0]]), two)
    with pytest.raises(InputError, match="fewer than two classes"):
        of_logits(torch.zeros(2, 1), two)
    with pytest.raises(InputError, match="do not fit"):
        of_logits(torch.zeros(2, 3, 4), two)
    with pytest.raises(InputError, match="0 … 2"):
        of_logits(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(InputError, match="2 examples but 1 labels"):
        score_examples(Given(), {}, torch.zeros(2, 3), two[:1])
    with pytest.raises(InputError, match="one number for each example"):
        Scores(np.zeros(2, np.int64), *[np.zeros(3) for _ in range(6)])


class Shifted:
    """A model whose logits are its input times its one parameter."""

    def init(self, seed: int) -> dict[str, Tensor]:
        return {"w": torch.ones(1)}

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return x * params["w"]


def js(z: Tensor, a: float, b: float, batch_size: int = 500) -> list[float]:
    found = js_of_logits(*(logits_of(Shifted(), {"w": torch.tensor(w)}, z, batch_size) for w in (a, b)))
    return [float(v) for v in found]


def test_js_is_nothing_for_equal_and_ln_2_for_opposite_predictions() -> None:
    z = torch.tensor([[1e4, 0.0], [0.0, 0.0]])
    assert js(z, 1.0, 1.0) == [0.0, 0.0]
    assert js(z, 1.0, -1.0) == [pytest.approx(math.log(2)), 0.0]


def test_js_of_two_coins_worked_out_by_hand() -> None:
    z = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)  # p = (3/4, 1/4) against (1/2, 1/2)
    m = (0.625, 0.375)
    by_hand = 0.5 * (0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1]))
    by_hand += 0.5 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert js(z, 1.0, 0.0) == [pytest.approx(by_hand, rel=1e-6)]


@quick
@given(seed=st.integers(0, 999), a=st.floats(-5, 5), b=st.floats(-5, 5), size=st.integers(1, 9))
def test_js_is_symmetric_in_range_and_blind_to_batches(seed: int, a: float, b: float, size: int) -> None:
    z = 10 * torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = js(z, a, b)
    assert len(found) == 7
    assert all(0 <= v <= math.log(2) for v in found)
    assert found == pytest.approx(js(z, b, a, size), rel=1e-9, abs=1e-12)


def test_js_catches_an_unlearner_that_does_nothing_and_one_that_wipes_the_model() -> None:
    g = torch.Generator().manual_seed(0)
    retrain = 3 * torch.randn(400, 10, generator=g)
    again = retrain + 0.3 * torch.randn(400, 10, generator=g)  # another seed of Retrain
    nothing = retrain + 6 * torch.nn.functional.one_hot(torch.arange(400) % 10, 10)  # still knows the labels
    wiped = torch.zeros(400, 10)

    class Table:
        def init(self, seed: int) -> dict[str, Tensor]:
            return {}

        def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
            return params["logits"][x]

    def mean(other: Tensor) -> float:
        tables = [logits_of(Table(), {"logits": logits}, torch.arange(400)) for logits in (retrain, other)]
        return float(js_of_logits(*tables).mean())

    assert min(mean(nothing), mean(wiped)) > 5 * mean(again)
