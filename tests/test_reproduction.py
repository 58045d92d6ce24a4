# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedquit.running.recipe import Recipe, build

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "results").glob("*/*.json"))


def test_the_page_holds_what_the_records_say() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "reproduction.py", ROOT / "results" / "cifar100-lda0.1"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed in (ROOT / "docs" / "reproduction.md").read_text()
    assert "they agree" in printed


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_a_record_names_its_recipe_machine_versions_and_seconds(path: Path) -> None:
    record = json.loads(path.read_text())
    assert build(Recipe, record["recipe"], "recipe").hash == record["recipe_hash"]
    assert record["computed"]["device"] == "NVIDIA H200"
    assert {"fedquit", "python", "torch"} <= record["versions"].keys()
    assert record["rows"][0]["seconds"] > 0
    assert [row["phase"] for row in record["rows"]] == ["original", "retrained", "unlearned", "recovered"]
