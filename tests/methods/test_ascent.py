# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedquit.core import Local, Request, State
from fedquit.methods.ascent import Climb, GradientAscent
from fedquit.running.runner import run
from methods.method_world import Line, Scripted, batch, close, column, moves, numbers, trained, vec, work
from worlds import tiny


def test_the_loss_is_minus_the_cross_entropy() -> None:
    found = Climb().loss(Line(), vec(math.log(3), 0), {}, batch(column(1.0, 1.0, 0.0), [0, 1, 1]))
    torch.testing.assert_close(found, torch.log(numbers(3 / 4, 1 / 4, 1 / 2)), rtol=0, atol=1e-12)


def test_a_step_goes_up_from_the_global_model_and_nothing_brings_it_back() -> None:
    # At (0, 0), the gradient of the loss of class 0 at x = 3 is (-1.5, 1.5).
    close(work(Line(), Climb(Local(lr=100.0)), column(3.0), [0], start=vec(0, 0)), vec(-150, 150))


def test_the_gradient_is_clipped_so_that_the_numbers_stay_finite() -> None:
    local = Local(lr=1.0, clip=5.0)
    found = work(Line(), Climb(local), column(1e6), [0], start=vec(0, 0))
    close(found, vec(-5 / math.sqrt(2), 5 / math.sqrt(2)), atol=1e-9)


def test_the_leaving_clients_alone_are_asked_and_weighted_by_their_examples() -> None:
    examples = {0: 3, 1: 1, 2: 9}
    fed = Scripted(moves({0: vec(4), 1: vec(8)}), examples)
    state = GradientAscent().unlearn(fed, State(vec(1), clock=4), trained(vec(1), examples=examples), Request((0, 1)))
    close(state.params, vec(1 + 5))  # (3 * 4 + 1 * 8) / 4
    (question,) = fed.asked
    assert (question.clients, question.split) == ((0, 1), "forget")
    assert question.task == Climb(Local(5.0, 32, "sgd", 1e-2, 0.9, clip=5.0))
    assert (state.round, state.clock) == (1, 4)


@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_in_a_whole_run_the_forget_loss_rises(request_: dict[str, object], tmp_path: Path) -> None:
    recipe = tiny(method={"name": "ascent", "lr": 0.1}, request=[request_])
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["forget_loss"] > 1.5 * rows["original"]["forget_loss"]
    assert rows["unlearned"]["client_epochs"] == 5 * rows["unlearned"]["participations"]
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]
