# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedquit.core import Params, Request, State
from fedquit.errors import InputError, UnknownNameError
from fedquit.methods.not_ import NoT, first_weight
from fedquit.running.runner import run
from methods.method_world import Scripted, numbers, same, trained
from worlds import tiny


def net() -> Params:
    """A scale comes first, as in networks that normalise their input; the first weight is the kernel."""
    return {
        "norm.scale": numbers(1, 2),
        "conv.weight": torch.arange(1.0, 9.0).double().reshape(2, 1, 2, 2),
        "conv.bias": numbers(3, -4),
        "head.weight": torch.tensor([[5.0, -6.0]]).double(),
        "head.bias": numbers(7),
    }


def unlearned(method: NoT, request: Request) -> State:
    fed = Scripted()
    state = method.unlearn(fed, State(net(), clock=4), trained(net()), request)
    assert fed.asked == [], "nobody is asked"
    return state


def test_exactly_one_tensor_changes_its_sign() -> None:
    state = unlearned(NoT(), Request((0,)))
    expected = net()
    expected["conv.weight"] = -torch.arange(1.0, 9.0).double().reshape(2, 1, 2, 2)
    same(state.params, expected)
    assert list(state.params) == list(net())
    assert (state.round, state.clock) == (1, 4)


def test_the_layer_can_be_named() -> None:
    state = unlearned(NoT(layer="head.bias"), Request((0,)))
    same(state.params, {**net(), "head.bias": numbers(-7)})


def test_an_unknown_layer_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown layer 'head.wieght': did you mean 'head.weight'\?"):
        unlearned(NoT(layer="head.wieght"), Request((0,)))


def test_the_model_is_the_same_whoever_leaves_and_whatever_is_asked() -> None:
    requests = [Request((0,)), Request((2,)), Request((0, 1)), Request((0,), samples=True)]
    for request in requests:
        NoT().check(request)
        same(unlearned(NoT(), request).params, unlearned(NoT(), requests[0]).params)


def test_the_model_that_came_in_is_left_alone() -> None:
    params = net()
    NoT().unlearn(Scripted(), State(params), trained(params), Request((0,)))
    same(params, net())


def test_a_model_without_a_weight_tensor_needs_a_name() -> None:
    with pytest.raises(InputError, match=r"name one with method\.layer"):
        first_weight({"scale": numbers(1, 2)})
    params = {"scale": numbers(1, 2)}
    same(
        NoT(layer="scale").unlearn(Scripted(), State(params), trained(params), Request((0,))).params,
        {"scale": numbers(-1, -2)},
    )


@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_a_whole_run_costs_nothing_to_unlearn(request_: dict[str, object], tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={"name": "not"}, request=[request_]), tmp_path / "a")["rows"]}
    unlearned = rows["unlearned"]
    assert (unlearned["rounds"], unlearned["participations"], unlearned["down_bytes"]) == (1, 0, 0)
    assert unlearned["client_epochs"] == 0
    assert unlearned["fingerprint"] != rows["original"]["fingerprint"]
    assert rows["recovered"]["test_loss"] < unlearned["test_loss"]
