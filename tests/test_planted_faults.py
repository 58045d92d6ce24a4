# SPDX-License-Identifier: Apache-2.0
"""The list of planted faults fits the tree: every line that is to be broken is there, and so are the tests."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def _runner() -> ModuleType:
    path = ROOT / "benchmarks" / "planted_faults.py"
    spec = importlib.util.spec_from_file_location("planted_faults", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


planted_faults = _runner()
FAULTS = planted_faults.read_faults()


def test_there_are_at_least_thirty_faults_of_different_names_all_over_the_package() -> None:
    assert len(FAULTS) >= 30
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1
    packages = {fault.file.split("/")[0] for fault in FAULTS}
    assert packages >= {"core", "distill", "methods", "data", "engine", "audit", "running", "utils", "flower"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_is_still_python(fault: planted_faults.Fault) -> None:  # type: ignore[name-defined]
    path = fault.located(ROOT)
    text = path.read_text(encoding="utf-8")
    planted = fault.planted(text)
    assert planted != text
    compile(planted, str(path), "exec")
    assert any((ROOT / test).is_file() for test in fault.tests), fault.tests


def test_a_line_that_moved_is_reported(tmp_path: Path) -> None:
    (fault, *_) = FAULTS
    with pytest.raises(planted_faults.PlantError, match="occurs 0 times"):
        fault.located(tmp_path)
