# SPDX-License-Identifier: Apache-2.0
"""What `unlearn` promises: Algorithm 1, a given model left alone, repeatable results, and plain words on bad input."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedquit.distill.stepping import OPTIMIZERS
from fedquit.distill.unlearning import unlearn
from fedquit.distill.virtual_teacher import TEACHERS, virtual_logits
from fedquit.errors import InputError, NonFiniteError, UnknownNameError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(features: int = 3, classes: int = 4, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(features, classes).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(seed), dtype=torch.float64))
    return layer


def forget(n: int = 10, features: int = 3, classes: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=generator)


class Pairs(Dataset[tuple[Tensor, int]]):
    """A map-style dataset that is not a TensorDataset and has plain integers for labels."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


CALLS: list[tuple[bool, bool, int]] = []


class Watched(nn.Module):
    """Notes for every forward pass whether it trained, whether a gradient was kept, and the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        CALLS.append((self.training, logits.requires_grad, len(x)))
        return logits


def network() -> nn.Sequential:
    """Everything at once: BatchNorm, dropout, a frozen layer; one part in evaluation mode, gradients left over."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4)
        ).double()
    model.train()
    model[1].eval()
    model[4].requires_grad_(False)
    leading = model.get_parameter("0.weight")
    leading.grad = torch.ones_like(leading)
    return model


def everything(model: nn.Module) -> list[Tensor | bool | None]:
    """Copies of all that a model is."""
    state: list[Tensor | bool | None] = [tensor.clone() for tensor in model.state_dict().values()]
    for parameter in model.parameters():
        state += [parameter.requires_grad, None if parameter.grad is None else parameter.grad.clone()]
    return state + [module.training for module in model.modules()]


def same(first: list[Tensor | bool | None], second: list[Tensor | bool | None]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in zip(first, second, strict=True)
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in model.state_dict().values()])


def by_hand(x: Tensor, y: Tensor, optimizer: str, lr: float, epochs: int, batch_size: int, seed: int) -> Tensor:
    """Algorithm 1 for z = Wx + b with the gradient and the optimizer written out; W and b as one vector."""
    layer = linear()
    W = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    target = virtual_logits(ones @ W.T, y).softmax(-1)
    m, s, t = torch.zeros_like(W), torch.zeros_like(W), 0
    generator = seeded(seed)
    for order in [torch.randperm(len(x), generator=generator) for _ in range(epochs)]:
        for start in range(0, len(x), batch_size):
            batch = order[start : start + batch_size]
            slope = ((ones[batch] @ W.T).softmax(-1) - target[batch]).T @ ones[batch] / len(batch)
            t += 1
            m, s = 0.9 * m + 0.1 * slope, 0.999 * s + 0.001 * slope**2
            if optimizer == "adamw":
                W = W - lr * 0.004 * W
            adaptive = m / (1 - 0.9**t) / ((s / (1 - 0.999**t)).sqrt() + 1e-7)
            W = W - lr * (slope if optimizer == "sgd" else adaptive)
    return torch.cat([W[:, :-1].flatten(), W[:, -1]])


@pytest.mark.parametrize("scale", [1.0, 1e-6])  # with tiny inputs, Adam's eps shows
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unlearn_is_algorithm_1_step_by_step(optimizer: str, scale: float) -> None:
    x, y = forget(n=10)
    options: dict[str, Any] = {"lr": 0.05, "epochs": 3, "batch_size": 4, "optimizer": optimizer, "seed": 11}
    student = unlearn(linear(), (x * scale, y), **options)
    expected = by_hand(x * scale, y, optimizer, lr=0.05, epochs=3, batch_size=4, seed=11)
    torch.testing.assert_close(weights(student), expected, rtol=0, atol=1e-12)


def test_adam_kl_min_one_epoch_and_batches_of_32_are_the_defaults() -> None:
    x, y = forget(n=40)
    student = unlearn(linear(), (x, y), lr=0.01)
    expected = by_hand(x, y, "adam", lr=0.01, epochs=1, batch_size=32, seed=0)
    torch.testing.assert_close(weights(student), expected, rtol=0, atol=1e-12)


def test_the_last_batch_is_kept_and_only_the_student_trains() -> None:
    CALLS.clear()
    unlearn(Watched().eval(), forget(n=7), lr=0.1, epochs=2, batch_size=3)
    assert [size for training, _, size in CALLS if training] == [3, 3, 1, 3, 3, 1]
    assert [size for training, _, size in CALLS if not training] == [3, 3, 1, 3, 3, 1]
    assert all(kept == training for training, kept, _ in CALLS)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_given_model_is_left_wholly_untouched(teacher: str) -> None:
    model = network()
    before = everything(model)
    student = unlearn(model, forget(), lr=0.1, epochs=2, batch_size=5, teacher=teacher)
    assert same(everything(model), before)
    shared = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not shared & {tensor.data_ptr() for tensor in student.state_dict().values()}
    assert not torch.equal(weights(student), weights(model))


def test_the_student_comes_back_in_the_modes_of_the_given_model_and_without_gradients() -> None:
    model = network()
    student = unlearn(model, forget(), lr=0.1, batch_size=5)
    assert [module.training for module in student.modules()] == [module.training for module in model.modules()]
    assert not student.get_submodule("1").training
    assert student.get_submodule("3").training
    assert all(parameter.grad is None for parameter in student.parameters())
    assert not any(module.training for module in unlearn(model.eval(), forget(), lr=0.1, batch_size=5).modules())


def test_frozen_parameters_stay_and_stay_frozen() -> None:
    model = network()
    for optimizer in OPTIMIZERS:
        student = unlearn(model, forget(), lr=0.1, batch_size=5, optimizer=optimizer)
        for name, parameter in student.named_parameters():
            given = model.get_parameter(name)
            assert parameter.requires_grad == given.requires_grad == (not name.startswith("4."))
            if name != "0.bias":  # a bias ahead of BatchNorm has no effect, hence no gradient
                assert torch.equal(parameter, given) == name.startswith("4.")


def test_batch_norm_statistics_of_the_student_move_and_the_teacher_uses_those_of_the_given_model() -> None:
    x, y = forget(n=6)
    x = 5 * x + 3
    model = nn.Sequential(nn.BatchNorm1d(3).double(), linear())
    student = unlearn(model.eval(), (x, y), lr=0.1, optimizer="sgd")
    norm = student.get_submodule("0")
    torch.testing.assert_close(norm.get_buffer("running_mean"), 0.1 * x.mean(0))
    torch.testing.assert_close(norm.get_buffer("running_var"), 0.9 + 0.1 * x.var(0))
    normal = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()  # the student sees the statistics of the batch
    target = virtual_logits(model(x).detach(), y).softmax(-1)
    slope = ((normal @ linear().weight.T + linear().bias).softmax(-1) - target).mean(0)
    torch.testing.assert_close(student.get_parameter("1.bias"), (linear().bias - 0.1 * slope).detach())


def test_dropout_is_active_in_the_student() -> None:
    x, y = forget(n=8)
    model = nn.Sequential(nn.Dropout(0.5), linear()).eval()
    # One batch of all samples: the seed has nothing left to decide but the dropout.
    dropped = [weights(unlearn(model, (x, y), lr=0.1, optimizer="sgd", seed=seed)) for seed in (0, 1)]
    plain = [weights(unlearn(linear(), (x, y), lr=0.1, optimizer="sgd", seed=seed)) for seed in (0, 1)]
    assert not torch.allclose(dropped[0], dropped[1])
    torch.testing.assert_close(plain[0], plain[1])


@pytest.mark.parametrize("teacher", ["min", "random"])
def test_results_repeat_for_a_seed_whatever_the_global_random_state(teacher: str) -> None:
    x, y = forget()
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    for data in ((x, y), loader):
        results = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            before = torch.get_rng_state()
            options: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4, "teacher": teacher}
            results.append(weights(unlearn(network(), data, seed=5, **options)))
            assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], weights(unlearn(network(), data, seed=6, **options)))


def test_the_random_teacher_draws_new_labels_at_every_step() -> None:
    x, y = forget(n=200, features=1)
    layer = linear(features=1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    # From uniform predictions a step moves b by lr (frequencies of the labels - 1/4), up to lr squared.
    student = unlearn(layer, (x, y), lr=1e-3, epochs=2, batch_size=200, teacher="random", optimizer="sgd", seed=8)
    generator = seeded(8)
    for _ in range(2):
        torch.randperm(200, generator=generator)
    moves = [(torch.rand(200, generator=generator) * 4).long().bincount(minlength=4) / 200 - 0.25 for _ in range(2)]
    torch.testing.assert_close(
        student.get_parameter("bias").detach(), 1e-3 * sum(moves, torch.zeros(4)).double(), rtol=0, atol=1e-6
    )
    assert not torch.allclose(moves[0], moves[1], rtol=0, atol=1e-2)


def test_dataset_and_tuple_give_equal_results() -> None:
    x, y = forget(n=11)
    options: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4, "seed": 3}
    expected = weights(unlearn(network(), (x, y), **options))
    assert torch.equal(weights(unlearn(network(), TensorDataset(x, y), **options)), expected)
    assert torch.equal(weights(unlearn(network(), Pairs(x, y), **options)), expected)


def test_batches_of_a_data_loader_are_taken_as_they_come() -> None:
    x, y = forget(n=7)
    for drop_last, sizes in ((False, [3, 3, 1]), (True, [3, 3])):
        CALLS.clear()
        loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=False, drop_last=drop_last)
        student = unlearn(Watched(), loader, lr=0.1, optimizer="sgd", epochs=2, batch_size=32)
        assert [size for training, _, size in CALLS if training] == sizes * 2
        one_by_one = linear()
        teacher = copy.deepcopy(one_by_one)
        for batch_x, batch_y in list(loader) * 2:
            target = virtual_logits(teacher(batch_x).detach(), batch_y).softmax(-1)
            loss = nn.functional.kl_div(one_by_one(batch_x).log_softmax(-1), target, reduction="batchmean")
            slopes = torch.autograd.grad(loss, list(one_by_one.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(one_by_one.parameters(), slopes, strict=True):
                    parameter.sub_(0.1 * slope)
        torch.testing.assert_close(weights(student), weights(one_by_one), rtol=0, atol=1e-12)


def test_an_iterable_dataset_inside_a_data_loader_is_fine() -> None:
    x, y = forget(n=7)
    stream = unlearn(linear(), DataLoader(Stream(x, y), batch_size=3), lr=0.1, progress=True)
    listed = unlearn(linear(), DataLoader(TensorDataset(x, y), batch_size=3), lr=0.1)
    assert torch.equal(weights(stream), weights(listed))


@dataclass
class Output:
    logits: Tensor


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Output:
        return Output(self.layer(x))


def test_a_model_may_return_an_object_with_logits() -> None:
    plain = unlearn(linear(), forget(), lr=0.1, batch_size=4)
    wrapped = unlearn(Wrapped(linear()), forget(), lr=0.1, batch_size=4)
    assert isinstance(wrapped, Wrapped)
    assert torch.equal(weights(wrapped), weights(plain))


def test_logits_of_sequences_count_every_position_the_same() -> None:
    x, y = forget(n=12)
    by_position = unlearn(linear(), (x.reshape(4, 3, 3), y.reshape(4, 3)), lr=0.1, optimizer="sgd")
    flat = unlearn(linear(), (x, y), lr=0.1, optimizer="sgd")
    torch.testing.assert_close(weights(by_position), weights(flat), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["kl", "ce", "mse", "cosine"])
def test_the_loss_asked_for_is_the_loss_taken(loss: str) -> None:
    students = {name: weights(unlearn(linear(), forget(), lr=0.1, optimizer="sgd", loss=name)) for name in (loss, "kl")}
    gap = (students[loss] - students["kl"]).abs().max()
    assert gap < 1e-12 if loss in ("kl", "ce") else gap > 1e-4


@pytest.mark.parametrize(
    ("teacher", "options"), [("fixed", {"v": -3.0}), ("temperature", {"tau": 4.0}), ("topk", {"k": 1})]
)
def test_teacher_options_reach_the_teacher(teacher: str, options: dict[str, Any]) -> None:
    x, y = forget()
    layer = linear()
    student = unlearn(layer, (x, y), lr=0.1, optimizer="sgd", teacher=teacher, **options)
    target = virtual_logits(layer(x).detach(), y, teacher, **options).softmax(-1)
    slope = (layer(x).softmax(-1) - target).mean(0)
    torch.testing.assert_close(student.get_parameter("bias"), layer.bias.detach() - 0.1 * slope.detach())


def test_half_precision_models_work() -> None:
    x, y = forget()
    layer = linear().to(torch.bfloat16)
    student = unlearn(layer, (x.to(torch.bfloat16), y), lr=0.1, optimizer="sgd")
    assert student.get_parameter("weight").dtype == torch.bfloat16
    assert not torch.equal(student.get_parameter("weight"), layer.weight)


def test_unlearning_works_inside_no_grad() -> None:
    with torch.no_grad():
        inside = unlearn(linear(), forget(), lr=0.1)
    assert torch.equal(weights(inside), weights(unlearn(linear(), forget(), lr=0.1)))


def test_forgetting_happens_and_the_order_of_the_other_classes_stays() -> None:
    generator = seeded(4)
    centres = 3 * torch.randn(5, 6, generator=generator)
    y = torch.randint(5, (400,), generator=generator)
    x = centres[y] + torch.randn(400, 6, generator=generator)
    model = nn.Linear(6, 5)
    with torch.no_grad():
        model.weight.copy_(centres)
        model.bias.copy_(-centres.square().sum(-1) / 2)  # the best classifier for such clouds
    forgotten, labels = x[y == 2], y[y == 2]
    assert (model(forgotten).argmax(-1) == labels).float().mean() > 0.9
    student = unlearn(model, (forgotten, labels), lr=0.05, epochs=30)
    assert (student(forgotten).argmax(-1) == labels).float().mean() < 0.1
    others = torch.tensor([0, 1, 3, 4])
    best_before = model(forgotten)[:, others].argmax(-1)
    best_after = student(forgotten)[:, others].argmax(-1)
    assert (best_before == best_after).float().mean() > 0.9


def test_progress_is_shown_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = unlearn(linear(), forget(), lr=0.1, batch_size=4)
    assert capsys.readouterr() == ("", "")
    shown = unlearn(linear(), forget(), lr=0.1, batch_size=4, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Unlearning" in captured.err
    assert torch.equal(weights(quiet), weights(shown))


def test_rich_is_not_needed_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    unlearn(linear(), forget(), lr=0.1)
    with pytest.raises(ImportError):
        unlearn(linear(), forget(), lr=0.1, progress=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_given_model_and_the_random_state_of_the_device_are_left_alone() -> None:
    model = network()
    before = torch.cuda.get_rng_state()
    student = unlearn(model, forget(), lr=0.1, batch_size=5, device="cuda")
    again = unlearn(model, forget(), lr=0.1, batch_size=5, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert next(student.parameters()).is_cuda
    assert not next(model.parameters()).is_cuda
    torch.testing.assert_close(weights(student), weights(again))


def test_the_device_is_that_of_the_model_unless_another_is_named() -> None:
    assert unlearn(linear(), forget(), lr=0.1).get_parameter("weight").device == torch.device("cpu")
    assert unlearn(linear(), forget(), lr=0.1, device="cpu").get_parameter("weight").device == torch.device("cpu")


X, Y = forget()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((X[:0], Y[:0]), "the data is empty"),
        (TensorDataset(X[:0], Y[:0]), "the data is empty"),
        (DataLoader(TensorDataset(X[:0], Y[:0])), "the data is empty"),
        (DataLoader(TensorDataset(X, Y), batch_size=99, drop_last=True), "the data is empty"),
        ((X, Y[:4]), r"the shapes \(10, 3\) and \(4,\): their first dimensions must be equal"),
        ((X, Y.double()), "labels are torch.float64"),
        ((X, Y.bool()), "labels are torch.bool"),
        ((X, Y + 1), "labels run from . to 4, but the logits have 4 classes"),
        ((X, Y - 1), "labels run from -1"),
        ((X, nn.functional.one_hot(Y)), r"labels have shape \(10, 4\).*\(10, 4\) need labels of shape \(10,\)"),
        ((X, Y, Y), "a tuple of Tensor, Tensor, Tensor"),
        ((X, Y.tolist()), "a tuple of Tensor, list"),
        (X, "data is a Tensor"),
        ({"x": X, "y": Y}, "a batch is a dict of x, y without 'labels': name the key"),
        (iter([(X, Y)]), "data is a list_iterator"),
        (Stream(X, Y), "pass it inside a DataLoader"),
        ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], "a dict of x, y without 'labels': name the key"),
        (
            DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]),  # type: ignore[arg-type]
            "a dict of x, y without 'labels': name the key",
        ),
        (TensorDataset(X), "a batch is a list of Tensor: wrap"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        unlearn(linear(), data, lr=0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": math.inf}, "lr is inf"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"teacher": "temperature", "tau": -1.0}, "tau is -1.0"),
        ({"teacher": "topk", "k": 0}, "k is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        unlearn(linear(), forget(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "adan"}, "unknown optimizer 'adan': did you mean 'adam'"),
        ({"loss": "kll"}, "unknown loss 'kll': did you mean 'kl'"),
        ({"teacher": "top_k"}, "unknown teacher 'top_k': did you mean 'topk'"),
        ({"teacher": "min", "tau": 2.0}, "option of teacher 'min' 'tau'"),
        ({"weight_decay": 0.1}, "option of teacher 'min' 'weight_decay'"),
    ],
)
def test_names_that_do_not_exist_are_answered_with_those_that_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownNameError, match=says):
        unlearn(linear(), forget(), lr=0.1, **options)


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, linear()

    def forward(self, x: Tensor) -> object:
        logits = self.layer(x)
        return {"tuple": (logits, logits), "dict": {"scores": logits}, "int": logits.long(), "one": logits[:, :1]}[
            self.kind
        ]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tuple", "returns a tuple of Tensor, Tensor: it must return logits"),
        ("dict", "returns a dict of scores: it must return logits"),
        ("int", "logits are torch.int64"),
        ("one", "at least 2 classes"),
    ],
)
def test_a_model_without_usable_logits_is_refused(kind: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        unlearn(Returns(kind), forget(), lr=0.1)


def test_a_model_with_nothing_to_learn_is_refused() -> None:
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        unlearn(linear().requires_grad_(False), forget(), lr=0.1)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        unlearn(nn.Identity(), forget(), lr=0.1)


def test_one_sample_left_over_for_batch_norm_is_explained() -> None:
    with pytest.raises(InputError, match="batch_size that does not leave one sample over"):
        unlearn(network(), forget(n=9), lr=0.1, batch_size=4)


def test_other_errors_of_the_model_pass_through() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("its own trouble")
            return super().forward(x)

    with pytest.raises(ValueError, match="its own trouble"):
        unlearn(Broken(3, 4).double(), forget(n=1), lr=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_given_model_that_is_not_finite_is_named_as_the_cause(bad: float) -> None:
    layer = linear()
    with torch.no_grad():
        layer.bias[0] = bad
    with pytest.raises(NonFiniteError, match="the given model returns non-finite logits"):
        unlearn(layer, forget(), lr=0.1)


def test_a_student_that_left_the_finite_numbers_is_not_returned() -> None:
    with pytest.raises(NonFiniteError, match=r"lr=1e\+308: lower it"):
        unlearn(linear(), forget(), lr=1e308, epochs=3, optimizer="adam", batch_size=4)
