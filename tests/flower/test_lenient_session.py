# SPDX-License-Identifier: Apache-2.0
"""A session whose engine may leave clients out: the replies that are there come in order. It needs no Flower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fedquit.core import Model, Reply
from fedquit.core.fedavg import Learn
from fedquit.engine import Ask
from fedquit.models import FunctionalModel
from fedquit.running.session import Session
from fedquit.running.store import Journal


@dataclass
class Leaky:
    """An engine of which some clients never hear back."""

    model: Model
    silent: frozenset[int]
    asked: list[int] = field(default_factory=list)

    def run(self, ask: Ask) -> Iterator[Reply]:
        self.asked += ask.clients
        return (Reply(c, {"w": torch.tensor([float(c)])}, 1) for c in ask.clients if c not in self.silent)


@pytest.mark.parametrize("silent", [set(), {0}, {3}, {1, 2}, {0, 1, 2, 3}, {0, 2}])
def test_the_replies_that_are_there_come_in_order(silent: set[int], toy_model: FunctionalModel) -> None:
    session = Session(Leaky(toy_model, frozenset(silent)), 0, (0, 1, 2, 3), lenient=True)
    assert [r.client for r in session.run(Learn(), (2, 0, 3, 1))] == [c for c in (2, 0, 3, 1) if c not in silent]


def test_whoever_did_not_answer_is_asked_again_and_nobody_else(toy_model: FunctionalModel, tmp_path: Path) -> None:
    first = Leaky(toy_model, frozenset({1, 2}))
    session = Session(first, 0, (0, 1, 2, 3), Journal(tmp_path), lenient=True)
    assert [r.client for r in session.run(Learn(), (0, 1, 2, 3))] == [0, 3]
    again = Leaky(toy_model, frozenset({2}))
    session = Session(again, 0, (0, 1, 2, 3), Journal(tmp_path), lenient=True)
    assert [r.client for r in session.run(Learn(), (0, 1, 2, 3))] == [0, 1, 3]
    assert again.asked == [1, 2]


def test_a_simulated_client_must_answer(toy_model: FunctionalModel) -> None:
    session = Session(Leaky(toy_model, frozenset({1})), 0, (0, 1, 2))
    with pytest.raises(AssertionError, match="in the order of the question"):
        list(session.run(Learn(), (0, 1, 2)))
