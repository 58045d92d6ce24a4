# SPDX-License-Identifier: Apache-2.0
"""Questions and answers as Flower's records: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core import Batch, Effort, Local, Model, Params, Part, Program, Reply, Sent, Task
from fedquit.core.fedavg import Learn
from fedquit.engine import Address, Ask
from fedquit.errors import FedquitError, InputError
from fedquit.flower import wire
from fedquit.methods.fedquit import Distill
from fedquit.methods.fused import TrainAdapters
from fedquit.methods.pga import Ascend
from fedquit.models import FunctionalModel
from seam_methods import Climb, Fisher, Outputs, Patiently, Return

pytestmark = pytest.mark.flower

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(dtypes)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return (values * 10).to(dtype).transpose(0, -1) if shape else (values * 10).to(dtype)


sets = st.dictionaries(names, tensors(), max_size=4)
tasks = st.one_of(
    st.builds(Learn, st.builds(Local, lr=st.floats(1e-300, 1e300), epochs=st.floats(0, 9)), remember=names),
    st.builds(Distill, teacher=st.sampled_from(["min", "rand"]), v=st.floats(allow_nan=False), k=st.integers(1, 9)),
    st.builds(Ascend, squared=st.booleans(), halt=st.just(math.inf), seed=st.integers(0, 2**63 - 1)),
)
splits = st.sampled_from(["all", "forget", "retain"])
programs = st.builds(Program, st.lists(st.builds(Part, tasks, splits), min_size=1, max_size=3).map(tuple))


def travelled(content: RecordDict) -> RecordDict:
    """Into bytes and back."""
    parts = {number: thing.deflate() for number, thing in get_all_nested_objects(content).items()}
    there = inflate_object_from_contents(content.object_id, parts)
    assert isinstance(there, RecordDict)
    return there


def equal(a: Params, b: Params) -> bool:
    same = list(a) == list(b) and all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape for n in a)
    return same and all(torch.equal(a[n], b[n]) for n in a)


@settings(max_examples=60)
@given(
    task=tasks | programs,
    client=st.integers(0, 10**6),
    split=splits,
    sent=st.dictionaries(names, sets, max_size=3),
    address=st.builds(Address, st.integers(-(2**80), 2**80), names, st.integers(0, 10**4), st.integers(0, 99)),
    serving=st.builds(wire.Serving, st.sampled_from(["", "client", "samples"]), names),
    verdicts=st.dictionaries(names, names, max_size=2),
)
def test_a_question_arrives_as_it_was_sent(
    task: Task | Program,
    client: int,
    split: Any,
    sent: Sent,
    address: Address,
    serving: wire.Serving,
    verdicts: dict[str, str],
) -> None:
    sent = {**sent, **({"again": next(iter(sent.values()))} if sent else {})}
    question = wire.Question(Ask(task, (client,), split, sent, address), "abc", 7, serving, verdicts)
    content = wire.question_to_records(question)
    received = wire.question_from_records(travelled(content))
    assert list(received.ask.sent) == list(sent)
    assert all(equal(received.ask.sent[n], p) for n, p in sent.items())
    assert dataclasses.replace(received, ask=dataclasses.replace(received.ask, sent=sent)) == question
    assert len(content.array_records) == len({id(p) for p in sent.values()}), "under two names it travels once"


TASKS_ON_THE_WIRE = {
    "fedquit.core.local_layers:BeginAnew",
    "fedquit.core.recalibration:Recalibrate",
    "fedquit.fedavg:Learn",
    "fedquit.methods.ascent:Climb",
    "fedquit.methods.bad_teacher:Teach",
    "fedquit.methods.fedau:LearnBoth",
    "fedquit.methods.fedau:SendHead",
    "fedquit.methods.fedau:TrainHead",
    "fedquit.methods.fedosd:Unlikely",
    "fedquit.methods.fedquit:Distill",
    "fedquit.methods.fedunran:Mislabel",
    "fedquit.methods.fedunran:MislabelPatiently",
    "fedquit.methods.fukd:Imitate",
    "fedquit.methods.fused:TrainAdapters",
    "fedquit.methods.mode:Guide",
    "fedquit.methods.pga:Ascend",
    "fedquit.methods.scrub:Diverge",
    "fedquit.methods.scrub:Errors",
    "fedquit.methods.scrub:Repair",
    "fedquit.methods.ssd:FisherDiagonal",
}


def test_names_on_the_wire_stay_those_of_the_first_release(toy_start: Params) -> None:
    """A server and its nodes are upgraded one after another: a name that changes would part them."""
    question = wire.Question(Ask(Learn(), (3,), "all", {"start": toy_start}, Address(0, "train")), "abc")
    asked = wire.question_to_records(question)
    assert set(asked) == {"fedquit.ask", "fedquit.set0"}
    words = json.loads(str(asked.config_records["fedquit.ask"]["words"]))
    assert list(words) == [
        "task", "client", "split", "sent", "address", "federation", "number", "serving", "verdicts",
    ]  # fmt: skip
    assert list(words["address"]) == ["seed", "phase", "round", "question"]
    assert words["serving"] == {"kind": "", "request": ""}
    assert list(words["task"]) == ["name", "fields"]
    answered = wire.answer_to_records(wire.Answer(Reply(3, toy_start, 5), (wire.Pending("a", "client"),)), question)
    assert set(answered) == {"fedquit.reply", "fedquit.params"}
    words = json.loads(str(answered.config_records["fedquit.reply"]["words"]))
    assert list(words) == ["question", "examples", "loss", "forget-pending", "settled"]
    assert words["question"] == "abc/0/3"
    assert words["forget-pending"] == [{"request": "a", "kind": "client"}]
    wire.return_nonce(answered, asked)
    assert "nonce" in answered.config_records["fedquit.reply"]
    ours = {name for name in wire.known_tasks() if name.startswith("fedquit.")}
    assert ours == TASKS_ON_THE_WIRE


@settings(max_examples=60)
@given(
    params=st.dictionaries(names, tensors().filter(lambda t: bool(torch.isfinite(t).all())), min_size=1, max_size=4),
    examples=st.integers(0, 2**53 - 1),
    loss=st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.just(math.nan)),
    pending=st.lists(
        st.builds(
            wire.Pending, st.from_regex(r"[0-9a-f]{1,16}", fullmatch=True), st.sampled_from(["client", "samples"])
        ),
        max_size=3,
    ),
)
def test_an_answer_arrives_as_it_was_sent(
    params: Params, examples: int, loss: float, pending: list[wire.Pending]
) -> None:
    question = wire.Question(Ask(Learn(), (3,), "all", {}, Address(0, "train")), "abc")
    answer = wire.Answer(Reply(3, params, examples, loss), tuple(pending), ("x",))
    content = travelled(wire.answer_to_records(answer, question))
    received = wire.answer_from_records(content, question, wire.ExpectedReply(params, whole=True))
    assert equal(received.reply.params, params)
    assert (received.reply.client, received.reply.examples, received.pending, received.settled) == (
        3,
        examples,
        tuple(pending),
        ("x",),
    )
    assert received.reply.loss == loss or (math.isnan(loss) and math.isnan(received.reply.loss))


def test_parameters_come_back_in_the_servers_order() -> None:
    like = {"b": torch.zeros(2), "a": torch.zeros(1)}
    question = wire.Question(Ask(Learn(), (3,), "all", {"start": like}, Address(0, "train")), "abc")
    turned = wire.answer_to_records(wire.Answer(Reply(3, dict(reversed(like.items())), 1)), question)
    received = wire.answer_from_records(turned, question, wire.ExpectedReply(like, whole=True))
    assert list(received.reply.params) == ["b", "a"]


def reworded(content: RecordDict, **changes: Any) -> RecordDict:
    words = json.loads(str(content.config_records[wire.ASK]["words"])) | changes
    content[wire.ASK] = ConfigRecord({"words": json.dumps(words)})
    return content


@pytest.fixture
def sent() -> RecordDict:
    ask = Ask(Learn(), (3,), "all", {"start": {"a": torch.zeros(1)}}, Address(0, "train"))
    return wire.question_to_records(wire.Question(ask, "abc"))


@pytest.mark.parametrize(
    "name", ["os:system", "fedquit.fedavg:cohort", "fedquit.core:Task", "antigravity:Learn", "Learn"]
)
def test_no_name_from_outside_is_ever_imported(name: str, sent: RecordDict) -> None:
    import sys

    with pytest.raises(InputError, match="is not known here"):
        wire.question_from_records(reworded(sent, task={"name": name, "fields": {}}))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": {"name": "fedquit.fedavg:Learn", "fields": {"local": {"lr": "high"}}}}, "must be of type float"),
        ({"task": {"name": "fedquit.fedavg:Learn", "fields": {"speed": 1}}}, "unknown key in task 'speed'"),
        ({"split": "everything"}, "must be all, forget or retain"),
        ({"task": {"name": "program", "parts": []}}, "at least one"),
        ({"task": {"name": "program", "parts": [{"split": "all"}]}}, "cannot be read"),
        (
            {"task": {"name": "program", "parts": [{"task": {"name": "os:system", "fields": {}}, "split": "all"}]}},
            "is not known here",
        ),
        (
            {
                "task": {
                    "name": "program",
                    "parts": [{"task": {"name": "fedquit.fedavg:Learn", "fields": {}}, "split": "x"}],
                }
            },
            "must be all, forget or retain",
        ),
        ({"task": {"name": "fedquit.core.types:Measurement", "fields": {}}}, "is not known here"),
        ({"sent": {"start": 5}}, "cannot be read"),
        ({"address": {"seed": 0}}, "cannot be read"),
        ({"verdicts": 3}, "cannot be read"),
    ],
)
def test_a_question_that_is_none_is_refused(changes: dict[str, Any], sentence: str, sent: RecordDict) -> None:
    with pytest.raises(FedquitError, match=sentence):
        wire.question_from_records(reworded(sent, **changes))


@dataclass(frozen=True)
class Odd(Task):
    """A task that cannot travel."""

    many: tuple[int, ...] = (1, 2)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> torch.Tensor:
        return batch.x


def test_what_cannot_travel_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InputError, match="only scalars can travel"):
        wire.task_to_body(Odd())
    with pytest.raises(InputError, match=r"bfloat16, which Flower cannot carry"):
        wire.params_to_record({"a": torch.zeros(1, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (1,), "pickle", b"x"),
        Array("float32", (1,), "numpy.ndarray", b"not numpy"),
        Array("float32", (1,), "numpy.ndarray", b"PK\x03\x04 a zip"),
        Array("float32", (10**12,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, "
              b"'shape': (1000000000000,), }".ljust(118) + b"\n"),
        Array("object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, "
              b"'shape': (1,), }".ljust(118) + b"\n" + b"x" * 8),
    ],
)  # fmt: skip
def test_a_tensor_that_is_none_is_refused_before_memory_is_taken(array: Array) -> None:
    with pytest.raises(wire.InvalidMessage, match="cannot be read"):
        wire.params_from_record(ArrayRecord({"a": array}))


def test_what_may_come_back_is_what_the_task_answers(toy_model: FunctionalModel, toy_start: Params) -> None:
    learn = wire.expected_reply(Learn(), toy_model, {"start": toy_start})
    assert learn.whole
    assert list(learn.like) == list(toy_start)
    adapters = {"adapter:x": torch.zeros(3)}
    fused = wire.expected_reply(TrainAdapters(), toy_model, {"start": {"x": torch.zeros(30)}, "adapters": adapters})
    assert fused.whole
    assert list(fused.like) == ["adapter:x"]
    ascend = wire.expected_reply(Ascend(), toy_model, {"start": toy_start})  # needs what only the client has
    assert not ascend.whole
    assert list(ascend.like) == list(toy_start)


# Programs and monitored tasks

PROGRAM = Program((Part(Climb(Local(2.0, 4)), "forget"), Part(Patiently(Local(3.0, 4)), "retain")))


def reply_to(
    task: Task | Program,
    examples: int,
    efforts: tuple[Effort, ...],
    start: Params,
    changes: dict[str, Any] | None = None,
) -> tuple[RecordDict, wire.Question, wire.ExpectedReply]:
    """A client's answer, with changes to its JSON, its question and what is expected."""
    ask = Ask(task, (3,), "all" if isinstance(task, Program) else "forget", {"start": start}, Address(0, "unlearn-0"))
    question = wire.Question(ask, "abc")
    content = wire.answer_to_records(wire.Answer(Reply(3, start, examples, 0.5, efforts)), question)
    words = json.loads(str(content.config_records[wire.REPLY]["words"])) | (changes or {})
    content[wire.REPLY] = ConfigRecord({"words": json.dumps(words)})
    return content, question, wire.ExpectedReply(start, whole=True)


def test_a_visit_says_what_each_part_took(toy_start: Params) -> None:
    efforts = (Effort(9, 6), Effort(14, 5))  # 3 and 4 batches an epoch: all of 6 steps, 5 of 12
    answer = wire.answer_from_records(*reply_to(PROGRAM, 23, efforts, toy_start))
    assert answer.reply.efforts == efforts
    assert answer.reply.examples == 23
    (task,) = (PROGRAM.parts[1].task,)
    alone = wire.answer_from_records(*reply_to(task, 14, (Effort(14, 1),), toy_start))
    assert alone.reply.efforts == (Effort(14, 1),)
    empty = wire.answer_from_records(*reply_to(PROGRAM, 0, (Effort(0, 0), Effort(0, 0)), toy_start))
    assert empty.reply.efforts == (Effort(0, 0), Effort(0, 0))


def test_a_task_that_takes_what_was_planned_need_not_say_so(toy_start: Params) -> None:
    answer = wire.answer_from_records(*reply_to(Climb(), 9, (), toy_start, {"efforts": [[9, 10**9]]}))
    assert answer.reply.efforts == (), "and is not believed if it says something else"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"efforts": None}, "for each of 2 parts"),
        ({"efforts": [[9, 6]]}, "for each of 2 parts"),
        ({"efforts": [[9, 6], [14, 13]]}, "13 steps on 14 examples, where 12 were planned"),
        ({"efforts": [[9, 6], [14, 0]]}, "0 steps on 14 examples"),  # a monitor sees one step at least
        ({"efforts": [[9, 5], [14, 5]]}, "5 steps on 9 examples, where 6 were planned"),  # this part has no monitor
        ({"efforts": [[9, 6], [14, -1]]}, "number of steps is -1"),
        ({"efforts": [[9, 6], [14, True]]}, "number of steps is True"),
        ({"efforts": [[9, 6], [14.0, 5]]}, "number of examples is 14.0"),
        ({"efforts": [[9, 6], "5"]}, "it must be two numbers"),
        ({"examples": 22}, "contradict each other"),
    ],
)
def test_what_a_client_says_it_took_is_held_against_the_plan(
    changes: dict[str, Any], sentence: str, toy_start: Params
) -> None:
    with pytest.raises(wire.InvalidMessage, match=sentence):
        wire.answer_from_records(*reply_to(PROGRAM, 23, (Effort(9, 6), Effort(14, 5)), toy_start, changes))


def test_two_parts_of_one_split_must_have_the_same_examples(toy_start: Params) -> None:
    twice = Program((Part(Climb(Local(1.0, 4)), "forget"), Part(Climb(Local(1.0, 4)), "forget")))
    wire.answer_from_records(*reply_to(twice, 8, (Effort(8, 2), Effort(8, 2)), toy_start))
    with pytest.raises(wire.InvalidMessage, match="contradict each other"):
        wire.answer_from_records(*reply_to(twice, 8, (Effort(4, 1), Effort(8, 2)), toy_start))


def test_what_may_come_back_from_measurements_and_programs(toy_model: FunctionalModel, toy_start: Params) -> None:
    fisher = wire.expected_reply(Fisher(), toy_model, {"start": toy_start})
    assert fisher.whole
    assert {n: p.shape for n, p in fisher.like.items()} == {n: p.shape for n, p in toy_start.items()}
    outputs = wire.expected_reply(Outputs(), toy_model, {"start": toy_start})
    assert {n: tuple(p.shape) for n, p in outputs.like.items()} == {"logits": (3,)}
    program = wire.expected_reply(PROGRAM, toy_model, {"start": toy_start})
    assert program.whole
    assert list(program.like) == list(toy_start)
    last = wire.expected_reply(Program((*PROGRAM.parts, Part(Outputs()))), toy_model, {"start": toy_start})
    assert list(last.like) == ["logits"]
    needy = wire.expected_reply(Program((Part(Ascend()),)), toy_model, {"start": toy_start})
    assert not needy.whole, "it needs what only the client has"
    kept = Program((Part(Fisher(remember="fisher")), Part(Return())))
    assert wire.expected_reply(kept, toy_model, {"start": toy_start}).whole, "what a part keeps is there for the next"
