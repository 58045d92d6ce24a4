# SPDX-License-Identifier: Apache-2.0
"""`numbers.toml` holds every number of the paper's results tables, and none that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from fedquit.paper.numbers import Key, Printed, load_paper
from fedquit.paper.settings import SETTINGS, method_of, request_of, setting_of
from fedquit.running.recipe import load

ROOT = Path(__file__).parents[2]
TEX = Path(os.environ.get("FEDQUIT_PAPER_TEX", ROOT.parent / "shared" / "paper" / "fedquit.tex"))
needs_paper = pytest.mark.skipif(not TEX.exists(), reason="the paper's source is not at hand (FEDQUIT_PAPER_TEX)")
DESCRIPTION = "tab:outline_experiments"  # the one table without results


def stored() -> str:
    return files("fedquit.paper").joinpath("numbers.toml").read_text(encoding="utf-8")


@needs_paper
def test_the_file_is_what_the_script_copies_from_the_paper() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "paper_numbers.py"), str(TEX)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    assert subprocess.run(command, capture_output=True, check=True, env=environment).stdout.decode() == stored()


@needs_paper
def test_every_numeral_of_every_results_table_is_in_the_file_in_its_row_and_no_other() -> None:
    """Counted in the source itself, without the script: numerals of a row, whatever stands around them."""
    tex = TEX.read_text(encoding="utf-8")
    tables = {}
    for table in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", tex, re.S):
        label = re.findall(r"\\label\{(.*?)\}", table)[-1]
        if label != DESCRIPTION:
            tables[label] = table[table.index(r"\midrule") : table.index(r"\bottomrule")]
    content = tomllib.loads(stored())["table"]
    assert [table["label"] for table in content] == list(tables)
    for table in content:
        body = re.sub(r"\\multirow\{\d+\}|\\cmidrule\S*|\\rotatebox\{\d+\}", "", tables[table["label"]])
        lines = [line for line in re.split(r"\\\\", body) if line.count("&") >= len(table["columns"])]
        assert len(lines) == len(table["rows"])
        for line, row in zip(lines, table["rows"], strict=True):
            cells = line.split("&")[-len(table["columns"]) :]
            printed = Counter(re.findall(r"\d+(?:\.\d+)?", " ".join(cells)))
            kept = Counter(re.findall(r"\d+(?:\.\d+)?", " ".join(row["cells"])))
            assert kept == printed, (table["label"], row["name"])


def test_a_cell_is_read_as_it_is_printed() -> None:
    assert Printed.read("34.6(3.5±2.4)") == Printed(34.6, gap=3.5, gap_deviation=2.4, digits=1)
    assert Printed.read("51.0±1.4") == Printed(51.0, deviation=1.4, digits=1)
    assert Printed.read("3.08e09(52.6×)") == Printed(3.08e9, times=52.6, digits=0)
    assert Printed.read("37.76(-13.26)") == Printed(37.76, gap=-13.26, digits=2)
    assert Printed.read("0") == Printed(0.0, digits=0)
    with pytest.raises(ValueError, match="is not a number"):
        Printed.read("about 3")


def test_numbers_stand_under_their_setting_method_phase_and_measure() -> None:
    paper = load_paper()
    at = {key: cell.printed.value for key, cell in paper.by_key.items()}
    assert at[Key("cifar100-lda", "client", "fedquit", "recovered", "forget_acc")] == 34.6
    assert at[Key("cifar100-lda", "pair", "not", "recovered", "mia_yeom")] == 41.8
    assert at[Key("cifar100-lda-mit-b0", "pair", "not", "recovered", "mia_yeom")] == 59.0
    assert at[Key("cub200-lda", "client", "mode", "unlearned", "bytes")] == 4.09e9
    assert at[Key("shakespeare", "client", "fedau", "unlearned", "retain_acc")] == 15.2
    assert at[Key("cifar100-lda", "client", "fedquit teacher=topk", "recovered", "rounds")] == 2.0
    assert at[Key("cifar100-lda", "client", "fedquit tau=1.5", "unlearned", "forget_acc")] == 2.0
    assert at[Key("cifar100-iid", "client", "fedquit", "budget-0.5", "retain_acc")] == 91.52
    assert at[Key("cifar100-lda", "samples-0.01", "retrain", "retrained", "forget_acc")] == 55.0
    assert {key.setting for key in at} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recipe_of_a_setting_is_recognised(name: str) -> None:
    recipe = load(f"settings/{name}").to_dict()
    assert setting_of(recipe) == (name, "")
    assert request_of(recipe, 1) == "client"
    assert method_of(recipe["method"], name) == "fedquit"


def test_a_partition_file_tells_by_its_name_how_the_data_is_divided() -> None:
    recipe = load("settings/cifar100-lda").to_dict()
    recipe["data"] |= {"partition": "file", "partition_file": "cifar100_iid_clients10.json"}
    assert setting_of(recipe) == ("cifar100-iid", "")


@pytest.mark.parametrize(
    ("section", "key", "value", "why"),
    [
        ("train", "rounds", 20, "20 rounds in place of 200"),
        ("train", "clients_per_round", 5, "5 clients take part"),
        ("train", "epochs", 10.0, "10.0 epochs a round"),
        ("model", "name", "mlp", "no setting of the paper"),
        ("data", "alpha", 0.5, "no setting of the paper"),
    ],
)
def test_a_recipe_that_differs_is_no_setting_of_the_paper(section: str, key: str, value: object, why: str) -> None:
    recipe = load("settings/cifar100-lda").to_dict()
    recipe[section][key] = value
    setting, fault = setting_of(recipe)
    assert setting == ""
    assert why in fault


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("teachers/iid-top-5", "fedquit teacher=topk"),
        ("teachers/lda-random", "fedquit teacher=random"),
        ("teachers/lda-fedquit", "fedquit"),
        ("temperatures/lda-1.5", "fedquit tau=1.5"),
        ("temperatures/iid-1", "fedquit"),
        ("temperatures/iid-inf", "fedquit teacher=flatten"),
        ("v/iid-minus-5", "fedquit teacher=fixed v=-5"),
        ("v/lda-0", "fedquit teacher=fixed"),
        ("v/lda-star", "fedquit teacher=entropy"),
        ("losses/iid-mse", "fedquit loss=mse"),
    ],
)
def test_the_method_of_a_recipe_has_the_name_that_numbers_and_claims_use(recipe: str, method: str) -> None:
    loaded = load(recipe).to_dict()
    assert method_of(loaded["method"], setting_of(loaded)[0]) == method


def test_samples_and_pairs_are_requests_of_their_own() -> None:
    assert request_of(load("samples/lda-1-rare").to_dict(), 1) == "samples-0.01"
    assert request_of(load("pairs/resnet18-0-1").to_dict(), 2) == "pair"
