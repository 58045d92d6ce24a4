# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.core import ClientId, Local, Model, Params, Reply, State
from fedquit.core.fedavg import Learn
from fedquit.core.params import nbytes
from fedquit.running.costs import Costs, Metered
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
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
