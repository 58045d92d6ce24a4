# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_holds_what_the_records_say() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "reproduction.py", ROOT / "results" / "cifar100-lda0.1"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed in (ROOT / "docs" / "reproduction.md").read_text()
    assert "they agree" in printed
