# SPDX-License-Identifier: Apache-2.0
"""Whether values have changed: digests of tensors, containers and objects, and the states of the global generators."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEPTH = 6  # of containers within containers
LARGE = 1_000_000  # numbers in a tensor; a larger one is not read
SCALARS = (bool, int, float, complex, str, bytes, type(None))
CODE = (type, types.ModuleType, types.BuiltinFunctionType, functools.partial, property, classmethod, staticmethod)
GENERATORS = {
    "torch": "torch's global generator",
    "numpy": "numpy's global generator",
    "random": "Python's global generator (the module random)",
}


def digest(value: object) -> str:
    """Return a hash of a value's content, equal as long as nothing in it changes."""
    hashed = hashlib.blake2b(digest_size=16)
    _add(hashed, value, DEPTH)
    return hashed.hexdigest()


def _add(hashed: hashlib.blake2b, value: object, depth: int) -> None:
    """Add a value's content, and the types that it is made of."""
    hashed.update(type(value).__qualname__.encode())
    if isinstance(value, SCALARS):
        hashed.update(repr(value).encode())
    elif isinstance(value, Tensor):
        _add_tensor(hashed, value)
    elif isinstance(value, np.ndarray):
        hashed.update(f"{value.shape}{value.dtype}".encode())
        hashed.update(value.tobytes() if value.dtype != object else repr(value).encode())
    elif isinstance(value, torch.Generator):
        hashed.update(value.get_state().numpy().data)
    elif isinstance(value, random.Random):
        hashed.update(repr(value.getstate()).encode())
    elif isinstance(value, np.random.Generator):
        hashed.update(repr(value.bit_generator.state).encode())
    elif depth > 0 and not isinstance(value, CODE):
        _add_parts(hashed, value, depth - 1)


def _add_tensor(hashed: hashlib.blake2b, value: Tensor) -> None:
    hashed.update(f"{tuple(value.shape)}{value.dtype}".encode())
    if value.numel() > LARGE:
        hashed.update(f"{value.data_ptr()} {value._version}".encode())  # torch counts the changes in place
    else:
        hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _add_parts(hashed: hashlib.blake2b, value: object, depth: int) -> None:
    if isinstance(value, types.FunctionType):
        _add(hashed, [value.__defaults__, value.__kwdefaults__, vars(value)], depth)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(hashed, key, depth)
            _add(hashed, item, depth)
    elif isinstance(value, Set):
        hashed.update("".join(sorted(digest(item) for item in value)).encode())
    elif isinstance(value, Sequence):
        for item in value:
            _add(hashed, item, depth)
    elif isinstance(value, torch.nn.Module):
        _add(hashed, value.state_dict(), depth)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            _add(hashed, getattr(value, f.name, None), depth)
    elif hasattr(value, "__dict__"):
        _add(hashed, vars(value), depth)
    elif type(value).__repr__ is not object.__repr__:
        hashed.update(repr(value).encode())


def data_of_class(cls: type) -> dict[str, object]:
    """What a class itself holds, without its bases: its attributes, and what belongs to its functions."""
    held: dict[str, object] = {}
    for name, value in vars(cls).items():
        if not name.startswith("__") and not name.startswith("_abc_"):
            held[name] = value
    return held


def data_of_module(name: str) -> dict[str, object]:
    """The values that a module holds under names of its own: no modules, no classes, no functions of others."""
    held: dict[str, object] = {}
    module = sys.modules.get(name)
    for key, value in vars(module).items() if module else ():
        if key.startswith("__") or isinstance(value, CODE):
            continue
        if isinstance(value, types.FunctionType) and value.__module__ != name:
            continue
        held[key] = value
    return held


def random_states() -> dict[str, str]:
    """A digest of the state of each global generator of random numbers."""
    return {
        "torch": digest(torch.default_generator),
        "numpy": digest(_numpy_state()),
        "random": str(hash(random.getstate())),
    }


def _numpy_state() -> Any:  # noqa: ANN401 - as numpy gives it
    return np.random.get_state()  # noqa: NPY002 - the global generator is what is looked at


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the global generators begin at a seed; afterwards they are where they were."""
    before = torch.default_generator.get_state(), _numpy_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
