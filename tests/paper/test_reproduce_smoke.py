# SPDX-License-Identifier: Apache-2.0
"""From runs to the pages of `fedquit paper`, end to end at toy size on a CPU (`make reproduce-smoke`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.running.recipe import load
from fedquit.running.runner import run
from fedquit.running.smoke import smoke


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one setting of the paper: two methods and two targets, and one with a hold-out that goes on training."""
    folder = tmp_path_factory.mktemp("study")
    cache = tmp_path_factory.mktemp("cache")
    whole = load("settings/shakespeare")
    for method in ("fedquit", "not"):
        section = whole.method if method == "fedquit" else {"name": method}
        for target in (0, 1):
            event = replace(whole.request[0], clients=(target, 1 - target))
            recipe = smoke(replace(whole, method=section, request=(event,)))
            event = replace(recipe.request[0], clients=(target,))
            run(replace(recipe, request=(event,)), folder / "units" / f"{method}-{target}", cache=cache)
    followed = smoke(replace(whole, data=replace(whole.data, holdout=0.2)))
    recover = replace(followed.recover, follow=5, control=True)
    run(replace(followed, recover=recover), folder / "units" / "followed", cache=cache)
    return folder


def test_the_pages_are_made_from_runs_and_hold_their_numbers(units: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", str(units), "--out", str(tmp_path), "--smoke", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["markdown"] == str(tmp_path / "reproduction.md")
    page = (tmp_path / "reproduction.md").read_text()
    assert "their numbers mean nothing" in page
    rows = [json.loads((units / f"units/fedquit-{i}/results.json").read_text())["rows"] for i in (0, 1)]
    mean = sum(row["test_acc"] for each in rows for row in each if row["phase"] == "recovered") / 2
    (line,) = (line for line in page.splitlines() if line.startswith("| FedQUIT | 2 | ") and "57.9 ± 0.2" in line)
    assert f"{mean:.1f} (57.9 ± 0.2" in line
    assert "| NoT | 2 | " in page
    assert "Not run yet: MoDe, FedAU, FedOSD." in page
    assert "over 2 targets. At least 5 targets are needed." in page


def test_what_lasts_and_samples_or_classes_fill_from_the_run_with_a_holdout(units: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", str(units), "--out", str(tmp_path), "--smoke"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "reproduction.md").read_text()
    lasting, _, rest = page.partition("## What lasts")[2].partition("## What it costs")
    assert "hold-out 35 %" in lasting
    (line,) = (line for line in lasting.splitlines() if line.startswith("| fedquit |"))
    rows = {row["phase"]: row for row in json.loads((units / "units/followed/results.json").read_text())["rows"]}
    later = abs(rows["recovered"]["forget_acc_after_5"] - rows["retrained"]["forget_acc"])
    assert f"| {later:.1f} (Natural " in line
    assert "| Original |" in rest.partition("## Samples or classes")[2]
    assert "No record" not in lasting
    assert "2 targets" in rest.partition("## Samples or classes")[0]


def test_without_smoke_such_records_stand_beside_no_number(units: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", str(units), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "reproduction.md").read_text()
    assert "None of the 56 findings that FedQUIT's paper states has a record yet." in page
    said = " ".join(page.partition("Beside no number of the paper: ")[2].partition(".\n")[0].split())
    assert said.startswith("units/fedquit-0/results.json, units/fedquit-1/results.json, ")
    assert said.endswith(" and 2 more, because it is of no setting of the paper")
