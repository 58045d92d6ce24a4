# SPDX-License-Identifier: Apache-2.0
"""The character LSTM: its size, its beginning, `torch.nn.LSTM` as judge, and all that engines do with a network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from fedquit.core import Params
from fedquit.core.fedavg import cross_entropy
from fedquit.errors import InputError
from fedquit.models import FunctionalModel, load_model

CLASSES, T = 7, 6


@pytest.fixture(scope="module")
def model() -> FunctionalModel:
    return load_model("char_lstm", (T,), CLASSES, dtype=torch.float64, embedding=5, hidden=8)


@pytest.fixture(scope="module")
def params(model: FunctionalModel) -> Params:
    return model.init(3)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(CLASSES, (4, T), generator=torch.Generator().manual_seed(0))


def loss_of(model: FunctionalModel, params: Params, x: Tensor) -> Tensor:
    """The next character is to be the one before, round the window."""
    return cross_entropy(model(params, x), x.roll(1, 1)).mean()


def test_it_has_the_paper_s_number_of_parameters() -> None:
    params = load_model("char_lstm", (80,), 65).init(0)
    assert sum(p.numel() for p in params.values()) == 419_265
    assert list(params)[-2:] == ["head.weight", "head.bias"]  # methods that train the head alone go by this order


def test_it_gives_logits_at_every_place(model: FunctionalModel, params: Params, windows: Tensor) -> None:
    assert model(params, windows).shape == (4, T, CLASSES)


def test_a_place_sees_only_what_came_before(model: FunctionalModel, params: Params, windows: Tensor) -> None:
    changed = windows.clone()
    changed[:, 3] = (changed[:, 3] + 1) % CLASSES
    before, after = model(params, windows), model(params, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert bool((before[:, 3:] != after[:, 3:]).any(-1).all())


class Judge(nn.Module):
    """The same network around torch's own LSTM, whose second bias is zero."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 5), nn.Linear(8, CLASSES)
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        names = {
            "lstm.kernel": "lstm.weight_ih_l0",
            "lstm.recurrent": "lstm.weight_hh_l0",
            "lstm.bias": "lstm.bias_ih_l0",
        }
        self.double().load_state_dict(
            {names.get(n, n): p for n, p in params.items()} | {"lstm.bias_hh_l0": torch.zeros_like(params["lstm.bias"])}
        )
        self.names = {ours: self.get_parameter(names.get(ours, ours)) for ours in params}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return logits


def test_torch_s_own_lstm_agrees_in_values_and_gradients(
    model: FunctionalModel, params: Params, windows: Tensor
) -> None:
    draw = torch.Generator().manual_seed(1)
    # Larger than fresh ones, so that every gate bends.
    params = {n: p + torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}
    judge = Judge(params)
    torch.testing.assert_close(model(params, windows), judge(windows), rtol=0, atol=1e-12)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    ours = torch.autograd.grad(loss_of(model, leaves, windows), list(leaves.values()))
    loss = cross_entropy(judge(windows), windows.roll(1, 1)).mean()
    theirs = torch.autograd.grad(loss, [judge.names[n] for n in leaves])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert bool(a.abs().sum() > 0)


def test_many_clients_run_as_one(model: FunctionalModel, windows: Tensor) -> None:
    several = [model.init(seed) for seed in range(3)]
    stacked = {n: torch.stack([p[n] for p in several]) for n in several[0]}
    x = torch.stack([windows, windows.flip(0), windows.flip(1)])
    found = vmap(grad(lambda p, x: loss_of(model, p, x)))(stacked, x)
    for c, p in enumerate(several):
        alone = grad(lambda p, x: loss_of(model, p, x))(p, x[c])
        for n in p:
            torch.testing.assert_close(found[n][c], alone[n], rtol=0, atol=1e-12)


def test_it_can_be_differentiated_twice(model: FunctionalModel, params: Params, windows: Tensor) -> None:
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    draw = torch.Generator().manual_seed(2)
    along = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}

    def gradient(at: Params, *, create_graph: bool = False) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss_of(model, at, windows), list(at.values()), create_graph=create_graph)
        return dict(zip(at, found, strict=True))

    first = gradient(leaves, create_graph=True)
    slope = torch.stack([(first[n] * v).sum() for n, v in along.items()]).sum()
    curved = dict(zip(leaves, torch.autograd.grad(slope, list(leaves.values())), strict=True))
    step = 1e-5
    ahead, behind = (
        gradient({n: (p + s * along[n]).requires_grad_() for n, p in params.items()}) for s in (step, -step)
    )
    for n, found in curved.items():
        torch.testing.assert_close(found, (ahead[n] - behind[n]) / (2 * step), rtol=1e-6, atol=1e-7)


def test_it_compiles_into_one_graph(model: FunctionalModel, params: Params, windows: Tensor) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(params, windows), model(params, windows), rtol=0, atol=1e-12)


def test_single_precision_is_near_double(windows: Tensor) -> None:
    single, double = (
        load_model("char_lstm", (T,), CLASSES, dtype=d, embedding=5, hidden=8) for d in (torch.float32, torch.float64)
    )
    logits = single(single.init(0), windows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), double(double.init(0), windows), rtol=0, atol=1e-6)


def test_it_begins_as_keras_layers_do() -> None:
    params = load_model("char_lstm", (80,), 65).init(0)
    for name, limit in {
        "embedding.weight": 0.05,
        "lstm.kernel": math.sqrt(6 / (128 + 1024)),
        "head.weight": math.sqrt(6 / (256 + 65)),
    }.items():
        p = params[name]
        assert 0.99 * limit < p.abs().max().item() <= limit, name
        assert p.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02), name
    recurrent = params["lstm.recurrent"]
    torch.testing.assert_close(recurrent.T @ recurrent, torch.eye(256), rtol=0, atol=1e-5)
    assert torch.equal(params["lstm.bias"], functional.one_hot(torch.tensor([1]), 4).float().T.expand(4, 256).flatten())
    assert not bool(params["head.bias"].any())


@pytest.mark.parametrize("shape", [(), (3, 32, 32), (80, 2), (0,)])
def test_it_refuses_what_is_no_window_of_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"char_lstm needs windows of tokens"):
        load_model("char_lstm", shape, 65)


@pytest.mark.parametrize("sizes", [{"embedding": 0}, {"hidden": 0}, {"embedding": -1}])
def test_it_refuses_layers_of_nothing(sizes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"both must be 1 or more"):
        load_model("char_lstm", (80,), 65, **sizes)
