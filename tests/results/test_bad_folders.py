# SPDX-License-Identifier: Apache-2.0
"""Results that cannot be read give one sentence, through the API and the command, and nothing is overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquit.cli import main
from fedquit.errors import StoreError
from fedquit.results.folders import (
    RunResults,
    differing_section,
    load_results,
    open_folders,
    read_comparison,
    read_record,
    read_run,
    write_comparison,
    write_results,
)
from results.random_results import Study, fill, write_study
from test_report import results, store

ROOT = Path(__file__).parents[2]
RECIPE = (
    '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\n[train]\nrounds = 1\n'
    "[recover]\nmax_rounds = 1\n[[request]]\nclients = [0]\n"
)


def study(out: Path) -> Path:
    made = Study(
        methods=("fedquit", "fukd"),
        targets=(0, 1),
        seeds=1,
        failed=frozenset(),
        absent=frozenset(),
        unmeasured=frozenset(),
        budgets=(),
        again=True,
        numbers=1,
    )
    fill(made)
    write_study(made, out)
    return out


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def future(folder: Path) -> None:
    store(folder, results() | {"schema": 2, "rows": "of another kind"})


def truncated(folder: Path) -> None:
    path = store(folder, results()) / "results.json"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_measure(folder: Path) -> None:
    content = results()
    row = content["rows"][2]
    content["rows"][2] = {k: v for k, v in row.items() if k not in ("test_acc", "retain_acc", "forget_acc")}
    store(folder, content)


def beyond_a_percentage(folder: Path) -> None:
    content = results()
    content["rows"][3]["forget_acc"] = 512.0
    store(folder, content)


def empty(folder: Path) -> None:
    folder.mkdir()


def foreign(folder: Path) -> None:
    store(folder, {"model": "something else", "accuracy": 0.9})


def both(folder: Path) -> None:
    store(study(folder), results())


def future_comparison(folder: Path) -> None:
    changed(study(folder) / "comparison.json", schema=7)


def truncated_comparison(folder: Path) -> None:
    path = study(folder) / "comparison.json"
    path.write_bytes(path.read_bytes()[:200])


def odd_comparison(folder: Path) -> None:
    changed(study(folder) / "comparison.json", table={"a": 1})


def missing_run(folder: Path) -> None:
    (study(folder) / "seed-0" / "client-1" / "fukd" / "results.json").unlink()


def truncated_run(folder: Path) -> None:
    (study(folder) / "seed-0" / "client-1" / "fukd" / "results.json").write_text("{")


def run_elsewhere(folder: Path) -> None:
    changed(study(folder) / "comparison.json", runs=["../elsewhere"])


def unfinished(folder: Path) -> None:
    (study(folder) / "comparison.json").unlink()


def run_of_another_recipe(folder: Path) -> None:
    path = study(folder) / "seed-0" / "client-1" / "fukd" / "results.json"
    recipe = json.loads(path.read_text())["recipe"]
    changed(folder / "comparison.json", recipe={"data": {"alpha": 0.1}})
    changed(path, recipe=recipe | {"data": {"alpha": 1.0}})


BAD: dict[Callable[[Path], None], str] = {
    future: "has schema 2 and this version of fedquit reads schema 1 only: use the version that wrote it",
    truncated: "results.json is damaged (",
    without_a_measure: "row 2 has no measure: none of test_acc, retain_acc, forget_acc",
    beyond_a_percentage: "row 3 has forget_acc 512, which is not a percentage",
    empty: "no results.json in",
    foreign: "has schema None and this version of fedquit reads schema 1 only",
    both: "holds both the results.json of a run and a comparison.json",
    future_comparison: "comparison.json has schema 7 and this version of fedquit reads schema 1 only",
    truncated_comparison: "comparison.json is damaged (",
    odd_comparison: "comparison.json is damaged (it has no usable table)",
    missing_run: "names the run seed-0/client-1/fukd, and seed-0/client-1/fukd/results.json is not there",
    truncated_run: "seed-0/client-1/fukd/results.json is damaged (",
    run_elsewhere: "names the run '../elsewhere', which is not below it",
    unfinished: "holds an unfinished comparison: run the same `fedquit compare` into it again",
    run_of_another_recipe: "is mixed: seed-0/client-1/fukd was run with another [data]",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def said_by(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["fedquit", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return " ".join(printed.err.split())


@pytest.mark.parametrize("make", BAD, ids=[make.__name__ for make in BAD])
def test_the_report_says_one_sentence_and_writes_nothing(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some"
    make(folder)
    (folder / "report.html").write_text("the report that was there")
    before = contents(folder)
    with pytest.raises(StoreError) as caught:
        open_folders([folder])
    assert BAD[make] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "delete" not in str(caught.value)
    for view in ("html", "csv", "md", "latex", "json"):
        said = said_by(["report", str(folder), "--format", view], monkeypatch, capsys)
        assert " ".join(BAD[make].split()) in said
        assert "Traceback" not in said
    assert contents(folder) == before


@pytest.mark.parametrize("make", [future, truncated, without_a_measure, foreign])
def test_a_run_leaves_results_that_it_cannot_read(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    folder = tmp_path / "some"
    make(folder)
    before = (folder / "results.json").read_bytes()
    said = said_by(["run", str(tmp_path / "r.toml"), "--out", str(folder)], monkeypatch, capsys)
    assert BAD[make] in said
    assert (folder / "results.json").read_bytes() == before
    assert not (folder / "request-0").exists(), "it is refused before the work begins"
    with pytest.raises(StoreError):
        write_results(folder, results())
    assert (folder / "results.json").read_bytes() == before


@pytest.mark.parametrize("make", [future_comparison, truncated_comparison, odd_comparison])
def test_a_comparison_leaves_one_that_it_cannot_read(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    folder = tmp_path / "some"
    make(folder)
    before = contents(folder)
    words = ["compare", str(tmp_path / "r.toml"), "--methods", "fedquit", "--jobs", "1", "--out", str(folder)]
    assert BAD[make] in said_by(words, monkeypatch, capsys)
    assert contents(folder) == before


def test_runs_and_comparisons_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    compared, run = study(tmp_path / "compared"), store(tmp_path / "run", results())
    said = said_by(["run", str(tmp_path / "r.toml"), "--out", str(compared)], monkeypatch, capsys)
    assert "holds a comparison, and a run would mix with it: choose another folder" in said
    with pytest.raises(StoreError, match="holds a comparison"):
        write_results(compared, results())
    with pytest.raises(StoreError, match="holds a run"):
        write_comparison(run, read_comparison(compared))
    assert not (compared / "results.json").exists()
    assert not (run / "comparison.json").exists()
    words = ["compare", str(tmp_path / "r.toml"), "--methods", "fedquit", "--jobs", "1", "--out", str(run)]
    assert "holds a run, and a comparison would mix with it" in said_by(words, monkeypatch, capsys)


def test_a_comparison_of_another_recipe_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run in it would fail, and a table of failures would replace the one that is there."""
    (tmp_path / "r.toml").write_text(RECIPE)
    folder = study(tmp_path / "some")
    changed(folder / "comparison.json", recipe={"data": {"alpha": 7.0}})
    before = contents(folder)
    words = ["compare", str(tmp_path / "r.toml"), "--methods", "fedquit", "--jobs", "1", "--out", str(folder)]
    said = said_by(words, monkeypatch, capsys)
    assert "holds a comparison of another recipe (it differs in [data]): choose another folder" in said
    assert contents(folder) == before


def test_a_run_does_not_begin_in_an_unfinished_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    unfinished(tmp_path / "some")
    said = said_by(["run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "some")], monkeypatch, capsys)
    assert "holds a comparison, and a run would mix with it" in said


def test_a_key_that_one_of_two_versions_does_not_know_makes_no_other_recipe() -> None:
    assert differing_section({"data": {"alpha": 1.0, "later": 0}}, {"data": {"alpha": 1.0}}) == ""
    assert differing_section({"data": {"alpha": 1.0}}, {"data": {"alpha": 2.0}}) == "data"


@pytest.mark.parametrize("name", ["results.json", "comparison.json"])
def test_a_report_does_not_take_the_name_of_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store(tmp_path / "run", results())
    before = contents(folder)
    said = said_by(["report", str(folder), "--out", str(folder / name)], monkeypatch, capsys)
    assert "is the name under which results are stored: choose another name for the report" in said
    assert contents(folder) == before


def test_advice_is_never_to_delete(tmp_path: Path) -> None:
    truncated(tmp_path / "run")
    with pytest.raises(StoreError, match="restore it from a backup, or run the same recipe into another folder"):
        load_results(tmp_path / "run")
    truncated_comparison(tmp_path / "compared")
    with pytest.raises(StoreError, match="move it away and run the same comparison again, which keeps its runs"):
        read_comparison(tmp_path / "compared")


def test_results_on_disk_go_on_naming_the_code_that_made_them(tmp_path: Path) -> None:
    first = write_results(tmp_path, results() | {"code": {"version": "1", "commit": "a" * 40}})
    later = {"code": {"version": "2"}, "versions": {"torch": "later"}, "recipe": {**results()["recipe"], "later": 0}}
    again = write_results(tmp_path, results() | later)
    assert again == first
    more = results()
    more["rows"][3]["forget_acc"] = 1.0
    assert write_results(tmp_path, more | {"code": {"version": "2"}})["code"] == {"version": "2"}


def test_fields_of_later_versions_survive(tmp_path: Path) -> None:
    content = results() | {"code": {"version": "1"}, "verdict": {"word": "forgotten"}}
    content["rows"][3]["margin"] = {"low": 1.0}
    store(tmp_path / "run", content)
    assert read_run(tmp_path / "run").to_dict() == content
    folder = study(tmp_path / "compared")
    changed(folder / "comparison.json", certificates=["x"])
    stored = json.loads((folder / "comparison.json").read_text())
    stored["table"][3]["certainty"] = {"forget_acc": {"p": 0.1}}
    (folder / "comparison.json").write_text(json.dumps(stored))
    assert json.loads(json.dumps(read_comparison(folder).to_dict())) == stored


RECORDS = sorted(path for path in (ROOT / "results").glob("*/*.json") if path.parent.name != "unlearned-accuracy")


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_recorded_results_of_schema_1_stay_readable(path: Path) -> None:
    record = read_record(path)
    assert isinstance(record, RunResults)
    assert json.loads(json.dumps(record.to_dict())) == json.loads(path.read_text())


def test_a_recorded_comparison_stays_readable(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "results" / "comparison-fashion.json").read_text())
    recorded = {key: value for key, value in recorded.items() if key not in ("runs", "code")}  # as it was before
    (tmp_path / "comparison.json").write_text(json.dumps(recorded))
    comparison = read_comparison(tmp_path)
    table = json.loads(json.dumps(recorded["table"]).replace("p = below 0.001", "p < 0.001"))  # how it reads now
    for line, stored in zip(comparison.table, table, strict=True):
        read = json.loads(json.dumps(line.to_dict()))
        assert {key: read[key] for key in stored} == stored
    assert "runs" not in comparison.to_dict(), "it names no runs, and stands for all that lie below it"
