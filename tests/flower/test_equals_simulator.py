# SPDX-License-Identifier: Apache-2.0
"""Every method over Flower gives what it gives in the simulator: the same objects, the same random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch

from fedquit.check.federation import KINDS, RECIPE, RECOVERY_ROUNDS, TRAIN, SmallFederation, recipe_for
from fedquit.check.life import lead_life
from fedquit.check.on_flower import CLIENTS, judge_on_flower, last_state
from fedquit.check.report import Findings
from fedquit.data.federated import FederatedData
from fedquit.errors import InputError, RequestError
from fedquit.flower.config import ServerConfig
from fedquit.methods import METHODS
from fedquit.models import FunctionalModel
from fedquit.running.recipe import Recipe, build
from fedquit.running.store import load_params, save_params
from flower.grid_world import Setup
from flower.test_member_checks import close

pytestmark = pytest.mark.flower

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_a_method_over_flower_equals_the_simulator(name: str, kind: str, tmp_path: Path) -> None:
    federation = SmallFederation(recipe_for({"name": name, **SHORT.get(name, {})}), clients=CLIENTS)
    try:
        federation.build_method().check(federation.request(kind))
    except RequestError:
        return  # that it is then served by the fallback is tried elsewhere
    findings = Findings()
    deviation = judge_on_flower(federation, kind, tmp_path, findings)
    assert findings.all == ()
    assert deviation <= 1e-12


@pytest.mark.parametrize("network", ["batch_norm_net", "adapted_net"])
@pytest.mark.parametrize("kind", ["one client", "samples of one client"])
def test_any_network_over_flower_equals_the_simulator(network: str, kind: str, tmp_path: Path) -> None:
    """BatchNorm's statistics, the masks of dropout, and frozen parameters that do not travel."""
    options = {"dropout": 0.3} if network == "batch_norm_net" else {}
    model = {"name": f"own_networks:{network}", "options": options, "dtype": "float64"}
    method = {"name": "fedquit", **SHORT["fedquit"]}
    federation = SmallFederation(build(Recipe, {**RECIPE, "model": model, "method": method}, "recipe"), clients=CLIENTS)
    findings = Findings()
    deviation = judge_on_flower(federation, kind, tmp_path, findings)
    assert findings.all == ()
    assert deviation <= 1e-12


@pytest.mark.parametrize("method", ["fedquit", "federaser"])
@pytest.mark.parametrize("kind", ["one client", "samples of one client"])
def test_local_batch_norm_over_flower_equals_the_simulator(method: str, kind: str, tmp_path: Path) -> None:
    """FedBN: no message holds BatchNorm, and who stays keeps its own through a request."""
    model = {"name": "own_networks:batch_norm_net", "dtype": "float64", "batchnorm": "local"}
    chosen = {"name": method, **SHORT.get(method, {})}
    federation = SmallFederation(build(Recipe, {**RECIPE, "model": model, "method": chosen}, "recipe"), clients=CLIENTS)
    try:
        federation.build_method().check(federation.request(kind))
    except RequestError:
        return
    findings = Findings()
    deviation = judge_on_flower(federation, kind, tmp_path, findings)
    assert findings.all == ()
    assert deviation <= 1e-12
    kept = sorted(tmp_path.glob("homes/*/memory/*/*batchnorm@*.safetensors"), key=lambda path: path.name)
    homes = {int(path.parents[2].name): path for path in kept}  # of each client the newest
    stay = federation.request(kind).stay(federation.clients)
    assert set(homes) == set(stay), "a client that left has taken its layers with it"
    simulated = tmp_path / "simulator" / "run" / "request-0"
    for client, path in homes.items():
        files = [*simulated.glob(f"*/clients/{client}%2Fbatchnorm@*.safetensors")]
        newest = max(files, key=lambda file: file.stat().st_mtime)
        expected = load_params(newest)[0]
        for n, p in load_params(path)[0].items():
            torch.testing.assert_close(p, expected[n], rtol=0, atol=1e-12)
    state = [*tmp_path.glob("state/**/*.safetensors")]
    names = [name for path in state for name in load_params(path)[0]]
    assert names
    assert not [name for name in names if "running" in name or name.endswith(("1.weight", "1.bias"))]


def test_a_withdrawn_model_takes_the_clients_layers_with_it(tmp_path: Path) -> None:
    """Whatever they had, even if nothing could be trained from it."""
    model = {"name": "own_networks:batch_norm_net", "dtype": "float64", "batchnorm": "local"}
    federation = SmallFederation(build(Recipe, {**RECIPE, "model": model}, "recipe"), clients=CLIENTS)
    setup = Setup(federation.data, federation.setup(federation.build_method()).model, tmp_path)
    last = max(federation.clients)
    close(setup, revoked=(last,))
    floor = len(federation.clients) - 1
    config = setup.config(min_nodes=1, floor=floor, train=TRAIN)
    setup.serve(config)
    setup.outbox(0).file()
    assert "the model was withdrawn" in setup.serve(config).erasures[0].reason
    kept = [*tmp_path.glob("homes/*/memory/*/*batchnorm@*.safetensors")]
    assert kept
    for path in kept:
        save_params(path, {n: torch.full_like(p, torch.nan) for n, p in load_params(path)[0].items()})
    close(setup)
    again = setup.serve(config)
    assert again.rounds == TRAIN["rounds"]
    assert all(bool(p.isfinite().all()) for p in again.params.values())


@pytest.mark.parametrize("anew", ["withdrawn", "retrain"])
def test_a_client_that_was_away_when_the_model_began_anew_gives_up_its_layers_when_it_comes_back(
    anew: str, tmp_path: Path
) -> None:
    model = {"name": "own_networks:batch_norm_net", "dtype": "float64", "batchnorm": "local"}
    federation = SmallFederation(build(Recipe, {**RECIPE, "model": model}, "recipe"), clients=CLIENTS)
    setup = Setup(federation.data, federation.setup(federation.build_method()).model, tmp_path)
    away, leaving = 1, 0
    close(setup)

    def config(rounds: int, floor: int = 1) -> ServerConfig:
        return setup.config(
            min_nodes=1, floor=floor, quorum=0.1, train={**TRAIN, "rounds": rounds}, method={"name": "retrain"}
        )

    rounds = TRAIN["rounds"]
    setup.serve(config(rounds))
    for path in tmp_path.glob(f"homes/{away}/memory/*/*batchnorm@*.safetensors"):
        save_params(path, {n: torch.full_like(p, torch.nan) for n, p in load_params(path)[0].items()})
    setup.node_of(away).online = False
    setup.outbox(leaving).file()
    (erasure,) = setup.serve(config(rounds, len(federation.clients) if anew == "withdrawn" else 1)).erasures
    assert ("the model was withdrawn" in erasure.reason) == (anew == "withdrawn")
    trained = setup.serve(config(rounds)).rounds
    setup.node_of(away).online = True
    setup.node_of(away).asked.clear()
    after = setup.serve(config(trained + 1))
    assert after.rounds == trained + 1
    assert setup.node_of(away).asked, "it takes part again"
    *_, newest = sorted(tmp_path.glob(f"homes/{away}/memory/*/*batchnorm@*.safetensors"))
    layers = load_params(newest)[0]
    assert layers
    assert all(bool(p.isfinite().all()) for p in layers.values()), "its old layers are gone"


def test_local_batch_norm_is_no_audit_of_whole_models(tmp_path: Path) -> None:
    model = {"name": "own_networks:batch_norm_net", "dtype": "float64", "batchnorm": "local"}
    method = {"name": "fedquit", **SHORT["fedquit"]}
    federation = SmallFederation(build(Recipe, {**RECIPE, "model": model, "method": method}, "recipe"), clients=CLIENTS)
    setup = Setup(federation.data, federation.setup(federation.build_method()).model, tmp_path)
    with pytest.raises(InputError, match=r"fedquit\.audit sends a client two whole models"):
        setup.serve(setup.config(audit=True))


def test_a_cohort_is_the_one_that_the_simulator_draws(tmp_path: Path) -> None:
    train = {**TRAIN, "clients_per_round": 2}
    recipe = build(Recipe, {**RECIPE, "train": train, "method": {"name": "fedquit", "lr": 1e-2}}, "recipe")
    federation = SmallFederation(recipe, clients=CLIENTS)
    model = federation.setup(federation.build_method()).model
    setup = Setup(federation.data, model, tmp_path)
    config = setup.config(train=train, method=dict(recipe.method), recover_rounds=RECOVERY_ROUNDS)
    setup.serve(config)
    asked = [node for node, kind in setup.grid.log if kind == "train.fedquit"]
    assert len(asked) == 3 * 2
    (leaving,) = federation.request("one client").clients
    setup.outbox(leaving).file()
    after = setup.serve(config)
    expected = last_state(lead_life(federation, "one client", tmp_path / "simulated")).params
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
