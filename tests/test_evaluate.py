# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core import Params
from fedquit.evaluate import score, separation


class Given:
    """A model whose logits are its input."""

    def init(self, seed: int) -> Params:
        return {}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x


def test_accuracy_and_loss_do_not_depend_on_the_batches() -> None:
    logits, labels = torch.randn(101, 5, generator=torch.Generator().manual_seed(0)), torch.arange(101) % 5
    whole = score(Given(), {}, logits, labels, batch_size=1000)
    parts = score(Given(), {}, logits, labels, batch_size=7)
    assert whole.accuracy == parts.accuracy
    assert whole.accuracy == pytest.approx(100 * float((logits.argmax(1) == labels).double().mean()))
    torch.testing.assert_close(whole.losses, parts.losses)
    torch.testing.assert_close(whole.losses, functional.cross_entropy(logits, labels, reduction="none"))


def test_every_position_of_a_sequence_counts() -> None:
    logits = torch.eye(3)[torch.tensor([[0, 1, 2, 2], [1, 1, 1, 0]])]
    labels = torch.tensor([[0, 1, 2, 0], [1, 1, 1, 1]])
    found = score(Given(), {}, logits, labels)
    assert found.accuracy == 75.0
    assert found.losses.shape == (2,)


def test_a_remembered_set_is_told_apart_and_a_forgotten_one_is_not() -> None:
    low, high = torch.linspace(0, 1, 50), torch.linspace(2, 3, 40)
    assert separation(low, high).auc == 1.0, "all forgotten examples have lower losses: remembered"
    assert separation(high, low).auc == 0.0
    same = separation(low, low)
    assert same.auc == 0.5
    assert same.low < 0.5 < same.high


def test_the_auc_is_the_share_of_pairs() -> None:
    a, b = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2.0, 4.0, 5.0, 6.0])
    wins = sum(1.0 if x < y else 0.5 if x == y else 0.0 for x in a.tolist() for y in b.tolist())
    assert separation(a, b).auc == pytest.approx(wins / 12)


def test_the_interval_covers_one_half_about_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(400):
        found = separation(torch.randn(60, generator=generator), torch.randn(40, generator=generator))
        covered += found.low <= 0.5 <= found.high
    assert 0.91 <= covered / 400 <= 0.985
