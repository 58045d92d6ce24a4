# SPDX-License-Identifier: Apache-2.0
"""Algebra on parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core import Params, Reply
from fedquit.core import params as algebra
from fedquit.errors import InputError, NoExamplesError, NonFiniteError


def random(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 2), "b": (2,), "scale": ()}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def flat(a: Params) -> torch.Tensor:
    return torch.cat([p.flatten() for p in a.values()])


def test_mean_is_the_weighted_mean_by_hand() -> None:
    replies = [
        Reply(0, {"w": torch.tensor([1.0, 2.0])}, 1),
        Reply(1, {"w": torch.tensor([5.0, -2.0])}, 3),
    ]
    assert algebra.mean(replies)["w"].tolist() == [4.0, -1.0]


@settings(max_examples=40)
@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(sum))
def test_mean_weighs_by_examples(weights: list[int]) -> None:
    replies = [Reply(k, random(k), n) for k, n in enumerate(weights)]
    expected = sum(n * flat(random(k)) for k, n in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(flat(algebra.mean(replies)), expected, rtol=1e-12, atol=1e-12)
    for k, reply in enumerate(replies):
        assert torch.equal(flat(reply.params), flat(random(k))), "the replies are not changed"


def test_mean_streams_and_lets_each_reply_go() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def replies() -> Iterator[Reply]:
        for k in range(20):
            assert sum(ref() is not None for ref in alive) <= 1, "only the latest reply may still be held"
            tensor = torch.full((4,), float(k))
            alive.append(weakref.ref(tensor))
            yield Reply(k, {"w": tensor}, 1)
            del tensor

    assert algebra.mean(replies())["w"].tolist() == [9.5] * 4


@pytest.mark.parametrize("replies", [[], [Reply(0, random(0), 0), Reply(1, random(1), 0)]])
def test_mean_of_no_examples_is_refused(replies: list[Reply]) -> None:
    with pytest.raises(NoExamplesError, match="nothing to average"):
        algebra.mean(replies)


def test_mean_refuses_other_shapes_and_names() -> None:
    one = Reply(0, {"w": torch.zeros(2)}, 1)
    with pytest.raises(InputError, match=r"reply of client 4 has shape \(1,\) in 'w' where \(2,\) is expected"):
        algebra.mean([one, Reply(4, {"w": torch.zeros(1)}, 1)])
    with pytest.raises(InputError, match=r"reply of client 4 has other parameters than expected \(v, w\)"):
        algebra.mean([one, Reply(4, {"v": torch.zeros(2)}, 1)])
    with pytest.raises(InputError, match=r"other parameters than expected \(v\)"):
        algebra.mean([one, Reply(4, {"w": torch.zeros(2), "v": torch.zeros(2)}, 1)])


def test_the_algebra_is_that_of_flat_vectors() -> None:
    a, b = random(1), random(2)
    torch.testing.assert_close(flat(algebra.add(a, b)), flat(a) + flat(b))
    torch.testing.assert_close(flat(algebra.add(a, b, -0.5)), flat(a) - 0.5 * flat(b))
    torch.testing.assert_close(flat(algebra.sub(a, b)), flat(a) - flat(b))
    torch.testing.assert_close(flat(algebra.mix(a, b, 0.3)), 0.3 * flat(a) + 0.7 * flat(b))
    torch.testing.assert_close(algebra.dot(a, b), flat(a) @ flat(b))
    torch.testing.assert_close(algebra.norm(a), flat(a).norm())
    assert algebra.nbytes(a) == 8 * 9
    assert torch.equal(flat(a), flat(random(1)))


def test_names_are_matched_not_positions() -> None:
    a, b = random(1), random(2)
    turned = dict(reversed(b.items()))
    torch.testing.assert_close(flat(algebra.sub(a, turned)), flat(a) - flat(b))
    mean = algebra.mean([Reply(0, a, 1), Reply(1, turned, 1)])
    torch.testing.assert_close(flat(mean), (flat(a) + flat(b)) / 2)


def test_the_fingerprint_is_equal_for_equal_parameters_only() -> None:
    a = random(1)
    nudged = {**a, "b": a["b"].nextafter(torch.tensor(9.0, dtype=torch.float64))}
    others = [
        nudged,
        {**a, "w": a["w"].reshape(2, 3)},
        {**a, "w": a["w"].mT.contiguous().reshape(3, 2)},
        {("v" if n == "w" else n): p for n, p in a.items()},
        {n: p for n, p in a.items() if n != "scale"},
        {**a, "w": a["b"].new_zeros(3, 2)},
        {n: p.float() for n, p in a.items()},
        {**a, "b": -a["b"]},
    ]
    prints = [algebra.fingerprint(x) for x in (a, *others)]
    assert len(set(prints)) == len(prints)
    same = {n: p.clone().requires_grad_() for n, p in reversed(a.items())}
    assert algebra.fingerprint(same) == prints[0]
    strided = {**a, "w": a["w"].mT.contiguous().mT}
    assert algebra.fingerprint(strided) == prints[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_the_fingerprint_reads_every_dtype(dtype: torch.dtype) -> None:
    ones, zeros = ({"a": f(3, dtype=dtype)} for f in (torch.ones, torch.zeros))
    assert algebra.fingerprint(ones) != algebra.fingerprint(zeros)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_found_and_named(bad: float) -> None:
    a = random(1)
    algebra.require_finite(a, "the model")
    a["b"][1] = bad
    with pytest.raises(NonFiniteError, match="client 3 holds NaN or infinity in 'b': lower the learning rate"):
        algebra.require_finite(a, "client 3")


def test_running_statistics_are_averaged_and_are_no_part_of_an_update() -> None:
    a = {"w": torch.tensor([3.0, 4.0]), "bn.running_var": torch.tensor([9.0])}
    b = {"w": torch.tensor([0.0, 0.0]), "bn.running_var": torch.tensor([1.0])}
    update = algebra.sub(a, b)
    assert set(update) == set(algebra.foreach_sub(a, b)) == {"w"}
    assert float(algebra.norm(a)) == 5.0
    assert float(algebra.dot(a, b)) == 0.0
    moved = algebra.add(b, update, 0.5)
    assert moved["w"].tolist() == [1.5, 2.0]
    assert moved["bn.running_var"].tolist() == [1.0]
    assert algebra.mean([Reply(0, a, 3), Reply(1, b, 1)])["bn.running_var"].tolist() == [7.0]
    assert algebra.mix(a, b, 0.25)["bn.running_var"].tolist() == [3.0]
    assert set(algebra.weights_of(a)) == {"w"}
    assert set(algebra.statistics_of(a)) == {"bn.running_var"}
    assert algebra.weights_of({"w": a["w"]}) == {"w": a["w"]}
