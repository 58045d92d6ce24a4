# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedquit.core import ClientId, Local, Memory, Params, Reply, Request, State, Trained
from fedquit.core.fedavg import Learn
from fedquit.core.params import fingerprint
from fedquit.errors import RequestError
from fedquit.methods.fused import FUSED, TrainAdapters, adapted, places
from fedquit.running.costs import Metered
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from methods.method_world import (
    LOCAL,
    BodyAndHead,
    Question,
    Scripted,
    batch,
    close,
    column,
    numbers,
    same,
    served,
    trained,
    work,
)
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 5, 1: 1, 2: 3}
FEW = FUSED(layers=1, density=0.5)


def net() -> Params:
    return {
        "first.weight": torch.arange(8.0).double().reshape(2, 4),
        "first.bias": numbers(1, 2),
        "second.weight": torch.arange(8.0, 12.0).double().reshape(2, 2),
        "third.weight": torch.arange(12.0, 18.0).double().reshape(3, 2),
    }


def what(**options: object) -> Trained:
    moved = {
        "first.weight": numbers(2),
        "first.bias": numbers(9),
        "second.weight": numbers(1),
        "third.weight": numbers(3),
    }
    return trained(net(), examples=EXAMPLES, memory={"moved": moved}, **options)  # type: ignore[arg-type]


def overwrite(question: Question, client: ClientId) -> Params:
    """Client 1 adds 4 to every adapter, client 2 adds 8: by their examples, 7 in the mean."""
    return {n: p + {1: 4.0, 2: 8.0}[client] for n, p in question.sent["adapters"].items()}


def test_the_watcher_adds_up_how_far_each_tensor_moved() -> None:
    memory: Memory = {}
    start = {"a": numbers(0, 0), "b": numbers(1)}
    FUSED().watch(memory, 0, start, Reply(0, {"a": numbers(3, -5), "b": numbers(0)}, 7))
    FUSED().watch(memory, 0, start, Reply(1, {"a": numbers(-1, 0), "b": numbers(3)}, 1))
    same(memory["moved"], {"a": numbers(4.5), "b": numbers(3)})  # (3 + 5)/2 + 1/2 and 1 + 2


def test_the_weight_tensors_that_moved_most_are_critical() -> None:
    assert FUSED(layers=1).critical(what()) == ["third.weight"]
    assert FUSED().critical(what()) == ["third.weight", "first.weight"], "a bias is none, however far it moved"
    assert FUSED(layers=9).critical(what()) == ["third.weight", "first.weight", "second.weight"]


def test_without_having_seen_the_training_it_cannot_tell_and_says_so() -> None:
    with pytest.raises(RequestError, match="FUSED has not seen the training"):
        FUSED().unlearn(Scripted(), State(net()), trained(net()), LEAVES)


def test_the_places_of_an_adapter_are_few_fixed_and_known_without_being_sent() -> None:
    found = places(torch.Size((10, 20)), 0.1, seed=3)
    assert len(found) == len(found.unique()) == 20
    assert found.tolist() == sorted(found.tolist())
    assert int(found.min()) >= 0
    assert int(found.max()) < 200
    assert torch.equal(found, places(torch.Size((10, 20)), 0.1, seed=3))
    assert not torch.equal(found, places(torch.Size((10, 20)), 0.1, seed=4))
    assert len(places(torch.Size((2, 2)), 0.01, seed=0)) == 1, "at least one"
    assert len(places(torch.Size((2, 2)), 1.0, seed=0)) == 4


def test_adapters_are_added_at_their_places_and_nowhere_else() -> None:
    at = places(torch.Size((3, 2)), 0.5, seed=0).tolist()
    found = adapted(net(), {"adapter:third.weight": numbers(100, 200, 300)}, 0.5, 0)
    expected = list(range(12, 18))
    for place, value in zip(at, (100, 200, 300), strict=True):
        expected[place] += value
    assert found["third.weight"].flatten().tolist() == expected
    same(
        {n: p for n, p in found.items() if n != "third.weight"}, {n: p for n, p in net().items() if n != "third.weight"}
    )


def test_a_round_trains_adapters_from_zero_at_those_who_stay() -> None:
    fed = Scripted(overwrite, EXAMPLES)
    state = FEW.unlearn(fed, State(net(), clock=2), what(), LEAVES)
    (question,) = fed.asked
    assert (question.clients, question.split) == ((1, 2), "retain")
    same(dict(question.sent["start"]), net())
    same(dict(question.sent["adapters"]), {"adapter:third.weight": numbers(0, 0, 0)})
    close(dict(state.kept["adapters"]), {"adapter:third.weight": numbers(7, 7, 7)})
    close(state.params, adapted(net(), {"adapter:third.weight": numbers(7, 7, 7)}, 0.5, 0))
    assert (state.round, state.clock) == (1, 2)


def test_further_rounds_and_recovery_go_on_from_the_same_base() -> None:
    fed = Scripted(overwrite, EXAMPLES)
    state = State(net(), clock=2)
    for _ in range(3):
        state = FEW.unlearn(fed, state, what(), LEAVES)
    recovered = FEW.recover(fed, state.fresh(), what(), LEAVES)
    same(dict(recovered.kept["base"]), net())
    close(dict(recovered.kept["adapters"]), {"adapter:third.weight": numbers(28, 28, 28)})
    close(recovered.params, adapted(net(), {"adapter:third.weight": numbers(28, 28, 28)}, 0.5, 0))
    assert (recovered.round, recovered.clock) == (1, 3), "recovery is training, and moves the clock"


def test_outside_the_places_nothing_ever_moves_and_taken_back_the_old_model_is_there() -> None:
    fed = Scripted(overwrite, EXAMPLES)
    state = State(net())
    for _ in range(2):
        state = FEW.unlearn(fed, state, what(), LEAVES)
    outside = torch.ones(6, dtype=torch.bool)
    outside[places(torch.Size((3, 2)), 0.5, 0)] = False
    now, then = state.params["third.weight"].flatten(), net()["third.weight"].flatten()
    assert torch.equal(now[outside], then[outside])
    assert bool((now[~outside] != then[~outside]).all())
    same(FEW.reversed(state), net())
    assert list(FEW.reversed(state)) == list(net())


def test_only_adapters_travel_up() -> None:
    fed = Metered(Scripted(overwrite, EXAMPLES))
    FEW.unlearn(fed, State(net()), what(), LEAVES)
    assert fed.costs.up_bytes == 2 * 3 * 8
    assert fed.costs.down_bytes == 2 * (20 + 3) * 8


def test_the_rate_is_that_of_training_now_unless_given_and_there_is_no_decay_of_weights() -> None:
    fed = Scripted(overwrite, EXAMPLES)
    local = Local(2.0, 8, "sgd", 0.5, momentum=0.9, weight_decay=0.1)
    FUSED(density=0.5).unlearn(fed, State(net(), clock=2), what(local=local), LEAVES)
    assert fed.asked[0].task == TrainAdapters(Local(2.0, 8, "sgd", 0.125, momentum=0.9), density=0.5)
    FUSED(lr=0.03, seed=5).unlearn(fed, State(net(), clock=2), what(local=local), LEAVES)
    task = fed.asked[1].task
    assert isinstance(task, TrainAdapters)
    assert (task.local.lr, task.density, task.seed) == (0.03, 0.1, 5)


def test_partial_participation_is_that_of_training() -> None:
    fed = Scripted(lambda question, client: dict(question.sent["adapters"]), dict.fromkeys(range(9), 1))
    FEW.unlearn(fed, State(net()), what(per_round=3), LEAVES)
    assert len(fed.asked[0].clients) == 3
    assert 0 not in fed.asked[0].clients


def test_a_client_s_step_moves_the_adapters_alone() -> None:
    base = BodyAndHead().init(0)
    task = TrainAdapters(Local(lr=0.5), density=1.0)
    found = work(
        BodyAndHead(), task, column(3.0), [0], start=base, adapters={"adapter:head.weight": numbers(0, 0, 0, 0)}
    )
    # Features (3, 3), both classes at 1/2: the gradient is -1.5 for class 0 and 1.5 for class 1.
    close(found, {"adapter:head.weight": numbers(0.75, 0.75, -0.75, -0.75)})


def test_the_loss_is_that_of_the_adapted_model() -> None:
    base = {**BodyAndHead().init(0), "head.weight": torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()}
    adapters = {"adapter:head.weight": numbers(math.log(3), 0, 0, 0)}
    found = TrainAdapters(density=1.0).loss(BodyAndHead(), adapters, {"start": base}, batch(column(1.0, 1.0), [0, 1]))
    torch.testing.assert_close(found, -torch.log(numbers(3 / 4, 1 / 4)), rtol=0, atol=1e-12)


def test_it_takes_ten_rounds_unless_given() -> None:
    assert FUSED().rounds(what(), LEAVES) == 10
    assert FUSED(overwriting_rounds=3).rounds(what(), LEAVES) == 3


def test_in_a_whole_run_the_old_model_can_be_had_back(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "fused", "overwriting_rounds": 2}))
    method = setup.method
    assert isinstance(method, FUSED)
    session, state, seen = served(setup, tmp_path, Request((1,)))
    before = fingerprint(state.params)
    for r in range(2):
        session.enter("unlearn-0", r)
        state = method.unlearn(session, state, seen, Request((1,)))
    assert fingerprint(state.params) != before == fingerprint(method.reversed(state))
    recovered = method.recover(session, state.fresh(), seen, Request((1,)))
    assert fingerprint(method.reversed(recovered)) == before


@pytest.mark.parametrize("request_", [{"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_a_whole_run_for_several_clients_and_for_samples(request_: dict[str, object], tmp_path: Path) -> None:
    recipe = tiny(method={"name": "fused", "overwriting_rounds": 2}, request=[request_])
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["up_bytes"] < rows["unlearned"]["down_bytes"] / 5
    assert rows["unlearned"]["retain_loss"] < rows["original"]["retain_loss"]


def test_the_local_steps_of_training_are_kept() -> None:
    fed = Scripted(overwrite, EXAMPLES)
    FEW.unlearn(fed, State(net()), what(), LEAVES)
    local = fed.asked[0].task.local
    assert (local.epochs, local.batch_size, local.lr) == (LOCAL.epochs, LOCAL.batch_size, LOCAL.lr)
    assert not isinstance(fed.asked[0].task, Learn)
