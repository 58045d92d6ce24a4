# SPDX-License-Identifier: Apache-2.0
"""FUKD distils on the server: terminal, report and JSON count that work alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedquit.cli import main
from test_report_figures import table

WORDS = ["compare", "demo", "--smoke", "--set", "data.public=0.1", "--methods", "fedquit,fukd", "--targets", "0,1"]


def test_the_server_s_flops_count_on_the_terminal_as_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedquit", *WORDS, "--jobs", "1", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    terminal = capsys.readouterr().out
    rows = {}
    for target in ("client-0", "client-1"):
        stored = json.loads((tmp_path / "out" / "seed-0" / target / "fukd" / "results.json").read_text())
        rows[target] = {row["phase"]: row for row in stored["rows"]}
    spent = sum(
        rows[t][p]["client_flops"] + rows[t][p]["server_flops"] for t in rows for p in ("unlearned", "recovered")
    )
    whole = sum(rows[t]["retrained"]["client_flops"] + rows[t]["retrained"]["server_flops"] for t in rows)
    assert spent > 2 * whole, "the distillation is most of the work"

    (line,) = [line for line in terminal.splitlines() if line.startswith(" fukd ") and line.strip().endswith("×")]
    printed = float(line.split()[-1].removesuffix("×"))
    assert printed == pytest.approx(whole / spent, rel=0.06)

    (stored,) = [
        line for line in json.loads((tmp_path / "out/comparison.json").read_text())["table"] if line["method"] == "fukd"
    ]
    assert stored["flops"] == pytest.approx(spent / 2)
    assert stored["flops_saved"] == pytest.approx(whole / spent)

    costs = table((tmp_path / "out" / "report.html").read_text(), "Costs")
    shares = [row for row in costs if row[0] == "Share of Retrain"]
    percent = float(re.sub(r"[^\d.]", "", shares[1][costs[0].index("Computing")]))
    assert percent == pytest.approx(100 * spent / whole, rel=0.06)
