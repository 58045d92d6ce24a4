# SPDX-License-Identifier: Apache-2.0
"""What a demonstration compares its erasure with: Retrain and Natural, simulated on the same data.

All settings are those of the run. Retrain is what the erasure should look like: trained from scratch without the
client, with other seeds, for as many rounds as the model had that the request found. Natural is what doing nothing
looks like: the client leaves, and the others train on for as many rounds as the recovery took.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedquit.core import ClientId, Model, Params, State, Training
from fedquit.core.fedavg import fedavg
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Engine, open_engine
from fedquit.flower.config import ServerConfig
from fedquit.inference.gaps import GapSample, GapVerdict, judge
from fedquit.running.session import Session

RETRAINS = 19  # with one run of the method they can show a difference at the level of 0.05: one of 20 is the farthest


def app_config(app: Path, changes: Mapping[str, Any]) -> ServerConfig:
    """The settings of an app of ours, as a run with these changes has them.

    Args:
        app: the folder of the app.
        changes: of its settings, by their names with dots.
    """
    table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    return ServerConfig.of({**_flattened(table), **changes})


def _flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


@dataclass(frozen=True)
class References:
    """The federation without one of its clients.

    Attributes:
        model: the network.
        data: of all clients.
        training: how they train.
        leaving: who is left out.
    """

    model: Model
    data: FederatedData
    training: Training
    leaving: ClientId

    def natural(self, before: State, rounds: int, seed: int) -> Params:
        """The model after so many more rounds without the client.

        Args:
            before: the model that the request found.
            rounds: as many as the recovery took.
            seed: of the run.
        """
        return self._trained(before.fresh(), rounds, seed, "recover-0")

    def retrain(self, rounds: int, seed: int) -> Params:
        """A model that was trained for so many rounds without the client.

        Args:
            rounds: as many as the model had that the request found.
            seed: of first weights and all draws; another one than the run's.
        """
        first = self.model.init(Address(seed, "init").seed_for("server"))
        return self._trained(State(first), rounds, seed, "train")

    @cached_property
    def _engine(self) -> Engine:
        return open_engine("sequential", self.model, self.data, {})  # the stacked one leaves a folder of torch in /tmp

    def _trained(self, state: State, rounds: int, seed: int, phase: str) -> Params:
        staying = tuple(c for c in self.data.clients if c != self.leaving)
        session = Session(self._engine, seed, staying)
        for number in range(rounds):
            session.enter(phase, number)
            state = fedavg(session, state, self.training, staying)
        return state.params


def forget_verdict(recovered: float, retrains: Sequence[float]) -> GapVerdict:
    """Whether the accuracy on the forgotten data differs from that of the Retrains, by the rule of all comparisons.

    Args:
        recovered: of the method, in percent.
        retrains: of Retrains with other seeds.
    """
    key = ("method", "forget_acc")
    return judge({key: GapSample.of([[recovered]], [list(retrains)])})[key]
