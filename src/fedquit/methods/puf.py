# SPDX-License-Identifier: Apache-2.0
"""PUF: Federated Unlearning Made Practical: Seamless Integration via Negated Pseudo-Gradients. Mora et al. 2025.

One round of ordinary training in which the leaving client's update counts negatively, and more: w +
sum of the others' weighted updates - eta times the leaving client's. In the `special` round it is
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fedquit.core import Federation, Reply, Request, State, Trained
from fedquit.core.fedavg import cohort
from fedquit.core.method import Knob, Method
from fedquit.core.params import add, mean, sub


@dataclass(frozen=True)
class PUF(Method):
    """Negate the leaving client's pseudo-gradient, in a regular round among the others."""

    round: Literal["regular", "special"] = "regular"
    strength: float = 20.0  # eta

    presets = {"special": {"round": "special", "strength": 2.0}}  # noqa: RUF012 - a ClassVar of the base
    knobs = (Knob("strength", 0.5, 50.0),)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Train as ever, and add the leaving clients' updates with the opposite sign, scaled by eta."""
        w = state.params
        learn = trained.training.task_at(state.clock)

        def updates() -> Iterator[Reply]:
            for r in fed.run(learn, request.clients, split="forget", start=w):
                negated = {n: -self.strength * p for n, p in sub(r.params, w).items()}
                yield replace(r, params=negated)
            if self.round == "regular":
                stay = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
                for r in fed.run(learn, stay, split="retain", start=w):
                    yield replace(r, params=sub(r.params, w))

        return state.next(add(w, mean(updates()))).tick()
