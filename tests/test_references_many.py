# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from fedquit.attacks.rmia import rmia
from fedquit.attacks.strength import auc, roc
from fedquit.compare import compare
from fedquit.errors import InputError
from fedquit.references import Phis, compared, gathered
from fedquit.report import write_report
from fedquit.training import Silent
from worlds import tiny

RNG = np.random.default_rng(0)


def models(shift: float, count: int = 12, examples: int = 60, unseen: float = 0.0) -> Phis:
    """phi of so many models, shifted on the forget data, and of the same models on data that nobody trained on."""
    forget, outsiders = RNG.normal(shift, 1.0, (count, examples)), RNG.normal(unseen, 1.0, (count, 200))
    return Phis(forget, outsiders, RNG.normal(unseen, 1.0, (count, 300)))


def test_models_that_never_differ_are_not_told_apart_and_others_are() -> None:
    same = compared(models(0), models(0))
    apart = compared(models(4), models(0))
    assert same.ulira_accuracy == pytest.approx(0.5, abs=0.1)
    assert apart.ulira_accuracy > 0.9
    assert apart.klom > 1.5 * same.klom
    assert same.klom < 2 * same.klom_floor, "what is seen here is what two halves of Retrains show"
    assert apart.forgetting_quality < same.forgetting_quality
    assert apart.epsilon > same.epsilon
    assert same.epsilon_floor is not None
    assert apart.lira_tpr_at_1 > 0.5 > same.lira_tpr_at_1
    assert apart.rmia_tpr_at_1 > 0.3 > same.rmia_tpr_at_1
    assert apart.rmia_auc > 0.9
    assert apart.lira_auc > 0.9
    for evidence in (same, apart):
        assert evidence.rmia_auc_floor == pytest.approx(0.5, abs=0.15), "a Retrain remembers nobody"
        assert evidence.lira_auc_floor == pytest.approx(0.5, abs=0.15)


def test_a_model_that_is_surer_of_everything_is_not_taken_for_one_that_remembers() -> None:
    """RMIA compares with what the same model says about other people's data: LiRA does not."""
    sharp = compared(models(2.0, unseen=2.0), models(0))
    assert sharp.rmia_auc == pytest.approx(0.5, abs=0.1)


def test_rmia_takes_the_test_set_as_its_population_under_the_attacked_model() -> None:
    u, o = models(1.0, unseen=0.5), models(0)
    population = expit(u.population[0]), expit(o.population[1:])
    members = rmia(expit(u.forget[0]), expit(o.forget[1:]), *population)
    outsiders = rmia(expit(u.outsiders[0]), expit(o.outsiders[1:]), *population)
    found = compared(u, o)
    assert found.rmia_auc == auc(members, outsiders).value
    assert found.rmia_tpr_at_1 == roc(members, outsiders).tpr_at(0.01).tpr.value


def test_the_attacked_model_is_no_reference_of_its_own() -> None:
    oracle = models(0, count=4)
    first = Phis(*(part[:1].repeat(4, 0) for part in (oracle.forget, oracle.outsiders, oracle.population)))
    found = compared(first, oracle)
    assert (found.rmia_auc, found.lira_auc) == (found.rmia_auc_floor, found.lira_auc_floor)
    changed = Phis(oracle.forget.copy(), oracle.outsiders.copy(), oracle.population.copy())
    for part, by in ((changed.forget, 50), (changed.outsiders, -20), (changed.population, 30)):
        part[0] += by
    again = compared(first, changed)
    assert (again.rmia_auc, again.lira_auc) == (found.rmia_auc, found.lira_auc)


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

        def lane(self, number: int) -> Silent:
            return self

    recipe = tiny(recover={"until": "retrained", "max_rounds": 1}, train={"rounds": 2})
    lines, _ = compare(recipe, ["fedquit"], [1], 1, tmp_path, overview=Quiet(), references=4)
    assert lines[-1].references["models"] == 4
    for name in ("ulira_accuracy", "lira_auc", "rmia_auc", "rmia_tpr_at_1", "rmia_auc_floor", "forgetting_quality"):
        assert 0 <= lines[-1].references[name] <= 1, name
    written = json.loads((tmp_path / "comparison.json").read_text())["table"][-1]["references"]
    assert written == lines[-1].references
    write_report([tmp_path], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "Over many models" in html
    assert "RMIA finds (%)" in html
