# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedquit.errors import FedquitError, InputError, UnknownNameError
from fedquit.methods.fedquit import FedQUIT
from fedquit.recipe import Recipe, build, load, packaged


def written(folder: Path, text: str, name: str = "r.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_recipe_loads_and_reads_back_from_json(name: str) -> None:
    recipe = load(name)
    assert recipe.title
    assert build(Recipe, json.loads(json.dumps(recipe.to_dict())), "recipe") == recipe


def test_the_keys_of_method_are_the_fields_of_its_class(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, '[method]\nname = "fedquit"\nlr = 1\nteacher = "topk"\nk = 3\n'))
    assert recipe.build_method() == FedQUIT(lr=1.0, teacher="topk", k=3)


def test_settings_change_single_keys(tmp_path: Path) -> None:
    settings = ["method.lr=3e-3", "data.partition=iid", "request.0.clients=[4, 5]", "seed=7", "retrain=true"]
    recipe = load("demo", settings)
    assert recipe.method["lr"] == 3e-3
    assert recipe.data.partition == "iid"
    assert recipe.request[0].clients == (4, 5)
    assert recipe.seed == 7


def test_a_recipe_extends_another_by_one_level(tmp_path: Path) -> None:
    written(tmp_path, "seed = 3\n[train]\nrounds = 5\nlr = 0.5\n", "base.toml")
    recipe = load(written(tmp_path, 'extends = "base.toml"\n[train]\nrounds = 9\n'))
    assert (recipe.seed, recipe.train.rounds, recipe.train.lr) == (3, 9, 0.5)
    assert load(written(tmp_path, 'extends = "demo"\nseed = 5\n', "s.toml")).train == load("demo").train
    written(tmp_path, 'extends = "base.toml"\n', "middle.toml")
    with pytest.raises(InputError, match="only one level"):
        load(written(tmp_path, 'extends = "middle.toml"\n', "top.toml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sed = 1", r"unknown key in recipe 'sed': did you mean 'seed'\?"),
        ("[train]\nround = 3", r"unknown key in recipe.train 'round': did you mean 'rounds'\?"),
        ('[method]\nname = "fedquti"', r"unknown method 'fedquti': did you mean 'fedquit'\?"),
        ('[method]\nname = "fedquit"\nteachr = "min"', r"unknown key in method 'teachr': did you mean 'teacher'\?"),
        ('[method]\nname = "fedquit"\nteacher = "mim"', r"unknown teacher 'mim': did you mean 'min'\?"),
        ('[method]\nname = "fedquit"\nloss = "kll"', r"unknown loss 'kll': did you mean 'kl'\?"),
        ('[method]\nname = "no_such_module:Thing"', r"cannot be imported .*PYTHONPATH"),
        ('[method]\nname = "json:JSONDecoder"', r"is not a method"),
        ('[method]\nname = "json:JSONDecoda"', r"did you mean 'JSONDecoder'"),
        ('[recover]\nuntil = "retraind"', r"did you mean 'retrained'\?"),
        ('[train]\nrounds = "many"', r"recipe.train.rounds is 'many', but must be of type int"),
        ("[train]\nrounds = true", r"but must be of type int"),
        ("[train]\nrounds = 0", r"train.rounds must be at least 1"),
        ("[train]\nlr = 0", r"train.lr must be above 0"),
        ("[train]\nbatch_size = 0", r"train.batch_size must be at least 1"),
        ("[train]\nepochs = 0", r"train.epochs must be above 0"),
        ("[data]\nclients = 1", r"data.clients must be at least 2"),
        ("[data]\nholdout = 1.5", r"data.holdout must be"),
        ("[data]\npublic = 1", r"data.public must be"),
        ("[[request]]\nsamples = 1.0", r"request.samples must be"),
        ("request = []", r"at least one \[\[request\]\]"),
        ("retrain = false", r"recovery until Retrain's accuracy needs a Retrain"),
        ("[recover]\nmax_rounds = -1", r"recover.max_rounds must be"),
        ("seed = ", r"is not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_one_clear_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedquitError, match=sentence) as found:
        load(written(tmp_path, text))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("method.lr", "has no value: write key=value"),
        ("seed.deep=1", "'seed' is a value, not a section"),
        ("request.clients=[1]", r"say which entry, for example request\.0\.clients"),
        ("request.3.clients=[1]", "there is no entry '3'"),
        ("train.rouds=3", "did you mean 'rounds'"),
    ],
)
def test_a_wrong_setting_is_one_clear_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(FedquitError, match=sentence):
        load("demo", [setting])


def test_a_recipe_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown recipe 'dem': did you mean 'demo'\?"):
        load("dem")
    with pytest.raises(InputError, match="cannot read the recipe"):
        load("nowhere/to/be/found.toml")
