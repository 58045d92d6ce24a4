# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.core import ClientId, Effort, Local, Model, Params, Part, Program, Reply, Sent, State, Task
from fedquit.core.fedavg import Learn
from fedquit.core.params import nbytes
from fedquit.data.federated import FederatedData
from fedquit.engine import SequentialEngine
from fedquit.running.costs import Costs, Metered
from fedquit.running.flops import Flops, Shape
from fedquit.running.runner import run
from fedquit.running.session import Session
from fedquit.running.setup import build_setup
from seam_methods import Fisher, Patiently
from worlds import tiny

P = {"w": torch.zeros(10, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float32)}  # 88 bytes
HEAD = {"b": torch.zeros(2, dtype=torch.float32)}  # 8 bytes


@dataclass
class Fake:
    model: Model
    answer: Params
    clients: tuple[ClientId, ...] = (0, 1, 2)
    seed: int = 0

    def run(self, task: object, clients: Any, *, split: str = "all", **sent: Params) -> Iterator[Reply]:
        return (Reply(c, self.answer, examples=c * 10) for c in clients)

    def run_at_server(self, task: object, **sent: Params) -> Params:
        return self.answer


def test_bytes_participations_and_epochs_by_hand(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, P))
    list(meter.run(Learn(Local(epochs=2.0)), [1, 2], start=P))
    assert meter.costs == Costs(down_bytes=176, up_bytes=176, participations=2, client_epochs=4.0)


@dataclass
class Visits(Fake):
    """Clients that say what they took."""

    efforts: tuple[Effort, ...] = ()

    def run(self, task: object, clients: Any, *, split: str = "all", **sent: Params) -> Iterator[Reply]:
        return (Reply(c, self.answer, examples=20, efforts=self.efforts) for c in clients)


@dataclass
class Counted:
    """Ten FLOPs a step, and what was asked."""

    asked: list[tuple[Task, frozenset[str], int, int | None]]

    def at_client(self, task: Task, sent: Sent, examples: int, steps: int | None = None) -> int:
        self.asked.append((task, frozenset(sent), examples, steps))
        return 10 * (steps or 0)

    def at_server(self, task: Task, sent: Sent, steps: int | None = None) -> int:
        self.asked.append((task, frozenset(sent), 0, steps))
        return 10 * (steps or 0)


def test_a_program_is_one_participation_with_the_work_of_all_its_parts(toy_model: Model) -> None:
    forget, repair = Learn(Local(epochs=3.0, batch_size=4)), Learn(Local(epochs=0.5, batch_size=4))
    efforts = (Effort(8, 6), Effort(24, 2))  # of 2 and 6 steps an epoch: the second part ended before its third
    counted = Counted([])
    meter = Metered(Visits(toy_model, P, efforts=efforts), work=counted)
    list(meter.run(Program((Part(forget, "forget"), Part(repair, "retain"))), [1, 2], start=P, teacher=HEAD))
    assert meter.costs == Costs(2 * 96, 2 * 88, 2, 2 * (3.0 + 2 / 6), client_flops=2 * 80)
    names = frozenset({"start", "teacher", "received"})
    assert counted.asked == [(forget, names, 8, 6), (repair, names, 24, 2)] * 2


def test_a_program_that_takes_what_was_planned_is_charged_the_planned_epochs(toy_model: Model) -> None:
    part = Part(Learn(Local(epochs=0.4, batch_size=4)), "retain")
    meter = Metered(Visits(toy_model, P, efforts=(Effort(20, 2), Effort(0, 0))))
    list(meter.run(Program((part, part)), [1], start=P))
    assert meter.costs.client_epochs == 0.4, "and nothing for a part without an example"


def test_a_task_that_ends_early_is_charged_for_what_it_took(toy_model: Model) -> None:
    counted = Counted([])
    meter = Metered(Visits(toy_model, P, efforts=(Effort(20, 7),)), work=counted)
    list(meter.run(Patiently(Local(epochs=9.0, batch_size=8)), [1], start=P))  # 3 steps an epoch
    assert (meter.costs.client_epochs, meter.costs.client_flops) == (7 / 3, 70)
    assert counted.asked[0][2:] == (20, 7)


def test_a_measurement_is_one_pass(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, P))
    list(meter.run(Fisher(), [1, 2], start=P))
    assert meter.costs == Costs(176, 176, 2, 2.0)


def test_the_server_is_charged_for_what_it_took_too(
    toy_model: Model, toy_data: FederatedData, toy_start: Params
) -> None:
    session = Session(SequentialEngine(toy_model, toy_data, {}), 0, toy_data.clients)
    flops = Flops(toy_model, Shape.of(toy_data.x, toy_data.y), len(toy_data.public))
    meter = Metered(session, work=flops)
    task = Patiently(Local(epochs=30.0, batch_size=5, lr=2.0))  # 12 examples: batches of 5, 5 and 2
    (again,) = Session(SequentialEngine(toy_model, toy_data, {}), 0, ()).engine.run(
        session._ask(task, [-1], "all", {"start": toy_start})
    )
    session.enter("", 0)
    meter.run_at_server(task, start=toy_start)
    epochs = again.efforts[0].steps / 3
    assert 1 < epochs < 30
    assert meter.costs.server_epochs == epochs
    assert meter.costs.server_flops == round(
        epochs * flops.at_server(Patiently(Local(batch_size=5)), {"start": toy_start})
    )


def test_a_set_that_is_sent_under_two_names_travels_once_and_two_sets_twice(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, HEAD))
    list(meter.run(Learn(), [1], start=P, teacher=P))
    assert (meter.costs.down_bytes, meter.costs.up_bytes) == (88, 8)
    list(meter.run(Learn(), [1], start=P, head=HEAD))
    assert (meter.costs.down_bytes, meter.costs.up_bytes) == (88 + 96, 16)


def test_a_client_without_data_downloads_but_does_not_work(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, P))
    list(meter.run(Learn(), [0], start=P))
    assert (meter.costs.participations, meter.costs.client_epochs) == (1, 0.0)


def test_work_at_the_server_costs_no_bytes(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, P))
    meter.run_at_server(Learn(Local(epochs=3.0)), start=P)
    assert meter.costs == Costs(server_epochs=3.0)


def test_only_what_was_answered_is_counted(toy_model: Model) -> None:
    meter = Metered(Fake(toy_model, P))
    next(meter.run(Learn(), [1, 2], start=P))
    assert meter.costs.participations == 1


def test_storage_is_the_most_that_lay_there(toy_model: Model) -> None:
    shelves = iter([(5, 7), (50, 1), (3, 2)])
    meter = Metered(Fake(toy_model, P), lambda: next(shelves))
    for _ in range(3):
        meter.settle(State(P, kept={"degraded": HEAD}))
    assert (meter.costs.server_storage_bytes, meter.costs.client_storage_bytes) == (88 + 8 + 50, 7)


@pytest.mark.parametrize(
    ("method", "models_at_server", "models_at_clients"),
    [("fedquit", 1, 0), ("not", 1, 0), ("mode", 2, 0), ("fedosd", 2, 0), ("pga", 1, 4), ("federaser", 1 + 3 * 4, 0)],
)
def test_each_method_s_storage_is_what_its_paper_says(
    method: str, models_at_server: int, models_at_clients: int, tmp_path: Path
) -> None:
    results = run(tiny(method={"name": method}), tmp_path / "a")
    row = next(r for r in results["rows"] if r["phase"] == "unlearned")
    model = nbytes(build_setup(tiny()).initial)
    assert row["server_storage_bytes"] == models_at_server * model
    assert row["client_storage_bytes"] == models_at_clients * model


@pytest.mark.parametrize(
    ("method", "models_at_server", "models_at_clients"), [("natural", 1, 0), ("pga", 1, 4), ("federaser", 1 + 3 * 4, 0)]
)
def test_a_recovery_without_rounds_keeps_what_lay_there(
    method: str, models_at_server: int, models_at_clients: int, tmp_path: Path
) -> None:
    results = run(tiny(method={"name": method}, recover={"max_rounds": 0}), tmp_path / "a")
    row = next(r for r in results["rows"] if r["phase"] == "recovered")
    model = nbytes(build_setup(tiny()).initial)
    assert {k: row[k] for k in asdict(Costs())} == asdict(
        Costs(server_storage_bytes=models_at_server * model, client_storage_bytes=models_at_clients * model)
    )


def test_who_does_nothing_to_unlearn_stores_the_model_and_pays_nothing_else(tmp_path: Path) -> None:
    first, again = (run(tiny(method={"name": "natural"}), tmp_path / "a")["rows"] for _ in range(2))
    row = next(r for r in first if r["phase"] == "unlearned")
    stored = Costs(server_storage_bytes=nbytes(build_setup(tiny()).initial))
    assert {k: row[k] for k in asdict(Costs())} == asdict(stored)
    assert again == first


def test_the_costs_of_a_run_by_hand(tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(), tmp_path / "a")["rows"]}
    model = nbytes(build_setup(tiny()).initial)
    assert rows["retrained"]["down_bytes"] == rows["retrained"]["up_bytes"] == 3 * 3 * model
    assert rows["retrained"]["client_epochs"] == 9
    assert (rows["unlearned"]["down_bytes"], rows["unlearned"]["participations"]) == (model, 1)
    assert rows["recovered"]["up_bytes"] == 2 * 3 * model
    assert [p["bytes"] for p in rows["recovered"]["curve"]] == [0, 6 * model, 12 * model]


def test_mode_takes_154_client_epochs_as_in_the_paper(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "mode"}, data={"clients": 10, "options": {"examples": 300, "classes": 3, "size": 4}})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["client_epochs"] == 6 * 9 + 10 * 10
