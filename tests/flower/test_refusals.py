# SPDX-License-Identifier: Apache-2.0
"""What the server does when somebody does not answer, or not as asked: the round goes on, and the log says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.supercore.inflatable.inflatable_utils import validate_object_content

from fedquit.core import Params
from fedquit.data.federated import FederatedData
from fedquit.flower import wire
from fedquit.flower.grid_engine import TRIES, TooFewReplies
from fedquit.flower.presence import NodesMissing
from fedquit.models import FunctionalModel
from flower.grid_world import MakeWorld, Setup, Spoil, lines

pytestmark = pytest.mark.flower

ONE_ROUND: dict[str, Any] = {"train": {"rounds": 1, "batch_size": 8, "lr": 0.1}}


@pytest.fixture(scope="module")
def without_two(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path_factory: pytest.TempPathFactory
) -> Params:
    """The model after one round in which client 2 has given no answer at all."""
    setup = Setup(toy_data, toy_model, tmp_path_factory.mktemp("without"))
    setup.node_of(2).spoil = lambda r: [] if r.metadata.message_type.startswith("train") else [r]
    return setup.serve(setup.config(**ONE_ROUND)).params


def changed(how: Callable[[Params], Params]) -> Spoil:
    """A reply to a task with other parameters."""

    def spoil(reply: Message) -> list[Message]:
        if reply.has_content() and wire.PARAMS in reply.content:
            params = how(wire.params_from_record(reply.content.array_records[wire.PARAMS]))
            reply.content[wire.PARAMS] = wire.params_to_record(params)
        return [reply]

    return spoil


def reworded(**changes: Any) -> Spoil:
    """A reply to a task with other words."""

    def spoil(reply: Message) -> list[Message]:
        if reply.has_content() and wire.PARAMS in reply.content:
            said = reply.content.config_records[wire.REPLY]
            said["words"] = json.dumps(json.loads(str(said["words"])) | changes)
        return [reply]

    return spoil


def headless(reply: Message) -> list[Message]:
    """A tensor whose head promises more numbers than there are."""
    if reply.has_content() and wire.PARAMS in reply.content:
        record = reply.content.array_records[wire.PARAMS]
        name = next(iter(record))
        array = record[name]
        record[name] = Array(array.dtype, array.shape, array.stype, array.data[:-8])
    return [reply]


def from_another_node(reply: Message) -> list[Message]:
    if reply.metadata.message_type.startswith("train"):
        reply.metadata.__dict__["_src_node_id"] = 12345
    return [reply]


class Garbage(ConfigRecord):
    """A record whose head is as it must be, and whose body is none."""

    def deflate(self) -> bytes:
        return b"ConfigRecord  5\x00" + b"\xff" * 5


def garbled(reply: Message) -> list[Message]:
    """A reply that the SuperLink takes and that nobody can read."""
    if reply.has_content() and wire.PARAMS in reply.content:
        content = Garbage()
        validate_object_content(content.deflate())
        reply.content[wire.REPLY] = content
    return [reply]


def forged(nonce: str | None, kind: str = "train") -> Spoil:
    """A reply from the right node, to the right question, by somebody who has not seen it."""

    def spoil(reply: Message) -> list[Message]:
        if reply.metadata.message_type.startswith(kind):
            said = reply.content.config_records[wire.REPLY]
            del said[wire.NONCE]
            if nonce is not None:
                said[wire.NONCE] = nonce
        return [reply]

    return spoil


def second_set(reply: Message) -> list[Message]:
    if reply.has_content() and wire.PARAMS in reply.content:
        reply.content["another"] = ArrayRecord()
    return [reply]


def with_first(how: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return changed(lambda p: {n: how(t) if i == 0 else t for i, (n, t) in enumerate(p.items())})


REFUSALS: dict[str, tuple[Spoil, str]] = {
    "NaN": (with_first(lambda t: t * float("nan")), "holds NaN or infinity"),
    "infinity": (with_first(lambda t: t / 0), "holds NaN or infinity"),
    "another shape": (with_first(lambda t: t.reshape(-1)), "has shape"),
    "another dtype": (with_first(lambda t: t.float()), "is torch.float32 where torch.float64"),
    "a parameter too few": (changed(lambda p: dict(list(p.items())[1:])), "other parameters than asked for"),
    "a parameter too many": (changed(lambda p: {**p, "x": torch.zeros(1)}), "other parameters than asked for"),
    "nothing": (changed(lambda p: {}), "other parameters than asked for"),
    "a huge payload": (changed(lambda p: {**p, "x": torch.zeros(10**5)}), "is too large"),
    "a second set": (second_set, "one set of parameters"),
    "a broken tensor": (headless, "its head does not describe it"),
    "the wrong node": (from_another_node, "which was not asked"),
    "another question": (reworded(question="f/1/1"), "answers another question"),
    "a negative count": (reworded(examples=-1), "number of examples is -1"),
    "a count that is none": (reworded(examples=True), "number of examples is True"),
    "a loss that is none": (reworded(loss="low"), "loss is 'low'"),
    "a strange request": (reworded(**{"forget-pending": [{"request": "a", "kind": "all"}]}), "neither of a client"),
    "too many requests": (
        reworded(**{"forget-pending": [{"request": f"{i:x}", "kind": "client"} for i in range(17)]}),
        "17 pending requests, and 16 are the most",
    ),
    "a path for a request": (reworded(**{"forget-pending": [{"request": "../x", "kind": "client"}]}), "cannot be read"),
    "a request that is none": (reworded(**{"forget-pending": [3]}), "cannot be read"),
    "a request that is a list": (reworded(**{"forget-pending": [["request"]]}), "cannot be read"),
    "numbers beyond all bounds": (with_first(lambda t: t + 1.7e308), "beyond 1e+15"),
    "a head without an end": (lambda r: [_headed(r, "{'descr': (")], "cannot be read"),
    "a head of signs": (lambda r: [_headed(r, "-" * 9000 + "1")], "cannot be read"),
    "a head of nothing": (
        lambda r: [_headed(r, "{'descr': (), 'fortran_order': False, 'shape': ()}")],
        "cannot be read",
    ),
    "words without an end": (lambda r: [_worded(r, "[" * 60_000)], "not JSON"),
    "bytes that are no message": (garbled, "the reply cannot be read (DecodeError"),
    "another nonce": (forged("0" * 32), "lacks the nonce of its question"),
    "no nonce": (forged(None), "lacks the nonce of its question"),
    "a refusal": (reworded(refused="I do not want to"), "it refuses: I do not want to"),
    "words that are none": (lambda r: [_worded(r, "{")], "not JSON"),
    "no words": (lambda r: [_worded(r, 3)], "not one of fedquit's"),
}


def _worded(reply: Message, words: str | int) -> Message:
    if reply.has_content() and wire.PARAMS in reply.content:
        reply.content.config_records[wire.REPLY]["words"] = words
    return reply


def _headed(reply: Message, head: str) -> Message:
    """The first tensor behind another head, of the same length as all."""
    if reply.has_content() and wire.PARAMS in reply.content:
        record = reply.content.array_records[wire.PARAMS]
        name = next(iter(record))
        array = record[name]
        data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()
        record[name] = Array(array.dtype, array.shape, array.stype, data)
    return reply


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_reply_that_is_not_what_was_asked_is_refused_and_the_round_goes_on(
    fault: str, make: MakeWorld, without_two: Params
) -> None:
    spoil, sentence = REFUSALS[fault]
    setup = make()
    setup.node_of(2).spoil = spoil
    outcome = setup.serve(setup.config(**ONE_ROUND))
    said = [line for line in lines(setup.folder) if sentence in line]
    assert len(said) == 1
    assert said[0].startswith("no reply of client 2 (hospital-2) in round 1 of phase 'train': ")
    for n, p in without_two.items():
        assert torch.equal(outcome.params[n], p), "the mean is over the others"


def test_a_second_reply_to_one_question_is_ignored(make: MakeWorld) -> None:
    setup, plain = make(), make("plain")
    setup.node_of(2).spoil = lambda reply: [reply, *changed(lambda p: {n: t + 1 for n, t in p.items()})(copied(reply))]
    outcome, expected = setup.serve(setup.config()), plain.serve(plain.config())
    assert any("ignored a second reply" in line for line in lines(setup.folder))
    assert all(torch.equal(outcome.params[n], p) for n, p in expected.params.items())


def copied(reply: Message) -> Message:
    from flower.grid_world import arrived

    reply.metadata.__dict__["_message_id"] = reply.object_id
    return arrived(reply)[0]


def test_a_late_reply_is_ignored(make: MakeWorld) -> None:
    setup, without = make(), make("without")
    held: list[Message] = []

    def late(reply: Message) -> list[Message]:
        if not reply.metadata.message_type.startswith("train"):
            return [reply]
        held.append(reply)
        return held[-2:-1]  # the answer to the last round, which nobody waits for any more

    setup.node_of(2).spoil = late
    without.node_of(2).spoil = lambda r: [] if r.metadata.message_type.startswith("train") else [r]
    outcome, expected = setup.serve(setup.config()), without.serve(without.config())
    assert any("ignored a reply to no question of this round" in line for line in lines(setup.folder))
    assert all(torch.equal(outcome.params[n], p) for n, p in expected.params.items())


def test_a_reply_that_claims_to_answer_somebody_elses_question_answers_none(make: MakeWorld) -> None:
    setup, without = make(), make("without")
    asked: dict[int, str] = {}
    setup.grid.before = lambda m: asked.update({m.metadata.dst_node_id: m.metadata.message_id})

    def usurping(reply: Message) -> list[Message]:
        if reply.metadata.message_type.startswith("train") and setup.node_of(1).id in asked:
            reply.metadata.__dict__["_reply_to_message_id"] = asked[setup.node_of(1).id]
        return [reply]

    setup.node_of(2).spoil = usurping
    without.node_of(2).spoil = lambda r: [] if r.metadata.message_type.startswith("train") else [r]
    outcome, expected = setup.serve(setup.config()), without.serve(without.config())
    assert any(line.startswith("ignored a") for line in lines(setup.folder))
    assert all(torch.equal(outcome.params[n], p) for n, p in expected.params.items())


def test_a_superlink_that_has_gone_is_no_fault_of_the_replies(make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make()

    def gone(*_: object) -> list[Message]:
        raise ConnectionError("gone")

    def leave(message: Message) -> None:
        monkeypatch.setattr(setup.grid, "pull_messages", gone)
        monkeypatch.setattr(setup.grid, "get_nodes", gone)

    setup.grid.before = leave
    with pytest.raises(ConnectionError, match="gone"):
        setup.serve(setup.config())


def test_an_error_is_logged_with_its_reason_and_the_round_goes_on(make: MakeWorld) -> None:
    setup = make()
    setup.grid.before = lambda m: _stop(setup, m)
    outcome = setup.serve(setup.config())
    assert outcome.rounds == 2
    assert any("client 3 (hospital-3)" in line and "error 5: Node Unavailable" in line for line in lines(setup.folder))


def _stop(setup: Setup, message: Message) -> None:
    if message.metadata.message_type.startswith("train"):
        setup.node_of(3).online = False


def test_too_few_replies_repeat_the_round_and_then_stop_with_a_sentence(make: MakeWorld) -> None:
    setup = make()
    for client in (0, 1, 2):
        setup.node_of(client).spoil = with_first(lambda t: t * float("nan"))
    with pytest.raises(TooFewReplies, match=r"2 of 5 clients answered in round 1 of phase 'train', and 3 are needed"):
        setup.serve(setup.config())
    assert sum("the round is repeated" in line for line in lines(setup.folder)) == 2
    again = make("again")
    for client in (0, 1, 2):
        again.node_of(client).spoil = with_first(lambda t: t * float("nan"))
    assert again.serve(again.config(min_replies=2)).rounds == 2


def test_leaving_clients_whose_replies_cannot_be_averaged_are_served_by_the_fallback(make: MakeWorld) -> None:
    """PGA's reply may be a part of the model, so that one alone is accepted; the mean of a part and a whole is none."""
    setup = make()
    config = setup.config(method={"name": "pga"}, together=True)
    setup.serve(config)
    setup.node_of(1).spoil = changed(lambda params: dict(list(params.items())[:1]))
    setup.outbox(1).file()
    setup.outbox(2).file()
    outcome = setup.serve(config)
    assert [e.status for e in outcome.erasures] == ["done", "done"]
    assert any(e.fallback and "has other parameters than expected" in e.reason for e in outcome.erasures)


def test_a_recovery_round_with_too_few_replies_is_not_repeated_for_ever(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    phases: list[str] = []

    def before(message: Message) -> None:
        if message.metadata.message_type.startswith("train"):
            phases.append(json.loads(str(message.content.config_records[wire.ASK]["words"]))["address"]["phase"])
        if phases and phases[-1] == "recover-0":
            for client in (0, 2, 3):
                setup.node_of(client).spoil = with_first(lambda t: t * float("nan"))
        assert len(phases) < 100, "there is no end"

    setup.grid.before = before
    with pytest.raises(TooFewReplies, match=r"1 of 4 clients answered in round 1 of phase 'recover-0'"):
        setup.serve(setup.config())
    assert phases.count("recover-0") == 3 * 4, "tried three times"


ONE_BY_ONE: dict[str, Any] = {"train": {"rounds": 4, "batch_size": 8, "lr": 0.1, "clients_per_round": 1}}


@pytest.mark.parametrize("unlearning", [False, True])
def test_a_cohort_without_examples_is_drawn_again_without_those_that_have_none(
    unlearning: bool, make: MakeWorld
) -> None:
    setup = make()
    config = setup.config(**ONE_BY_ONE, method={"name": "retrain"})
    if unlearning:
        setup.serve(config)
        setup.outbox(1).file()
    for client in (0, 2):
        setup.node_of(client).spoil = reworded(examples=0)
    outcome = setup.serve(config)
    assert outcome.rounds == 4
    assert [(e.status, e.method, e.fallback) for e in outcome.erasures] == [("done", "retrain", False)] * unlearning
    repeated = [line for line in lines(setup.folder) if "the round is repeated" in line]
    assert 1 <= len(repeated) <= 2, "once for each"
    assert all("no client that was asked has any data" in line for line in repeated)


def said_of_itself(**changes: Any) -> Spoil:
    """Other words in what a node says of itself."""

    def spoil(reply: Message) -> list[Message]:
        if reply.metadata.message_type.startswith("query"):
            words = wire.body_from_records(reply.content) | changes
            reply.content.config_records[wire.REPLY]["words"] = json.dumps(words)
        return [reply]

    return spoil


def test_a_client_without_examples_counts_as_a_node_and_is_asked_for_nothing(make: MakeWorld) -> None:
    setup = make()
    setup.node_of(2).spoil = said_of_itself(examples=0)
    assert setup.serve(setup.config(min_nodes=5)).rounds == 2
    assert setup.trained_by() == {0, 1, 3, 4}


def test_a_federation_without_any_example_waits_speaks_and_gives_up(make: MakeWorld) -> None:
    setup = make()
    for node in setup.grid.nodes.values():
        node.spoil = said_of_itself(examples=0)
    with pytest.raises(NodesMissing, match="still missing: one that has examples"):
        setup.serve(setup.config(wait=100.0))


def test_a_leaving_client_that_claims_to_have_no_examples_is_forgotten_by_the_fallback(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.node_of(1).spoil = reworded(examples=0)
    (erasure,) = setup.serve(setup.config()).erasures
    assert (erasure.status, erasure.method, erasure.fallback) == ("done", "not", True)
    assert "gave no answer that can be used" in erasure.reason
    assert any("it answers without an example that counts" in line for line in lines(setup.folder))


def test_a_round_without_enough_nodes_waits_speaks_and_gives_up(make: MakeWorld) -> None:
    setup = make()
    for client in (1, 2, 3, 4):
        setup.node_of(client).online = False
    with pytest.raises(NodesMissing, match=r"needs 3 nodes .* missing: 2 nodes that have never been here"):
        setup.serve(setup.config(min_nodes=3, wait=100.0))
    said = [line for line in lines(setup.folder) if line.startswith("waiting up to 100 s: ")]
    assert len(said) == 4, "at once, and then about every half minute"
    assert 1e9 + 100 <= setup.time.time < 1e9 + 110


def test_a_node_that_comes_late_is_waited_for_and_named_while_it_is_away(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={"rounds": 1, "batch_size": 8}))
    for client in (3, 4):
        setup.node_of(client).online = False
    back = setup.time.time + 50
    setup.time.wakes.append(lambda now: setattr(setup.node_of(3), "online", now > back))
    assert setup.serve(setup.config(train={"rounds": 2, "batch_size": 8}, min_nodes=4)).rounds == 2
    assert any("missing: client 3 (hospital-3), client 4 (hospital-4)" in line for line in lines(setup.folder))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"examples": -3}, "number of examples is -3"),
        ({"forget-pending": [3]}, "cannot be read"),
        ({"refused": "x" * 10**5}, "it refuses: xxx"),
    ],
)
def test_a_node_that_says_nonsense_about_itself_is_left_out_and_stops_nobody(
    words: dict[str, Any], sentence: str, make: MakeWorld
) -> None:
    setup = make()
    setup.node_of(4).spoil = said_of_itself(**words)
    assert setup.serve(setup.config()).rounds == 2
    assert "train.fedquit" not in setup.node_of(4).asked
    said = [line for line in lines(setup.folder) if sentence in line]
    assert 1 <= len(said) <= 2
    assert len(said[0]) < 700


@pytest.mark.parametrize("nonce", ["0" * 32, None])
def test_who_has_not_been_asked_cannot_say_who_a_node_is(nonce: str | None, make: MakeWorld) -> None:
    setup = make()
    setup.outbox(4).file()
    setup.node_of(4).spoil = forged(nonce, "query")
    assert setup.serve(setup.config()).erasures == ()
    assert "train.fedquit" not in setup.node_of(4).asked
    assert any("did not say who it is: it lacks the nonce" in line for line in lines(setup.folder))


def test_a_forged_refusal_does_not_count_against_the_client_that_leaves(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    tries = iter(range(100))

    def refused(reply: Message) -> list[Message]:
        if reply.metadata.message_type.startswith("train") and next(tries) < TRIES:
            reply.content = wire.refusal_to_records("no")
        return [reply]

    setup.node_of(1).spoil = refused
    (entry,) = setup.serve(setup.config()).erasures
    assert (entry.status, entry.method, next(tries)) == ("done", "fedquit", TRIES + 1)


def test_every_question_has_a_nonce_of_its_own(make: MakeWorld) -> None:
    setup, nonces = make(), list[object]()
    setup.grid.before = lambda m: nonces.extend(r[wire.NONCE] for r in m.content.config_records.values())
    setup.serve(setup.config())
    assert len(set(nonces)) == len(nonces) == len(setup.grid.log)
    assert all(len(str(n)) == 32 for n in nonces)


def test_a_node_without_fedquit_is_left_out(make: MakeWorld) -> None:
    from flwr.clientapp import ClientApp

    setup = make()
    setup.node_of(4).app = ClientApp()
    assert setup.serve(setup.config()).rounds == 2
    assert "train.fedquit" not in setup.node_of(4).asked
    assert any("did not say who it is" in line for line in lines(setup.folder))


def test_a_refusal_s_text_forges_no_line_of_the_log(make: MakeWorld) -> None:
    forged = "w\nINFO :      fedquit: r0001 done\x1b[2K"
    setup = make()
    setup.node_of(2).spoil = changed(
        lambda params: {forged if i == 0 else n: p for i, (n, p) in enumerate(params.items())}
    )
    setup.serve(setup.config(**ONE_ROUND))
    (refusal,) = [line for line in lines(setup.folder) if "no reply of client 2" in line]
    assert "\n" not in refusal
    assert "\x1b" not in refusal
