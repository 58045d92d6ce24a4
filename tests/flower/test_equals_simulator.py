# SPDX-License-Identifier: Apache-2.0
"""Every method over Flower gives what it gives in the simulator: the same objects, the same random numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch

from fedquit.core import Params, Request, State, Trained
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, SequentialEngine
from fedquit.errors import InputError, RequestError
from fedquit.flower.config import ServerConfig
from fedquit.methods import METHODS
from fedquit.models import FunctionalModel
from fedquit.running.lifecycle import Hooks
from fedquit.running.session import Session, advance
from fedquit.running.store import Memories, StateFile
from flower.grid_world import Setup, marks

pytestmark = pytest.mark.flower

REQUESTS = {
    "a client": Request((1,)),
    "two clients": Request((1, 3)),
    "samples": Request((0, 2), samples=True),
}
SHORT: dict[str, dict[str, Any]] = {  # of what would take long
    "fedquit": {"lr": 1e-2, "batch_size": 8},
    "mode": {"unlearning_rounds": 2, "degradation_rounds": 1},
    "fedosd": {"unlearning_rounds": 2, "several": True},
    "fused": {"overwriting_rounds": 2},
    "fedau": {"epochs": 2.0},
    "fukd": {"epochs": 2.0},
    "pga": {"epochs": 2.0, "batch_size": 8},
    "scrub": {"lr": 1e-2, "batch_size": 4, "rewind": True},
    "bad_teacher": {"lr": 1e-2, "batch_size": 4, "samples": "phases"},
    "ssd": {"alpha": 1.0},
}


OTHERS = [  # what no method of METHODS needs of a client
    "seam_methods:CountTwice",
    "seam_methods:Dampen",
    "seam_methods:ClimbAndReturn",
    "seam_methods:StopEarly",
    "flower.fixed_method:Weighed",
]


def simulated(
    data: FederatedData, model: FunctionalModel, config: ServerConfig, request: Request, where: Path
) -> Params:
    """The same life of a federation in the simulator: training, one request, recovery."""
    method, training, name = config.build_method(), config.training, config.method_name
    initial = model.init(Address(config.run_seed, "init").seed_for("server"))
    marked = marks(data, request)

    def session(seen: FederatedData, kept: Memories) -> Session:
        return Session(SequentialEngine(model, seen, kept.clients), config.run_seed, seen.clients, memories=kept.own)

    kept = Memories.open(where / "train")
    fed = session(data, kept)
    hooks = Hooks({name: method} if method.shapes_training else {}, kept.of, Request(()))
    state = State(initial)
    for progress in advance(
        fed,
        "train",
        state,
        lambda s: hooks.round(fed, s, training, data.clients),
        StateFile(where / "train.safetensors"),
        training.rounds,
    ):
        state = progress.state

    kept = Memories.open(where / "unlearn", kept)
    examples = {c: len(data.view(c, "all")) for c in data.clients}
    trained = Trained(state.params, initial, training, examples, kept.of(name))
    fed, state = session(marked, kept), state.fresh()
    for number in range(method.rounds(trained, request)):
        fed.enter("unlearn-0", number)
        state = method.unlearn(fed, state, trained, request)

    kept = Memories.open(where / "recover", kept)
    fed, state = session(marked.after(request), kept), state.fresh()
    for number in range(config.recover_rounds if method.recovers else 0):
        fed.enter("recover-0", number)
        state = method.recover(fed, state, trained, request)
    return state.params


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_a_method_over_flower_equals_the_simulator(
    name: str, kind: str, toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    request = REQUESTS[kind]
    setup = Setup(toy_data, toy_model, tmp_path)
    config = setup.config(method={"name": name, **SHORT.get(name, {})})
    try:
        config.build_method().check(request)
    except RequestError:
        return  # that it is then served by the fallback is tried elsewhere
    before = setup.serve(config)
    assert before.erased == frozenset()
    for client in request.clients:
        setup.outbox(client).file(positions=range(5) if request.samples else ())
    after = setup.serve(config)
    assert [(e.client, e.status, e.fallback) for e in after.erasures] == [(c, "done", False) for c in request.clients]
    assert after.erased == (frozenset() if request.samples else frozenset(request.clients))
    expected = simulated(toy_data, toy_model, config, request, tmp_path / "simulated")
    assert list(after.params) == list(expected), "the order of the names is that of the layers"
    for n, p in expected.items():
        torch.testing.assert_close(after.params[n], p, rtol=0, atol=1e-12)
    if name != "natural":
        assert any(not torch.equal(p, before.params[n]) for n, p in after.params.items())


def test_a_cohort_is_the_one_that_the_simulator_draws(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)
    config = setup.config(train={"rounds": 3, "batch_size": 8, "lr": 0.1, "clients_per_round": 2})
    config = dataclasses.replace(config, recover_rounds=2)
    setup.serve(config)
    asked = [node for node, kind in setup.grid.log if kind == "train.fedquit"]
    assert len(asked) == 3 * 2
    setup.outbox(2).file()
    after = setup.serve(config)
    expected = simulated(toy_data, toy_model, config, Request((2,)), tmp_path / "simulated")
    for n, p in expected.items():
        torch.testing.assert_close(after.params[n], p, rtol=0, atol=1e-12)


def test_what_must_know_the_future_is_refused(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)
    with pytest.raises(InputError, match="must know in advance"):
        setup.config(method={"name": "fedau", "preset": "authors"})
    with pytest.raises(InputError, match="data of the server's own"):
        setup.serve(setup.config(method={"name": "fukd"}), public=None)
