# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 as the paper trains it: its size, its cost, its shape and where its weights begin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.models import FunctionalModel, load_model

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def model() -> FunctionalModel:
    return load_model("resnet18", SHAPE, 100)


@pytest.fixture(scope="module")
def params(model: FunctionalModel) -> Params:
    return model.init(0)


@pytest.mark.parametrize(("classes", "expected"), [(100, 11_220_132), (10, 11_173_962)])
def test_it_has_the_paper_s_number_of_parameters(classes: int, expected: int) -> None:
    assert sum(p.numel() for p in load_model("resnet18", SHAPE, classes).init(0).values()) == expected


def test_a_forward_costs_555_million_multiply_adds(model: FunctionalModel, params: Params) -> None:
    with FlopCounterMode(display=False) as counter:
        model(params, torch.zeros(1, *SHAPE))
    assert counter.get_total_flops() / 2 == pytest.approx(555.5e6, rel=1e-3)


def by_hand(params: Params, x: Tensor, groups: int = 2) -> Tensor:
    """The network written out, after He et al.: post-activation, a projection wherever the shape changes."""

    def normed(x: Tensor, name: str) -> Tensor:
        parts = x.unflatten(1, (groups, -1))
        mean = parts.mean((2, 3, 4), keepdim=True)
        variance = parts.var((2, 3, 4), keepdim=True, correction=0)
        plain: Tensor = ((parts - mean) / (variance + 1e-5).sqrt()).flatten(1, 2)
        return plain * params[f"{name}.weight"][:, None, None] + params[f"{name}.bias"][:, None, None]

    x = normed(functional.conv2d(x, params["stem.weight"], padding=1), "norm").relu()
    for i, stride in enumerate((1, 1, 2, 1, 2, 1, 2, 1)):
        block = f"blocks.{i}"
        inner = functional.conv2d(x, params[f"{block}.conv1.weight"], stride=stride, padding=1)
        inner = normed(inner, f"{block}.norm1").relu()
        inner = normed(functional.conv2d(inner, params[f"{block}.conv2.weight"], padding=1), f"{block}.norm2")
        if stride > 1:
            x = functional.conv2d(x, params[f"{block}.shortcut.0.weight"], stride=stride)
            x = normed(x, f"{block}.shortcut.1")
        x = (inner + x).relu()
    return x.mean((2, 3)) @ params["head.weight"].T + params["head.bias"]


def test_it_computes_what_the_paper_s_network_computes() -> None:
    model = load_model("resnet18", (3, 12, 12), 5, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    # Also what begins at 0 or 1 must take part.
    params = {n: p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in model.init(0).items()}
    x = torch.randn(2, 3, 12, 12, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(model(params, x), by_hand(params, x), rtol=1e-10, atol=1e-10)


def test_convolutions_begin_as_in_keras(params: Params) -> None:
    convolutions = {n: p for n, p in params.items() if p.dim() == 4}
    assert len(convolutions) == 20
    for weight in convolutions.values():
        he = math.sqrt(2 / weight[0].numel())  # what the standard deviation is once the tails are gone
        assert weight.std().item() == pytest.approx(he, rel=0.03)
        assert 0.98 < weight.abs().max().item() / (2 * he / 0.87962566103423978) <= 1 + 1e-6
        assert abs(weight.mean().item()) < 5 * he / math.sqrt(weight.numel())


def test_the_head_begins_small_and_norms_as_identity(params: Params) -> None:
    assert params["head.weight"].std().item() == pytest.approx(0.01, rel=0.02)
    for name, p in params.items():
        if p.dim() == 1:
            expected = 1.0 if name.endswith("weight") else 0.0
            assert bool((p == expected).all()), name


def test_the_stem_comes_first_and_the_head_last(params: Params) -> None:
    # Methods that negate the first layer or train the last one go by this order.
    names = list(params)
    assert (names[0], names[-2:]) == ("stem.weight", ["head.weight", "head.bias"])


def test_groups_are_an_option() -> None:
    model = load_model("resnet18", (3, 8, 8), 4, groups=8)
    params, x = model.init(0), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(params, x), by_hand(params, x, groups=8), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(784,), (32, 32), (2, 3, 32, 32), (3, 0, 32)])
def test_it_refuses_what_is_no_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"resnet18 needs images .* use mlp\."):
        load_model("resnet18", shape, 10)


@pytest.mark.parametrize("groups", [0, -2, 3, 128])
def test_it_refuses_groups_that_do_not_divide_the_channels(groups: int) -> None:
    with pytest.raises(InputError, match=rf"groups={groups}: it must divide 64"):
        load_model("resnet18", SHAPE, 10, groups=groups)
