# SPDX-License-Identifier: Apache-2.0
"""Every method, on every engine, follows the transcription of its paper through training, unlearning and recovery.

All is in float64. What a client sends in the first round of a phase, when both sides stand at the same model up to
rounding, agrees to 1e-12 of the largest number; over all rounds, what every client sends and every model agree to
1e-10. FedQUIT has a file of its own, test_fedquit_transcription.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedquit.core import Batch, Model, Params, Sent
from fedquit.methods import METHODS
from fedquit.methods.fukd import Imitate
from reference.cases import BY_NAME, CASES, Case, drift, followed, runs_on_all_engines, transcribed
from reference.transcriptions import PGA
from reference.world import BATCH, FORGET, ONE, SAMPLES, SIZES, TRAIN, Erasure, planned

ONE_VISIT, ALL_ROUNDS = 1e-12, 1e-10
NO_ROUNDING = 1e-6  # a difference above this is none of rounding

METHOD_TESTS = Path(__file__).parent.parent / "methods"
_SCRUB = "test_whole_clients_alternate_with_those_who_stay"
_SSD = "test_the_federation_dampens_as_the_paper_does_on_the_pooled_data"
_BAD_TEACHER = "test_those_who_leave_follow_the_one_and_those_who_stay_then_the_other"
ELSEWHERE = {  # methods and presets whose transcription is a test of their own file
    ("scrub", ""): _SCRUB,
    ("scrub", "authors"): _SCRUB,
    ("ssd", ""): _SSD,
    ("ssd", "authors"): _SSD,
    ("ssd", "vit"): _SSD,
    ("ssd", "faces"): _SSD,
    ("bad_teacher", ""): _BAD_TEACHER,
    ("bad_teacher", "authors"): _BAD_TEACHER,
    ("fedunran", "authors"): "test_a_client_stops_as_the_authors_code_does_and_goes_back_to_its_best_epoch",
}

RUNS = runs_on_all_engines(case for case in CASES if case.method != "fedquit")


@pytest.mark.parametrize(("engine", "case", "erasure"), RUNS)
def test_a_method_follows_its_paper(engine: str, case: Case, erasure: Erasure) -> None:
    found = drift(followed(engine, case, erasure), transcribed(case, erasure))
    assert found.visit <= ONE_VISIT
    assert found.rounds <= ALL_ROUNDS


def test_every_method_and_every_preset_has_a_transcription() -> None:
    expected = {(name, preset) for name, cls in METHODS.items() for preset in ("", *cls.presets)}
    assert {(case.method, case.preset) for case in CASES} == {(n, p) for n, p in expected if (n, p) not in ELSEWHERE}
    for (name, preset), test in ELSEWHERE.items():
        assert f"def {test}(" in (METHOD_TESTS / f"test_{name}.py").read_text(), f"{name} {preset} has none"


def test_the_transcriptions_take_from_the_package_the_plan_the_data_and_the_network_alone() -> None:
    allowed = {
        "transcriptions.py": {"fedquit.core": {"SERVER", "ClientId"}},
        "fedquit_paper.py": {"fedquit.core": {"ClientId"}},
        "plain.py": {"fedquit.core": {"ClientId"}, "fedquit.engine.plan": {"Address"}},
        "world.py": {
            "fedquit.core": {"ClientId", "Local", "Request"},
            "fedquit.data.federated": {"Dataset", "FederatedData"},
            "fedquit.engine.plan": {"Address", "fixed_uniforms", "make_plan"},
            "fedquit.models": {"FunctionalModel"},
        },
    }
    for file, expected in allowed.items():
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        taken = {node.module: {name.name for name in node.names} for node in imports if node.module}
        assert {module: names for module, names in taken.items() if module.startswith("fedquit")} == expected


# The federation is one in which faults show.


def test_every_visit_has_several_steps_in_two_epochs_and_a_smaller_last_batch() -> None:
    parts = {f"client {c}": TRAIN[c] for c in SIZES}
    for c in FORGET:
        parts[f"the forget set of client {c}"] = SAMPLES.marked[c]
        parts[f"the retain set of client {c}"] = TRAIN[c][~torch.isin(TRAIN[c], SAMPLES.marked[c])]
    for name, positions in parts.items():
        sizes = [len(step.y) for step in planned(("train", 0, 0, 1), positions, positions, 0).steps]
        epoch = len(sizes) // 2
        assert epoch >= 3, name
        assert sizes[:epoch] == sizes[epoch:], name
        assert sizes[epoch - 1] < BATCH, name
    assert len(set(SIZES.values())) == len(SIZES)
    assert {c: len(marked) for c, marked in SAMPLES.marked.items()} == FORGET
    assert len(set(FORGET.values())) == len(FORGET)


def test_augmentation_changes_all_that_a_client_sees_and_nothing_else() -> None:
    plain, varied = (planned(("train", 0, 0, 1), TRAIN[1], TRAIN[1], 0, augmented=a) for a in (False, True))
    for a, b in zip(plain.steps, varied.steps, strict=True):
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.u, b.u)
        assert bool((a.x - b.x).flatten(1).abs().amax(1).gt(0.01).all())


def test_the_constraints_of_projected_ascent_bind_in_some_steps_and_not_in_all() -> None:
    """Planned, taken and projected steps: one variant is projected, one is halted, one is projected in squares."""
    seen = {}
    for name in ("pga", "pga authors", "pga authors weighted=True"):
        ascent = BY_NAME[name].transcription(ONE, BY_NAME[name].options)
        assert isinstance(ascent, PGA)
        ascent.follow()
        ((seen[name]),) = ascent.constraints
    steps, taken, projected = seen["pga"]
    assert 0 < projected < taken == steps
    steps, taken, projected = seen["pga authors"]
    assert 1 < taken < steps
    steps, taken, projected = seen["pga authors weighted=True"]
    assert 0 < projected < taken == steps


# A fault that went unseen where the student's logits were all zero. Those of FedQUIT are in its own file.


@dataclass(frozen=True)
class WithoutStudentTemperature(Imitate):
    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        old = (model(sent["teacher"], batch.x) / self.temperature).log_softmax(-1)
        new = model(params, batch.x).log_softmax(-1)
        return self.temperature**2 * (old.exp() * (old - new)).sum(-1)


def test_fukd_s_student_is_softened_by_the_temperature_as_the_teacher_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["fukd"]
    assert drift(followed("sequential", case, ONE), transcribed(case, ONE)).visit <= ONE_VISIT
    monkeypatch.setattr("fedquit.methods.fukd.Imitate", WithoutStudentTemperature)
    assert drift(followed("sequential", case, ONE), transcribed(case, ONE)).visit > NO_ROUNDING
