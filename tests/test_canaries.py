# SPDX-License-Identifier: Apache-2.0
"""Canaries of the one-run audit, from the recipe to the rows, the terminal and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedquit.audit.canaries import KINDS, draw_canaries, plant_canaries
from fedquit.audit.scores import score_examples
from fedquit.cli import app
from fedquit.cli import runs as command
from fedquit.data.federated import Dataset, FederatedData
from fedquit.errors import InputError, RequestError
from fedquit.inference.one_run import Tally, audit, count_correct
from fedquit.report import write_report
from fedquit.results.canaries import canary_audits
from fedquit.running.recipe import AuditRecipe, Recipe, load
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.smoke import smoke
from fedquit.running.store import load_params
from fedquit.running.training_cache import Silent, training_hash
from fedquit.studies.comparison import compare
from worlds import tiny

Rows = dict[str, dict[str, Any]]


def dealt(classes: int = 5) -> FederatedData:
    x = torch.randn(300, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(300) % classes
    train = {0: torch.arange(0, 100), 1: torch.arange(100, 290)}
    return FederatedData(Dataset(x, y, x[:6], y[:6], classes), train, holdout={1: torch.arange(290, 300)})


def test_coins_are_fair_and_independent_of_which_examples_are_canaries() -> None:
    drawn = [draw_canaries(200, 40, KINDS, seed) for seed in range(400)]
    for kind in KINDS:
        included = np.array([d[kind].included.numpy() for d in drawn])
        assert included.mean() == pytest.approx(0.5, abs=3 * 0.5 / 16000**0.5)
        assert included.sum(1).std() == pytest.approx(10**0.5, rel=0.15), "as many as 40 independent coins give"
        at = np.array([d[kind].at.numpy() for d in drawn])
        assert np.corrcoef(at.ravel(), included.ravel())[0, 1] == pytest.approx(0, abs=3 / 16000**0.5)
    for d in drawn[:20]:
        assert len({*d["natural"].at.tolist(), *d["mislabelled"].at.tolist()}) == 80
    with pytest.raises(InputError, match="80 canaries are asked for, and the client has 80 examples"):
        draw_canaries(80, 40, KINDS, 0)


def test_canaries_left_out_are_trained_on_by_nobody_and_natural_ones_join_the_hold_out() -> None:
    data = dealt()
    planted, sets = plant_canaries(data, {1: 3}, 40, KINDS)
    natural, mislabelled = sets["natural"], sets["mislabelled"]
    everybody = torch.cat(list(planted.train.values()))
    for canaries in sets.values():
        assert bool(torch.isin(canaries.at, data.train[1]).all())
        assert torch.equal(torch.isin(canaries.at, everybody), canaries.included)
    assert torch.equal(planted.train[0], data.train[0])
    held_out = set(planted.holdout[1].tolist())
    assert held_out == {*range(290, 300), *natural.excluded_at.tolist()}
    assert bool((planted.y[mislabelled.at] != data.y[mislabelled.at]).all())
    untouched = torch.ones(300, dtype=torch.bool)
    untouched[mislabelled.at] = False
    assert torch.equal(planted.y[untouched], data.y[untouched])
    assert set(((planted.y - data.y) % 5)[mislabelled.at].tolist()) == {1, 2, 3, 4}
    with pytest.raises(RequestError, match="client 7 is not in the federation"):
        plant_canaries(data, {7: 0}, 10, KINDS)


def memorable(**changes: Any) -> Recipe:
    """Noise with random labels: a network that trains long enough knows its examples by heart, and nothing else."""
    data = {"options": {"examples": 600, "test_examples": 60, "classes": 4, "size": 6, "noise": 8.0}, "holdout": 0.0}
    given: dict[str, Any] = {
        "data": {**data, "public": 0.0},
        "model": {"name": "mlp", "options": {}, "dtype": "float64"},
        "train": {"rounds": 25, "batch_size": 16, "lr": 0.05, "epochs": 2.0, "weight_decay": 0.0},
        "audit": {"canaries": 60, "guesses": 15, "kind": "both"},
        "evaluate": {"attacks": []},
        "method": {"name": "natural"},
        "recover": {"until": "rounds", "max_rounds": 0},
    }
    return tiny(**(given | changes))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    folder = tmp_path_factory.mktemp("audit") / "run"
    return folder, {row["phase"]: row for row in run(memorable(), folder)["rows"]}


def test_a_method_that_does_nothing_is_caught_like_original_and_retrain_is_not(rows: tuple[Path, Rows]) -> None:
    verdicts = {
        kind: {phase: row[f"canary_{kind}_verdict"] for phase, row in rows[1].items()}
        for kind in ("natural", "mislabelled")
    }
    for by_phase in verdicts.values():
        assert by_phase["original"] == by_phase["unlearned"] == by_phase["recovered"] == "remembered"
        assert by_phase["retrained"] == "not detected"
    assert rows[1]["recovered"]["canary_natural_epsilon_low"] > 0
    assert rows[1]["retrained"]["canary_natural_epsilon_low"] == 0


def test_the_rows_say_what_the_rule_says_of_the_scores(rows: tuple[Path, Rows]) -> None:
    setup = build_setup(memorable())
    params, _ = load_params(rows[0] / "request-0" / "model.safetensors")
    assert setup.canaries is not None
    tallies = {}
    for kind, canaries in setup.canaries.sets.items():
        phi = score_examples(setup.model, params, setup.data.x[canaries.at], setup.data.y[canaries.at]).phi
        tallies[kind] = count_correct(phi, canaries.included.numpy(), 15)
    row = rows[1]["recovered"]
    for kind, judged in audit(tallies, 1e-5, tallies).items():
        assert row[f"canary_{kind}_correct"] == judged.tally.correct
        assert row[f"canary_{kind}_epsilon_low"] == judged.epsilon_low
        assert row[f"canary_{kind}_p"] == judged.p
        assert row[f"canary_{kind}_sentence"] == judged.sentence
        assert judged.tally == Tally(60, 30, judged.tally.correct)


def test_terminal_report_and_exports_show_the_audit(
    rows: tuple[Path, Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, by_phase = rows
    said = [audit.sentence for audit in canary_audits(by_phase.values())]
    assert len(said) == 8, "two kinds in four phases"
    command._say_canaries(list(by_phase.values()))
    printed = capsys.readouterr().out
    assert all(sentence in printed for sentence in said)
    assert "One-run audit, Retrained, natural canaries: not detected. No memory" in printed
    write_report([folder], folder / "r.html")
    write_report([folder], folder / "r.csv")
    page = (folder / "r.html").read_text()
    assert "One-run audit" in page
    assert "not detected" in page
    assert by_phase["recovered"]["canary_natural_sentence"].replace("'", "&#39;") in page
    assert "canary_natural_epsilon_low" in (folder / "r.csv").read_text().splitlines()[0]


def test_an_untrained_original_makes_the_audit_blind(tmp_path: Path) -> None:
    untrained = memorable(train={"rounds": 1, "batch_size": 16, "lr": 1e-6, "weight_decay": 0.0})
    verdicts = {row["canary_natural_verdict"] for row in run(untrained, tmp_path / "run")["rows"]}
    assert verdicts == {"blind"}


def test_the_coins_follow_from_the_run_s_seed_and_determine_the_training() -> None:
    one, again, other = (build_setup(memorable(seed=seed)) for seed in (0, 0, 1))
    assert one.canaries is not None
    assert again.canaries is not None
    assert other.canaries is not None
    first, second = one.canaries.sets["natural"], other.canaries.sets["natural"]
    assert torch.equal(first.at, again.canaries.sets["natural"].at)
    assert not torch.equal(first.included, second.included)
    assert training_hash(one, one.data, {}, None) != training_hash(other, other.data, {}, None)
    plain = build_setup(memorable(audit={"canaries": 0}))
    assert plain.canaries is None
    assert one.data.fingerprint() != plain.data.fingerprint()


def test_an_audit_without_canaries_changes_nothing(tmp_path: Path) -> None:
    assert load("demo", ["audit.canaries=0"]).hash == load("demo").hash
    assert load("demo", ["audit.canaries=200"]).hash != load("demo").hash
    assert not any(key.startswith("canary") for row in run(tiny(), tmp_path / "run")["rows"] for key in row)
    assert AuditRecipe(200).k == 20
    assert AuditRecipe(200, guesses=7).k == 7
    assert AuditRecipe(200, kind="both").kinds == KINDS


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"canaries": -1}, "at least 0"),
        ({"canaries": 30}, r"guesses 3 canaries in and 3 out, which can show nothing; set audit\.canaries to 40"),
        ({"canaries": 40, "guesses": 21}, "at most half"),
        ({"canaries": 40, "delta": 1.0}, "below 1"),
    ],
)
def test_audits_that_can_show_nothing_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        tiny(audit=given)


def test_canaries_are_of_clients_that_leave_whole_and_not_for_many_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="clients that leave whole"):
        memorable(request=[{"clients": [1], "samples": 0.5}])
    with pytest.raises(InputError, match="canaries are drawn anew for each seed"):
        compare(memorable(), ["natural"], [1], 1, tmp_path, overview=None, references=8)  # type: ignore[arg-type]


class Quiet(Silent):
    """Reports nothing of a comparison."""

    def runs(self, done: int, total: int, title: str) -> None:
        pass

    def lane(self, number: int) -> Silent:
        return self


def test_in_a_comparison_each_target_has_its_own_canaries_and_its_own_original(tmp_path: Path) -> None:
    few = tiny(audit={"canaries": 8, "guesses": 4}, evaluate={"attacks": []})
    _, outcomes = compare(few, ["natural"], [0, (1, 2)], 1, tmp_path, overview=Quiet(), jobs=1)
    assert [outcome.failure for outcome in outcomes] == ["", ""]
    originals = [outcome.rows[0] for outcome in outcomes]
    assert [row["canary_natural_canaries"] for row in originals] == [8, 16]
    assert [row["canary_natural_guesses"] for row in originals] == [8, 16]
    assert originals[0]["fingerprint"] != originals[1]["fingerprint"]
    write_report([tmp_path], tmp_path / "report.html")
    assert "One-run audit" in (tmp_path / "report.html").read_text()


def test_the_smallest_size_of_a_recipe_has_no_room_for_canaries() -> None:
    assert smoke(memorable()).audit.canaries == 0


def test_the_list_of_metrics_names_the_audit() -> None:
    assert "one_run_audit" in CliRunner().invoke(app, ["list", "metrics"]).stdout
