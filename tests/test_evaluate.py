# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.evaluation import BINS, SETS, Evaluation, accuracy
from fedquit.cli import app
from fedquit.core import Params, Request
from fedquit.data.federated import Dataset, FederatedData
from fedquit.results.folders import OWNER_FOLDER
from fedquit.results.words import exposed
from fedquit.running.costs import Costs
from fedquit.running.runner import evaluation_of, run
from fedquit.running.setup import build_setup
from worlds import tiny


class Given:
    """A model whose logits are its input, times a number."""

    def init(self, seed: int) -> Params:
        return {"scale": torch.ones(())}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x * params["scale"]


def scaled(by: float) -> Params:
    return {"scale": torch.tensor(by)}


def setup(holdout: bool = True) -> FederatedData:
    """Four clients of 25 examples; client 1's logits are right, and large, where it trained."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(140, 3, generator=generator), torch.arange(140) % 3
    x[25:50] += 6 * torch.eye(3)[y[25:50]]
    data = Dataset(x[:120], y[:120], x[120:], y[120:], classes=3)
    train = {c: torch.arange(c * 25, c * 25 + 25) for c in range(4)}
    return FederatedData(data, train, holdout={1: torch.arange(100, 120)} if holdout else {})


def evaluation(**changes: object) -> Evaluation:
    request = Request((1,))
    data = setup(holdout=bool(changes.pop("holdout", True))).mark(request)
    return Evaluation(Given(), data, request, tuple(ATTACKS), **changes)  # type: ignore[arg-type]


def test_accuracy_does_not_depend_on_the_batches_and_counts_every_position() -> None:
    logits, labels = torch.randn(101, 5, generator=torch.Generator().manual_seed(0)), torch.arange(101) % 5
    expected = 100 * float((logits.argmax(1) == labels).double().mean())
    for size in (7, 1000):
        assert accuracy(Given(), scaled(1.0), logits, labels, batch_size=size) == pytest.approx(expected)
    sequences = torch.eye(3)[torch.tensor([[0, 1, 2, 2], [1, 1, 1, 0]])]
    assert accuracy(Given(), scaled(1.0), sequences, torch.tensor([[0, 1, 2, 0], [1, 1, 1, 1]])) == 75.0


def test_each_set_is_what_it_says() -> None:
    who = evaluation()
    sizes = {name: len(who.examples(name)[1]) for name in SETS}
    assert sizes == {"test": 20, "retain": 75, "forget": 25, "holdout": 20}
    assert torch.equal(who.examples("forget")[0], who.data.x[25:50])


def test_a_model_that_remembers_is_found_out_by_every_measure() -> None:
    measures = evaluation().judge(scaled(1.0))
    assert measures["forget_acc"] == 100.0
    assert measures["forget_loss"] < measures["holdout_loss"]
    assert measures["auc"] > 0.9
    assert measures["holdout_verdict"] == "remembered"
    assert measures["entropy_ks_p"] < 1e-4
    assert measures["tpr_at_0.01"] > 0.5
    assert measures["tpr_at_0.05_enough"], "20 outsiders can show one false alarm in twenty"
    assert measures["tpr_at_0.05_low"] <= measures["tpr_at_0.05"] <= measures["tpr_at_0.05_high"]
    assert not measures["tpr_at_0.01_enough"], "20 outsiders cannot show one false alarm in a hundred"
    assert measures["exposed_against"] == "holdout"
    assert all(0 <= measures[f"mia_{name}"] <= 100 for name in ATTACKS)


def test_a_model_that_knows_nothing_shows_nothing() -> None:
    measures = evaluation().judge(scaled(0.0))
    assert measures["auc"] == 0.5
    assert measures["holdout_verdict"] == "cannot tell"
    assert measures["forget_loss"] == pytest.approx(math.log(3))
    assert measures["tpr_at_0.01"] == 0.0


def test_the_verdict_asks_whether_original_is_caught() -> None:
    who = evaluation(margin=0.3)  # 25 forgotten and 20 hold-out samples: a wide margin
    blind = who.judge(scaled(0.0), scaled(0.0))
    assert (blind["holdout_verdict"], blind["original_auc_low"] < 0.5) == ("cannot tell", True)
    assert blind["holdout_reason"].startswith("blind: the same test does not catch Original")
    seen = who.judge(scaled(0.0), scaled(1.0))
    assert seen["holdout_verdict"] == "forgotten within the margin"
    assert seen["auc_change_high"] < 0
    assert (seen["forget_size"], seen["holdout_size"], seen["holdout_margin"]) == (25, 20, 0.3)
    assert [half["holdout_size"] for half in seen["holdout_halves"]] == [10, 10]
    alone = who.judge(scaled(0.0))
    assert alone["holdout_reason"] == "blind: Original was not scored by the same test"
    assert "auc_change" not in alone


def test_without_a_holdout_the_test_set_stands_in_and_says_so() -> None:
    measures = evaluation(holdout=False).judge(scaled(1.0))
    assert measures["holdout_acc"] is None
    assert measures["exposed_against"] == "test"
    assert "auc" not in measures


def test_the_densities_integrate_to_one_over_shared_bins() -> None:
    entropy = evaluation().judge(scaled(1.0))["entropy"]
    width = np.diff(entropy["edges"])
    assert len(width) == BINS
    for name in ("forget", "test"):
        assert float((np.array(entropy[name]) * width).sum()) == pytest.approx(1.0, abs=1e-3)


def test_the_roc_rises_from_few_false_alarms_to_all() -> None:
    curve = evaluation().judge(scaled(1.0))["roc"]
    assert curve["fpr"][0] == pytest.approx(1e-4)
    assert curve["tpr"] == sorted(curve["tpr"])
    assert (curve["fpr"][-1], curve["tpr"][-1]) == (1.0, 1.0)


def test_the_price_of_forgetting_is_the_rise_of_the_retained_loss() -> None:
    who = evaluation()
    x, y = who.examples("retain")
    losses = [float(torch.nn.functional.cross_entropy(x * s, y)) for s in (1.0, 3.0)]
    assert who.price_of_forgetting(scaled(1.0), scaled(3.0)) == pytest.approx(losses[1] - losses[0], rel=1e-6)


def test_both_snapshots_together_name_who_they_find_and_against_whom() -> None:
    leak = evaluation().against(scaled(1.0), scaled(0.0), None)
    assert leak["leakage_against"] == "holdout"
    assert leak["leakage_tpr_at_0.01_low"] < leak["leakage_tpr_at_0.01"] <= leak["leakage_tpr_at_0.01_high"]
    assert leak["leakage_tpr_at_0.01"] > 0.5, "confidence falls where it was earned"
    assert leak["leakage_tpr_at_0.05"] >= leak["leakage_tpr_at_0.01"]
    assert not leak["leakage_tpr_at_0.001_enough"], "20 outsiders cannot show one false alarm in a thousand"
    unchanged = evaluation(holdout=False).against(scaled(1.0), scaled(1.0), None)
    assert unchanged["leakage_against"] == "test"
    assert unchanged["leakage_tpr_at_0.01"] == 0.0


def named_in_the_docs() -> set[str]:
    """The first column of the table of fields."""
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    lines = page.partition("## A row of `results.json`")[2].splitlines()
    return {name for line in lines if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_the_docs_name_every_field_of_a_row_and_no_other(tmp_path: Path) -> None:
    everything = tiny(
        request=[{"clients": [1]}, {"kind": "join", "clients": [1], "anew": True}],
        recover={"until": "rounds", "max_rounds": 1, "budgets": [0.5], "follow": 20}
        | {"control": True, "retrain_longer": True},
        evaluate={"relearn": 1, "backdoor": 0.5, "backdoor_size": 2},
        audit={"canaries": 8, "guesses": 4, "kind": "both"},
    )
    rows = run(everything, tmp_path / "run")["rows"]
    phases = {"original", "retrained", "unlearned", "recovered", "natural", "budget", "joined"}
    assert {row["phase"] for row in rows} == phases
    assert named_in_the_docs() - OF_A_BUNDLE == {field for row in rows for field in row}


OF_A_BUNDLE = {"source", "left_empty", "retrain_seed"}  # of a Retrain that the run did not train itself with its seed
NOT_MEASURED = {
    *OF_A_BUNDLE,
    *("method", "phase", "request", "clients", "samples", "seed", "rounds", "seconds", "fingerprint", "runs"),
    *(
        "curve",
        "path",
        "retrain_longer_path",
        "last_rounds",
        "budget",
        "budget_spent",
    ),  # the same measures at other moments
    *(f.name for f in fields(Costs)),
}
MEASURED_BY = {  # other fields are called as what measures them
    r"\w+_acc(_last|_after_\d+)?": "accuracy",
    r"\w+_loss": "loss",
    r"tpr_at_.+|roc|exposed_against": "roc",
    r"(natural_|retrain_longer_)?auc\w*": "auc",
    r"entropy_ks\w*": "entropy_ks",
    r"(test|retain|forget|holdout)_size": "accuracy",
    r"holdout_(verdict|reason|margin|needed|halves)|tail_p|original_auc_low": "holdout_null",
    r"exposed_(at_least|named)": "holdout_null",
    r"canary_.+": "one_run_audit",
    r"leakage_.+": "leakage",
    r"forget_js": "js_divergence",
    r"relearn_\w+": "relearn_time",
    r"backdoor_(asr|images)": "backdoor",
    r"mia_(\w+)": r"\1",
}


def test_the_list_names_what_measures_every_field_of_a_row() -> None:
    listed = set[str]()
    for kind in ("metrics", "attacks"):
        listed |= set(json.loads(CliRunner().invoke(app, ["list", kind, "--json"]).stdout))
    for field in named_in_the_docs() - NOT_MEASURED:
        found = [match.expand(name) for how, name in MEASURED_BY.items() if (match := re.fullmatch(how, field))]
        assert (found or [field])[0] in listed


def test_exposed_samples_are_counted_for_the_operator_and_named_for_their_owner_alone(tmp_path: Path) -> None:
    recipe = tiny(request=[{"clients": [0, 1]}], data={"holdout": 0.2}, recover={"until": "rounds", "max_rounds": 1})
    rows = {row["phase"]: row for row in run(recipe, tmp_path / "run")["rows"]}
    judged = evaluation_of(build_setup(recipe))
    folder = tmp_path / "run" / OWNER_FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700, "nobody else may read it"
    files = [json.loads((folder / f"client-{client}-request-0.json").read_text()) for client in (0, 1)]
    named = 0
    for client, file in enumerate(files):
        assert (file["client"], file["request"], file["models"]) == (client, 0, 1)
        numbers = [sample["sample"] for sample in file["samples"]]
        assert sorted(numbers) == list(range(len(judged.data.train[client])))
        assert [sample["p"] for sample in file["samples"]] == sorted(sample["p"] for sample in file["samples"])
        named += sum(sample["exposed"] == "remembered" for sample in file["samples"])
    assert named == rows["recovered"]["exposed_named"]
    assert 0 <= rows["recovered"]["exposed_at_least"] <= rows["recovered"]["forget_size"]
    for other in (tmp_path / "run").rglob("*.json"):
        assert other.parent == folder or '"sample"' not in other.read_text(), other


def test_the_sample_that_stands_out_is_the_one_that_is_named() -> None:
    """Forgotten samples under a model that knows all of them, and none of the hold-out, by heart."""
    judged = evaluation()
    by_client = judged.exposed_by_client(scaled(1.0))
    scores = {pair: i for i, pair in enumerate(judged.forget_samples())}
    forget = judged._scores("forget", scaled(1.0))
    assert forget is not None
    for client, samples in by_client.items():
        assert [sample["phi"] for sample in samples] == [forget.phi[scores[client, s["sample"]]] for s in samples]
        assert sum(s["exposed"] == "remembered" for s in samples) >= 20, "25 are known by heart"
    assert evaluation(holdout=False).exposed_by_client(scaled(1.0)) == {}


def test_exposed_samples_in_a_sentence() -> None:
    found = {"exposed_at_least": 12, "exposed_named": 3, "forget_size": 400}
    assert exposed(found).startswith(
        "At least 12 of the 400 forgotten samples are still exposed (95 % confidence); 3 can"
    )
    assert exposed(found | {"exposed_at_least": 0, "exposed_named": 0}).endswith("cannot be told from this model.")
    assert exposed({"forget_size": 400}) == "", "older results"
