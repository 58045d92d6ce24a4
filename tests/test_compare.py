# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import stat
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from fedquit.cli import main
from fedquit.cli.runs import _print_comparison
from fedquit.core import Federation, Request, State, Trained
from fedquit.core.method import Method
from fedquit.data import Dataset, load_dataset
from fedquit.errors import FedquitError, InputError, UnknownNameError
from fedquit.inference.gaps import Margin
from fedquit.methods import METHODS
from fedquit.report import write_report
from fedquit.results.comparison import Outcome, RetrainAgain, compare_outcomes, named
from fedquit.results.summary import MethodSummary
from fedquit.results.verdicts import PAIRED
from fedquit.running.training_cache import Silent
from fedquit.studies.comparison import chosen_methods, compare, default_targets, parse_targets, seeds_of
from fedquit.studies.workers import WorkerLostError, WorkerPool
from worlds import TINY, tiny


@dataclass(frozen=True)
class Breaks(Method):
    """A method that fails, for one client or for all."""

    on: int = 1

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if self.on in request.clients:
            raise ZeroDivisionError("it does not work")
        return state.next(state.params)


class Dies(Method):
    """A method that takes its process with it."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        os.kill(os.getpid(), signal.SIGKILL)
        return state


class Quiet:
    def __init__(self) -> None:
        self.titles: list[str] = []

    def phase(self, title: str, rounds: int | None, done: int) -> None: ...

    def round(self, done: int, note: str) -> None: ...

    def runs(self, done: int, total: int, title: str) -> None:
        self.titles.append(f"{done}/{total} {title}")

    def lane(self, number: int) -> Any:
        return self


def recipe(**changes: Any) -> Any:
    return tiny(recover={"until": "retrained", "max_rounds": 2}, **changes)


def test_one_training_serves_all_methods_and_every_retrain_serves_all_of_them(tmp_path: Path) -> None:
    methods = ["fedquit", "federaser", "pga", "fukd", "natural"]
    watch = Quiet()
    lines, outcomes = compare(recipe(), methods, [0, 1], 1, tmp_path, overview=watch)
    assert not any(o.failure for o in outcomes)
    trainings = len(list((tmp_path / "cache").iterdir()))
    assert trainings == 5, "Original, Retrain for each of two clients, and each again for the noise floor"
    assert [line.method for line in lines] == ["original", "retrain", "retrain again", *methods]
    assert all(line.runs == 2 for line in lines)
    assert watch.titles[0] == "0/14 fedquit, client 0, seed 0"
    assert watch.titles[-3:-1] == ["12/14 control, client 0, seed 0", "13/14 control, client 1, seed 0"]
    assert watch.titles[-1] == "14/14 done"


def test_processes_side_by_side_find_what_one_finds(tmp_path: Path) -> None:
    methods, alone, beside = ["federaser", "test_compare:Breaks"], tmp_path / "one", tmp_path / "two"
    one = compare(recipe(), methods, [0, 1], 1, alone, overview=Quiet(), jobs=1)
    watch = Quiet()
    two = compare(recipe(), methods, [0, 1], 1, beside, overview=watch, jobs=2)
    assert [o.key for o in two[1]] == [o.key for o in one[1]]
    for a, b in zip(one[1], two[1], strict=True):
        assert b.failure == a.failure
        assert [untimed(row) for row in b.rows] == [untimed(row) for row in a.rows]
    assert [line.gaps for line in two[0]] == [line.gaps for line in one[0]]
    trained = [{p.name for p in (folder / "cache").iterdir()} for folder in (alone, beside)]
    assert trained[0] == trained[1], "each federation once"
    assert [line.natural for line in two[0]] == [line.natural for line in one[0]]
    assert one[0][3].natural, "the control ran"
    assert watch.titles[0] == "0/8 2 processes"
    assert watch.titles[-1] == "8/8 done"


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "seconds"}


def test_a_process_that_dies_is_a_line_that_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    lines, outcomes = compare(recipe(), ["fedquit", "test_compare:Dies"], [0, 1], 1, tmp_path, overview=Quiet(), jobs=2)
    assert [bool(o.failure) for o in outcomes] == [False, True, False, True]
    assert "the process at work on it ended with -9" in outcomes[1].failure
    assert lines[-2].runs == 2


def in_a_folder(*, folder: str = "") -> Dataset:
    """A data set that lies where only the command line says."""
    assert (Path(folder) / "here").exists()
    return load_dataset("synthetic", **TINY["data"]["options"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_process_finds_the_data_where_the_command_line_says(jobs: int, tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    given = recipe(data={"name": "test_compare:in_a_folder", "options": {}, "folder": str(tmp_path)})
    _, outcomes = compare(given, ["natural"], [0], 1, tmp_path / "out", overview=Quiet(), jobs=jobs)
    assert not outcomes[0].failure


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_asked_it() -> None:
    """Or it would hold the locks of what it was at."""
    beginning = (
        "import sys, time\n"
        "from fedquit.running.training_cache import Silent\n"
        "from fedquit.studies.workers import WorkerPool\n"
    )
    asking = beginning + (
        "with WorkerPool('test_compare:sleeps', 1, lambda n: Silent()) as one:\n"
        "    print([process for _, process in one.run([{}])])\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen([sys.executable, "-c", asking], env={**os.environ, "PYTHONPATH": paths})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        process.wait()
        pytest.skip("this system does not tell a process's children")
    waited = time.monotonic() + 60
    while not (found := children_of(process.pid)) and time.monotonic() < waited:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while alive(found[0]) and time.monotonic() < waited:
        time.sleep(0.05)
    assert not alive(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("word", ["cut", "dies"])
def test_a_process_that_breaks_off_in_the_middle_is_no_reason_to_wait_for_ever(word: str) -> None:
    with WorkerPool("test_compare:breaks_off", 1, lambda _: Silent()) as one:
        found = dict(one.run([{"how": word}, {"how": "well"}]))
    assert isinstance(found[0], WorkerLostError)
    assert found[1] == {"how": "well"}


def breaks_off(task: dict[str, Any], reporter: object) -> dict[str, Any]:
    if task["how"] == "cut":  # in the middle of an answer
        pipe = next(fd for fd in range(3, 64) if is_pipe(fd))
        os.write(pipe, b'{"answer": {"how')
    if task["how"] != "well":
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


@pytest.mark.slow
def test_nothing_begins_once_it_is_over() -> None:
    before = set(children_of(os.getpid()))
    with WorkerPool("test_compare:sleeps", 2, lambda _: Silent()) as two:
        threading.Thread(target=lambda: list(two.run([{}] * 6)), daemon=True).start()
        waited = time.monotonic() + 60
        while len(set(children_of(os.getpid())) - before) < 2 and time.monotonic() < waited:
            time.sleep(0.05)
    time.sleep(0.5)
    assert not [pid for pid in children_of(os.getpid()) if pid not in before and alive(pid)]


def test_a_process_that_is_just_starting_ends_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before anybody holds its handle, and the end may come in between."""
    begun, real = threading.Event(), subprocess.Popen
    started: list[subprocess.Popen[str]] = []

    def slowly(*given: Any, **named: Any) -> Any:
        started.append(real(*given, **named))
        begun.set()
        time.sleep(0.5)
        return started[-1]

    monkeypatch.setattr("fedquit.studies.workers.subprocess.Popen", slowly)
    with WorkerPool("test_compare:sleeps", 1, lambda _: Silent()) as one:
        threading.Thread(target=lambda: list(one.run([{}] * 3)), daemon=True).start()
        assert begun.wait(60)
    time.sleep(0.2)
    assert [process.poll() is not None for process in started] == [True]


def sleeps(task: dict[str, Any], reporter: object) -> dict[str, Any]:
    time.sleep(600)
    return task


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and ") Z " not in status.read_text()


def test_budgets_are_summed_up_over_the_runs_that_they_pay_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tiny(recover={"until": "rounds", "max_rounds": 1, "budgets": [0.05, 0.9]}, train={"rounds": 4})
    lines, _ = compare(given, ["fedquit", "mode"], [0, 1], 1, tmp_path, overview=Quiet())
    bought = {line.method: line.budgets for line in lines if line.phase == "recovered"}
    assert bought["fedquit"].keys() == {"0.05", "0.9"}
    assert bought["fedquit"]["0.05"]["runs"] == 0, "less than its unlearning costs"
    later = bought["fedquit"]["0.9"]
    assert later["runs"] == 2
    assert 0.5 < later["spent"] <= 0.9
    assert later["forget_acc_gap"] >= 0
    _print_comparison(given, lines, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "within a share of Retrain's bytes" in said
    assert "out of reach" in said


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    compare(recipe(), ["fedquit"], [0], 1, tmp_path, overview=Quiet())
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    lines, _ = compare(recipe(), ["fedquit"], [0, 1], 2, tmp_path, overview=Quiet())
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert {p: after[p] for p in stamps} == stamps
    assert lines[-1].runs == 4


def test_every_target_has_its_own_original_where_retrain_has_several_seeds(tmp_path: Path) -> None:
    watch = Quiet()
    lines, outcomes = compare(recipe(), ["natural"], [0, 1], 1, tmp_path, overview=watch, retrain_seeds=2)
    assert [(o.target, o.seed) for o in outcomes] == [(0, 0), (1, 1)]
    assert len(list((tmp_path / "cache").iterdir())) == 2 + 2 + 2 * 2, "Originals, their Retrains, and two more of each"
    assert watch.titles[2] == "2/8 Retrain 1 of 2, client 0, seed 0"
    verdict = lines[-1].verdicts["forget_acc"]
    assert (verdict.design, verdict.targets, verdict.runs, verdict.retrains) == ("own", 2, 1, 2)
    stored = json.loads((tmp_path / "comparison.json").read_text())["retrains"]
    assert [(row["clients"], row["seed"]) for row in stored] == [
        ([0], 1_000_003),
        ([0], 2_000_006),
        ([1], 1_000_004),
        ([1], 2_000_007),
    ]
    again = next(line for line in lines if line.phase == "floor")
    pairs = [(o.at("retrained"), row) for o in outcomes for row in stored if row["clients"] == [o.target]]
    apart = [abs(one["forget_acc"] - other["forget_acc"]) for one, other in pairs]
    assert again.gaps["forget_acc"] == pytest.approx(statistics.fmean(apart))
    assert lines[-1].spread["forget_acc"] == pytest.approx(statistics.fmean(apart))

    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    given: dict[str, Any] = {"retrain_seeds": 3, "margin": Margin(90.0), "jobs": 2}
    lines, _ = compare(recipe(), ["natural"], [0, 1], 1, tmp_path, overview=Quiet(), **given)
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert {p: after[p] for p in stamps} == stamps, "one more Retrain of each target, and nothing else"
    assert len(list((tmp_path / "cache").iterdir())) == 2 + 2 + 2 * 3
    assert lines[-1].verdicts["test_acc"].retrains == 3
    assert lines[-1].verdicts["test_acc"].margin == 90.0
    longer = json.loads((tmp_path / "comparison.json").read_text())
    assert [row for row in longer["retrains"] if row["seed"] < 3_000_000] == stored, "as one process found them"
    assert longer["margin"] == "90"


def test_seeds_of_targets() -> None:
    assert seeds_of(5, [0, (1, 2)], 2, own=False) == {0: [5, 6], (1, 2): [5, 6]}
    assert seeds_of(5, [0, (1, 2)], 2, own=True) == {0: [5, 7], (1, 2): [6, 8]}
    more = seeds_of(5, [0, (1, 2)], 3, own=True)
    assert {target: seeds[:2] for target, seeds in more.items()} == seeds_of(5, [0, (1, 2)], 2, own=True)


def test_clients_that_leave_together_are_one_target(tmp_path: Path) -> None:
    methods, watch = ["fedquit", "natural", "test_compare:Breaks"], Quiet()
    lines, outcomes = compare(recipe(), methods, [(0, 1), (2, 3), 0], 1, tmp_path, overview=watch)
    assert {tuple(o.rows[0]["clients"]) for o in outcomes if o.rows} == {(0, 1), (2, 3), (0,)}
    assert [line.runs for line in lines] == [3, 3, 3, 3, 3, 2]
    assert lines[4].against_first["forget_acc"].units == 3
    assert watch.titles[0] == "0/15 fedquit, clients 0 and 1, seed 0"
    folders = {path.name for path in (tmp_path / "seed-0").iterdir()}
    assert folders == {"clients-0+1", "clients-2+3", "client-0"}
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [(f["target"], f["why"]) for f in written["failed"]] == [([0, 1], "ZeroDivisionError: it does not work")]
    for known in (written, {k: v for k, v in written.items() if k != "runs"}):
        (tmp_path / "comparison.json").write_text(json.dumps(known))
        write_report([tmp_path], tmp_path / "r.html")
        html = unescape((tmp_path / "r.html").read_text())
        assert ">Clients 0 and 1<" in html
        assert ">Clients 2 and 3<" in html
        assert "(clients 0 and 1, seed 0)" in html
    write_report([tmp_path / "seed-0/clients-0+1/fedquit"], tmp_path / "r.html")
    assert "two Retrains differ by" in (tmp_path / "r.html").read_text(), "it finds the comparison above it"


def test_a_group_may_take_back_a_part_of_its_samples(tmp_path: Path) -> None:
    part = [{"clients": [3, 1], "samples": 0.25}]
    given = recipe(request=part)
    assert default_targets(given) == [(1, 3)]
    _, outcomes = compare(given, ["natural"], default_targets(given), 1, tmp_path, overview=Quiet())
    assert not outcomes[0].failure
    row = outcomes[0].at("recovered")
    assert (row["clients"], row["samples"]) == ([1, 3], True)


def test_everybody_leaves_in_turn(tmp_path: Path) -> None:
    _, outcomes = compare(recipe(), ["natural"], parse_targets("all"), 1, tmp_path, overview=Quiet())
    assert [o.target for o in outcomes] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("targets", "changes", "sentence"),
    [
        ("0,99", {}, "client 99 is not in the federation: its clients are 0, 1, 2, 3"),
        ("0,1+1", {}, "names a client twice"),
        ("0+1,0+1+2+3", {}, "names every client"),
        ("0,99", {"request": [{"clients": [0], "samples": 0.5}]}, "client 99 is not in the federation"),
        ("0", {"request": [{"clients": [0], "samples": 0.99}]}, "is everything it has"),
        ("0", {"request": [{"clients": [0]}, {"clients": [1]}]}, "carry it out with `fedquit run`"),
        ("0", {"request": [{"clients": [0], "kind": "join"}]}, "carry it out with `fedquit run`"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_first_run(
    targets: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    watch = Quiet()
    with pytest.raises(FedquitError, match=sentence):
        compare(recipe(**changes), ["natural"], parse_targets(targets), 1, tmp_path / "out", overview=watch)
    assert watch.titles == []
    assert not (tmp_path / "out").exists()


def test_a_retrain_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--retrain-seeds is 0: it must be at least 1"):
        compare(recipe(), ["natural"], [0], 1, tmp_path / "out", overview=Quiet(), retrain_seeds=0)
    assert not (tmp_path / "out").exists()


def test_a_method_that_fails_is_a_line_that_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    methods = ["test_compare:Breaks", "fedquit"]
    lines, outcomes = compare(recipe(), methods, [0, 1], 1, tmp_path, overview=Quiet())
    broken, whole = lines[3:]
    assert (broken.runs, broken.failures) == (1, ("ZeroDivisionError: it does not work",))
    assert (whole.runs, whole.failures) == (2, ())
    assert [o.failure for o in outcomes if o.method == "fedquit"] == ["", ""]
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["failed"] == [
        {"method": "test_compare:Breaks", "target": 1, "seed": 0, "why": "ZeroDivisionError: it does not work"}
    ]


def test_a_damaged_run_fails_alone(tmp_path: Path) -> None:
    compare(recipe(), ["fedquit", "natural"], [0], 1, tmp_path, overview=Quiet())
    path = tmp_path / "seed-0" / "client-0" / "fedquit" / "request-0" / "unlearned.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    lines, _ = compare(recipe(), ["fedquit", "natural"], [0], 1, tmp_path, overview=Quiet())
    assert "is damaged" in lines[3].failures[0]
    assert lines[4].runs == 1


def test_a_history_that_does_not_fit_refuses_that_method_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = dataclasses.make_dataclass("usage", ["free"])(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    lines, _ = compare(recipe(), ["federaser", "fedquit"], [0], 1, tmp_path, overview=Quiet())
    assert "federaser would keep a history of" in lines[3].failures[0]
    assert "where 1,000 are free" in lines[3].failures[0]
    assert lines[4].runs == 1


def test_the_exit_code_tells_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(
        '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\n[train]\nrounds = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    for methods, code in (("fedquit,fukd", 1), ("fedquit", 0)):
        words = ["compare", "r.toml", "--methods", methods, "--targets", "0", "--jobs", "1", "--out", "c"]
        monkeypatch.setattr("sys.argv", ["fedquit", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        printed = capsys.readouterr().out
        assert "fedquit" in printed
    monkeypatch.setattr(
        "sys.argv", ["fedquit", "compare", "r.toml", "--methods", "fedquit", "--jobs", "1", "--out", "c", "--json"]
    )
    with pytest.raises(SystemExit):
        main()
    table = json.loads(capsys.readouterr().out)["table"]
    assert [line["method"] for line in table] == ["original", "retrain", "retrain again", "fedquit"]


def outcome(method: str, target: int, forget: tuple[float, float, float], spent: int, epochs: float) -> Outcome:
    original, retrained, recovered = forget

    def row(phase: str, forget_acc: float, cost: int = 0, work: float = 0.0) -> dict[str, Any]:
        accuracies = {"test_acc": 80.0, "retain_acc": None, "forget_acc": forget_acc}
        costs = {"down_bytes": cost // 2, "up_bytes": cost // 2, "client_epochs": work, "client_flops": 7 * cost}
        return {"phase": phase, "rounds": target, **accuracies, **costs}

    rows = [row("original", original), row("retrained", retrained, 1000, 100.0)]
    rows += [row("unlearned", 5.0, spent, epochs), row("recovered", recovered, spent, epochs)]
    return Outcome(method, target, 0, Path(), tuple(rows))


def test_the_table_by_hand() -> None:
    found = [
        outcome("a", 1, (90.0, 50.0, 53.0), 50, 10.0),
        outcome("a", 2, (90.0, 60.0, 55.0), 50, 15.0),
        outcome("free", 1, (90.0, 50.0, 90.0), 0, 0.0),
        dataclasses.replace(outcome("free", 2, (90.0, 60.0, 90.0), 0, 0.0), failure="no", rows=()),
    ]
    floor: RetrainAgain = {(t, 0): {**found[0].at("retrained"), "forget_acc": acc} for t, acc in ((1, 54.5), (2, 60.5))}
    original, retrain, again, a, free = compare_outcomes(found, ["a", "free"], floor)
    assert again.gaps["forget_acc"] == 2.5
    assert {key: verdict.word for key, verdict in a.verdicts.items()} == dict.fromkeys(a.gaps, "cannot tell")
    assert "one Retrain shows no spread" in a.verdicts["forget_acc"].reason
    assert original.means == {"test_acc": 80.0, "forget_acc": 90.0}
    assert retrain.means["forget_acc"] == 55.0
    assert a.means["forget_acc"] == 54.0
    assert a.gaps == {"test_acc": 0.0, "forget_acc": 4.0}, "the mean of |53 - 50| and |55 - 60|, not |54 - 55|"
    assert a.deviations["forget_acc"] == pytest.approx(statistics.stdev([3.0, 5.0]))
    assert a.unlearned["forget_acc"] == 5.0
    assert a.recovery_rounds == 1.5
    assert a.bytes_saved == 10.0
    assert a.epochs_saved == 4.0
    assert a.flops_saved == 10.0
    assert (free.runs, free.bytes_saved, free.failures) == (1, None, ("no",))
    assert math.isclose(free.gaps["forget_acc"], 40.0)
    assert isinstance(free, MethodSummary)


def gaps_of(method: str, sizes: dict[tuple[int, int], float]) -> list[Outcome]:
    """Runs whose forget accuracy lies so far above Retrain's."""
    rows = {at: outcome(method, at[0], (90.0, 50.0, 50.0 + size), 50, 1.0) for at, size in sizes.items()}
    return [dataclasses.replace(o, seed=seed) for (_, seed), o in rows.items()]


def test_methods_are_compared_with_the_first_target_by_target() -> None:
    targets = (1, 2, 3, 4)
    found = gaps_of("a", {(t, t): float(t) for t in targets})
    found += gaps_of("worse", {(t, t): t + size for t, size in zip(targets, (5.0, 6.0, 5.5, 5.2), strict=True)})
    found += gaps_of("alike", {(t, t): t + size for t, size in zip(targets, (5.0, -0.5, -0.5, -0.5), strict=True)})
    for o in found:
        o.at("recovered")["forget_js"] = {"a": 0.1, "worse": 0.3, "alike": 0.1}[o.method]
    first, worse, alike = [
        line for line in compare_outcomes(found, ["a", "worse", "alike"], {}) if line.phase == "recovered"
    ]
    assert first.against_first == {}
    pair = worse.against_first["forget_acc"]
    assert pair.mean == pytest.approx(5.425)
    half = 3.182446 * statistics.stdev((5.0, 6.0, 5.5, 5.2)) / 2  # Student's with three degrees of freedom
    assert pair.low == pytest.approx(5.425 - half, abs=1e-4)
    assert pair.high == pytest.approx(5.425 + half, abs=1e-4)
    assert (pair.units, pair.different) == (4, True)
    alone = 2 * scipy.stats.t.sf(5.425 / (half / 3.182446), 3)
    tests = sum(key in PAIRED for line in (worse, alike) for key in line.against_first)
    assert pair.p == pytest.approx(tests * alone, rel=1e-4), "Holm's rule over methods and measures"
    assert worse.against_first["forget_js"].p is None, "it is not judged"
    assert alike.against_first["forget_acc"].different is False
    assert worse.against_first["test_acc"].mean == 0.0
    assert worse.against_first["forget_js"].mean == pytest.approx(0.2)
    assert "avg_gap" not in worse.against_first, "a run without the attacks has no average"
    shared = [dataclasses.replace(o, seed=0) for o in found]
    pair = compare_outcomes(shared, ["a", "worse"], {})[-1].against_first["forget_acc"]
    assert (pair.units, pair.different, pair.p) == (4, False, None), "targets with one Original are not independent"


def test_tug_of_war_is_taken_run_by_run_and_the_divergence_has_a_floor() -> None:
    found = gaps_of("a", {(1, 0): 0.0, (2, 0): 40.0})
    for o, apart in zip(found, (0.1, 0.3), strict=True):
        for row in o.rows:
            row["retain_acc"] = 70.0
        o.at("recovered")["forget_js"] = apart
    again: RetrainAgain = {(t, 0): {**found[0].at("retrained"), "forget_js": js} for t, js in ((1, 0.25), (2, 0.2))}
    *_, floor, a = compare_outcomes(found, ["a"], again)
    assert a.tug_of_war == pytest.approx((1.0 + 0.6) / 2)
    assert a.tug_of_war_mia is None
    assert a.gaps["forget_js"] == pytest.approx(0.2)
    assert floor.gaps["forget_js"] == pytest.approx(0.225)
    assert "forget_js" not in a.verdicts, "a divergence has no sign"


def test_seeds_of_one_target_are_not_counted_as_targets() -> None:
    at = [(t, s) for t in (1, 2) for s in (0, 1, 2)]
    found = gaps_of("a", dict.fromkeys(at, 1.0)) + gaps_of("b", {(t, s): 2.0 + s for t, s in at})
    *_, b = compare_outcomes(found, ["a", "b"], {})
    assert b.against_first["forget_acc"].units == 2
    assert b.against_first["forget_acc"].mean == pytest.approx(2.0)
    only = [o for o in found if o.target == 1]
    *_, b = compare_outcomes(only, ["a", "b"], {})
    assert b.against_first["forget_acc"].units == 3, "with one target its seeds are all there is"
    *_, b = compare_outcomes([o for o in only if o.seed == 0], ["a", "b"], {})
    assert b.against_first == {}, "one run cannot be compared"
    assert b.deviations == {}, "nor has it a spread"


def test_groups_are_paired_as_whole_targets_beside_single_clients() -> None:
    def together(o: Outcome) -> Outcome:
        return dataclasses.replace(o, target={1: (10, 2), 2: (10, 3)}.get(o.rows[0]["rounds"], o.target))

    at = [(t, s) for t in (1, 2, 9) for s in (0, 1)]
    found = gaps_of("a", dict.fromkeys(at, 1.0)) + gaps_of("b", {(t, s): 2.0 + t for t, s in at})
    mixed = list(map(together, found))
    assert {o.target for o in mixed} == {(10, 2), (10, 3), 9}
    (*_, plain), (*_, grouped) = (compare_outcomes(outcomes, ["a", "b"], {}) for outcomes in (found, mixed))
    assert grouped.against_first["forget_acc"].units == 3
    assert grouped.against_first["forget_acc"].mean == plain.against_first["forget_acc"].mean == pytest.approx(5)


def test_the_report_of_a_comparison_says_what_was_compared_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(
        '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\n[train]\nrounds = 1\n[recover]\nmax_rounds = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    words = ["compare", "r.toml", "--methods", "fedquit,natural,fukd", "--targets", "0,1", "--jobs", "1", "--out", "c"]
    monkeypatch.setattr("sys.argv", ["fedquit", *words, "--margin", "2"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert "natural: forget gap" in printed
    assert "= equivalent within ±2 points, unmarked: cannot tell" in printed
    assert "Cannot tell: one Retrain shows no spread; a difference can be shown with 4 targets" in printed
    assert "(--targets, --retrain-seeds, --margin)" in printed
    html = unescape((tmp_path / "c" / "report.html").read_text())
    assert "Compared pairwise, target by target" in html
    assert "less that of fedquit" in html
    assert "What failed" in html
    assert "(client 0, seed 0; client 1, seed 0)</span>: fukd needs data of the server's own" in html


def test_a_comparison_in_which_all_fails_ends_with_a_report_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.toml").write_text(
        '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\n[train]\nrounds = 1\n'
        "[[request]]\nclients = [1, 2]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedquit", "compare", "r.toml", "--methods", "fukd", "--jobs", "1", "--out", "c"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    html = (tmp_path / "c" / "report.html").read_text()
    assert "No run came through" in html
    assert "fukd needs data of the server" in html
    assert "(clients 1 and 2, seed 0)" in html, "whom the recipe names together"


def test_methods_and_targets_are_read_from_words() -> None:
    assert set(chosen_methods("all")) == set(METHODS) - {"retrain"}
    assert chosen_methods("pga, fedquit,pga") == ["pga", "fedquit"]
    assert parse_targets("3,1,3") == [3, 1]
    assert default_targets(recipe(request=[{"clients": [2]}])) == [0]
    assert parse_targets("1+0, 2+3,0 + 1,4") == [(0, 1), (2, 3), 4]
    assert [named(target) for target in (4, (0, 1), (0, 1, 2))] == ["client 4", "clients 0 and 1", "clients 0, 1 and 2"]
    with pytest.raises(UnknownNameError, match="did you mean 'federaser'"):
        chosen_methods("federeraser")
    for wrong in ("one", "0+", "", "0-1"):
        with pytest.raises(InputError, match="is not a list of clients"):
            parse_targets(wrong)
    with pytest.raises(InputError, match="at least 1"):
        compare(recipe(), ["fedquit"], [0], 0, Path("x"), overview=Quiet())
