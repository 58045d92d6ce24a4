# SPDX-License-Identifier: Apache-2.0
"""A question and an answer as Flower's records, and back.

A task travels as the name of its class and its scalar fields. The name is looked up among the classes that are loaded
already: nothing is ever imported because a message says so. What comes back is held against what was asked.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

import fedquit.methods  # noqa: F401 - its tasks must be loaded to be found by name
from fedquit.core import ClientId, Model, Params, Reply, Sent, Task
from fedquit.engine import Address, Ask
from fedquit.errors import FedquitError, InputError
from fedquit.flower.outbox import require_id
from fedquit.running.recipe import build
from fedquit.utils.names import lookup

ASK, REPLY, PARAMS = "fedquit.ask", "fedquit.reply", "fedquit.params"
WIRE_MODULES = {"fedquit.core.fedavg": "fedquit.fedavg"}
NONCE = "nonce"  # beside the words, both ways
SET = "fedquit.set"  # and a number: one set of parameters of a question
PHASE_PLACES, ROUND_PLACES = 10**11, 10**6  # how many places of a run a phase and a round take
MOST_EXAMPLES = 2**53
LARGEST_NUMBER = 1e15  # in a reply: no parameter is so large, and a mean of such, however weighted, stays finite
MOST_PENDING = 16  # requests in one reply
HEAD_BYTES = 1024  # that a tensor may take beside its numbers
LARGEST_WORDS = 2**20  # characters of a reply's JSON
NOT_OURS = "the message is not one of fedquit's: is the ClientApp made erasable?"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


class Refused(InputError):
    """A message that is not what was asked for."""


@dataclass(frozen=True)
class Serving:
    """The request that a question belongs to, as far as one client is concerned."""

    kind: str = ""  # "client": all of its data is to be forgotten; "samples": some; "": none
    request: str = ""  # the client's own number of the request, which says which samples


@dataclass(frozen=True)
class Pending:
    """A request that waits in a client's outbox."""

    request: str
    kind: str


@dataclass(frozen=True)
class Question:
    """An `Ask` to one client, and what travels beside it."""

    ask: Ask
    federation: str  # its own name, so that a client keeps what belongs to it apart
    number: int = 0  # of the phase in the life of the federation
    serving: Serving = Serving()
    verdicts: Mapping[str, str] = field(
        default_factory=dict
    )  # what became of the client's requests: "served", or why not

    @property
    def client(self) -> ClientId:
        """Who is asked."""
        (client,) = self.ask.clients
        return client

    @property
    def round_place(self) -> int:
        """Where its round begins, in the order of all rounds of all phases."""
        return self.number * PHASE_PLACES + self.ask.address.round * ROUND_PLACES

    @property
    def place(self) -> int:
        """Where it stands in the order of all questions."""
        return self.round_place + self.ask.address.question

    @property
    def name(self) -> str:
        """By which an answer says what it answers."""
        return f"{self.federation}/{self.place}/{self.client}"


@dataclass(frozen=True)
class Answer:
    """A client's reply, and what travels beside it."""

    reply: Reply
    pending: tuple[Pending, ...] = ()
    settled: tuple[str, ...] = ()  # requests whose verdict has arrived


def known_tasks() -> dict[str, type[Task]]:
    """Every task class that is loaded, by its name on the wire."""
    return {_wire_name(cls): cls for cls in _below(Task)}  # type: ignore[type-abstract]


def _wire_name(cls: type[Task]) -> str:
    """Module and class, as the first release had them: a module that moves keeps its name on the wire."""
    return f"{WIRE_MODULES.get(cls.__module__, cls.__module__)}:{cls.__qualname__}"


def _below(cls: type[Task]) -> Iterator[type[Task]]:
    for found in cls.__subclasses__():
        yield found
        yield from _below(found)


def task_to_words(task: Task) -> dict[str, Any]:
    """The class by name, and its fields."""
    name = _wire_name(type(task))
    fields = dataclasses.asdict(task)
    for key, value in {**fields, **fields["local"]}.items():
        if key != "local" and not isinstance(value, str | int | float | bool):
            raise InputError(f"{key} of task {name} is a {type(value).__name__}: only scalars can travel.")
    return {"name": name, "fields": fields}


def task_from_words(words: Mapping[str, Any]) -> Task:
    """The task of that name, if its class is loaded."""
    known = known_tasks()
    name = str(words["name"])
    if name not in known:
        raise Refused(
            f"the task {name!r} is not known here: import its module where the ClientApp is defined, and run the same "
            "version on both sides."
        )
    return build(lookup(known, name, "task"), words["fields"], "task")


@dataclass(frozen=True)
class Packed:
    """What is the same for all clients of a question, packed once. A set under two names travels once."""

    where: Mapping[str, int]  # the number of the set behind each name
    records: Mapping[str, ArrayRecord]

    @classmethod
    def of(cls, sent: Sent) -> Packed:
        """Pack what is sent."""
        order = list({id(p): p for p in sent.values()})
        sets = {f"{SET}{order.index(id(p))}": params_to_record(p) for p in {id(p): p for p in sent.values()}.values()}
        return cls({name: order.index(id(p)) for name, p in sent.items()}, sets)


def question_to_records(question: Question, packed: Packed | None = None) -> RecordDict:
    """What goes to the client."""
    ask = question.ask
    packed = packed or Packed.of(ask.sent)
    words = {
        "task": task_to_words(ask.task),
        "client": question.client,
        "split": ask.split,
        "sent": dict(packed.where),
        "address": dataclasses.asdict(ask.address),
        "federation": question.federation,
        "number": question.number,
        "serving": dataclasses.asdict(question.serving),
        "verdicts": dict(question.verdicts),
    }
    return RecordDict({ASK: ConfigRecord({"words": json.dumps(words)}), **packed.records})


def question_from_records(content: RecordDict) -> Question:
    """What a client reads."""
    words = _words(content, ASK)
    try:
        numbers = sorted(set(words["sent"].values()))
        sets = {i: params_from_record(content.array_records[f"{SET}{i}"]) for i in numbers}
        sent: Sent = {name: sets[i] for name, i in words["sent"].items()}
        if words["split"] not in ("all", "forget", "retain"):
            raise Refused(f"the question is about {words['split']!r}: it must be all, forget or retain.")
        task, address = task_from_words(words["task"]), build(Address, words["address"], "address")
        ask = Ask(task, (int(words["client"]),), words["split"], sent, address)
        serving = build(Serving, words["serving"], "serving")
        verdicts = {str(k): str(v) for k, v in words["verdicts"].items()}
        return Question(ask, str(words["federation"]), int(words["number"]), serving, verdicts)
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"the question cannot be read ({error!r}): run the same version on both sides.") from error


def answer_to_records(answer: Answer, question: Question) -> RecordDict:
    """What goes back to the server."""
    reply = answer.reply
    words = {
        "question": question.name,
        "examples": reply.examples,
        "loss": reply.loss if math.isfinite(reply.loss) else None,
        **beside_to_words(answer.pending, answer.settled),
    }
    return RecordDict({REPLY: ConfigRecord({"words": json.dumps(words)}), PARAMS: params_to_record(reply.params)})


def refusal_to_records(reason: str) -> RecordDict:
    """A client's sentence on why it does not answer."""
    return RecordDict({REPLY: ConfigRecord({"words": json.dumps({"refused": reason})})})


def beside_to_words(pending: tuple[Pending, ...], settled: tuple[str, ...]) -> dict[str, Any]:
    """What every reply carries."""
    return {"forget-pending": [dataclasses.asdict(p) for p in pending], "settled": list(settled)}


def beside_from_words(words: Mapping[str, Any]) -> tuple[tuple[Pending, ...], tuple[str, ...]]:
    """The requests that wait in the client's outbox, and those that it has heard back about."""
    try:
        pending = tuple(build(Pending, p, "forget-pending") for p in words.get("forget-pending", ()))
        settled = tuple(str(s) for s in words.get("settled", ()))
        for p in pending:
            require_id(p.request, "request")
    except Exception as error:  # it comes from outside: whatever is wrong with it, it stops nobody
        raise Refused(f"its list of pending requests cannot be read ({_short(error)}).") from error
    if any(p.kind not in ("client", "samples") for p in pending):
        raise Refused("a pending request is neither of a client nor of samples.")
    if len(pending) > MOST_PENDING:
        raise Refused(f"it has {len(pending)} pending requests, and {MOST_PENDING} are the most.")
    return pending, settled


@dataclass(frozen=True)
class Expected:
    """What may come back: the tensors, in order, and whether all of them must."""

    like: Params
    whole: bool

    @property
    def largest(self) -> int:
        """The most bytes that a reply's tensors may take."""
        return sum(p.numel() * p.element_size() + HEAD_BYTES for p in self.like.values())


def expected_of(task: Task, model: Model, sent: Sent) -> Expected:
    """What a task answers, found by letting it answer without a single step.

    Where that needs what only the client has, any part of what was sent may come back.
    """
    try:
        with torch.no_grad():
            given = task.prepare(model, sent)
            return Expected(task.answer(task.begin(given), given), whole=True)
    except (FedquitError, KeyError):
        union: Params = {}
        for params in sent.values():
            union = {**params, **union}
        return Expected(union, whole=False)


def answer_from_records(content: RecordDict, question: Question, expected: Expected) -> Answer:
    """What the server reads: held against what was asked, and refused with a sentence."""
    words = words_from_records(content)
    if words.get("question") != question.name:
        raise Refused("it answers another question.")
    examples, loss = examples_from_words(words), words.get("loss")
    if loss is not None and not (isinstance(loss, float) and math.isfinite(loss)):
        raise Refused(f"its loss is {loss!r}: it must be a number, or nothing.")
    size = sum(len(a.data) for record in content.array_records.values() for a in record.values())
    if size > expected.largest:
        raise Refused(f"it is too large: {size:,} bytes where {expected.largest:,} are the most.")
    if list(content.array_records) != [PARAMS]:
        raise Refused(f"it must hold one set of parameters and holds {len(content.array_records)}.")
    params = _as_expected(params_from_record(content.array_records[PARAMS]), expected)
    pending, settled = beside_from_words(words)
    loss = float("nan") if loss is None else loss
    return Answer(Reply(question.client, params, examples, loss), pending, settled)


def examples_from_words(words: Mapping[str, Any]) -> int:
    """How many examples a client says it has."""
    examples = words.get("examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 <= examples < MOST_EXAMPLES:
        raise Refused(f"its number of examples is {str(examples)[:80]}: it must be a whole number from 0 on.")
    return examples


def _as_expected(params: Params, expected: Expected) -> Params:
    like = expected.like
    odd = sorted(params.keys() ^ like.keys()) if expected.whole else sorted(params.keys() - like.keys())
    if odd or not params:
        raise Refused(f"it has other parameters than asked for ({', '.join(odd[:3]) or 'none at all'}).")
    for name, tensor in params.items():
        if tensor.shape != like[name].shape:
            raise Refused(f"{name!r} has shape {tuple(tensor.shape)} where {tuple(like[name].shape)} is expected.")
        if tensor.dtype != like[name].dtype:
            raise Refused(f"{name!r} is {tensor.dtype} where {like[name].dtype} is expected.")
        if not bool(torch.isfinite(tensor).all()):
            raise Refused(f"{name!r} holds NaN or infinity.")
        if tensor.numel() and float(tensor.abs().max()) > LARGEST_NUMBER:
            raise Refused(f"{name!r} holds numbers beyond {LARGEST_NUMBER:g}.")
    return {name: params[name] for name in like if name in params}  # in the server's own order


def _words(content: RecordDict, key: str) -> dict[str, Any]:
    text = content.config_records[key].get("words") if key in content.config_records else None
    if not isinstance(text, str) or len(text) > LARGEST_WORDS:
        raise Refused(NOT_OURS)
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("the message's words are not JSON.") from error
    if not isinstance(words, dict):
        raise Refused("the message's words are not JSON of the right form.")
    return words


def stamp(content: RecordDict, nonce: str) -> None:
    """Put a nonce beside the words of a message."""
    for record in content.config_records.values():
        record[NONCE] = nonce


def stamp_like(content: RecordDict, question: RecordDict) -> None:
    """Send a question's nonce back, whatever the answer is."""
    for record in question.config_records.values():
        stamp(content, str(record.get(NONCE, "")))


def require_nonce(content: RecordDict, nonce: str) -> None:
    """Refuse the answer of somebody who has not seen the question: a name can be borrowed, a nonce not guessed."""
    if REPLY not in content.config_records:
        raise Refused(NOT_OURS)
    if content.config_records[REPLY].get(NONCE) != nonce:
        raise Refused(
            "it lacks the nonce of its question: it is forged, or the node needs the server's version of fedquit."
        )


def words_to_records(words: Mapping[str, Any]) -> RecordDict:
    """A message of words alone."""
    return RecordDict({REPLY: ConfigRecord({"words": json.dumps(dict(words))})})


def words_from_records(content: RecordDict) -> dict[str, Any]:
    """The words of a reply; a refusal has one sentence."""
    words = _words(content, REPLY)
    if "refused" in words:
        raise Refused(f"it refuses: {str(words['refused'])[:500]}")
    return words


def params_to_record(params: Params) -> ArrayRecord:
    """Parameters in their order and in their own precision."""
    for name, tensor in params.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name!r} is {tensor.dtype}, which Flower cannot carry: use float32 or float64.")
    return ArrayRecord({n: Array(p.detach().cpu().contiguous().numpy()) for n, p in params.items()})


def params_from_record(record: ArrayRecord) -> Params:
    """The same, back."""
    return {str(name): _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> torch.Tensor:
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"it is stored as {array.stype!r}")
        return torch.from_numpy(_unpacked(array.data))
    except Exception as error:  # numpy reads heads like Python's source, and fails in as many ways
        raise Refused(f"the tensor {name!r} cannot be read ({_short(error)}).") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _unpacked(data: bytes) -> NDArray[Any]:
    """What `numpy.save` wrote, with its head held against its length before any memory is taken."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("it is of another version")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or len(data) - stream.tell() != math.prod(shape) * dtype.itemsize:
        raise ValueError("its head does not describe it")
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if by_column else "C").copy()
