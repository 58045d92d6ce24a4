# SPDX-License-Identifier: Apache-2.0
"""What many clients' convolutions and normalisations give on a CPU is what torch gives each client alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedquit.engine.stacked import cpu_ops
from fedquit.engine.stacked.cpu_ops import CpuOps
from fedquit.models.fused import norm_relu

DRAW = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64).requires_grad_()


def together_and_alone(function: object, *inputs: Tensor | None) -> None:
    """Values and gradients of `function`, under vmap with the mode on, and client by client with it off."""
    given_ = [t for t in inputs if t is not None]

    def full(*some: Tensor) -> Tensor:
        rest = iter(some)
        out: Tensor = function(*(None if t is None else next(rest) for t in inputs))  # type: ignore[operator]
        return out

    with CpuOps():
        many = vmap(full)(*given_)
    alone = torch.stack([full(*(t[k] for t in given_)) for k in range(len(given_[0]))])
    torch.testing.assert_close(many, alone, rtol=1e-11, atol=1e-11)
    back = torch.randn(alone.shape, generator=DRAW, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(many, given_, back), torch.autograd.grad(alone, given_, back), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-10)


@given(
    side=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    channels=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    size=st.sampled_from([1, 2, 3]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    small=st.booleans(),
)
@settings(max_examples=60)
def test_convolutions(
    side: tuple[int, int],
    channels: tuple[int, int],
    size: int,
    stride: int,
    padding: int,
    bias: bool,
    small: bool,
) -> None:
    x, w = drawn(3, 4, channels[0], *side), drawn(3, channels[1], channels[0], size, size)
    b = drawn(3, channels[1]) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "MAX_UNFOLDED", 1 << 16 if small else 0)
        together_and_alone(lambda x, w, b: functional.conv2d(x, w, b, stride, padding), x, w, b)


@pytest.mark.parametrize(("way", "taken"), [("small", "SmallConv"), ("large", "LargeConv")])
def test_each_way_is_taken_where_it_should(way: str, taken: str) -> None:
    side = 4 if way == "small" else 40
    x, w = drawn(2, 8, 16, side, side), drawn(2, 8, 16, 3, 3)
    with CpuOps():
        done = vmap(lambda x, w: functional.conv2d(x, w, padding=1))(x, w)
    assert type(done.grad_fn).__name__ == f"{taken}Backward"


def test_what_is_not_covered_goes_the_ordinary_way() -> None:
    x, w = drawn(2, 3, 4, 6, 5), drawn(2, 4, 2, 3, 3)
    together_and_alone(lambda x, w: functional.conv2d(x, w, padding=1, groups=2), x, w)
    w = drawn(2, 2, 4, 3, 1)
    together_and_alone(lambda x, w: functional.conv2d(x, w, padding="same"), x, w)
    together_and_alone(lambda x, w: functional.conv2d(x, w, padding=(1, 0), stride=(1, 2), dilation=2), x, w)
    together_and_alone(lambda x: functional.group_norm(x, 2), x)
    y, weight, bias = drawn(2, 3, 4), drawn(2, 4), drawn(2, 4)
    together_and_alone(lambda x, a, b: functional.group_norm(x, 2, a, b), y, weight, bias)


def test_weights_that_all_share_and_images_that_all_share() -> None:
    x, w = drawn(3, 4, 2, 5, 5), drawn(3, 4, 2, 3, 3)
    with CpuOps():
        for shared in (0, 1):
            dims = (None, 0) if shared == 0 else (0, None)
            given_ = (x[0], w) if shared == 0 else (x, w[0])
            many = vmap(lambda x, w: functional.conv2d(x, w, padding=1), in_dims=dims)(*given_)
            pairs = [(x[0], w[k]) if shared == 0 else (x[k], w[0]) for k in range(3)]
            alone = [functional.conv2d(a, b, padding=1) for a, b in pairs]
            torch.testing.assert_close(many, torch.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_normalisation(side: int, groups: int) -> None:
    x, weight, bias = drawn(3, 4, 6, side, side), drawn(3, 6), drawn(3, 6)
    together_and_alone(lambda x, w, b: functional.group_norm(x, groups, w, b), x, weight, bias)
    together_and_alone(lambda x, w, b: norm_relu(x, groups, w, b, 1e-5), x, weight, bias)
    shortcut = drawn(3, 4, 6, side, side)
    together_and_alone(lambda x, w, b, s: norm_relu(x, groups, w, b, 1e-5, s), x, weight, bias, shortcut)


@pytest.mark.parametrize("small", [True, False])
def test_layers_that_all_share_after_a_convolution_of_each_client_s_own(small: bool) -> None:
    """As where an adapter changes one convolution of a network that is otherwise the same for all."""
    x, w = drawn(3, 4, 2, 5, 5), drawn(3, 4, 2, 3, 3)
    weight, bias, last = drawn(4), drawn(4), drawn(3, 4, 3, 3)

    def after_own(x: Tensor, w: Tensor) -> Tensor:
        normed = functional.group_norm(functional.conv2d(x, w, padding=1), 2, weight, bias)
        return functional.conv2d(functional.relu(normed), last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "MAX_UNFOLDED", 1 << 16 if small else 0)
        together_and_alone(after_own, x, w)
        with CpuOps():
            many = vmap(after_own)(x, w)
    alone = torch.stack([after_own(x[k], w[k]) for k in range(3)])
    back = torch.randn(alone.shape, generator=DRAW, dtype=torch.float64)
    shared = (weight, bias, last)
    for a, b in zip(torch.autograd.grad(many, shared, back), torch.autograd.grad(alone, shared, back), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("inplace", [False, True])
def test_relu_of_channels_that_lie_innermost_whatever_comes_back(inplace: bool) -> None:
    """After a convolution they do; the gradient of a flattened image lies otherwise, that of another layer does not."""
    x, w, v = drawn(3, 4, 2, 5, 5), drawn(3, 4, 2, 3, 3), drawn(3, 3, 4, 3, 3)
    relu = functional.relu
    together_and_alone(lambda x, w: relu(functional.conv2d(x, w), inplace).flatten(1), x, w)
    together_and_alone(lambda x, w, v: functional.conv2d(relu(functional.conv2d(x, w), inplace), v), x, w, v)
    together_and_alone(lambda x: relu(x + 0, inplace), x)


@pytest.mark.parametrize("small", [True, False])
def test_a_network_may_write_into_what_it_got(small: bool) -> None:
    x, w, weight, bias = drawn(3, 4, 2, 5, 5), drawn(3, 4, 2, 3, 3), drawn(3, 4), drawn(3, 4)

    def written(x: Tensor, w: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = functional.conv2d(x, w).add_(1.0)
        return functional.group_norm(out, 2, weight, bias).mul_(2.0).relu_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "MAX_UNFOLDED", 1 << 16 if small else 0)
        together_and_alone(written, x, w, weight, bias)


def test_a_gradient_inside_the_loss_is_left_to_torch() -> None:
    x, w = drawn(2, 3, 4, 5, 5).detach(), drawn(2, 4, 4, 3, 3).detach()

    def slope(x: Tensor, w: Tensor) -> Tensor:
        of_w: Tensor = grad(lambda w: functional.conv2d(x, w).square().sum())(w)
        return of_w

    with CpuOps():
        many = vmap(slope)(x, w)
    torch.testing.assert_close(many, torch.stack([slope(x[k], w[k]) for k in range(2)]), rtol=1e-11, atol=1e-11)


def test_a_vmap_inside_the_vmap_is_left_to_torch() -> None:
    x, w = drawn(2, 3, 4, 2, 5, 5), drawn(2, 3, 4, 2, 3, 3)
    with CpuOps():
        many = vmap(vmap(functional.conv2d))(x, w)
    alone = torch.stack([torch.stack([functional.conv2d(x[i, j], w[i, j]) for j in range(3)]) for i in range(2)])
    torch.testing.assert_close(many, alone, rtol=1e-11, atol=1e-11)
