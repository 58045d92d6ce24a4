# SPDX-License-Identifier: Apache-2.0
"""Local BatchNorm in all engines against FedBN in plain PyTorch: training, FedQUIT, recalibration, recovery."""

from __future__ import annotations

import pytest
import torch

from fedquit.core import Local, Params, State, Training
from fedquit.core.fedavg import Learn
from fedquit.core.local_layers import home_key, layers_by_client, shared_part
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Engine, SequentialEngine, StackedEngine, ThreadedEngine
from fedquit.methods.fedquit import FedQUIT
from fedquit.models import FunctionalModel
from fedquit.running import lifecycle
from fedquit.running.lifecycle import NOBODY, Hooks, Life
from fedquit.running.membership import Membership
from fedquit.running.session import Session
from reference.fedbn import FedBN, network
from reference.world import DATA, EPOCHS, LR_DECAY, ONE, SAMPLES, SIZES, WEIGHT_DECAY, Erasure, Weights

MODEL = FunctionalModel(network, torch.float64, batchnorm="local")
BATCH, RATE = 6, 0.1  # ragged batches of 1, 2, 2 and 4; not so small that rounding grows from round to round
TRAINING = Training(Learn(Local(EPOCHS, BATCH, "sgd", RATE, weight_decay=WEIGHT_DECAY)), rounds=3, lr_decay=LR_DECAY)
QUIT = FedQUIT(lr=5e-3, batch_size=4)
RECOVERY = 2
EXACT = 1e-12
Models = dict[str, Weights]  # the model of each client, and the server's


def engine_of(name: str, data: FederatedData, homes: dict[str, Params]) -> Engine:
    if name == "sequential":
        return SequentialEngine(MODEL, data, homes)
    return ThreadedEngine(MODEL, data, homes, 2) if name == "threaded" else StackedEngine(MODEL, data, homes)


def first(seed: int) -> Params:
    return MODEL.init(Address(seed, "init").seed_for("server"))


def in_package(engine: str, erasure: Erasure) -> list[Models]:
    """The models after training, unlearning and recovery."""
    homes: dict[str, Params] = {}
    state = State(shared_part(MODEL, first(erasure.seed)))

    def models() -> Models:
        layers = {f"client {c}": own for c, own in layers_by_client(homes).items()}
        return {"server": state.params, **layers}

    session = Session(engine_of(engine, DATA, homes), erasure.seed, DATA.clients)
    hooks = Hooks({}, lambda _: {}, NOBODY)
    for r in range(TRAINING.rounds):
        session.enter("train", r)
        state = hooks.round(session, state, TRAINING, DATA.clients)
    seen = [models()]
    marked, request = erasure.data(), erasure.request
    life = Life(Membership(marked.clients)).begin_unlearning(request, rounds=TRAINING.rounds)
    state = lifecycle.entered("unlearn", state)
    examples = {c: len(DATA.view(c, "all")) for c in DATA.clients}
    trained = life.trained(state, first(erasure.seed), TRAINING, examples, {})
    session = Session(engine_of(engine, marked, homes), erasure.seed, life.askable(marked.clients))
    session.enter(life.phase.name, 0)
    state = lifecycle.unlearning_round(QUIT, session, state, trained, request)
    seen.append(models())
    life = life.begin_recovery()
    state = lifecycle.entered("recover", state)
    left = marked.after(request)
    session = Session(engine_of(engine, left, homes), erasure.seed, life.askable(left.clients))
    for r in range(RECOVERY):
        session.enter(life.phase.name, r)
        state = lifecycle.recovery_round(QUIT, hooks, session, state, trained, request)
    return [*seen, models()]


def in_plain_torch(erasure: Erasure) -> list[Models]:
    federation = FedBN(first(erasure.seed), erasure, TRAINING, QUIT.lr)

    def models() -> Models:
        local = {c: {n: p.clone() for n, p in federation.state(c).items() if n in MODEL.local_names} for c in SIZES}
        return {"server": federation.shared(), **{f"client {c}": own for c, own in local.items()}}

    for r in range(TRAINING.rounds):
        federation.round("train", r, tuple(SIZES), retained=False)
    seen = [models()]
    federation.unlearn("unlearn-0")
    federation.recalibrate(BATCH)
    seen.append(models())
    for r in range(RECOVERY):
        federation.round("recover-0", r, erasure.staying, retained=True)
    return [*seen, models()]


@pytest.mark.parametrize("erasure", [ONE, SAMPLES], ids=["one client", "samples"])
def test_every_engine_follows_fedbn(erasure: Erasure) -> None:
    expected = in_plain_torch(erasure)
    for engine in ("sequential", "threaded", "stacked"):
        for found, wanted in zip(in_package(engine, erasure), expected, strict=True):
            assert found.keys() == wanted.keys()
            for who, tensors in wanted.items():
                assert found[who].keys() == tensors.keys()
                for n, p in tensors.items():
                    torch.testing.assert_close(found[who][n], p, rtol=EXACT, atol=EXACT, msg=f"{engine} {who} {n}")
    means = [models["client 0"]["1.running_mean"] for models in expected]
    assert not torch.equal(means[0], means[1]), "measured anew"
    assert home_key(0) == "0/batchnorm"
