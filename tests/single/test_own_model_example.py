# SPDX-License-Identifier: Apache-2.0
"""The example of a model of one's own prints what its page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="needs a checkout")
def test_the_example_prints_the_table_of_the_docs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_model.py"), str(tmp_path / "report.html")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (shown,) = re.findall(r"```\n(accuracy %.*?)```", (ROOT / "docs" / "your-model.md").read_text(), re.DOTALL)
    assert [line.split()[0] for line in printed.splitlines()[:7]] == [line.split()[0] for line in shown.splitlines()]
    for ours, page in zip(printed.splitlines()[1:6], shown.splitlines()[1:6], strict=True):
        found, written = ([float(n.replace(",", "")) for n in re.findall(r"[\d.,]+", line)] for line in (ours, page))
        assert found == pytest.approx(written, abs=2.0), "another processor may round otherwise, and no more than that"
    assert "forgotten within the margin" in printed
    assert "Forgotten within the margin" in (tmp_path / "report.html").read_text()
