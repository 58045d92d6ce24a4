# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedquit.engine.stacked import replay

INPUTS = torch.arange(6.0).view(2, 3), torch.ones(3)


def step(x: Tensor, w: Tensor) -> list[Tensor | None]:
    """Writes a product into a tensor of its own (`out=`), and has views that change nothing."""
    product = torch.empty(2, 3)
    torch.mul(x.detach(), w, out=product)
    return [product[0:2].view(2, 3).sum(1), None, product.t()]


def graph_of(traced: Callable[..., Any]) -> Any:
    return traced.__self__.graph  # type: ignore[attr-defined]


def test_a_traced_step_loses_what_changes_nothing() -> None:
    traced = make_fx(step)(*INPUTS)
    shorter = replay._simplified(traced, INPUTS)
    assert len(graph_of(shorter).nodes) < len(traced.graph.nodes)
    assert not any(isinstance(n.target, OpOverload) and "mul" in str(n.target) for n in graph_of(shorter).nodes)
    for seed in range(3):
        other = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)), INPUTS[1] * seed
        for replayed, eager in zip(shorter(*other), step(*other), strict=True):
            assert replay._same(replayed, eager)


def another_operation(op: OpOverload) -> Callable[..., Any]:
    return torch.add if op is torch.ops.aten.mul.out else op


def breaks(op: OpOverload) -> Callable[..., Any]:
    return torch.bmm if op is torch.ops.aten.mul.out else op


@pytest.mark.parametrize("call", [another_operation, breaks])
def test_a_simplified_graph_that_is_not_the_same_is_not_used(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_direct_call", call)
    traced: GraphModule = make_fx(step)(*INPUTS)
    assert graph_of(replay._simplified(traced, INPUTS)) is traced.graph
