# SPDX-License-Identifier: Apache-2.0
"""Recovery as a path: every round is a point, what follows the stop changes nothing, and Natural runs beside it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedquit.audit import evaluation as evaluating
from fedquit.cli.runs import _print_comparison, _say_price, _table
from fedquit.cli.screen import out as screen
from fedquit.core import Federation, Request, State, Trained
from fedquit.core.method import Method
from fedquit.report import tables
from fedquit.report.export import to_csv, to_json, to_latex, to_md
from fedquit.results.folders import open_folders
from fedquit.results.path import at_round
from fedquit.results.summary import group_by_method
from fedquit.results.verdicts import leaving_sentence
from fedquit.results.words import signed
from fedquit.running.runner import run
from fedquit.running.training_cache import Silent
from fedquit.studies.comparison import compare
from worlds import tiny

Row = dict[str, Any]


def by_phase(results: dict[str, Any]) -> dict[str, Row]:
    return {row["phase"]: row for row in results["rows"]}


def untimed(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "seconds"}


def accuracies(path: list[Row]) -> list[tuple[int, float, float]]:
    return [(point["round"], point["test_acc"], point["forget_acc"]) for point in path]


@dataclass(frozen=True)
class ThreeRounds(Method):
    """Makes all weights smaller, three times."""

    def rounds(self, trained: Trained, request: Request) -> int:
        return 3

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next({name: tensor * 0.9 for name, tensor in state.params.items()})


def test_every_round_from_the_request_on_is_a_point(tmp_path: Path) -> None:
    rows = by_phase(run(tiny(method={"name": "test_recovery_path:ThreeRounds"}), tmp_path / "run"))
    path = rows["recovered"]["path"]
    rounds = 3
    assert rows["unlearned"]["rounds"] == rounds
    assert [point["round"] for point in path] == list(range(rounds + 3))
    phases = ["original", *["unlearning"] * rounds, *["recovery"] * 2]
    assert [point["phase"] for point in path] == phases
    for phase, at in (("original", 0), ("unlearned", rounds), ("recovered", -1)):
        for key in ("test_acc", "retain_acc", "forget_acc", "holdout_acc", "auc"):
            assert path[at][key] == pytest.approx(rows[phase][key])
    costs = [rows[phase]["down_bytes"] + rows[phase]["up_bytes"] for phase in ("unlearned", "recovered")]
    assert [path[0]["bytes"], path[rounds]["bytes"], path[-1]["bytes"]] == [0, costs[0], sum(costs)]


def test_what_follows_the_stop_is_a_longer_recovery_and_changes_nothing(tmp_path: Path) -> None:
    events = [{"clients": [1]}, {"clients": [3]}]
    plain, followed, longer = (
        run(tiny(request=events, recover=recover), tmp_path / name, cache=tmp_path / "cache")["rows"]
        for name, recover in {
            "plain": {"max_rounds": 2},
            "followed": {"max_rounds": 2, "follow": 5, "control": True},
            "longer": {"max_rounds": 7},
        }.items()
    )
    first = next(row for row in followed if row["phase"] == "recovered")
    long = next(row for row in longer if row["phase"] == "recovered")
    assert [point["phase"] for point in first["path"][-5:]] == ["followed"] * 5
    assert accuracies(first["path"]) == accuracies(long["path"])
    logs = [(tmp_path / name / "events.jsonl").read_text() for name in ("plain", "followed")]
    assert logs[0] == logs[1], "the log is that of unlearning and recovery: the control's replies are not in it"
    assert first["test_acc_after_5"] == pytest.approx(sum(p["test_acc"] for p in first["path"][-5:]) / 5)
    same = [row for row in followed if row["phase"] != "natural"]
    for one, other in zip(plain, same, strict=True):
        for key in one.keys() - {"seconds", "path", "last_rounds"}:
            assert key.endswith("_last") or one[key] == other[key], key


@dataclass(frozen=True)
class HaltedRecovery(Method):
    """Its own recovery leaves the model as it is."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next({name: tensor * 0.5 for name, tensor in state.params.items()})

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(state.params, mark=state.params)


def test_ordinary_training_follows_a_recovery_of_the_method_s_own(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "test_recovery_path:HaltedRecovery"}, recover={"max_rounds": 2, "follow": 3})
    path = by_phase(run(recipe, tmp_path / "run"))["recovered"]["path"]
    measured = [{key: point[key] for key in ("test_acc", "forget_acc", "retain_acc", "auc")} for point in path]
    assert measured[1] == measured[2] == measured[3], "unlearned, and after two rounds of its own recovery"
    assert measured[-1] != measured[3]


def test_the_control_is_a_run_of_natural_for_as_many_rounds(tmp_path: Path) -> None:
    rows = by_phase(run(tiny(recover={"max_rounds": 2, "control": True}), tmp_path / "a", cache=tmp_path / "cache"))
    natural = tiny(method={"name": "natural"}, recover={"max_rounds": 3})
    alone = by_phase(run(natural, tmp_path / "b", cache=tmp_path / "cache"))["recovered"]
    control = rows["natural"]
    assert control["rounds"] == rows["unlearned"]["rounds"] + rows["recovered"]["rounds"] == alone["rounds"]
    assert control["fingerprint"] == alone["fingerprint"]
    assert accuracies(control["path"]) == accuracies(alone["path"])
    for key in ("test_acc", "retain_acc", "forget_acc", "holdout_acc", "auc"):
        assert rows["recovered"][f"natural_{key}"] == pytest.approx(alone[key])
    assert control["mia_yeom"] == alone["mia_yeom"], "it has all measures"
    with screen.capture() as said:
        screen.print(_table("", list(rows.values())))
    assert "natural" in said.get()
    assert "hold-out" in said.get()


def test_a_large_retain_set_is_read_in_part_after_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "RETAIN_PART", 7)
    row = by_phase(run(tiny(), tmp_path / "run"))["recovered"]
    for point in row["path"]:
        hits = point["retain_acc"] * 7 / 100
        assert hits == pytest.approx(round(hits)), "of seven examples"
    hits = row["retain_acc"] * 7 / 100
    assert hits != pytest.approx(round(hits), abs=1e-6), "the row is over all of them"


class Interrupted(Exception):
    """Stands for Ctrl-C."""


class Interrupts(Silent):
    """Stops the run at a round, whichever phase that is in."""

    def __init__(self, left: int) -> None:
        self.left = left

    def round(self, done: int, note: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted


def test_a_run_that_was_interrupted_anywhere_ends_with_the_same_path(tmp_path: Path) -> None:
    recipe = tiny(
        train={"rounds": 2},
        method={"name": "test_recovery_path:ThreeRounds"},
        recover={"max_rounds": 2, "follow": 2, "control": True},
    )
    whole = run(recipe, tmp_path / "whole", cache=tmp_path / "cache")["rows"]
    stops = 0
    while True:
        where = tmp_path / str(stops)
        try:
            run(recipe, where, cache=where / "cache", reporter=Interrupts(stops))
        except Interrupted:
            resumed = run(recipe, where, cache=where / "cache")["rows"]
            assert list(map(untimed, resumed)) == list(map(untimed, whole))
            stops += 2
        else:
            break
    assert stops > 10, "in training, unlearning, recovery, what follows and the control"


def last_rounds_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/rounds-*.json"))


def test_retrain_s_last_rounds_lie_beside_it_in_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    recipe = tiny(train={"rounds": 12})
    retrained = by_phase(run(recipe, tmp_path / "a", cache=cache))["retrained"]
    assert [point["round"] for point in retrained["path"]] == list(range(3, 13))
    assert retrained["path"][-1]["test_acc"] == pytest.approx(retrained["test_acc"])
    assert retrained["last_rounds"] == 10
    mean = sum(point["forget_acc"] for point in retrained["path"]) / 10
    assert retrained["forget_acc_last"] == pytest.approx(mean)
    (file,) = last_rounds_files(cache)
    states = {path: path.stat().st_mtime_ns for path in cache.rglob("state.safetensors")}
    file.unlink()  # as an older version left it
    paper = tiny(train={"rounds": 12}, recover={"until": "retrained", "max_rounds": 1})
    old = by_phase(run(paper, tmp_path / "paper", cache=cache))["retrained"]
    assert "path" not in old, "the paper's stop does not need them"
    again = by_phase(run(recipe, tmp_path / "b", cache=cache))["retrained"]
    assert again["path"] == retrained["path"]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("state.safetensors")} == states, "the models stay"


class Quiet(Silent):
    def runs(self, done: int, total: int, title: str) -> None: ...

    def lane(self, number: int) -> Silent:
        return self


def test_natural_stands_beside_every_method_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(recover={"until": "rounds", "max_rounds": 10, "follow": 2, "control": True})
    methods = ["fedquit", "natural", "federaser"]
    lines, outcomes = compare(recipe, methods, [0, 1], 1, tmp_path, overview=Quiet())
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["controls"].keys() == {"seed-0/client-0", "seed-0/client-1"}
    rounds = {o.method: o.at("unlearned")["rounds"] + o.at("recovered")["rounds"] for o in outcomes}
    for path in stored["controls"].values():
        assert path[-1]["round"] == max(rounds.values()) + 2, "as long as the longest path"
    by_method = {line.method: line for line in lines}
    for method in methods:
        points = [at_round(path, rounds[method]) for path in stored["controls"].values()]
        mean = sum(point["forget_acc"] for point in points if point) / 2
        assert by_method[method].natural["forget_acc"] == pytest.approx(mean)
    own = by_method["natural"]
    assert own.natural == pytest.approx(own.on_path), "the control is Natural"
    assert own.natural_last == pytest.approx(own.last)
    assert not any("natural" in row["phase"] for o in outcomes for row in o.rows), "one control serves all methods"
    _print_comparison(recipe, lines, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "The method / Natural after as many rounds" in said
    verdict = by_method["fedquit"].leaving["forget_acc"]
    assert (verdict.word, verdict.design, verdict.targets, verdict.hypotheses) == ("cannot tell", "shared", 2, 4)
    paths = [outcome.at("recovered")["path"] for outcome in outcomes if outcome.method == "fedquit"]
    stop = rounds["fedquit"]
    both = [path[stop - 9 : stop + 1] for path in (*paths, *stored["controls"].values())]
    assert {path[-1]["round"] for path in both} == {stop}, "the rounds that follow have windows of their own"
    last = [sum(point["forget_acc"] for point in path) / 10 for path in both]
    assert verdict.difference == pytest.approx((last[0] - last[2] + last[1] - last[3]) / 2)
    assert own.leaving == {}, "the control is not judged against itself"
    assert f"fedquit: {leaving_sentence(verdict)}" in said
    assert "Against Natural, cannot tell: the smallest p of 1 difference is 1, and 4 tests together need 0.013" in said
    long_enough = [line for line in lines if line.method != "federaser"]
    _print_comparison(recipe, long_enough, tmp_path)
    assert "as means over the last 10 rounds" in " ".join(capsys.readouterr().out.split())
    results = open_folders([tmp_path])
    fedquit = by_method["fedquit"]
    level = f"{fedquit.natural['forget_acc']:.1f} ({fedquit.natural_gaps['forget_acc']:.1f})"
    assert level in to_md(results)
    assert level in to_latex(results)
    exported = json.loads(to_json(results))
    (summary,) = [line for line in exported["summary"] if line["method"] == "fedquit"]
    assert summary["natural_holdout_acc"] == fedquit.natural["holdout_acc"]
    assert summary["forget_acc_last_gap"] == fedquit.last_gaps["forget_acc"]
    assert "natural_forget_acc" in to_csv(results).splitlines()[0]
    assert summary["leaving"]["forget_acc"]["word"] == "cannot tell"
    assert "forget_acc_against_natural" in to_csv(results).splitlines()[0]
    beside = tables.control(group_by_method(results.runs, results.comparisons))
    assert beside is not None
    (line,) = [line for line in beside.lines if line.head == "fedquit"]
    cell = line.cells[beside.heads.index("Against leaving") - 1]
    assert (cell.text, cell.notes) == (verdict.word, (signed(verdict.difference),))


def test_a_comparison_that_goes_on_makes_its_control_longer(tmp_path: Path) -> None:
    recipe = tiny(recover={"until": "rounds", "max_rounds": 1})
    compare(recipe, ["natural"], [0], 1, tmp_path, overview=Quiet())
    short = json.loads((tmp_path / "comparison.json").read_text())["controls"]["seed-0/client-0"]
    compare(recipe, ["natural", "federaser"], [0], 1, tmp_path, overview=Quiet())
    longer = json.loads((tmp_path / "comparison.json").read_text())["controls"]["seed-0/client-0"]
    assert len(longer) > len(short) == 2
    assert longer[:2] == short


def test_retrain_goes_on_for_as_many_rounds_as_the_method_took(tmp_path: Path) -> None:
    recover = {"until": "rounds", "max_rounds": 2, "follow": 1}
    rows = by_phase(run(tiny(recover={**recover, "retrain_longer": True}), tmp_path / "a", cache=tmp_path / "cache"))
    plain = by_phase(run(tiny(recover=recover), tmp_path / "b", cache=tmp_path / "cache"))
    row = rows["recovered"]
    added = {key for key in row if key.startswith("retrain_longer")}
    assert untimed({key: value for key, value in row.items() if key not in added}) == untimed(plain["recovered"])
    path = row["retrain_longer_path"]
    assert [point["round"] for point in path] == [0, 1, 2, 3, 4], "one of unlearning, two of recovery, one followed"
    for key in ("test_acc", "forget_acc", "holdout_acc"):
        assert path[0][key] == pytest.approx(rows["retrained"][key]), "round 0 is Retrain"
        assert row[f"retrain_longer_{key}"] == path[3][key]
        assert row[f"retrain_longer_{key}_last"] == pytest.approx(sum(point[key] for point in path[2:4]) / 2)
    assert len({point["test_acc"] for point in path}) > 1, "it trains"
    with screen.capture() as said:
        _say_price(list(rows.values()))
    assert f"Retrain after as many rounds in all as the method: test {path[3]['test_acc']:.1f}, retain" in said.get()


def test_a_comparison_lets_retrain_go_on_once_for_all_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(recover={"until": "rounds", "max_rounds": 1, "retrain_longer": True})
    (target,) = recipe.request[0].clients
    lines, outcomes = compare(recipe, ["fedquit", "natural"], [target], 1, tmp_path, overview=Quiet())
    stored = json.loads((tmp_path / "comparison.json").read_text())["retrain_longer"]
    path = stored[f"seed-0/client-{target}"]
    assert [point["round"] for point in path] == [0, 1, 2]
    assert not any("retrain_longer_path" in row for o in outcomes for row in o.rows), "not once for each method"
    by_method = {line.method: line for line in lines}
    assert by_method["fedquit"].retrain_longer["forget_acc"] == path[2]["forget_acc"], "unlearning is a round, too"
    assert by_method["natural"].retrain_longer["forget_acc"] == path[1]["forget_acc"]
    own = by_phase(
        run(dataclasses.replace(recipe, method={"name": "natural"}), tmp_path / "alone", cache=tmp_path / "cache")
    )
    assert own["recovered"]["retrain_longer_path"] == path[:2], "as a run of its own finds it"
    _print_comparison(recipe, lines, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "/ Retrain of as many rounds in all, in %" in said
    assert f"/ {path[2]['forget_acc']:.1f} (" in said
    results = open_folders([tmp_path])
    (summary,) = [line for line in json.loads(to_json(results))["summary"] if line["method"] == "fedquit"]
    assert summary["retrain_longer_forget_acc"] == path[2]["forget_acc"]
    assert "retrain_longer_forget_acc" in to_csv(results).splitlines()[0]
