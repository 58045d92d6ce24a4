# SPDX-License-Identifier: Apache-2.0
"""Where all randomness is born."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core import SERVER, Local
from fedquit.engine.plan import Address, make_plan
from fedquit.errors import InputError


@settings(max_examples=80)
@given(
    examples=st.integers(0, 70),
    batch_size=st.integers(1, 80),
    epochs=st.integers(0, 4),
    seed=st.integers(0, 2**62),
)
def test_every_epoch_sees_every_example_once(examples: int, batch_size: int, epochs: int, seed: int) -> None:
    plan = make_plan(examples, Local(epochs=epochs, batch_size=batch_size), seed)
    per_epoch = math.ceil(examples / batch_size)
    assert len(plan.steps) == len(plan.noise) == epochs * per_epoch
    for e in range(epochs):
        epoch = plan.steps[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(i for step in epoch for i in step.tolist()) == list(range(examples))
        assert all(len(step) == batch_size for step in epoch[:-1])
    for step, noise in zip(plan.steps, plan.noise, strict=True):
        assert noise.shape == step.shape
        assert bool(((noise >= 0) & (noise < 1)).all())


def test_epochs_are_shuffled_anew() -> None:
    first, second = make_plan(50, Local(epochs=2, batch_size=50), seed=0).steps
    assert first.tolist() != list(range(50))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (0.25, 1), (0.2, 1), (0.0, 0), (1.0, 4), (2.75, 11)])
def test_a_fraction_of_an_epoch_takes_that_part_of_the_batches(epochs: float, steps: int) -> None:
    local = Local(epochs=epochs, batch_size=8)
    plan, whole = make_plan(30, local, seed=3), make_plan(30, replace(local, epochs=math.ceil(epochs)), seed=3)
    assert len(plan.steps) == steps
    for part, full in zip(plan.steps, whole.steps, strict=False):
        assert torch.equal(part, full), "it is the beginning of the whole"


def test_rounding_errors_take_no_batch_away() -> None:
    assert [len(make_plan(100, Local(epochs=e, batch_size=1), seed=0).steps) for e in (0.29, 0.57)] == [29, 57]


@pytest.mark.parametrize(
    "wrong", [{"epochs": -1.0}, {"epochs": math.nan}, {"batch_size": 0}, {"lr": 0.0}, {"lr": math.inf}]
)
def test_numbers_that_make_no_plan_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(wrong))} is"):
        Local(**wrong)


def test_the_noise_is_shaped_like_the_labels() -> None:
    plan = make_plan(5, Local(batch_size=2), seed=0, label_shape=(7, 3))
    assert [tuple(n.shape) for n in plan.noise] == [(2, 7, 3), (2, 7, 3), (1, 7, 3)]
    assert len({u for n in plan.noise for u in n.flatten().tolist()}) == 5 * 21


def test_a_plan_follows_from_its_seed_alone() -> None:
    def flat(seed: int) -> tuple[list[int], list[float], int]:
        plan = make_plan(20, Local(epochs=2, batch_size=6), seed)
        return torch.cat(plan.steps).tolist(), torch.cat(plan.noise).tolist(), plan.curvature_seed

    torch.manual_seed(1)
    one = flat(5)
    torch.manual_seed(2)
    assert flat(5) == one
    assert all(a != b for a, b in zip(flat(6), one, strict=True))


def test_torchs_own_random_numbers_go_on_undisturbed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    make_plan(20, Local(), seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_every_part_of_an_address_counts() -> None:
    here = Address(0, "train", 3, 1)
    seeds = {
        here.seed_for(2),
        here.seed_for(3),
        here.seed_for(SERVER),
        here.seed_for("server"),
        here.seed_for("2"),
        replace(here, seed=1).seed_for(2),
        replace(here, phase="recover").seed_for(2),
        replace(here, round=4).seed_for(2),
        replace(here, question=0).seed_for(2),
        replace(here, round=1, question=3).seed_for(2),
    }
    assert len(seeds) == 10
    assert here.seed_for(2) == Address(0, "train", 3, 1).seed_for(2)


@settings(max_examples=50)
@given(seed=st.integers(), phase=st.text(max_size=5), round=st.integers(), client=st.integers())
def test_any_address_gives_a_seed_that_torch_takes(seed: int, phase: str, round: int, client: int) -> None:
    derived = Address(seed, phase, round).seed_for(client)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)


def test_seeds_do_not_change_between_versions_of_the_package() -> None:
    """Stored runs go on only while this number stays."""
    assert Address(0, "train", 3, 1).seed_for(2) == 5207434708921421697
