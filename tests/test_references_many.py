# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.attacks.roc import auc, roc
from fedquit.cli import main
from fedquit.errors import InputError
from fedquit.report import write_report
from fedquit.results.comparison import Outcome, compare_outcomes
from fedquit.results.references import is_farther
from fedquit.running.recipe import build
from fedquit.running.training_cache import Silent
from fedquit.studies.comparison import compare
from fedquit.studies.many_models import (
    Evidence,
    Halves,
    InHalves,
    Phis,
    TruePositiveRate,
    TruePositiveRates,
    compare_models,
    gathered,
)
from worlds import tiny

RNG = np.random.default_rng(0)


def models(shift: float, count: int = 12, examples: int = 60, unseen: float = 0.0) -> Phis:
    """phi of so many models, shifted on the forget data, and of the same models on data that nobody trained on."""
    forget, outsiders = RNG.normal(shift, 1.0, (count, examples)), RNG.normal(unseen, 1.0, (count, 200))
    return Phis(forget, outsiders, RNG.normal(unseen, 1.0, (count, 300)))


def test_models_that_never_differ_are_not_told_apart_and_others_are() -> None:
    same = compare_models(models(0), models(0))
    apart = compare_models(models(4), models(0))
    assert same.ulira_accuracy == pytest.approx(0.5, abs=0.1)
    assert apart.ulira_accuracy > 0.9
    assert apart.klom > 1.5 * same.klom
    assert apart.forgetting_quality < same.forgetting_quality
    assert apart.epsilon > same.epsilon
    assert apart.lira_finds.at_1.value > 0.5 > same.lira_finds.at_1.value
    assert apart.rmia_finds.at_1.value > 0.3 > same.rmia_finds.at_1.value
    assert apart.ulira_finds.at_1.low > 0.5
    assert same.ulira_finds.at_1.value == pytest.approx(0.01, abs=0.03), "as often as there are false alarms"
    assert apart.rmia_auc > 0.9
    assert apart.lira_auc > 0.9
    for evidence in (same, apart):
        assert evidence.rmia_auc_floor == pytest.approx(0.5, abs=0.15), "a Retrain remembers nobody"
        assert evidence.lira_auc_floor == pytest.approx(0.5, abs=0.15)


MEASURES = tuple(field.name for field in dataclasses.fields(Halves))


def drawn(shift: float, count: int, seed: int, examples: int = 100) -> Phis:
    """The same as `models`, whatever was drawn before."""
    draw = np.random.default_rng(seed)
    forget = draw.normal(shift, 1.0, (count, examples))
    return Phis(forget, draw.normal(size=(count, 20)), draw.normal(size=(count, 20)))


def different(found: Evidence) -> dict[str, bool]:
    """Which of the measures call the method different from Retrain."""
    assert found.halves is not None
    halves = {name: getattr(found.halves, name) for name in MEASURES}
    return {name: is_farther(name, half.method, half.farthest) for name, half in halves.items()}


@pytest.mark.parametrize("count", [16, 64])
def test_a_shift_of_one_sigma_is_a_difference_however_many_models_there_are(count: int) -> None:
    found = compare_models(drawn(1.0, count, seed=1), drawn(0.0, count, seed=2))
    # with halves of 8 models, the worst twentieth of the examples is wholly apart for Retrain as well
    blind = {"klom_p95"} if count == 16 else set()
    assert {name for name, is_one in different(found).items() if not is_one} == blind
    assert found.halves is not None
    assert found.klom < found.halves.klom.retrain, "measured with all models it would lie below Retrain with half"


@pytest.mark.parametrize("count", [16, 64])
def test_models_like_retrain_are_no_difference_however_many_there_are(count: int) -> None:
    found = compare_models(drawn(0.0, count, seed=3), drawn(0.0, count, seed=4))
    assert not any(different(found).values())
    assert found.halves is not None
    assert found.halves.klom.method == pytest.approx(found.halves.klom.retrain, rel=0.1)
    assert found.halves.klom.retrain <= found.halves.klom.farthest
    assert found.halves.forgetting_quality.farthest <= found.halves.forgetting_quality.retrain


def test_chance_alone_is_seldom_called_a_difference() -> None:
    pairs = [(drawn(0.0, 16, seed, examples=30), drawn(0.0, 16, seed + 100, examples=30)) for seed in range(10)]
    calls = [different(compare_models(*pair)) for pair in pairs]
    for name in MEASURES:
        assert sum(call[name] for call in calls) <= 1, name


def test_halves_never_hold_the_same_seed_on_both_sides() -> None:
    oracle = drawn(0.0, 12, seed=5)
    halves = compare_models(oracle, oracle).halves
    assert halves is not None
    for name in MEASURES:
        half = getattr(halves, name)
        assert half.method == half.retrain, "a method that gives back Retrain is as far from Retrain as another one"


def test_fewer_than_six_models_are_not_halved() -> None:
    assert compare_models(drawn(0.0, 5, seed=6), drawn(0.0, 5, seed=7)).halves is None
    assert compare_models(drawn(0.0, 6, seed=6), drawn(0.0, 6, seed=7)).halves is not None


def test_evidence_survives_json() -> None:
    for count in (4, 6):
        found = compare_models(drawn(0.0, count, seed=8), drawn(0.0, count, seed=9))
        assert build(Evidence, json.loads(json.dumps(dataclasses.asdict(found))), "evidence") == found


def test_over_several_targets_the_means_are_judged(tmp_path: Path) -> None:
    near, far = (compare_models(drawn(shift, 6, seed=10), drawn(0.0, 6, seed=11)) for shift in (0.0, 5.0))
    few, many_enough = TruePositiveRate(0.1, 0.0, 0.4, enough=False), TruePositiveRate(0.5, 0.2, 0.8, enough=True)
    near = dataclasses.replace(near, lira_finds=TruePositiveRates(many_enough, few))
    far = dataclasses.replace(far, lira_finds=TruePositiveRates(many_enough, many_enough))

    def halved(klom: float, quality: float, like: Evidence) -> Evidence:
        halves = {name: InHalves(0.0, 0.0, 0.0) for name in MEASURES}
        halves |= {"klom": InHalves(klom, 2.0, 3.0), "forgetting_quality": InHalves(quality, 0.3, 0.2)}
        return dataclasses.replace(like, halves=Halves(**halves))

    row = {"rounds": 0, "client_epochs": 0.0, "down_bytes": 0, "up_bytes": 0}
    rows = tuple(row | {"phase": phase} for phase in ("original", "retrained", "unlearned", "recovered"))
    both = (halved(2.0, 0.4, near), halved(6.0, 0.1, far))
    outcomes = [
        Outcome("a", t, 0, tmp_path, rows, evidence=dataclasses.asdict(evidence)) for t, evidence in enumerate(both)
    ]
    many = list(compare_outcomes(outcomes, ["a"], {}))[-1].references
    assert many["klom"] == pytest.approx((near.klom + far.klom) / 2)
    assert many["halves"]["klom"] == {"method": 4.0, "retrain": 2.0, "farthest": 3.0, "different": True}
    quality = many["halves"]["forgetting_quality"]
    assert (quality["method"], quality["different"]) == (0.25, False), "higher is nearer"
    assert many["lira_finds"]["at_1"] == dataclasses.asdict(many_enough)
    tenth = many["lira_finds"]["at_tenth"]
    assert (tenth["value"], tenth["low"]) == pytest.approx((0.3, 0.1))
    assert tenth["high"] == pytest.approx(0.6)
    assert tenth["enough"] is False, "one target has too few outsiders"


def test_a_model_that_is_surer_of_everything_is_not_taken_for_one_that_remembers() -> None:
    """RMIA compares with what the same model says about other people's data: LiRA does not."""
    sharp = compare_models(models(2.0, unseen=2.0), models(0))
    assert sharp.rmia_auc == pytest.approx(0.5, abs=0.1)


def test_rmia_takes_the_test_set_as_its_population_under_the_attacked_model() -> None:
    u, o = models(1.0, unseen=0.5), models(0)
    population = expit(u.population[0]), expit(o.population[1:])
    members = rmia(expit(u.forget[0]), expit(o.forget[1:]), *population)
    outsiders = rmia(expit(u.outsiders[0]), expit(o.outsiders[1:]), *population)
    found = compare_models(u, o)
    assert found.rmia_auc == auc(members, outsiders).value
    for at, fpr in ((found.rmia_finds.at_1, 0.01), (found.rmia_finds.at_tenth, 0.001)):
        expected = roc(members, outsiders).tpr_at(fpr)
        assert (at.value, at.low, at.high) == (expected.tpr.value, expected.tpr.low, expected.tpr.high)


def test_a_rate_that_the_outsiders_are_too_few_for_is_marked() -> None:
    found = compare_models(models(1.0), models(0))
    for finds in (found.lira_finds, found.lira_finds_floor, found.rmia_finds, found.rmia_finds_floor):
        assert finds.at_1.enough, "200 outsiders make two false alarms"
        assert not finds.at_tenth.enough
        assert finds.at_tenth.value <= finds.at_1.value
        assert finds.at_1.low <= finds.at_1.value <= finds.at_1.high
    assert not found.ulira_finds.at_tenth.enough, "12 models with 60 examples each"


def test_the_attacked_model_is_no_reference_of_its_own() -> None:
    oracle = models(0, count=4)
    first = Phis(*(part[:1].repeat(4, 0) for part in (oracle.forget, oracle.outsiders, oracle.population)))
    found = compare_models(first, oracle)
    assert (found.rmia_auc, found.lira_auc) == (found.rmia_auc_floor, found.lira_auc_floor)
    changed = Phis(oracle.forget.copy(), oracle.outsiders.copy(), oracle.population.copy())
    for part, by in ((changed.forget, 50), (changed.outsiders, -20), (changed.population, 30)):
        part[0] += by
    again = compare_models(first, changed)
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
    for name in ("ulira_accuracy", "lira_auc", "rmia_auc", "rmia_auc_floor", "forgetting_quality"):
        assert 0 <= lines[-1].references[name] <= 1, name
    for name in ("ulira_finds", "lira_finds", "lira_finds_floor", "rmia_finds", "rmia_finds_floor"):
        assert 0 <= lines[-1].references[name]["at_1"]["value"] <= 1, name
    written = json.loads((tmp_path / "comparison.json").read_text())["table"][-1]["references"]
    assert written == lines[-1].references
    write_report([tmp_path], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "Over many models" in html
    assert "RMIA finds at 1\u00a0% (%)" in html


def test_the_command_prints_the_method_beside_retrain_with_as_many_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\noptions = {examples = 120}',
        "[train]\nrounds = 1",
    ]
    (tmp_path / "r.toml").write_text("\n".join([*lines, "[recover]\nmax_rounds = 0\n"]))
    monkeypatch.chdir(tmp_path)
    words = ["compare", "r.toml", "--methods", "natural", "--targets", "0", "--jobs", "1", "--out", "c"]
    monkeypatch.setattr("sys.argv", ["fedquit", *words, "--references", "6"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    half = json.loads((tmp_path / "c" / "comparison.json").read_text())["table"][-1]["references"]["halves"]["klom"]
    mark = "" if half["different"] else "≈"
    assert f"({mark}{half['method']:.2f}/{half['retrain']:.2f})" in printed
    assert "with half the models" in printed
