# SPDX-License-Identifier: Apache-2.0
"""Finding things by name, in a table or as `package.module:attribute` for what users bring; and listing names."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fedquit.errors import UnknownNameError

T = TypeVar("T")


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist: it offers the nearest one, and all of them."""
    known, name = sorted(known), str(name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownNameError(f"unknown {what} {name!r}: {hint}known are {', '.join(known) or 'none'}.")


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table, or an error that names the nearest one."""
    if name not in table:
        raise unknown(what, name, table)
    return table[name]


def refuse_unknown_options(what: str, make: Callable[..., object], options: Iterable[str], *, skip: int = 0) -> None:
    """Refuse options that a function does not take, leaving out its first `skip` parameters."""
    known = list(inspect.signature(make).parameters.values())[skip:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known):
        return
    for option in options:
        if option not in {p.name for p in known}:
            raise unknown(f"option of {what}", option, [p.name for p in known])


def source_of(path: str) -> str:
    """The source of the module behind `package.module:attribute`; "" for a name of ours, or where there is none."""
    if ":" not in path:
        return ""
    try:
        return inspect.getsource(importlib.import_module(path.partition(":")[0]))
    except (OSError, TypeError):
        return ""


def imported(path: str, what: str) -> object:
    """The object behind `package.module:attribute`."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise UnknownNameError(
            f"{what} {path!r} cannot be imported ({error}): install the package or add its folder to PYTHONPATH."
        ) from error
    if not hasattr(module, attribute):
        raise unknown(f"{what} in {module_name}", attribute, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, attribute)


def each_named(noun: str, things: Sequence[object]) -> str:
    """As in "client 0", or "clients 0, 1 and 2"."""
    words = [str(t) for t in things]
    if len(words) == 1:
        return f"{noun} {words[0]}"
    return f"{noun}s " + " and ".join([", ".join(words[:-1]), words[-1]] if words else ["none"])
