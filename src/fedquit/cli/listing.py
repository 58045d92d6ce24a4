# SPDX-License-Identifier: Apache-2.0
"""`fedquit list`: the names of methods, data sets, attacks and so on."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fedquit.cli.screen import AsJson
from fedquit.utils.names import unknown

KINDS = (
    *("methods", "teachers", "losses", "attacks", "metrics"),
    *("datasets", "models", "recipes", "studies", "optimizers", "engines"),
)


def kinds(begun: str) -> list[str]:
    """The kinds of lists that begin with what was typed, for the shell's completion."""
    return [kind for kind in KINDS if kind.startswith(begun)]


def list_(
    kind: Annotated[str, typer.Argument(help="What to list: " + ", ".join(KINDS) + ".", autocompletion=kinds)],
    as_json: AsJson = False,
) -> None:
    """List what can be named in a recipe or on the command line."""
    if kind not in KINDS:
        raise unknown("kind of list", kind, KINDS)
    names = _names(kind)
    if as_json:
        typer.echo(json.dumps(names))
        return
    width = max(map(len, names))
    for name, line in names.items():
        typer.echo(f"{name:<{width}}  {line}")


def _names(kind: str) -> dict[str, str]:
    from fedquit import data, engine, methods, models
    from fedquit.audit import attacks, evaluation, metrics
    from fedquit.distill import losses, virtual_teacher
    from fedquit.engine import optim
    from fedquit.running import recipe

    if kind == "recipes":
        return {name: recipe.load(name).title for name in recipe.packaged()}
    if kind == "studies":
        from fedquit.studies.plan import load_study, packaged_studies

        return {name: load_study(name).title for name in packaged_studies()}
    if kind == "metrics":
        return {name: metric.description for name, metric in {**evaluation.MEASURES, **metrics.METRICS}.items()}
    tables: dict[str, dict[str, Any]] = {
        "attacks": {**attacks.ATTACKS, **attacks.REFERENCE_ATTACKS},
        "methods": dict(methods.METHODS),
        "teachers": dict(virtual_teacher.TEACHERS),
        "losses": dict(losses.LOSSES),
        "datasets": dict(data.DATASETS),
        "models": dict(models.MODELS),
        "optimizers": dict(optim.OPTIMIZERS),
        "engines": dict(engine.ENGINES),
    }
    return {name: (entry.__doc__ or "").strip().split("\n")[0] for name, entry in tables[kind].items()}
