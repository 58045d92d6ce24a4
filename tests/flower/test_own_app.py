# SPDX-License-Identifier: Apache-2.0
"""An app that keeps its own training: the diffs of docs/flower-app.md, before and after, and what can go wrong."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian

import fedquit
from fedquit.errors import InputError, RequestError, StoreError
from fedquit.flower import Forgetting, Unlearning, arrays_of, erasable, erasing_mod, remaining
from fedquit.flower.forgetting import VisibleNodes
from fedquit.flower.in_process import InProcessGrid, Node
from fedquit.flower.outbox import Outbox
from fedquit.flower.own_training import ACTION, BODY, QUERY, TRAIN, load_arrays
from flower.own_app_page import Files, fine_tuning, keeping, quickstart, write_app

pytestmark = pytest.mark.flower
NODES = (11, 12, 13)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


class App:
    """The app of a page, in modules of its own, over a grid in this process."""

    def __init__(self, folder: Path, files: Files, rounds: int = 12) -> None:
        self.folder = folder
        write_app(folder, files)
        self.state = folder / "forgotten.json"
        self.model = folder / "model.pt"
        self.rounds = rounds
        for name in ("task", "client_app", "server_app"):
            sys.modules.pop(name, None)
        sys.path.insert(0, str(folder))
        try:
            self.task, self.client, self.server = (
                importlib.import_module(name) for name in ("task", "client_app", "server_app")
            )
        finally:
            sys.path.remove(str(folder))
        self.begin()

    def begin(self) -> None:
        """Start all nodes, with the homes that they had."""
        self.nodes = {
            node: Node(node, self.client.app, {"partition-id": k, "fedquit-home": str(self.home(k))})
            for k, node in enumerate(NODES)
        }
        self.grid = LoggedGrid(self.nodes)

    def home(self, partition: int) -> Path:
        return self.folder / "homes" / str(partition)

    def context(self, partition: int) -> Context:
        config: Any = {"partition-id": partition, "fedquit-home": str(self.home(partition))}
        run: Any = {"rounds": self.rounds, "forgotten": str(self.state), "model": str(self.model)}
        return Context(1, NODES[partition], config, RecordDict(), run)

    def ask_after(self, partition: int, messages: int) -> None:
        """Let the owner of a client's data ask once so many messages to train are through."""
        self.grid.after[messages] = lambda: Outbox(self.home(partition)).file()

    def run(self) -> ArrayRecord:
        torch.manual_seed(0)
        random.seed(0)  # from which strategies sample
        self.server.main(self.grid, self.context(0))
        return ArrayRecord(torch.load(self.model))


class LoggedGrid(InProcessGrid):
    def __init__(self, nodes: dict[int, Node]) -> None:
        super().__init__(nodes)
        self.log: list[tuple[int, str]] = []
        self.after: dict[int, Callable[[], object]] = {}

    def deliver(self, message: Message) -> None:
        self.log.append((message.metadata.dst_node_id, message.metadata.message_type))
        super().deliver(message)
        self.after.pop(len(self.trained()), lambda: None)()

    def trained(self) -> list[tuple[int, str]]:
        return [entry for entry in self.log if entry[1] != QUERY]


@pytest.fixture
def own_modules() -> Iterator[None]:
    yield
    for name in ("task", "client_app", "server_app"):
        sys.modules.pop(name, None)


def accuracy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    module.eval()
    with torch.no_grad():
        return 100 * float((module(x).argmax(-1) == y).float().mean())


def model_of(task: ModuleType, arrays: ArrayRecord) -> nn.Module:
    model: nn.Module = task.make_model()
    load_arrays(model, arrays.to_torch_state_dict())
    return model


@pytest.mark.usefixtures("own_modules")
def test_the_quickstart_forgets_a_client_and_trains_on_without_it(
    tmp_path: Path,
) -> None:
    before = App(tmp_path / "before", quickstart("-"))
    plain = model_of(before.task, before.run())
    app = App(tmp_path / "after", quickstart("+"))
    untouched = model_of(app.task, app.run())
    for (name, one), other in zip(plain.named_parameters(), untouched.parameters(), strict=True):
        assert torch.equal(one, other), name  # without a request the app trains as it did
    assert {kind for _, kind in app.grid.trained()} == {"train"}
    data = app.task.load_partition(app.context(2))
    x, y = data.tensors
    digits = app.task.DIGITS

    app.grid.log.clear()
    app.ask_after(2, 3 * 8)
    forgetful = model_of(app.task, app.run())
    trained = app.grid.trained()
    at = trained.index((NODES[2], TRAIN))
    assert at == 3 * 8
    assert {node for node, _ in trained[at + 1 :]} == {NODES[0], NODES[1]}
    assert len(trained[at + 1 :]) == 2 * 3  # the unlearning took one of the twelve rounds
    stored = json.loads(app.state.read_text())
    assert stored["erased"] == [NODES[2]]
    assert stored["untold"] == {}
    (entry,) = Outbox(app.home(2)).entries()
    assert entry.status == "served"
    for label, state in (("no request", untouched), ("forgotten", forgetful)):  # docs/flower-app.md has these, with -s
        figures = accuracy(state, x, y), accuracy(state, digits.test_x, digits.test_y)
        sys.stdout.write("{}: {:.1f} % of the client's images, {:.1f} % of the test images\n".format(label, *figures))
    assert accuracy(forgetful, x, y) < accuracy(untouched, x, y) - 5
    assert accuracy(forgetful, digits.test_x, digits.test_y) > 85
    statistics = {name: buffer for name, buffer in forgetful.named_buffers() if "running_var" in name}
    assert all((buffer > 0).all() for buffer in statistics.values())
    message = Message(content=RecordDict({}), message_type="train", dst_node_id=NODES[2])
    with pytest.raises(RequestError, match="works no more"):
        app.client.app(message, app.context(2))


@pytest.mark.usefixtures("own_modules")
@pytest.mark.transformers
def test_the_fine_tuning_app_exchanges_and_unlearns_adapters_alone(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    app = App(tmp_path / "after", fine_tuning("+"), rounds=8)
    arrays = app.run()
    assert all("lora" in name or "lm_head" in name for name in arrays)
    numbers = sum(array.numpy().size for array in arrays.values())
    whole = sum(p.numel() for p in app.task.make_model().parameters())
    assert numbers < whole / 2

    def loss(state: ArrayRecord, partition: int) -> float:
        model = model_of(app.task, state).eval()
        texts = app.task.load_texts(app.context(partition))
        ids = torch.stack([text["input_ids"] for text in texts])
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    again = App(tmp_path / "again", fine_tuning("+"), rounds=8)
    again.ask_after(1, 3 * 5)
    forgetful = again.run()
    trained = again.grid.trained()
    at = trained.index((NODES[1], TRAIN))
    assert at == 3 * 5
    assert {node for node, _ in trained[at + 1 :]} == {NODES[0], NODES[2]}
    assert set(forgetful) == set(arrays)
    untrained = arrays_of(arrays_state(app.task))
    assert loss(forgetful, 1) > loss(arrays, 1) + 0.3
    assert loss(forgetful, 0) < loss(untrained, 0) - 0.5


class KilledError(BaseException):
    """A server app that is killed."""


def kill() -> None:
    raise KilledError


@pytest.mark.usefixtures("own_modules")
def test_a_run_that_is_killed_while_a_client_unlearns_serves_it_in_the_next(tmp_path: Path) -> None:
    app = App(tmp_path / "app", keeping(), rounds=5)
    app.ask_after(2, 3 * 2)
    app.grid.after[3 * 2 + 1] = kill  # the reply to the unlearning is lost
    with pytest.raises(KilledError):
        app.run()
    kept = app.model.read_bytes()
    assert not app.state.exists()
    assert Outbox(app.home(2)).entries()[0].status == "pending"
    app.begin()
    app.run()
    trained = app.grid.trained()
    assert trained[0] == (NODES[2], TRAIN), "at once, on the model that was kept"
    assert {node for node, _ in trained[1:]} == {NODES[0], NODES[1]}
    assert Outbox(app.home(2)).entries()[0].status == "served"
    assert app.model.read_bytes() != kept


@pytest.mark.usefixtures("own_modules")
def test_a_run_that_is_killed_before_the_unlearned_model_is_kept_unlearns_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(tmp_path / "app", keeping(), rounds=5)
    app.ask_after(2, 3 * 2)
    aggregate = Forgetting._unlearned

    def killed_after(self: Forgetting, *arguments: Any) -> Any:
        aggregate(self, *arguments)
        kill()

    monkeypatch.setattr(Forgetting, "_unlearned", killed_after)
    with pytest.raises(KilledError):
        app.run()
    remembering = app.model.read_bytes()
    monkeypatch.undo()
    assert not app.state.exists(), "nobody has the unlearned model: the request is not served"
    assert Outbox(app.home(2)).entries()[0].status == "pending"
    app.begin()
    app.rounds = 1
    app.run()
    assert app.grid.trained() == [(NODES[2], TRAIN)]
    assert app.model.read_bytes() != remembering
    assert json.loads(app.state.read_text())["erased"] == [NODES[2]]


@pytest.mark.usefixtures("own_modules")
def test_a_run_that_is_killed_in_the_recovery_goes_on_without_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(tmp_path / "app", keeping(), rounds=6)
    app.ask_after(2, 3 * 2)
    app.grid.after[3 * 2 + 1 + 2 * 2] = kill  # in the second round of the recovery
    with pytest.raises(KilledError):
        app.run()
    stored = json.loads(app.state.read_text())
    assert (stored["erased"], stored["recovered"]) == ([NODES[2]], 1)
    assert Outbox(app.home(2)).entries()[0].status == "served", "its owner knows since the recovery began"
    app.begin()
    app.rounds = 1
    with logged(caplog):
        app.run()
    assert "2 rounds followed the unlearning in round 3, and 3 should" in caplog.text
    assert {node for node, _ in app.grid.log} == {NODES[0], NODES[1]}
    caplog.clear()
    with logged(caplog):
        app.run()
    assert "should" not in caplog.text, "three rounds were trained in three runs"


@pytest.mark.usefixtures("own_modules")
def test_a_request_after_the_last_round_is_served_before_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(tmp_path / "app", keeping(), rounds=2)
    app.ask_after(2, 3 * 2)
    with logged(caplog):
        app.run()
    trained = app.grid.trained()
    assert trained[3 * 2] == (NODES[2], TRAIN)
    assert sorted(node for node, _ in trained[3 * 2 + 1 :]) == [NODES[0]] * 3 + [NODES[1]] * 3, "the others recover"
    assert "1 request(s) wait after the last round: start again with this model and at least 4 rounds" in caplog.text
    assert Outbox(app.home(2)).entries()[0].status == "served"


def test_an_app_that_ends_with_a_request_says_so_and_the_next_run_serves_it(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    strategy = Forgetting(FedAvg(**plain_settings()))
    grid.after[3] = lambda: Outbox(tmp_path / "12").file()
    result = strategy.start(grid, start(), num_rounds=1)
    assert strategy.pending == (12,)
    other = Forgetting(FedAvg(**plain_settings()))  # another process
    other.start(grid, result.arrays, num_rounds=1)
    assert not other.pending
    assert other.erased == {12}
    other.kept()
    assert Outbox(tmp_path / "12").entries()[0].status == "served", "told when the model is stored"


def test_an_app_that_stores_its_model_at_the_end_says_when_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "forgotten.json"
    outbox = Outbox(tmp_path / "12")
    outbox.file()
    killed = Forgetting(FedAvg(**plain_settings()), state=state)
    grid = grid_of(own_app(tmp_path))
    with logged(caplog):
        killed.start(grid, start(), num_rounds=3)
    assert "call `kept()` once the model is stored" in caplog.text
    assert killed.erased == {12}, "it takes no part in the recovery"
    assert not state.exists(), "killed before the model is stored: nothing is served"
    assert outbox.entries()[0].status == "pending"

    grid.log.clear()
    strategy = Forgetting(FedAvg(**plain_settings()), state=state)
    strategy.start(grid, start(), num_rounds=3)
    assert grid.trained()[0] == (12, TRAIN), "it is served again"
    strategy.kept()
    assert json.loads(state.read_text())["erased"] == [12]
    assert json.loads(state.read_text())["untold"] == {}
    assert outbox.entries()[0].status == "served"
    assert Forgetting(FedAvg(**plain_settings()), state=state).served == strategy.served


def test_one_changed_byte_of_the_state_brings_nobody_back(tmp_path: Path) -> None:
    state = tmp_path / "forgotten.json"
    first = Forgetting(FedAvg(**plain_settings()), requests=lambda n: [12] if n == 1 else [], state=state)
    first.start(grid_of(own_app(tmp_path)), start(), num_rounds=2)
    first.kept()
    written = state.read_bytes()
    for place in (place for place, byte in enumerate(written) if chr(byte) in "12"):
        state.write_bytes(written[:place] + b"3" + written[place + 1 :])
        again = Forgetting(FedAvg(**plain_settings()), state=state)
        assert (again.erased, again.served) == (first.erased, first.served)
        assert state.read_bytes() == written, "it is mended"
    state.write_bytes(b"")
    assert Forgetting(FedAvg(**plain_settings()), state=state).erased == {12}
    state.unlink()
    assert Forgetting(FedAvg(**plain_settings()), state=state).erased == {12}
    other = tmp_path / "other.json"
    other.write_text('{"erased": [12]}')
    with pytest.raises(StoreError, match="Do not delete it: it says who was forgotten"):
        Forgetting(FedAvg(**plain_settings()), state=other)


def test_a_request_that_is_taken_back_before_a_round_finds_it_is_dropped(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    outbox = Outbox(tmp_path / "12")
    samples = outbox.file(positions=[1, 2])
    outbox.withdraw(samples.id)
    strategy = Forgetting(FedAvg(**plain_settings()))
    grid.after[3] = outbox.file
    strategy.start(grid, start(), num_rounds=1)
    assert outbox.get(samples.id).status == "withdrawn"
    left = remaining(blob(12), Context(1, 12, {}, RecordDict(), {}), tmp_path / "12")
    assert len(left) == 24  # type: ignore[arg-type]
    assert strategy.pending == (12,)
    outbox.withdraw(outbox.pending()[0].id)
    strategy.start(grid, start(), num_rounds=1)
    left_over = [*strategy.pending, *strategy.erased, *strategy.served]
    assert left_over == []


def test_a_home_that_the_server_has_spoken_to_takes_requests_by_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedquit.cli import app as command

    home = tmp_path / "12"
    refused = CliRunner().invoke(command, ["request", "--home", str(home)])
    assert refused.exit_code != 0, "no node was ever started with it"
    Forgetting(FedAvg(**plain_settings())).start(grid_of(own_app(tmp_path)), start(), num_rounds=1)
    filed = CliRunner().invoke(command, ["request", "--home", str(home)])
    assert filed.exit_code == 0, filed.output
    strategy = Forgetting(FedAvg(**plain_settings()))
    strategy.start(grid_of(own_app(tmp_path)), start(), num_rounds=1)
    strategy.kept()
    shown = CliRunner().invoke(command, ["request", "--home", str(home), "--show"])
    assert "the server has answered it" in shown.output
    assert "nobody has received" not in shown.output


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What Flower logs, which it does not pass on."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def arrays_state(task: ModuleType) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(task.make_model()))


# ---- the parts


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def blob(node: int, size: int = 24) -> TensorDataset:
    draws = torch.Generator().manual_seed(node)
    y = torch.randint(3, (size,), generator=draws)
    return TensorDataset(torch.randn(size, 4, generator=draws) + y[:, None], y)


def train(message: Message, context: Context) -> Message:
    model = net()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    data = blob(context.node_id)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    for x, y in DataLoader(data, 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def own_app(folder: Path, mods: Any = None, lr: float = 1e-2, batch_size: int = 32) -> ClientApp:
    app = ClientApp(mods=mods)
    app.train()(train)
    return erasable(
        app,
        model=lambda _: net(),
        data=lambda context: blob(context.node_id),
        home=lambda context: folder / str(context.node_id),
        unlearning=Unlearning(lr=lr, options={"batch_size": batch_size}),
    )


def grid_of(app: ClientApp) -> LoggedGrid:
    return LoggedGrid({node: Node(node, app, {}) for node in NODES})


def start() -> ArrayRecord:
    return ArrayRecord(net().state_dict())


def plain_settings() -> dict[str, Any]:
    return {"fraction_evaluate": 0.0, "min_available_nodes": 1, "min_train_nodes": 1}


def test_the_reply_of_the_client_is_the_new_model_and_the_strategy_begins_anew(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    inner = FedAdam(eta=0.05, **plain_settings())
    strategy = Forgetting(inner, requests=lambda n: [12] if n == 3 else [])
    seen: dict[int, ArrayRecord] = {}
    strategy.start(grid, start(), num_rounds=3, evaluate_fn=lambda n, arrays: seen.update({n: arrays}))
    before = net()
    before.load_state_dict(seen[2].to_torch_state_dict())
    expected = fedquit.unlearn(before, blob(12), lr=1e-2, norm="frozen", dropout=False)
    for name, tensor in seen[3].to_torch_state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    assert strategy.strategy.m_t is None  # type: ignore[attr-defined]
    assert strategy.erased == {12}
    assert inner.m_t is None  # the strategy that was given is never touched


def test_several_that_leave_at_once_unlearn_together(tmp_path: Path) -> None:
    strategy = Forgetting(FedAvg(**plain_settings()), requests=lambda n: [11, 13] if n == 2 else [])
    grid = grid_of(own_app(tmp_path))
    strategy.start(grid, start(), num_rounds=3)
    assert strategy.erased == {11, 13}
    assert grid.trained()[-1] == (12, "train")
    assert [erasure.round for erasure in strategy.served] == [2, 2]


def test_a_request_for_samples_leaves_the_client_in_and_its_samples_out(tmp_path: Path) -> None:
    app = own_app(tmp_path)
    grid = grid_of(app)
    outbox = Outbox(tmp_path / "12")
    outbox.file(positions=[0, 5, 7])
    strategy = Forgetting(FedAvg(**plain_settings()))
    seen: dict[int, ArrayRecord] = {}
    strategy.start(grid, start(), num_rounds=3, evaluate_fn=lambda n, arrays: seen.update({n: arrays}))
    assert strategy.erased == frozenset()
    assert [(erasure.node, erasure.kind) for erasure in strategy.served] == [(12, "samples")]
    assert outbox.entries()[0].status == "served"
    data = blob(12)
    left = remaining(data, Context(1, 12, {}, RecordDict(), {}), tmp_path / "12")
    assert len(left) == 21  # type: ignore[arg-type]
    expected = fedquit.unlearn(net(), [data[k] for k in (0, 5, 7)], lr=1e-2, norm="frozen", dropout=False)
    assert torch.equal(seen[1].to_torch_state_dict()["0.weight"], expected.state_dict()["0.weight"])


def test_a_fraction_is_drawn_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "12")
    outbox.file(fraction=0.25)
    strategy = Forgetting(FedAvg(**plain_settings()))
    strategy.start(grid_of(own_app(tmp_path)), start(), num_rounds=2)
    strategy.kept()
    (entry,) = outbox.entries()
    assert entry.status == "served"
    assert len(entry.positions) == 6
    assert strategy.served[0].request == entry.id


def test_a_client_that_cannot_unlearn_is_asked_again_and_then_refused(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "12")
    outbox.file()
    strategy = Forgetting(FedAvg(**plain_settings()), tries=2)
    seen: dict[int, ArrayRecord] = {}
    grid = grid_of(own_app(tmp_path, lr=1e36, batch_size=8))  # the student overflows
    strategy.start(grid, start(), num_rounds=4, evaluate_fn=lambda n, arrays: seen.update({n: arrays}))
    rounds = {"train": 3 * ["train"], TRAIN: [TRAIN]}
    expected = [kind for one in (TRAIN, "train", TRAIN, "train") for kind in rounds[one]]
    assert [kind for _, kind in grid.trained()] == expected, "the others train between the two tries"
    assert strategy.erased == frozenset()
    (entry,) = outbox.entries()
    assert entry.status == "refused"
    assert "no longer finite" in entry.reason
    for after, before in ((1, 0), (3, 2)):  # nothing came of the two tries
        for name, tensor in seen[after].to_torch_state_dict().items():
            assert torch.equal(tensor, seen[before].to_torch_state_dict()[name])
    assert not torch.equal(seen[4].to_torch_state_dict()["0.weight"], seen[3].to_torch_state_dict()["0.weight"])


def query_answer(json_text: str) -> Callable[[Message], Message]:
    return lambda message: Message(RecordDict({BODY: ConfigRecord({"json": json_text})}), reply_to=message)


def answering(app: ClientApp, answer: Callable[[Message], Message], to: str = QUERY) -> ClientApp:
    """An app of a member that answers one kind of message as it likes."""

    def dishonest(message: Message, context: Context) -> Message:
        return answer(message) if message.metadata.message_type == to else app(message, context)

    return dishonest  # type: ignore[return-value]


@pytest.mark.parametrize(
    "json_text",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"pending": null}',
        '{"pending": ["x"]}',
        '{"pending": [{}]}',
        '{"pending": [{"id": "../x", "kind": "client"}]}',
        '{"pending": [{"id": "ab", "kind": "everybody"}]}',
        '{"pending": [{"id": "ab", "kind": ["client"]}]}',
    ],
)
def test_a_member_that_answers_nonsense_does_not_end_the_run_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, json_text: str
) -> None:
    app = own_app(tmp_path)
    grid = grid_of(app)
    grid.nodes[NODES[0]].app = answering(app, query_answer(json_text))
    Outbox(tmp_path / "12").file()
    strategy = Forgetting(FedAvg(**plain_settings()))
    with logged(caplog):
        strategy.start(grid, start(), num_rounds=2)
    assert f"node {NODES[0]} answers to the question for requests cannot be used" in caplog.text
    assert strategy.erased == {12}, "the others are served"
    assert sorted(grid.trained()[1:]) == [(11, "train"), (13, "train")]


def test_a_member_that_answers_an_unlearning_with_nonsense_does_not_end_the_run(tmp_path: Path) -> None:
    app = own_app(tmp_path)
    grid = grid_of(app)
    broken = Array("float32", (1,), "numpy.ndarray", b"no array")
    counted = MetricRecord({"num-examples": 5})
    answers = {
        11: query_answer("{"),
        12: lambda message: Message(
            RecordDict({"arrays": ArrayRecord({"0.weight": broken}), "metrics": counted}), reply_to=message
        ),
        13: lambda message: Message(
            RecordDict({"arrays": start(), "metrics": MetricRecord({"num-examples": float("inf")})}), reply_to=message
        ),
    }
    for node, answer in answers.items():
        grid.nodes[node].app = answering(app, answer, TRAIN)
    strategy = Forgetting(FedAvg(**plain_settings()), requests=lambda n: NODES if n == 1 else [], tries=1)
    result = strategy.start(grid, start(), num_rounds=2)
    assert strategy.erased == frozenset()
    assert sorted(grid.trained()[3:]) == [(node, "train") for node in NODES]
    assert len(result.arrays) == len(start())


def test_a_member_whose_request_was_refused_cannot_ask_it_for_ever(tmp_path: Path) -> None:
    app = own_app(tmp_path)
    state = tmp_path / "forgotten.json"
    grid = grid_of(app)
    always = query_answer('{"pending": [{"id": "ab", "kind": "client"}]}')
    never = answering(app, lambda message: Message(RecordDict({}), reply_to=message), TRAIN)
    grid.nodes[12].app = answering(never, always)
    arrays = start()
    for _ in range(2):  # the second server reads what the first has written
        strategy = Forgetting(FedAvg(**plain_settings()), state=state, tries=2)
        strategy.start(grid, arrays, num_rounds=6, evaluate_fn=lambda n, arrays: None)
    assert [node for node, kind in grid.trained() if kind == TRAIN] == [12, 12]
    assert strategy.pending == ()


def test_a_member_that_asks_anew_before_every_round_does_not_take_them_all(tmp_path: Path) -> None:
    app = own_app(tmp_path)
    grid = grid_of(app)
    outbox = Outbox(tmp_path / "12")
    for position in range(10):
        outbox.file(positions=[position])
    strategy = Forgetting(FedAvg(**plain_settings()))
    strategy.start(grid, start(), num_rounds=6)
    rounds = [kind for node, kind in grid.trained() if node == 12]
    assert rounds == [TRAIN, "train"] * 3


def test_a_server_that_is_started_again_still_hides_the_erased(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    state = tmp_path / "state" / "forgotten.json"
    first = Forgetting(FedAvg(**plain_settings()), requests=lambda n: [11], state=state)
    first.start(grid, start(), num_rounds=2)
    first.kept()
    again = Forgetting(FedAvg(**plain_settings()), state=state)
    assert again.erased == {11}
    assert again.served == first.served
    grid.log.clear()
    again.start(grid, start(), num_rounds=1)
    assert {node for node, _ in grid.log} == {12, 13}


def test_mods_of_the_app_hold_for_the_unlearning_and_do_not_stop_the_query(tmp_path: Path) -> None:
    Outbox(tmp_path / "12").file()
    grid = grid_of(own_app(tmp_path, mods=[LocalDpMod(0.5, 1.0, 1.0, 1e-5)]))
    strategy = Forgetting(FedAvg(**plain_settings()))
    seen: dict[int, ArrayRecord] = {}
    strategy.start(grid, start(), num_rounds=1, evaluate_fn=lambda n, arrays: seen.update({n: arrays}))
    assert strategy.erased == {12}
    unlearned = fedquit.unlearn(net(), blob(12), lr=1e-2, norm="frozen", dropout=False).state_dict()["0.weight"]
    noise = seen[1].to_torch_state_dict()["0.weight"] - unlearned
    assert noise.std() > 1  # the mod's standard deviation is 4.8


def test_an_app_with_a_client_fn_takes_the_mod(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mods="):
        erasable(
            ClientApp(lambda context: None),  # type: ignore[arg-type, return-value]
            model=lambda _: net(),
            data=lambda context: blob(context.node_id),
            unlearning=Unlearning(lr=1e-2),
        )
    mod = erasing_mod(
        model=lambda _: net(),
        data=lambda context: blob(context.node_id),
        home=lambda context: tmp_path / str(context.node_id),
        unlearning=Unlearning(lr=1e-2),
    )
    app = ClientApp(lambda context: None, mods=[mod])  # type: ignore[arg-type, return-value]
    Outbox(tmp_path / "12").file()
    numbered = ArrayRecord([array.numpy() for array in start().values()])
    strategy = Forgetting(FedAvg(**plain_settings()))
    result = strategy.start(grid_of(app), numbered, num_rounds=1)
    assert strategy.erased == {12}
    assert list(result.arrays) == [str(n) for n in range(len(numbered))]
    expected = fedquit.unlearn(net(), blob(12), lr=1e-2, norm="frozen", dropout=False)
    assert np.array_equal(result.arrays["0"].numpy(), expected.state_dict()["0.weight"].numpy())


def test_a_server_optimizer_takes_no_step_on_statistics_and_counters_stay_whole(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    plain = FedAvg(**plain_settings()).start(grid, start(), num_rounds=1).arrays
    for inner in (FedAdam(eta=0.05, **plain_settings()), FedAvgM(server_momentum=0.9, **plain_settings())):
        bare = inner.start(grid, start(), num_rounds=1).arrays
        wrapped = Forgetting(type(inner)(**_settings_of(inner))).start(grid, start(), num_rounds=1).arrays
        assert np.allclose(wrapped["1.running_var"].numpy(), plain["1.running_var"].numpy(), atol=1e-6)
        assert np.allclose(wrapped["0.weight"].numpy(), bare["0.weight"].numpy(), atol=1e-6)
        assert int(wrapped["1.num_batches_tracked"].numpy()) == 3, "the optimizer takes no step on a counter"
    adam = FedAdam(eta=0.05, **plain_settings()).start(grid, start(), num_rounds=1).arrays
    assert not np.allclose(adam["1.running_var"].numpy(), plain["1.running_var"].numpy(), atol=1e-3)
    counted = Forgetting(FedAvg(**plain_settings())).start(grid, start(), num_rounds=1).arrays
    assert counted["1.num_batches_tracked"].numpy().dtype == np.int64
    assert int(counted["1.num_batches_tracked"].numpy()) == 3
    median = FedMedian(**plain_settings()).start(grid, start(), num_rounds=1).arrays
    kept = Forgetting(FedMedian(**plain_settings())).start(grid, start(), num_rounds=1).arrays
    assert np.array_equal(kept["1.running_var"].numpy(), median["1.running_var"].numpy())  # a robust mean stays


def _settings_of(inner: Any) -> dict[str, Any]:
    own = {"eta": 0.05} if isinstance(inner, FedAdam) else {"server_momentum": 0.9}
    return {**own, **plain_settings()}


def test_the_strategy_sees_a_grid_without_erased_nodes(tmp_path: Path) -> None:
    grid = grid_of(own_app(tmp_path))
    visible = VisibleNodes(grid, [12])
    assert list(visible.get_node_ids()) == [11, 13]
    assert [node.node_id for node in visible.get_nodes()] == [11, 13]


def test_too_few_nodes_after_an_erasure_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = Forgetting(FedAvg(fraction_evaluate=0.0, min_available_nodes=3), requests=lambda n: [12])
    grid = grid_of(own_app(tmp_path))
    messages = list(strategy.configure_train(1, start(), ConfigRecord(), grid))
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    with logged(caplog):
        strategy._warn_of_few(2)
    assert "lower min_available_nodes" in caplog.text


def test_a_model_that_is_used_too_soon_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = Forgetting(FedAvg(**plain_settings()), requests=lambda n: [12] if n == 2 else [], recovery=2)
    with logged(caplog):
        strategy.start(grid_of(own_app(tmp_path)), start(), num_rounds=3)
    assert "1 rounds followed the unlearning in round 2, and 2 should" in caplog.text


def test_a_strategy_that_cannot_be_copied_is_given_as_a_function(tmp_path: Path) -> None:
    class Stubborn(FedAvg):
        def __deepcopy__(self, memo: object) -> Stubborn:
            raise TypeError("no copies")

    with pytest.raises(InputError, match=r"Forgetting\(lambda"):
        Forgetting(Stubborn(**plain_settings()))
    strategy = Forgetting(lambda: Stubborn(**plain_settings()), requests=lambda n: [12] if n == 1 else [])
    strategy.start(grid_of(own_app(tmp_path)), start(), num_rounds=2)
    assert strategy.erased == {12}


def test_bfloat16_travels_as_float32() -> None:
    state = {"w": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "n": torch.tensor(3)}
    with pytest.raises(TypeError):
        ArrayRecord(state)
    record = arrays_of(state)
    assert record["w"].numpy().dtype == np.float32
    assert record["w"].numpy().tolist() == [1.5, -2.0]
    module = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    load_arrays(module, {"weight": torch.tensor([[1.5, -2.0]])})
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.tolist() == [[1.5, -2.0]]


def test_arrays_that_do_not_fit_are_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="the network has no 'extra'"):
        load_arrays(net(), {"extra": torch.zeros(2)})
    with pytest.raises(InputError, match="do not fit the network"):
        load_arrays(net(), {"0.weight": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="`dump` leaves out"):
        Unlearning(lr=1e-2, dump=lambda model: {}).unlearned(net(), start(), blob(1))
    with pytest.raises(InputError, match="leave canaries or unlearning out"):
        erasable(
            ClientApp(), model=lambda _: net(), data=lambda _: blob(1), canaries=100, unlearning=Unlearning(lr=1e-2)
        )


def test_a_reply_that_is_no_model_of_this_network_does_not_become_the_global_model(tmp_path: Path) -> None:
    def lying(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"0.weight": Array(np.zeros((1, 1), np.float32))})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5})})
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(train)
    app.train(ACTION)(lying)
    strategy = Forgetting(FedAvg(**plain_settings()), requests=lambda n: [12], poll=False, tries=1)
    result = strategy.start(grid_of(app), start(), num_rounds=1)
    assert strategy.erased == frozenset()
    assert len(result.arrays) == 0  # Flower's result holds what was aggregated: nothing
