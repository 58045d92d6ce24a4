# SPDX-License-Identifier: Apache-2.0
"""Which engine `auto` takes, that it says so, and what the threaded one promises."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedquit.audit.evaluation import Evaluation
from fedquit.cli import main
from fedquit.core import Local, Model, Params
from fedquit.core.fedavg import Learn
from fedquit.core.params import fingerprint
from fedquit.data.federated import FederatedData
from fedquit.engine import (
    Address,
    Ask,
    Precision,
    SequentialEngine,
    StackedEngine,
    ThreadedEngine,
    choose,
    computing,
    evaluation_model_of,
    open_engine,
)
from fedquit.methods.pga import Ascend
from fedquit.models import FunctionalModel, load_model
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from seam_methods import Count
from worlds import tiny

HERE = Address(3, "train")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_small_networks_are_stacked(toy_model: FunctionalModel, toy_data: FederatedData) -> None:
    assert choose("auto", toy_model, toy_data).name == "stacked"
    assert isinstance(open_engine("auto", toy_model, toy_data, {}), StackedEngine)


def test_larger_ones_get_a_thread_each_where_there_are_threads(toy_data: FederatedData, two_threads: None) -> None:
    wide = load_model("cnn", (1, 6, 6), 5, dtype=torch.float64, width=128)
    assert choose("auto", wide, toy_data).name == "threaded"
    engine = open_engine("auto", wide, toy_data, {})
    assert isinstance(engine, ThreadedEngine)
    assert engine.workers == 2
    huge = load_model("cnn", (1, 6, 6), 5, dtype=torch.float64, width=512)
    assert choose("auto", huge, toy_data).name == "sequential", "two at once would take twice the memory"
    torch.set_num_threads(1)
    assert choose("auto", wide, toy_data).name == "sequential"


def test_few_parameters_that_are_used_often_count_as_large(toy_data: FederatedData) -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.last = nn.Linear(36, 36), nn.Linear(36, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            for _ in range(100):
                x = self.once(x)
            out: Tensor = self.last(x)
            return out

    assert choose("auto", FunctionalModel(Often, torch.float64), toy_data).name == "sequential"


class Branches(nn.Module):
    """A network that looks at its numbers: it cannot be computed for several clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.flatten(1))
        return out if float(out.sum()) > 0 else out * 2


def test_a_network_that_cannot_be_stacked_is_not(toy_data: FederatedData) -> None:
    model = FunctionalModel(Branches, torch.float64)
    assert choose("auto", model, toy_data).name == "sequential"


def test_a_name_is_taken_at_its_word() -> None:
    setup = build_setup(tiny(engine={"name": "sequential"}))
    assert isinstance(setup.engine(setup.data, {}), SequentialEngine)
    assert setup.chosen.name == "sequential"
    assert build_setup(tiny()).chosen.name == "stacked"


def test_a_recipe_tells_the_stacked_engine_what_is_planned() -> None:
    """All rounds, by which it decides whether to compile; a run that is resumed says the same."""
    setup = build_setup(tiny(train={"rounds": 7}))
    engine = setup.engine(setup.data, {})
    assert isinstance(engine, StackedEngine)
    assert (engine.rounds, engine.compile) == (7, "auto")


def test_a_run_says_once_which_engine_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[data]\nname = "synthetic"\noptions = {examples = 60, test_examples = 20, size = 4}\nclients = 3\n'
        "[[request]]\nclients = [1]\n"
        '[model]\nname = "mlp"\n[train]\nrounds = 1\n[recover]\nuntil = "rounds"\nmax_rounds = 0\n'
        "[evaluate]\nattacks = []\n"
    )
    monkeypatch.setattr("sys.argv", ["fedquit", "run", str(recipe), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().err.count("engine: stacked on cpu, float32 (the network is small") == 1


def test_small_steps_take_one_thread_and_give_the_others_back(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params, two_threads: None
) -> None:
    seen: set[int] = set()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toy_model.build()

        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            out: Tensor = self.inner(x)
            return out

    model = FunctionalModel(Watched, torch.float64)
    model.settle(toy_data.x)  # no step of training
    seen.clear()
    next(StackedEngine(model, toy_data, {}).run(ask(model.init(0))))
    assert seen == {1}
    assert torch.get_num_threads() == 2


def ask(start: Params, clients: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Ask:
    return Ask(Learn(), clients, "all", {"start": start}, HERE)


def test_threads_give_what_one_client_after_the_other_gives(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    expected = list(SequentialEngine(toy_model, toy_data, {}).run(ask(toy_start)))
    engine = ThreadedEngine(toy_model, toy_data, {}, workers=3)
    for _ in range(5):  # a race shows up sooner or later
        for a, b in zip(engine.run(ask(toy_start)), expected, strict=True):
            assert (a.client, a.examples, a.loss) == (b.client, b.examples, b.loss)
            assert fingerprint(a.params) == fingerprint(b.params)


def test_threads_that_draw_fresh_parameters_do_not_disturb_each_other(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    homes = {f"{c}/own": toy_model.init(c) for c in range(5)}
    question = replace(ask(toy_start), task=Ascend(Local(epochs=0.1), random_models=40))
    expected = [fingerprint(r.params) for r in SequentialEngine(toy_model, toy_data, dict(homes)).run(question)]
    engine = ThreadedEngine(toy_model, toy_data, dict(homes), workers=5)
    for _ in range(4):
        assert [fingerprint(r.params) for r in engine.run(question)] == expected


def test_threads_share_no_module(toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params) -> None:
    seen: dict[int, set[int]] = {}

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toy_model.build()

        def forward(self, x: Tensor) -> Tensor:
            seen.setdefault(id(self), set()).add(threading.get_ident())
            out: Tensor = self.inner(x)
            return out

    model = FunctionalModel(Watched, torch.float64)
    model.settle(toy_data.x)  # no step of training
    seen.clear()
    list(ThreadedEngine(model, toy_data, {}, workers=2).run(ask(model.init(0))))
    assert 1 <= len(seen) <= 2
    assert id(model._module) not in seen, "it belongs to whoever asks"


def test_threads_know_what_clients_keep_and_leave_the_number_of_threads_alone(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params, two_threads: None
) -> None:
    homes: dict[str, Params] = {"2/count": {"n": torch.full((1,), 4.0, dtype=torch.float64)}}
    question = replace(ask(toy_start), task=Count())
    list(ThreadedEngine(toy_model, toy_data, homes, workers=2).run(question))
    assert {key: float(kept["n"]) for key, kept in homes.items()} == {
        f"{c}/count": 5.0 if c == 2 else 1.0 for c in range(5)
    }
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2, "nor are those of threads that begin later"
    first = ThreadedEngine(toy_model, toy_data, {}, workers=2).run(question)
    next(first)
    first.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 2, "even where nobody wants the rest"


def test_an_error_in_a_thread_reaches_the_server(toy_data: FederatedData, toy_start: Params) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(36, 5)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = FunctionalModel(Broken, torch.float64)
    with pytest.raises(ValueError, match="broken"):
        list(ThreadedEngine(model, toy_data, {}, workers=2).run(ask(model.init(0))))


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Everything counts as a GPU; which are the current ones, the innermost last."""
    current: list[object] = []

    @contextlib.contextmanager
    def device(one: object) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    for module in ("precision", "evaluation_model"):
        monkeypatch.setattr(f"fedquit.engine.{module}.on_gpu", lambda device: True)
    monkeypatch.setattr("torch.cuda.device", device)
    monkeypatch.setattr(Watching, "seen", [])
    return current


def test_float32_means_float32_on_a_gpu_and_the_switches_are_given_back(as_on_a_gpu: list[object]) -> None:
    before, second = switches(), torch.device("cuda:1")
    with computing("float32", second):
        assert switches() == (False, False)
        assert as_on_a_gpu == [second]
    with computing("tf32", second):
        assert switches() == (True, True)
    assert switches() == before
    assert not as_on_a_gpu


def test_a_cpu_has_no_such_switches() -> None:
    before = switches()
    with computing("tf32", torch.device("cpu")):
        assert switches() == before


class Watching(nn.Module):
    """A network that notes, with all its copies, how torch is set in the forward and the backward pass."""

    seen: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.flatten(1))
        self.seen.append(switches())
        if out.requires_grad and not torch._C._functorch.is_batchedtensor(out):
            out.register_hook(lambda g: self.seen.append(switches()))
        return out


@pytest.mark.parametrize(("precision", "expected"), [("float32", (False, False)), ("tf32", (True, True))])
@pytest.mark.parametrize("optimizer", ["sgd", "adahessian"])
@pytest.mark.parametrize("name", ["sequential", "stacked", "threaded"])
def test_every_engine_computes_in_the_precision_that_is_asked_for(
    toy_data: FederatedData,
    as_on_a_gpu: list[object],
    name: str,
    optimizer: str,
    precision: Precision,
    expected: object,
) -> None:
    model, before = FunctionalModel(Watching, torch.float64), switches()
    model.settle(toy_data.x)  # no step of training
    Watching.seen.clear()
    asked = ask(model.init(0))
    assert isinstance(asked.task, Learn)
    asked = replace(asked, task=Learn(replace(asked.task.local, optimizer=optimizer)))
    engine = open_engine(name, model, toy_data, {}, precision)
    replies = engine.run(asked)
    next(replies)
    if name != "threaded":  # whose clients are at work meanwhile
        assert switches() == before
        assert not as_on_a_gpu
    list(replies)
    assert set(Watching.seen) == {expected}
    assert switches() == before


def test_a_stacked_engine_and_evaluation_work_on_the_gpu_of_the_data(
    toy_data: FederatedData, toy_model: FunctionalModel, toy_start: Params, as_on_a_gpu: list[object]
) -> None:
    where: list[list[object]] = []

    @dataclass(frozen=True)
    class Asking:
        inner: Model

        def init(self, seed: int) -> Params:
            return self.inner.init(seed)

        def __call__(self, params: Params, x: Tensor) -> Tensor:
            where.append(list(as_on_a_gpu))
            return self.inner(params, x)

    model = Asking(toy_model)
    list(StackedEngine(model, toy_data, {}).run(ask(toy_start)))
    precisions: tuple[Precision, ...] = ("float32", "bf16")
    for precision in precisions:
        evaluation_model_of(model, precision, toy_data.y.device)(toy_start, toy_data.x[:2])
    assert len(where) > len(precisions)
    assert all(current == [toy_data.y.device] for current in where)
    assert not as_on_a_gpu


@pytest.mark.parametrize(("precision", "expected"), [("float32", (False, False)), ("tf32", (True, True))])
def test_networks_are_evaluated_in_the_precision_that_is_asked_for(
    toy_data: FederatedData, as_on_a_gpu: list[object], precision: Precision, expected: object
) -> None:
    model, before = FunctionalModel(Watching, torch.float64), switches()
    evaluation_model_of(model, precision, torch.device("cpu"))(model.init(0), toy_data.x[:2])
    assert Watching.seen == [expected]
    assert switches() == before


def test_relearning_computes_in_the_precision_of_the_run(
    as_on_a_gpu: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, before, relearned = [], switches(), Evaluation.relearned

    def watched(self: Evaluation, *given: Any) -> list[float]:
        seen.append(switches())
        return relearned(self, *given)

    monkeypatch.setattr(Evaluation, "relearned", watched)
    run(tiny(train={"rounds": 1}, evaluate={"attacks": [], "relearn": 1}), tmp_path / "run")
    assert set(seen) == {(False, False)} != {before}
    assert switches() == before
