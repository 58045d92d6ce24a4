# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fedquit.core import Local, Params, Request, State
from fedquit.engine.plan import make_plan
from fedquit.errors import InputError
from fedquit.methods.fedunran import FedUNRAN, Mislabel, MislabelPatiently
from fedquit.running.costs import Metered
from fedquit.running.runner import run
from methods.method_world import Line, Scripted, batch, close, column, moves, numbers, trained, vec
from methods.plain_torch import World, average, optimizer_of, weights
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


# The authors' early stopping


def test_the_authors_train_for_up_to_30_epochs_with_a_patience_of_3() -> None:
    fed = Scripted(moves({1: vec(0)}))
    FedUNRAN(**FedUNRAN.presets["authors"]).unlearn(fed, State(vec(1)), trained(vec(1)), Request((1,)))
    (question,) = fed.asked
    assert question.task == MislabelPatiently(Local(30.0, 32, "adam", 1e-3), patience=3)
    with pytest.raises(InputError, match="patience is -1"):
        FedUNRAN(patience=-1)


def as_keras_does(world: World, client: int, local: Local, patience: int) -> tuple[Params, int]:
    """EarlyStopping(monitor="loss", patience=…, restore_best_weights=True) around random labels."""
    x, y = world.examples(client, "forget")
    plan = make_plan(len(y), local, world.seed(client, 0, 0))
    module = world.network(world.state.params)
    optimizer = optimizer_of(module, local)
    per_epoch = math.ceil(len(y) / local.batch_size)
    best, wait, best_weights = math.inf, 0, weights(module)
    for epoch in range(int(local.epochs)):
        total = 0.0
        for t in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            labels = torch.floor(plan.noise[t] * 3).long().clamp(max=2)
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(x[plan.steps[t]]), labels)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(labels)
        wait += 1
        if total / len(y) < best:
            best, wait, best_weights = total / len(y), 0, weights(module)
        elif wait >= patience:
            return best_weights, epoch + 1
    return weights(module), int(local.epochs)


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
def test_a_client_stops_as_the_authors_code_does_and_goes_back_to_its_best_epoch(engine: str, tmp_path: Path) -> None:
    options = {"name": "fedunran", "preset": "authors", "lr": 0.02, "batch_size": 4}
    world = World.of(tmp_path, options, Request((1, 2)), engine={"name": engine, "threads": 2})
    meter = Metered(world.session)
    state = world.setup.method.unlearn(meter, world.state, world.trained, world.request)
    local = Local(30.0, 4, "adam", 0.02)
    ends = {c: as_keras_does(world, c, local, 3) for c in (1, 2)}
    close(state.params, average({c: params for c, (params, _) in ends.items()}, world.counts("forget")), atol=1e-10)
    epochs = [taken for _, taken in ends.values()]
    assert max(epochs) < 30, "both stopped early"
    assert meter.costs.client_epochs == sum(epochs), "and are charged for what they took"
