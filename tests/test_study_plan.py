# SPDX-License-Identifier: Apache-2.0
"""What a study file expands to, and in which order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core.method import Method
from fedquit.errors import InputError, UnknownNameError
from fedquit.methods import METHODS
from fedquit.results.comparison import members
from fedquit.running.lifecycle import NOBODY
from fedquit.running.recipe import Recipe
from fedquit.running.setup import build_setup
from fedquit.running.training_cache import Silent, train
from fedquit.studies.plan import Plan, expand, load_study, packaged_studies, read_study, watching
from study_world import planned
from worlds import tiny

NAMES = ("fedquit", "pga", "not", "mode", "natural", "federaser", "fukd")


def demo(*blocks: dict[str, Any]) -> Plan:
    return expand(read_study({"block": [{"recipe": "demo", "set": ["recover.control=false"], **b} for b in blocks]}))


@st.composite
def blocks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Blocks on the demo's four clients; all have a name of their own, and some share their training."""
    made = []
    for number in range(draw(st.integers(1, 2))):
        targets = draw(st.lists(st.sampled_from([0, 1, 2, "1+2", "0+3"]), min_size=1, max_size=3, unique=True))
        seeds = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)
        retrain_seeds = st.lists(st.integers(10, 13), min_size=1, max_size=2, unique=True)
        block: dict[str, Any] = {
            "name": f"block-{number}",
            "targets": targets,
            "seeds": draw(st.one_of(seeds, st.lists(seeds, min_size=len(targets), max_size=len(targets)))),
            "methods": draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)),
            "control": draw(st.booleans()),
            "set": ["recover.control=false", f"train.rounds={draw(st.sampled_from([4, 5]))}"],
        }
        if draw(st.booleans()):
            block["retrain_seeds"] = draw(retrain_seeds)
        if draw(st.booleans()):
            block["method"] = [{"name": "pga", "strengths": 2, "apart": draw(st.booleans())}]
        made.append(block)
    return made


@settings(max_examples=15)
@given(blocks())
def test_every_unit_has_its_turn_after_what_it_waits_for_and_all_work_on_an_original_is_together(
    given_blocks: list[dict[str, Any]],
) -> None:
    plan = demo(*given_blocks)
    names = [unit.name for unit in plan.units]
    assert len(set(names)) == len(names), "each unit once"
    at = {name: number for number, name in enumerate(names)}
    for unit in plan.units:
        assert all(at[name] < at[unit.name] for name in unit.planned.after)
    originals = [unit.original for unit in plan.units if unit.original]
    changes = sum(before != after for before, after in pairwise(originals))
    assert changes == len(set(originals)) - 1, "no Original is gone back to"


@settings(max_examples=15)
@given(blocks())
def test_the_runs_are_the_product_of_targets_seeds_and_methods(given_blocks: list[dict[str, Any]]) -> None:
    plan = demo(*given_blocks)
    runs = {unit.name: unit for unit in plan.units if unit.planned.kind == "method"}
    for block in given_blocks:
        expected = set()
        for number, target in enumerate(block["targets"]):
            seeds = block["seeds"]
            own = seeds[number] if isinstance(seeds[0], list) else seeds
            expected |= {(target, seed, name) for seed in own for name in block["methods"]}
        mine = [unit for unit in runs.values() if unit.planned.setting == block["name"]]
        plain = {
            ("+".join(map(str, unit.planned.target)), unit.planned.seed, unit.planned.method)
            for unit in mine
            if unit.planned.method in NAMES
        }
        assert plain == {(str(target), seed, name) for target, seed, name in expected}
        for unit in mine:
            assert unit.recipe.seed == unit.planned.seed
            assert unit.recipe.request[0].clients == unit.planned.target
            own_seeds = block.get("retrain_seeds")
            assert unit.recipe.retrain_seed == (own_seeds[0] if own_seeds else None)
            assert len(unit.planned.retrains) == len(own_seeds or ())


@settings(max_examples=15)
@given(blocks())
def test_a_method_finds_itself_among_those_that_watch_its_original(given_blocks: list[dict[str, Any]]) -> None:
    plan = demo(*given_blocks)
    by_name = {unit.name: unit for unit in plan.units}
    for unit in plan.units:
        if unit.planned.kind == "method" and unit.recipe.build_method().shapes_training:
            assert by_name[unit.original].attached == unit.attached
            assert unit.attached[unit.recipe.method_name] == watching(unit.recipe.method)


def test_strengths_share_an_original_unless_its_hooks_read_them() -> None:
    pga = {"methods": ["pga"], "method": [{"name": "pga", "knob": "epochs", "strengths": 3}]}
    assert [unit.name for unit in demo(pga).units if unit.planned.kind == "original"] == ["demo/original/seed-0"]
    eraser = {"method": [{"name": "federaser", "knob": "interval", "values": [1, 2]}]}
    originals = [unit.name for unit in demo(eraser).units if unit.planned.kind == "original"]
    assert originals == ["demo/original/seed-0", "demo/original/seed-0-federaser-interval=2"]


def test_a_method_that_must_know_the_request_has_an_original_for_each_target() -> None:
    plan = demo({"targets": [0, "1+2"], "methods": ["fedquit", "fedau/authors"]})
    originals = {unit.name: unit.targets for unit in plan.units if unit.planned.kind == "original"}
    assert originals == {
        "demo/original/seed-0": (0, (1, 2)),
        "demo/original/seed-0-fedau-authors-0": (0,),
        "demo/original/seed-0-fedau-authors-1+2": ((1, 2),),
    }


def test_settings_that_train_alike_share_original_and_retrain() -> None:
    longer = {"name": "longer", "methods": ["not"], "set": ["recover.control=false", "recover.max_rounds=20"]}
    plan = demo({"methods": ["fedquit"]}, longer)
    assert [unit.name for unit in plan.units] == [
        "demo/original/seed-0",
        "demo/retrain/client-0/seed-0",
        "demo/seed-0/client-0/fedquit",
        "longer/seed-0/client-0/not",
    ]
    assert plan.units[-1].planned.after == ("demo/original/seed-0", "demo/retrain/client-0/seed-0")


def test_strengths_come_from_the_methods_knobs() -> None:
    plan = demo({"method": [{"name": "fedquit", "strengths": 4}, {"name": "puf", "values": [2, 4]}]})
    labels = [unit.planned.method for unit in plan.units if unit.planned.kind == "method"]
    knob = METHODS["fedquit"].knobs[0]
    assert labels == [f"fedquit lr={value:g}" for value in knob.values(4)] + ["puf strength=2", "puf strength=4"]
    swept = [unit.recipe.method for unit in plan.units if unit.planned.method.startswith("fedquit")]
    assert [section["lr"] for section in swept] == knob.values(4)


def test_a_method_may_be_for_some_targets_alone() -> None:
    plan = demo({"targets": [0, 1], "methods": ["fedquit"], "method": [{"name": "not", "targets": [1]}]})
    assert [unit.planned.target for unit in plan.units if unit.planned.method == "not"] == [(1,)]


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"targets": [7]}, "there is no client 7 among 4"),
        ({"targets": [0, 1], "seeds": [[0], [1], [2]]}, "seeds has 3 lists for 2 targets"),
        ({"seeds": [0], "retrain_seeds": [0, 1]}, "give Retrain seeds of its own"),
        ({"method": [{"name": "not", "strengths": 2}]}, "not has no strength to try"),
        ({"method": [{"name": "fedquit", "knob": "lr"}]}, "give values"),
        ({"name": "../up"}, "is no name of a setting"),
    ],
)
def test_a_block_that_cannot_be_carried_out_is_refused_in_a_sentence(block: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        demo({"methods": ["fedquit"], **block})


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="targets"):
        demo({"target": [0]})
    with pytest.raises(UnknownNameError, match="fedquit"):
        demo({"methods": ["fedquite"]})
    with pytest.raises(UnknownNameError, match="smoke"):
        load_study("smoky")


def test_two_settings_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="are called 'demo' and differ"):
        demo({"methods": ["fedquit"]}, {"methods": ["fedquit"], "set": ["recover.control=false", "train.lr=0.2"]})


@pytest.mark.parametrize("name", packaged_studies())
def test_the_studies_of_the_package_can_be_expanded(name: str) -> None:
    plan = expand(load_study(name))
    kinds = {unit.planned.kind for unit in plan.units}
    assert {"original", "retrain", "method"} <= kinds


def test_there_is_a_study_for_each_part_of_the_paper() -> None:
    numbers = [name.split("-")[1] for name in packaged_studies() if name.startswith("paper-")]
    assert sorted(map(int, numbers)) == list(range(1, 11))


def test_the_study_of_verdicts_has_three_retrains_of_other_seeds_for_each_target() -> None:
    plan = expand(load_study("paper-2-cifar100-lda-verdicts"))
    retrains = [unit.planned for unit in plan.units if unit.planned.kind == "retrain"]
    originals = [unit.planned.seed for unit in plan.units if unit.planned.kind == "original"]
    assert len(originals) == len(set(originals)) == 5
    assert len({unit.seed for unit in retrains}) == 15, "targets that share a seed are not independent"
    assert not {unit.seed for unit in retrains} & set(originals)
    runs = [unit for unit in plan.units if unit.planned.kind == "method"]
    assert {len(unit.planned.retrains) for unit in runs} == {3}
    assert {unit.recipe.recover.follow for unit in runs} == {20}


def test_a_partition_file_lies_in_the_folder_that_is_given(tmp_path: Path) -> None:
    plan = expand(load_study("paper-1-cifar100-lda"), partitions=tmp_path)
    assert {unit.recipe.data.partition_file for unit in plan.units} == {
        str(tmp_path / "cifar100_lda0.1_clients10.json")
    }
    assert {unit.recipe.data.partition for unit in plan.units} == {"file"}


def test_recipes_may_lie_beside_the_study(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert {unit.recipe.title for unit in plan.units} == {"tiny"}
    assert {members(target) for unit in plan.units for target in unit.targets} == {(0,), (1, 2)}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("pga", {"lr": 0.5, "epochs": 3.0, "halt": 9.0}),
        ("fukd", {"lr": 0.5, "epochs": 3.0}),
        ("fused", {"overwriting_rounds": 7}),
        ("federaser", {"calibration": 0.7}),
    ],
)
def test_hooks_into_training_read_no_other_fields_than_the_method_names(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """One Original serves all strengths: what is remembered and what is trained is the same."""

    def trained(method: Method, where: Path) -> dict[str, torch.Tensor]:
        setup = build_setup(tiny(train={"rounds": 2}))
        attached = {name: method}
        federated = train(setup, setup.data, where, reporter=Silent(), attached=attached, request=NOBODY)
        federated.memories.close()
        found = {f"model/{n}": p for n, p in federated.progress.state.params.items()}
        for memory in (federated.memories.of(name), federated.memories.clients):
            found |= {f"{key}/{n}": p for key in memory for n, p in memory[key].items()}
        return found

    section = {"name": name, **changed}
    full = trained(Recipe(method=section).build_method(), tmp_path / "full")
    stripped = trained(Recipe(method=watching(section)).build_method(), tmp_path / "stripped")
    assert full.keys() == stripped.keys()
    assert any(not key.startswith("model/") for key in full), "something was remembered"
    assert all(torch.equal(full[key], stripped[key]) for key in full)
