# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/from-python.md run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "from-python.md").read_text(), re.DOTALL)
PRINTED = ("recovered", "pga", "units done, 0 missing, 0 failed")


def test_there_are_as_many_examples_as_are_checked() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_an_example_of_the_page_runs(number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EXAMPLES[number]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTED[number] in done.stdout
