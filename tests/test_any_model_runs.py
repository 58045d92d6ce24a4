# SPDX-License-Identifier: Apache-2.0
"""Whole runs of networks with BatchNorm, dropout or frozen parameters: every method, costs, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.core import Params
from fedquit.core.params import nbytes, statistics_of
from fedquit.errors import InputError
from fedquit.methods import METHODS
from fedquit.running.paper_costs import Setting, bill
from fedquit.running.recipe import Recipe
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.store import load_params
from worlds import tiny

BATCH_NORM: dict[str, Any] = {"name": "own_networks:batch_norm_net", "options": {"dropout": 0.2}}
ADAPTED: dict[str, Any] = {"name": "own_networks:adapted_net"}
FEW: dict[str, dict[str, Any]] = {
    "fedosd": {"unlearning_rounds": 2},
    "mode": {"unlearning_rounds": 2, "degradation_rounds": 1},
    "fused": {"overwriting_rounds": 1},
    "fukd": {"epochs": 2.0},
}


def recipe(method: str, model: dict[str, Any], **changes: Any) -> Recipe:
    spec = {"name": method, **FEW.get(method, {})}
    plain: dict[str, Any] = {"evaluate": {"attacks": []}, "recover": {"max_rounds": 1}, "retrain": False}
    return tiny(model=model, method=spec, **{**plain, **changes})


def models(folder: Path) -> list[Params]:
    """The models after unlearning and after recovery, as they are stored."""
    request = folder / "request-0"
    files = [request / "unlearned.safetensors", request / "model.safetensors"]
    stored = [load_params(file)[0] for file in files if file.exists()]
    return [{name.removeprefix("params:"): p for name, p in params.items()} for params in stored]


def costs_of(result: dict[str, Any], phase: str) -> dict[str, Any]:
    (row,) = [row for row in result["rows"] if (row["method"], row["phase"]) == ("fedquit", phase)]
    return dict(row)


@pytest.mark.parametrize("model", [BATCH_NORM, ADAPTED], ids=["batch_norm", "adapted"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fused"])
def test_every_method_serves_a_request(method: str, model: dict[str, Any], tmp_path: Path) -> None:
    """In both engines alike; BatchNorm's variances stay positive, whatever a method adds and subtracts."""
    by_engine = {}
    for engine in ("sequential", "stacked"):
        run(recipe(method, model, engine={"name": engine}), tmp_path / engine)
        by_engine[engine] = models(tmp_path / engine)
    assert len(by_engine["stacked"]) >= (method != "natural")
    for one, other in zip(by_engine["sequential"], by_engine["stacked"], strict=True):
        for n, p in one.items():
            torch.testing.assert_close(other[n], p, rtol=1e-7, atol=1e-8)
            if n.endswith("running_var"):
                assert float(p.min()) > 0


def test_fused_refuses_batch_norm_and_takes_adapters(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"FUSED cannot serve a model with BatchNorm: .*; use GroupNorm"):
        build_setup(recipe("fused", BATCH_NORM))
    run(recipe("fused", ADAPTED), tmp_path / "run")


def test_statistics_are_measured_anew_after_unlearning_by_those_who_stay(tmp_path: Path) -> None:
    """Gone are the statistics of the leaving client, whose images are another kind; the passes are counted."""
    shifted = recipe("fedquit", {**BATCH_NORM, "options": {}})
    result = run(shifted, tmp_path / "run")
    unlearned = models(tmp_path / "run")[0]
    setup = build_setup(shifted)
    stay = [c for c in setup.data.clients if c != 1]
    means = []
    for c in stay:
        x = setup.data.x[setup.data.view(c, "all")]
        means.append((len(x), torch.nn.functional.conv2d(x, unlearned["0.weight"], padding=1).mean((0, 2, 3))))
    expected = sum(n * m for n, m in means) / sum(n for n, _ in means)
    torch.testing.assert_close(unlearned["1.running_mean"], expected, rtol=0, atol=1e-12)
    costs = costs_of(result, "unlearned")
    one = nbytes(setup.initial)
    few = nbytes(statistics_of(setup.initial))
    assert costs["participations"] == 1 + len(stay)
    assert costs["down_bytes"] == one * (1 + len(stay))
    assert costs["up_bytes"] == one + few * len(stay)


def test_rounds_of_adapters_cost_adapters(tmp_path: Path) -> None:
    adapted = recipe("fedquit", ADAPTED)
    result = run(adapted, tmp_path / "run")
    setup = build_setup(adapted)
    assert sorted(setup.initial) == ["1.down", "1.up", "3.bias", "3.weight"]
    trained = 8 * (2 * 16 + 12 * 2 + 12 * 3 + 3)
    unlearned, recovered = (costs_of(result, phase) for phase in ("unlearned", "recovered"))
    assert nbytes(setup.initial) == trained
    assert unlearned["down_bytes"] == unlearned["up_bytes"] == trained
    paper = bill("fedquit", Setting(4, 4, 3, model_bytes=trained, epoch_flops=1.0), recovery_rounds=1)
    assert paper.unlearning.bytes == 2 * trained
    assert recovered["down_bytes"] + recovered["up_bytes"] == paper.recovery.bytes


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Checkpoints carry the statistics, and the masks do not depend on where a run was interrupted."""
    whole = recipe("federaser", BATCH_NORM, train={"rounds": 3})
    run(whole, tmp_path / "whole")
    run(recipe("federaser", BATCH_NORM, train={"rounds": 3}), tmp_path / "parts")
    state = tmp_path / "parts" / "request-0" / "unlearned.safetensors"
    state.unlink()
    for result in (tmp_path / "parts").glob("results.json"):
        result.unlink()
    run(whole, tmp_path / "parts")
    for a, b in zip(models(tmp_path / "whole"), models(tmp_path / "parts"), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
