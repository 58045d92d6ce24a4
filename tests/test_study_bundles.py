# SPDX-License-Identifier: Apache-2.0
"""A study takes its Retrains from reference bundles, and records there those that it trains."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from fedquit import models
from fedquit.cli import app
from fedquit.errors import InputError, StoreError
from fedquit.results import bundles
from fedquit.results.bundles import BundleReader, read_bundle
from fedquit.running.bundles import setting_key
from fedquit.running.recipe import ModelRecipe
from fedquit.running.setup import build_setup
from study_world import BLOCK, RECIPE, carried_out, planned, records
from worlds import tiny

NAMED = {"forget_js"}  # what a bundle cannot give
ADDED = {"source", "left_empty"}
HALF = ("leakage_", "auc_change", "original_auc", "holdout_")  # from scores in half precision


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with all of its Retrains trained."""
    where = tmp_path_factory.mktemp("straight")
    carried_out(planned(where), where / "out")
    return where / "out"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with its Retrains recorded, stopped after every round."""
    where = tmp_path_factory.mktemp("recorded")
    plan = planned(where)
    sittings = 0
    while carried_out(plan, where / "out", time_limit=0, retrain_from=where / "bundles", record=True).stopped:
        sittings += 1
    assert sittings > 20
    return where


def rows_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: record["rows"] for name, record in records(out).items()}


def assert_same_but_for_what_is_named(trained: Path, taken: Path) -> None:
    one, other = rows_of(trained), rows_of(taken)
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert [row["phase"] for row in rows] == [row["phase"] for row in other[name]]
        for a, b in zip(rows, other[name], strict=True):
            retrain = b["phase"] == "retrained"
            assert set(b) - set(a) <= (ADDED if retrain else set()), name
            assert {key for key in set(a) - set(b) if not key.startswith(HALF)} <= NAMED, name
            for key in set(a) & set(b):
                if not (retrain and key.startswith(HALF)):
                    assert a[key] == b[key], (name, b["phase"], key)


def test_recorded_retrains_are_those_that_a_study_trains(straight: Path, recorded: Path) -> None:
    assert_same_but_for_what_is_named(straight, recorded / "out")
    bundle = read_bundle(recorded / "bundles")
    assert sorted((ref.clients, ref.seed) for ref in bundle.references) == [
        ((0,), 10),
        ((0,), 11),
        ((1, 2), 20),
        ((1, 2), 21),
    ]
    assert list((recorded / "out").rglob("*.safetensors")) == [], "the weights are gone once all is done"


def test_a_study_takes_what_is_recorded_and_trains_no_retrain(recorded: Path, tmp_path: Path) -> None:
    outcome = carried_out(planned(tmp_path), tmp_path / "out", retrain_from=recorded / "bundles")
    assert not outcome.stopped
    assert records(tmp_path / "out") == records(recorded / "out")
    run = json.loads((tmp_path / "out/units/tiny/seed-1/clients-1+2/pga/results.json").read_text())
    assert run["retrain_from"]["seed"] == 20, "the first of its Retrains, not that with the lowest seed of all"
    retrain = json.loads((tmp_path / "out/units/tiny/retrain/client-0/seed-11/results.json").read_text())
    assert retrain["retrain_from"]["bundle"] == "tiny"
    assert retrain["rows"][0]["left_empty"] == "forget_js (it needs the probabilities of all classes)"


def test_what_a_bundle_lacks_is_trained(straight: Path, recorded: Path, tmp_path: Path) -> None:
    own = tmp_path / "bundles"
    own.mkdir()
    for file in (recorded / "bundles").rglob("retrain-client0-seed10.*"):
        (own / file.name).write_bytes(file.read_bytes())
    carried_out(planned(tmp_path), tmp_path / "out", retrain_from=own)
    assert_same_but_for_what_is_named(straight, tmp_path / "out")
    files = sorted((tmp_path / "out/units/tiny/retrain").rglob("results.json"))
    taken = ["retrain_from" in json.loads(file.read_text()) for file in files]
    assert taken == [True, False, False, False]


def test_a_study_reads_each_record_once(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bundles._json
    read: Counter[str] = Counter()

    def counted(path: Path) -> object:
        read[path.name] += 1
        return plain(path)

    monkeypatch.setattr(bundles, "_json", counted)
    carried_out(planned(tmp_path), tmp_path / "out", retrain_from=recorded / "bundles")
    assert len(read) == 4
    assert set(read.values()) == {2}, "before all work, and once for the ten units that use one"


def test_a_record_that_another_process_makes_meanwhile_is_seen(recorded: Path, tmp_path: Path) -> None:
    assert BundleReader(tmp_path / "bundles").empty, "the folder is not there yet"
    reader = BundleReader(tmp_path / "bundles")
    files = sorted((recorded / "bundles").rglob("retrain-client0-seed1*.json"))

    def copied_by_another_process(file: Path, seed: int) -> None:
        code = (
            "import sys, shutil, json, pathlib as p\n"
            "source, folder, seed = p.Path(sys.argv[1]), p.Path(sys.argv[2]), int(sys.argv[3])\n"
            "folder.mkdir(exist_ok=True)\n"
            "shutil.copy(source.with_suffix('.safetensors'), folder)\n"
            "record = {**json.loads(source.read_text()), 'seed': seed}\n"
            "(folder / source.name).write_text(json.dumps(record))\n"
        )
        subprocess.run([sys.executable, "-c", code, str(file), str(tmp_path / "bundles"), str(seed)], check=True)

    copied_by_another_process(files[0], 10)
    assert not reader.empty
    (first,) = reader.read().references
    assert reader.read().references == [first]
    assert first.scores is reader.read().references[0].scores, "nothing is read again"
    copied_by_another_process(files[1], 11)
    assert [ref.seed for ref in reader.read().references] == [10, 11]
    assert reader.read().references[0] is first
    copied_by_another_process(files[0], 12)
    assert [ref.seed for ref in reader.read().references] == [12, 11], "a record that was replaced"
    (tmp_path / "bundles" / files[0].name).unlink()
    assert [ref.seed for ref in reader.read().references] == [11]


def test_a_folder_without_a_bundle_is_refused_before_all_work(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no reference bundle"):
        carried_out(planned(tmp_path), tmp_path / "out", retrain_from=tmp_path / "empty")
    with pytest.raises(InputError, match="name it with --retrain-from"):
        carried_out(planned(tmp_path), tmp_path / "out", record=True)
    assert not list((tmp_path / "out").rglob("results.json"))


def test_the_command_says_where_retrain_came_from(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    block = {**BLOCK, "targets": [0], "seeds": [0], "retrain_seeds": [10, 11], "methods": ["fedquit"]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in block.items()]
    (tmp_path / "study.toml").write_text("\n".join(["[[block]]", *lines]))
    arguments = ["study", "run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, [*arguments, "--retrain-from", str(recorded / "bundles")])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert "Retrain without 0 is from the bundle tiny (seed 10, cpu in" in words
    assert "Left empty, as a bundle has no weights: forget_js" in words


def test_a_newer_torch_that_says_more_of_a_layer_leaves_the_key_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(tiny(), model=ModelRecipe("cnn"))
    before = setting_key(build_setup(recipe))
    monkeypatch.setattr(nn.Conv2d, "extra_repr", lambda _: "and more")
    assert "and more" in build_setup(recipe).model.signature()
    assert setting_key(build_setup(recipe)) == before
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "cnn": models.MODELS["mlp"]})
    assert setting_key(build_setup(recipe)).training != before.training
