# SPDX-License-Identifier: Apache-2.0
"""Selective synaptic dampening against its paper: the Fisher diagonals, the selection, and the dampening."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core import Local, Params, Request, State
from fedquit.errors import InputError, NoExamplesError
from fedquit.methods.ssd import SSD, FisherDiagonal, dampened
from fedquit.running.costs import Metered
from fedquit.running.runner import run
from methods.method_world import Question, Scripted, close, trained, vec
from methods.plain_torch import World
from worlds import tiny


def importance(world: World, data: list[tuple[Tensor, Tensor]]) -> Params:
    """The mean of the squared gradients over all examples, one backward pass for each."""
    module = world.network(world.state.params)
    total = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    examples = 0
    for xs, ys in data:
        for x, y in zip(xs, ys, strict=True):
            module.zero_grad()
            functional.cross_entropy(module(x.unsqueeze(0)), y.unsqueeze(0)).backward()
            for n, p in module.named_parameters():
                assert p.grad is not None
                total[n] += p.grad**2
            examples += 1
    return {n: t / examples for n, t in total.items()}


def dampen_by_hand(params: Params, forget: Params, other: Params, alpha: float, strength: float) -> tuple[Params, int]:
    """Equations (5) and (6), weight by weight; and how many were selected."""
    out = {}
    selected = 0
    for n, p in params.items():
        flat = p.flatten().tolist()
        for i, (f, o) in enumerate(zip(forget[n].flatten().tolist(), other[n].flatten().tolist(), strict=True)):
            if f > alpha * o:
                flat[i] *= min(strength * o / f, 1.0)
                selected += 1
        out[n] = torch.tensor(flat, dtype=p.dtype).reshape(p.shape)
    return out, selected


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
@pytest.mark.parametrize("against", ["retain", "all"])
@pytest.mark.parametrize("request_", [Request((1,)), Request((1, 3)), Request((0, 2), samples=True)], ids=str)
def test_the_federation_dampens_as_the_paper_does_on_the_pooled_data(
    request_: Request, against: str, engine: str, tmp_path: Path
) -> None:
    options = {"name": "ssd", "alpha": 1.2, "dampening": 0.8, "against": against, "batch_size": 3}
    world = World.of(tmp_path, options, request_, engine={"name": engine, "threads": 2})
    (state,) = world.unlearned()
    leaving = [world.examples(c, "forget") for c in request_.clients]
    staying = [world.examples(c, "retain") for c in world.stay]
    other = importance(world, staying + (leaving if against == "all" else []))
    expected, selected = dampen_by_hand(world.state.params, importance(world, leaving), other, 1.2, 0.8)
    close(state.params, expected)
    total = sum(p.numel() for p in expected.values())
    assert 0 < selected < total


def test_selection_and_dampening_by_hand() -> None:
    w = vec(1, 1, 1, 1, 1)
    forget, other = vec(8, 2, 4, 0, 3), vec(1, 1, 1, 0, 0)
    # alpha 2: 8 > 2, 2 = 2 is not larger, 4 > 2, 0 = 0 is not larger, 3 > 0
    close(dampened(w, forget, other, 2.0, 1.0), vec(1 / 8, 1, 1 / 4, 1, 0))
    close(dampened(w, forget, other, 2.0, 6.0), vec(6 / 8, 1, 1, 1, 0))  # never more than it was


def test_with_all_the_data_a_client_of_a_tenth_of_it_cannot_be_selected_at_alpha_10() -> None:
    """Why the default compares with the retained data: rho F_f + (1 - rho) F_r is never below rho F_f."""
    forget, retain = vec(1e9), vec(1e-9)
    alone = Scripted(lambda q, c: forget if q.split == "forget" else retain, {0: 90, 1: 10})
    for against, moved in (("retain", True), ("all", False)):
        state = SSD(alpha=10.0, against=against).unlearn(alone, State(vec(1)), trained(vec(1)), Request((1,)))  # type: ignore[arg-type]
        assert (float(state.params["w"]) < 1) == moved


def test_who_is_asked_for_what_and_what_it_costs(tmp_path: Path) -> None:
    fed = Scripted(lambda question, client: vec(1), {0: 1, 1: 1, 2: 1, 3: 1})
    state = SSD().unlearn(fed, State(vec(5), clock=4), trained(vec(5), per_round=1), Request((1,)))
    measure = FisherDiagonal(Local(batch_size=32))
    assert [(q.task, q.clients, q.split) for q in fed.asked] == [
        (measure, (1,), "forget"),
        (measure, (0, 2, 3), "retain"),
    ]
    assert (state.round, state.clock, state.kept) == (1, 4, {})
    world = World.of(tmp_path, {"name": "ssd"}, Request((1,)))
    meter = Metered(world.session)
    world.setup.method.unlearn(meter, world.state, world.trained, world.request)
    assert (meter.costs.participations, meter.costs.client_epochs) == (4, 4.0)
    assert meter.costs.up_bytes == meter.costs.down_bytes


def test_clients_without_an_example_have_no_say() -> None:
    def answer(question: Question, client: int) -> Params:
        return vec({0: 1.0, 1: 100.0, 2: 0.0}[client])

    fed = Scripted(answer, {0: 5, 1: 5, 2: 0})
    state = SSD().unlearn(fed, State(vec(1)), trained(vec(1)), Request((1,)))
    close(state.params, vec(1 / 100))
    with pytest.raises(NoExamplesError):
        SSD().unlearn(Scripted(answer, {0: 5, 1: 0}), State(vec(1)), trained(vec(1)), Request((1,)))


@pytest.mark.parametrize("wrong", [{"alpha": -1.0}, {"dampening": -0.1}])
def test_negative_strengths_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="from 0 on"):
        SSD(**wrong)


@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_in_a_whole_run_the_forget_loss_rises(request_: dict[str, Any], tmp_path: Path) -> None:
    method = {"name": "ssd", "alpha": 1.0}
    rows = {
        r["phase"]: r for r in run(tiny(method=method, request=[request_], train={"rounds": 6}), tmp_path / "a")["rows"]
    }
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]
    assert math.isfinite(rows["recovered"]["test_loss"])
