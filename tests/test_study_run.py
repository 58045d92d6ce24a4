# SPDX-License-Identifier: Apache-2.0
"""A study is stopped, killed, copied and continued, and ends with the same records."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedquit.core import Federation, Request, State, Trained
from fedquit.core.method import Method
from fedquit.errors import FedquitError, StoreError
from fedquit.results.folders import open_folders
from fedquit.results.study_folder import PlannedUnit, StudyFolder, estimate, study_status
from fedquit.running.deadline import StopAtRoundEnd, TimeIsUpError
from fedquit.running.training_cache import Silent
from fedquit.studies.execution import LocalProcesses
from fedquit.studies.workers import WorkerLostError
from study_world import RECIPE, Quiet, carried_out, planned, records
from test_kill import HERE, environment

ONE: dict[str, Any] = {"recipe": "tiny.toml", "targets": [0], "methods": ["fedquit"]}


@dataclass(frozen=True)
class Raise(Method):
    """A method that fails unless a file says otherwise."""

    unless: str = ""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if not Path(self.unless).exists():
            raise RuntimeError("the dog ate the gradient")
        return state.next(state.params)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study done in one go."""
    where = tmp_path_factory.mktemp("straight")
    outcome = carried_out(planned(where), where / "out")
    assert not outcome.stopped
    return where / "out"


def test_every_unit_is_kept_with_all_that_a_verdict_needs(straight: Path) -> None:
    study = StudyFolder.read(straight)
    kinds = [unit.kind for unit in study.units]
    assert {kind: kinds.count(kind) for kind in kinds} == {"original": 2, "retrain": 4, "method": 4, "control": 2}
    for unit in study.units:
        record = study.record(unit)
        assert record is not None
        assert record["study"]["seconds"] > 0
        assert record["code"]["version"]
        assert record["computed"]["device"] == "cpu"
    comparison = study.comparison("tiny")
    assert comparison is not None
    assert [line.method for line in comparison.table] == ["original", "retrain", "retrain again", "fedquit", "pga"]
    forget = comparison.methods["fedquit"].verdicts["forget_acc"]
    assert forget.retrains == 2, "the verdict rests on both Retrains of each target"
    assert len(comparison.retrains) == 4
    assert {len(path) for path in comparison.controls.values()} == {1 + 1 + 2 + 1}, (
        "request, unlearning, recovery, follow"
    )


def test_the_reference_of_a_run_is_the_first_of_its_retrains(straight: Path) -> None:
    run = json.loads((straight / "units/tiny/seed-1/clients-1+2/pga/results.json").read_text())
    own = json.loads((straight / "units/tiny/retrain/clients-1+2/seed-20/results.json").read_text())["rows"][0]
    retrained = next(row for row in run["rows"] if row["phase"] == "retrained")
    assert retrained["retrain_seed"] == own["retrain_seed"] == 20
    assert retrained["fingerprint"] == own["fingerprint"]
    original = json.loads((straight / "units/tiny/original/seed-1/results.json").read_text())["rows"][0]
    assert run["rows"][0]["fingerprint"] == original["fingerprint"]


def test_a_report_reads_a_study_like_comparisons(straight: Path) -> None:
    results = open_folders([straight])
    assert [comparison.folder for comparison in results.comparisons] == ["tiny"]
    assert {request.method for run in results.runs for request in run.requests} == {"fedquit", "pga"}
    assert len(results.runs) == 4


def test_weights_are_not_kept_once_all_is_done(straight: Path) -> None:
    assert list(straight.rglob("*.safetensors")) == []


def test_stopped_after_every_round_and_moved_the_records_are_the_same(straight: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    sittings = 0
    out = tmp_path / "sitting-0"
    while carried_out(plan, out, time_limit=0).stopped:
        sittings += 1
        elsewhere = tmp_path / f"sitting-{sittings}"
        shutil.copytree(out, elsewhere)
        shutil.rmtree(out)
        out = elsewhere
        if sittings in (9, 30):
            shutil.rmtree(out / "state")  # the weights were not copied
    assert sittings > 20
    assert records(out) == records(straight)


def test_a_stop_stores_a_round_that_would_not_have_been_stored(tmp_path: Path) -> None:
    plan = planned(tmp_path, ONE)
    carried_out(plan, tmp_path / "out", time_limit=0)
    (file,) = (tmp_path / "out/state/trainings").glob("*/state.safetensors")
    before = file.stat().st_mtime_ns
    assert carried_out(plan, tmp_path / "out", time_limit=0).stopped
    assert file.stat().st_mtime_ns > before


def test_several_processes_give_the_same_records(straight: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert carried_out(plan, tmp_path / "out", workers="2", time_limit=1e-3).stopped
    outcome = carried_out(plan, tmp_path / "out", workers="2")
    assert not outcome.stopped
    assert records(tmp_path / "out") == records(straight)


def test_a_process_that_is_lost_loses_one_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalProcesses.finished
    lost: list[str] = []

    def losing(self: LocalProcesses) -> Any:
        name, answer = real(self)
        if not lost:
            lost.append(name)
            return name, WorkerLostError("it was killed")
        return name, answer

    monkeypatch.setattr(LocalProcesses, "finished", losing)
    outcome = carried_out(planned(tmp_path, ONE), tmp_path / "out", workers="2")
    assert lost
    assert not outcome.status.failed
    assert lost[0] in outcome.status.done


def test_killed_at_every_third_write_the_records_are_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "killable_study.py"), str(tmp_path / "work"), "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["tried"] > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_write_the_records_are_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "killable_study.py"), str(tmp_path / "work"), "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["faults"] == []


def test_an_original_that_comes_out_differently_is_refused_in_a_sentence(tmp_path: Path) -> None:
    plan = planned(tmp_path, ONE)
    out = tmp_path / "out"
    while not (out / "units/tiny/original/seed-0/results.json").exists():
        carried_out(plan, out, time_limit=0)
    path = out / "units/tiny/original/seed-0/results.json"
    record = json.loads(path.read_text())
    record["rows"][0]["fingerprint"] = "0" * 32
    path.write_text(json.dumps(record))
    with pytest.raises(FedquitError, match="Original of tiny/seed-0/client-0/fedquit was trained again and is another"):
        carried_out(plan, out)
    assert not (out / "units/tiny/seed-0/client-0/fedquit/results.json").exists()


def test_a_method_that_raises_is_a_failed_unit_and_can_be_tried_again(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    bad = {"name": "test_study_run:Raise", "options": {"unless": str(mended)}}
    plan = planned(tmp_path, {**ONE, "method": [bad]})
    out = tmp_path / "out"
    outcome = carried_out(plan, out)
    assert not outcome.stopped
    (failed,) = outcome.status.failed
    assert outcome.status.failed[failed] == "RuntimeError: the dog ate the gradient"
    assert "tiny/seed-0/client-0/fedquit" in outcome.status.done, "the others go on"
    comparison = StudyFolder.read(out).comparison("tiny")
    assert comparison is not None
    assert [one["why"] for one in comparison.failed] == ["RuntimeError: the dog ate the gradient"]
    mended.touch()
    again = Quiet()
    assert carried_out(plan, out, overview=again).status.failed, "a failed unit is not run again unasked"
    assert not any("Raise" in title for title in again.titles)
    outcome = carried_out(plan, out, retry_failed=True)
    assert not outcome.status.failed
    assert failed in outcome.status.done


def test_what_waits_for_a_failed_unit_is_said_to_wait(tmp_path: Path) -> None:
    lost = {**ONE, "name": "lost", "set": ['data.name="cifar100"', "data.options={}"]}
    plan = planned(tmp_path, lost, ONE)
    outcome = carried_out(plan, tmp_path / "out")
    (why,) = {why for name, why in outcome.status.failed.items() if "original" in name}
    assert "cifar100" in why
    assert outcome.status.blocked["lost/seed-0/client-0/fedquit"] == "lost/original/seed-0"
    assert "tiny/seed-0/client-0/fedquit" in outcome.status.done


def test_a_study_may_grow_and_runs_only_what_is_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    carried_out(planned(tmp_path, ONE), out)
    before = records(out)
    grown = planned(tmp_path, {**ONE, "methods": ["fedquit", "pga"], "control": True})
    overview = Quiet()
    assert not carried_out(grown, out, overview=overview).stopped
    assert overview.titles == ["tiny/seed-0/client-0/pga", "tiny/seed-0/client-0/control", "done"]
    assert {name: record for name, record in records(out).items() if name in before} == before


def test_a_control_grows_with_the_longest_method(tmp_path: Path) -> None:
    out = tmp_path / "out"
    control = out / "units/tiny/seed-0/client-0/control/results.json"
    carried_out(planned(tmp_path, {**ONE, "control": True}), out)
    assert json.loads(control.read_text())["rows"][0]["rounds"] == 3
    longer = {"name": "mode", "options": {"unlearning_rounds": 3, "degradation_rounds": 1}}
    carried_out(planned(tmp_path, {**ONE, "control": True, "method": [longer]}), out)
    longest = json.loads(
        (control.parent.parent / "mode-unlearning_rounds=3-degradation_rounds=1/results.json").read_text()
    )
    rounds = {row["phase"]: row["rounds"] for row in longest["rows"]}
    assert json.loads(control.read_text())["rows"][0]["rounds"] == rounds["unlearned"] + rounds["recovered"] > 3


def test_results_of_another_recipe_are_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    carried_out(planned(tmp_path, ONE), out)
    with pytest.raises(StoreError, match="another recipe"):
        carried_out(planned(tmp_path, {**ONE, "set": ["train.lr=0.2"]}), out)


def test_records_of_other_code_are_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    plan = planned(tmp_path, ONE)
    carried_out(plan, out)
    path = out / "units/tiny/original/seed-0/results.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "code": {"version": "0.0.1"}}))
    with caplog.at_level("WARNING", logger="fedquit"):
        outcome = carried_out(plan, out)
    assert "0.0.1" in caplog.text
    assert "0.0.1" in outcome.status.codes
    assert not outcome.status.missing


def test_a_reporter_stops_only_after_a_new_round() -> None:
    reporter = StopAtRoundEnd(Silent(), lambda: True)
    reporter.phase("training", 10, 4)
    reporter.round(4, "where a recovery stood")
    with pytest.raises(TimeIsUpError):
        reporter.round(5, "")


def test_the_estimate_takes_the_units_that_are_most_alike() -> None:
    def unit(name: str, kind: str, setting: str, method: str = "") -> PlannedUnit:
        return PlannedUnit(name, kind, setting, 0, method=method)

    units = [
        unit("a", "method", "one", "pga"),
        unit("b", "method", "one", "fedquit"),
        unit("c", "method", "two", "fedquit"),
        unit("d", "original", "one"),
    ]
    seconds = {"a": 10.0, "b": 20.0, "c": 40.0}
    assert estimate(unit("x", "method", "one", "pga"), units, seconds) == 10.0
    assert estimate(unit("x", "method", "one", "not"), units, seconds) == 15.0
    assert estimate(unit("x", "method", "three", "not"), units, seconds) == pytest.approx(70 / 3)
    assert estimate(unit("x", "original", "one"), units, seconds) is None


def test_the_status_says_what_is_missing(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    out = tmp_path / "out"
    while not (out / "units/tiny/original/seed-0/results.json").exists():
        assert carried_out(plan, out, time_limit=0).stopped
    status = study_status(StudyFolder.read(out))
    assert status.done == ("tiny/original/seed-0",)
    assert len(status.missing) == 11
    assert status.unknown == 10, "the other Original is like the finished one"
    assert status.seconds_left == pytest.approx(status.seconds_spent)


def command(*words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fedquit", "study", *words]
    env = {**environment(), "COLUMNS": "120"}
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_says_that_it_is_not_finished_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    study = tmp_path / "study.toml"
    study.write_text('[[block]]\nrecipe = "tiny.toml"\nmethods = ["fedquit"]\n')
    words = ["run", str(study), "--out", str(tmp_path / "out")]
    first = command(*words, "--time-limit", "0")
    said, _ = first.communicate()
    assert first.returncode == 3
    assert "The same command goes on." in said
    asked = command("status", str(tmp_path / "out"), "--json")
    status = json.loads(asked.communicate()[0])
    assert asked.returncode == 0
    assert len(status["missing"]) == 3
    last = command(*words)
    said, _ = last.communicate()
    assert last.returncode == 0
    assert "nothing is left to run" in said


def test_a_machine_that_is_taken_away_stops_the_study_cleanly(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE.replace("rounds = 3", "rounds = 100000"))
    study = tmp_path / "study.toml"
    study.write_text('[[block]]\nrecipe = "tiny.toml"\nmethods = ["fedquit"]\n')
    process = command("run", str(study), "--out", str(tmp_path / "out"))
    while process.poll() is None and not list((tmp_path / "out").rglob("state.safetensors")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, wrong = process.communicate()
    assert process.returncode == 3, wrong
    assert "Not finished" in said


@pytest.mark.timeout(600)
def test_the_smoke_study_runs_end_to_end(tmp_path: Path) -> None:
    """What `make reproduce-smoke` runs: every kind of unit, on real images, and the report over them."""
    process = command("run", "smoke", "--out", str(tmp_path / "out"), "--json")
    said, wrong = process.communicate()
    assert process.returncode == 0, wrong
    status = json.loads(said)
    assert not status["missing"]
    assert not status["failed"]
    report = [sys.executable, "-m", "fedquit", "report", str(tmp_path / "out")]
    assert subprocess.run(report, env=dict(environment()), check=False, capture_output=True).returncode == 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
