# SPDX-License-Identifier: Apache-2.0
"""Networks as functions of their parameters."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquit.core import Params
from fedquit.core.params import fingerprint
from fedquit.errors import InputError, UnknownNameError
from fedquit.models import FunctionalModel, load_model, refuse_unsuitable
from fedquit.models.small import cnn


@settings(max_examples=15)
@given(channels=st.integers(1, 3), size=st.sampled_from([4, 6, 8, 28, 32]), classes=st.integers(1, 12))
def test_both_networks_take_images_of_many_sizes(channels: int, size: int, classes: int) -> None:
    x = torch.randn(3, channels, size, size)
    for name in ("mlp", "cnn"):
        model = load_model(name, (channels, size, size), classes)
        assert model(model.init(0), x).shape == (3, classes)


def test_the_options_set_the_sizes() -> None:
    wide = load_model("cnn", (1, 8, 8), 10, width=6).init(0)
    assert wide["0.weight"].shape == (6, 1, 3, 3)
    assert wide["3.weight"].shape == (12, 6, 3, 3)
    deep = load_model("mlp", (1, 2, 2), 3, hidden=5, layers=2).init(0)
    assert [tuple(p.shape) for n, p in deep.items() if n.endswith("weight")] == [(5, 4), (5, 5), (3, 5)]


def test_the_cnn_is_small_and_normalised_by_groups() -> None:
    params = load_model("cnn", (1, 28, 28), 10).init(0)
    assert sum(p.numel() for p in params.values()) < 30_000
    assert any(isinstance(layer, nn.GroupNorm) for layer in cnn((1, 28, 28), 10).modules())


def test_a_call_is_the_modules_forward_with_these_parameters() -> None:
    model = load_model("cnn", (1, 8, 8), 4, dtype=torch.float64)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    for seed in (1, 2):
        module = cnn((1, 8, 8), 4).double()
        params = model.init(seed)
        module.load_state_dict(params)
        assert torch.equal(model(params, x), module(x))


def test_gradients_reach_the_parameters_that_were_given(toy_model: FunctionalModel, toy_start: Params) -> None:
    leaves = {n: p.clone().requires_grad_() for n, p in toy_start.items()}
    logits = toy_model(leaves, torch.randn(4, 1, 6, 6, dtype=torch.float64))
    grads = torch.autograd.grad(logits.square().sum(), list(leaves.values()))
    assert all(bool(g.abs().sum() > 0) for g in grads)


def test_the_same_seed_gives_the_same_parameters_whatever_torch_drew_before() -> None:
    model = load_model("mlp", (1, 4, 4), 3)
    torch.manual_seed(1)
    one = fingerprint(model.init(5))
    torch.manual_seed(2)
    assert fingerprint(model.init(5)) == one
    assert fingerprint(model.init(6)) != one


def test_init_is_what_the_factory_makes_after_manual_seed() -> None:
    torch.manual_seed(9)
    expected = cnn((1, 8, 8), 4).state_dict()
    found = load_model("cnn", (1, 8, 8), 4).init(9)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_building_and_initialising_leave_torchs_own_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model("cnn", (1, 8, 8), 4).init(0)
    assert torch.equal(torch.rand(4), expected)


def test_parameters_have_the_models_dtype_and_no_graph() -> None:
    single, double = (load_model("cnn", (1, 8, 8), 4, dtype=d) for d in (torch.float32, torch.float64))
    for n, p in double.init(0).items():
        assert p.dtype == torch.float64
        assert not p.requires_grad
        assert torch.equal(p.float(), single.init(0)[n]), "the same numbers in every dtype"
    with pytest.raises(InputError, match=r"torch\.int64"):
        load_model("mlp", (4,), 2, dtype=torch.int64)


def test_fresh_parameters_are_nobody_elses() -> None:
    model = load_model("mlp", (4,), 2)
    x, one = torch.ones(1, 4), model.init(0)
    logits = model(one, x)
    for p in model.init(0).values():
        p.zero_()
    assert torch.equal(model(one, x), logits)
    assert torch.equal(model(model.init(0), x), logits)


def test_a_missing_or_foreign_parameter_is_not_passed_over(toy_model: FunctionalModel, toy_start: Params) -> None:
    x = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    name = next(iter(toy_start))
    with pytest.raises(RuntimeError, match="Missing"):
        toy_model({n: p for n, p in toy_start.items() if n != name}, x)
    with pytest.raises(RuntimeError, match="Unexpected"):
        toy_model({**toy_start, "foreign": toy_start[name]}, x)


class Wrapped(nn.Module):
    """Returns an object with logits; has a constant buffer and two tied weights."""

    def __init__(self, output: Callable[[Tensor], object] = lambda z: SimpleNamespace(logits=z)) -> None:
        super().__init__()
        self.first, self.second, self.output = nn.Linear(3, 3), nn.Linear(3, 3), output
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> object:
        return self.output(self.second(self.first(x)) + self.shift)


def test_constants_are_fetched_once_for_a_device() -> None:
    seen: list[object] = []

    class Noting(Wrapped):
        def forward(self, x: Tensor) -> object:
            seen.append(self.shift)
            return super().forward(x)

    model = FunctionalModel(Noting)
    params = {n: p.to("meta") for n, p in model.init(0).items()}
    for x in (torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, device="meta")):
        assert model(params, x).is_meta
    assert seen[0] is seen[1]
    assert not model(model.init(0), torch.zeros(2, 3)).is_meta, "another device has its own"


def test_logits_are_unwrapped_with_constant_buffers_and_tied_weights() -> None:
    model = FunctionalModel(Wrapped)
    params = model.init(0)
    assert sorted(params) == ["first.bias", "first.weight", "second.bias"]
    assert torch.equal(
        model({n: torch.zeros_like(p) for n, p in params.items()}, torch.ones(2, 3)), torch.full((2, 3), 2.0)
    )
    tripled = {**params, "first.weight": 3 * torch.eye(3), "first.bias": torch.zeros(3), "second.bias": torch.zeros(3)}
    assert torch.equal(model(tripled, torch.ones(1, 3)), torch.full((1, 3), 11.0))


def test_an_output_that_is_no_tensor_is_refused() -> None:
    model = FunctionalModel(partial(Wrapped, lambda z: (z, z)))
    with pytest.raises(InputError, match="returned tuple: its forward must return logits"):
        model(model.init(0), torch.ones(1, 3))


def test_nothing_random_is_left_in_a_forward() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input), 0.5, training=self.training)

    model = FunctionalModel(lambda: Noisy(8, 8))
    params, x = model.init(0), torch.ones(1, 8)
    assert torch.equal(model(params, x), model(params, x))


def test_recurrent_layers_stay_in_training_mode_for_the_sake_of_cudnn() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.modes = nn.LSTM(3, 4, batch_first=True), set[tuple[bool, bool]]()

        def forward(self, x: Tensor) -> Tensor:
            self.modes.add((self.training, self.rnn.training))
            last: Tensor = self.rnn(x)[0][:, -1]
            return last

    seen = Last()
    model = FunctionalModel(lambda: seen)
    assert model(model.init(0), torch.ones(2, 5, 3)).shape == (2, 4)
    assert seen.modes == {(False, True)}


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm2d(3, track_running_stats=False), "track_running_stats"),
        (nn.BatchNorm1d(3, momentum=None), "give it a momentum"),
        (nn.SyncBatchNorm(3), "BatchNorm2d"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "GroupNorm"),
        (nn.AlphaDropout(0.1), "nn.Dropout"),
        (nn.FeatureAlphaDropout(0.1), "nn.Dropout"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), "set its dropout to 0"),
        (nn.GRU(2, 2, num_layers=2, dropout=0.1), "set its dropout to 0"),
        (nn.RReLU(), "LeakyReLU"),
        (nn.FractionalMaxPool2d(2, 3), "MaxPool2d"),
        (nn.FractionalMaxPool3d(2, 3), "MaxPool2d"),
    ],
)
def test_layers_that_a_federation_cannot_cover_are_refused_by_name(layer: nn.Module, says: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer))
    kind = type(layer).__name__
    with pytest.raises(InputError, match=rf"layer '1\.0' \({kind}\) .*{says}.*`fedquit\.unlearn` alone"):
        FunctionalModel(lambda: module)
    with pytest.raises(InputError, match=rf"the model \({kind}\)"):
        refuse_unsuitable(layer)


def test_harmless_layers_pass() -> None:
    refuse_unsuitable(
        nn.Sequential(
            nn.GroupNorm(1, 2),
            nn.LayerNorm(2),
            nn.InstanceNorm2d(2),
            nn.BatchNorm1d(2),
            nn.Dropout(0.1),
            nn.LSTM(2, 2, num_layers=2),
            nn.Embedding(3, 2),
            nn.MultiheadAttention(2, 1),
        )
    )


def with_parameter(make: Callable[[], nn.Parameter]) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_parameter("extra", make())
    return module


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)


def sharing_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = nn.Parameter(module[0].get_parameter("weight").data)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # a change of dtype must not hide anything
@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"parameter '0\.weight' has no values yet: give its layer all sizes"),
        (lambda: nn.Linear(2, 2, device="meta"), r"parameter 'weight' has no values yet"),
        (
            lambda: with_parameter(lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64))),
            r"parameter 'extra' is torch\.complex64",
        ),
        (
            lambda: with_parameter(lambda: nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)),
            r"parameter 'extra' is torch\.int64.*make it a buffer",
        ),
        (frozen, r"the model \(Sequential\) is frozen as a whole: leave some parameters trainable"),
        (sharing_memory, r"parameter '1\.weight' shares memory with '0\.weight'"),
        (nn.ReLU, r"the model \(ReLU\) has no parameters: there is nothing to train"),
        (lambda: with_no_numbers(nn.Linear(2, 2)), r"the model \(Linear\) has no parameters"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"the model \(DataParallel\) takes no parameters from outside"),
    ],
)
def test_parameters_that_a_federation_cannot_train_are_refused_by_name(
    build: Callable[[], nn.Module], says: str, dtype: torch.dtype
) -> None:
    with pytest.raises(InputError, match=says):
        FunctionalModel(build, dtype)


def with_no_numbers(module: nn.Linear) -> nn.Module:
    module.weight, module.bias = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.empty(0))
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript as a whole
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes no parameters from outside: return the plain torch\.nn\.Module"):
        FunctionalModel(lambda: torch.jit.script(nn.Linear(2, 2)))


def test_one_tensor_under_two_names_is_trained_and_averaged_once() -> None:
    model = FunctionalModel(partial(Wrapped, lambda z: z))
    leaves = {n: p.requires_grad_() for n, p in model.init(0).items()}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(model(leaves, x).square().sum(), list(leaves.values()))
    module = Wrapped(lambda z: z)
    module.load_state_dict({**leaves, "second.weight": leaves["first.weight"]}, strict=False)
    output = module(x)
    assert isinstance(output, Tensor)
    output.square().sum().backward()
    assert len(found) == 3
    for name, gradient in zip(leaves, found, strict=True):
        torch.testing.assert_close(gradient, module.get_parameter(name).grad)  # both uses of the tensor add up


def test_normalised_weights_follow_the_parameters_that_were_given() -> None:
    model = FunctionalModel(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), torch.float64)
    params, x = model.init(1), torch.randn(4, 3, dtype=torch.float64)
    size, direction = (params[f"parametrizations.weight.original{i}"] for i in (0, 1))
    doubled = {**params, "parametrizations.weight.original0": 2 * size}
    weight = 2 * size * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(model(doubled, x), x @ weight.T + params["bias"], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_norm_that_is_only_estimated_is_refused(norm: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(InputError, match=r"keeps an estimate of its weights' norm.*use weight_norm instead"):
        FunctionalModel(lambda: nn.Sequential(norm(nn.Linear(3, 2))))


@pytest.mark.parametrize(
    ("name", "shape", "options", "says"),
    [
        ("cnn", (1, 3, 8), {}, "from 4x4 on"),
        ("cnn", (64,), {}, "use mlp"),
        ("cnn", (1, 8, 8), {"width": 3}, "multiple of 2"),
        ("cnn", (1, 8, 8), {"width": 0}, "multiple of 2"),
        ("mlp", (4,), {"hidden": 0}, "1 or more"),
        ("mlp", (4,), {"layers": 0}, "1 or more"),
    ],
)
def test_impossible_sizes_are_refused(name: str, shape: tuple[int, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_model(name, shape, 2, **options)


def test_unknown_models_and_options_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'mpl': did you mean 'mlp'"):
        load_model("mpl", (4,), 2)
    with pytest.raises(UnknownNameError, match="unknown option of model 'mlp' 'hiden': did you mean 'hidden'"):
        load_model("mlp", (4,), 2, hiden=3)
    with pytest.raises(UnknownNameError, match="choose one of width"):
        load_model("cnn", (1, 8, 8), 2, foo=3)


def test_ones_own_model_is_imported_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_for_test.py").write_text(
        "from torch import nn\n"
        "def line(shape, classes, *, bias=True): return nn.Linear(shape[0], classes, bias=bias)\n"
        "def anything(shape, classes, **options): return nn.Linear(shape[0], options['out'])\n"
        "def wrong(shape, classes): return 3\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = "own_model_for_test"
    assert sorted(load_model(f"{own}:line", (4,), 2).init(0)) == ["bias", "weight"]
    assert load_model(f"{own}:line", (4,), 2, bias=False).init(0)["weight"].shape == (2, 4)
    assert load_model(f"{own}:anything", (4,), 2, out=7).init(0)["weight"].shape == (7, 4)
    with pytest.raises(InputError, match="factory returned int"):
        load_model(f"{own}:wrong", (4,), 2)
    with pytest.raises(InputError, match="is not a function"):
        load_model(f"{own}:number", (4,), 2)
    with pytest.raises(UnknownNameError, match="did you mean 'line'"):
        load_model(f"{own}:lin", (4,), 2)
    with pytest.raises(UnknownNameError, match="unknown option"):
        load_model(f"{own}:line", (4,), 2, shape=(3,))


def test_a_model_travels_to_another_process() -> None:
    model = load_model("cnn", (1, 8, 8), 4)
    twin = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(twin(model.init(1), x), model(twin.init(1), x))
