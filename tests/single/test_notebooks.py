# SPDX-License-Identifier: Apache-2.0
"""The notebooks run, from the first cell to the last, and their recorded outputs are of a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "notebooks"
NEEDED = {
    "image_classifier": (),
    "bert_classifier": ("transformers", "accelerate"),
    "language_model_lora": ("transformers", "peft"),
}
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs a checkout")


def read(name: str) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return notebook


def printed_by(notebook: dict[str, Any]) -> str:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output["text"]) for output in outputs)


def test_every_notebook_is_listed_and_has_the_outputs_of_a_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NEEDED)
    for name in NEEDED:
        notebook = read(name)
        counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert counts == list(range(1, len(counts) + 1))
        assert "forgotten within the margin: AUC" in printed_by(notebook)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_a_notebook_runs_and_ends_with_its_verdict(name: str, tmp_path: Path) -> None:
    for package in NEEDED[name]:
        pytest.importorskip(package)
    copy = tmp_path / f"{name}.ipynb"
    copy.write_text(json.dumps(read(name)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / "record.py"), str(copy)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = printed_by(json.loads(copy.read_text(encoding="utf-8")))
    recorded = printed_by(read(name))
    assert [line.split()[:1] for line in printed.splitlines()] == [line.split()[:1] for line in recorded.splitlines()]
    assert "forgotten within the margin: AUC" in printed
