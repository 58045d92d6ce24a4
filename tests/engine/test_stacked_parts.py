# SPDX-License-Identifier: Apache-2.0
"""The parts of the stacked engine by themselves: the layout of a row, the schedule, and which way steps are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedquit.core import Local, Params
from fedquit.core.fedavg import Learn
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Ask, EngineOptions, StackedEngine, open_engine
from fedquit.engine.api import ClientIndices
from fedquit.engine.plan import Plan
from fedquit.engine.stacked import engine as stacked
from fedquit.engine.stacked.capture import CapturedSteps
from fedquit.engine.stacked.eager import EagerSteps
from fedquit.engine.stacked.layout import ALIGNMENT, Layout
from fedquit.engine.stacked.replay import ReplayedSteps
from fedquit.engine.stacked.schedule import Job, Schedule, active_clients
from fedquit.models import FunctionalModel

SHAPES = {"w": (2, 3, 1, 1), "b": (70,), "v": (4,)}


@pytest.mark.parametrize("output_channels_last", [False, True])
def test_parameters_begin_at_aligned_places_and_come_back_as_they_were_written(output_channels_last: bool) -> None:
    layout = Layout(SHAPES, output_channels_last)
    assert layout.starts == [0, 64, 192, 256]
    assert all(start % ALIGNMENT == 0 for start in layout.starts)
    assert layout.sizes == {0: 6, 64: 70, 192: 4}
    params = {n: torch.randn(3, *shape) for n, shape in SHAPES.items()}
    rows = torch.full((3, layout.row_size), 9.0)
    layout.fill(rows, params)
    views = layout.views(rows)
    assert all(torch.equal(views[n], p) for n, p in params.items())
    assert (rows[:, 6:64] == 9).all(), "gaps are left alone"
    in_row = [float(params["w"][0, o, i]) for i in range(3) for o in range(2)]
    assert (rows[0, :6].tolist() == in_row) == output_channels_last


def test_filling_overwrites_zeroes_and_adds() -> None:
    layout = Layout(SHAPES, output_channels_last=False)
    rows = torch.ones(2, layout.row_size)
    layout.fill(rows, {"w": torch.full((1, 2, 3, 1, 1), 5.0), "b": None, "v": torch.full((2, 4), 3.0)}, add_at={192})
    views = layout.views(rows)
    assert [float(views[n].unique()) for n in ("w", "b", "v")] == [5, 0, 4]


def job(client: int, sizes: tuple[int, ...], examples: int) -> Job:
    at = torch.arange(examples) + 100 * client
    order = torch.arange(sum(sizes)) % max(examples, 1)
    plan = Plan(order, sizes, torch.rand(len(order)), 0, torch.rand(len(order), 2))
    indices = ClientIndices(at, torch.rand(examples), torch.ones(examples, dtype=torch.bool))
    return Job(client, indices, plan, {}, {})


def test_a_schedule_pads_with_the_batchs_own_examples_of_weight_zero() -> None:
    jobs = [job(1, (2, 2, 1), 5), job(2, (2,), 2), job(3, (), 0)]
    assert active_clients(jobs) == [2, 1, 1]
    schedule = Schedule.empty(4, 3, 2, (), 2)
    schedule.fill(jobs)
    assert schedule.at[:, 0].tolist() == [[100, 101], [102, 103], [104, 104], [0, 0]]
    assert schedule.share[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0], [0, 0]]
    assert schedule.share[:, 1:].flatten().nonzero().flatten().tolist() == [0, 1]
    step = schedule.at_step(2, 1, 1)
    assert step.at.tolist() == [[104]]
    assert step.variation.shape == (1, 1, 2)
    captured = schedule.at_step(torch.tensor([2]), 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(step.tables, captured.tables, strict=True))
    schedule.fill([job(4, (1,), 1)] * 3)
    assert schedule.share[1:].sum() == 0, "nothing of the last round is left"


def ways(engine: StackedEngine, start: Params, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for kind in (CapturedSteps, EagerSteps, ReplayedSteps):

        def noted(*given: Any, kind: type = kind) -> Any:
            taken.append(kind.__name__)
            return kind(*given)

        monkeypatch.setattr(stacked, kind.__name__, noted)
    list(engine.run(Ask(Learn(Local(batch_size=8)), (0, 1), "all", {"start": start}, Address(0, "train"))))
    return taken


def test_small_networks_on_a_cpu_are_replayed_and_others_run_eagerly(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ways(StackedEngine(toy_model, toy_data, {}), toy_start, monkeypatch) == ["ReplayedSteps"]
    assert ways(StackedEngine(toy_model, toy_data, {}, precision="bf16"), toy_start, monkeypatch) == ["EagerSteps"]
    monkeypatch.setattr(stacked, "MAX_NUMBERS", 0)
    assert ways(StackedEngine(toy_model, toy_data, {}), toy_start, monkeypatch) == ["EagerSteps"]


def test_options_reach_the_engine(toy_model: FunctionalModel, toy_data: FederatedData) -> None:
    options = EngineOptions()
    engine = open_engine("stacked", toy_model, toy_data, {}, "bf16", 3, options.graphs)
    assert isinstance(engine, StackedEngine)
    assert (engine.precision, engine.width) == ("bf16", 3)
    assert engine.graphs is options.graphs
