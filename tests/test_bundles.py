# SPDX-License-Identifier: Apache-2.0
"""Reference bundles: a run with Retrain from a bundle equals one that trained it, except what is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedquit.audit.half_precision import auc_bounds, rounding_error
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.report import write_report
from fedquit.results.bundles import read_bundle
from fedquit.running.recipe import Recipe
from fedquit.running.runner import evaluation_of, run
from fedquit.running.setup import build_setup
from fedquit.running.training_cache import Silent, train
from fedquit.studies.bundles import Unit, make_bundle, units_of
from fedquit.studies.comparison import compare
from test_compare import Quiet
from worlds import tiny

ATTACKS = ["yeom", "song_svc"]
TIMES = ("seconds",)
HALF = ("leakage_", "auc_change", "original_auc", "holdout_")  # from scores in half precision


def recipe(**changes: Any) -> Recipe:
    changes = {"train": {"rounds": 12}, "evaluate": {"attacks": ATTACKS}, **changes}
    return tiny(**changes)


def made(out: Path, setting: Recipe, targets: list[Any], seeds: list[int], originals: list[int]) -> Path:
    units = units_of(setting, targets, seeds, originals)
    outcome = make_bundle(setting, units, targets, out, reporter=Silent())
    assert outcome.left == ()
    return out


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("bundles") / "tiny", recipe(), [0, 1], [0, 5, 6], [0])


def by_phase(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["phase"]: row for row in results["rows"]}


def test_a_run_with_retrain_from_a_bundle_equals_one_that_trained_it(tmp_path: Path, bundle: Path) -> None:
    setting = recipe(recover={"until": "retrained", "max_rounds": 3, "budgets": [0.2, 0.5]})
    trained = run(setting, tmp_path / "trained")
    taken = run(setting, tmp_path / "taken", cache=tmp_path / "other", retrain_from=bundle)
    assert len(list((tmp_path / "other").iterdir())) == 1, "Original alone was trained"
    one, other = trained["rows"], taken["rows"]
    assert [row["phase"] for row in one] == [row["phase"] for row in other]
    named = taken["retrain_from"]
    for a, b in zip(one, other, strict=True):
        added = {"source", "left_empty", "retrain_seed"} if b["phase"] == "retrained" else set()
        assert set(b) - set(a) == added
        assert set(a) - set(b) <= set(named["left_empty"]), "whatever is empty is named"
        for key in set(a) & set(b) - set(TIMES):
            if b["phase"] == "retrained" and key.startswith(HALF):
                assert_close(a[key], b[key], key)
            else:
                assert a[key] == b[key], (b["phase"], key)
    assert set(named["half_precision"]) == {"leakage_auc", "auc_change", "holdout_verdict"}
    assert named["left_empty"] == {"forget_js": "it needs the probabilities of all classes"}
    assert named["original"] == {"seed": 0, "same": True}
    retrained = by_phase(taken)["retrained"]
    assert retrained["source"] == "bundle"
    assert retrained["left_empty"] == "forget_js (it needs the probabilities of all classes)"


def assert_close(a: object, b: object, key: str) -> None:
    if isinstance(a, float):
        assert b == pytest.approx(a, abs=5e-3), key
    elif isinstance(a, list):
        assert [half["verdict"] for half in a] == [half["verdict"] for half in b]  # type: ignore[attr-defined]
    else:
        assert a == b, key


def test_a_comparison_rests_on_the_bundles_other_seeds_and_trains_original_alone(tmp_path: Path, bundle: Path) -> None:
    setting = recipe(recover={"until": "rounds", "max_rounds": 2})
    lines, outcomes = compare(setting, ["fedquit"], [0, 1], 1, tmp_path, overview=Quiet(), retrain_from=bundle)
    assert not any(outcome.failure for outcome in outcomes)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert [(row["clients"], row["seed"]) for row in stored["retrains"]] == [([0], 5), ([0], 6), ([1], 5), ([1], 6)]
    table = {line.method: line for line in lines}
    verdict = table["fedquit"].verdicts["forget_acc"]
    assert (verdict.retrains, verdict.design) == (2, "shared"), "of each target; the targets share their seeds"
    rows = [by_phase({"rows": outcome.rows})["retrained"] for outcome in outcomes]
    assert [row["retrain_seed"] for row in rows] == [0, 0], "the run's own seed is the Retrain of its gaps"
    references = read_bundle(bundle)
    for row in stored["retrains"]:
        found = next(r for r in references.references if list(r.clients) == row["clients"] and r.seed == row["seed"])
        assert row["forget_acc"] == found.row(row["clients"])["forget_acc"]
        last = [point["forget_acc"] for point in found.paths[str(row["clients"][0])]]
        assert len(last) == 10
        assert row["forget_acc_last"] == pytest.approx(np.mean(last))
    assert stored["retrain_from"]["seeds"] == {"client 0": [5, 6], "client 1": [5, 6]}


def test_seeds_that_the_bundle_lacks_take_its_lowest_seed_and_are_all_independent(tmp_path: Path, bundle: Path) -> None:
    setting = dataclasses.replace(recipe(recover={"until": "rounds", "max_rounds": 1}), seed=40)
    lines, _ = compare(setting, ["natural"], [0], 1, tmp_path, overview=Quiet(), retrain_from=bundle, retrain_seeds=3)
    assert lines[-1].verdicts["forget_acc"].retrains == 3
    results = json.loads((tmp_path / "seed-40/client-0/natural/results.json").read_text())
    row = by_phase(results)["retrained"]
    assert (row["seed"], row["retrain_seed"]) == (40, 0)
    found = {ref.seed: ref.row((0,)) for ref in read_bundle(bundle).references if ref.clients == (0,)}
    spread = np.mean([abs(found[seed]["forget_acc"] - found[0]["forget_acc"]) for seed in (5, 6)])
    again = next(line for line in lines if line.method == "retrain again")
    assert again.runs == 2, "Retrain is not compared with itself"
    assert again.gaps["forget_acc"] == pytest.approx(spread)
    assert lines[-1].spread["forget_acc"] == pytest.approx(spread)
    assert results["retrain_from"]["original"] == {}, "the bundle has no Original with seed 40"


def test_too_few_other_seeds_and_many_models_are_refused_before_any_work(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(InputError, match=r"has 2 Retrains without 0 whose seeds .* --retrain-seeds is 3"):
        compare(recipe(), ["natural"], [0], 1, tmp_path, overview=Quiet(), retrain_from=bundle, retrain_seeds=3)
    with pytest.raises(InputError, match="--references needs Retrain's weights"):
        compare(recipe(), ["natural"], [0], 1, tmp_path, overview=Quiet(), retrain_from=bundle, references=4)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"rounds": 13}}, r"training differs \(data and partition agree\); .* \[train\]"),
        ({"data": {"clients": 3}}, r"partition differs \(data and training agree\); .* same partition"),
        ({"data": {"holdout": 0.1}}, "partition differs"),
        ({"data": {"options": {"examples": 120, "test_examples": 61, "classes": 3, "size": 4}}}, "data differs"),
        ({"data": {"clients": 3}, "train": {"lr": 0.2}}, r"partition and training differ \(data agrees\)"),
        ({"request": [{"clients": [2]}]}, "has no Retrain without client 2, only without 0, 1: choose among these"),
        ({"request": [{"clients": [0, 1]}]}, "has no Retrain without clients 0 and 1"),
        ({"request": [{"clients": [0], "samples": 0.5}]}, "no Retrain without the forgotten samples of client 0"),
        ({"request": [{"clients": [0]}, {"clients": [1]}]}, "this recipe has other events"),
        (
            {"engine": {"precision": "bf16"}, "model": {"dtype": "float32"}},
            r"data and training differ \(partition agrees\)",
        ),
    ],
)
def test_where_nothing_fits_one_sentence_says_what_differs(
    tmp_path: Path, bundle: Path, changes: dict[str, Any], sentence: str
) -> None:
    if "train" in changes:
        changes = {**changes, "train": {"rounds": 12, **changes["train"]}}
    with pytest.raises(FedquitError, match=sentence) as error:
        run(recipe(**changes), tmp_path / "run", retrain_from=bundle)
    assert "--retrain-from" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists(), "nothing was trained"


def test_another_seed_or_method_fits_and_the_first_parameters_are_no_part_of_the_key(
    tmp_path: Path, bundle: Path
) -> None:
    setting = dataclasses.replace(recipe(method={"name": "pga"}), seed=9)
    results = run(setting, tmp_path / "run", retrain_from=bundle)
    assert by_phase(results)["retrained"]["retrain_seed"] == 0


class Clock(Silent):
    """A clock on which every round takes a second; it stands for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def round(self, done: int, note: str) -> None:
        self.now += 1


def test_a_bundle_made_in_several_goes_stops_at_the_end_of_a_round_and_is_the_one_made_in_one(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, unit = recipe(), Unit(5, 1)
    out, state, clock = tmp_path / "again", tmp_path / "state", Clock()
    monkeypatch.setattr("fedquit.studies.bundles.time", clock)
    ends = []
    while not (out / f"{unit.name}.json").exists():
        outcome = make_bundle(setting, [unit], [1], out, state=state, time_limit=4.5, reporter=clock)
        ends.append(clock.now)
        assert (outcome.left == (unit,)) == (not outcome.done)
        assert len(ends) < 9
    assert ends == [5, 10, 12], "after the round in which the time was up, and nothing is trained twice"
    assert not (state / unit.name).exists(), "no weights are left"
    assert_same_record(bundle / f"{unit.name}.json", out / f"{unit.name}.json")


@pytest.mark.parametrize("stop", [1, 3, 7, 11, 12])
def test_a_training_killed_at_any_round_goes_on_to_the_same_record(tmp_path: Path, bundle: Path, stop: int) -> None:
    setting, unit = recipe(), Unit(5, 1)
    out, state = tmp_path / "again", tmp_path / "state"

    class Killed(Exception): ...

    class Killer(Silent):
        def round(self, done: int, note: str) -> None:
            if done == stop:
                raise Killed

    with pytest.raises(Killed):
        make_bundle(setting, [unit], [1], out, state=state, reporter=Killer())
    assert not out.exists()
    make_bundle(setting, [unit], [1], out, state=state, reporter=Silent())
    assert_same_record(bundle / f"{unit.name}.json", out / f"{unit.name}.json")


def assert_same_record(one: Path, other: Path) -> None:
    a, b = json.loads(one.read_text()), json.loads(other.read_text())
    for record in (a, b):
        for rows in record["rows"].values():
            for row in rows:
                row.pop("seconds")
    assert a == b
    first, second = (load_file(file.with_suffix(".safetensors")) for file in (one, other))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_several_processes_make_the_same_bundle(tmp_path: Path, bundle: Path) -> None:
    setting = recipe()
    units = units_of(setting, [0, 1], [5], [0])
    outcome = make_bundle(setting, units, [0, 1], tmp_path / "two", jobs=2, reporter=Silent())
    assert outcome.left == ()
    for unit in units:
        assert_same_record(bundle / f"{unit.name}.json", tmp_path / "two" / f"{unit.name}.json")


def test_a_recorded_retrain_is_the_one_that_a_run_trains_and_its_rows_are_of_the_last_rounds(
    tmp_path: Path, bundle: Path
) -> None:
    setting = dataclasses.replace(recipe(request=[{"clients": [0]}]), seed=5)
    setup = build_setup(setting)
    evaluation = evaluation_of(setup)
    data = evaluation.data.after(evaluation.request)
    trained = train(setup, data, tmp_path, reporter=Silent(), evaluation=evaluation)
    reference = next(r for r in read_bundle(bundle).references if r.clients == (0,) and r.seed == 5)
    assert [row["rounds"] for row in reference.rows["0"]] == list(range(3, 13))
    assert reference.path((0,)) == list(trained.last_rounds)
    params = trained.progress.state.params
    whole = evaluation.scores(params)
    for name in ("test", "forget", "holdout"):
        scores = whole[name]
        assert scores is not None
        stored = reference.scores[name]
        for key in ("phi", "entropy", "modified_entropy"):
            exact = getattr(scores, key)
            assert np.all(np.abs(stored[key] - exact) <= rounding_error(stored[key]))
        assert np.array_equal(stored["correct"], scores.correct)


def test_the_auc_of_half_precision_scores_is_within_the_bound_that_they_state(tmp_path: Path, bundle: Path) -> None:
    for reference in read_bundle(bundle).references:
        if reference.role == "retrained":
            forget, holdout = (reference.scores[name]["phi"] for name in ("forget", "holdout"))
            errors = rounding_error(forget), rounding_error(holdout)
            low, high = auc_bounds(forget.astype(float), holdout.astype(float), errors)
            exact = reference.row(reference.clients)["auc"]
            assert low <= exact <= high
            assert high - low < 0.01


def test_another_original_is_told_by_its_distance_in_accuracy(tmp_path: Path, bundle: Path) -> None:
    other = tmp_path / "bundle"
    shutil.copytree(bundle, other)
    file = other / "original-seed0.json"
    record = json.loads(file.read_text())
    row = record["rows"]["1"][-1]
    row["fingerprint"] = "0" * 32
    row["forget_acc"] -= 1.5
    file.write_text(json.dumps(record))
    results = run(recipe(), tmp_path / "run", retrain_from=other)
    told = results["retrain_from"]["original"]
    assert told == {"seed": 0, "same": False, "test_acc": 0.0, "forget_acc": pytest.approx(1.5)}
    write_report([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Original with seed 0 is not the bundle" in page
    assert "forget accuracy +1.50 points" in page


def test_what_was_recorded_in_full_precision_is_not_computed_again_from_halves(tmp_path: Path, bundle: Path) -> None:
    other = tmp_path / "bundle"
    shutil.copytree(bundle, other)
    file = other / "retrain-client1-seed0.json"
    record = json.loads(file.read_text())
    recorded = {"auc": 0.123, "auc_low": 0.1, "auc_high": 0.2, "tail_p": 0.9, "entropy_ks": 0.01, "tpr_at_0.01": 0.77}
    record["rows"]["1"][-1] |= recorded | {"holdout_verdict": "recorded without Original"}
    file.write_text(json.dumps(record))
    row = by_phase(run(recipe(), tmp_path / "run", retrain_from=other))["retrained"]
    assert {key: row[key] for key in recorded} == recorded
    assert row["holdout_verdict"] != "recorded without Original", "the verdict needs Original"
    assert row["original_auc_low"] is not None


def test_a_record_without_paths_has_no_retain_accuracy_over_the_last_rounds_and_says_so(
    tmp_path: Path, bundle: Path
) -> None:
    older = tmp_path / "older"
    shutil.copytree(bundle, older)
    for file in older.glob("*.json"):
        record = json.loads(file.read_text())
        del record["paths"]
        file.write_text(json.dumps(record))
    results = run(recipe(), tmp_path / "run", retrain_from=older)
    newer = run(recipe(), tmp_path / "newer", retrain_from=bundle)
    row, whole = by_phase(results)["retrained"], by_phase(newer)["retrained"]
    assert "retain_acc_last" not in row
    assert "retain_acc_last" in row["left_empty"]
    assert "retain_acc_last" not in whole["left_empty"]
    for key in ("test_acc_last", "forget_acc_last", "holdout_acc_last", "last_rounds"):
        assert row[key] == pytest.approx(whole[key])


def test_a_folder_keeps_the_retrain_it_began_with(tmp_path: Path, bundle: Path) -> None:
    run(recipe(), tmp_path / "run", retrain_from=bundle)
    with pytest.raises(StoreError, match="holds a run with another Retrain"):
        run(recipe(), tmp_path / "run")
    assert run(recipe(), tmp_path / "run", retrain_from=bundle)["rows"]


def test_every_view_names_the_bundle_and_what_is_empty(tmp_path: Path, bundle: Path) -> None:
    run(recipe(), tmp_path / "run", retrain_from=bundle)
    for ending in ("html", "md", "tex", "json"):
        write_report([tmp_path / "run"], tmp_path / f"out.{ending}")
        text = (tmp_path / f"out.{ending}").read_text()
        assert "Retrain without 1 is from the bundle tiny (seed 0, cpu in float32" in text, ending
        assert "it was not trained here" in text
        assert "(it needs the probabilities of all classes)" in text
    write_report([tmp_path / "run"], tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    retrain = next(line for line in lines if ",retrained," in line)
    assert "forget_js (it needs the probabilities of all classes)" in retrain
    assert ",bundle," in retrain


def test_a_report_gives_a_retrain_to_a_run_without_one(tmp_path: Path, bundle: Path) -> None:
    setting = dataclasses.replace(recipe(), retrain=False)
    run(setting, tmp_path / "run")
    out = tmp_path / "out.json"
    write_report([tmp_path / "run"], out)
    assert json.loads(out.read_text())["summary"][0]["forget_acc_gap"] is None
    write_report([tmp_path / "run"], out, retrain_from=bundle)
    exported = json.loads(out.read_text())
    recovered = next(row for row in exported["rows"] if row["phase"] == "recovered")
    row = next(r for r in read_bundle(bundle).references if r.clients == (1,) and r.seed == 0).row((1,))
    assert recovered["forget_acc_gap"] == pytest.approx(recovered["forget_acc"] - row["forget_acc"])
    assert "leakage_auc" in exported["retrain_from"][1]
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [each["phase"] for each in stored["rows"]] == ["original", "unlearned", "recovered"], "nothing was written"


Spoil = Callable[[Path], None]


def _json(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(file: Path) -> None:
        record = json.loads(file.read_text())
        change(record)
        file.write_text(json.dumps(record))

    return spoil


def _scores(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(file: Path) -> None:
        arrays = load_file(file.with_suffix(".safetensors"))
        change(arrays)
        save_file(arrays, file.with_suffix(".safetensors"))

    return spoil


def _cut(file: Path) -> None:
    scores = file.with_suffix(".safetensors")
    scores.write_bytes(scores.read_bytes()[:-7])


def _cut_json(file: Path) -> None:
    file.write_text(file.read_text()[:-9])


def _other_length(arrays: dict[str, Any]) -> None:
    arrays["test.phi"] = arrays["test.phi"][:-1].copy()


SPOILT: dict[str, tuple[Spoil, str]] = {
    "cut JSON": (_cut_json, "is damaged"),
    "another schema": (_json(lambda r: r.update(schema=2)), "has schema 2 and this version .* reads .* schema 1 only"),
    "no role": (_json(lambda r: r.update(role="x")), "no usable role"),
    "no seed": (_json(lambda r: r.update(seed=True)), "no usable seed"),
    "no target": (_json(lambda r: r.update(target=[])), "does not fit its role"),
    "no rows": (_json(lambda r: r.update(rows={})), "no usable rows"),
    "rows of another target": (_json(lambda r: r.update(rows={"7": r["rows"]["0"]})), "its rows are of 7"),
    "a gap in the rounds": (_json(lambda r: r["rows"]["0"].pop(3)), "not of consecutive rounds"),
    "a path of other rounds": (_json(lambda r: r["paths"]["0"].pop(3)), "its path of target 0"),
    "no percentage": (_json(lambda r: r["rows"]["0"][-1].update(test_acc=101)), "which is not a percentage"),
    "another size": (_json(lambda r: r["scores"].update(test=61)), r"test.* and should be .* \[61\]"),
    "no scores": (lambda file: file.with_suffix(".safetensors").unlink(), "is missing: restore it"),
    "cut scores": (_cut, "is damaged"),
    "an array of weights": (_scores(lambda a: a.update(weights=np.zeros(3))), "does not hold exactly .* weights"),
    "an array too short": (_scores(_other_length), "is F16 of shape"),
    "full precision": (_scores(lambda a: a.update({"test.phi": a["test.phi"].astype(np.float32)})), "is F32"),
    "not finite": (_scores(lambda a: a["test.phi"].fill(np.nan)), "not finite"),
    "scores of another model": (_scores(lambda a: a["test.correct"].fill(0)), "its test accuracy is 0.0000 %"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_damaged_bundle_is_refused_in_one_sentence(tmp_path: Path, bundle: Path, spoilt: str) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    spoil, sentence = SPOILT[spoilt]
    spoil(folder / "retrain-client0-seed0.json")
    with pytest.raises(StoreError, match=sentence) as error:
        _ = [reference.scores for reference in read_bundle(folder).references]
    assert "retrain-client0-seed0" in str(error.value)
    assert str(error.value).count(". ") == 0


def test_a_record_that_is_there_twice_and_an_empty_folder_are_refused(tmp_path: Path, bundle: Path) -> None:
    shutil.copytree(bundle, tmp_path / "all" / "one")
    for file in bundle.glob("retrain-client0-seed0.*"):
        shutil.copy(file, tmp_path / "all" / f"copy{file.suffix}")
    with pytest.raises(StoreError, match="records of the same training: move one of them away"):
        read_bundle(tmp_path / "all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no reference bundle in"):
        read_bundle(tmp_path / "empty")


def test_a_folder_with_records_of_another_setting_is_refused(tmp_path: Path, bundle: Path) -> None:
    other = recipe(train={"rounds": 13})
    shutil.copytree(bundle, tmp_path / "bundle")
    with pytest.raises(StoreError, match="is a record of another setting: choose another --out"):
        make_bundle(other, [Unit(0)], [0], tmp_path / "bundle", reporter=Silent())


def test_the_state_with_its_weights_stays_out_of_the_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lies in the bundle, which has no weights"):
        make_bundle(recipe(), [Unit(0)], [0], tmp_path, state=tmp_path / "state", reporter=Silent())


@pytest.mark.parametrize(
    "changes",
    [{"evaluate": {"backdoor": 0.5}}, {"audit": {"canaries": 20, "guesses": 10}}, {"request": [{"kind": "join"}] * 2}],
)
def test_settings_that_no_bundle_can_serve_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(FedquitError, match="bundle"):
        make_bundle(recipe(**changes), [Unit(0)], [0], tmp_path / "bundle", reporter=Silent())


def test_without_a_hold_out_the_test_set_takes_its_place(tmp_path: Path) -> None:
    setting = recipe(data={"holdout": 0.0}, evaluate={"attacks": ["yeom"]})
    folder = made(tmp_path / "bundle", setting, [1], [0], [])
    assert set(read_bundle(folder).references[0].sizes) == {"test", "forget"}
    trained = by_phase(run(setting, tmp_path / "a"))["retrained"]
    taken = by_phase(run(setting, tmp_path / "b", retrain_from=folder))["retrained"]
    assert set(taken) - set(trained) == {"source", "left_empty", "retrain_seed"}
    assert set(trained) <= set(taken)
    assert taken["leakage_against"] == "test"
    assert taken["leakage_auc"] == pytest.approx(trained["leakage_auc"], abs=5e-3)
    assert {k: v for k, v in taken.items() if "leakage" not in k and k != "seconds"}.items() >= {
        key: value for key, value in trained.items() if "leakage" not in key and key != "seconds"
    }.items()


def test_pairs_samples_and_relearning(tmp_path: Path) -> None:
    pair = recipe(request=[{"clients": [0, 1]}], evaluate={"attacks": ["yeom"], "relearn": 1})
    folder = made(tmp_path / "pair", pair, [(0, 1)], [0], [])
    assert [file.name for file in folder.glob("*.json")] == ["retrain-clients0+1-seed0.json"]
    results = run(pair, tmp_path / "run", retrain_from=folder)
    assert list(results["retrain_from"]["left_empty"]) == ["forget_js", "relearn_ratio"]
    assert "relearn_ratio" not in by_phase(results)["recovered"]
    some = recipe(request=[{"clients": [0], "samples": 0.3}], evaluate={"attacks": ["yeom"]})
    folder = made(tmp_path / "samples", some, [0], [0], [0])
    trained, taken = run(some, tmp_path / "a"), run(some, tmp_path / "b", retrain_from=folder)
    gaps = [by_phase(results)["retrained"]["forget_acc"] for results in (trained, taken)]
    assert gaps[0] == gaps[1]
    more = recipe(request=[{"clients": [0], "samples": 0.4}], evaluate={"attacks": ["yeom"]})
    with pytest.raises(InputError, match="no Retrain without the forgotten samples"):
        run(more, tmp_path / "c", retrain_from=folder)
    asked = recipe(request=[{"clients": [0], "samples": 0.3}], evaluate={"attacks": ["yeom", "song_entropy"]})
    results = run(asked, tmp_path / "d", retrain_from=folder)
    assert "mia_song_entropy" in results["retrain_from"]["left_empty"]
    assert "mia_song_entropy" not in by_phase(results)["retrained"]
