# SPDX-License-Identifier: Apache-2.0
"""The recipes of the paper: all rows are there, with the paper's numbers, and an ablation changes one thing."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from importlib import resources
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedquit.cli.options import chosen
from fedquit.data.partition import PARTITIONS
from fedquit.engine.optim import OPTIMIZERS
from fedquit.methods import METHODS
from fedquit.report.drawing import Drawn
from fedquit.report.figures import labels_by_client
from fedquit.results.comparison import members
from fedquit.running.recipe import Recipe, load, packaged
from fedquit.studies.comparison import parse_targets

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text()
NAMES = packaged()
SGD = {"optimizer": "sgd", "lr": 0.1, "batch_size": 32, "epochs": 1.0, "lr_decay": 0.998, "weight_decay": 1e-3}
ADAMW = SGD | {"optimizer": "adamw", "lr": 3e-4}
#        data, clients, a round, partition, alpha, network, training, rounds, method
SETTINGS: dict[str, tuple[str, int, int, str, float | None, str, dict[str, Any], int, dict[str, Any]]] = {
    "cifar10-lda": ("cifar10", 10, 0, "lda", 0.3, "resnet18", SGD, 200, {"lr": 1e-4}),
    "cifar100-iid": ("cifar100", 10, 0, "iid", None, "resnet18", SGD, 200, {"lr": 1e-3}),
    "cifar100-lda": ("cifar100", 10, 0, "lda", 0.1, "resnet18", SGD, 200, {"lr": 1e-4}),
    "cifar100-lda-100-clients": ("cifar100", 100, 10, "lda", 0.1, "resnet18", SGD, 600, {"lr": 1e-4}),
    "cifar100-lda-mit-b0": (
        *("cifar100", 10, 0, "lda", 0.1, "mit_b0", ADAMW, 50),
        {"lr": 5e-4, "optimizer": "adamw"},
    ),
    "cub200-lda": ("cub200", 10, 0, "lda", 0.1, "mit_b0", ADAMW, 50, {"lr": 5e-4, "optimizer": "adamw"}),
    "cub200-lda-100-clients": (
        *("cub200", 100, 10, "lda", 0.1, "mit_b0", ADAMW, 200),
        {"lr": 5e-4, "optimizer": "adamw"},
    ),
    "shakespeare": ("shakespeare", 80, 8, "chunks", None, "char_lstm", {"epochs": 1.0}, 200, {}),
}
BASES = {"iid": "settings/cifar100-iid", "lda": "settings/cifar100-lda"}
TEACHERS = {"min", "flatten", "topk", "logit_ladder", "probability_ladder", "incompetent", "random"}


def of(folder: str) -> dict[str, Recipe]:
    return {name.partition("/")[2]: load(name) for name in NAMES if name.startswith(f"{folder}/")}


def differing(one: Any, other: Any, where: str = "") -> set[str]:
    """The keys in which two recipes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            k for key in one.keys() | other.keys() for k in differing(one.get(key), other.get(key), f"{where}.{key}")
        }
    return set() if one == other else {where[1:]}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_are_those_of_the_paper_and_its_code(name: str) -> None:
    data, clients, some, partition, alpha, model, training, rounds, method = SETTINGS[name]
    recipe = load(f"settings/{name}")
    assert (recipe.data.name, recipe.data.clients, recipe.data.partition) == (data, clients, partition)
    assert alpha is None or recipe.data.alpha == alpha
    assert (recipe.train.clients_per_round, recipe.train.rounds, recipe.model.name) == (some, rounds, model)
    assert {k: getattr(recipe.train, k) for k in training} == training
    assert {k: recipe.method.get(k) for k in method} == method
    assert recipe.method_name == "fedquit"
    distill = recipe.build_method().distill  # type: ignore[attr-defined]
    assert (distill.teacher, distill.divergence) == ("min", "kl")
    assert (distill.local.epochs, distill.local.batch_size) == (1.0, recipe.train.batch_size)
    assert distill.local.weight_decay == (0.004 if method.get("optimizer") == "adamw" else 0.0)
    assert recipe.recover.until == "retrained"
    assert recipe.model.options == ({"weights": "nvidia/mit-b0"} if model == "mit_b0" else {})
    assert recipe.data.options == ({"size": 224} if model == "mit_b0" else {})
    assert [(e.kind, e.clients, e.samples) for e in recipe.request] == [("forget", (0,), 0.0)]


def test_every_table_of_the_paper_has_all_its_rows() -> None:
    rows = Counter(name.partition("/")[0] for name in NAMES if "/" in name)
    assert set(of("settings")) == set(SETTINGS)
    assert rows == {
        "settings": 8,
        "samples": 3 * 2,
        "pairs": 5 * 2,
        "teachers": 7 * 2,
        "temperatures": 6 * 2,
        "losses": 4 * 2,
        "v": (5 + 3) * 2,
        "budgets": 2,
        "local-epochs": 2,
        "language": 2,  # ours
    }


def test_sample_unlearning_has_three_sizes() -> None:
    found = {(name[:3], e.samples, e.choose) for name, r in of("samples").items() for e in r.request}
    sizes = [(0.5, "random"), (0.1, "random"), (0.01, "rare")]
    assert found == {(where, *size) for where in ("iid", "lda") for size in sizes}


def test_the_pairs_are_five_for_each_network_and_share_nobody() -> None:
    pairs: dict[str, list[int]] = {}
    for name, recipe in of("pairs").items():
        (event,) = recipe.request
        assert len(event.clients) == 2
        assert name.endswith("-{}-{}".format(*event.clients))
        pairs.setdefault(recipe.model.name, []).extend(event.clients)
    everybody = list(range(10))
    assert {model: sorted(clients) for model, clients in pairs.items()} == {"resnet18": everybody, "mit_b0": everybody}


@pytest.mark.parametrize(
    ("folder", "keys"),
    [
        ("samples", {"request"}),
        ("teachers", {"method.teacher", "method.k"}),
        ("temperatures", {"method.teacher", "method.tau"}),
        ("losses", {"method.loss"}),
        ("v", {"method.teacher", "method.v"}),
        ("budgets", {"recover.budgets"}),
        ("local-epochs", {"train.epochs"}),
    ],
)
def test_an_ablation_differs_from_its_setting_in_what_it_is_about(folder: str, keys: set[str]) -> None:
    for name, recipe in of(folder).items():
        base = load(BASES[name[:3]])
        changed = differing(recipe.to_dict(), base.to_dict())
        assert "title" in changed, name
        assert changed - {"title"} <= keys, name


def test_the_ablations_have_the_paper_s_values() -> None:
    for where in BASES:
        teachers = [r.method["teacher"] for n, r in of("teachers").items() if n.startswith(where)]
        assert sorted(teachers) == sorted(TEACHERS)
        taus = {r.method["tau"] for n, r in of("temperatures").items() if n.startswith(where)}
        assert taus == {1.0, 1.5, 2.0, 3.0, 4.0, float("inf")}
        losses = {r.method["loss"] for n, r in of("losses").items() if n.startswith(where)}
        assert losses == {"kl", "ce", "mse", "cosine"}
        chosen_v = {n: r.method for n, r in of("v").items() if n.startswith(where)}
        assert {m["teacher"] for m in chosen_v.values()} == {"min", "fixed", "entropy"}
        assert sorted(m["v"] for m in chosen_v.values() if "v" in m) == [-100.0, -10.0, -5.0, 0.0, 5.0, 10.0]
    assert {r.recover.budgets for r in of("budgets").values()} == {(0.05, 0.1, 0.2, 0.25, 0.5)}
    assert {r.train.epochs for r in of("local-epochs").values()} == {10.0}
    assert of("teachers")["lda-top-5"].method["k"] == 5


@pytest.mark.parametrize("name", NAMES)
def test_the_method_of_every_recipe_is_an_argument(name: str) -> None:
    for method in METHODS:
        assert load(name, [f"method.name={method}"]).method == {"name": method} | (
            dict(load(name).method) if method == "fedquit" else {}
        )
    assert load(name).train.optimizer in OPTIMIZERS
    file = resources.files("fedquit") / "recipes" / f"{name}.toml"
    assert len(file.read_text().splitlines()) <= 40, "a recipe is short"


@pytest.mark.parametrize(("images", "classes"), [(50_000, 10), (50_000, 100), (5_994, 200)])
def test_everybody_gets_something_in_the_draw_of_every_setting(images: int, classes: int) -> None:
    """With as many equally frequent classes as the published sets have (those of the birds are nearly so)."""
    of_size = {"cifar10": (50_000, 10), "cifar100": (50_000, 100), "cub200": (5_994, 200)}
    labels = torch.arange(images) % classes
    tried = 0
    for recipe in of("settings").values():
        spec = recipe.data
        if of_size.get(spec.name) != (images, classes):
            continue
        tried += 1
        rng = np.random.default_rng(spec.seed)
        parts = PARTITIONS[spec.partition](labels, spec.clients, rng, alpha=spec.alpha, file=None)
        assert len(parts) == spec.clients
        assert min(map(len, parts.values())) >= 2
    assert tried


def test_options_of_the_command_line_reach_the_recipe(tmp_path: Path) -> None:
    recipe = chosen("settings/cifar100-lda", ["seed=4"], tmp_path / "data", tmp_path / "file.json")
    assert recipe.data.folder == str(tmp_path / "data")
    assert (recipe.data.partition, recipe.data.partition_file) == ("file", str(tmp_path / "file.json"))
    assert recipe.seed == 4
    assert "folder" not in recipe.to_dict()["data"], "where data lies is not part of an experiment"
    assert chosen("settings/cifar100-lda") == load("settings/cifar100-lda")
    assert chosen("demo", [], None, tmp_path / "file.json", True).data.partition != "file"


def test_the_page_names_every_recipe_once_and_no_other() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w./-]+)`", " ".join(line.split("|")[1] for line in tables))
    assert sorted(n for n in named) == sorted(NAMES)


def test_the_commands_of_the_page_are_right() -> None:
    """Every command that names a recipe: the recipe, its options, the methods and the clients exist."""
    commands = re.findall(r"`(fedquit (?:run|compare) [^`]+)`", PAGE.replace("\n", " "))
    commands += [re.split(r"\s{3,}", line)[0] for line in PAGE.splitlines() if line.startswith("fedquit run")]
    assert len(commands) >= 8
    for command in commands:
        _, _, name, *words = shlex.split(command)
        name = "settings/cifar100-lda" if name == "NAME" else name
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        recipe = load(name, [s for s in settings if s != "method.name=NAME"])
        given = dict(pairwise(words))
        for method in given.get("--methods", "fedquit").split(","):
            assert method in METHODS
        for target in parse_targets(given.get("--targets", "0")) or ():
            assert max(members(target)) < recipe.data.clients
        assert "--out" in words


def test_the_numbers_that_the_page_gives_for_shakespeare_are_those_of_the_recipe() -> None:
    recipe = load("settings/shakespeare")
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| Shakespeare: batch")]
    batch, rate, unlearning = (float(n) for n in line.split("|")[2].split(","))
    assert (batch, rate, unlearning) == (recipe.train.batch_size, recipe.train.lr, recipe.method["lr"])


def test_the_report_shows_who_holds_which_labels_in_the_largest_settings() -> None:
    def drawn(clients: int, labels: int) -> Drawn | None:
        counts = {str(c): [max(0, (c + k) % 7 - 5) for k in range(labels)] for c in range(clients)}  # most have none
        leaving = SimpleNamespace(rows=[{"clients": [3]}])
        run: Any = SimpleNamespace(clients=counts, requests=[leaving])
        return labels_by_client([run], "labels")

    for clients, labels in ((10, 10), (10, 200), (100, 100), (100, 200)):
        found = drawn(clients, labels)
        assert found is not None
        assert "Client 3 (leaving): " in found.text
        assert f"Client {clients - 1}: " in found.text
        assert len(found.svg) < 3_000_000
    assert drawn(101, 10) is None
    assert drawn(100, 700) is None, "more dots than a page should hold"


def test_the_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists()
