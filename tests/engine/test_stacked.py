# SPDX-License-Identifier: Apache-2.0
"""Many clients in one computation compute what each computes alone: in float64 to 1e-12 of the parameters' scale."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.core import SERVER, ClientId, Local, Memory, Model, Params, Reply, Split, Task
from fedquit.core.fedavg import Learn
from fedquit.core.local_layers import BeginAnew
from fedquit.core.params import fingerprint
from fedquit.core.recalibration import Recalibrate
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.preprocessing import Pixels
from fedquit.distill.losses import LOSSES
from fedquit.distill.virtual_teacher import TEACHERS
from fedquit.engine import Address, Ask, SequentialEngine, StackedEngine
from fedquit.engine.stacked import replay
from fedquit.methods.ascent import Climb
from fedquit.methods.bad_teacher import Teach
from fedquit.methods.fedau import LearnBoth, SendHead, TrainHead
from fedquit.methods.fedosd import Unlikely
from fedquit.methods.fedquit import Distill
from fedquit.methods.fedunran import Mislabel, MislabelPatiently
from fedquit.methods.fukd import Imitate
from fedquit.methods.fused import TrainAdapters, places
from fedquit.methods.mode import Guide
from fedquit.methods.pga import Ascend
from fedquit.methods.scrub import Diverge, Errors, Repair
from fedquit.methods.ssd import FisherDiagonal
from fedquit.models import FunctionalModel, load_model
from fedquit.running.runner import run
from fedquit.running.store import load_params
from seam_methods import Count, FromOwn, LearnTwice, small_net
from sequence_world import talk
from worlds import tiny

HERE = Address(seed=5, phase="train", round=2, question=1)
EXACT, SINGLE = 1e-12, 2e-5  # of the largest parameter: what float64 and float32 leave after a few dozen steps
LOCAL = Local(epochs=2.0, batch_size=8, lr=0.05)
Homes = dict[str, Params]


def apart(actual: Params, expected: Params) -> float:
    """The largest difference, relative to the scale of the parameters."""
    assert actual.keys() == expected.keys()
    assert all(actual[n].shape == p.shape and actual[n].dtype == p.dtype for n, p in expected.items())
    scale = max([1e-30, *(float(p.abs().max()) for p in expected.values() if p.numel())])
    return max([0.0, *(float((actual[n] - p).abs().max()) for n, p in expected.items() if p.numel())]) / scale


def require_equal(reply: Reply, expected: Reply, tolerance: float = EXACT) -> None:
    assert (reply.client, reply.examples) == (expected.client, expected.examples)
    assert apart(reply.params, expected.params) <= tolerance
    assert reply.loss == pytest.approx(expected.loss, rel=10 * tolerance, abs=tolerance, nan_ok=True)


def compare(
    model: Model,
    data: FederatedData,
    ask: Ask,
    homes: Mapping[str, Params] | None = None,
    *,
    width: int = 0,
    tolerance: float = EXACT,
) -> list[Reply]:
    """Let both engines answer; the replies and what the clients keep must be equal."""
    one, many = dict(homes or {}), dict(homes or {})
    expected = list(SequentialEngine(model, data, one).run(ask))
    replies = list(StackedEngine(model, data, many, width).run(ask))
    assert len(replies) == len(expected) == len(ask.clients)
    for a, b in zip(replies, expected, strict=True):
        require_equal(a, b, tolerance)
    assert many.keys() == one.keys()
    for key, kept in one.items():
        assert apart(many[key], kept) <= tolerance
    return replies


@pytest.fixture(scope="module")
def ragged(toy_data: FederatedData) -> FederatedData:
    """Clients of 23, 8, 17, 30, 5 and 1 examples; of some, a part is marked, of client 1 all."""
    train = {**toy_data.train, 5: toy_data.train[3][:1]}
    forget = {0: train[0][:9], 1: train[1], 3: train[3][::2], 5: train[5]}
    return replace(toy_data, train=train, forget=forget)


EVERYBODY = (0, 1, 2, 3, 4, 5)


def question(
    task: Task,
    start: Params,
    clients: tuple[ClientId, ...] = EVERYBODY,
    split: Split = "all",
    sent: Mapping[str, Params] | None = None,
) -> Ask:
    return Ask(task, clients, split, {"start": start, **(sent or {})}, HERE)


@dataclass(frozen=True)
class Case:
    """A task, what it is sent beside `start`, and what every client has at home."""

    task: Task
    sent: Callable[[Params, Params], dict[str, Params]] = lambda w, v: {}
    homes: Callable[[Params, Params], dict[str, Params]] = lambda w, v: {}


HEAD = ("7.weight", "7.bias")  # of the toy network
TEACH = ("incompetent", "competent", "both")


def only_head(w: Params) -> Params:
    return {n: w[n] for n in HEAD}


def adapters(w: Params) -> dict[str, Params]:
    size = len(places(w["7.weight"].shape, 0.1, 3))
    return {"adapters": {"adapter:7.weight": torch.linspace(-1, 1, size).to(w["7.weight"])}}


CASES: dict[str, Case] = {
    "learn": Case(Learn(LOCAL)),
    "learn and remember": Case(Learn(LOCAL, remember="own")),
    "climb": Case(Climb(replace(LOCAL, clip=0.5))),
    "ascend": Case(Ascend(replace(LOCAL, momentum=0.9, clip_tensor=0.3)), homes=lambda w, v: {"own": v}),
    "ascend and halt": Case(Ascend(replace(LOCAL, lr=0.5), halt=0.8, squared=True), homes=lambda w, v: {"own": v}),
    "unlikely": Case(Unlikely(LOCAL)),
    "mislabel": Case(Mislabel(LOCAL)),
    "guide": Case(Guide(LOCAL), sent=lambda w, v: {"degraded": v}),
    "imitate": Case(Imitate(LOCAL), sent=lambda w, v: {"teacher": v}),
    "train head": Case(TrainHead(LOCAL), sent=lambda w, v: {"head": only_head(v)}),
    "learn both": Case(LearnBoth(LOCAL), homes=lambda w, v: {"auxiliary": only_head(v)}),
    "send head": Case(SendHead(Local(epochs=0.0)), homes=lambda w, v: {"auxiliary": only_head(v)}),
    "adapters": Case(TrainAdapters(LOCAL, seed=3), sent=lambda w, v: adapters(w)),
    "diverge": Case(Diverge(LOCAL), sent=lambda w, v: {"teacher": v}),
    "repair": Case(Repair(LOCAL, alpha=0.5), sent=lambda w, v: {"teacher": v}),
    **{f"teach {t}": Case(Teach(LOCAL, teachers=t), sent=lambda w, v: {"competent": v}) for t in TEACH},
    "mislabel patiently": Case(MislabelPatiently(replace(LOCAL, epochs=9.0), patience=1)),
    "errors": Case(Errors()),
    "fisher": Case(FisherDiagonal()),
    **{
        f"distill {t} {d}": Case(Distill(replace(LOCAL, optimizer="adam", lr=1e-3), teacher=t, divergence=d))
        for t in TEACHERS
        for d in LOSSES
    },
}


@pytest.mark.parametrize("split", ["all", "retain", "forget"])
@pytest.mark.parametrize("name", CASES)
def test_every_task_gives_the_same(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params, name: str, split: Split
) -> None:
    case, other = CASES[name], toy_model.init(seed=1)
    kept = case.homes(toy_start, other)
    shift = {c: {m: {n: p + 0.01 * c for n, p in part.items()} for m, part in kept.items()} for c in EVERYBODY}
    homes = {f"{c}/{m}": part for c, parts in shift.items() for m, part in parts.items()}
    replies = compare(
        toy_model, ragged, question(case.task, toy_start, split=split, sent=case.sent(toy_start, other)), homes
    )
    if split == "all" and case.task.local.epochs:
        assert len({fingerprint(r.params) for r in replies}) == len(replies), "clients differ"


def test_every_task_of_every_method_is_compared() -> None:
    tasks: set[type[Task]] = set()
    kinds = [Task]
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        tasks |= {k for k in below if k.__module__.startswith("fedquit.") and not inspect.isabstract(k)}
    of_batchnorm = {Recalibrate, BeginAnew}  # test_any_model.py and test_local_batchnorm.py compare them
    assert tasks == {type(case.task) for case in CASES.values()} | of_batchnorm


@pytest.mark.parametrize(
    "local",
    [
        Local(epochs=1, batch_size=8, lr=0.1),
        Local(epochs=0, batch_size=8, lr=0.1),
        Local(epochs=0.5, batch_size=4, lr=0.1),
        Local(epochs=2.3, batch_size=5, lr=0.1, momentum=0.9),
        Local(epochs=2, batch_size=7, lr=0.05, momentum=0.9, weight_decay=1e-2),
        Local(epochs=2, batch_size=100, lr=0.1, weight_decay=1e-2),
        Local(epochs=1, batch_size=1, lr=0.01, clip=0.4),
        Local(epochs=2, batch_size=8, lr=0.1, clip=0.4, clip_tensor=0.2, momentum=0.5),
        Local(epochs=2, batch_size=8, lr=0.1, clip_tensor=0.05),
        Local(epochs=2, batch_size=8, optimizer="adam", lr=0.01, weight_decay=1e-2),
        Local(epochs=1.5, batch_size=8, optimizer="adamw", lr=0.01, weight_decay=1e-1, clip=0.3),
        Local(epochs=2, batch_size=8, optimizer="adahessian", lr=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [0, 4, 1])
def test_every_optimizer_and_way_to_step_gives_the_same(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params, local: Local, width: int
) -> None:
    compare(toy_model, ragged, question(Learn(local), toy_start, split="retain"), width=width)


@given(
    sizes=st.lists(st.integers(0, 19), min_size=1, max_size=6),
    batch=st.integers(1, 9),
    epochs=st.sampled_from([0.4, 1.0, 1.7]),
    width=st.integers(0, 4),
    optimizer=st.sampled_from(["sgd", "adam"]),
)
@settings(max_examples=25)
def test_any_sizes_give_the_same(sizes: list[int], batch: int, epochs: float, width: int, optimizer: str) -> None:
    draw = torch.Generator().manual_seed(sum(sizes))
    x = torch.randn(60, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=draw)
    train = {c: torch.randperm(60, generator=draw)[:n] for c, n in enumerate(sizes)}
    data = FederatedData(Dataset(x, y, x, y, 3), train)
    model = FunctionalModel(lambda: small_net((6,), 3), torch.float64)
    local = Local(epochs, batch, optimizer, 0.05, momentum=0.5)
    clients = tuple(reversed(range(len(sizes))))
    compare(model, data, question(Learn(local), model.init(0), clients), width=width)


def test_some_of_the_clients_in_any_order_and_twice(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params
) -> None:
    whole = {r.client: r for r in compare(toy_model, ragged, question(Learn(LOCAL), toy_start))}
    for clients in ((4, 0, 3), (2,), (5, 5, 1)):
        for reply in compare(toy_model, ragged, question(Learn(LOCAL), toy_start, clients)):
            require_equal(reply, whole[reply.client])


def test_what_only_some_keep_at_home_reaches_them_and_nobody_else(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params
) -> None:
    homes = {f"{c}/auxiliary": {n: p * c for n, p in only_head(toy_model.init(c)).items()} for c in (1, 2, 4)}
    compare(toy_model, ragged, question(LearnBoth(LOCAL), toy_start), homes)
    count: Homes = {"3/count": {"n": torch.full((1,), 7.0, dtype=torch.float64)}}
    compare(toy_model, ragged, question(Count(LOCAL), toy_start), count)


def test_a_projection_after_each_step_around_ones_own_centre(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params
) -> None:
    homes = {f"{c}/own": toy_model.init(c) for c in EVERYBODY}
    compare(toy_model, ragged, question(FromOwn(replace(LOCAL, lr=0.5), radius=0.3), toy_start), homes)


def test_a_task_with_parameters_of_its_own(ragged: FederatedData) -> None:
    model = FunctionalModel(lambda: small_net((1, 6, 6), 5), torch.float64)
    head = {"second.weight": torch.ones(5, 8, dtype=torch.float64)}
    compare(model, ragged, question(LearnTwice(LOCAL), model.init(0)), {"2/second": head})


def test_work_at_the_server(toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params) -> None:
    ask = question(Imitate(LOCAL), toy_start, (SERVER,), sent={"teacher": toy_model.init(3)})
    (reply,) = compare(toy_model, ragged, ask)
    assert reply.examples == len(ragged.public) > 0


def test_sequences() -> None:
    dataset = talk(windows=40)
    parts = dict(enumerate(torch.arange(40).split([17, 3, 12, 8])))
    data = FederatedData(dataset, parts, {0: parts[0][:5]})
    model = load_model("char_lstm", dataset.shape, dataset.classes, dtype=torch.float64, embedding=4, hidden=6)
    tasks = [Learn(replace(LOCAL, lr=0.5)), Mislabel(LOCAL), Distill(LOCAL)]
    for task in tasks:
        replies = compare(model, data, question(task, model.init(0), (0, 1, 2, 3)))
        assert apart(replies[0].params, model.init(0)) > 1e-6


def bytes_world(look: Pixels, sizes: tuple[int, ...], side: int = 8) -> FederatedData:
    draw = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x = torch.randint(256, (n, 3, side, side), generator=draw, dtype=torch.uint8)
    y = torch.randint(4, (n,), generator=draw)
    return FederatedData(Dataset(x, y, x, y, 4, look), dict(enumerate(torch.arange(n).split(list(sizes)))))


GREY = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.mark.parametrize("vary", ["none", "rotate-pad-crop-flip", "enlarge-crop-flip", "resized-crop-flip"])
def test_bytes_that_are_made_ready_and_augmented(vary: Any) -> None:
    size = 12 if "crop-flip" in vary and not vary.startswith("rotate") else 0
    look = Pixels(*GREY, size=size, vary=vary)
    data = bytes_world(look, (13, 4, 9))
    model = load_model("cnn", data.dataset.shape, 4, dtype=torch.float64, look=data.dataset.look, width=4)
    start = model.init(0)
    varied = compare(model, data, question(Learn(LOCAL), start, (0, 1, 2)))
    compare(model, data, question(Distill(LOCAL), start, (0, 1, 2)))  # which sees them plain
    plain = replace(data, dataset=replace(data.dataset, look=replace(look, vary="none")))
    same = apart(varied[0].params, next(SequentialEngine(model, plain, {}).run(question(Learn(LOCAL), start))).params)
    assert (same < EXACT) == (vary == "none"), "the augmentation is seen"


def test_a_resnet18_on_a_few_images() -> None:
    data = bytes_world(Pixels(*GREY, vary="rotate-pad-crop-flip"), (3, 2), side=16)
    model = load_model("resnet18", data.dataset.shape, 4, dtype=torch.float64, look=data.dataset.look)
    compare(model, data, question(Learn(Local(batch_size=2, lr=0.05)), model.init(0), (0, 1)), tolerance=1e-11)


def test_in_float32_to_a_stated_tolerance(ragged: FederatedData) -> None:
    single = replace(ragged, dataset=replace(ragged.dataset, x=ragged.x.float(), test_x=ragged.dataset.test_x.float()))
    model = load_model("cnn", (1, 6, 6), 5, width=4)
    for local in (LOCAL, replace(LOCAL, optimizer="adam", lr=1e-3), replace(LOCAL, momentum=0.9, clip=1.0)):
        compare(model, single, question(Learn(local), model.init(7)), tolerance=SINGLE)


def test_padding_is_no_strangers_example(ragged: FederatedData) -> None:
    """One that overflows would turn its weight of zero into NaN."""
    mine = ragged.pooled("all", (0, 2))
    x = ragged.x.new_full((len(ragged.x) + 1, 1, 6, 6), 1e308)  # a stranger at position 0, and others among them
    x[mine + 1] = ragged.x[mine]
    dataset = replace(ragged.dataset, x=x, y=torch.cat([ragged.y[:1], ragged.y]))
    data = FederatedData(dataset, {c: ragged.train[c] + 1 for c in (0, 2)})
    model = load_model("mlp", (1, 6, 6), 5, dtype=torch.float64, hidden=4)
    start = {n: 20 * p for n, p in model.init(0).items()}
    assert not bool(model(start, x[:1]).isfinite().all())
    replies = compare(model, data, question(Learn(LOCAL), start, (0, 2)))
    assert all(bool(p.isfinite().all()) for reply in replies for p in reply.params.values())


def final(name: str, engine: str, where: Path, **train: Any) -> list[Params]:
    """The parameters that a method leaves after unlearning, and after recovery."""
    recipe = tiny(
        method={"name": name},
        request=[{"clients": [1]}],
        train={"rounds": 3, "momentum": 0.5, **train},
        recover={"until": "rounds", "max_rounds": 1},
        retrain=False,
        evaluate={"attacks": []},
        engine={"name": engine},
    )
    run(recipe, where / engine / "run")
    folder = where / engine / "run" / "request-0"
    states = [load_params(f)[0] for f in (folder / "unlearned.safetensors", folder / "model.safetensors") if f.exists()]
    assert states
    return states


@pytest.mark.parametrize("name", ["fedquit", "federaser", "pga"])
def test_partial_participation_ends_at_the_same_parameters(name: str, tmp_path: Path) -> None:
    some = {"clients_per_round": 3, "rounds": 4, "epochs": 1.5}
    both = [final(name, engine, tmp_path, **some) for engine in ("stacked", "sequential")]
    assert max(apart(a, b) for a, b in zip(*both, strict=True)) <= EXACT


@dataclass
class Small:
    """A network that has room for so many clients at once."""

    inner: FunctionalModel
    room: int
    seen: list[int] = field(default_factory=list)

    def init(self, seed: int) -> Params:
        return self.inner.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        together = 1
        if torch._C._functorch.is_batchedtensor(x):
            together = torch._C._functorch.get_unwrapped(x).shape[0]
        self.seen.append(together)
        if together > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return self.inner(params, x)


def test_out_of_memory_halves_the_width_and_goes_on_with_the_same_result(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params, caplog: pytest.LogCaptureFixture
) -> None:
    homes: Homes = {f"{c}/auxiliary": only_head(toy_model.init(c)) for c in EVERYBODY}
    ask = question(LearnBoth(LOCAL), toy_start)
    model = Small(toy_model, room=2)
    engine = StackedEngine(model, ragged, dict(homes))
    with caplog.at_level(logging.WARNING):
        replies = list(engine.run(ask))
    for reply, expected in zip(replies, SequentialEngine(toy_model, ragged, dict(homes)).run(ask), strict=True):
        require_equal(reply, expected)
    assert [r.message for r in caplog.records] == [
        "6 clients at once do not fit into memory: going on with 3.",
        "3 clients at once do not fit into memory: going on with 1.",
    ]
    assert engine.graphs.max_clients == 1
    model.seen.clear()
    list(StackedEngine(model, ragged, dict(homes), graphs=engine.graphs).run(ask))
    assert set(model.seen) == {1}, "the engine of the next phase knows"


def test_one_client_that_does_not_fit_is_an_error(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        list(StackedEngine(Small(toy_model, room=0), ragged, {}).run(question(Learn(LOCAL), toy_start)))


def test_replies_stream_and_no_more_than_the_width_are_held(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    clients = tuple(range(20))
    data = replace(toy_data, train={c: toy_data.train[c % 5] for c in clients})
    engine = StackedEngine(toy_model, data, {}, width=4)
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for reply in engine.run(question(Learn(LOCAL), toy_start, clients)):
        alive.append(weakref.ref(next(iter(reply.params.values()))))
        del reply
        most = max(most, sum(r() is not None for r in alive))
    assert most <= engine.width
    assert len(alive) == 20


def prints(engine: StackedEngine, ask: Ask) -> list[str]:
    return [fingerprint(r.params) for r in engine.run(ask)]


@pytest.mark.parametrize(
    "name",
    [
        *("learn", "ascend", "adapters"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("learn both", "train head", "guide", "distill min kl")),
    ],
)
def test_a_step_that_is_replayed_gives_the_same_bits(
    toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other = CASES[name], toy_model.init(seed=1)
    homes = {f"{c}/{m}": part for c in EVERYBODY for m, part in case.homes(toy_start, other).items()}
    asks = [
        replace(question(case.task, start, sent=case.sent(start, other)), address=replace(HERE, round=r))
        for r, start in enumerate((toy_start, other, toy_start))
    ]
    expected = [prints(StackedEngine(toy_model, ragged, dict(homes)), ask) for ask in asks]
    monkeypatch.setattr(replay, "STEPS_BEFORE_TRACING", 1)
    engine = StackedEngine(toy_model, ragged, dict(homes))
    assert [prints(replace(engine, memory=dict(homes)), ask) for ask in asks] == expected
    kinds = list(engine.graphs.traced.values())
    traced = [step.traced for kind in kinds for step in kind.by_shape.values()]
    assert any(traced) or not case.task.local.epochs


def test_what_cannot_be_traced_goes_on_eagerly(
    ragged: FederatedData, toy_model: FunctionalModel, toy_start: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(replay, "STEPS_BEFORE_TRACING", 1)
    monkeypatch.setattr("torch.fx.experimental.proxy_tensor.make_fx", refuse)
    compare(toy_model, ragged, question(Learn(LOCAL), toy_start))


def test_nothing_that_was_sent_is_changed(toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params) -> None:
    other = toy_model.init(3)
    before = fingerprint(toy_start), fingerprint(other)
    homes: Memory = {"1/own": other, "2/own": toy_start}
    ask = question(FromOwn(LOCAL), toy_start, (1, 2))
    first = [fingerprint(r.params) for r in StackedEngine(toy_model, ragged, homes).run(ask)]
    assert (fingerprint(toy_start), fingerprint(other)) == before
    assert first == [fingerprint(r.params) for r in StackedEngine(toy_model, ragged, homes).run(ask)], "it repeats"
