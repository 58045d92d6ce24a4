# SPDX-License-Identifier: Apache-2.0
"""What `unlearn` and `recover` tell of a rate that was too large, from the data that they change a model on."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedquit
from fedquit.distill import damage
from fedquit.distill.batches import Reader
from fedquit.distill.damage import DamageWarning, Sample, relation, training_damage, unlearning_damage
from fedquit.distill.losses import Rule

CLASSES, WIDTH = 6, 16
Pair = tuple[Tensor, Tensor]
RULE = Rule("min", "kl", 0.0, 1.0, 5)


def drawn(seed: int, n: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    y = torch.randint(CLASSES, (n,), generator=generator)
    return centres[y] + torch.randn(n, WIDTH, generator=generator), y


FORGET, RETAIN = drawn(1, 600), drawn(2, 600)


@functools.cache
def trained(norm: bool = False) -> nn.Module:
    x, y = torch.cat([FORGET[0], RETAIN[0]]), torch.cat([FORGET[1], RETAIN[1]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        between = nn.BatchNorm1d(128) if norm else nn.Identity()
        model = nn.Sequential(nn.Linear(WIDTH, 128), between, nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("lr", [1.0, 10.0])
@pytest.mark.parametrize("n", [20, 600])
@pytest.mark.parametrize("norm", [False, True])
def test_unlearning_at_a_rate_that_destroys_is_told_in_one_sentence(norm: bool, n: int, lr: float) -> None:
    data = FORGET[0][:n], FORGET[1][:n]
    with pytest.warns(DamageWarning, match=rf"^After unlearning with lr={lr:g} .*lower it\.$") as told:
        student = fedquit.unlearn(trained(norm), data, lr=lr)
    assert len(told) == 1
    assert told[0].filename == __file__, "it points at the caller"
    assert not any(module.training for module in student.modules()), "the student is in the given modes"


@pytest.mark.parametrize("teacher", ["min", "flatten", "topk", "incompetent", "random", "logit_ladder"])
@pytest.mark.parametrize("norm", [False, True])
def test_healthy_rates_are_not_told(norm: bool, teacher: str) -> None:
    """The null: rates at which test accuracy lasts, with few and many samples, in several orders."""
    test = drawn(3, 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            for n in (20, 64, 600):
                for lr in (1e-5, 1e-4, 1e-3):
                    data = FORGET[0][:n], FORGET[1][:n]
                    student = fedquit.unlearn(trained(norm), data, lr=lr, teacher=teacher, seed=seed)
        repaired = fedquit.recover(student, RETAIN, lr=1e-3, epochs=3)
    assert (repaired.eval()(test[0]).argmax(1) == test[1]).float().mean() > 0.8


class Fixed(nn.Module):
    """Says the same of every example."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def sample_of(model: nn.Module, data: Pair) -> Sample:
    sample = Sample()
    sample.add(data[0], None, data[1], model(data[0]))
    return sample


def test_a_model_that_came_nearer_to_its_teacher_by_ignoring_its_inputs_is_told() -> None:
    sample, constant = sample_of(trained(), FORGET), Fixed(torch.zeros(CLASSES))
    said = unlearning_damage(sample, constant, Reader(constant), RULE, 0.1)
    assert "no relation left to what the given one said (correlation 0.00): the rate destroys the model" in said
    flat = Rule("flatten", "kl", 0.0, 1.0, 5)  # its target has no relations to keep
    assert not unlearning_damage(sample, constant, Reader(constant), flat, 0.1)


def test_the_relation_is_blind_to_means_of_rows_and_classes_and_to_the_true_class() -> None:
    x, y = FORGET
    before = trained()(x).detach()
    moved = before + 7.0 + torch.arange(CLASSES) + torch.randn(len(x), 1)
    moved.scatter_(1, y[:, None], -50.0)
    assert relation(before, moved, y) == pytest.approx(1.0, abs=0.05)
    assert relation(before, -moved, y) == pytest.approx(-1.0, abs=0.05)
    assert abs(relation(before, before[torch.randperm(len(x))], y) or 0.0) < 0.15
    assert relation(before[:, :2], before[:, :2], y % 2) is None, "one wrong class has no relations"


@pytest.mark.parametrize("lr", [3.0, 30.0])
def test_training_at_a_rate_that_destroys_is_told_in_one_sentence(lr: float) -> None:
    with pytest.warns(
        DamageWarning, match=rf"^After training with lr={lr:g} the loss .*above.*: lower the rate"
    ) as told:
        fedquit.recover(trained(), RETAIN, lr=lr)
    assert [one.filename for one in told] == [__file__]


def test_a_model_that_names_one_class_after_training_is_told_unless_most_examples_have_it() -> None:
    constant = Fixed(torch.eye(CLASSES)[2] / 10)
    sample = sample_of(constant, RETAIN)
    assert "names class 2 for all of 256 examples" in training_damage(sample, constant, Reader(constant), 1.0)
    mostly = sample_of(constant, (RETAIN[0], torch.where(torch.arange(600) % 10 > 0, 2, RETAIN[1])))
    assert not training_damage(mostly, constant, Reader(constant), 1.0)


def test_few_labels_and_models_that_know_nothing_are_not_judged() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ignorant = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    few = FORGET[0][: damage.FEWEST - 1], FORGET[1][: damage.FEWEST - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedquit.unlearn(trained(), few, lr=10.0)
        fedquit.unlearn(ignorant, FORGET, lr=0.1, epochs=3)
        fedquit.unlearn(ignorant, FORGET, lr=1.0)


def test_labels_that_are_left_out_are_left_out_of_the_sample_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*tensors: Tensor) -> float:
        seen.append(tensors)
        return 1.0

    monkeypatch.setattr("fedquit.distill.damage.relation", noted)
    x, y = FORGET[0][:96].reshape(24, 4, WIDTH), FORGET[1][:96].reshape(24, 4).clone()
    y[:, 1] = -100
    fedquit.unlearn(trained(), (x, y), lr=1e-4, batch_size=8)
    ((before, after, labels),) = seen
    assert before.shape == after.shape == (72, CLASSES)
    assert bool((labels >= 0).all())
    with torch.no_grad():  # a small step apart: the same rows, in the same order
        assert torch.allclose(before, after, atol=0.5)


def test_a_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "MOST_LOGITS", 50 * CLASSES)
    sample = Sample()
    for begin in range(0, 600, 32):
        x, y = (part[begin : begin + 32] for part in FORGET)
        sample.add(x, None, y, trained()(x))
    assert sample.rows == 50
    assert len(sample.inputs) == 2
    assert len(sample.logits_of(trained(), Reader(trained()))) == 50


def test_forget_leaves_the_telling_to_its_evidence_where_it_has_some() -> None:
    model = trained()
    with pytest.warns(UserWarning, match="is destroyed, lower the rate") as told:
        fedquit.forget(model, FORGET, RETAIN, lr=10.0, recover_lr=1e-6)
    assert not [one for one in told if one.category is DamageWarning]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fedquit.forget(model, FORGET, lr=10.0)
    assert [one.category for one in seen].count(DamageWarning) == 1
