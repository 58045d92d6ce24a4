# SPDX-License-Identifier: Apache-2.0
"""The hash names a recipe in every record: it must stay the same from version to version."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fedquit.errors import StoreError
from fedquit.running import recipe as module
from fedquit.running import runner
from fedquit.running.recipe import (
    FIRST_KEYS,
    EventRecipe,
    Recipe,
    TrainRecipe,
    build,
    hash_of,
    load,
    without_later_defaults,
)
from fedquit.running.setup import build_setup
from fedquit.running.training_cache import training_hash

HASHES: dict[str, str] = json.loads(Path(__file__).with_name("recipe_hashes.json").read_text())


@pytest.mark.parametrize("name", HASHES)
def test_a_packaged_recipe_keeps_its_hash(name: str) -> None:
    assert load(name).hash == HASHES[name]


@dataclass(frozen=True)
class LaterTrain(TrainRecipe):
    nesterov: bool = False
    milestones: tuple[int, ...] = (10, 20)


@dataclass(frozen=True)
class LaterEvent(EventRecipe):
    classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Privacy:
    noise: float = float("inf")
    clip: float = 1.0


@dataclass(frozen=True)
class LaterRecipe(Recipe):
    """A recipe of a later version, with new keys in a section, in every request, at the top, and a new section."""

    train: LaterTrain = LaterTrain()
    request: tuple[LaterEvent, ...] = (LaterEvent(clients=(0,)),)
    privacy: Privacy = Privacy()
    tags: dict[str, Any] = field(default_factory=dict)


def later(name: str, **changes: Any) -> LaterRecipe:
    plain = load(name).to_dict()
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        if not inner:
            plain[section] = value
        elif section == "request":
            plain[section][0][inner] = value
        else:
            plain.setdefault(section, {})[inner] = value
    return build(LaterRecipe, plain, "recipe")


@pytest.mark.parametrize("name", ["demo", "settings/cifar100-lda", "budgets/iid"])
def test_a_key_added_later_leaves_the_hash_alone_at_its_default(name: str) -> None:
    recipe = later(name)
    assert "nesterov" in recipe.to_dict()["train"], "a record says every key"
    assert recipe.to_dict()["privacy"] == {"noise": "inf", "clip": 1.0}
    assert recipe.hash == load(name).hash == HASHES[name]
    assert hash_of(json.loads(json.dumps(recipe.to_dict())), LaterRecipe) == HASHES[name]


CHANGES: list[dict[str, Any]] = [
    {"train__nesterov": True},
    {"train__milestones": [10]},
    {"request__classes": [3]},
    {"privacy__noise": 0.5},
    {"privacy__clip": 2.0},
    {"tags": {"a": 1}},
]


def test_a_key_added_later_changes_the_hash_where_it_differs() -> None:
    hashes = [later("demo", **change).hash for change in CHANGES]
    assert len({HASHES["demo"], *hashes}) == len(CHANGES) + 1


def of_first_schema(plain: dict[str, Any]) -> dict[str, Any]:
    """What a recipe says under the keys of schema 1."""
    kept = {key: value for key, value in plain.items() if key in FIRST_KEYS[""]}
    for section, keys in FIRST_KEYS.items():
        entries = kept.get(section)
        if isinstance(entries, dict):
            kept[section] = {key: value for key, value in entries.items() if key in keys}
        elif isinstance(entries, list):
            kept[section] = [{key: value for key, value in entry.items() if key in keys} for entry in entries]
    return kept


def test_a_key_of_the_first_schema_is_hashed_at_its_default_too() -> None:
    plain = load("settings/cifar100-lda").to_dict()
    assert without_later_defaults(plain) == of_first_schema(plain)


def test_a_margin_of_ones_own_is_another_recipe() -> None:
    assert load("demo", ["evaluate.margin=0.05"]).hash == HASHES["demo"]
    assert load("demo", ["evaluate.margin=0.1"]).hash != HASHES["demo"]


def test_a_default_that_has_changed_leaves_older_records_alone() -> None:
    """They say `engine.compile = "never"`, the default when they were made."""
    assert load("demo", ["engine.compile=never"]).hash == HASHES["demo"]
    assert load("demo", ["engine.compile=always"]).hash != HASHES["demo"]


def test_an_unknown_key_of_a_later_record_is_hashed() -> None:
    plain = load("demo").to_dict()
    assert hash_of({**plain, "unknown": 0}) != hash_of(plain)


def test_the_first_keys_are_still_there() -> None:
    """A key that is taken away or renamed would change the hash of every recipe."""
    sections = get_type_hints(Recipe)
    for section, keys in FIRST_KEYS.items():
        schema = module._section_class(sections[section]) if section else Recipe
        assert schema
        assert keys <= {f.name for f in fields(schema)}


def test_a_key_added_later_leaves_cached_trainings_and_run_folders_usable(tmp_path: Path) -> None:
    """At its default it changes neither the name of a training in the cache nor what a folder's run is held against."""
    setup = build_setup(load("demo"))
    now = dataclasses.replace(setup, recipe=later("demo"))
    changed = dataclasses.replace(setup, recipe=later("demo", train__nesterov=True))
    names = [training_hash(s, s.data, {}, None) for s in (setup, now, changed)]
    assert names[0] == names[1] != names[2]
    runner._claim(tmp_path, setup)
    runner._claim(tmp_path, now)
    with pytest.raises(StoreError, match=r"another recipe \(it differs in train.nesterov\)"):
        runner._claim(tmp_path, changed)
