# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquit.compare import compare
from fedquit.errors import InputError
from fedquit.references import _compared, gathered
from fedquit.training import Silent
from worlds import tiny

RNG = np.random.default_rng(0)


def models(shift: float, count: int = 12, examples: int = 60) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return RNG.normal(shift, 1.0, (count, examples))


def test_models_that_never_differ_are_not_told_apart_and_others_are() -> None:
    same = _compared(models(0), models(0), models(0), models(0)[0])
    apart = _compared(models(4), models(0), models(0), models(0)[0])
    assert same.ulira_accuracy == pytest.approx(0.5, abs=0.1)
    assert apart.ulira_accuracy > 0.9
    assert apart.klom > 1.5 * same.klom
    assert same.klom < 2 * same.klom_floor, "what is seen here is what two halves of Retrains show"
    assert apart.forgetting_quality < same.forgetting_quality
    assert apart.lira_tpr_at_1 > 0.5 > same.lira_tpr_at_1


def test_references_are_other_seeds_of_the_same_erasure_and_share_the_cache(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "natural"}, recover={"until": "rounds", "max_rounds": 0})
    found = gathered(recipe, 4, tmp_path / "natural", tmp_path / "cache", reporter=Silent())
    assert found.models == 4
    trainings = len(list((tmp_path / "cache").iterdir()))
    assert trainings == 8, "four Originals and four Retrains"
    gathered(
        tiny(recover={"until": "rounds", "max_rounds": 0}), 4, tmp_path / "f", tmp_path / "cache", reporter=Silent()
    )
    assert len(list((tmp_path / "cache").iterdir())) == trainings, "they serve every method"
    again = gathered(recipe, 4, tmp_path / "natural", tmp_path / "cache", reporter=Silent())
    assert again == found


def test_too_few_references_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few: take at least 4"):
        gathered(tiny(), 2, tmp_path, tmp_path, reporter=Silent())


def test_a_comparison_can_ask_for_them(tmp_path: Path) -> None:
    class Quiet(Silent):
        def runs(self, done: int, total: int, title: str) -> None: ...

    recipe = tiny(recover={"until": "retrained", "max_rounds": 1}, train={"rounds": 2})
    lines, _ = compare(recipe, ["fedquit"], [1], 1, tmp_path, overview=Quiet(), references=4)
    assert lines[-1].references["models"] == 4
    assert 0 <= lines[-1].references["ulira_accuracy"] <= 1
