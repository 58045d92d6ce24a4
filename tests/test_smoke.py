# SPDX-License-Identifier: Apache-2.0
"""Every kind of recipe runs in its smallest size, and that size changes nothing but the size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data.published_world import SAMPLES, SMALL_BIRDS, small_cifar10, small_cifar100
from fedquit.cli import main
from fedquit.data.cifar import read_cifar
from fedquit.data.cub import read_birds
from fedquit.data.partition import PARTITIONS
from fedquit.data.preprocessing import Pixels
from fedquit.running.recipe import Recipe, build, load, packaged
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.smoke import LARGEST, few, images, smoke, text

NAMES = packaged()
OF_TRANSFORMERS = ("mit_b0", "huggingface")  # networks that need the extra
BEGINS_UNTRAINED = pytest.mark.filterwarnings("ignore:mit_b0 begins untrained")


def kind(recipe: Recipe) -> tuple[str, str, str]:
    """Of which one of each kind runs in the default tests: network, data, and request."""
    first = recipe.request[0]
    request = "samples" if first.samples else "several" if len(first.clients) > 1 else "client"
    return recipe.model.name, recipe.data.name, request


def words(setting: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All settings of a recipe that choose what is done; of a number, only that there is one."""
    if isinstance(setting, dict):
        for key, value in setting.items():
            yield from words(value, f"{name}.{key}")
    elif isinstance(setting, list | tuple):
        for value in setting:
            yield from words(value, name)
    elif name != ".title":
        yield name, setting if isinstance(setting, str | bool | None) else "a number"


def unlike(names: Sequence[str]) -> list[str]:
    """One of all recipes that differ in nothing but numbers, and of ablations, in the data too: settings have it."""
    chosen = {}
    for name in names:
        recipe = load(name).to_dict()
        data = recipe.pop("data") if not name.startswith("settings/") else {}
        chosen[frozenset([*words(recipe), ("data", data.get("name"))])] = name
    return list(chosen.values())


PLAIN_LAST = sorted(NAMES, key=lambda name: name.startswith("settings/"))
FIRST = {kind(load(name)): name for name in PLAIN_LAST}


def marked(name: str, *marks: pytest.MarkDecorator) -> Any:
    needs = [pytest.mark.transformers] if load(name).model.name in OF_TRANSFORMERS else []
    return pytest.param(name, marks=[*marks, *needs])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where federations are kept: ablations share their Original and Retrain."""
    return tmp_path_factory.mktemp("trained")


@BEGINS_UNTRAINED
@pytest.mark.parametrize(
    "name",
    [marked(n) for n in FIRST.values()]
    + [marked(n, pytest.mark.slow) for n in unlike(NAMES) if n not in FIRST.values()],
)
def test_the_smallest_size_of_a_recipe_runs_from_the_request_to_the_results(
    name: str, tmp_path: Path, trained: Path
) -> None:
    if load(name).model.name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    recipe = smoke(load(name))
    found = run(recipe, tmp_path / "out", cache=trained)
    rows = found["rows"]
    assert [row["phase"] for row in rows][:4] == ["original", "retrained", "unlearned", "recovered"]
    control = ["natural"] if recipe.recover.control else []
    assert [row["phase"] for row in rows][4:] == control + ["budget"] * len(recipe.recover.budgets)
    at = {row["phase"]: row for row in rows}
    assert at["recovered"]["rounds"] == 1, "recovery is tried too"
    assert len({row["fingerprint"] for row in rows[:4]}) == 4, "every phase trained something"
    assert found["recipe"]["method"]["name"] == "fedquit"


def test_there_is_one_of_every_kind_that_the_paper_has() -> None:
    assert set(FIRST) == {
        ("mlp", "fashion_mnist_mini", "client"),
        ("resnet18", "cifar10", "client"),
        ("resnet18", "cifar100", "client"),
        ("resnet18", "cifar100", "samples"),
        ("resnet18", "cifar100", "several"),
        ("mit_b0", "cifar100", "client"),
        ("mit_b0", "cifar100", "several"),
        ("mit_b0", "cub200", "client"),
        ("char_lstm", "shakespeare", "client"),
        ("huggingface", "shakespeare_speakers", "client"),
        ("huggingface", "sotu", "client"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_size_of_every_recipe_keeps_what_the_recipe_is_about(name: str) -> None:
    whole = load(name)
    small = smoke(whole)
    assert small.method == whole.method
    assert small.model.name == whole.model.name
    assert small.train.optimizer == whole.train.optimizer
    assert small.data.partition == whole.data.partition
    assert small.recover.budgets == whole.recover.budgets
    for mine, theirs in zip(small.request, whole.request, strict=True):
        assert (mine.kind, mine.samples, mine.choose) == (theirs.kind, theirs.samples, theirs.choose)
        assert len(mine.clients) == len(theirs.clients)
        assert max(mine.clients) < small.data.clients - 1, "somebody stays"
    partial = bool(whole.train.clients_per_round)
    assert (0 < small.train.clients_per_round < small.data.clients) == partial
    assert small.title == f"{whole.title} (smoke)"
    assert build(Recipe, json.loads(json.dumps(small.to_dict())), "recipe").to_dict() == small.to_dict()


def test_made_up_images_are_stored_and_read_as_the_published_ones() -> None:
    for small, name in ((small_cifar10(), "cifar10"), (small_cifar100(), "cifar100")):
        for options in ({}, {"augment": False}, {"size": 48}, {"size": 48, "augment": False}):
            real = read_cifar(small, SAMPLES, **options)
            made = images(like=name, examples=6, **options)
            assert (made.look, made.classes, made.shape) == (real.look, real.classes, real.shape)
            assert (made.x.dtype, made.x.shape[1:]) == (real.x.dtype, real.x.shape[1:])


def test_made_up_photographs_are_read_as_the_published_ones(tmp_path: Path) -> None:
    (tmp_path / "CUB_200_2011").symlink_to(SAMPLES / "CUB_200_2011")
    real = read_birds(SMALL_BIRDS, tmp_path, size=16)
    made = images(like="cub200", examples=6, size=16)
    assert (made.look, made.shape, made.x.dtype) == (real.look, real.shape, real.x.dtype)
    assert made.classes == 200
    plain = images(like="cub200", examples=6, size=16, augment=False).look
    assert plain == read_birds(SMALL_BIRDS, tmp_path, size=16, augment=False).look


def test_networks_read_small_images_only() -> None:
    for name in ("cifar100", "cub200"):
        assert images(like=name, examples=2, size=224).shape == (3, LARGEST, LARGEST)
    assert isinstance(images(like="cifar100", examples=2, size=224).look, Pixels)


def test_made_up_text_goes_on_with_the_next_character() -> None:
    data = text(examples=4, window=7)
    assert (data.x.shape, data.y.shape, data.classes) == ((4, 7), (4, 7), 65)
    assert torch.equal(data.x[:, 1:], data.y[:, :-1])


def test_few_examples_are_spread_over_the_whole_set() -> None:
    options: dict[str, object] = {"examples": 90, "test_examples": 30, "classes": 3, "size": 4}
    data = few(of="synthetic", options=options, examples=10)
    assert (len(data.y), data.shape, data.classes) == (10, (1, 4, 4), 3)
    assert set(data.y.tolist()) == {0, 1, 2}
    assert len(few(of="synthetic", options={**options, "examples": 5}, examples=10).y) == 5


def test_a_partition_file_and_events_of_many_clients_are_made_small() -> None:
    whole = load("demo")
    data = dataclasses.replace(whole.data, partition="file", partition_file="x.json", holdout=0.01, public=0.01)
    events = tuple(dataclasses.replace(whole.request[0], clients=c) for c in ((7,), (3, 9)))
    small = smoke(dataclasses.replace(whole, data=data, request=events))
    assert small.data.partition in PARTITIONS.keys() - {"file"}
    assert small.data.partition_file == ""
    assert [e.clients for e in small.request] == [(1,), (0, 2)]
    setup = build_setup(small)
    assert len(setup.data.clients) == 5
    assert len(setup.data.public) > 0
    assert all(len(h) > 0 for h in setup.data.holdout.values())


def test_the_command_line_tries_a_recipe_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDQUIT_DATA", str(tmp_path / "nothing"))
    words = ["fedquit", "run", "settings/shakespeare", "--smoke", "--out", str(tmp_path / "a"), "--json"]
    monkeypatch.setattr("sys.argv", [*words, "--set", "method.lr=2e-3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["title"].endswith("(smoke)")
    assert found["recipe"]["method"]["lr"] == 2e-3
    assert (tmp_path / "a" / "report.html").exists()
