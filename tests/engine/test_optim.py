# SPDX-License-Identifier: Apache-2.0
"""The optimizers, against their namesakes in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from by_hand import run_client
from fedquit.core import Batch, Local, Model, Params, Sent, Task
from fedquit.engine.optim import OPTIMIZERS, Signal, Slots, clipped
from fedquit.models import load_model

STEPS = 6
LR = 0.05
Reference = Callable[[list[Tensor], Local], torch.optim.Optimizer]
NAMESAKES: dict[str, Reference] = {
    "sgd": lambda p, o: torch.optim.SGD(p, o.lr, momentum=o.momentum, weight_decay=o.weight_decay),
    "adam": lambda p, o: torch.optim.Adam(p, o.lr, eps=1e-7, weight_decay=o.weight_decay),
    "adamw": lambda p, o: torch.optim.AdamW(p, o.lr, eps=1e-7, weight_decay=o.weight_decay),
}


def start() -> Params:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "b": torch.randn(3, generator=generator, dtype=torch.float64),
    }


def loss_of(params: Params, t: int) -> Tensor:
    """Another loss in each step, as with batches; its gradient is large enough to be clipped, sometimes."""
    return ((params["w"] * (t + 1)).sin().sum(0) + params["b"] ** 2 * (1 + t)).square().sum() / 10


def ours(local: Local) -> Params:
    rule, params = OPTIMIZERS[local.optimizer], start()
    slots: Slots = {s: {n: torch.zeros_like(p) for n, p in params.items()} for s in rule.slots}
    for t in range(STEPS):
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        gradients = torch.autograd.grad(loss_of(leaves, t), list(leaves.values()))
        gradient = clipped(dict(zip(leaves, gradients, strict=True)), local)
        with torch.no_grad():
            params, slots = rule.step(params, slots, Signal(t + 1, gradient), local)
    return params


def theirs(local: Local) -> Params:
    params = {n: p.requires_grad_() for n, p in start().items()}
    optimizer = NAMESAKES[local.optimizer](list(params.values()), local)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(params, t).backward()
        if local.clip:
            torch.nn.utils.clip_grad_norm_(list(params.values()), local.clip)
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


def assert_same(a: Params, b: Params) -> None:
    assert a.keys() == b.keys()
    for n, p in a.items():
        torch.testing.assert_close(p, b[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("adamw", 0.0)])
def test_each_optimizer_is_its_namesake(optimizer: str, momentum: float, weight_decay: float, clip: float) -> None:
    local = Local(optimizer=optimizer, lr=LR, momentum=momentum, weight_decay=weight_decay, clip=clip)
    assert_same(ours(local), theirs(local))


@pytest.mark.parametrize("optimizer", sorted(NAMESAKES))
def test_a_step_changes_nothing_in_place(optimizer: str) -> None:
    rule, params = OPTIMIZERS[optimizer], start()
    slots: Slots = {s: {n: torch.ones_like(p) for n, p in params.items()} for s in rule.slots}
    gradient = {n: torch.full_like(p, 2.0) for n, p in params.items()}
    local = Local(optimizer=optimizer, lr=LR, momentum=0.9, weight_decay=0.1)
    rule.step(params, slots, Signal(1, gradient), local)
    assert_same(params, start())
    assert all(bool((g == 2).all()) for g in gradient.values())
    assert all(bool((p == 1).all()) for slot in slots.values() for p in slot.values())


def test_clipping_each_tensor_shortens_it_alone() -> None:
    gradient = {"long": torch.tensor([3.0, 4.0]), "short": torch.tensor([0.3, 0.4])}
    limited = clipped(gradient, Local(clip_tensor=1.0))
    torch.testing.assert_close(limited["long"], torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)
    assert torch.equal(limited["short"], gradient["short"])


@settings(max_examples=50)
@given(scale=st.floats(1e-3, 1e3), largest=st.floats(0.0, 10.0))
def test_clipping_shortens_only_what_is_longer(scale: float, largest: float) -> None:
    gradient = {n: p * scale for n, p in start().items()}
    leaves = [torch.zeros_like(g).requires_grad_() for g in gradient.values()]
    for leaf, g in zip(leaves, gradient.values(), strict=True):
        leaf.grad = g.clone()
    if largest:
        torch.nn.utils.clip_grad_norm_(leaves, largest)
    limited = clipped(gradient, Local(clip=largest))
    for leaf, g in zip(leaves, limited.values(), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(g, leaf.grad, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Quadratic(Task):
    """Sum of x_i / 2 * w_i²: the Hessian is diagonal, so z * (H z) is its diagonal for any signs z."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return (batch.x * params["w"] ** 2 / 2).sum(1)


def test_adahessian_scales_by_the_diagonal_of_the_hessian() -> None:
    curvature = torch.tensor([[0.1, 1.0, 7.0, 30.0]], dtype=torch.float64)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    local = Local(optimizer="adahessian", lr=LR, epochs=5, batch_size=1, weight_decay=0.1)
    model = load_model("mlp", (1,), 1)
    label, sent = torch.zeros(1, dtype=torch.long), {"start": {"w": w}}
    params, _ = run_client(model, Quadratic(local), curvature, label, sent, seed=0)
    m = v = torch.zeros_like(w)
    for t in range(1, 6):
        m = 0.9 * m + 0.1 * curvature[0] * w
        v = 0.999 * v + 0.001 * curvature[0] ** 2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        w = w * (1 - LR * 0.1) - LR * step
    torch.testing.assert_close(params["w"], w, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Coupled(Task):
    """w_0 * w_1: the Hessian's diagonal is 0, and a single probe gives ±1."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return batch.x[:, 0] * params["w"][0] * params["w"][1]


def test_adahessian_probes_along_seeded_random_signs() -> None:
    local = Local(optimizer="adahessian", lr=LR, epochs=3, batch_size=1)
    model, x = load_model("mlp", (1,), 1), torch.ones(1, 1, dtype=torch.float64)
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    params, again = (
        run_client(model, Coupled(local), x, torch.zeros(1, dtype=torch.long), {"start": {"w": w}}, seed=4)[0]["w"]
        for _ in range(2)
    )
    assert torch.equal(params, again)
    # The estimate is ±1 for both, so that its square is 1 in every step: Adam with v^ = 1.
    m = torch.zeros_like(w)
    for t in range(1, 4):
        m = 0.9 * m + 0.1 * w.flip(0)
        w = w - LR * (m / (1 - 0.9**t)) / (1 + 1e-8)
    torch.testing.assert_close(params, w, rtol=1e-12, atol=1e-12)
