# SPDX-License-Identifier: Apache-2.0
"""`fedquit.run`, `fedquit.compare` and `fedquit.study` from Python: the same results as the command line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fedquit
from fedquit.cli import main
from fedquit.cli import runs as cli_runs
from fedquit.cli import studies as cli_studies
from fedquit.data import federate, load_dataset
from fedquit.errors import InputError, RequestError, UnknownNameError
from fedquit.federation.calls import _targets
from fedquit.federation.setting import as_setting
from fedquit.results.words import fixed, signed
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
    with pytest.raises(InputError, match="clients are a list of tuple, tuple: give a mapping of each client's name"):
        fedquit.Setting("mlp", [pair, pair], pair)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the data of client 'b': the data is empty: give"):
        fedquit.Setting("mlp", {"a": pair, "b": (x[:0], y[:0])}, pair)
    with pytest.raises(InputError, match="are alike"):
        fedquit.Setting("mlp", {"a": pair, "b": (torch.zeros(4, 3), y)}, pair)
    mapping: Any = {"input_ids": torch.zeros(4, 3, dtype=torch.long), "labels": y}
    with pytest.raises(InputError, match="are alike"):
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


def test_what_is_no_factory_of_a_network_is_refused_in_one_sentence() -> None:
    x, y = torch.randn(8, 2), torch.tensor([0, 1] * 4)
    clients = {"a": (x, y), "b": (x, y)}
    kept = nn.Linear(2, 2)
    for model, says in (
        (nn.Linear(2, 2), "the model is a Linear that exists: give a function that makes new ones"),
        (nn.Linear, r"factory needs arguments \(missing a required argument: 'in_features'\): give a function without"),
        (lambda shape, classes: nn.Linear(2, 2), "factory needs arguments .*'shape'"),
        (lambda: kept, "returns the same weights twice: let it make a new module at each call"),
        (lambda: nn.Sequential(kept), "returns the same weights twice"),
    ):
        with pytest.raises(InputError, match=says):
            fedquit.Setting(model, clients, (x, y))  # type: ignore[arg-type]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    fedquit.Setting(lambda: nn.Sequential(frozen, nn.Linear(2, 2)), clients, (x, y))  # a base that is kept once
    softmax = fedquit.Setting(lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), clients, (x, y))
    with pytest.raises(InputError, match="the model returns probabilities where logits are needed: leave its last"):
        fedquit.run(softmax, forget="a")


def test_a_printed_run_names_who_was_to_be_forgotten(recipe: Path) -> None:
    result = fedquit.run(own_setting(recipe), forget="east")
    assert "to be forgotten: client east" in str(result).splitlines()


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


def test_targets_as_text_are_those_of_the_command(recipe: Path) -> None:
    many = {"data.clients": 11, "train.rounds": 1}
    result = fedquit.compare(recipe, ["fedquit"], targets="10", settings=many, jobs=1)
    assert [run.requests[0].clients for run in result.runs] == [(10,)]
    assert _targets(as_setting(recipe), "0,1") == [0, 1]
    assert _targets(as_setting(recipe), "0+1, 3") == [(0, 1), 3]
    assert _targets(as_setting(recipe), "all") is None
    assert _targets(own_setting(recipe), "east") == [1]
    assert _targets(own_setting(recipe), "east,north+west") == [1, (0, 3)]


@pytest.mark.parametrize("name", ["east", "0,1", 1.5, None, "-1", ""])
def test_a_client_that_a_recipe_does_not_have_is_an_unknown_name(recipe: Path, name: object) -> None:
    with pytest.raises(UnknownNameError, match="choose one of 0, 1, 2, 3"):
        as_setting(recipe).ids_of(name)
    with pytest.raises(UnknownNameError, match="choose one of 0, 1, 2, 3"):
        fedquit.compare(recipe, ["fedquit"], targets=[name])


def test_clients_of_a_recipe_are_numbers_of_any_kind(recipe: Path) -> None:
    assert as_setting(recipe).ids_of(["2", torch.tensor(1), 0]) == (0, 1, 2)


def test_a_line_that_is_not_in_the_comparison_is_an_unknown_name(recipe: Path) -> None:
    result = fedquit.compare(recipe, ["fedquit"], jobs=1)
    assert result.line("retrain").phase == "retrained"
    with pytest.raises(UnknownNameError, match="unknown line of the comparison 'pga'"):
        result.line("pga")


PAIRS = TensorDataset(torch.arange(24.0).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def of_loader(loader: Any) -> fedquit.Setting:
    return fedquit.Setting("mlp", {"a": loader, "b": PAIRS}, PAIRS)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(PAIRS, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(PAIRS, batch_size=None, shuffle=True, collate_fn=lambda one: (one[0][None], one[1][None])),
        DataLoader(Stream(), batch_size=4, drop_last=True),
    ],
    ids=["shuffled", "unbatched", "stream"],
)
def test_a_loader_is_read_whole_and_in_the_order_of_its_data_set(loader: Any) -> None:
    plain = of_loader(PAIRS)
    names = {of_loader(loader).recipe.data.name for _ in range(3)}
    assert names == {plain.recipe.data.name}


def test_a_loader_is_read_with_its_own_collate_function() -> None:
    def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([x + 1 for x, _ in samples]), torch.stack([y for _, y in samples])

    moved = of_loader(DataLoader(PAIRS, batch_size=4, shuffle=True, collate_fn=collate))
    x, y = PAIRS.tensors
    assert moved.recipe.data.name == of_loader((x + 1, y)).recipe.data.name


def test_what_a_loader_chooses_at_random_is_refused() -> None:
    weighted = WeightedRandomSampler([1.0] * 6, 6)
    for loader in (
        DataLoader(PAIRS, batch_size=2, sampler=weighted),
        DataLoader(PAIRS, batch_sampler=BatchSampler(weighted, 2, drop_last=False)),
        DataLoader(PAIRS, batch_size=2, sampler=RandomSampler(PAIRS, num_samples=3)),
        DataLoader(PAIRS, batch_size=2, sampler=RandomSampler(PAIRS, replacement=True)),
    ):
        with pytest.raises(InputError, match=r"client 'a' chooses examples by .*, which cannot be undone"):
            of_loader(loader)


def test_data_that_differs_at_each_reading_is_refused() -> None:
    class Augmented(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            x, y = PAIRS[index]
            return x + torch.randn(4), y

    with pytest.raises(InputError, match="client 'a' differs from one reading to the next"):
        of_loader(Augmented())
    once = DataLoader(iter_once(), batch_size=2)
    with pytest.raises(InputError, match="client 'a' differs from one reading to the next"):
        of_loader(once)
    missing = torch.full((6, 4), torch.nan)
    with pytest.raises(InputError, match="NaN or infinity"):
        of_loader((missing, PAIRS.tensors[1]))


def iter_once() -> IterableDataset[Any]:
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.left = iter(PAIRS)

        def __iter__(self) -> Iterator[Any]:
            return self.left

    return Once()


def test_batches_of_several_widths_are_refused() -> None:
    wide = [(torch.zeros(2, width), torch.zeros(2, dtype=torch.long)) for width in (3, 4)]
    loader: Any = DataLoader(wide, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pad all to the same"):
        of_loader(loader)


class Reads(torch.nn.Module):
    """A network whose forward names its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, features: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.as_tensor(self.layer(features))


class TinyForCausalLM(torch.nn.Module):
    """Named as Hugging Face names models that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Embedding(5, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(input_ids))


def rows_of(mapping: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: part[i] for name, part in mapping.items()} for i in range(len(PAIRS))]


def test_mappings_data_sets_and_loaders_of_them_are_the_same_data_as_pairs() -> None:
    x, y = PAIRS.tensors
    mapping = {"features": x, "attention_mask": torch.ones(6, 4, dtype=torch.long), "idx": torch.arange(6), "labels": y}
    target = {"features": x, "target": y.int()}

    def name_of(data: Any, **options: Any) -> str:
        return fedquit.Setting(Reads, {"a": data, "b": data}, data, **options).recipe.data.name

    expected = name_of(PAIRS)
    forms: list[Any] = [mapping, rows_of(mapping), DataLoader(rows_of(mapping), batch_size=4, shuffle=True)]  # type: ignore[arg-type]
    assert {name_of(form) for form in forms} == {expected}
    assert name_of(target, labels="target") == expected
    assert name_of(rows_of(target), labels=lambda batch: batch["target"]) == expected
    assert name_of([(row, 1) for row in x], collate=lambda rows: (torch.stack([r for r, _ in rows]), y)) == expected
    named = fedquit.Setting("mlp", {"a": {"anything": x, "label": y}, "b": PAIRS}, PAIRS)
    assert named.recipe.data.name == expected, "a network by its name takes the one input that there is"


def test_a_federation_of_mappings_runs_and_gives_what_pairs_give() -> None:
    data = load_dataset("digits")
    parts = federate(data, partition="iid", clients=3).train
    pairs = {f"c{k}": (data.x[at][:60].flatten(1), data.y[at][:60]) for k, at in parts.items()}
    mappings = {name: {"features": x, "labels": y.short()} for name, (x, y) in pairs.items()}
    test = (data.test_x[:50].flatten(1), data.test_y[:50])

    class Digits(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

    short = {"train.rounds": 2, "recover.until": "rounds", "recover.max_rounds": 1, "engine.name": "sequential"}
    rows = [fedquit.run(fedquit.Setting(Digits, c, test, settings=short), forget="c1").rows for c in (pairs, mappings)]
    assert without_times(rows[0]) == without_times(rows[1])


def test_labels_of_a_causal_language_model_are_of_the_next_token_in_a_mapping_and_as_given_in_a_pair() -> None:
    tokens = torch.arange(24).reshape(6, 4) % 5
    mapping = {"input_ids": tokens, "labels": tokens}
    shifted = (tokens[:, :-1], tokens[:, 1:])
    names = [fedquit.Setting(TinyForCausalLM, {"a": d, "b": d}, d).recipe.data.name for d in (mapping, shifted)]
    assert names[0] == names[1]
    short: Any = {"input_ids": tokens, "labels": tokens[:, 0]}
    with pytest.raises(InputError, match="a causal language model needs a label for each token"):
        fedquit.Setting(TinyForCausalLM, {"a": short, "b": short}, short)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"attention_mask": torch.eye(6, 4)},
            "the attention_mask of client 'a' hides positions.*make the mask from the",
        ),
        ({"labels": torch.full((6,), -100)}, "labels of client 'a' are -100, which a federation cannot leave out"),
        ({"labels": torch.zeros(6)}, "the labels of client 'a' are torch.float32: give class numbers"),
        ({"labels": None, "y": torch.zeros(6).long()}, "the data of client 'a': .* without 'labels': name the key"),
        ({"features": None}, "the network takes 'features' first"),
        ({"features": None, "labels": None, "other": torch.zeros(6)}, "without 'labels'"),
    ],
)
def test_a_mapping_that_a_federation_cannot_use_is_refused_in_one_sentence(change: dict[str, Any], says: str) -> None:
    x, y = PAIRS.tensors
    given = {"features": x, "attention_mask": torch.ones(6, 4), "labels": y, **change}
    mapping: Any = {name: part for name, part in given.items() if part is not None}
    with pytest.raises(InputError, match=says):
        fedquit.Setting(Reads, {"a": mapping, "b": PAIRS}, PAIRS)


def test_several_inputs_are_refused_where_one_tensor_is_given_to_a_network() -> None:
    x, y = PAIRS.tensors
    for data in (((x, x), y), {"one": x, "two": x, "labels": y}):
        with pytest.raises(InputError, match="gives a network one tensor; join them"):
            fedquit.Setting("mlp", {"a": data, "b": PAIRS}, PAIRS)


def test_calls_take_the_options_of_the_commands() -> None:
    """All but how to print, and the recipe with its own keys, which the calls take as `setting` and `settings`."""
    commands: dict[str, tuple[Any, Any]] = {
        "run": (cli_runs.run, fedquit.run),
        "compare": (cli_runs.compare, fedquit.compare),
    }
    commands["study"] = (cli_studies.run, fedquit.study)
    for name, (command, call) in commands.items():
        of_recipe = {"recipe", "data_dir", "partition_file"} if name != "study" else set()
        asked = set(inspect.signature(command).parameters) - of_recipe - {"as_json"}
        assert asked <= set(inspect.signature(call).parameters), name


def test_a_study_records_retrains_and_takes_them_again(recipe: Path, tmp_path: Path) -> None:
    block = {"recipe": load(str(recipe)), "name": "tiny", "targets": [0], "methods": ["fedquit"]}
    bundles = tmp_path / "bundles"
    first = fedquit.study({"block": [block]}, retrain_from=bundles, record_retrains=True)
    assert any(bundles.iterdir())
    again = fedquit.study({"block": [block]}, retrain_from=bundles, out=tmp_path / "again")
    records = [json.loads(path.read_text()) for path in (tmp_path / "again").rglob("*.json")]
    assert any(record.get("retrain_from") for record in records if isinstance(record, dict))
    tables = [result.comparisons["tiny"].table for result in (first, again)]
    levels = [[line.means["forget_acc"] for line in table if line.phase == "retrained"] for table in tables]
    assert levels[0] == levels[1]
    with pytest.raises(InputError, match="needs a folder"):
        fedquit.study({"block": [block]}, record_retrains=True)


def test_a_setting_without_a_recipe_has_a_hold_out_and_a_control() -> None:
    short = {"train.rounds": 1, "recover.until": "rounds", "recover.max_rounds": 1}
    result = fedquit.run(own_setting(None, settings=short), forget="east")
    assert result.row("recovered")["holdout_verdict"]
    assert result.row("natural")["holdout_verdict"]
    assert "\nfedquit: " in str(result)
    assert "\nnatural, the control: " in str(result)
    assert fedquit.Setting("mlp", recipe=Recipe()).recipe.data.holdout == 0.0
    assert own_setting(None, settings={"data.holdout": 0.0}).recipe.data.holdout == 0.0


def test_a_printed_comparison_has_the_headline_of_the_report_and_natural_beside_it(recipe: Path) -> None:
    result = fedquit.compare(recipe, ["fedquit", "natural"], [0, 1, 2, 3], margin=90, retrain_seeds=2, jobs=1)
    line = result.line("fedquit")
    overall, forget = line.verdicts["avg_gap"], line.verdicts["forget_acc"]
    other = dataclasses.replace(overall, word="differs")
    assert other.word != forget.word
    verdicts = {**line.verdicts, "avg_gap": other}
    table = [dataclasses.replace(line, verdicts=verdicts)]
    judged = dataclasses.replace(result, comparison=dataclasses.replace(result.comparison, table=table))
    heads, cells = (re.split(r"\s{2,}", row) for row in str(judged).splitlines()[:2])
    shown = dict(zip(heads, cells, strict=True))
    assert shown["vs Retrain"] == "differs"
    assert shown["Natural's"] == fixed(line.natural_gaps["forget_acc"])
    assert shown["samples"] == signed(line.sample_memory)
    assert shown["distribution"] == signed(line.distribution_knowledge)
    assert "cannot tell" in shown["hold-out"]
