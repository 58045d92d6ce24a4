# SPDX-License-Identifier: Apache-2.0
"""Logits (B, T, C) through every method, teacher, loss, attack and metric: a sequence is one example."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedquit import unlearn
from fedquit.audit.attacks import ATTACKS
from fedquit.audit.attacks.lira import lira_offline, ulira
from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.metrics.forgetting_quality import forgetting_quality
from fedquit.audit.metrics.holdout import holdout_null
from fedquit.audit.metrics.klom import klom
from fedquit.audit.metrics.leakage import leakage
from fedquit.audit.scores import Scores, js_of_logits, logits_of, score_examples
from fedquit.core import Batch, Local, Measurement, Params, Request, Task
from fedquit.core.fedavg import Learn
from fedquit.data.samples import choose_samples
from fedquit.distill.losses import LOSSES
from fedquit.distill.virtual_teacher import TEACHERS
from fedquit.engine import Address
from fedquit.errors import InputError, RequestError
from fedquit.methods import METHODS
from fedquit.methods.ascent import Climb
from fedquit.methods.bad_teacher import Teach
from fedquit.methods.fedau import LearnBoth, SendHead, TrainHead
from fedquit.methods.fedosd import Unlikely
from fedquit.methods.fedquit import Distill
from fedquit.methods.fedunran import Mislabel, MislabelPatiently
from fedquit.methods.fukd import Imitate
from fedquit.methods.fused import TrainAdapters, places
from fedquit.methods.mode import Guide
from fedquit.methods.pga import Ascend
from fedquit.methods.scrub import Diverge, Errors, Repair
from fedquit.methods.ssd import FisherDiagonal
from fedquit.models import FunctionalModel
from fedquit.report import write_report
from fedquit.running.runner import run
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import StateFile
from fedquit.running.training_cache import Silent, train
from fedquit.studies.comparison import compare
from fedquit.studies.sweep import sweep_rates
from sequence_world import LENGTH, VOCABULARY, talk, talking

# Fewer rounds than by default, so that all of this takes seconds.
SHORT: dict[str, dict[str, Any]] = {
    "pga": {"epochs": 1.0},
    "mode": {"unlearning_rounds": 2, "degradation_rounds": 1},
    "fedau": {"epochs": 2.0},
    "fedosd": {"unlearning_rounds": 2},
    "ascent": {"epochs": 1.0},
    "fedunran": {"epochs": 1.0},
    "fukd": {"epochs": 2.0},
    "fused": {"overwriting_rounds": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **SHORT.get(name, {})} for name in METHODS},
    "federaser authors": {"name": "federaser", "preset": "authors"},
    "pga authors": {"name": "pga", "preset": "authors", "epochs": 1.0},
    "fedau authors": {"name": "fedau", "preset": "authors"},
    "fedosd projected": {"name": "fedosd", "unlearning_rounds": 2, "recovery": "projected"},
    "rapid adahessian": {"name": "rapid", "preset": "adahessian"},  # differentiates the LSTM twice
    "puf special": {"name": "puf", "preset": "special"},
    "fedunran authors": {"name": "fedunran", "preset": "authors"},
    "scrub authors": {"name": "scrub", "preset": "authors"},
    "scrub rewind": {"name": "scrub", "rewind": True},
    "bad_teacher phases": {"name": "bad_teacher", "samples": "phases"},
}
UNCHANGED = {"natural"}  # after the unlearning


def takes_samples(name: str) -> bool:
    method = talking(method=VARIANTS[name]).build_method()
    try:
        method.check(Request((1,), samples=True))
    except RequestError:
        return False
    return True


def test_the_methods_for_whole_clients_only_are_those_that_keep_what_clients_sent() -> None:
    assert {VARIANTS[n]["name"] for n in VARIANTS if not takes_samples(n)} == {"federaser", "pga", "fukd"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings that several tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("samples", [0.0, 0.4], ids=["client", "samples"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_method_serves_a_request_about_sequences(name: str, samples: float, tmp_path: Path, cache: Path) -> None:
    recipe = talking(method=VARIANTS[name], request=[{"clients": [1], "samples": samples}])
    if samples and not takes_samples(name):
        with pytest.raises(RequestError, match="forgets whole clients"):
            run(recipe, tmp_path / "run", cache=cache)
        return
    results = run(recipe, tmp_path / "run", cache=cache)
    rows = {row["phase"]: row for row in results["rows"]}
    assert set(rows) == {"original", "retrained", "unlearned", "recovered"}
    unchanged = rows["unlearned"]["fingerprint"] == rows["original"]["fingerprint"]
    assert unchanged == (name in UNCHANGED)
    forgotten = round((samples or 1.0) * len(build_setup(recipe).data.train[1]))
    for row in rows.values():
        assert all(0 <= row[f"mia_{attack}"] <= 100 for attack in ATTACKS)
        assert numbers_of(row)
        assert all(math.isfinite(v) for v in numbers_of(row))
        hits = row["forget_acc"] / 100 * forgotten * LENGTH  # every position is one prediction
        assert hits == pytest.approx(round(hits), abs=1e-6)
    recovered, again = rows["recovered"], rows["recovered"]["relearn_curve"]
    assert len(again) == 2
    assert again[0] == recovered["curve"][-1]["forget_acc"] == pytest.approx(recovered["forget_acc"], abs=1e-9)
    assert rows["original"]["client_flops"] > 0


def numbers_of(row: dict[str, Any]) -> list[float]:
    return [float(v) for v in row.values() if isinstance(v, int | float) and not isinstance(v, bool)]


def test_the_unlearning_round_is_algorithm_1_on_the_client_s_own_windows(tmp_path: Path) -> None:
    recipe = talking(method={"name": "fedquit", "lr": 1e-2, "epochs": 2.0, "batch_size": 5})  # several steps
    run(recipe, tmp_path / "a")
    setup = build_setup(recipe)
    original = train(setup, setup.data, tmp_path / "cache", reporter=Silent()).progress.state.params
    mine, seed = setup.data.train[1], Address(0, "unlearn-0", 0, 0).seed_for(1)
    module = setup.model.build().double()
    module.load_state_dict(original)
    assert len(mine) > 2 * 5
    windows = setup.data.x[mine], setup.data.y[mine]
    by_hand = unlearn(module, windows, lr=1e-2, epochs=2, batch_size=5, seed=seed)
    loaded = StateFile(tmp_path / "a" / "request-0" / "unlearned.safetensors").load()
    assert loaded is not None
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(loaded[0].params[name], parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("format", ["html", "csv", "md", "latex", "json"])
def test_a_report_shows_a_run_on_sequences(format: str, tmp_path: Path, cache: Path) -> None:
    run(talking(), tmp_path / "run", cache=cache)
    write_report([tmp_path / "run"], tmp_path / f"report.{format}", format)
    assert "fedquit" in (tmp_path / f"report.{format}").read_text()


class Unwatched(Silent):
    def runs(self, done: int, total: int, title: str) -> None:
        pass

    def lane(self, number: int) -> Any:
        return self


def test_a_comparison_with_many_models_takes_sequences(tmp_path: Path, cache: Path) -> None:
    methods = ["fedquit", "not"]
    lines, outcomes = compare(talking(), methods, [1], 1, tmp_path, overview=Unwatched(), cache=cache, references=4)
    assert [o.failure for o in outcomes] == ["", ""]
    assert all(o.evidence is not None and 0 <= o.evidence["ulira_accuracy"] <= 1 for o in outcomes)
    assert {line.method for line in lines} >= set(methods)


def test_a_rate_is_chosen_on_sequences(tmp_path: Path, cache: Path) -> None:
    found = sweep_rates(talking(), [1e-6, 1e-1], 0, tmp_path, cache=cache)
    assert [c.lr for c in found.candidates] == [1e-6, 1e-1]
    assert found.candidates[0].unlearned_acc == pytest.approx(found.before.forget_acc, abs=5)


# Every loss against the same loss on single characters: a network that looks at one place at a time cannot tell
# B windows of T places from B * T examples, so the loss of a window has to be the mean over its places.

PLACEWISE = FunctionalModel(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)), torch.float64)
DRAW = torch.Generator().manual_seed(0)
START, OTHER = PLACEWISE.init(0), PLACEWISE.init(1)
WINDOWS = Batch(
    x=torch.randint(VOCABULARY, (7, LENGTH), generator=DRAW),
    y=torch.randint(VOCABULARY, (7, LENGTH), generator=DRAW),
    u=torch.rand(7, LENGTH, generator=DRAW),
    fixed=torch.rand(7, LENGTH, generator=DRAW),
    forget=torch.rand(7, generator=DRAW) < 0.5,
)
CHARACTERS = Batch(
    x=WINDOWS.x.flatten(),
    y=WINDOWS.y.flatten(),
    u=WINDOWS.u.flatten(),
    fixed=WINDOWS.fixed.flatten(),
    forget=WINDOWS.forget.repeat_interleave(LENGTH),
)
HEAD = {"1.weight": OTHER["1.weight"], "1.bias": OTHER["1.bias"]}
ADAPTERS = {"adapter:0.weight": torch.full((len(places(START["0.weight"].shape, 0.1, 0)),), 0.5, dtype=torch.float64)}


@dataclass(frozen=True)
class Case:
    task: Task
    params: Callable[[], Params] = lambda: OTHER
    sent: Callable[[], dict[str, Params]] = lambda: {"start": START}


CASES: dict[str, Case] = {
    "learn": Case(Learn()),
    "climb": Case(Climb()),
    "ascend": Case(Ascend()),
    "unlikely": Case(Unlikely()),
    "mislabel": Case(Mislabel()),
    "guide": Case(Guide(), sent=lambda: {"start": START, "degraded": START}),
    "imitate": Case(Imitate(), sent=lambda: {"start": START, "teacher": START}),
    "train head": Case(TrainHead(), params=lambda: HEAD),
    "learn both": Case(LearnBoth(), params=lambda: {**OTHER, **{f"auxiliary:{n}": p + 0.1 for n, p in HEAD.items()}}),
    "adapters": Case(TrainAdapters(), params=lambda: ADAPTERS),
    "mislabel patiently": Case(MislabelPatiently()),
    "diverge": Case(Diverge(), sent=lambda: {"start": START, "teacher": START}),
    "repair": Case(Repair(alpha=0.5), sent=lambda: {"start": START, "teacher": START}),
    "teach": Case(Teach(), sent=lambda: {"start": START, "incompetent": PLACEWISE.init(2), "competent": START}),
    **{f"distill {t} {d}": Case(Distill(teacher=t, divergence=d)) for t in TEACHERS for d in LOSSES},
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_window_is_the_mean_over_its_places(name: str) -> None:
    case = CASES[name]
    sent = case.sent()
    windows = case.task.loss(PLACEWISE, case.params(), sent, WINDOWS)
    characters = case.task.loss(PLACEWISE, case.params(), sent, CHARACTERS)
    assert windows.shape == (7,)
    torch.testing.assert_close(windows, characters.unflatten(0, (7, LENGTH)).mean(1), rtol=0, atol=1e-12)
    assert float(windows.std()) > 1e-4, "nothing to compare"


def test_every_task_of_every_method_is_compared() -> None:
    compared = {type(case.task) for case in CASES.values()}
    found: set[type[Task]] = set()
    kinds = [Task]
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        found |= {k for k in below if k.__module__.startswith("fedquit.")}
    takes_no_step = {SendHead, Measurement, *Measurement.__subclasses__()}
    assert found - takes_no_step == compared


def test_the_error_of_a_window_is_the_mean_over_its_places() -> None:
    windows, characters = (
        Errors().statistic(PLACEWISE, OTHER, {"start": OTHER}, batch)["wrong"] for batch in (WINDOWS, CHARACTERS)
    )
    torch.testing.assert_close(windows, characters.unflatten(0, (7, LENGTH)).mean(1))


def test_a_window_is_one_example_of_the_fisher_diagonal() -> None:
    measured = FisherDiagonal().statistic(PLACEWISE, OTHER, {"start": OTHER}, WINDOWS)
    for window in range(7):
        leaves = {n: p.clone().requires_grad_() for n, p in OTHER.items()}
        logits = PLACEWISE(leaves, WINDOWS.x[window])
        nn.functional.cross_entropy(logits, WINDOWS.y[window]).backward()
        for n, p in leaves.items():
            assert p.grad is not None
            torch.testing.assert_close(measured[n][window], p.grad.square(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_fedquit_with_every_teacher_and_loss_moves_the_model(teacher: str, loss: str, setup: Setup) -> None:
    method = talking(method={"name": "fedquit", "teacher": teacher, "loss": loss, "lr": 1e-2}).build_method()
    task = replace(method.distill, local=Local(1.0, 8, "adam", 1e-2))  # type: ignore[attr-defined]
    mine = setup.data.train[1]
    noise = torch.rand(len(mine), LENGTH, generator=torch.Generator().manual_seed(0))
    batch = Batch(setup.data.x[mine], setup.data.y[mine], noise, noise, torch.ones(len(mine), dtype=torch.bool))
    student = {n: (p + 0.01).requires_grad_() for n, p in setup.initial.items()}
    losses = task.loss(setup.model, student, {"start": setup.initial}, batch)
    assert losses.shape == (len(mine),)
    gradient = torch.autograd.grad(losses.mean(), list(student.values()))
    assert all(bool(g.isfinite().all()) for g in gradient)
    assert any(bool(g.any()) for g in gradient)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return build_setup(talking())


def seen(setup: Setup, seed: int, which: Tensor) -> Scores:
    return score_examples(setup.model, setup.model.init(seed), setup.data.x[which], setup.data.y[which])


def test_attacks_and_metrics_take_a_window_as_one_example(setup: Setup) -> None:
    forget, holdout, others = setup.data.train[1], setup.data.holdout[1], setup.data.train[0]
    before, after = seen(setup, 0, forget), seen(setup, 1, forget)
    assert len(before) == len(forget)
    null = holdout_null(after, seen(setup, 1, holdout))
    assert 0 <= null.auc.low <= null.auc.value <= null.auc.high <= 1
    leak = leakage((before, after), (seen(setup, 0, holdout), seen(setup, 1, holdout)))
    assert 0 <= leak.auc.value <= 1
    apart = js_of_logits(*(logits_of(setup.model, setup.model.init(seed), setup.data.x[forget]) for seed in (0, 1)))
    assert apart.shape == (len(forget),)
    assert bool((apart > 0).all())
    references = [seen(setup, s, forget) for s in (2, 3, 4)]
    population = [seen(setup, s, others) for s in (2, 3, 4)]
    scores = rmia(
        after.confidence,
        np.stack([r.confidence for r in references]),
        seen(setup, 1, others).confidence,
        np.stack([p.confidence for p in population]),
    )
    assert scores.shape == (len(forget),)
    phi = np.stack([r.phi for r in references])
    assert lira_offline(after.phi, phi).shape == (len(forget),)
    assert ulira(phi, phi[::-1]).accuracy.shape == (len(forget),)
    assert klom(phi, phi).mean == pytest.approx(0.0)
    assert forgetting_quality(phi, phi + 1).epsilon.shape == (len(forget),)


def test_windows_of_one_place_are_plain_examples() -> None:
    one = Batch(WINDOWS.x[:, :1], WINDOWS.y[:, :1], WINDOWS.u[:, :1], WINDOWS.fixed[:, :1], WINDOWS.forget)
    as_windows = score_examples(PLACEWISE, START, one.x, one.y)
    as_characters = score_examples(PLACEWISE, START, one.x[:, 0], one.y[:, 0])
    for number in ("correct", "confidence", "loss", "phi", "entropy", "modified_entropy"):
        np.testing.assert_allclose(getattr(as_windows, number), getattr(as_characters, number), rtol=0, atol=1e-12)


def test_what_needs_one_class_for_each_example_says_so(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no single class for each example: use 'random'"):
        choose_samples(setup.data, (1,), 0.5, "rare", 0)
    with pytest.raises(InputError, match=r"iid"):
        build_setup(talking(data={"partition": "lda"}))
    with pytest.raises(InputError, match=r"image"):
        run(talking(evaluate={"backdoor": 0.5}), tmp_path / "run")


def test_the_world_is_learnable_and_its_windows_are_whole() -> None:
    data = talk()
    assert torch.equal(data.x[:, 1:], data.y[:, :-1])
    assert data.x.shape == data.y.shape == (64, LENGTH)
