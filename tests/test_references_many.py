# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.attacks.roc import auc, roc
from fedquit.cli import main
from fedquit.errors import InputError
from fedquit.inference.models import sample_exposure
from fedquit.report import write_report
from fedquit.results.comparison import Outcome, compare_outcomes
from fedquit.results.folders import OWNER_FOLDER
from fedquit.results.references import judged_together, mean_evidence
from fedquit.running.recipe import Recipe, build
from fedquit.running.runner import evaluation_of, retrained
from fedquit.running.session import Progress
from fedquit.running.setup import build_setup
from fedquit.running.training_cache import Reporter, Silent
from fedquit.studies.comparison import compare
from fedquit.studies.many_models import (
    RETRAIN_STEP,
    SEED_STEP,
    SUBSET,
    Evidence,
    Phis,
    TruePositiveRate,
    TruePositiveRates,
    _subset,
    compare_models,
    gathered,
    named_samples,
)
from worlds import tiny

RNG = np.random.default_rng(0)


def models(shift: float, count: int = 12, examples: int = 60, unseen: float = 0.0) -> Phis:
    """phi of so many models, shifted on the forget data, and of the same models on data that nobody trained on."""
    forget, outsiders = RNG.normal(shift, 1.0, (count, examples)), RNG.normal(unseen, 1.0, (count, 200))
    return Phis(forget, outsiders, RNG.normal(unseen, 1.0, (count, 300)), RNG.normal(unseen, 1.0, (count, 40)))


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


def drawn(shift: float, count: int, seed: int, examples: int = 100, retained: float = 0.0) -> Phis:
    """The same as `models`, whatever was drawn before, shifted on the retain data as well."""
    draw = np.random.default_rng(seed)
    forget = draw.normal(shift, 1.0, (count, examples))
    retain = draw.normal(retained, 1.0, (count, 30))
    return Phis(forget, draw.normal(size=(count, 20)), draw.normal(size=(count, 20)), retain)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_shift_of_one_sigma_is_a_difference_however_many_models_there_are(count: int) -> None:
    found = compare_models(drawn(1.0, count, seed=1), drawn(0.0, count, seed=2))
    assert found.tests.forget.word == "differs"
    assert found.tests.forget.unlearned == found.tests.forget.retrained == count
    assert found.tests.retain.word == "cannot tell"
    assert found.tests.test.word == "cannot tell"
    assert found.tests.forget.klom == pytest.approx(found.klom)


def test_models_like_retrain_are_no_difference_and_worse_ones_on_the_retain_data_are_seen_there() -> None:
    same = compare_models(drawn(0.0, 16, seed=3), drawn(0.0, 16, seed=4))
    assert {test.word for test in (same.tests.forget, same.tests.retain, same.tests.test)} == {"cannot tell"}
    assert same.tests.forget.klom == pytest.approx(same.tests.forget.klom_by_chance, rel=0.1)
    damaged = compare_models(drawn(0.0, 16, seed=3, retained=-1.0), drawn(0.0, 16, seed=4))
    assert (damaged.tests.forget.word, damaged.tests.retain.word) == ("cannot tell", "differs")


def test_ulira_has_an_interval_over_models_and_epsilon_a_bound_from_twelve_models_on() -> None:
    few, enough = (compare_models(drawn(3.0, n, seed=5), drawn(0.0, n, seed=6)) for n in (11, 12))
    assert few.epsilon_bound is None
    assert enough.epsilon_bound is not None
    assert 0 < enough.epsilon_bound.value <= enough.epsilon_bound.ceiling
    assert (few.ulira.models, enough.ulira.models) == (6, 6), "the other half fits the normals"
    assert 0.5 < enough.ulira.low <= enough.ulira.value <= enough.ulira.high <= 1


def test_online_lira_asks_whether_the_unlearned_model_looks_like_original() -> None:
    oracle = drawn(0.0, 8, seed=20)
    original = drawn(3.0, 8, seed=21).forget
    assert compare_models(drawn(0.0, 8, seed=22), oracle).lira_online_auc is None
    forgotten = compare_models(drawn(0.0, 8, seed=22), oracle, original).lira_online_auc
    remembered = compare_models(drawn(3.0, 8, seed=23), oracle, original).lira_online_auc
    assert forgotten == pytest.approx(0.5, abs=0.15)
    assert remembered is not None
    assert remembered > 0.9
    original[0] = 99.0
    assert compare_models(drawn(3.0, 8, seed=23), oracle, original).lira_online_auc == remembered, "its own Original"


def test_the_exposed_samples_are_counted_on_both_sides() -> None:
    unlearned, oracle = drawn(0.0, 10, seed=7), drawn(0.0, 10, seed=8)
    unlearned.forget[:, :3] += 8
    unlearned.forget[:, 3:5] -= 8
    exposed = compare_models(unlearned, oracle).exposed
    assert (exposed.samples, exposed.remembered, exposed.over_unlearned) == (100, 3, 2)


def test_evidence_survives_json() -> None:
    for count in (4, 12):
        found = compare_models(drawn(0.0, count, seed=8), drawn(0.0, count, seed=9))
        assert build(Evidence, json.loads(json.dumps(dataclasses.asdict(found))), "evidence") == found


def test_over_several_targets_tests_are_joined_and_the_rest_is_averaged(tmp_path: Path) -> None:
    near, far = (compare_models(drawn(shift, 12, seed=10), drawn(0.0, 12, seed=11)) for shift in (0.0, 5.0))
    few, many_enough = TruePositiveRate(0.1, 0.0, 0.4, enough=False), TruePositiveRate(0.5, 0.2, 0.8, enough=True)
    near = dataclasses.replace(near, lira_finds=TruePositiveRates(many_enough, few))
    far = dataclasses.replace(far, lira_finds=TruePositiveRates(many_enough, many_enough))
    row = {"rounds": 0, "client_epochs": 0.0, "down_bytes": 0, "up_bytes": 0}
    rows = tuple(row | {"phase": phase} for phase in ("original", "retrained", "unlearned", "recovered"))
    outcomes = [
        Outcome("a", t, 0, tmp_path, rows, evidence=dataclasses.asdict(evidence))
        for t, evidence in enumerate((near, far))
    ]
    many = list(compare_outcomes(outcomes, ["a"], {}))[-1].references
    assert many["klom"] == pytest.approx((near.klom + far.klom) / 2)
    forget = many["tests"]["forget"]
    assert forget["p"] == 2 * far.tests.forget.p < 0.05, "the smaller one, for two targets"
    assert (forget["word"], forget["runs"], forget["examples"]) == ("differs", 2, 200)
    assert near.epsilon_bound is not None
    assert many["epsilon_bound"] == dataclasses.asdict(near.epsilon_bound), "the smaller bound holds for both"
    assert many["exposed"]["samples"] == 200
    assert many["exposed"]["remembered"] == near.exposed.remembered + far.exposed.remembered
    assert many["lira_finds"]["at_1"] == dataclasses.asdict(many_enough)
    tenth = many["lira_finds"]["at_tenth"]
    assert (tenth["value"], tenth["low"]) == pytest.approx((0.3, 0.1))
    assert tenth["high"] == pytest.approx(0.6)
    assert tenth["enough"] is False, "one target has too few outsiders"


def test_several_methods_are_corrected_for_and_too_few_models_are_named() -> None:
    apart = mean_evidence([dataclasses.asdict(compare_models(drawn(3.0, 4, seed=12), drawn(0.0, 4, seed=13)))])
    alone = judged_together([apart, {}])[0]["tests"]["forget"]
    assert (alone["p_holm"], alone["word"]) == (pytest.approx(2 / 70), "differs")
    assert "models_needed" not in alone
    for each in judged_together([apart, apart]):
        assert each["tests"]["forget"]["p_holm"] == pytest.approx(4 / 70)
        assert each["tests"]["forget"]["word"] == "cannot tell"
        assert each["tests"]["forget"]["models_needed"] == 5, "2 / C(10, 5) is below 5 % of one half"
    assert "word" not in apart["tests"]["forget"], "what was given is left as it is"


def test_evidence_of_older_versions_is_averaged_as_far_as_it_goes() -> None:
    assert mean_evidence([]) == {}
    assert mean_evidence([{"klom": 1.0, "halves": None}, {"klom": 2.0, "halves": None}]) == {"klom": 1.5}
    assert judged_together([{"klom": 1.5}]) == [{"klom": 1.5}]


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
    parts = (oracle.forget, oracle.outsiders, oracle.population, oracle.retain)
    first = Phis(*(part[:1].repeat(4, 0) for part in parts))
    found = compare_models(first, oracle)
    assert (found.rmia_auc, found.lira_auc) == (found.rmia_auc_floor, found.lira_auc_floor)
    changed = Phis(*(part.copy() for part in parts))
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


def test_no_retrain_shares_its_seed_with_an_unlearned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that begin with the same weights could not exchange their labels."""
    retrains: list[int] = []

    def watched(recipe: Recipe, cache: Path, reporter: Reporter) -> Progress:
        retrains.append(recipe.seed)
        return retrained(recipe, cache, reporter)

    monkeypatch.setattr("fedquit.studies.many_models.retrained", watched)
    recipe = tiny(method={"name": "natural"}, recover={"until": "rounds", "max_rounds": 0})
    gathered(recipe, 4, tmp_path / "out", tmp_path / "cache", reporter=Silent())
    runs = [json.loads((tmp_path / f"out/model-{i}/results.json").read_text())["recipe"]["seed"] for i in range(1, 5)]
    assert runs == [recipe.seed + SEED_STEP * i for i in range(1, 5)]
    assert retrains == [seed + RETRAIN_STEP for seed in runs]
    assert not set(runs) & set(retrains)


def test_samples_are_named_in_the_owners_file_alone(tmp_path: Path) -> None:
    recipe = tiny(
        method={"name": "natural"}, recover={"until": "rounds", "max_rounds": 0}, request=[{"clients": [0, 1]}]
    )
    found = gathered(recipe, 4, tmp_path / "out", tmp_path / "cache", reporter=Silent())
    folder = tmp_path / "out" / OWNER_FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700, "nobody else may read it"
    data = evaluation_of(build_setup(recipe)).data
    remembered = 0
    for client in (0, 1):
        stored = json.loads((folder / f"client-{client}.json").read_text())
        assert (stored["client"], stored["models"]) == (client, 4)
        samples = stored["samples"]
        assert sorted(sample["sample"] for sample in samples) == list(range(len(data.train[client])))
        assert all(sample["low"] <= sample["difference"] <= sample["high"] for sample in samples)
        remembered += sum(sample["exposed"] == "remembered" for sample in samples)
    assert remembered == found.exposed.remembered
    assert found.exposed.samples == len(data.train[0]) + len(data.train[1])
    for other in (tmp_path / "out").rglob("*.json"):
        private = other.parent.name == OWNER_FOLDER and other.parent.stat().st_mode & 0o777 == 0o700
        assert private or '"sample"' not in other.read_text(), other


def test_the_most_exposed_sample_comes_first_and_is_the_right_one() -> None:
    evaluation = evaluation_of(build_setup(tiny()))
    examples = len(evaluation.examples("forget")[1])
    draw = np.random.default_rng(14)
    u, o = draw.normal(size=(2, 8, examples))
    u[:, 5] += 9
    control = draw.normal(size=(8, 50))
    named = named_samples(sample_exposure(u, o, control, control), evaluation)
    client, number = evaluation.forget_samples()[5]
    first = named[client][0]
    assert (first["sample"], first["exposed"]) == (number, "remembered")
    position = int(evaluation.data.train[client][number])
    assert torch.equal(evaluation.data.x[position], evaluation.examples("forget")[0][5])


def test_the_retain_data_is_a_fixed_random_subset() -> None:
    chosen = _subset(5 * SUBSET)
    assert len(set(chosen.tolist())) == SUBSET
    assert chosen.tolist() == _subset(5 * SUBSET).tolist()
    assert chosen.max() > 4 * SUBSET, "from all of it"
    assert _subset(7).tolist() == list(range(7))


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
    for name in ("ulira_accuracy", "lira_auc", "lira_online_auc", "rmia_auc", "rmia_auc_floor", "forgetting_quality"):
        assert 0 <= lines[-1].references[name] <= 1, name
    for name in ("ulira_finds", "lira_finds", "lira_finds_floor", "rmia_finds", "rmia_finds_floor"):
        assert 0 <= lines[-1].references[name]["at_1"]["value"] <= 1, name
    written = json.loads((tmp_path / "comparison.json").read_text())["table"][-1]["references"]
    assert written == lines[-1].references
    write_report([tmp_path], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "Over many models" in html
    assert "RMIA finds at 1\u00a0% (%)" in html


def test_the_command_prints_the_verdict_of_the_test(
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
    many = json.loads((tmp_path / "c" / "comparison.json").read_text())["table"][-1]["references"]
    forget = many["tests"]["forget"]
    assert forget["word"] in printed
    assert f"{forget['klom']:.2f} ({forget['klom_by_chance']:.2f})" in printed
    assert f"of {many['exposed']['samples']:g}" in printed
    assert "cannot tell is no proof of equality" in printed
