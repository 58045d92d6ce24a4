# SPDX-License-Identifier: Apache-2.0
"""The rules of the contract, each as a function: what is wrong with a question, a task, a state or an entry."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fedquit.core import ClientId, Params, Request, State, Task
from fedquit.core.method import is_of
from fedquit.running.recipe import build

SCALARS = (bool, int, float, str)
DRAWING = "draw from `batch.u` or `batch.fixed` in a task, at the server from a generator seeded by `fed.seed`"
WHOLE_MODEL = "return the parameters of the model, all of them, as `state.params` has them"


@dataclass(frozen=True)
class Fault:
    """A rule that is broken.

    Attributes:
        code: the same for what is the same violation at another place.
        seen: what the method did.
        advice: what to do about it.
        stops: whether what runs the method will raise an error because of it.
    """

    code: str
    seen: str
    advice: str
    stops: bool = False


def public_functions(cls: type) -> list[str]:
    """The names of the hooks that a class defines."""
    return [name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")]


def hooks_of(cls: type) -> dict[str, list[str]]:
    """The hooks that the bases of a class in `fedquit.core` define, whichever they are, with their parameters."""
    hooks: dict[str, list[str]] = {}
    for base in cls.__mro__:
        for name in public_functions(base) if is_of_core(base) else ():
            _, *parameters = inspect.signature(getattr(base, name)).parameters
            hooks.setdefault(name, parameters)
    return hooks


def is_of_core(thing: object) -> bool:
    """Whether a class or function is one of `fedquit.core`, and not of a user."""
    return str(getattr(thing, "__module__", "")).startswith("fedquit.core.")


def parts_of(task: Any, split: str) -> list[tuple[Any, str]]:  # noqa: ANN401 - whatever a question may hold
    """What a client does in one visit, and with which data: one task, or those that `task.parts` lists."""
    return [(part.task, part.split) for part in task.parts] if hasattr(task, "parts") else [(task, split)]


def is_of_a_user(task: Any) -> bool:  # noqa: ANN401 - whatever a question may hold
    """Whether any part of a question is not ordinary training."""
    return any(not is_of_core(type(part)) for part, _ in parts_of(task, "all"))


def name_of(task: Any) -> str:  # noqa: ANN401 - whatever a question may hold
    """The names of the classes of a question's tasks."""
    return "+".join(type(part).__name__ for part, _ in parts_of(task, "all"))


def is_params(value: object) -> TypeGuard[Params]:
    """Whether a value is a set of tensors by name."""
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(p, Tensor) for n, p in value.items())


def fault_of_reading(
    request: Request, client: ClientId, split: str, present: Sequence[ClientId], *, unlearning: bool
) -> Fault | None:
    """Which data a method may read, of whom, and when.

    Args:
        request: that is served.
        client: who is asked.
        split: for which part of its data.
        present: who can be asked now.
        unlearning: whether it is the unlearning, and not the recovery.
    """
    leaving = client in request.clients
    whole = leaving and not request.samples
    seen = advice = ""
    stops = False
    if whole and not unlearning:
        seen, advice, stops = "asks a client that has left", "ask `request.stay(fed.clients)`", True
    elif client not in present:
        seen, advice, stops = "asks a client that cannot be asked", "ask those in `fed.clients`", True
    elif whole and split != "forget":
        seen = f"asks a leaving client for its {split!r} data"
        advice = 'ask leaving clients with split="forget"'
    elif not leaving and split == "forget":
        seen = "asks a client that stays for forget data, of which it has none"
        advice = 'ask those who stay with split="retain"'
        stops = not unlearning
    elif leaving and not unlearning and split != "retain":
        seen = f"asks for {split!r} data in the recovery, when the forgotten samples must not be read"
        advice = 'ask with split="retain"; forget data is for `unlearn` alone'
        stops = split == "forget"
    return Fault(f"read {seen}", seen, advice, stops) if seen else None


def fault_of_task(task: object) -> Fault | None:
    """A task can be sent: scalar fields, and a class that a client can find by its name."""
    if not isinstance(task, Task):
        return Fault("task", f"asks for {type(task).__name__}, which is no Task", "derive it from Task", stops=True)
    name = type(task).__qualname__
    hidden = vars(task).keys() - {f.name for f in dataclasses.fields(task)}
    wrong = [f"{key} is a {type(value).__name__}" for key, value in _leaves(task) if not isinstance(value, SCALARS)]
    advice = "give the task scalar fields, and send tensors with `fed.run(task, clients, name=params)`"
    seen = ""
    if "__dataclass_params__" not in vars(type(task)):
        seen, advice = f"the task {name} is no dataclass", "write @dataclass(frozen=True) above its class"
    elif hidden:
        seen = f"the task {name} carries {sorted(hidden)[0]!r}, which is no field and would not be sent"
    elif wrong:
        seen = f"a field of the task {name} cannot be sent: {wrong[0]}"
    elif "<locals>" in name:
        seen = f"the task {name} is defined inside a function, where no client can find it by its name"
        advice = "define its class in the module"
    elif error := _error_of_sending(task):
        seen = f"the task {name} cannot be read again once it is sent ({error})"
        advice = "let its fields have the types that it declares"
    return Fault("task", seen, advice) if seen else None


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The innermost fields of a dataclass, through other dataclasses and tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _leaves(getattr(value, f.name), f"{name}.{f.name}" if name else f.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


def _error_of_sending(task: Task) -> str:
    """Why a task is not the same once it has been sent and read; "" where it is."""
    try:
        again = build(type(task), dataclasses.asdict(task), "task")
    except Exception as error:  # a user's class may do anything
        return str(error).rstrip(".") or type(error).__name__
    return "" if again == task else "it has changed on the way"


def fault_of_state(hook: str, before: State, after: object) -> Fault | None:
    """A round returns the state after it, with a whole model.

    Args:
        hook: `unlearn` or `recover`.
        before: the state that it was given.
        after: what it returned.
    """
    advice = "return `state.next(params)`"
    if not isinstance(after, State):
        return Fault("no state", f"`{hook}` returns {type(after).__name__}", advice, stops=True)
    if after.round != before.round + 1:
        seen = f"`{hook}` returns a state at round {after.round} after round {before.round}"
        return Fault("round", seen, advice, stops=True)
    wrong = _fault_of_names(hook, before.params, after.params) or _fault_of_tensors(hook, before.params, after.params)
    if wrong:
        return wrong
    for name, part in after.kept.items():
        if not is_params(part):
            seen = f"`{hook}` keeps {name!r}, which is a {type(part).__name__}"
            return Fault("kept", seen, "keep sets of tensors by name", stops=True)
    return None


def _fault_of_names(hook: str, before: Params, after: object) -> Fault | None:
    seen, advice = "", WHOLE_MODEL
    if not is_params(after):
        seen = f"`{hook}` returns parameters that are a {type(after).__name__}, not tensors by name"
    elif after.keys() != before.keys():
        names = ", ".join(sorted(after.keys() ^ before.keys())[:3])
        seen = f"`{hook}` returns a model with other parameters ({names})"
    elif list(after) != list(before):
        seen = f"`{hook}` returns the parameters in another order ({', '.join(list(after)[:3])}, …)"
        advice = "keep the order of `state.params`: methods speak of the first and the last layer"
    return Fault("parameters", seen, advice, stops=True) if seen else None


def _fault_of_tensors(hook: str, before: Params, after: Params) -> Fault | None:
    for name, tensor in after.items():
        like = before[name]
        seen, advice = "", WHOLE_MODEL
        if tensor.shape != like.shape:
            seen = f"{name!r} has shape {tuple(tensor.shape)} where the model has {tuple(like.shape)}"
        elif tensor.dtype != like.dtype:
            seen = f"{name!r} is {tensor.dtype} where the model has {like.dtype}"
        elif not bool(torch.isfinite(tensor).all()):
            seen, advice = f"{name!r} holds NaN or infinity", "lower the learning rate or clip the gradient"
        elif tensor.requires_grad:
            seen, advice = f"{name!r} still hangs on an autograd graph", "return detached tensors"
        if seen:
            return Fault("parameters", f"`{hook}` returns a model in which {seen}", advice, stops=True)
    return None


def fault_of_loss(result: object, labels: Tensor) -> Fault | None:
    """A loss is given for each example."""
    shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if shape == tuple(labels.shape[:1]):
        return None
    seen = f"`loss` returns {shape} for a batch of {len(labels)}"
    return Fault("loss", seen, "return the loss of each example, (B,), and no mean")


def fault_of_entry(
    hook: str, key: object, value: object, everybody: Sequence[ClientId], reply_of: ClientId | None
) -> Fault | None:
    """An entry of the server's memory is a set of tensors, and one client's lies under a key that ends with its number.

    Args:
        hook: that writes it.
        key: of the entry.
        value: of the entry.
        everybody: the numbers of all clients.
        reply_of: in `watch`, the client whose reply it is.
    """
    if not isinstance(key, str) or not is_params(value):
        seen = f"`{hook}` keeps a {type(value).__name__} in the server's memory under {key!r}"
        return Fault("entry", seen, "keep sets of tensors, by name, under a string", stops=True)
    plain = key.removesuffix("/")
    named = [c for c in everybody if re.search(rf"(?<!\d)0*{c}(?!\d)", plain)]
    if any(not is_of(plain, [c]) for c in named):
        return fault_of_key(hook, key, f"names client {named[0]}, and not as its last part")
    if reply_of is not None and is_of(plain, everybody) and not is_of(plain, [reply_of]):
        return fault_of_key(hook, key, f"is of another client than the reply's, {reply_of}")
    return None


def fault_of_key(hook: str, key: str, why: str) -> Fault:
    """A key under which something of one client would not be deleted with it.

    Args:
        hook: that wrote it.
        key: of the entry.
        why: it would not be deleted, as the end of a sentence.
    """
    return Fault(
        "key",
        f"`{hook}` keeps something in the server's memory under {key!r}, which {why}",
        'end the key of what belongs to one client with "/" and its number, so that it is deleted with the client',
    )
