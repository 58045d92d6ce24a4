# SPDX-License-Identifier: Apache-2.0
"""Look things up by name: in a table, or as `package.module:attribute` for what users bring."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fedquit.errors import UnknownNameError

T = TypeVar("T")


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Make the error for a name that does not exist; it offers the nearest one and lists all.

    Args:
        what: the kind of thing, such as "method".
        name: the name that was given.
        known: the names that exist.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    choice = f"choose one of {', '.join(names)}." if names else "there is none to choose from."
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownNameError(f"unknown {what} {str(name)!r}: {hint}{choice}")


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """Return an entry of a table.

    Args:
        table: the entries by name.
        name: the name to look up.
        what: the kind of thing that the table holds, for the error.

    Raises:
        UnknownNameError: if there is no such entry; it offers the nearest name.
    """
    if name not in table:
        raise unknown(what, name, table)
    return table[name]


def refuse_unknown_options(what: str, make: Callable[..., object], options: Iterable[str], *, skip: int = 0) -> None:
    """Raise an UnknownNameError for the first option that a function does not take.

    Args:
        what: the function in words, for the error.
        make: the function.
        options: the names of the options that were given.
        skip: how many of the function's first parameters are not options.
    """
    known = list(inspect.signature(make).parameters.values())[skip:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known):
        return
    for option in options:
        if option not in {p.name for p in known}:
            raise unknown(f"option of {what}", option, [p.name for p in known])


def source_of(path: str) -> str:
    """Return the source of the module in `package.module:attribute`; "" where there is none."""
    if ":" not in path:
        return ""
    try:
        return inspect.getsource(importlib.import_module(path.partition(":")[0]))
    except (OSError, TypeError):
        return ""


def imported(path: str, what: str) -> object:
    """Import the object that `package.module:attribute` names.

    Raises:
        UnknownNameError: if the module cannot be imported or has no such attribute; `what` names
            the kind of thing.
    """
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
    """Return a phrase such as "client 0", or "clients 0, 1 and 2"."""
    words = [str(thing) for thing in things]
    if not words:
        return f"no {noun}"
    if len(words) == 1:
        return f"{noun} {words[0]}"
    return f"{noun}s {', '.join(words[:-1])} and {words[-1]}"
