# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fedquit.core import Local
from fedquit.core.fedavg import Learn
from fedquit.errors import FedquitError, InputError, UnknownNameError
from fedquit.methods.fedquit import FedQUIT
from fedquit.methods.pga import PGA
from fedquit.running.recipe import Recipe, TrainRecipe, build, load, packaged


def written(folder: Path, text: str, name: str = "r.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_recipe_loads_and_reads_back_from_json(name: str) -> None:
    recipe = load(name)
    assert recipe.title
    again = build(Recipe, json.loads(json.dumps(recipe.to_dict())), "recipe")
    assert again.to_dict() == recipe.to_dict()
    assert again.build_method() == recipe.build_method()


def test_a_recipe_is_named_by_what_it_says_and_not_by_where_files_lie() -> None:
    recipe = load("settings/cifar100-lda")
    dealt = dataclasses.replace(recipe.data, partition="file", partition_file="/here/parts.json", folder="/here")
    moved = dataclasses.replace(dealt, partition_file="there/parts.json", folder="/there")
    one, other = dataclasses.replace(recipe, data=dealt), dataclasses.replace(recipe, data=moved)
    assert one.hash == other.hash == build(Recipe, json.loads(json.dumps(one.to_dict())), "recipe").hash
    changed = dataclasses.replace(recipe, seed=1), dataclasses.replace(one, method={**one.method, "lr": 2e-4})
    assert len({recipe.hash, one.hash, *(c.hash for c in changed)}) == 4


def test_the_keys_of_method_are_the_fields_of_its_class(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, '[method]\nname = "fedquit"\nlr = 1\nteacher = "topk"\nk = 3\n'))
    assert recipe.build_method() == FedQUIT(lr=1.0, teacher="topk", k=3)


def test_every_key_of_train_reaches_the_federation() -> None:
    given: dict[str, Any] = {
        "epochs": 2.0,
        "batch_size": 7,
        "optimizer": "adam",
        "lr": 0.3,
        "momentum": 0.4,
        "weight_decay": 0.5,
    }
    training = build(
        TrainRecipe, {**given, "clip": 0.6, "rounds": 8, "clients_per_round": 9, "lr_decay": 0.7}, "train"
    ).training()
    assert training.task.local == Local(2.0, 7, "adam", 0.3, 0.4, 0.5, 0.6)
    assert (training.rounds, training.clients_per_round, training.lr_decay) == (8, 9, 0.7)
    assert training.task_at(3).local.lr == pytest.approx(0.3 * 0.7**3)
    assert training.task_at(3, Learn(Local(lr=1.0))).local.lr == pytest.approx(0.7**3)


def test_every_option_of_fedquit_reaches_its_task() -> None:
    task = FedQUIT(lr=2e-3, epochs=3.0, batch_size=9, teacher="temperature", loss="mse", tau=4.0).distill
    assert (task.teacher, task.divergence, task.tau) == ("temperature", "mse", 4.0)
    assert task.local == Local(3.0, 9, "adam", 2e-3)
    assert FedQUIT(teacher="fixed", v=-3.0).distill.v == -3.0
    assert FedQUIT(teacher="topk", k=2).distill.k == 2
    decays = [FedQUIT(optimizer=o).distill.local.weight_decay for o in ("adam", "adamw")]
    assert decays == [0.0, 0.004]
    assert FedQUIT(optimizer="adamw", weight_decay=0.1).distill.local.weight_decay == 0.1


@pytest.mark.parametrize(
    "options", [{"tau": 2.0}, {"k": 3}, {"v": 1.0}, {"teacher": "temperature", "tau": 0.0}, {"lr": 0.0}]
)
def test_options_that_mean_nothing_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(FedquitError):
        FedQUIT(**options)


def test_another_method_does_not_inherit_the_settings_of_the_first(tmp_path: Path) -> None:
    assert load("demo", ["method.lr=1", "method.name=fedunran"]).method == {"name": "fedunran", "lr": 1}
    assert load("demo", ["method.name=natural"]).method == {"name": "natural"}
    below = written(tmp_path, 'extends = "demo"\n[method]\nname = "natural"\n')
    assert load(below).method == {"name": "natural"}


def test_a_preset_changes_the_defaults_and_is_changed_by_what_is_given() -> None:
    method = load("demo", ['method={name="pga", preset="authors", halt=1.5}']).build_method()
    assert method == PGA(**{**PGA.presets["authors"], "halt": 1.5})
    with pytest.raises(UnknownNameError, match=r"unknown preset of method 'pga' 'author': did you mean 'authors'"):
        load("demo", ['method={name="pga", preset="author"}'])


def test_infinity_survives_json() -> None:
    recipe = load("demo", ['method={name="fedquit", teacher="temperature", tau=inf}'])
    again = build(Recipe, json.loads(json.dumps(recipe.to_dict(), allow_nan=False)), "recipe")
    assert again.build_method() == recipe.build_method()


def test_settings_change_single_keys(tmp_path: Path) -> None:
    settings = ["method.lr=3e-3", "data.partition=iid", "request.0.clients=[4, 5]", "seed=7", "retrain=true"]
    recipe = load("demo", settings)
    assert recipe.method["lr"] == 3e-3
    assert recipe.data.partition == "iid"
    assert recipe.request[0].clients == (4, 5)
    assert recipe.seed == 7


def test_a_recipe_extends_another_by_two_levels_at_most(tmp_path: Path) -> None:
    written(tmp_path, "seed = 3\n[train]\nrounds = 5\nlr = 0.5\n", "base.toml")
    recipe = load(written(tmp_path, 'extends = "base.toml"\n[train]\nrounds = 9\n'))
    assert (recipe.seed, recipe.train.rounds, recipe.train.lr) == (3, 9, 0.5)
    assert load(written(tmp_path, 'extends = "demo"\nseed = 5\n', "s.toml")).train == load("demo").train
    written(tmp_path, 'extends = "base.toml"\nseed = 4\n[train]\nlr = 0.25\n', "middle.toml")
    recipe = load(written(tmp_path, 'extends = "middle.toml"\n[train]\nlr = 0.125\n', "top.toml"))
    assert (recipe.seed, recipe.train.rounds, recipe.train.lr) == (4, 5, 0.125)
    with pytest.raises(InputError, match=r"highest.toml extends .*top.toml extends .*at most 2 recipes"):
        load(written(tmp_path, 'extends = "top.toml"\n', "highest.toml"))
    with pytest.raises(InputError, match="at most 2"):
        load(written(tmp_path, 'extends = "itself.toml"\n', "itself.toml"))


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
        ("[recover]\nbudgets = [0.5, 2]", r"recover.budgets must lie"),
        ('[evaluate]\nattacks = ["yeon"]', r"unknown attack 'yeon': did you mean 'yeom'"),
        ("[recover]\nmax_rounds = -1", r"recover.max_rounds must be"),
        ("[train]\nclients_per_round = -1", r"train.clients_per_round must be"),
        ("[train]\nmomentum = nan", r"recipe.train.momentum is not a number"),
        ("[train]\nweight_decay = -1", r"momentum and weight decay must be"),
        ('[train]\noptimizer = "sdg"', r"unknown optimizer 'sdg': did you mean 'sgd'"),
        ('[method]\nname = "fedquit"\noptimizer = "adm"', r"unknown optimizer 'adm': did you mean 'adam'"),
        ('[method]\nname = "fedquit"\noptimizer = ""', r"unknown optimizer ''"),
        ('[method]\nname = "pga"\noptimizer = "adm"', r"unknown optimizer 'adm': did you mean 'adam'"),
        ('[[request]]\nsamples = 0.5\nchoose = "rar"', r"did you mean 'rare'"),
        ("[engine]\nthreads = -1", r"engine.threads must be"),
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
