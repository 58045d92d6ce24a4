# SPDX-License-Identifier: Apache-2.0
"""A client's task on the wire: the name of its class and its scalar fields. A program is a list of tasks and splits.

The receiver looks the name up among the task classes that are already loaded. Nothing is ever imported because a
message names it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import fedquit.core.recalibration
import fedquit.methods  # noqa: F401 - the tasks of both must be loaded to be found by name
from fedquit.core import Part, Program, Split, Task
from fedquit.errors import InputError
from fedquit.flower.wire.errors import InvalidMessage
from fedquit.running.recipe import build
from fedquit.utils.names import lookup

PROGRAM = "program"  # in the place of a class's name, which always has a colon
WIRE_MODULES = {"fedquit.core.fedavg": "fedquit.fedavg"}  # modules that moved, under their names on the wire


def known_tasks() -> dict[str, type[Task]]:
    """Every task class that is loaded, by its name on the wire."""
    classes = _subclasses(Task)  # type: ignore[type-abstract]
    return {_wire_name(cls): cls for cls in classes if not inspect.isabstract(cls)}


def task_to_body(task: Task | Program) -> dict[str, Any]:
    """The wire name of a task's class, and its fields, which must be scalars; of a program, the same of each part."""
    if isinstance(task, Program):
        parts = [{"task": task_to_body(part.task), "split": part.split} for part in task.parts]
        return {"name": PROGRAM, "parts": parts}
    name = _wire_name(type(task))
    fields = dataclasses.asdict(task)
    scalars = {**fields, **fields["local"]}
    del scalars["local"]
    for key, value in scalars.items():
        if not isinstance(value, str | int | float | bool):
            raise InputError(f"{key} of task {name} is a {type(value).__name__}: only scalars can travel.")
    return {"name": name, "fields": fields}


def task_from_body(body: Mapping[str, Any]) -> Task | Program:
    """The task or program that `task_to_body` described, if all classes are loaded here."""
    if body["name"] == PROGRAM:
        return Program(tuple(_part_from_body(part) for part in body["parts"]))
    return _task_from_body(body)


def split_from_body(split: object) -> Split:
    """The split that a question, or a part of a program, is about."""
    if split not in ("all", "forget", "retain"):
        raise InvalidMessage(f"the question is about {split!r}: it must be all, forget or retain.")
    return split  # type: ignore[return-value, unused-ignore]


def _part_from_body(body: Mapping[str, Any]) -> Part:
    return Part(_task_from_body(body["task"]), split_from_body(body["split"]))


def _task_from_body(body: Mapping[str, Any]) -> Task:
    known = known_tasks()
    name = str(body["name"])
    if name not in known:
        raise InvalidMessage(
            f"the task {name!r} is not known here: import its module where the ClientApp is defined, and run the same "
            "version on both sides."
        )
    return build(lookup(known, name, "task"), body["fields"], "task")


def _wire_name(cls: type[Task]) -> str:
    """Module and class, as the first release had them: a module that moves keeps its name on the wire."""
    return f"{WIRE_MODULES.get(cls.__module__, cls.__module__)}:{cls.__qualname__}"


def _subclasses(cls: type[Task]) -> Iterator[type[Task]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
