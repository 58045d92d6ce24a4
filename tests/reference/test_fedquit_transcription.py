# SPDX-License-Identifier: Apache-2.0
"""FedQUIT in a federation is Algorithms 1 and 2 of its paper, on every engine, step by step and round by round.

The transcription is `fedquit_paper.FedQUIT`; the bounds are those of test_transcriptions.py. A visit of the leaving
client has at least three steps and two epochs: in a single step a teacher that moves with its student cannot be told
from one that stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from fedquit.core import Batch, Model, Params, Sent
from fedquit.distill.losses import LOSSES, distillation_loss
from fedquit.distill.virtual_teacher import TEACHERS
from fedquit.engine import GraphCache
from fedquit.engine.stacked import replay
from fedquit.methods.fedquit import Distill
from reference.cases import BY_NAME, CASES, TWICE, Case, drift, followed, runs_on_all_engines, trained, transcribed
from reference.fedquit_paper import FedQUIT
from reference.package_run import Package
from reference.world import ONE, SAMPLES, Erasure

ONE_VISIT, ALL_ROUNDS = 1e-12, 1e-10
NO_ROUNDING = 1e-6  # a difference above this is none of rounding

PLAIN = BY_NAME["fedquit"]
FEDQUIT = [case for case in CASES if case.method == "fedquit"]
OTHER_SEEDS = [replace(case, erasures=tuple(replace(e, seed=e.seed + 10) for e in case.erasures)) for case in FEDQUIT]


@pytest.mark.parametrize(("engine", "case", "erasure"), runs_on_all_engines([*FEDQUIT, *OTHER_SEEDS]))
def test_fedquit_follows_algorithms_1_and_2(engine: str, case: Case, erasure: Erasure) -> None:
    found = drift(followed(engine, case, erasure), transcribed(case, erasure))
    assert found.visit <= ONE_VISIT
    assert found.rounds <= ALL_ROUNDS


NUMBERS: dict[str, dict[str, Any]] = {"fixed": {"v": -2.0}, "temperature": {"tau": 3.0}, "topk": {"k": 1}}
VARIANTS = [
    *({"teacher": name, **NUMBERS.get(name, {})} for name in TEACHERS if name != "min"),
    *({"loss": name} for name in LOSSES if name != "kl"),
    {"optimizer": "adamw"},
    {"optimizer": "sgd"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(map(str, variant.values())))
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_every_teacher_loss_and_optimizer_follows_its_formula(variant: dict[str, Any], engine: str) -> None:
    case = Case("fedquit", FedQUIT, {"lr": 0.01, **TWICE, **variant})
    expected = transcribed(case, SAMPLES)
    found = drift(followed(engine, case, SAMPLES), expected)
    assert found.visit <= ONE_VISIT
    assert found.rounds <= ALL_ROUNDS
    assert variant == {"loss": "ce"} or drift(transcribed(PLAIN, SAMPLES), expected).visit > NO_ROUNDING


def test_steps_that_are_traced_and_replayed_on_a_cpu_follow_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "STEPS_BEFORE_TRACING", 2)
    package = Package("stacked", GraphCache())
    found = drift(package.serve(trained("stacked", ONE.seed), PLAIN.name, PLAIN.build(), ONE), transcribed(PLAIN, ONE))
    assert found.visit <= ONE_VISIT
    assert found.rounds <= ALL_ROUNDS
    assert package.graphs is not None
    kinds = {key[0]: steps for key, steps in package.graphs.traced.items() if isinstance(key, tuple)}
    assert any(step.traced for step in kinds[Distill].by_shape.values())


# Faults that went unseen in a federation whose clients take one step and whose data is never augmented.


@dataclass(frozen=True)
class TaughtByTheMovingStudent(Distill):
    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        z = model(params, batch.x)
        return distillation_loss(z, z, batch.y, batch.u, teacher="min", loss="kl", v=0.0, tau=1.0, k=5)


@dataclass(frozen=True)
class OnAugmentedExamples(Distill):
    augments: ClassVar[bool] = True


@pytest.fixture
def with_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Distill]], float]:
    """How far FedQUIT is from its paper once the leaving client has another task."""

    def found(fault: type[Distill]) -> float:
        monkeypatch.setattr("fedquit.methods.fedquit.Distill", fault)
        return drift(followed("sequential", PLAIN, ONE), transcribed(PLAIN, ONE)).visit

    return found


def test_the_teacher_is_the_global_model_that_was_sent_and_not_the_moving_student(
    with_fault: Callable[[type[Distill]], float],
) -> None:
    assert drift(followed("sequential", PLAIN, ONE), transcribed(PLAIN, ONE)).visit <= ONE_VISIT
    assert with_fault(TaughtByTheMovingStudent) > NO_ROUNDING


def test_the_leaving_client_unlearns_on_its_examples_as_they_are_not_on_augmented_ones(
    with_fault: Callable[[type[Distill]], float],
) -> None:
    assert not Distill.augments
    assert drift(followed("sequential", PLAIN, ONE), transcribed(PLAIN, ONE)).visit <= ONE_VISIT
    assert with_fault(OnAugmentedExamples) > NO_ROUNDING
