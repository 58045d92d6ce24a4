# SPDX-License-Identifier: Apache-2.0
"""What the server accepts as an answer: the tensors, shapes, types, sizes and steps that the question implies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import RecordDict

from fedquit.core import SERVER, Effort, Measurement, Model, Params, Part, Program, Reply, Sent, Split, Task
from fedquit.core.local_layers import shared_part, with_layers
from fedquit.core.types import examples_used, is_monitored
from fedquit.engine import Address, Ask, Examples, run_visit
from fedquit.engine.local_layers import first_layers
from fedquit.errors import FedquitError
from fedquit.flower.wire.errors import InvalidMessage
from fedquit.flower.wire.messages import (
    PARAMS,
    Answer,
    Question,
    body_from_records,
    examples_from_body,
    requests_from_body,
    require_count,
)
from fedquit.flower.wire.tensors import params_from_record

LARGEST_NUMBER = 1e15  # in a reply: no parameter is so large, and a weighted mean of such numbers stays finite
HEAD_BYTES = 1024  # that a tensor may take beside its numbers


@dataclass(frozen=True)
class ExpectedReply:
    """The tensors that may come back, and whether all of them must."""

    like: Params  # names, shapes and dtypes, in order
    whole: bool

    @property
    def max_bytes(self) -> int:
        """The most bytes that a reply's tensors may take."""
        return sum(p.numel() * p.element_size() + HEAD_BYTES for p in self.like.values())


def expected_reply(task: Task | Program, model: Model, sent: Sent) -> ExpectedReply:
    """What a task or a program answers, found by letting it answer without a single example.

    Args:
        task: what the clients are asked to do.
        model: the model that they train.
        sent: the parameters that are sent to them, by name.

    Returns:
        The expected tensors. Where the task needs data that only a client has, any part of what was sent may come back.
    """
    try:
        with torch.no_grad():
            return ExpectedReply(_answer_without_examples(task, model, sent), whole=True)
    except (FedquitError, KeyError):
        union: Params = {}
        for params in sent.values():
            union = {**params, **union}
        return ExpectedReply(union, whole=False)


def _answer_without_examples(task: Task | Program, model: Model, sent: Sent) -> Params:
    if isinstance(task, Program | Measurement):
        ask = Ask(task, (SERVER,), "all", sent, Address(0, "expected"))
        nothing = Examples.unmarked(torch.zeros(0), torch.zeros(0, dtype=torch.long))
        _, result = run_visit(model, ask, SERVER, dict.fromkeys(ask.splits, nothing), {})
        return result.answer
    layers = first_layers(model, run_seed=0)
    prepared = task.prepare(model, with_layers(model, sent, layers) if layers else sent)
    return shared_part(model, task.answer(task.begin(prepared), prepared))


def answer_from_records(content: RecordDict, question: Question, expected: ExpectedReply) -> Answer:
    """Read and check a client's answer.

    Args:
        content: the records of the client's reply.
        question: what the client was asked.
        expected: the tensors that may come back.

    Returns:
        The answer, with its parameters in the order of `expected`.

    Raises:
        InvalidMessage: where the answer is not what was asked for, with the reason.
    """
    body = body_from_records(content)
    if body.get("question") != question.name:
        raise InvalidMessage("it answers another question.")
    examples = examples_from_body(body)
    loss = _checked_loss(body.get("loss"))
    efforts = _checked_efforts(body.get("efforts"), question.ask, examples)
    _check_size(content, expected)
    if list(content.array_records) != [PARAMS]:
        raise InvalidMessage(f"it must hold one set of parameters and holds {len(content.array_records)}.")
    params = _checked_params(params_from_record(content.array_records[PARAMS]), expected)
    pending, settled = requests_from_body(body)
    return Answer(Reply(question.client, params, examples, loss, efforts), pending, settled)


def _checked_loss(loss: object) -> float:
    """The client's loss; NaN where it gave none."""
    if loss is None:
        return math.nan
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise InvalidMessage(f"its loss is {loss!r}: it must be a number, or nothing.")
    return loss


def _checked_efforts(given: object, ask: Ask, examples: int) -> tuple[Effort, ...]:
    """What each part of a program, or a monitored task, took: no more than was planned for its examples.

    Args:
        given: the entry of the reply's body: a pair of examples and steps for each part.
        ask: what the client was asked.
        examples: that the client says it used in all.
    """
    parts = ask.parts
    if not isinstance(ask.task, Program) and not is_monitored(ask.task):
        return ()
    if not isinstance(given, list) or len(given) != len(parts):
        raise InvalidMessage(f"it must say for each of {len(parts)} parts how many examples and steps it took.")
    efforts = tuple(_checked_effort(pair, part) for pair, part in zip(given, parts, strict=True))
    counts: dict[Split, int] = {part.split: effort.examples for part, effort in zip(parts, efforts, strict=True)}
    agree = all(counts[part.split] == effort.examples for part, effort in zip(parts, efforts, strict=True))
    if not agree or examples_used(parts, counts) != examples:
        raise InvalidMessage(f"its numbers of examples contradict each other: {examples} in all, by part {given}.")
    return efforts


def _checked_effort(pair: object, part: Part) -> Effort:
    if not isinstance(pair, list) or len(pair) != 2:
        raise InvalidMessage(f"a part took {str(pair)[:80]}: it must be two numbers, of examples and of steps.")
    examples = require_count(pair[0], "examples")
    steps = require_count(pair[1], "steps")
    planned = part.task.local.steps(examples)
    fewest = min(1, planned) if is_monitored(part.task) else planned
    if not fewest <= steps <= planned:
        raise InvalidMessage(f"it took {steps} steps on {examples} examples, where {planned} were planned.")
    return Effort(examples, steps)


def _check_size(content: RecordDict, expected: ExpectedReply) -> None:
    size = 0
    for record in content.array_records.values():
        size += sum(len(array.data) for array in record.values())
    if size > expected.max_bytes:
        raise InvalidMessage(f"it is too large: {size:,} bytes where {expected.max_bytes:,} are the most.")


def _checked_params(params: Params, expected: ExpectedReply) -> Params:
    like = expected.like
    unexpected = params.keys() ^ like.keys() if expected.whole else params.keys() - like.keys()
    if unexpected or (like and not params):
        names = ", ".join(sorted(unexpected)[:3]) or "none at all"
        raise InvalidMessage(f"it has other parameters than asked for ({names}).")
    for name, tensor in params.items():
        _check_tensor(name, tensor, like[name])
    return {name: params[name] for name in like if name in params}


def _check_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape:
        raise InvalidMessage(f"{name!r} has shape {tuple(tensor.shape)} where {tuple(like.shape)} is expected.")
    if tensor.dtype != like.dtype:
        raise InvalidMessage(f"{name!r} is {tensor.dtype} where {like.dtype} is expected.")
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidMessage(f"{name!r} holds NaN or infinity.")
    if tensor.numel() and float(tensor.abs().max()) > LARGEST_NUMBER:
        raise InvalidMessage(f"{name!r} holds numbers beyond {LARGEST_NUMBER:g}.")
