# SPDX-License-Identifier: Apache-2.0
"""Which method is held against which transcription, with which options, for which requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from fedquit.core.method import Method
from fedquit.engine import GraphCache
from fedquit.methods import METHODS
from reference import transcriptions as paper
from reference.fedquit_paper import FedQUIT
from reference.package_run import Package, TrainedPackage
from reference.plain import Transcription
from reference.world import ONE, SAMPLES, SAMPLES_OF_ONE, SEVERAL, Erasure, Log, Weights

ALL = (ONE, SEVERAL, SAMPLES)
WHOLE = (ONE, SEVERAL)  # for methods that forget whole clients only
TWICE: dict[str, Any] = {"epochs": 2.0, "batch_size": 3}


@dataclass(frozen=True, eq=False)
class Case:
    """A method with a preset and options, and its transcription.

    Attributes:
        method: its name in the package.
        transcription: what it is held against.
        options: fields of the method; the transcription reads the same ones.
        preset: of the package's method; the transcription has the preset's numbers written out.
        erasures: the requests that are served. Every method has one of several clients and one of samples where it
            allows them; a preset that only changes numbers has one.
    """

    method: str
    transcription: type[Transcription]
    options: dict[str, Any] = field(default_factory=dict)
    preset: str = ""
    erasures: tuple[Erasure, ...] = ALL

    @property
    def name(self) -> str:
        """The method, its preset, and those options that choose a variant."""
        chosen = [f"{key}={value}" for key, value in self.options.items() if isinstance(value, str | bool)]
        return " ".join([self.method, *([self.preset] if self.preset else []), *chosen])

    def build(self) -> Method:
        """The package's method."""
        cls = METHODS[self.method]
        return cls(**{**cls.presets.get(self.preset, {}), **self.options})


CASES = [
    Case("fedquit", FedQUIT, {"lr": 0.01, **TWICE}),
    Case("fedquit", FedQUIT, {"lr": 0.01, "order": "sequential", **TWICE}, erasures=(SEVERAL, SAMPLES)),
    Case("federaser", paper.FedEraser, {"calibration": 0.75}, erasures=WHOLE),
    Case("federaser", paper.FedEraserAuthors, preset="authors", erasures=(SEVERAL,)),
    Case("pga", paper.PGA, {"lr": 0.2, "clip_tensor": 0.3, **TWICE}, erasures=WHOLE),
    Case("pga", paper.PGAAuthors, {"lr": 0.2, "clip": 0.5, **TWICE}, "authors", WHOLE),
    Case(
        "pga", paper.PGAAuthors, {"lr": 0.4, "clip": 0.5, "halt": 100.0, "weighted": True, **TWICE}, "authors", (ONE,)
    ),
    Case("mode", paper.MoDe, {"unlearning_rounds": 3, "degradation_rounds": 2, "retained_lr": 0.05}),
    Case(
        "mode",
        paper.MoDeSwapped,
        {"unlearning_rounds": 2, "degradation_rounds": 1, "target_lr": 0.05},
        "swapped",
        erasures=(SEVERAL,),
    ),
    Case("fedau", paper.FedAU, TWICE),
    Case("fedau", paper.FedAUDuring, preset="authors"),
    Case("not", paper.NoT),
    Case("fedosd", paper.FedOSD, {"unlearning_rounds": 2, "lr": 0.0}, erasures=(ONE, SAMPLES_OF_ONE)),
    Case(
        "fedosd",
        paper.FedOSDAuthors,
        {"unlearning_rounds": 2, "lr": 0.1, "lr_decay": 0.8, "batch_size": 3, "recovery_lr": 0.05},
        "authors",
    ),
    Case("ascent", paper.GradientAscent, {"lr": 0.05, "clip": 0.8, **TWICE}),
    Case("fedunran", paper.FedUNRAN, {"lr": 0.01, **TWICE}),
    Case("fukd", paper.FUKD, {"lr": 0.01, **TWICE}, erasures=WHOLE),
    Case("rapid", paper.RapidRetraining, {"lr": 0.01}),
    Case("rapid", paper.AdaHessian, {"lr": 0.001}, "adahessian", erasures=(SEVERAL,)),
    Case("fused", paper.FUSED, {"overwriting_rounds": 2}),
    Case("puf", paper.PUF, {"strength": 3.0}),
    Case("puf", paper.PUFSpecial, preset="special", erasures=(SEVERAL,)),
    Case("natural", paper.Natural, erasures=(SAMPLES,)),
    Case("retrain", paper.Retrain),
]
BY_NAME = {case.name: case for case in CASES}


@cache
def transcribed(case: Case, erasure: Erasure) -> Log:
    """The transcription's trajectory."""
    return case.transcription(erasure, case.options).follow()


@cache
def _package(engine: str) -> Package:
    """On a GPU all runs share their captured steps, as the runs of one process do."""
    return Package(engine, GraphCache() if engine == "cuda" else None)


@cache
def trained(engine: str, seed: int) -> TrainedPackage:
    """One training for all methods that watch it: each keeps what it needs under its case's name."""
    methods = {case.name: case.build() for case in CASES}
    watching = {name: m for name, m in methods.items() if m.shapes_training and not m.knows_request}
    return _package(engine).train(watching, seed)


def followed(engine: str, case: Case, erasure: Erasure) -> Log:
    """The package's trajectory on an engine: "sequential", "threaded", "stacked" or "cuda"."""
    package, method = _package(engine), case.build()
    if method.knows_request:  # it shapes the training, and only it is attached
        found = package.train({case.name: method}, erasure.seed, erasure)
    else:
        found = trained(engine, erasure.seed)
    return package.serve(found, case.name, method, erasure)


def runs_on_all_engines(cases: Iterable[Case]) -> list[Any]:
    """Parameters (engine, case, erasure) for tests, one engine after the other.

    Threads do for each client what the sequential engine does: of each case they serve the first request only.
    """
    gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    listed = list(cases)
    return [
        pytest.param(
            engine,
            case,
            erasure,
            id=f"{engine}-{case.name}: {erasure.name}, seed {erasure.seed}",
            marks=[gpu] if engine == "cuda" else [],
        )
        for engine in ("sequential", "stacked", "threaded", "cuda")
        for case in listed
        for erasure in (case.erasures[:1] if engine == "threaded" else case.erasures)
    ]


@dataclass(frozen=True)
class Drift:
    """The largest differences between two trajectories, relative to the scale of the numbers.

    Attributes:
        visit: of what a client sent in the first round of a phase, and of its mean loss: until then, both sides
            stand at the same model up to rounding.
        rounds: of what any client sent in any round, of its mean loss, and of the model after any round.
    """

    visit: float
    rounds: float


def apart(actual: Weights, expected: Weights) -> float:
    """The largest difference, relative to the largest number."""
    assert actual.keys() == expected.keys()
    assert all(actual[n].shape == p.shape and actual[n].dtype == p.dtype for n, p in expected.items())
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((actual[n] - p).abs().max()) for n, p in expected.items()) / scale


def drift(actual: Log, expected: Log) -> Drift:
    """Compare two trajectories; who was asked what, where, and with how many examples must be the same."""
    assert [(v.place, v.examples) for v in actual.visits] == [(v.place, v.examples) for v in expected.visits]
    assert [(phase, r) for phase, r, _ in actual.models] == [(phase, r) for phase, r, _ in expected.models]
    first, later = [0.0], [0.0]
    for a, b in zip(actual.visits, expected.visits, strict=True):
        differences = [apart(a.sent, b.sent)]
        if b.loss is not None:
            assert a.loss is not None
            differences.append(abs(a.loss - b.loss) / max(1.0, abs(b.loss)))
        _, number, _, _ = b.place
        (later if number else first).extend(differences)
    models = [apart(a, b) for (_, _, a), (_, _, b) in zip(actual.models, expected.models, strict=True)]
    return Drift(max(first), max(first + later + models))
