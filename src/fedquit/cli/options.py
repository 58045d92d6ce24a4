# SPDX-License-Identifier: Apache-2.0
"""The options that all commands on a recipe share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fedquit.cli.data import DataDir

if TYPE_CHECKING:
    from fedquit.running.recipe import Recipe

Cache = Annotated[
    Path | None,
    typer.Option(help="Where trained federations are kept; else beside --out, or (compare, sweep) in it."),
]


def recipe_names(begun: str) -> list[str]:
    """The packaged recipes that begin with what was typed, for the shell's completion."""
    return _packaged("recipes", begun)


def study_names(begun: str) -> list[str]:
    """The packaged studies that begin with what was typed, for the shell's completion."""
    return _packaged("study_files", begun)


def _packaged(kind: str, begun: str) -> list[str]:
    folder = resources.files("fedquit") / kind  # without `running.recipe`, whose import takes seconds
    with resources.as_file(folder) as path:
        names = [str(file.relative_to(path).with_suffix("")) for file in path.rglob("*.toml")]
    return sorted(name for name in names if name.startswith(begun))


def chosen(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A .toml file, or the name of a recipe that comes with the package.", autocompletion=recipe_names
        ),
    ],
    settings: Annotated[list[str], typer.Option("--set", help="Change a key: --set method.lr=3e-4")] = [],  # noqa: B006 - typer copies it
    data_dir: DataDir = None,
    partition_file: Annotated[Path | None, typer.Option(help="Who gets which examples, as JSON; else a draw.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the recipe out: made-up data, a few clients, one round, seconds.")
    ] = False,
) -> Recipe:
    """Return the recipe that these options choose."""
    from dataclasses import replace

    from fedquit.running.recipe import load
    from fedquit.running.smoke import smoke as smallest

    loaded = load(recipe, settings)
    data = loaded.data
    if data_dir is not None:
        data = replace(data, folder=str(data_dir))
    if partition_file is not None:
        data = replace(data, partition="file", partition_file=str(partition_file))
    loaded = replace(loaded, data=data)
    return smallest(loaded) if smoke else loaded


def on_a_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `chosen` to a command that takes the recipe as its first argument."""
    shared = _parameters(chosen)
    _, *own = _parameters(command)

    @functools.wraps(command)
    def called(**given: Any) -> None:  # noqa: ANN401 - typer has checked them
        command(chosen(**{p.name: given.pop(p.name) for p in shared}), **given)

    called.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in (*shared, *own)}
    return called


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters with their types resolved, for use in another module."""
    types = get_type_hints(function, localns={"Recipe": object}, include_extras=True)  # importing it takes seconds
    parameters = inspect.signature(function).parameters.values()
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[p.name]) for p in parameters]
