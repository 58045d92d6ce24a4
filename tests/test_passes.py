# SPDX-License-Identifier: Apache-2.0
"""Each model reads each set once, and what is remembered is what a second reading would give."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedquit.audit import passes as module
from fedquit.audit.passes import Passes, js_between, make_pass
from fedquit.audit.scores import js_of_logits, logits_of, score_examples
from fedquit.core import Model, Params
from fedquit.core.params import fingerprint
from fedquit.running.recipe import Recipe, load
from fedquit.running.runner import run
from fedquit.running.smoke import smoke
from worlds import tiny

Read = tuple[str, str]  # the fingerprints of a model and of a set


class Counting:
    """A network that notes what it reads outside of training; every set of these runs is one batch."""

    def __init__(self, model: Model, reads: Counter[Read]) -> None:
        self.model = model
        self.reads = reads

    def init(self, seed: int) -> Params:
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.reads[fingerprint(params), fingerprint({"x": x})] += 1
        return self.model(params, x)


def reads_of(recipe: Recipe, where: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[Read], dict[str, Any]]:
    reads: Counter[Read] = Counter()
    monkeypatch.setattr("fedquit.running.setup.evaluation_model_of", lambda model, *_: Counting(model, reads))
    return reads, run(recipe, where / "run")


def test_a_smoke_run_reads_every_set_once_with_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, results = reads_of(smoke(load("demo")), tmp_path, monkeypatch)
    models = {row["fingerprint"] for row in results["rows"]}
    assert len(models) == 5, "Original, Retrain, unlearned, recovered and the control"
    read = {model for model, _ in reads}
    assert models < read
    assert len(read) == 6, "and the control after one round, which is a point of its path"
    sets = {examples for _, examples in reads}
    assert len(sets) == 4, "test, retain, forget and hold-out"
    assert set(reads.values()) == {1}
    assert reads.total() == len(read) * len(sets)


EVENTS: list[dict[str, Any]] = [
    {"clients": [1], "samples": 0.5},
    {"clients": [1]},
    {"kind": "join", "clients": [1], "anew": True},
    {"clients": [3]},
]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "evaluate": {"relearn": 2},
            "recover": {"until": "retrained-mean-of-3", "max_rounds": 3, "budgets": [0.3, 0.6, 0.9]},
        },
        {"evaluate": {"backdoor": 0.5}},
        {"recover": {"follow": 3, "control": True}},
        {"method": {"name": "natural"}},  # the unlearned model is Original
        {"request": EVENTS, "train": {"rounds": 2}},  # a later request finds the model that an earlier one left
    ],
)
def test_no_run_reads_a_set_twice_with_the_same_model(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, _ = reads_of(tiny(**changes), tmp_path, monkeypatch)
    assert set(reads.values()) == {1}


class Linear:
    """Logits that depend on the parameters."""

    def init(self, seed: int) -> Params:
        return {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x @ params["w"]


X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 3


@pytest.mark.parametrize("bound", [2**20, 100])
def test_what_is_remembered_is_what_would_be_computed(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_BYTES", bound)
    model = Linear()
    models = [model.init(0), model.init(1)]
    made = [make_pass(model, params, X, Y, keep_logits=True) for params in models]
    assert [one.logits is not None for one in made] == [bound > 100] * 2
    assert (made[0].scores.phi == score_examples(model, models[0], X, Y).phi).all()
    true = (X @ models[0]["w"]).gather(1, Y.unsqueeze(1)).squeeze(1)
    assert (made[0].true_logits == true.double().numpy()).all()
    js = js_between(model, (models[0], made[0]), (models[1], made[1]), X)
    assert (js == js_of_logits(*(logits_of(model, params, X) for params in models))).all()


def test_equal_parameters_are_one_model_wherever_they_lie() -> None:
    passes = Passes()
    model = Linear()
    first = model.init(0)
    for params in (first, dict(first), model.init(0), {"w": first["w"].clone()}):
        passes.get(params, "set", lambda: make_pass(model, first, X, Y))
    assert passes.made == 1
    passes.get(model.init(1), "set", lambda: make_pass(model, first, X, Y))
    passes.get(first, "another set", lambda: make_pass(model, first, X, Y))
    assert passes.made == 3


def test_a_model_that_shares_some_tensors_is_another_model() -> None:
    passes = Passes()
    body, head = torch.ones(3), torch.ones(2)
    assert passes.fingerprint({"body": body, "head": head}) != passes.fingerprint({"body": body, "head": head + 1})
    assert passes.fingerprint({"body": body, "head": head}) != passes.fingerprint({"body": body, "hand": head})
    assert passes.fingerprint({"body": body, "head": head}) == fingerprint({"body": body, "head": head})


def test_models_that_nobody_holds_are_let_go_of_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Linear()
    one = make_pass(model, model.init(0), X, Y).nbytes
    monkeypatch.setattr(module, "SCORES_BYTES", 3 * one)
    passes = Passes()
    held = model.init(0)
    for seed in range(9):
        params = held if seed == 0 else model.init(seed)
        passes.get(params, "set", lambda params=params: make_pass(model, params, X, Y, keep_logits=True))  # type: ignore[misc]
    del params
    gc.collect()
    passes.get(held, "another set", lambda: make_pass(model, held, X, Y))
    remembered = list(passes._passes.values())
    assert len(remembered) == 3 + 2, "three that nobody holds, and the two of the model that is held"
    assert sum(made.logits is not None for made in remembered) == 1
    again = passes.made
    passes.get(held, "set", lambda: make_pass(model, held, X, Y))
    passes.get(model.init(8), "set", lambda: make_pass(model, held, X, Y))
    assert passes.made == again, "the newest are remembered"
