# SPDX-License-Identifier: Apache-2.0
"""What the terminal says while work goes on, and when somebody stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedquit.cli.screen import Bars, Pace
from fedquit.report import write_report
from test_cli import HERE, TINY, fedquit
from test_report import entries


def test_the_first_finished_unit_tells_how_long_all_will_take() -> None:
    times = iter([100.0, 160.0, 200.0, 400.0])
    pace = Pace(lambda: next(times))
    assert pace.left(0, 4) is None, "nothing is finished yet"
    assert pace.left(1, 4) == 180.0, "60 seconds for each of three"
    assert pace.left(2, 4) == 100.0, "100 seconds for two, and two are left"
    assert pace.left(4, 4) is None, "nothing is left"


def test_units_that_were_done_before_do_not_count() -> None:
    times = iter([0.0, 30.0])
    pace = Pace(lambda: next(times))
    assert pace.left(5, 10) is None
    assert pace.left(6, 10) == 120.0


def test_the_line_of_all_runs_has_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Bars("Sweep")
    bars._pace = Pace(iter([0.0, 90.0, 7200.0]).__next__)
    with bars:
        bars.runs(0, 3, "lr 0.1")
        bars.runs(1, 3, "lr 0.2")
        bars.runs(2, 3, "lr 0.3")
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "[0/3] lr 0.1",
        "[1/3] lr 0.2; about 3 min left for all",
        "[2/3] lr 0.3; about 60 min left for all",
    ]


def test_a_stopped_command_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(TINY.replace("rounds = 2\n", "rounds = 100000\n"))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # though a parent may ignore it
    command = [sys.executable, "-u", "-c", f"{heard}; from fedquit.cli import main; main()"]
    command += ["run", "long.toml", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "round 10" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "Stopped. The same command goes on where it stopped."
    assert "Traceback" not in said


def test_a_sweep_tells_its_pace_and_leaves_a_page(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    done = fedquit("sweep", "tiny.toml", "--out", "s", "--lr", "1e-4,1e-3", where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[0/2] lr 0.0001\n" in done.stderr
    assert "[1/2] lr 0.001; about " in done.stderr
    assert "Report: s/report.html" in done.stdout
    html = (tmp_path / "s/report.html").read_text()
    assert entries(html)["Verdict"].startswith(("Take lr = ", "No rate can be named: "))
    write_report([tmp_path / "s/lr-0.0001", tmp_path / "s/lr-0.001"], tmp_path / "two.html")
    assert "<h1>tiny</h1>" in (tmp_path / "two.html").read_text()
