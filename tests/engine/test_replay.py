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
    """With a product written into room that nobody returns by name, and with views that change nothing."""
    room = torch.empty(2, 3)
    torch.mul(x.detach(), w, out=room)
    return [room[0:2].view(2, 3).sum(1), None, room.t()]


def graph_of(written: Callable[..., Any]) -> Any:
    return written.__self__.graph  # type: ignore[attr-defined]


def test_a_step_is_replayed_the_shortest_way() -> None:
    written = make_fx(step)(*INPUTS)
    shorter = replay._tidy(written, INPUTS)
    assert len(graph_of(shorter).nodes) < len(written.graph.nodes)
    assert not any(isinstance(n.target, OpOverload) and "mul" in str(n.target) for n in graph_of(shorter).nodes)
    for seed in range(3):
        other = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)), INPUTS[1] * seed
        for found, meant in zip(shorter(*other), step(*other), strict=True):
            assert replay._same(found, meant)


def otherwise(op: OpOverload) -> Callable[..., Any]:
    return torch.add if op is torch.ops.aten.mul.out else op


def breaks(op: OpOverload) -> Callable[..., Any]:
    return torch.bmm if op is torch.ops.aten.mul.out else op


@pytest.mark.parametrize("way", [otherwise, breaks])
def test_a_shorter_way_that_is_not_the_same_is_not_taken(way: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_shortest", way)
    written: GraphModule = make_fx(step)(*INPUTS)
    assert graph_of(replay._tidy(written, INPUTS)) is written.graph
