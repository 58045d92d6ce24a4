# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedquit.core import Local, Request, State
from fedquit.methods.fedunran import FedUNRAN, Mislabel
from fedquit.running.runner import run
from methods.method_world import Line, Scripted, batch, close, column, moves, numbers, trained, vec
from worlds import tiny


def test_the_loss_is_the_cross_entropy_to_the_drawn_label_whatever_the_own_one() -> None:
    drawn = [0.0, 0.49, 0.5, 0.99, 1.0]
    for own in (0, 1):
        some = batch(column(*[1.0] * 5), [own] * 5, u=drawn, fixed=[0.9] * 5)
        found = Mislabel().loss(Line(), vec(math.log(3), 0), {}, some)
        torch.testing.assert_close(found, -torch.log(numbers(3 / 4, 3 / 4, 1 / 4, 1 / 4, 1 / 4)), rtol=0, atol=1e-12)


def test_labels_are_uniform_over_all_classes_the_true_one_among_them() -> None:
    uniforms = ((torch.arange(1000) + 0.5) / 1000).tolist()
    logits = torch.log(numbers(0.1, 0.2, 0.3, 0.15, 0.25))
    some = batch(torch.ones(1000, 1).double(), [2] * 1000, u=uniforms)
    found = Mislabel().loss(Line(), {"w": logits}, {}, some).exp()
    for p in (0.1, 0.2, 0.3, 0.15, 0.25):
        assert int((found - 1 / p).abs().lt(1e-9).sum()) == 200


def test_the_leaving_clients_alone_are_asked_and_weighted_by_their_examples() -> None:
    examples = {0: 3, 1: 1, 2: 9}
    fed = Scripted(moves({0: vec(4), 1: vec(8)}), examples)
    state = FedUNRAN().unlearn(fed, State(vec(1), clock=4), trained(vec(1), examples=examples), Request((0, 1)))
    close(state.params, vec(1 + 5))  # (3 * 4 + 1 * 8) / 4
    (question,) = fed.asked
    assert (question.clients, question.split) == ((0, 1), "forget")
    assert question.task == Mislabel(Local(5.0, 32, "adam", 1e-3))
    assert (state.round, state.clock) == (1, 4)


@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_in_a_whole_run_the_forget_loss_rises_towards_that_of_a_guess(
    request_: dict[str, object], tmp_path: Path
) -> None:
    recipe = tiny(method={"name": "fedunran", "lr": 0.01}, request=[request_], train={"rounds": 6})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]
