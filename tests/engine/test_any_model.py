# SPDX-License-Identifier: Apache-2.0
"""Networks with dropout, BatchNorm or frozen parameters: all engines compute the same, and runs repeat."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.core import Local, Params, Reply, Task
from fedquit.core.fedavg import Learn, cross_entropy
from fedquit.core.params import fingerprint, is_statistic, mean, nbytes, statistics_of, weights_of
from fedquit.core.recalibration import Recalibrate
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import Address, Ask, Engine, SequentialEngine, StackedEngine, ThreadedEngine
from fedquit.engine.plan import make_plan, network_uniforms, step_key
from fedquit.errors import InputError
from fedquit.methods.bad_teacher import Teach
from fedquit.methods.fedau import LearnBoth, TrainHead
from fedquit.methods.fedquit import Distill
from fedquit.methods.fused import ADAPTER, TrainAdapters, places
from fedquit.methods.pga import Ascend
from fedquit.methods.ssd import FisherDiagonal
from fedquit.models import FunctionalModel, load_model
from gpu import GPU_MARKS, gpu_engine, gpu_replies, needs_gpu
from graph_stand_ins import capture_on_cpu

HERE = Address(seed=5, phase="train", round=2, question=1)
EXACT = 1e-12
LOCAL = Local(epochs=2.0, batch_size=4, lr=0.05)
SIZES = (11, 4, 6, 9, 1)  # the last batches hold 3, 4, 2, 1 and 1 examples


def examples(*shape: int, classes: int = 3) -> FederatedData:
    """Clients of 11, 4, 6, 9 and 1 examples of that shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (sum(SIZES),), generator=generator)
    parts = torch.arange(sum(SIZES)).split(list(SIZES))
    train = dict(enumerate(parts))
    return FederatedData(Dataset(x, y, x[:2], y[:2], classes), train, {c: part[::2] for c, part in train.items()})


IMAGES = examples(2, 6, 6)
VECTORS = examples(5, 8)  # five positions of eight numbers


def batch_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),  # before BatchNorm its gradient would be rounding, which Adam lifts
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 3),
    )


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def both() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.BatchNorm1d(64),
        nn.Linear(64, 3),
    )


def half_frozen() -> nn.Module:
    network = dropping()
    network.get_submodule("0").requires_grad_(False)
    return network


class DropPath(nn.Module):
    """Drops whole examples of a branch."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand((len(x), *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device) >= self.drop_prob
        return x * kept / (1 - self.drop_prob)


class Attention(nn.Module):
    """Attention that drops in each of torch's ways, over positions (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.mine = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.path = DropPath(0.25)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x = x + self.path(self.mine(x, x, x, need_weights=True)[0])
        rate = 0.1 if self.training else 0.0
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=rate, is_causal=True)
        return cast(Tensor, self.head(x.mean(1)))


class Literal(nn.Module):
    """Drops by calls of torch's functions, with rates that no field tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.body(x).tanh(), 0.5, self.training)
        if self.training:
            x = x * torch.empty(len(x), 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.75)
        return cast(Tensor, self.head(x.mean(1)))


class Doubling(Literal):
    """Draws nothing, and computes something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x).mean(1) * (2 if self.training else 1)))


class Stateless(Literal):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x).tanh().mean(1)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], FederatedData]] = {
    "batch_norm": (batch_normed, IMAGES),
    "dropout": (dropping, IMAGES),
    "both": (both, IMAGES),
    "frozen": (half_frozen, IMAGES),
    "attention": (Attention, VECTORS),
    "literal": (Literal, VECTORS),
}


def model_of(name: str) -> FunctionalModel:
    return FunctionalModel(NETWORKS[name][0], torch.float64)


def apart(actual: Params, expected: Params) -> float:
    assert actual.keys() == expected.keys()
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((actual[n] - p).abs().max()) for n, p in expected.items()) / scale


def ask_of(task: Task, start: Params, address: Address = HERE, sent: Mapping[str, Params] | None = None) -> Ask:
    return Ask(task, tuple(range(len(SIZES))), "all", {"start": start, **(sent or {})}, address)


def replies(engine: type[Engine] | str, name: str, ask: Ask, homes: dict[str, Params] | None = None) -> list[Reply]:
    model, data = model_of(name), NETWORKS[name][1]
    memory = dict(homes or {})
    if engine == "cuda":
        return gpu_replies(gpu_engine(model, data, memory), ask)
    if engine is ThreadedEngine:
        return list(ThreadedEngine(model, data, memory, 2).run(ask))
    assert not isinstance(engine, str)
    return list(engine(model, data, memory).run(ask))  # type: ignore[call-arg]


ENGINES = [StackedEngine, ThreadedEngine, pytest.param("cuda", marks=GPU_MARKS)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on a CPU has no batching rule
def test_engines_agree(name: str, optimizer: str, engine: type[Engine] | str) -> None:
    if (name, optimizer) == ("attention", "adam"):
        pytest.skip("the keys' bias has no gradient but rounding, which Adam lifts")
    start = model_of(name).init(3)
    ask = ask_of(Learn(replace(LOCAL, optimizer=optimizer, lr=2e-3)), start)
    expected = replies(SequentialEngine, name, ask)
    for reply, wanted in zip(replies(engine, name, ask), expected, strict=True):
        assert apart(reply.params, wanted.params) <= EXACT
        assert reply.loss == pytest.approx(wanted.loss, rel=1e-11)
    assert apart(expected[0].params, start) > 1e-3


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "frozen", "attention"])
def test_a_small_net_that_would_be_replayed_is_not(name: str) -> None:
    """More steps of one shape than are traced elsewhere: the masks still change from step to step."""
    data = NETWORKS[name][1]
    start = model_of(name).init(3)
    ask = Ask(Learn(Local(epochs=60.0, batch_size=4, lr=0.01)), (0,), "all", {"start": start}, HERE)
    (expected,) = SequentialEngine(model_of(name), data, {}).run(ask)
    (reply,) = StackedEngine(model_of(name), data, {}).run(ask)
    assert apart(reply.params, expected.params) <= 1e-10


def test_the_sequential_engine_is_torchs_own_training_loop() -> None:
    """BatchNorm in plain torch, in training mode, on the plan's batches: parameters and buffers."""
    model, data = model_of("batch_norm"), IMAGES
    start = model.init(3)
    local = replace(LOCAL, epochs=2.0)
    for client in (0, 1, 2):
        (reply,) = SequentialEngine(model, data, {}).run(Ask(Learn(local), (client,), "all", {"start": start}, HERE))
        module = batch_normed().double()
        module.load_state_dict(start, strict=False)
        module.train()
        sgd = torch.optim.SGD(module.parameters(), lr=local.lr)
        mine = data.train[client]
        for positions in make_plan(len(mine), local, HERE.seed_for(client)).steps:
            sgd.zero_grad()
            functional.cross_entropy(module(data.x[mine[positions]]), data.y[mine[positions]]).backward()
            sgd.step()
        state = {n: p for n, p in module.state_dict().items() if not n.endswith("num_batches_tracked")}
        assert apart(reply.params, {n: state[n] for n in reply.params}) <= EXACT
        assert set(statistics_of(reply.params)) == {n for n in state if "running" in n}


def test_a_batch_of_one_value_is_normalised_by_the_running_statistics() -> None:
    model = model_of("both")
    start = model.init(3)
    ask = Ask(Learn(LOCAL), (4,), "all", {"start": start}, HERE)  # one example: BatchNorm1d has no variance
    for engine in (SequentialEngine(model, IMAGES, {}), StackedEngine(model, IMAGES, {})):
        (reply,) = engine.run(ask)
        assert torch.equal(reply.params["4.running_mean"], start["4.running_mean"])
        assert not torch.equal(reply.params["1.running_mean"], start["1.running_mean"]), "16 values a channel"
        assert all(bool(p.isfinite().all()) for p in reply.params.values())


def trained(name: str) -> Params:
    """A model whose statistics are no longer the initial ones."""
    return mean(replies(SequentialEngine, name, ask_of(Learn(LOCAL), model_of(name).init(3))))


UNLEARNING: dict[str, Task] = {
    "fedquit": Distill(LOCAL),
    "bad_teacher": Teach(LOCAL, teachers="incompetent", seed=4),
}


@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NETWORKS)
def test_unlearning_on_a_gpu(name: str) -> None:
    start = trained(name)
    ask = ask_of(UNLEARNING["fedquit"], start)
    for reply, wanted in zip(replies("cuda", name, ask), replies(SequentialEngine, name, ask), strict=True):
        assert apart(reply.params, wanted.params) <= EXACT
        assert all(torch.equal(reply.params[n], start[n]) for n in statistics_of(start))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_unlearning_in_captured_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a GPU, where no mode replaces operations: torch's layers must not take fused ones without a derivative."""
    start = trained(name)
    ask = ask_of(UNLEARNING["fedquit"], start)
    expected = replies(SequentialEngine, name, ask)
    capture_on_cpu(monkeypatch)
    for reply, wanted in zip(replies(StackedEngine, name, ask), expected, strict=True):
        assert apart(reply.params, wanted.params) <= EXACT


@pytest.mark.parametrize("task", UNLEARNING)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_unlearning_sees_the_network_as_it_is_evaluated(name: str, task: str) -> None:
    """Engines agree, the statistics stay, and what is dropped in training is not dropped here."""
    start = trained(name)
    ask = ask_of(UNLEARNING[task], start)
    elsewhere = replace(ask, address=replace(HERE, question=2))
    expected = replies(SequentialEngine, name, ask)
    for reply, wanted in zip(replies(StackedEngine, name, ask), expected, strict=True):
        assert apart(reply.params, wanted.params) <= EXACT
        assert all(torch.equal(reply.params[n], start[n]) for n in statistics_of(start))
    assert apart(expected[0].params, start) > 1e-6
    once = replace(LOCAL, batch_size=32, epochs=1.0)  # one step of all examples: their order does not matter
    single = replace(ask, task=replace(UNLEARNING[task], local=once))
    one, other = (replies(SequentialEngine, name, a)[0] for a in (single, replace(single, address=elsewhere.address)))
    assert apart(one.params, other.params) <= 1e-9


@pytest.mark.parametrize("name", ["batch_norm", "both"])
@pytest.mark.parametrize("kind", ["own head", "two heads", "ascent", "fisher", "adapters", "recalibrate"])
def test_tasks_of_the_methods_on_batch_norm(name: str, kind: str) -> None:
    w, other = trained(name), model_of(name).init(8)
    last = "7." if name == "batch_norm" else "5."
    head = {n: w[n] for n in w if n.startswith(last)}
    weight = last + "weight"
    adapters = {ADAPTER + weight: torch.zeros(len(places(w[weight].shape, 0.1, 0)), dtype=torch.float64)}
    own = {f"{c}/own": {n: (p + other[n]) / 2 for n, p in w.items()} for c in range(len(SIZES))}
    cases: dict[str, tuple[Task, dict[str, Params], dict[str, Params]]] = {
        "own head": (TrainHead(LOCAL), {"head": head}, {}),
        "two heads": (LearnBoth(LOCAL), {}, {}),
        "ascent": (Ascend(LOCAL, halt=1e9), {}, own),
        "fisher": (FisherDiagonal(Local(batch_size=4)), {}, {}),
        "adapters": (TrainAdapters(LOCAL), {"adapters": adapters}, {}),
        "recalibrate": (Recalibrate(Local(batch_size=4)), {}, {}),
    }
    task, sent, homes = cases[kind]
    ask = ask_of(task, w, sent=sent)
    expected = replies(SequentialEngine, name, ask, homes)
    for reply, wanted in zip(replies(StackedEngine, name, ask, homes), expected, strict=True):
        assert apart(reply.params, wanted.params) <= EXACT
    if kind in ("two heads", "ascent"):
        assert statistics_of(expected[0].params).keys() == statistics_of(w).keys()
    if kind == "fisher":
        assert expected[0].params.keys() == weights_of(w).keys()


def test_recalibration_measures_batches_and_nothing_else() -> None:
    model = model_of("both")
    w = trained("both")
    (reply,) = SequentialEngine(model, IMAGES, {}).run(
        Ask(Recalibrate(Local(batch_size=4)), (2,), "all", {"start": w}, HERE)
    )
    mine = IMAGES.x[IMAGES.train[2]]  # six examples: batches of four and of two
    maps = functional.conv2d(mine, w["0.weight"])
    batches = maps.split(4)
    means = sum(len(b) * b.mean((0, 2, 3)) for b in batches) / 6
    variances = sum(len(b) * b.var((0, 2, 3), unbiased=True) for b in batches) / 6
    assert torch.allclose(reply.params["1.running_mean"], means, atol=1e-12)
    assert torch.allclose(reply.params["1.running_var"], variances, atol=1e-12)
    assert set(reply.params) == set(statistics_of(w))


def test_runs_repeat_and_every_part_of_the_address_counts() -> None:
    start = model_of("dropout").init(3)
    task = Learn(replace(LOCAL, batch_size=32, epochs=1.0))  # one step of all examples: only the masks can differ
    prints = []
    for address in (HERE, HERE, replace(HERE, seed=6), replace(HERE, phase="recover"), replace(HERE, round=3)):
        prints.append(
            [fingerprint(r.params) for r in replies(SequentialEngine, "dropout", ask_of(task, start, address))]
        )
    assert prints[0] == prints[1]
    assert len({tuple(p) for p in prints}) == 4
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = replies(StackedEngine, "dropout", ask_of(task, start))
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is not used"
    assert [fingerprint(r.params) for r in again] == [
        fingerprint(r.params) for r in replies(StackedEngine, "dropout", ask_of(task, start))
    ]


def test_masks_are_uniform_and_independent() -> None:
    """Over clients, steps, calls and places; the bounds are four standard errors under independence."""
    seeds = torch.tensor([Address(0, "train").seed_for(c) for c in range(8)])
    draws = torch.stack(
        [network_uniforms(key, call, (64, 50)) for t in range(4) for key in step_key(seeds, t) for call in (1, 2)]
    )
    assert draws.min() >= 0
    assert draws.max() < 1
    n = draws.numel()
    assert abs(float(draws.mean()) - 0.5) < 4 / (12 * n) ** 0.5
    rows = draws.flatten(1) - 0.5
    correlation = (rows @ rows.T) / rows.shape[1] * 12
    off = correlation[~torch.eye(len(rows), dtype=torch.bool)]
    assert float(off.abs().max()) < 5 / rows.shape[1] ** 0.5
    neighbours = (rows[:, 1:] * rows[:, :-1]).mean() * 12
    assert abs(float(neighbours)) < 4 / n**0.5


def test_a_mask_does_not_depend_on_padding() -> None:
    key = step_key(torch.tensor(7), 0)
    assert torch.equal(network_uniforms(key, 1, (8, 3))[:5], network_uniforms(key, 1, (5, 3)))


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.drop(x.transpose(0, 1)).mean(0)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(x.mean(1))) + (torch.randn(len(x), 3) if self.training else 0.0)


class NoisyWithoutAField(Literal):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean(1)
        return cast(Tensor, self.head(x + torch.randn_like(x) if self.training else x))


class Gumbel(Literal):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean(1)
        return cast(Tensor, self.head(functional.gumbel_softmax(x) if self.training else x.softmax(-1)))


class OldDropout(Literal):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.dropout(self.body(x).mean(1), 0.5, self.training)))


class OfNumpy(Literal):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + np.random.rand() if self.training else 1.0  # noqa: NPY002
        return cast(Tensor, self.head(self.body(x).mean(1) * scale))


class OfPython(Literal):
    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() if self.training else 1.0
        return cast(Tensor, self.head(self.body(x).mean(1) * scale))


class AlwaysDrops(Literal):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(functional.dropout(self.body(x).mean(1))))


class Counting(Literal):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return cast(Tensor, self.head(self.body(x).mean(1)))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (SequenceFirst, "batch_first=True"),
        (Noisy, "torch's randn"),
        (NoisyWithoutAField, "torch's randn_like"),
        (Gumbel, "torch's gumbel_softmax"),
        (OldDropout, r"torch's torch\.dropout"),
        (OfNumpy, "from numpy in training"),
        (OfPython, "from Python's random in training"),
        (AlwaysDrops, r"where it is evaluated: .*F\.dropout\(x, p, self\.training\)"),
        (Counting, "changes its buffer 'calls' in training"),
    ],
)
def test_random_numbers_that_engines_could_not_repeat_are_refused(build: type[nn.Module], says: str) -> None:
    model = FunctionalModel(build, torch.float64)
    ask = Ask(Learn(LOCAL), (0,), "all", {"start": model.init(0)}, HERE)
    for engine in (SequentialEngine(model, VECTORS, {}), StackedEngine(model, VECTORS, {})):
        with pytest.raises(InputError, match=says):
            list(engine.run(ask))


def test_only_what_is_trained_travels() -> None:
    model = model_of("frozen")
    start = model.init(0)
    assert not any(n.startswith("0.") for n in start)
    whole = sum(p.numel() for p in half_frozen().parameters())
    assert sum(p.numel() for p in start.values()) == whole - 76
    assert nbytes(start) == 8 * (whole - 76)
    for reply in replies(StackedEngine, "frozen", ask_of(Learn(LOCAL), start)):
        assert reply.params.keys() == start.keys()
    other = FunctionalModel(dropping, torch.float64)
    assert model.signature() != other.signature()


def test_frozen_values_are_the_factorys_whatever_the_seed() -> None:
    torch.manual_seed(0)
    module = half_frozen().double().eval()
    model = model_of("frozen")
    module.load_state_dict({**module.state_dict(), **model.init(5)})
    assert torch.equal(model(model.init(5), IMAGES.x[:3]), module(IMAGES.x[:3]))


def test_networks_without_state_take_no_new_path() -> None:
    for name, shape in (("mlp", (1, 6, 6)), ("cnn", (1, 8, 8)), ("resnet18", (3, 8, 8)), ("char_lstm", (6,))):
        model = load_model(name, shape, 5)
        assert model.training is None
        assert not any(map(is_statistic, model.init(0)))


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine, partial(ThreadedEngine, workers=2)])
def test_a_module_of_ones_own_is_tried_on_the_data_once(engine: Callable[..., Engine]) -> None:
    """Where training mode changes nothing there is no training form: the path of stateless networks."""
    before = torch.get_rng_state()
    for build, differs in ((Stateless, False), (Literal, True), (Doubling, True)):
        model = FunctionalModel(build, torch.float64)
        start = model.init(0)
        assert model.training is not None, "nothing is known before the data are"
        list(engine(model, VECTORS, {}).run(ask_of(Learn(LOCAL), start)))
        assert (model.training is not None) == differs
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_are_code_of_ones_own() -> None:
    def hooked() -> nn.Module:
        network = nn.Sequential(nn.Flatten(), nn.Linear(40, 3))
        network[1].register_forward_hook(lambda layer, _, output: functional.dropout(output, 0.5, layer.training))
        return network

    model = FunctionalModel(hooked, torch.float64)
    model.settle(VECTORS.x)
    assert model.training is not None
    assert FunctionalModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 3))).training is None


def test_a_literal_rate_drops_in_training_and_in_nothing_else() -> None:
    model = model_of("literal")
    start = model.init(3)
    task = Learn(replace(LOCAL, batch_size=32, epochs=1.0, lr=1e-9))
    plain = float(cross_entropy(model(start, VECTORS.x[VECTORS.train[0]]), VECTORS.y[VECTORS.train[0]]).mean())
    losses = [replies(SequentialEngine, "literal", ask_of(task, start, replace(HERE, round=r)))[0].loss for r in (1, 2)]
    assert len({plain, *losses}) == 3


def test_cross_entropy_is_what_learn_minimises_under_dropout() -> None:
    """Averaged over many masks the loss of a linear layer after dropout is above that without: variance costs."""
    model = model_of("dropout")
    start = model.init(3)
    plain = float(cross_entropy(model(start, IMAGES.x[IMAGES.train[0]]), IMAGES.y[IMAGES.train[0]]).mean())
    task = Learn(replace(LOCAL, batch_size=32, epochs=1.0, lr=1e-9))
    noisy = [replies(StackedEngine, "dropout", ask_of(task, start, replace(HERE, round=r)))[0].loss for r in range(20)]
    assert len(set(noisy)) == 20
    assert min(noisy) != plain


def smooth(name: str) -> nn.Module:
    """The network with Tanh for ReLU, whose kink turns a rounding error into another gradient."""
    layers = NETWORKS[name][0]().children()
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in layers))


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "frozen"])
def test_in_bfloat16_to_a_stated_tolerance(name: str) -> None:
    """Training and unlearning; masks are the same, and statistics are kept in float32."""
    data = NETWORKS[name][1]
    dataset = replace(data.dataset, x=data.dataset.x.float(), test_x=data.dataset.test_x.float())
    data = replace(data, dataset=dataset)
    model = FunctionalModel(partial(smooth, name))
    local = replace(LOCAL, batch_size=16)
    for task in (Learn(local), Distill(local)):
        ask = ask_of(task, model.init(3))
        expected = list(SequentialEngine(model, data, {}).run(ask))
        for reply, wanted in zip(StackedEngine(model, data, {}, 0, "bf16").run(ask), expected, strict=True):
            assert {p.dtype for p in reply.params.values()} == {torch.float32}
            assert apart(reply.params, wanted.params) < 0.02
