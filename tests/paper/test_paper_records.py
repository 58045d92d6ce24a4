# SPDX-License-Identifier: Apache-2.0
"""Every kind of record becomes numbers of the same shape; which record counts follows one rule."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fedquit.errors import StoreError
from fedquit.paper.numbers import Key
from fedquit.paper.records import load_records

RESULTS = Path(__file__).parents[2] / "results"
LDA = "cifar100-lda"
UNIT = f"studies/paper-1-cifar100-lda/units/{LDA}/seed-0/client-0/fedquit/results.json"
FORGET = Key(LDA, "client", "fedquit", "recovered", "forget_acc")


def record(name: str = UNIT) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def write(folder: Path, **records: dict[str, Any]) -> Path:
    for name, content in records.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record with other numbers in the row of the recovered model."""
    new = copy.deepcopy(content)
    next(row for row in new["rows"] if row["phase"] == "recovered").update(changes)
    return new


def test_a_run_gives_every_phase_with_gaps_drops_and_costs(tmp_path: Path) -> None:
    records = load_records(write(tmp_path, one=record()))
    rows = {row["phase"]: row for row in record()["rows"]}
    (forget,) = records.picked(FORGET).values()
    assert forget.value == rows["recovered"]["forget_acc"]
    assert forget.gap == pytest.approx(abs(rows["recovered"]["forget_acc"] - rows["retrained"]["forget_acc"]))
    assert forget.drop == pytest.approx(rows["original"]["forget_acc"] - rows["recovered"]["forget_acc"])
    assert (forget.target, forget.seed) == ((0,), 0)
    assert (forget.source.file, forget.source.device) == ("one.json", "NVIDIA H200, bf16")
    (cost,) = records.picked(Key(LDA, "client", "fedquit", "total", "bytes")).values()
    sent = [rows[phase][side] for phase in ("unlearned", "recovered") for side in ("down_bytes", "up_bytes")]
    assert cost.value == sum(sent)
    assert cost.times == pytest.approx((rows["retrained"]["down_bytes"] + rows["retrained"]["up_bytes"]) / sum(sent))
    four = ("retain_acc", "forget_acc", "mia_song_svc", "mia_yeom")
    gaps = [abs(rows["recovered"][key] - rows["retrained"][key]) for key in four]
    average = records.series(FORGET._replace(measure="avg_gap"))
    assert average
    assert average.mean == pytest.approx(sum(gaps) / 4)


def test_a_reference_gives_the_last_round_of_each_target() -> None:
    records = load_records(RESULTS / "references")
    series = records.series(Key(LDA, "client", "original", "original", "test_acc"))
    assert series
    assert series.targets == 10
    stored = json.loads((RESULTS / "references/cifar100-lda0.1/original-seed0.json").read_text())
    assert series.by_target[3,] == stored["rows"]["3"][-1]["test_acc"]
    assert stored["rows"]["3"][-1]["rounds"] == 200


def test_unlearned_accuracy_gives_both_phases_the_rounds_and_the_gap() -> None:
    records = load_records(RESULTS / "unlearned-accuracy")
    pga = Key("cifar100-iid", "client", "pga", "unlearned", "test_acc")
    series = records.series(pga)
    assert series
    assert series.by_target == {(0,): 62.95, (1,): 63.33}
    rounds = records.series(Key("cifar100-iid", "client", "fedquit", "recovered", "rounds"))
    assert rounds
    assert rounds.by_target == {(0,): 14, (1,): 21}
    gap = records.series(Key("cifar100-iid", "client", "fedquit", "recovered", "forget_acc"), "gap")
    assert gap
    assert gap.by_target == pytest.approx({(0,): 65.38 - 62.42, (1,): 66.7 - 60.98})
    other = records.series(pga._replace(setting=LDA, method="fedosd lr=0.0004"))
    assert other
    assert other.by_target == {(0,): 49.47, (1,): 48.97}


def test_a_complete_record_comes_before_a_partial_one_and_then_one_that_names_its_code(tmp_path: Path) -> None:
    old, new = changed(record(), forget_acc=10.0), changed(record(), forget_acc=20.0)
    old.pop("code")
    new["code"] = {"version": "0.1.0", "commit": "0123456789", "dirty": False}
    partial = changed(new, forget_acc=30.0, mia_yeom=None)
    folder = write(tmp_path, a_new=new, b_old=old, c_partial=partial)
    records = load_records(folder)
    series = records.series(FORGET)
    assert series
    assert series.by_target == {(0,): 20.0}
    assert [source.code for source in records.sources if source.file == "a_new.json"] == ["fedquit 0.1.0 at 0123456"]
    (folder / "a_new.json").unlink()
    assert load_records(folder).series(FORGET).mean == 10.0  # type: ignore[union-attr]


def test_seeds_are_averaged_within_a_target_and_targets_counted(tmp_path: Path) -> None:
    other = changed(record(), forget_acc=50.0)
    for row in other["rows"]:
        row["seed"] = 1
    one = changed(record(), forget_acc=40.0)
    second = changed(record(UNIT.replace("client-0", "client-1")), forget_acc=60.0)
    series = load_records(write(tmp_path, one=one, other=other, second=second)).series(FORGET)
    assert series
    assert series.by_target == {(0,): 45.0, (1,): 60.0}
    assert (series.targets, series.seeds, series.mean) == (2, 2, 52.5)


def test_units_of_a_study_are_found_at_any_depth(tmp_path: Path) -> None:
    folder = write(tmp_path, study__units__a__results=record())
    assert load_records(folder).series(FORGET)


@pytest.mark.parametrize(
    ("section", "key", "value", "why"),
    [("train", "rounds", 1, "1 round in place"), ("data", "holdout", 0.2, "hold out 20 %")],
)
def test_a_record_of_another_protocol_is_beside_no_number_of_the_paper(
    section: str, key: str, value: float, why: str, tmp_path: Path
) -> None:
    other = record()
    other["recipe"][section][key] = value
    records = load_records(write(tmp_path, other=other))
    assert records.series(FORGET) is None
    assert why in records.left_out["other.json"]
    assert bool(records.runs) == (section == "data")  # it still shows what lasts


def test_a_folder_that_is_not_there_and_a_damaged_record_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no folder of records"):
        load_records(tmp_path / "nowhere")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StoreError, match=r"broken\.json cannot be read"):
        load_records(tmp_path)


def test_a_comparison_of_another_federation_is_kept_with_its_runs_and_not_listed_run_by_run(tmp_path: Path) -> None:
    other = record()
    other["recipe"]["model"]["name"] = "mlp"
    folder = write(tmp_path, **{"toy__seed-0__client-0__fedquit__results": other})
    table = {"schema": 1, "recipe": other["recipe"], "table": [], "runs": ["seed-0/client-0/fedquit"], "failed": []}
    write(folder, toy__comparison=table)
    records = load_records(folder)
    (runs,) = records.others.values()
    assert [run.folder for run in runs] == ["seed-0/client-0/fedquit"]
    assert not records.left_out
    assert not records.comparisons


def test_the_runs_of_a_comparison_in_a_setting_of_the_paper_are_its_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path, **{"lda__seed-0__client-0__fedquit__results": record()})
    table = {"schema": 1, "recipe": record()["recipe"], "table": [], "runs": ["seed-0/client-0/fedquit"], "failed": []}
    write(folder, lda__comparison=table)
    records = load_records(folder)
    assert records.series(FORGET)
    assert not records.others
