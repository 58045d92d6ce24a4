# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedquit.running.recipe import Recipe, build

ROOT = Path(__file__).parents[1]
UNLEARNED = ROOT / "results" / "unlearned-accuracy"
RECORDS = sorted(path for path in (ROOT / "results").glob("*/*.json") if path.parent != UNLEARNED)


def test_the_page_of_the_methods_holds_what_the_records_of_unlearned_accuracy_say() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "unlearned_table.py"), str(UNLEARNED)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert printed in (ROOT / "docs" / "methods" / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(UNLEARNED.glob("*.json")), ids=lambda path: str(path.stem))
def test_a_record_of_unlearned_accuracy_names_its_recipe_machine_and_code(path: Path) -> None:
    record = json.loads(path.read_text())
    recipe = build(Recipe, record["recipe"], "recipe")
    assert (recipe.train.rounds, recipe.model.name) == (200, "resnet18")
    assert record["computed"]["device"] == "NVIDIA H200"
    for run in record["runs"]:
        method = dataclasses.replace(recipe, method=run["method"]).build_method()
        unlearning = [point["round"] for point in run["unlearning"]]
        assert unlearning == list(range(1, len(unlearning) + 1))
        rounds = 0 if run["method"]["name"] == "natural" else getattr(method, "unlearning_rounds", 1)
        assert len(unlearning) == rounds
        assert run["code"]["commit"]
        assert not run["code"]["dirty"]


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_a_record_names_its_recipe_machine_versions_and_seconds(path: Path) -> None:
    record = json.loads(path.read_text())
    assert build(Recipe, record["recipe"], "recipe").hash == record["recipe_hash"]
    assert record["computed"]["device"] == "NVIDIA H200"
    assert {"fedquit", "python", "torch"} <= record["versions"].keys()
    assert record["rows"][0]["seconds"] > 0
    assert [row["phase"] for row in record["rows"]] == ["original", "retrained", "unlearned", "recovered"]
