# SPDX-License-Identifier: Apache-2.0
"""FedBN on a SuperLink and SuperNodes: the example app with each client's own BatchNorm, and a client that leaves."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedquit.core.local_layers import completed
from fedquit.flower.deploy.commands import Value
from fedquit.flower.deploy.demo import app_folder
from fedquit.models import FunctionalModel
from fedquit.running.store import load_params
from flower.real_world import Federation, running_in

pytestmark = [pytest.mark.flower, pytest.mark.faults, pytest.mark.timeout(900)]
NODES, LEAVING = 3, 1
LOCAL = 'FunctionalModel(Net, batchnorm="local")'


def local_app(folder: Path) -> Path:
    """The example app with BatchNorm in place of GroupNorm, and the model that docs/models.md names for it."""
    app = folder / "app"
    shutil.copytree(app_folder(), app)
    task = app / "forgetting" / "task.py"
    content = task.read_text()
    for channels in (16, 32):
        content = content.replace(f"nn.GroupNorm(2, {channels})", f"nn.BatchNorm2d({channels})")
    assert "nn.GroupNorm" not in content
    task.write_text(content)
    for name in ("client_app", "server_app"):
        module = app / "forgetting" / f"{name}.py"
        text = module.read_text().replace("lambda context: Net()", f"lambda context: {LOCAL}")
        text = text.replace(", evaluate=test_accuracy", "")  # which has no BatchNorm to evaluate with
        assert LOCAL in text
        module.write_text(text.replace("\nfrom .task", "\nfrom fedquit.models import FunctionalModel\n\nfrom .task"))
    return app


def own_layers(home: Path) -> dict[str, Tensor]:
    """The newest layers in a client's home; empty where it has none."""
    files = sorted(home.glob("memory/*/*batchnorm@*.safetensors"), key=lambda path: path.stat().st_mtime)
    return load_params(files[-1])[0] if files else {}


def accuracy(task: Any, shared: Mapping[str, Tensor], layers: Mapping[str, Tensor], node: int) -> float:
    """Of a client's own model on its own data, in percent."""
    params = completed(FunctionalModel(task.Net, batchnorm="local"), dict(shared), dict(layers))
    x, y = task.load_partition(node, NODES)
    with torch.no_grad():
        return 100 * float((functional_call(task.Net().eval(), params, (x,)).argmax(-1) == y).float().mean())


def test_each_client_keeps_its_own_layers_in_a_real_deployment_and_takes_them_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = local_app(tmp_path)
    monkeypatch.syspath_prepend(app)
    settings: dict[str, Value] = {"train.rounds": 4, "recover-rounds": 1, "method.fedquit.lr": 3e-3}
    with Federation(tmp_path, NODES, settings, app=app) as fed:
        fed.begin()
        fed.until("training round 2")
        fed.wait(lambda: all(own_layers(home) for home in fed.homes), "a client has no layers of its own")
        before = {node: own_layers(home) for node, home in enumerate(fed.homes)}
        fed.ask(LEAVING)
        fed.finish()
        (entry,) = fed.ledger["entries"]
    assert running_in(tmp_path) == []
    assert [status for status, _ in entry["history"]] == ["received", "started", "unlearned", "recovered", "done"]

    layers = {node: own_layers(home) for node, home in enumerate(fed.homes)}
    assert not layers[LEAVING], "a client that left has taken its layers with it"
    stay = [node for node in range(NODES) if node != LEAVING]
    first, other = (layers[node] for node in stay)
    try:
        task = importlib.import_module("forgetting.task")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "forgetting"]:
            sys.modules.pop(name)
    names = FunctionalModel(task.Net, batchnorm="local").local_names
    assert set(first) == set(other) == set(before[LEAVING]) == names
    assert {"1.weight", "1.bias", "1.running_mean", "1.running_var"} <= names
    assert not any(torch.equal(first[name], other[name]) for name in names), "no layer was averaged"

    stored = [name for path in fed.state.rglob("*.safetensors") for name in load_params(path)[0]]
    assert stored
    assert not names & set(stored), "the server has none of them"
    shared = load_params(fed.state / "model.safetensors")[0]
    accuracies = {node: accuracy(task, shared, layers[node], node) for node in stay}
    strangers = accuracy(task, shared, other, stay[0])
    sys.stdout.write(f"own layers: {accuracies}; client {stay[0]} with another's: {strangers}\n")  # docs/models.md
    assert all(value > 80 for value in accuracies.values()), accuracies
