# SPDX-License-Identifier: Apache-2.0
"""Data and networks that a program hands over as objects, where a recipe can only name them.

A recipe holds plain values. What is given from Python has a name made of its content, `memory/` and a hash; `at_hand`
makes it known, and a setup built inside that block finds it there.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from fedquit.core import ClientId
from fedquit.core.params import fingerprint
from fedquit.data.federated import Dataset
from fedquit.errors import InputError
from fedquit.models import build_seeded

PREFIX = "memory/"


@dataclass(frozen=True)
class GivenData:
    """A data set, and who has which of its examples.

    Attributes:
        dataset: all clients' examples, and the test set.
        parts: the positions of each client's examples.
    """

    dataset: Dataset
    parts: Mapping[ClientId, Tensor]

    @property
    def name(self) -> str:
        """How a recipe names it: the same examples, divided in the same way, have the same name."""
        data = self.dataset
        tensors = {"x": data.x, "y": data.y, "test_x": data.test_x, "test_y": data.test_y}
        tensors |= {f"client {client}": positions for client, positions in self.parts.items()}
        return PREFIX + _short(fingerprint(tensors), repr(data.look), str(data.classes))


@dataclass(frozen=True)
class GivenModel:
    """A network's factory.

    Attributes:
        build: returns a new module, whose first weights depend on torch's generator alone.
    """

    build: Callable[[], nn.Module]

    @property
    def name(self) -> str:
        """How a recipe names it: by its layers and by the source of its factory and of its own classes.

        What this cannot see, such as a function that a forward calls, is in the behaviour (`Setup.network`).
        """
        module = build_seeded(self.build, seed=0)
        kinds = dict.fromkeys(kind for layer in module.modules() for kind in type(layer).__mro__)
        own = [kind for kind in kinds if kind is not object and kind.__module__.partition(".")[0] != "torch"]
        return PREFIX + _short(repr(module), _source(self.build), *map(_class_source, own))


Given = GivenData | GivenModel
_AT_HAND: ContextVar[Mapping[str, Given]] = ContextVar("objects of the calling program", default=MappingProxyType({}))


@contextmanager
def at_hand(given: Mapping[str, Given]) -> Iterator[None]:
    """Let setups that are built inside this block find data and networks by these names."""
    token = _AT_HAND.set({**_AT_HAND.get(), **given})
    try:
        yield
    finally:
        _AT_HAND.reset(token)


def is_in_memory(name: str) -> bool:
    """Whether a recipe's name stands for an object."""
    return name.startswith(PREFIX)


def given_data(name: str) -> GivenData | None:
    """The data that a name stands for; None for a data set that is loaded.

    Raises:
        InputError: if the object is not at hand.
    """
    given = _object_named(name)
    return given if isinstance(given, GivenData) else None


def given_model(name: str) -> GivenModel | None:
    """The factory that a name stands for; None for a network that is loaded.

    Raises:
        InputError: if the object is not at hand.
    """
    given = _object_named(name)
    return given if isinstance(given, GivenModel) else None


def _object_named(name: str) -> Given | None:
    if not is_in_memory(name):
        return None
    if name not in _AT_HAND.get():
        raise InputError(
            f"{name} was given as an object from Python, which no file and no other process has: "
            "call fedquit.run, fedquit.compare or fedquit.study with the same fedquit.Setting."
        )
    return _AT_HAND.get()[name]


def _class_source(kind: type) -> str:
    """The source of a class and of each of its functions, which are new where a notebook defines the class again."""
    functions = [value for value in vars(kind).values() if inspect.isfunction(value)]
    return "\n".join([kind.__qualname__, _source(kind), *map(_source, functions)])


def _source(thing: Any) -> str:  # noqa: ANN401 - a class or anything callable
    """The source; else the bytecode of a function; else ""."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
    if code is None:
        return ""
    plain = [constant for constant in code.co_consts if not inspect.iscode(constant)]
    return f"{code.co_code.hex()} {code.co_names} {plain}"


def _short(*words: str) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
