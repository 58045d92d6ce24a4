# SPDX-License-Identifier: Apache-2.0
"""Whole runs with local BatchNorm (FedBN): every method, costs, evaluation by each client's model, resume, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from torch import nn

import fedquit
from fedquit.audit.client_models import ClientModels
from fedquit.cli import main
from fedquit.core import Params, Request, State, Trained
from fedquit.core.local_layers import home_key, local_part, separated, shared_part, with_all_layers
from fedquit.core.params import nbytes
from fedquit.engine import SequentialEngine
from fedquit.engine.local_layers import first_layers
from fedquit.errors import FedquitError, InputError
from fedquit.methods import METHODS
from fedquit.models import FunctionalModel
from fedquit.results.folders import OWNER_FOLDER
from fedquit.running import lifecycle
from fedquit.running.bundles import require_one_request
from fedquit.running.recipe import Recipe
from fedquit.running.runner import evaluation_of, run
from fedquit.running.session import Session
from fedquit.running.setup import build_setup
from fedquit.running.store import load_params
from worlds import tiny

LOCAL: dict[str, Any] = {"name": "own_networks:batch_norm_net", "options": {"dropout": 0.2}, "batchnorm": "local"}
NAMES = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
FEW: dict[str, dict[str, Any]] = {"fedosd": {"unlearning_rounds": 2}, "rapid": {"retraining_rounds": 2}}
REFUSED = ("mode", "fukd", "fused")


def recipe(name: str = "fedquit", **changes: Any) -> Recipe:
    spec = {"name": name, **FEW.get(name, {})}
    plain: dict[str, Any] = {"evaluate": {"attacks": []}, "recover": {"max_rounds": 1}, "retrain": False}
    return tiny(**{"model": LOCAL, "method": spec, **plain, **changes})


def tensors_under(folder: Path) -> dict[str, Params]:
    return {str(path.relative_to(folder)): load_params(path)[0] for path in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in REFUSED])
def test_every_method_serves_a_request(method: str, tmp_path: Path) -> None:
    """Both engines alike. No state that a server has holds BatchNorm; the leaver's goes with it, the others' stays."""
    by_engine = {}
    for engine in ("sequential", "stacked"):
        run(recipe(method, engine={"name": engine}), tmp_path / engine)
        by_engine[engine] = tensors_under(tmp_path / engine / "request-0")
    assert by_engine["sequential"].keys() == by_engine["stacked"].keys()
    for name, one in by_engine["sequential"].items():
        for n, p in one.items():
            torch.testing.assert_close(by_engine["stacked"][name][n], p, rtol=1e-7, atol=1e-8)
            assert not n.endswith("running_var") or float(p.min()) > 0
        if name.endswith("unlearned.safetensors") or "recovered" in name or "server" in name:
            assert not any(local in n for n in one for local in NAMES), name
    shared, layers = separated(by_engine["sequential"]["model.safetensors"])
    assert not NAMES & shared.keys()
    assert set(layers) == {0, 2, 3}
    assert all(own.keys() == NAMES for own in layers.values())
    assert not torch.equal(layers[0]["1.weight"], layers[2]["1.weight"])


def test_only_what_is_shared_travels_and_is_counted(tmp_path: Path) -> None:
    """FedQUIT's visit, and a recalibration that nobody sends anything back from."""
    rows = {row["phase"]: row for row in run(recipe(), tmp_path / "run")["rows"]}
    setup = build_setup(recipe())
    one = nbytes(setup.initial)
    assert NAMES.isdisjoint(setup.initial)
    assert one == 8 * (9 * 4 + 4 * 16 * 3 + 3)
    assert rows["original"]["down_bytes"] == rows["original"]["up_bytes"] == 3 * 4 * one
    unlearned = rows["unlearned"]
    assert (unlearned["participations"], unlearned["down_bytes"], unlearned["up_bytes"]) == (1 + 3, 4 * one, one)
    assert rows["recovered"]["down_bytes"] == rows["recovered"]["up_bytes"] == 3 * one
    averaged = run(recipe(model={**LOCAL, "batchnorm": "averaged"}), tmp_path / "averaged")["rows"]
    assert rows["original"]["client_flops"] == averaged[0]["client_flops"]


def test_examples_are_judged_by_their_clients_models() -> None:
    """By hand: four clients with other layers, a set of each, and a test set that those who stay read in turn."""
    setup = build_setup(recipe())
    evaluation = evaluation_of(setup)
    network = setup.model
    whole = network.init(5)
    layers = {c: {n: p + 0.3 * (c + 1) for n, p in local_part(network, whole).items()} for c in range(4)}
    params = with_all_layers(shared_part(network, whole), layers)
    assert separated(params)[1].keys() == layers.keys()

    def correct(client: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (network({**whole, **layers[client]}, x).argmax(-1) == y).double()

    data = evaluation.data
    retain = torch.cat([correct(c, data.x[data.train[c]], data.y[data.train[c]]) for c in (0, 2, 3)])
    forget = correct(1, data.x[data.train[1]], data.y[data.train[1]])
    test_x, test_y = data.dataset.test_x, data.dataset.test_y
    in_turn = [correct((0, 2, 3)[i % 3], test_x[i : i + 1], test_y[i : i + 1]) for i in range(len(test_y))]
    assert evaluation.accuracy("retain", params) == pytest.approx(100 * float(retain.mean()))
    assert evaluation.accuracy("forget", params) == pytest.approx(100 * float(forget.mean()))
    assert evaluation.accuracy("test", params) == pytest.approx(100 * float(torch.cat(in_turn).mean()))
    scores = evaluation.scores(params)["test"]
    assert scores is not None
    assert np.array_equal(scores.label, test_y.numpy())
    swapped = with_all_layers(shared_part(network, whole), {**layers, 1: {n: 2 * p for n, p in layers[1].items()}})
    assert evaluation.distance(params, swapped)["forget_js"] > 0
    assert evaluation.distance(params, dict(params))["forget_js"] == pytest.approx(0, abs=1e-12)


def test_a_newcomer_gets_the_others_mean_with_statistics_of_its_own() -> None:
    """What Retrain's model is to the client that left: no label of its data is read."""
    setup = build_setup(recipe())
    evaluation = evaluation_of(setup)
    data, network, whole = evaluation.data, setup.model, setup.model.init(5)
    layers = {c: {n: p + c for n, p in local_part(network, whole).items()} for c in (0, 2, 3)}
    models = ClientModels(network, network, shared_part(network, whole), layers, data, (0, 2, 3))
    mine = models.of_client(1)
    sizes = {c: len(data.train[c]) for c in (0, 2, 3)}
    scale = sum(sizes[c] * layers[c]["1.weight"] for c in sizes) / sum(sizes.values())
    x = data.x[torch.cat([data.train[1], data.holdout[1]])]
    maps = nn.functional.conv2d(x, whole["0.weight"], padding=1)
    torch.testing.assert_close(mine["1.weight"], scale)
    torch.testing.assert_close(mine["1.running_mean"], maps.mean((0, 2, 3)), rtol=0, atol=1e-12)
    assert list(mine) == list(network.names)
    assert models.of_client(0)["1.weight"] is layers[0]["1.weight"]


@pytest.mark.parametrize("samples", [0.0, 0.5])
def test_damage_to_layers_that_leave_with_their_client_counts_for_nothing(samples: float, tmp_path: Path) -> None:
    """A method that changes the leaver's own layers alone, little or much, is given the same figures in every row.

    Where samples leave, the client stays with its layers, and the damage is seen.
    """
    reported: list[list[Any]] = []
    for strength in (1.0, 50.0):
        one = recipe(
            method={"name": "seam_methods:AtHome", "strength": strength},
            request=[{"clients": [1], **({"samples": samples} if samples else {})}],
            evaluate={"attacks": ["yeom"]},
            recover={"max_rounds": 2, "follow": 1, "control": True, "budgets": [0.9]},
            retrain=True,
        )
        folder = tmp_path / str(strength)
        results = run(one, folder, cache=tmp_path / "cache")
        rows = [{k: v for k, v in r.items() if k != "seconds"} for r in results["rows"]]
        reported.append(rows + [path.read_text() for path in sorted((folder / OWNER_FOLDER).iterdir())])
        assert {row["phase"] for row in rows} == {
            "original", "retrained", "unlearned", "recovered", "natural", "budget",
        }  # fmt: skip
        stay = {0, 2, 3, *([1] if samples else [])}
        assert set(separated(load_params(folder / "request-0" / "model.safetensors")[0])[1]) == stay
    assert (reported[0] == reported[1]) == (not samples)


class Stop(FedquitError):
    """The run is killed."""


class Killer:
    """A reporter that stops the run after so many rounds."""

    def __init__(self, after: int) -> None:
        self.left = after

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        pass

    def round(self, done: int, note: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop


def test_a_run_that_is_stopped_again_and_again_equals_one_that_is_not(tmp_path: Path) -> None:
    """Two requests, the second for samples of a client that keeps its layers, one that joins anew, and controls."""
    several = recipe(
        train={"rounds": 2},
        request=[{"clients": [1]}, {"kind": "join", "clients": [1], "anew": True}, {"clients": [2], "samples": 0.3}],
        recover={"max_rounds": 1, "control": True, "retrain_longer": True},
        retrain=True,
    )
    whole = run(several, tmp_path / "whole", cache=tmp_path / "cache-whole")
    stops = 0
    while True:
        try:
            parts = run(several, tmp_path / "parts", cache=tmp_path / "cache-parts", reporter=Killer(5))
            break
        except Stop:
            stops += 1
    assert stops >= 3

    def facts(rows: list[dict[str, Any]]) -> str:
        return json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in rows])

    assert facts(parts["rows"]) == facts(whole["rows"])
    for name, one in tensors_under(tmp_path / "whole").items():
        if name.endswith("model.safetensors"):
            other = load_params(tmp_path / "parts" / name)[0]
            assert one.keys() == other.keys()
            assert all(torch.equal(p, other[n]) for n, p in one.items())
    last = separated(load_params(tmp_path / "whole" / "request-2" / "model.safetensors")[0])[1]
    assert set(last) == {0, 1, 2, 3}, "who gives up samples stays"
    erased = {
        request: {unquote(path.name).partition("@")[0] for path in tmp_path.glob(f"whole/request-{request}/erased/*/*")}
        for request in (0, 2)
    }
    assert "1/batchnorm" in erased[0]
    assert "2/batchnorm" not in erased[2], "and keeps its layers"


def test_natural_and_retrain_go_on_with_the_layers_that_they_had(tmp_path: Path) -> None:
    """The control is a run of Natural; Retrain for more rounds goes on as if it had been trained for longer."""
    longer = {"max_rounds": 1, "control": True, "retrain_longer": True}
    rows = {row["phase"]: row for row in run(recipe(recover=longer, retrain=True), tmp_path / "run")["rows"]}
    natural = run(recipe("natural", recover={"max_rounds": 2}), tmp_path / "natural")["rows"][-1]
    assert rows["natural"]["fingerprint"] == natural["fingerprint"]
    path = rows["recovered"]["retrain_longer_path"]
    retrained = rows["retrained"]
    assert path[0]["test_acc"] == retrained["test_acc"]
    homes = {unquote(p.name).partition("@")[0] for p in tmp_path.glob("run/request-0/retrained-longer/clients/*")}
    assert homes == {home_key(c) for c in (0, 2, 3)}
    evaluation = evaluation_of(build_setup(recipe()))
    for name, row in (("natural", rows["natural"]), ("natural", natural), ("run", rows["recovered"])):
        scores = evaluation.scores(load_params(tmp_path / name / "request-0" / "model.safetensors")[0])
        for part in ("forget", "holdout", "retain", "test"):
            of_part = scores[part]
            assert of_part is not None
            assert row[f"{part}_loss"] == pytest.approx(float(of_part.loss.mean()), rel=1e-12), "judged as it is stored"


@pytest.mark.parametrize("method", ["retrain", "rapid", "federaser"])
def test_a_method_that_begins_anew_takes_the_first_layers(method: str) -> None:
    """Whatever the clients that stay had at home."""
    setup = build_setup(recipe(method))
    request = Request((1,))
    data = setup.data.mark(request, None)
    states = []
    for scale in (0.0, 50.0):
        old = {home_key(c): {n: p + scale for n, p in first_layers(setup.model, 0).items()} for c in (0, 2, 3)}
        homes: dict[str, Params] = old if scale else {}
        session = Session(SequentialEngine(setup.model, data, homes), 0, data.clients)
        trained = Trained(setup.initial, setup.initial, setup.training, dict.fromkeys(range(4), 20), {})
        session.enter("unlearn-0", 0)
        states.append(lifecycle.unlearning_round(setup.method, session, State(setup.initial), trained, request))
        assert method == "federaser" or set(homes) == {home_key(c) for c in (0, 2, 3)}
    assert all(torch.equal(states[0].params[n], p) for n, p in states[1].params.items())


def test_python_and_the_command_line_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fedquit.run` with objects, and `--set` on a recipe."""
    torch.manual_seed(0)
    clients = {name: (torch.randn(12, 6) + k, torch.randint(3, (12,))) for k, name in enumerate("abc")}

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    settings = {"model.batchnorm": "local", "train.rounds": 2, "recover.until": "rounds", "recover.max_rounds": 1}
    setting = fedquit.Setting(build, clients, clients["a"], settings=settings)
    result = fedquit.run(setting, forget="b", out=tmp_path / "python")
    assert set(separated(load_params(tmp_path / "python" / "request-0" / "model.safetensors")[0])[1]) == {0, 2}
    own = result.model("c").get_submodule("1")
    assert isinstance(own, nn.BatchNorm1d)
    assert own.running_mean is not None
    assert torch.equal(own.running_mean, result.params["client 2:1.running_mean"])
    with pytest.raises(InputError, match="each client has a model of its own: name one of 'a', 'c'"):
        result.model()
    file = tmp_path / "own.toml"
    file.write_text(
        '[model]\nname = "own_networks:batch_norm_net"\n[data]\nname = "synthetic"\nclients = 3\n'
        "[[request]]\nclients = [1]\n"
    )
    few = ["train.rounds=1", "recover.until=rounds", "recover.max_rounds=1", "model.batchnorm=local"]
    command = ["run", str(file), "--out", str(tmp_path / "run"), *(w for s in few for w in ("--set", s))]
    monkeypatch.setattr("sys.argv", ["fedquit", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert stored["recipe"]["model"]["batchnorm"] == "local"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": {"name": "mode"}}, "MoDe cannot serve clients with local BatchNorm: it trains a second model"),
        ({"method": {"name": "fukd"}}, "FUKD cannot serve clients with local BatchNorm: it computes at the server"),
        ({"method": {"name": "scrub", "rewind": True}}, "SCRUB cannot serve clients with local BatchNorm"),
        ({"method": {"name": "fused"}}, "FUSED cannot serve a model with BatchNorm"),
        ({"model": {"name": "cnn", "batchnorm": "local"}}, "the model has no BatchNorm to keep at the clients"),
        ({"evaluate": {"relearn": 2}}, "evaluate.relearn is of one model, and with local BatchNorm each client has"),
        ({"audit": {"canaries": 60}}, "audit.canaries are of one model"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build_setup(recipe(**changes))


def test_bundles_and_unknown_words_are_refused() -> None:
    with pytest.raises(InputError, match="with local BatchNorm each client has its own"):
        require_one_request(recipe())
    with pytest.raises(FedquitError, match="averaged"):
        recipe(model={**LOCAL, "batchnorm": "mean"})
    with pytest.raises(FedquitError, match="averaged"):
        FunctionalModel(lambda: nn.Linear(2, 2), batchnorm="mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing would travel"):
        FunctionalModel(lambda: nn.BatchNorm1d(2), batchnorm="local")
