# SPDX-License-Identifier: Apache-2.0
"""Lazy exports: the first use of a name imports the module that it comes from (PEP 562).

`import fedquit` takes milliseconds this way, although `fedquit.unlearn` needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_exports(
    package: str, names_by_module: Mapping[str, Sequence[str]], *, eager: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the module functions `__getattr__` and `__dir__` of a package that exports names lazily.

    A package that uses this also imports the same names under `if TYPE_CHECKING`, so that type
    checkers know them:

        if TYPE_CHECKING:
            from fedquit.errors import FedquitError as FedquitError
        else:
            __getattr__, __dir__ = lazy_exports(__name__, {"fedquit.errors": ["FedquitError"]})

    Args:
        package: the package's `__name__`, for the error about a name that it does not export.
        names_by_module: for each module that is imported on demand, the names that come from it.
        eager: names that the package defines itself; `dir` lists them with the others.

    Returns:
        The pair (`__getattr__`, `__dir__`), to be assigned in the package's `__init__`.
    """
    homes = {name: module for module, names in names_by_module.items() for name in names}

    def get_attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def list_names() -> list[str]:
        return sorted([*homes, *eager])

    return get_attribute, list_names
