# SPDX-License-Identifier: Apache-2.0
"""Networks that a program gives as objects: a changed one is another one, and a result gives back the one it judged."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquit
from fedquit.data import federate, load_dataset
from fedquit.errors import InputError
from fedquit.models import FunctionalModel, load_model
from fedquit.running.in_memory import GivenModel

SHORT = {"train.rounds": 2, "recover.until": "rounds", "recover.max_rounds": 1, "engine.name": "sequential"}
DATASET = load_dataset("synthetic", examples=120, test_examples=60, classes=3, size=4)

CELL = """
import torch
from torch import nn


def activation(x):
    return {helper}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(activation({inner}))
"""
INNER = "self.a(x.flatten(1))"


def make() -> nn.Module:
    """Calls whatever `Net` is at the time, as the cell of a notebook does."""
    made: nn.Module = NOTEBOOK.Net()
    return made


NOTEBOOK: Any = types.ModuleType("notebook")


def run_cell(helper: str = "torch.relu(x)", inner: str = INNER) -> None:
    """Define the class, again; as there is no file, there is no source."""
    exec(CELL.format(helper=helper, inner=inner), vars(NOTEBOOK))


def setting(model: Callable[[], nn.Module], **settings: Any) -> fedquit.Setting:
    data = federate(DATASET, partition="iid", clients=3)
    clients = {name: (data.x[data.train[k]], data.y[data.train[k]]) for k, name in enumerate("abc")}
    return fedquit.Setting(model, clients, (DATASET.test_x, DATASET.test_y), settings={**SHORT, **settings})


@pytest.mark.parametrize(
    "changed",
    [{"inner": f"5 * {INNER}"}, {"helper": "torch.sin(5 * x)"}],
    ids=["another forward", "another function that the forward calls"],
)
def test_a_network_that_a_notebook_changes_is_trained_anew(changed: dict[str, str], tmp_path: Path) -> None:
    run_cell()
    first = fedquit.run(setting(make), forget="a", out=tmp_path / "r", cache=tmp_path / "cache")
    run_cell()
    again = fedquit.run(setting(make), forget="a", out=tmp_path / "r", cache=tmp_path / "cache")
    assert again.rows == first.rows
    run_cell(**changed)
    with pytest.raises(fedquit.StoreError, match="another"):
        fedquit.run(setting(make), forget="a", out=tmp_path / "r", cache=tmp_path / "cache")
    shared = fedquit.run(setting(make), forget="a", out=tmp_path / "new", cache=tmp_path / "cache")
    fresh = fedquit.run(setting(make), forget="a")
    for phase in ("original", "retrained", "recovered"):
        assert shared.row(phase)["fingerprint"] == fresh.row(phase)["fingerprint"]
        assert shared.row(phase)["fingerprint"] != first.row(phase)["fingerprint"]


def test_the_name_of_a_network_follows_the_source_of_its_classes() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def build() -> nn.Module:
        return Net(4, 2)

    before = GivenModel(build).name
    assert before == GivenModel(build).name

    class Net(nn.Linear):  # type: ignore[no-redef]  # noqa: F811
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    assert GivenModel(build).name != before


def test_naming_and_probing_a_network_leave_torchs_generator_as_it_was() -> None:
    state = torch.get_rng_state()
    setting(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    FunctionalModel(lambda: nn.Linear(4, 2)).behaviour(torch.zeros(1, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_hash_of_behaviour_does_not_depend_on_threads_or_random_numbers_of_a_forward() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(2, dtype=x.dtype)

    x = torch.linspace(-1, 1, 4000).reshape(4, 1000)
    noisy = FunctionalModel(lambda: Noisy(1000, 2))
    threads = torch.get_num_threads()
    hashes = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        hashes.add(noisy.behaviour(x))
    torch.set_num_threads(threads)
    assert len(hashes) == 1
    assert FunctionalModel(lambda: nn.Linear(1000, 2)).behaviour(x) not in hashes


def test_a_forward_that_insists_on_float32_has_a_behaviour_too() -> None:
    class Single(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    assert FunctionalModel(lambda: Single(4, 2)).behaviour(torch.ones(1, 4))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    return model


def test_the_model_of_a_result_is_the_one_that_was_judged_though_a_layer_is_frozen() -> None:
    result = fedquit.run(setting(frozen), forget="a")
    torch.manual_seed(7)
    state = torch.get_rng_state()
    model = result.model().eval()
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        logits = model(DATASET.test_x)
    assert torch.equal(logits, result.setup.model(dict(result.params), DATASET.test_x))
    right = (logits.argmax(-1) == DATASET.test_y).float().mean()
    assert 100 * float(right) == pytest.approx(result.row("recovered")["test_acc"])


def test_the_module_of_lora_adapters_with_tied_weights_computes_what_the_federation_does() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    options: dict[str, Any] = {
        "architecture": "gpt2",
        "lora": 2,
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": 16,
    }
    model = load_model("huggingface", (8,), 20, **options)
    params = {name: tensor + 0.1 for name, tensor in model.init(3).items()}
    module = model.module(params).eval()
    x = torch.arange(16).reshape(2, 8) % 20
    with torch.no_grad():
        assert torch.allclose(module(x).logits, model(params, x), atol=1e-6)
    assert not torch.allclose(model(params, x), model(model.init(3), x), atol=1e-3)


def test_parameters_of_another_network_make_no_module() -> None:
    model = FunctionalModel(frozen)
    params = model.init(0)
    del params["4.bias"]
    with pytest.raises(InputError, match=r"4\.bias"):
        model.module(params)
