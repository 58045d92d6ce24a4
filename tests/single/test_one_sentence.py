# SPDX-License-Identifier: Apache-2.0
"""What a new user does wrong in the calls for one model, and the one sentence that each of them answers with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fedquit
from fedquit.errors import FedquitError, InputError, NonFiniteError
from fedquit.single.methods import METHODS
from fedquit.single.overlap import share_samples

N, WIDTH, CLASSES = 40, 6, 4
X = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.arange(N) % CLASSES
X2 = X + 1


def network(*last: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES), *last)


class Changed(nn.Module):
    """A layer whose output, or input, is changed on the way."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(WIDTH, CLASSES), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


class Masked(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.layer(x) * mask


class Samples(Dataset[Any]):
    """A data set of whatever a function gives for a position."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> Any:
        return self.sample(at)


def calls() -> Iterator[tuple[str, Callable[..., object]]]:
    yield "unlearn", lambda model, data, **options: fedquit.unlearn(model, data, **{"lr": 1e-3, **options})
    yield "recover", lambda model, data, **options: fedquit.recover(model, data, **{"lr": 1e-3, **options})
    yield (
        "evaluate",
        lambda model, data, **options: fedquit.evaluate(model, forget=data, holdout=copy.deepcopy(data), **options),
    )

    def with_method(method: str) -> Callable[..., object]:
        rate = {"lr": 1e-3} if METHODS[method].has_rate else {}
        return lambda model, data, **options: fedquit.forget(
            model,
            data,
            (X, Y) if data is None else copy.deepcopy(data),
            method=method,
            recover_lr=1e-3,
            **{**rate, **options},
        )

    for method in METHODS:
        yield f"forget {method}", with_method(method)


CALLS = dict(calls())
TRAINING = [name for name in CALLS if name != "evaluate"]
RATED = [name for name in TRAINING if name not in ("forget not", "forget ssd")]

embedding = nn.Sequential(nn.Embedding(10, WIDTH), nn.Flatten(), nn.Linear(WIDTH * 4, CLASSES))
convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
ragged = Samples(lambda at: (torch.zeros(at % 5 + 1), 1))
Case = tuple[Any, Any, dict[str, Any], str]
EVERYWHERE: dict[str, Case] = {
    # ---- inputs
    "width": (network(), (torch.zeros(N, 7), Y), {}, r"the model fails on a batch of float32 \(\d+, 7\): mat1"),
    "channels": (convolution, (torch.zeros(N, 1, 8, 8), Y), {}, r"float32 \(\d+, 1, 8, 8\): .* 3 channels.*; give"),
    "float64": (network(), (X.double(), Y), {}, r"float64 \(\d+, 6\): .*; give inputs of the shape and type"),
    "bytes": (convolution, (torch.zeros(N, 3, 8, 8).byte(), Y), {}, r"the model fails on a batch of uint8"),
    "float tokens": (embedding, (torch.zeros(N, 4), Y), {}, "the model fails on a batch of float32"),
    "unknown token": (embedding, (torch.full((N, 4), 10), Y), {}, "index out of range in self; give inputs"),
    "second input": (Masked(), (X, Y), {}, "missing 1 required positional argument: 'mask'; .*or `forward`"),
    "NaN": (network(), (X * torch.nan, Y), {}, "(NaN or infinity|non-finite logits): check its weights and the data"),
    # ---- labels
    "length": (network(), (X, Y[:30]), {}, r"the shapes \(40, 6\) and \(30,\): their first dimensions must be equal"),
    "class": (network(), (X, Y + 1), {}, "run from 1 to 4, but the logits have 4 classes: labels must lie in 0..3"),
    "negative": (network(), (X, Y - 1), {}, "labels run from -1 to 2"),
    "float labels": (network(), (X, Y.float()), {}, "labels are torch.float32: give class numbers of an integer type"),
    "bool labels": (network(), (X, Y > 0), {}, "labels are torch.bool: give class numbers"),
    "one-hot": (network(), (X, nn.functional.one_hot(Y)), {}, r"give class numbers, such as labels.argmax\(-1\)"),
    "column": (network(), (X, Y[:, None]), {}, r"give labels.squeeze\(-1\)"),
    "list": (network(), (X, Y.tolist()), {}, "data is a tuple of Tensor, list: give a pair of tensors"),
    "all ignored": (network(), (X, torch.full((N,), -100)), {}, "every label .*is -100, which is left out"),
    # ---- outputs
    "half a batch": (Changed(lambda z: z[: len(z) // 2]), (X, Y), {}, "let the model return one row of logits"),
    "positions": (Changed(lambda z: z[:, None].repeat(1, 3, 1)), (X, Y), {}, "choose the rows that have labels by"),
    "images": (nn.Conv2d(3, 4, 1), (torch.zeros(N, 3, 5, 5), torch.zeros(N, 5, 5).long()), {}, "give class_dim=1"),
    "a loss": (Changed(Tensor.mean), (X, Y), {}, r"logits have shape \(\): their last dimension"),
    "no dimension": (Changed(lambda z: z[:, 0]), (X, Y), {}, r"let `forward` return the pair \(0, z\); a regression"),
    "several": (network(), (X, nn.functional.one_hot(Y).float()), {}, "several labels at once are not supported"),
    "smaller image": (
        nn.Conv2d(3, 4, 2, 2), (torch.zeros(N, 3, 8, 8), torch.zeros(N, 8, 8).long()), {"class_dim": 1},
        "let `forward` interpolate the logits to the size of the labels",
    ),
    "one logit": (Changed(lambda z: z[:, :1]), (X, Y), {}, r"at least 2 classes; .* let `forward` return the pair"),
    "softmax": (network(nn.Softmax(-1)), (X, Y), {}, "returns probabilities, .* leave its last softmax out"),
    "class_dim": (network(), (X, Y), {"class_dim": 5}, r"have no dimension 5: let class_dim be that of their classes"),
    # ---- the form of the data
    "nothing": (network(), None, {}, "data is a NoneType: give a pair of tensors"),
    "empty": (network(), (X[:0], Y[:0]), {}, "the data is empty: give at least one sample"),
    "empty set": (network(), TensorDataset(X[:0], Y[:0]), {}, "the data is empty"),
    "empty loader": (network(), DataLoader(TensorDataset(X[:0], Y[:0])), {}, "the data is empty"),
    "empty mapping": (network(), {}, {}, "the data is empty"),
    "a path": (network(), "data.pt", {}, "data is a str: give a pair of tensors"),
    "arrays": (network(), (X.numpy(), Y.numpy()), {}, "a tuple of ndarray, ndarray: make tensors of arrays"),
    "array inputs": (network(), (X.numpy(), Y), {}, "make tensors of arrays, with torch.as_tensor"),
    "loader of inputs": (network(), DataLoader(X), {}, "a batch is a Tensor: wrap the data so that it gives pairs"),  # type: ignore[arg-type]
    "loader of triples": (network(), DataLoader(TensorDataset(X, Y, Y)), {}, "a batch is a list of Tensor, Tensor, Te"),
    "loader of texts": (network(), DataLoader(Samples(lambda at: ("a text", 1))), {}, "fails on a batch of a str: "),
    "other key": (network(), DataLoader(Samples(lambda at: {"x": X[at], "y": 1})), {}, "without 'labels': name"),
    "ragged": (network(), ragged, {}, "samples do not make a batch: stack expects .*; .* give `collate`"),
    "loader ragged": (network(), DataLoader(ragged, batch_size=4), {}, "samples do not make a batch: stack expects"),
    "objects": (network(), Samples(lambda at: (object(), 1)), {}, "samples do not make a batch: default_collate"),
    "list under a key": (
        Masked(), DataLoader(Samples(lambda at: {"x": X[at].tolist(), "mask": 1.0, "labels": 1}), batch_size=4), {},
        r"let the data give a tensor under 'x', as with set_format\('torch'\), or give `collate`",
    ),
    "many": (network(), Samples(lambda at: at), {"collate": list}, "a list of int, int, int, int, [0-9]+ more: wrap"),
    # ---- hooks
    "forward": (network(), (X, Y), {"forward": lambda m, batch: m(batch)}, "`forward` fails on a batch of .*repair it"),
    "no function": (network(), (X, Y), {"forward": "x"}, "`forward` is a str: give a function"),
    "labels": (network(), (X, Y), {"labels": lambda batch: batch[7]}, "`labels` fails on a batch that is a tuple of"),
    "no key": (network(), (X, Y), {"labels": 3}, "`labels` is a int: give the key of the labels"),
    # ---- the model and its place
    "cuda": (network(), (X, Y), {"device": "cuda:99"}, "device 'cuda:99' is not there: give one that is"),
    "device": (network(), (X, Y), {"device": "gpu"}, "the device 'gpu' is not there"),
    "number": (network(), (X, Y), {"device": 3.5}, "the device '3.5' is not there"),
    "meta": (network(), (X, Y), {"device": "meta"}, "the device 'meta' computes nothing"),
    "weights": (network().state_dict(), (X, Y), {}, "the model is a OrderedDict of .*: give an nn.Module, with load_"),
    "function": (torch.relu, (X, Y), {}, "the model is a builtin_function_or_method: give an nn.Module"),
    "a class": (nn.Linear, (X, Y), {}, "the model is the class Linear: give an object of it"),
    "without values": (network().to("meta"), (X, Y), {}, "the device 'meta', without values: load its weights"),
    "lazy": (nn.LazyLinear(CLASSES), (X, Y), {}, "lazy layers without a shape: let one batch pass"),
}  # fmt: skip
IN_TRAINING: dict[str, Case] = {
    "detached": (Changed(Tensor.detach), (X, Y), {}, "the model's logits have no gradient: leave `detach`"),
    "seed": (network(), (X, Y), {"seed": None}, "seed is None and has to be an integer"),
    "autocast": (network(), (X, Y), {"autocast": "bf16"}, "autocast is 'bf16': choose torch.bfloat16"),
    "rate": (network(), (X, Y), {"lr": "1e-3"}, "lr is '1e-3' and has to be"),
    "frozen": (network().requires_grad_(False), (X, Y), {}, "no parameter that requires a gradient|no trainable layer"),
}
WITH_A_RATE: dict[str, Case] = {
    "made": (network(), (X, Y), {"optimizer": torch.optim.Adam(network().parameters())}, "give its class, such as"),
    "one argument": (network(), (X, Y), {"optimizer": lambda p: None}, "optimizer cannot be made: .*; give a class"),
    "no optimizer": (network(), (X, Y), {"optimizer": lambda p, lr: 3}, "optimizer returns a int: let it return"),
    "callback": (network(), (X, Y), {"callback": 3}, "callback is a int: give a function"),
    "destroys": (network(), (X, Y), {"lr": 1e38, "optimizer": "sgd", "epochs": 3}, "NaN or infinity|no longer finite"),
}  # fmt: skip
FAULTS = [
    *((call, fault) for fault in EVERYWHERE for call in CALLS),
    *((call, fault) for fault in IN_TRAINING for call in TRAINING),
    *((call, fault) for fault in WITH_A_RATE for call in RATED),
]


@pytest.mark.filterwarnings("ignore:.*TorchScript|.*torch.jit")
@pytest.mark.parametrize(("call", "fault"), FAULTS)
def test_a_fault_is_answered_in_one_sentence_with_what_to_do(call: str, fault: str) -> None:
    model, data, options, says = {**EVERYWHERE, **IN_TRAINING, **WITH_A_RATE}[fault]
    with pytest.raises((InputError, NonFiniteError), match=says) as raised:
        CALLS[call](model, data, **options)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert len(sentence) < 400, sentence


@pytest.mark.parametrize("call", CALLS)
def test_a_model_of_torch_script_is_refused_whole_or_as_a_part(call: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(network())
        traced = torch.jit.trace(network(), X)
    for model in (scripted, traced, nn.Sequential(scripted)):
        with pytest.raises(InputError, match=r"a TorchScript module, .*: give the nn\.Module\."):
            CALLS[call](model, (X, Y))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_class_numbers_of_every_integer_type_are_the_same_labels(call: str, kind: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pair = [CALLS[call](network(), (X, labels)) for labels in (Y, Y.to(kind))]
    results = [vars(one) if not isinstance(one, nn.Module) else one.state_dict() for one in pair]
    if call == "evaluate":
        assert pair[0].to_dict() == pair[1].to_dict()  # type: ignore[attr-defined]
        return
    states = [r["model"].state_dict() if "model" in r else r for r in results]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_sentence_keeps_the_model_s_own_error_as_its_cause() -> None:
    with pytest.raises(InputError) as raised:
        fedquit.unlearn(network(), (X.double(), Y), lr=1e-3)
    assert isinstance(raised.value.__cause__, RuntimeError)

    def broken(_: Tensor) -> Tensor:
        raise KeyError("its own trouble")

    with pytest.raises(KeyError, match="its own trouble"):
        fedquit.unlearn(Changed(broken), (X, Y), lr=1e-3)

    def no_memory(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        fedquit.unlearn(Changed(no_memory), (X, Y), lr=1e-3)


def test_an_error_in_somebody_s_own_data_set_is_theirs() -> None:
    def absent(_: int) -> object:
        raise FileNotFoundError("no image 3.png")

    for data in (Samples(absent), DataLoader(Samples(absent))):
        with pytest.raises(FileNotFoundError, match=r"3\.png"):
            fedquit.evaluate(network(), forget=data)


def test_a_loader_s_worker_tells_the_cause_in_one_line() -> None:
    loader = DataLoader(ragged, batch_size=4, num_workers=1)
    with pytest.raises(InputError, match=r"samples do not make a batch: RuntimeError: stack expects"):
        fedquit.evaluate(network(), forget=loader)


def test_the_set_that_cannot_be_used_is_named() -> None:
    with pytest.raises(InputError, match=r"^holdout data: labels run from 1 to 4"):
        fedquit.evaluate(network(), forget=(X, Y), holdout=(X, Y + 1))
    with pytest.raises(InputError, match=r"^retain data: the model fails on a batch of float32 \(40, 7\)"):
        fedquit.forget(network(), (X, Y), (torch.zeros(N, 7), Y), lr=1e-3, recover_lr=1e-3)
    with pytest.raises(InputError, match=r"^original is a dict of .*: give the nn\.Module before unlearning"):
        fedquit.evaluate(network(), forget=(X, Y), original=dict(network().state_dict()))  # type: ignore[arg-type]


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = network()
    model.cache = model(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(InputError, match=r"the model cannot be copied: .*; give one that copy\.deepcopy takes"):
        fedquit.unlearn(model, (X, Y), lr=1e-3)


@pytest.mark.parametrize("call", CALLS)
def test_an_exported_model_is_refused(call: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        exported = torch.export.export(network(), (X,)).module()
    with pytest.raises(InputError, match=r"exported, which fixes its training mode: give the nn\.Module before"):
        CALLS[call](exported, (X, Y))


def test_every_fault_is_an_error_that_the_command_line_and_a_program_can_catch() -> None:
    assert issubclass(InputError, FedquitError)
    assert issubclass(InputError, ValueError)
    assert issubclass(NonFiniteError, FedquitError)


class Mean(nn.Module):
    """Reads tokens, as a list would not let it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert x.size(1) == WIDTH
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_data_set_of_lists_gives_what_one_of_tensors_gives() -> None:
    """Hugging Face's give lists of numbers, which torch's own collation turns around."""
    lists = Samples(lambda at: {"x": X[at].tolist(), "labels": int(Y[at]), "text": "kept out"})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Mean()
    one, other = (fedquit.unlearn(model, data, lr=1e-3) for data in (lists, {"x": X, "labels": Y}))
    assert torch.equal(one.layer.weight, other.layer.weight)  # type: ignore[union-attr,arg-type]
    assert fedquit.evaluate(model, forget=lists).to_dict() == fedquit.evaluate(model, forget=(X, Y)).to_dict()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": "auto", "holdout": (X + 0, Y), "rates": 1e-3}, "rates are 0.001: give a list of finite numbers"),
        ({"lr": "auto", "holdout": (X + 0, Y), "rates": "1e-3"}, "rates are '1e-3': give a list"),
        ({"recover_epochs": -1}, "recover_epochs is -1 and has to be an integer of at least 1"),
        ({"recover_lr": 0}, "recover_lr is 0 and has to be a finite number above 0"),
        ({"retain": (X, Y)}, "the retain data has samples of the forget data, which recovery would teach: leave them"),
        ({"holdout": (X[20:], Y[20:])}, "the hold-out has samples of the forget data: give data that was never"),
        ({"retain": (X2, Y), "holdout": DataLoader(TensorDataset(X2, Y))}, "the hold-out has samples of the retain"),
    ],
)
def test_numbers_and_sets_of_forget_are_answered_by_their_own_names(options: dict[str, Any], says: str) -> None:
    taken: list[Any] = []
    settings = {"retain": (X2, Y), "lr": 1e-3, "recover_lr": 1e-3, "callback": taken.append, **options}
    with pytest.raises(InputError, match=says):
        fedquit.forget(network(), (X, Y), **settings)
    assert not taken, "it is said before the work"


def test_sets_that_share_no_sample_are_taken() -> None:
    whole = Samples(lambda at: (X[at], Y[at]))
    one, other = Subset(whole, range(10)), Subset(whole, range(10, 20))
    assert not share_samples(one, other)
    assert share_samples(one, Subset(whole, [9, 30]))
    assert share_samples(one, whole)
    assert share_samples(DataLoader(one), Subset(Subset(whole, range(5, 15)), [0]))
    assert not share_samples(one, Subset(Subset(whole, range(5, 15)), [7]))
    assert not share_samples((X[:10], Y[:10]), (X[10:], Y[10:]))
    assert not share_samples((X[::2], Y[::2]), (X[1::2], Y[1::2])), "memory with gaps is not judged"
    assert not share_samples((X, Y), (X2, Y)), "constants may be shared"
    assert share_samples(TensorDataset(X, Y), {"x": X[5:], "labels": Y[5:]})
    assert not share_samples((X, Y), None)


def test_one_sample_left_over_passes_batch_norm_in_recovery_by_the_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    repaired = fedquit.recover(model, (X[:9], Y[:9]), lr=1e-3, batch_size=4)
    assert repaired[1].num_batches_tracked == 2, "the third batch has one sample"  # type: ignore[index]
    assert repaired[1].training  # type: ignore[index]
    alone = fedquit.recover(model, (X[:1], Y[:1]), lr=1e-3)
    assert torch.equal(alone[1].running_mean, model[1].running_mean)  # type: ignore[index,arg-type]
    assert not torch.equal(alone[0].weight, model[0].weight)  # type: ignore[index,arg-type]
