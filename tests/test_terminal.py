# SPDX-License-Identifier: Apache-2.0
"""What commands print fits a terminal of 80 columns, and says method, control and verdict in few words."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from fedquit.cli import runs
from fedquit.results.folders import RunResults, read_comparison
from fedquit.running.recipe import Recipe
from test_report_figures import full

RECORDED = Path(__file__).parents[1] / "results" / "comparison-fashion.json"


def console(monkeypatch: pytest.MonkeyPatch, width: int, *, terminal: bool = True) -> io.StringIO:
    """What the commands print from now on.

    Args:
        monkeypatch: Puts the console in place.
        width: In columns.
        terminal: Or a file.
    """
    printed = io.StringIO()
    monkeypatch.setattr(runs, "screen", Console(file=printed, width=width, force_terminal=terminal, no_color=True))
    return printed


def compared(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int, *, terminal: bool = True) -> str:
    """What the recorded comparison prints.

    Args:
        monkeypatch: Puts the console in place.
        folder: For a copy of the record.
        width: In columns.
        terminal: Or a file.
    """
    shutil.copy(RECORDED, folder / "comparison.json")
    comparison = read_comparison(folder)
    printed = console(monkeypatch, width, terminal=terminal)
    runs._print_comparison(Recipe(title="Four clients"), comparison.table, folder)
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())


def test_a_comparison_says_method_control_and_verdict_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = compared(monkeypatch, tmp_path, 80)
    table = said.partition("vs Retrain: over")[0]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines() if line.strip()}
    assert max(map(len, table.splitlines())) <= 80
    assert lines["original"] == "21.3 12 remembered"
    assert lines["fedquit"] == "differs 2.2 13.4 8 forgotten, 2 cannot tell, 2", "the rest is on the next line"
    assert lines["natural"] == "differs 14.1 14.1 12 remembered"
    assert len([line for line in lines.values() if "differs" in line]) == 17
    assert "…" not in said, "nothing is cut: a table that is too wide says how many columns it needs"
    assert "this table needs 167 columns" in said
    assert "≠14.8±1.7" not in said


@pytest.mark.parametrize(("width", "terminal"), [(170, True), (100, False)])
def test_a_wide_table_is_printed_where_it_fits_and_into_files(
    width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = compared(monkeypatch, tmp_path, width, terminal=terminal)
    assert "columns; the report has it" not in said
    assert ("75.4 (≠14.8±1.7)" in said) == (width == 170)


def test_the_page_on_the_comparison_shows_what_the_record_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {line.rstrip() for line in compared(monkeypatch, tmp_path, 170).splitlines()}
    page = (RECORDED.parents[1] / "docs" / "comparison.md").read_text()
    command, *blocks = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for line in "".join(blocks).splitlines():
        assert line in said, line
    recorded = json.loads(RECORDED.read_text())
    assert f"--margin {recorded['margin']} " in command
    assert f"recover.follow={recorded['recipe']['recover']['follow']} " in command
    assert f"{recorded['code']['version']} at {recorded['code']['commit'][:7]}" in " ".join(page.split())
    assert not recorded["code"]["dirty"]
    assert all({"leaving", "durable"} <= line.keys() for line in recorded["table"] if line["phase"] == "recovered")


def test_a_run_fits_80_columns_and_ends_with_its_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = full()
    for row, word in zip(content["rows"], ("remembered", "forgotten within the margin") * 2, strict=True):
        row["holdout_verdict"] = word
    control = {"phase": "natural", "method": "natural", "holdout_verdict": "remembered"}
    content["rows"].append(content["rows"][3] | control)
    printed = console(monkeypatch, 80)
    Console(file=printed, width=80).print(runs._table("A client leaves", content["rows"]))
    runs._print_traces(tmp_path, json.loads(json.dumps(content)))
    said = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    assert "…" not in said
    assert " ".join(said.split()).endswith(
        "Verdict on the samples of client 2: fedquit: forgotten within the margin; Natural, the control: remembered; "
        "Original: remembered; Retrain: forgotten within the margin."
    )
    del content["rows"][3]["holdout_verdict"]
    request = RunResults.read("", content).requests[0]
    assert runs.verdicts_in_short(request) == "", "without a hold-out there is nothing to say"
