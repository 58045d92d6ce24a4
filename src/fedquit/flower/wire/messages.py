# SPDX-License-Identifier: Apache-2.0
"""fedquit's Flower messages: a question to a client, its answer, and a query for its status.

A message is one config record with a JSON body under the key `words` and a nonce, and one array record for each set of
parameters. A reply must return the nonce of its question.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedquit.core import ClientId, Params, Reply, Sent
from fedquit.engine import Address, Ask
from fedquit.flower.outbox import Receipt, require_id
from fedquit.flower.wire.errors import InvalidMessage, shortened
from fedquit.flower.wire.tasks import split_from_body, task_from_body, task_to_body
from fedquit.flower.wire.tensors import params_from_record, params_to_record
from fedquit.running.recipe import build

# Names on the wire. They are part of the format and never change.
ACTION = "fedquit"
TRAIN = f"train.{ACTION}"  # the message type of a question
QUERY = f"query.{ACTION}"  # the message type of a status query
ASK = "fedquit.ask"  # the config record of a question
REPLY = "fedquit.reply"  # the config record of an answer, and of a status query both ways
PARAMS = "fedquit.params"  # the array record of an answer
SET = "fedquit.set"  # with a number: the array records of a question
BODY = "words"  # in a config record: the JSON body
NONCE = "nonce"  # in a config record

PHASE_PLACES = 10**11  # how many places of a run a phase takes
ROUND_PLACES = 10**6  # how many places of a run a round takes
MOST_EXAMPLES = 2**53
MOST_PENDING = 16  # requests in one reply
MAX_BODY = 2**20  # characters of a reply's JSON
MAX_REFUSAL = 500  # characters of a client's reason
NOT_OURS = "the message is not one of fedquit's: is the ClientApp made erasable?"


@dataclass(frozen=True)
class Serving:
    """The erasure request that a question belongs to, as far as one client is concerned."""

    kind: str = ""  # "client": all of its data is to be forgotten; "samples": some; "": none
    request: str = ""  # the id in the client's outbox, which says which samples
    others: tuple[str, ...] = ()  # further requests for samples that are served with it


@dataclass(frozen=True)
class Pending:
    """A request that waits in a client's outbox."""

    request: str  # its id in the outbox
    kind: str  # "client" or "samples"
    withdrawn: bool = False  # whether its owner takes it back


@dataclass(frozen=True)
class Question:
    """An `Ask` to one client, with the state of that client's erasure requests."""

    ask: Ask
    federation: str  # the id under which the client stores its memory of this federation
    number: int = 0  # of the phase, counted from the beginning of the federation
    serving: Serving = Serving()
    verdicts: Mapping[str, str] = field(default_factory=dict)  # outcomes by request id: "served", or why not
    received: Mapping[str, Receipt] = field(default_factory=dict)  # the server's receipts of open requests, by id
    anew: int = 0  # the phase in which the model last began with its first parameters

    @property
    def oldest_layers(self) -> int:
        """The place from which on a client's own layers belong to this model."""
        return self.anew * PHASE_PLACES

    @property
    def client(self) -> ClientId:
        """The client that is asked."""
        (client,) = self.ask.clients
        return client

    @property
    def round_place(self) -> int:
        """The place of its round in the order of all rounds of all phases."""
        return self.number * PHASE_PLACES + self.ask.address.round * ROUND_PLACES

    @property
    def place(self) -> int:
        """Its place in the order of all questions."""
        return self.round_place + self.ask.address.question

    @property
    def name(self) -> str:
        """The name by which an answer refers to it."""
        return f"{self.federation}/{self.place}/{self.client}"


@dataclass(frozen=True)
class Answer:
    """A client's reply, with the state of its outbox."""

    reply: Reply
    pending: tuple[Pending, ...] = ()
    settled: tuple[str, ...] = ()  # ids of requests whose verdict has arrived


@dataclass(frozen=True)
class PackedParams:
    """The parameters of a question, packed once for all clients. A set that has two names travels once."""

    set_numbers: Mapping[str, int]  # which set is meant by each name
    records: Mapping[str, ArrayRecord]

    @classmethod
    def of(cls, sent: Sent) -> PackedParams:
        """Pack the parameters that are sent, by name."""
        distinct: dict[int, Params] = {}
        numbers: dict[int, int] = {}
        for params in sent.values():
            numbers.setdefault(id(params), len(distinct))
            distinct.setdefault(id(params), params)
        records = {f"{SET}{numbers[key]}": params_to_record(params) for key, params in distinct.items()}
        return cls({name: numbers[id(params)] for name, params in sent.items()}, records)


def question_to_records(question: Question, packed: PackedParams | None = None) -> RecordDict:
    """A question as the server sends it.

    Args:
        question: the question to one client.
        packed: its parameters, where they are packed already for several clients.

    Returns:
        The records of the message, still without a nonce.
    """
    ask = question.ask
    packed = packed or PackedParams.of(ask.sent)
    body = {
        "task": task_to_body(ask.task),
        "client": question.client,
        "split": ask.split,
        "sent": dict(packed.set_numbers),
        "address": dataclasses.asdict(ask.address),
        "federation": question.federation,
        "number": question.number,
        "serving": _serving_to_body(question.serving),
        "verdicts": dict(question.verdicts),
    }
    if question.received:
        body["received"] = receipts_to_body(question.received)
    if question.anew:
        body["anew"] = question.anew
    return RecordDict({ASK: ConfigRecord({BODY: json.dumps(body)}), **packed.records})


def _serving_to_body(serving: Serving) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": serving.kind, "request": serving.request}
    if serving.others:  # a client of a version without it refuses, and does not forget a part only
        body["others"] = list(serving.others)
    return body


def question_from_records(content: RecordDict) -> Question:
    """A question as the client reads it."""
    body = _body(content, ASK)
    try:
        ask = Ask(
            task_from_body(body["task"]),
            (int(body["client"]),),
            split_from_body(body["split"]),
            _sent(content, body["sent"]),
            build(Address, body["address"], "address"),
        )
        return Question(
            ask,
            federation=str(body["federation"]),
            number=int(body["number"]),
            serving=build(Serving, body["serving"], "serving"),
            verdicts={str(request): str(verdict) for request, verdict in body["verdicts"].items()},
            received=receipts_from_body(body),
            anew=int(body.get("anew", 0)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidMessage(f"the question cannot be read ({error!r}): run the same version on both sides.") from error


def _sent(content: RecordDict, set_numbers: Mapping[str, int]) -> Sent:
    sets: dict[int, Params] = {}
    for number in sorted(set(set_numbers.values())):
        sets[number] = params_from_record(content.array_records[f"{SET}{number}"])
    return {name: sets[number] for name, number in set_numbers.items()}


def answer_to_records(answer: Answer, question: Question) -> RecordDict:
    """An answer as the client sends it; `checks.answer_from_records` reads it.

    Args:
        answer: the reply, and the state of the client's outbox.
        question: what it answers.

    Returns:
        The records of the message, still without the question's nonce.
    """
    reply = answer.reply
    body = {
        "question": question.name,
        "examples": reply.examples,
        "loss": reply.loss if math.isfinite(reply.loss) else None,
        **requests_to_body(answer.pending, answer.settled),
    }
    if reply.efforts:  # of a program or a monitored task: how many examples and steps, for each part
        body["efforts"] = [[effort.examples, effort.steps] for effort in reply.efforts]
    return RecordDict({REPLY: ConfigRecord({BODY: json.dumps(body)}), PARAMS: params_to_record(reply.params)})


def refusal_to_records(reason: str) -> RecordDict:
    """A reply that says in one sentence why the client does not answer."""
    return body_to_records({"refused": reason})


def body_to_records(body: Mapping[str, Any]) -> RecordDict:
    """A status query, or a reply without parameters."""
    return RecordDict({REPLY: ConfigRecord({BODY: json.dumps(dict(body))})})


def body_from_records(content: RecordDict) -> dict[str, Any]:
    """The JSON body of a reply or a status query; raises `InvalidMessage` where the client refuses to answer."""
    body = _body(content, REPLY)
    if "refused" in body:
        raise InvalidMessage(f"it refuses: {str(body['refused'])[:MAX_REFUSAL]}")
    return body


def _body(content: RecordDict, key: str) -> dict[str, Any]:
    text = content.config_records[key].get(BODY) if key in content.config_records else None
    if not isinstance(text, str) or len(text) > MAX_BODY:
        raise InvalidMessage(NOT_OURS)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage("the message's words are not JSON.") from error
    if not isinstance(body, dict):
        raise InvalidMessage("the message's words are not JSON of the right form.")
    return body


def receipts_to_body(received: Mapping[str, Receipt]) -> dict[str, Any]:
    """Receipts as the JSON body of a question or a status query carries them."""
    return {request: dataclasses.asdict(receipt) for request, receipt in received.items()}


def receipts_from_body(body: Mapping[str, Any]) -> dict[str, Receipt]:
    """The receipts in a body; none where the server is of a version without them."""
    given = dict(body.get("received", {}))
    return {str(request): build(Receipt, receipt, "received") for request, receipt in given.items()}


def requests_to_body(pending: tuple[Pending, ...], settled: tuple[str, ...]) -> dict[str, Any]:
    """The state of a client's outbox, which every reply carries.

    Args:
        pending: the requests that wait for the server.
        settled: the ids of requests whose verdict has arrived.

    Returns:
        The part of a reply's JSON body.
    """
    listed: list[dict[str, Any]] = []
    for p in pending:
        entry: dict[str, Any] = {"request": p.request, "kind": p.kind}
        listed.append({**entry, "withdrawn": True} if p.withdrawn else entry)
    return {"forget-pending": listed, "settled": list(settled)}


def requests_from_body(body: Mapping[str, Any]) -> tuple[tuple[Pending, ...], tuple[str, ...]]:
    """The pending requests of a client, and the ids of those whose verdict has arrived."""
    try:
        pending = tuple(build(Pending, entry, "forget-pending") for entry in body.get("forget-pending", ()))
        settled = tuple(str(request) for request in body.get("settled", ()))
        for entry in pending:
            require_id(entry.request, "request")
    except Exception as error:  # the body comes from outside and can be wrong in any way
        raise InvalidMessage(f"its list of pending requests cannot be read ({shortened(error)}).") from error
    if any(entry.kind not in ("client", "samples") for entry in pending):
        raise InvalidMessage("a pending request is neither of a client nor of samples.")
    if len(pending) > MOST_PENDING:
        raise InvalidMessage(f"it has {len(pending)} pending requests, and {MOST_PENDING} are the most.")
    return pending, settled


def examples_from_body(body: Mapping[str, Any]) -> int:
    """How many examples a client says it has."""
    return require_count(body.get("examples"), "examples")


def require_count(number: object, what: str) -> int:
    """A whole number from 0 on that a client says; raises `InvalidMessage` for anything else.

    Args:
        number: what the client said.
        what: is counted, for the message.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MOST_EXAMPLES:
        raise InvalidMessage(f"its number of {what} is {str(number)[:80]}: it must be a whole number from 0 on.")
    return number


def attach_nonce(content: RecordDict, nonce: str) -> None:
    """Put a nonce into the config records of a message."""
    for record in content.config_records.values():
        record[NONCE] = nonce


def return_nonce(content: RecordDict, question: RecordDict) -> None:
    """Put the nonce of a question into its reply."""
    for record in question.config_records.values():
        attach_nonce(content, str(record.get(NONCE, "")))


def require_nonce(content: RecordDict, nonce: str) -> None:
    """Refuse a reply without the nonce of its question: its sender has not seen the question."""
    if REPLY not in content.config_records:
        raise InvalidMessage(NOT_OURS)
    if content.config_records[REPLY].get(NONCE) != nonce:
        raise InvalidMessage(
            "it lacks the nonce of its question: it is forged, or the node needs the server's version of fedquit."
        )
