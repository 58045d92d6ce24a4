# SPDX-License-Identifier: Apache-2.0
"""The federation that a method is checked in: four clients, a perceptron in float64, and four kinds of request.

A client has a few batches of examples, the last one smaller than the others. The clients' numbers begin at 11, so that
neither a round nor a position in a list can be taken for one of them.
"""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedquit.core import ClientId, Memory, Request
from fedquit.core.method import Method
from fedquit.data.federated import FederatedData
from fedquit.engine import Engine, ThreadedEngine, open_engine
from fedquit.errors import FedquitError, InputError
from fedquit.running.recipe import Recipe, build, parse_setting
from fedquit.running.setup import Setup, build_setup

CLIENTS = (11, 12, 13, 14)
RECOVERY_ROUNDS = 2
TRAIN: dict[str, Any] = {"rounds": 3, "batch_size": 32, "lr": 0.1, "lr_decay": 0.9}
RECIPE: dict[str, Any] = {
    "title": "fedquit check",
    "data": {
        "name": "synthetic",
        "options": {"examples": 400, "test_examples": 60, "classes": 4, "size": 4},
        "partition": "lda",
        "alpha": 5.0,
        "clients": len(CLIENTS),
        "public": 0.1,
    },
    "model": {"name": "mlp", "options": {"hidden": 8}, "dtype": "float64"},
    "train": TRAIN,
    "request": [{"clients": [0]}],
    "recover": {"until": "rounds", "max_rounds": RECOVERY_ROUNDS},
    "engine": {"name": "sequential", "device": "cpu"},
}
KINDS = ("one client", "several clients", "samples of one client", "samples of several clients")
SAMPLES = 5  # that a client marks, of those that it has first

WrapEngine = Callable[[Engine], Engine]


def recipe_for(method: Mapping[str, Any]) -> Recipe:
    """The recipe of the federation.

    Args:
        method: the table `[method]`: its name, perhaps a preset, and its hyper-parameters.

    Raises:
        InputError: for a method that cannot be imported or built.
        UnknownNameError: for a name or a key that does not exist.
    """
    name = str(method.get("name", ""))
    try:
        return build(Recipe, {**RECIPE, "method": dict(method)}, "recipe")
    except FedquitError:
        raise
    except Exception as error:  # whatever a user's module does when it is imported, or its class when it is built
        raise InputError(
            f"{name} cannot be imported and built ({described(error)}): correct its module, and give every field a "
            "default, or a value with --set."
        ) from error


def described(error: BaseException) -> str:
    """An error as `KeyError: 'x' (file.py, line 3)`, at the innermost line of the method's own code."""
    first = " ".join(str(error).split()).rstrip(".")[:300]
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_of_a_method(frame.filename):
            return f"{words} ({Path(frame.filename).name}, line {frame.lineno})"
    return words


def _is_of_a_method(file: str) -> bool:
    """Whether a file is neither of this package's machinery, nor of torch, nor of Python."""
    if file.startswith(_MACHINERY) or file.startswith("<"):
        return False
    return "site-packages" in file or not file.startswith(_PYTHON)


_PACKAGE = Path(__file__).parent.parent
_MACHINERY = (
    *(f"{_PACKAGE / name}{os.sep}" for name in ("check", "core", "engine", "running", "utils")),
    str(Path(torch.__file__).parent),
)
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class ObservedSetup(Setup):
    """A setup whose engine can be looked at from outside."""

    wrap: WrapEngine | None = None
    engine_name: str = "sequential"

    def engine(self, data: FederatedData, homes: Memory) -> Engine:
        """Open the engine by name, and wrap it.

        Args:
            data: the clients' data.
            homes: the clients' own memories.
        """
        if self.engine_name == "threaded":
            engine: Engine = ThreadedEngine(self.model, data, homes, workers=2)
        else:
            engine = open_engine(self.engine_name, self.model, data, homes, graphs=self.graphs)
        return self.wrap(engine) if self.wrap else engine


@dataclass(frozen=True)
class SmallFederation:
    """The federation of one method.

    Attributes:
        recipe: with the method.
        clients: the numbers of its clients.
        most_rounds: of the unlearning that are looked at; 0 for all.
    """

    recipe: Recipe
    clients: tuple[ClientId, ...] = CLIENTS
    most_rounds: int = 0

    @property
    def name(self) -> str:
        """The method's, under which its part of the server's memory lies."""
        return self.recipe.method_name

    @cached_property
    def _setup(self) -> Setup:
        setup = build_setup(self.recipe)
        train = dict(zip(self.clients, setup.data.train.values(), strict=True))
        holdout = dict(zip(self.clients, setup.data.holdout.values(), strict=True))
        return dataclasses.replace(setup, data=dataclasses.replace(setup.data, train=train, holdout=holdout))

    def setup(self, method: Method, wrap: WrapEngine | None = None, engine: str = "sequential") -> ObservedSetup:
        """The setup for one life.

        Args:
            method: that is led through it.
            wrap: what to put around each engine.
            engine: its name.
        """
        own = {f.name: getattr(self._setup, f.name) for f in dataclasses.fields(Setup)}
        return ObservedSetup(**{**own, "method": method}, wrap=wrap, engine_name=engine)

    def build_method(self) -> Method:
        """A new object, as a process that was killed would make it."""
        return self.recipe.build_method()

    @property
    def data(self) -> FederatedData:
        """Of all clients, before any request."""
        return self._setup.data

    def request(self, kind: str) -> Request:
        """The request of one of `KINDS`."""
        first, second, third, fourth = self.clients
        leaving = {
            "one client": (second,),
            "several clients": (second, fourth),
            "samples of one client": (second,),
            "samples of several clients": (first, third),
        }
        return Request(leaving[kind], samples=kind.startswith("samples"))

    def marked(self, request: Request) -> FederatedData:
        """The data with the examples of a request marked."""
        if not request.samples:
            return self.data.mark(request)
        return self.data.mark(request, {c: self.data.train[c][:SAMPLES] for c in request.clients})


def parse_settings(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """The table `[method]` from a name and settings such as `lr=1e-3`, `method.lr=1e-3` or `preset=authors`."""
    table: dict[str, Any] = {"name": name}
    for text in settings:
        key, value = parse_setting(text)
        key = key.removeprefix("method.")
        if key == "name":
            raise InputError(f"--set {text!r}: the method's name is the argument of the command.")
        table[key] = value
    return table
