# SPDX-License-Identifier: Apache-2.0
"""The driver of benchmarks/general_models.py: the order of its work, its time, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "general_models.py"


@pytest.fixture(scope="module")
def general_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("general_models", PATH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stand:
    """A process that does at once what it is ordered, and notes it."""

    def __init__(self, name: str, orders: list[tuple[str, str, float]], compilers: int) -> None:
        self.name, self.orders, self.compilers = name, orders, compilers
        self.doing = ""
        self.process: object = self
        self.ended = False

    def start(self) -> None:
        pass

    def order(self, what: str, limit: float) -> None:
        self.orders.append((self.name, what, limit))

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def orders(general_models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float]]:
    given: list[tuple[str, str, float]] = []

    def stand(name: str, *_: object, compilers: int, **__: object) -> Stand:
        return Stand(name, given, compilers)

    monkeypatch.setattr(general_models, "Process", stand)
    monkeypatch.setattr(general_models, "BEGAN", time.monotonic())
    monkeypatch.setattr(general_models.os, "cpu_count", lambda: 16)
    return given


def test_one_network_is_compiled_first_with_all_but_a_minute(
    general_models: ModuleType, orders: list[tuple[str, str, float]], tmp_path: Path
) -> None:
    driver = general_models.Driver(["mit"], tmp_path, 300.0, toy=True)
    driver.run()
    assert [what for _, what, _ in orders] == ["compile", "compiled", "plain", "stacked", "products"]
    assert orders[0][2] == pytest.approx(240, abs=20)
    assert driver.processes["mit"].compilers == 16


def test_of_several_networks_plain_loops_come_before_compilers(
    general_models: ModuleType, orders: list[tuple[str, str, float]], tmp_path: Path
) -> None:
    driver = general_models.Driver(["gpt", "bert", "mit"], tmp_path, 300.0, toy=True)
    driver.run()
    assert [f"{name} {what}" for name, what, _ in orders][:6] == [
        *("gpt plain", "bert plain", "mit plain"),
        *("gpt compile", "bert compile", "mit compile"),
    ]
    assert driver.processes["mit"].compilers == 8


def test_an_interrupt_ends_all_processes_and_prints_the_table(
    general_models: ModuleType,
    orders: list[tuple[str, str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver = general_models.Driver(["gpt", "mit"], tmp_path, 300.0, toy=True)

    def interrupted(*_: Any) -> None:
        driver.take({"network": "gpt", "what": "plain loop, float32", "ms_a_step": [3.0, 2.0, 4.0]})
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "wait", interrupted)
    with pytest.raises(SystemExit) as end:
        driver.run()
    assert end.value.code == 130
    assert end.value.__suppress_context__
    assert all(process.ended for process in driver.processes.values())
    assert capsys.readouterr().out.splitlines()[-1].split()[:6] == ["gpt", "plain", "loop,", "float32", "3.00", "ms"]
    told = json.loads((tmp_path / "general_models.json").read_text())["results"]
    assert [result["what"] for result in told] == ["plain loop, float32", "interrupted"]
