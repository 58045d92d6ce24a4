# SPDX-License-Identifier: Apache-2.0
"""`fedquit.run`, `fedquit.compare` and `fedquit.study` from Python: the same results as the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedquit
from fedquit.cli import main
from fedquit.data import federate, load_dataset
from fedquit.errors import InputError, RequestError, UnknownNameError
from fedquit.running.recipe import Recipe, load

TINY = """
title = "tiny"
[data]
name = "synthetic"
options = { examples = 120, test_examples = 60, classes = 3, size = 4 }
partition = "iid"
clients = 4
holdout = 0.2
[model]
name = "mlp"
[train]
rounds = 2
[[request]]
clients = [1]
[method]
name = "fedquit"
lr = 1e-3
[recover]
until = "rounds"
max_rounds = 1
[engine]
name = "sequential"
"""
TIMES = ("seconds", "client_seconds")
NAMES = ("north", "east", "south", "west")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def without_times(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def shell(*words: str) -> int:
    with patch.object(sys, "argv", ["fedquit", *words]), pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def own_setting(recipe: Path | None, **changes: Any) -> fedquit.Setting:
    """The recipe's own data, handed over client by client as objects."""
    dataset = load_dataset("synthetic", examples=120, test_examples=60, classes=3, size=4)
    data = federate(dataset, partition="iid", clients=4)
    clients = {name: (data.x[data.train[k]], data.y[data.train[k]]) for k, name in enumerate(NAMES)}
    given: dict[str, Any] = {"model": network, "clients": clients, "test": (dataset.test_x, dataset.test_y)}
    return fedquit.Setting(**{**given, "recipe": recipe, **changes})


def test_run_from_python_gives_the_rows_of_the_command(recipe: Path, tmp_path: Path) -> None:
    assert shell("run", str(recipe), "--out", str(tmp_path / "shell"), "--set", "method.lr=3e-3") == 0
    stored = json.loads((tmp_path / "shell" / "results.json").read_text())
    result = fedquit.run(recipe, settings={"method.lr": 3e-3}, out=tmp_path / "python")
    assert without_times(result.rows) == without_times(stored["rows"])
    assert result.to_dict()["recipe_hash"] == stored["recipe_hash"]
    assert json.loads((tmp_path / "python" / "results.json").read_text())["rows"] == result.rows
    assert fedquit.run(recipe, settings=["method.lr=3e-3"]).rows[-1]["fingerprint"] == result.rows[-1]["fingerprint"]


def test_the_result_of_a_run_has_its_model_its_table_and_its_page(recipe: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    result = fedquit.run(recipe, forget=[2])
    assert result.row("recovered")["clients"] == [2]
    model = result.model().eval()
    dataset = load_dataset("synthetic", examples=120, test_examples=60, classes=3, size=4)
    with torch.no_grad():
        right = (model(dataset.test_x).argmax(-1) == dataset.test_y).float().mean()
    assert 100 * float(right) == pytest.approx(result.row("recovered")["test_acc"])
    table = result.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert list(table["phase"]) == [row["phase"] for row in result.rows]
    assert list(table["forget_acc"]) == [row["forget_acc"] for row in result.rows]
    assert "recovered" in str(result)
    assert f"{result.row('recovered')['forget_acc']:.1f}" in str(result)
    page = result.report(tmp_path / "page")
    assert page == tmp_path / "page" / "report.html"
    assert "tiny" in page.read_text()
    folder = result.folder
    assert (folder / "results.json").exists()
    del result
    assert not folder.exists()  # nobody named it


def test_objects_give_what_a_recipe_with_the_same_content_gives(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n\n\ndef build(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = fedquit.run(recipe, settings={"model.name": "own_network:build"})
    own = fedquit.run(own_setting(recipe), forget="east")
    assert own.clients == {"north": 0, "east": 1, "south": 2, "west": 3}
    assert without_times(own.rows) == without_times(named.rows)
    assert own.results.recipe["data"]["name"].startswith("memory/")
    monkeypatch.delitem(sys.modules, "own_network")


def test_data_sets_and_loaders_of_pairs_are_read_in_their_order(recipe: Path) -> None:
    pairs = own_setting(recipe)
    x, y = torch.arange(24.0).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    tensors = {"a": (x, y), "b": (x + 1, y)}
    sets = {name: TensorDataset(*pair) for name, pair in tensors.items()}
    loaders = {name: DataLoader(one, batch_size=4) for name, one in sets.items()}
    test = (x, y)
    names = [fedquit.Setting("mlp", clients, test).recipe.data.name for clients in (tensors, sets, loaders)]
    assert len(set(names)) == 1
    assert names[0] != pairs.recipe.data.name
    other = fedquit.Setting("mlp", {"a": (x, y), "b": (x + 2, y)}, test)
    assert other.recipe.data.name != names[0]


def test_a_killed_run_on_objects_goes_on_and_another_one_is_refused(recipe: Path, tmp_path: Path) -> None:
    first = fedquit.run(own_setting(recipe), out=tmp_path / "run")
    again = fedquit.run(own_setting(recipe), out=tmp_path / "run")
    assert again.rows == first.rows
    wider = own_setting(recipe, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(fedquit.StoreError, match="holds a run of another recipe"):
        fedquit.run(wider, out=tmp_path / "run")


def test_compare_from_python_gives_the_table_of_the_command(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    words = ["--methods", "fedquit,natural", "--targets", "0,2", "--jobs", "1"]
    assert shell("compare", str(recipe), "--out", str(tmp_path / "shell"), *words) == 0
    stored = json.loads((tmp_path / "shell" / "comparison.json").read_text())
    result = fedquit.compare(recipe, ["fedquit", "natural"], [0, 2], jobs=1)
    assert json.loads(json.dumps(result.to_dict()["table"])) == stored["table"]
    assert [run.folder for run in result.runs] == stored["runs"]
    assert result.failed == []
    table = result.to_pandas()
    assert list(table["method"]) == [line.method for line in result.table]
    line = result.line("fedquit")
    chosen = table[table["method"] == "fedquit"].iloc[0]
    assert chosen["forget_acc"] == line.means["forget_acc"]
    assert chosen["forget_acc_gap"] == line.gaps["forget_acc"]
    assert "fedquit" in str(result)
    assert result.report(tmp_path / "comparison.html").exists()


def test_compare_on_objects_speaks_of_clients_by_name(recipe: Path) -> None:
    result = fedquit.compare(own_setting(recipe), "fedquit", ["south", ["north", "west"]])
    assert [run.requests[0].clients for run in result.runs] == [(2,), (0, 3)]
    with pytest.raises(InputError, match="cannot reach other processes"):
        fedquit.compare(own_setting(recipe), "fedquit", ["south"], jobs=2)


def test_study_from_python_gives_the_tables_of_the_command(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    content = {"title": "both", "block": [{"recipe": "tiny.toml", "targets": [0, 1], "methods": ["fedquit"]}]}
    lines = ('title = "both"', "[[block]]", 'recipe = "tiny.toml"', "targets = [0, 1]", 'methods = ["fedquit"]')
    text = "\n".join(lines)
    (tmp_path / "both.toml").write_text(text)
    assert shell("study", "run", str(tmp_path / "both.toml"), "--out", str(tmp_path / "shell")) == 0
    stored = json.loads((tmp_path / "shell" / "units" / "tiny" / "comparison.json").read_text())
    from_file = fedquit.study(tmp_path / "both.toml")
    block = {**content["block"][0], "recipe": load(str(recipe)), "name": "tiny"}  # type: ignore[dict-item]
    from_objects = fedquit.study({**content, "block": [block]})
    for result in (from_file, from_objects):
        assert not result.stopped
        assert result.status.failed == {}
        assert json.loads(json.dumps(result.comparisons["tiny"].to_dict()["table"])) == stored["table"]
        assert set(result.to_pandas()["setting"]) == {"tiny"}
        assert "fedquit" in str(result)


def test_a_study_takes_settings_of_objects(recipe: Path, tmp_path: Path) -> None:
    block = {"recipe": own_setting(recipe), "name": "mine", "targets": ["east"], "methods": ["fedquit"]}
    result = fedquit.study({"block": [block]}, out=tmp_path / "study")
    run = fedquit.run(own_setting(recipe), forget="east")
    (line,) = [line for line in result.comparisons["mine"].table if line.method == "fedquit"]
    assert line.means["forget_acc"] == run.row("recovered")["forget_acc"]
    with pytest.raises(InputError, match="leave workers out"):
        fedquit.study({"block": [block]}, workers=2)
    again = fedquit.study({"block": [block]}, out=tmp_path / "study")
    assert len(again.status.done) == len(result.status.done)


def test_what_cannot_be_a_setting_is_refused_in_one_sentence(recipe: Path) -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    pair = (x, y)
    with pytest.raises(InputError, match="no test data: give test"):
        fedquit.Setting("mlp", {"a": pair, "b": pair})
    with pytest.raises(InputError, match="no clients: give clients"):
        fedquit.Setting("mlp", test=pair)
    with pytest.raises(InputError, match="at least two"):
        fedquit.Setting("mlp", {"a": pair}, pair)
    with pytest.raises(InputError, match="are alike"):
        fedquit.Setting("mlp", {"a": pair, "b": (torch.zeros(4, 3), y)}, pair)
    mapping: Any = {"input_ids": torch.zeros(4, 3, dtype=torch.long), "labels": y}
    with pytest.raises(InputError, match="pairs of tensors"):
        fedquit.Setting("mlp", {"a": mapping, "b": mapping}, pair)
    with pytest.raises(UnknownNameError, match="did you mean 'north'"):
        fedquit.run(own_setting(recipe), forget="nort")
    with pytest.raises(RequestError, match="name at least one"):
        fedquit.run(own_setting(recipe), forget=[])
    with pytest.raises(InputError, match="leave it out"):
        fedquit.run(own_setting(recipe), smoke=True)
    with pytest.raises(InputError, match=r"same fedquit\.Setting"):
        fedquit.run(own_setting(recipe).recipe)
    with pytest.raises(UnknownNameError, match="key in recipe"):
        fedquit.run(Recipe(), settings={"trian.rounds": 1})


def test_without_pandas_a_sentence_says_what_to_install(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fedquit.run(recipe)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"pip install 'fedquit\[pandas\]'"):
        result.to_pandas()


def test_progress_names_the_phases_on_the_error_stream(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedquit.run(recipe, progress=True)
    assert "Retrain: from scratch, without them" in capsys.readouterr().err
    fedquit.run(recipe)
    assert capsys.readouterr().err == ""


def test_threads_of_the_recipe_are_given_back(recipe: Path) -> None:
    before = torch.get_num_threads()
    fedquit.run(recipe, settings={"engine.threads": before + 1})
    assert torch.get_num_threads() == before
