# SPDX-License-Identifier: Apache-2.0
"""The server's settings: the `fedquit` table of a Flower app's configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedquit.core import Training
from fedquit.core.method import Method
from fedquit.errors import InputError
from fedquit.methods import METHODS
from fedquit.running.recipe import Recipe, TrainRecipe, build, load
from fedquit.utils.names import lookup

FALLBACKS = ("not", "retrain")
CLOSED_FLOOR = 3  # with two sites each could subtract its own update from the mean, and would know the other's
OPEN_FLOOR = 2


@dataclass(frozen=True)
class ServerConfig:
    """`[tool.flwr.app.config.fedquit]` in the app's pyproject.toml; each key can be set for a run (--run-config)."""

    state: str = ""  # the server's state directory: ledger, clients, models
    recipe: str = ""  # a recipe whose [train], [method] and seed replace those here
    seed: int = 0  # of the first model and of all draws of the run
    train: TrainRecipe = field(default_factory=TrainRecipe)  # rounds, epochs, optimizer, as in a recipe
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedquit"})  # name and options, as in a recipe
    recover_rounds: int = 3  # the most rounds of a recovery
    recover_until: float = 0.0  # accuracy in % (of the app's evaluation) that ends a recovery early; 0: all rounds
    min_nodes: int = 2  # nodes that a round waits for; one less for each client that was forgotten, down to the floor
    floor: int = 0  # nodes without which no round begins, ever; 0: 3 in a closed federation, else 2
    quorum: float = 0.5  # the fraction of a closed federation's sites that a round waits for
    min_replies: int = 0  # replies that a round needs, or it is repeated; 0: half of those asked
    wait: float = 600.0  # seconds for nodes to come online
    timeout: float = 600.0  # seconds for an answer
    deadline: float = 3600.0  # seconds for a client that leaves to answer, before the fallback is used
    fallback: str = "not"  # the method for a request whose client does not answer: not, retrain
    allow_unauthenticated: bool = False  # whether to serve requests of nodes without a registered key
    together: bool = False  # whether several requests are served in one round, or one after another
    check_members: bool = True  # whether replies that no honest client sends are refused or bounded
    audit: bool = False  # whether clients that leave are sent the models before and after, to audit them by canaries
    sweep: int = 0  # ask all nodes for requests after every so many rounds; 0: only at the beginning and the end
    request_burst: int = 3  # erasures that a client may ask for at once, before it must wait
    request_every: float = 86_400.0  # seconds after which it may ask for one more; what waits is served as one

    def __post_init__(self) -> None:
        if not self.state:
            raise InputError("the server has no state directory: set fedquit.state in the app's configuration.")
        if self.fallback not in FALLBACKS:
            raise InputError(f"fedquit.fallback is {self.fallback!r}: it must be {' or '.join(FALLBACKS)}.")
        positive = {
            "wait": self.wait,
            "timeout": self.timeout,
            "deadline": self.deadline,
            "min_nodes": self.min_nodes,
            "request_burst": self.request_burst,
            "request_every": self.request_every,
        }
        if not 0 <= self.quorum <= 1:
            raise InputError(f"fedquit.quorum is {self.quorum}: it must be from 0 to 1.")
        for name, value in positive.items():
            if not value > 0:
                raise InputError(f"fedquit.{name} is {value}: it must be above 0.")
        counts = {
            "recover_rounds": self.recover_rounds,
            "min_replies": self.min_replies,
            "sweep": self.sweep,
            "floor": self.floor,
        }
        for name, value in counts.items():
            if value < 0:
                raise InputError(f"fedquit.{name} is {value}: it must be at least 0.")
        if self.build_method().knows_request:
            raise InputError(
                f"{self.method_name} with these settings must know in advance who will leave, which nobody does in a "
                "real federation: choose another preset or method."
            )

    @property
    def _recipe(self) -> Recipe:
        return load(self.recipe) if self.recipe else Recipe(seed=self.seed, train=self.train, method=self.method)

    def floor_of(self, *, closed: bool) -> int:
        """The fewest nodes with which a round begins: it never falls.

        Args:
            closed: whether the federation has a list of sites.
        """
        return self.floor or (CLOSED_FLOOR if closed else min(OPEN_FLOOR, self.min_nodes))

    @property
    def noted(self) -> dict[str, Any]:
        """What the operator's commands need to know of the settings."""
        return {
            "rounds": self.training.rounds,
            "method": self.method_name,
            "min_nodes": self.min_nodes,
            "floor": {"closed": self.floor_of(closed=True), "open": self.floor_of(closed=False)},
            "quorum": self.quorum,
            "deadline": self.deadline,
        }

    @property
    def run_seed(self) -> int:
        """The seed of all random numbers of the run."""
        return self._recipe.seed

    @property
    def training(self) -> Training:
        """The settings of local training."""
        return self._recipe.train.training()

    @property
    def method_name(self) -> str:
        """The method's name in `fedquit list methods`."""
        return self._recipe.method_name

    def build_method(self) -> Method:
        """The method with its settings."""
        return self._recipe.build_method()

    def build_fallback(self) -> Method:
        """The method for a client that does not answer; it needs the other clients at most."""
        return dataclasses.replace(Recipe(), method={"name": self.fallback}).build_method()

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> ServerConfig:
        """The settings in a run's configuration: keys that begin with `fedquit.`; Flower flattens tables with dots."""
        values: dict[str, Any] = {}
        for key, value in run_config.items():
            first, *parts = key.split(".")
            if first != "fedquit" or not parts or parts == ["home"]:  # fedquit.home is a client's setting
                continue
            *tables, name = [part.replace("-", "_") for part in parts]
            table = values
            for part in tables:
                table = table.setdefault(part, {})
            table[name] = value
        if isinstance(values.get("method"), dict):
            values["method"] = _method_settings(values["method"])
        return build(cls, values, "fedquit")


def needed_nodes(min_nodes: int, floor: int, quorum: float, left_out: int, staying: int | None) -> int:
    """How many nodes a round waits for: it falls when clients leave, and never below the floor.

    Args:
        min_nodes: as configured.
        floor: below which it never falls.
        quorum: the fraction of a closed federation's sites.
        left_out: clients that were forgotten, or are leaving.
        staying: sites of a closed federation that may take part; None where nobody knows who may come.
    """
    wanted = min_nodes - left_out
    if staying is not None:
        wanted = max(math.ceil(quorum * staying), min(wanted, staying))
    return max(floor, wanted)


def _method_settings(method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the chosen method, without the tables of other methods, which an app may hold as well."""
    tables = {name: table for name, table in method.items() if isinstance(table, dict)}
    for name in tables:
        lookup(METHODS, name, "method")
    shared = {key: value for key, value in method.items() if key not in tables}
    return {**shared, **tables.get(str(method.get("name", "fedquit")), {})}
