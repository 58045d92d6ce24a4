# SPDX-License-Identifier: Apache-2.0
"""That the benchmark trains with the methods it names, and compares what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.bench import attached
from fedquit.bench.attached import BARE, WATCHED, WITH_HISTORY, compare_trainings, watching_methods
from fedquit.bench.measure import Figure
from fedquit.bench.settings import digits
from fedquit.errors import InputError
from fedquit.running.store import Memories

ROUNDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Figure]:
    return {figure.name: figure for figure in compare_trainings(digits(), ROUNDS, folder)}


def test_every_method_that_watches_is_attached_and_keeps_what_it_needs(
    figures: dict[str, Figure], folder: Path
) -> None:
    assert set(watching_methods()) == {"federaser", "pga", "fukd", "fused"}
    assert figures[f"a round with {WATCHED}"].note == "pga, fukd, fused"
    bare, watched, history = (Memories.open(folder / str(number)) for number in range(3))
    assert (list(bare.server), list(bare.clients)) == ([], [])
    assert list(watched.clients) == sorted(f"{client}/own" for client in range(10))
    assert list(watched.server) == [*sorted(f"fukd/sum/{client}" for client in range(10)), "fused/moved"]
    assert len(history.server) == ROUNDS * 10


def test_only_the_methods_without_a_history_have_a_limit(figures: dict[str, Figure]) -> None:
    limits = {name for name, figure in figures.items() if figure.limit is not None}
    rounds, training = (f"a round with {WATCHED}, times the bare round", f"a training of 200 rounds with {WATCHED}")
    assert limits == {rounds, f"{training}, times the bare one"}
    assert all(figures[name].limit == 1.1 for name in limits)


def test_a_ratio_is_that_of_two_rounds_in_the_same_turn(figures: dict[str, Figure]) -> None:
    bare = figures[f"a round with {BARE}"].repeats
    history = figures[f"a round with {WITH_HISTORY}"].repeats
    assert len(bare) == ROUNDS - attached.WARM_UP - 1
    ratio = figures[f"a round with {WITH_HISTORY}, times the bare round"].repeats
    assert ratio == tuple(a / b for a, b in zip(history, bare, strict=True))


def test_too_few_rounds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 4 rounds"):
        compare_trainings(digits(), 3, tmp_path)
