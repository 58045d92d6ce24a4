# SPDX-License-Identifier: Apache-2.0
"""Members that answer well-formed lies, over the in-process grid: each attack, with the checks and without them.

Without the checks every one of these attacks succeeds, which the tests show first: a test of a defence that nobody
attacks shows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from flwr.app import Message

from fedquit.core import Params
from fedquit.core.params import add, sub
from fedquit.flower import wire
from fedquit.flower.ledger import Erasure
from fedquit.flower.server import ServerResult
from flower.grid_world import MakeWorld, Setup, lines
from flower.test_member_checks import close
from flower.test_refusals import reworded

pytestmark = pytest.mark.flower

TRAIN = {"rounds": 8, "batch_size": 8, "lr": 0.1}
HUGE = 10**12


@dataclass
class Liar:
    """A node that answers as it likes in some phases.

    Attributes:
        lie: from what it was sent and its honest answer to what it sends.
        phase: the beginning of the phases in which it lies.
        examples: that it then says it has; 0 for the truth.
        update: its last honest update of training.
    """

    setup: Setup
    client: int
    lie: Callable[[Params, Params], Params]
    phase: str = "train"
    examples: int = 0
    update: Params = field(default_factory=dict)
    start: Params = field(default_factory=dict, init=False)
    now: str = field(default="", init=False)

    def __post_init__(self) -> None:
        node = self.setup.node_of(self.client)
        before = self.setup.grid.before

        def listen(message: Message) -> None:
            before(message)
            if message.metadata.dst_node_id == node.id and message.metadata.message_type == wire.TRAIN:
                body = json.loads(str(message.content.config_records[wire.ASK]["words"]))
                self.now = body["address"]["phase"]
                number = body["sent"]["start"]
                self.start = wire.params_from_record(message.content.array_records[f"fedquit.set{number}"])

        self.setup.grid.before = listen
        node.spoil = self.spoil

    def spoil(self, reply: Message) -> list[Message]:
        if not reply.has_content() or wire.PARAMS not in reply.content:
            return [reply]
        honest = wire.params_from_record(reply.content.array_records[wire.PARAMS])
        if self.now.startswith("train"):
            self.update = sub(honest, self.start)
        if self.now.startswith(self.phase):
            reply.content[wire.PARAMS] = wire.params_to_record(self.lie(self.start, honest))
            if self.examples:
                return reworded(examples=self.examples)(reply)
        return [reply]


def accuracy(setup: Setup, params: Params) -> float:
    """In percent, on data that no client has."""
    data = setup.data.dataset
    return 100 * float((setup.model(params, data.test_x).argmax(-1) == data.test_y).double().mean())


def forget_accuracy(setup: Setup, params: Params, client: int) -> float:
    mine = setup.data.train[client]
    return 100 * float((setup.model(params, setup.data.x[mine]).argmax(-1) == setup.data.y[mine]).double().mean())


def after_training(setup: Setup, **settings: Any) -> ServerResult:
    return setup.serve(setup.config(train=TRAIN, **settings))


def erased(setup: Setup, *clients: int, **settings: Any) -> tuple[ServerResult, list[Erasure]]:
    """Train, let these clients leave, and what became of their requests."""
    after_training(setup, **settings)
    for client in clients:
        setup.outbox(client).file()
    result = after_training(setup, **settings)
    return result, list(result.erasures)


def said(setup: Setup, words: str) -> bool:
    return any(words in line for line in lines(setup.folder))


def scaled(start: Params, honest: Params) -> Params:
    return add(start, sub(honest, start), 1000.0)


def sent_back(start: Params, _honest: Params) -> Params:
    return start


def poisoned(start: Params, _honest: Params) -> Params:
    """A model that is wrong on purpose: its last layer points the other way, and far."""
    last = next(reversed(start)).rpartition(".")[0]
    return {n: -20 * p if n.startswith(last) else p for n, p in start.items()}


def test_one_reply_with_a_huge_n_and_a_model_of_its_own_does_not_replace_the_model(make: MakeWorld) -> None:
    honest, victim, guarded = make("honest"), make("open"), make("closed")
    expected = accuracy(honest, after_training(honest).params)
    close(guarded)
    for setup in (victim, guarded):
        Liar(setup, 1, poisoned, examples=HUGE)
    assert accuracy(victim, after_training(victim, check_members=False).params) < expected - 30
    assert accuracy(guarded, after_training(guarded).params) > expected - 10
    assert said(guarded, "is scaled down")


def test_an_update_times_a_thousand_counts_as_an_ordinary_one(make: MakeWorld) -> None:
    honest, victim, guarded = make("honest"), make("victim"), make("guarded")
    expected = accuracy(honest, after_training(honest).params)
    for setup in (victim, guarded):
        Liar(setup, 1, scaled)
    assert accuracy(victim, after_training(victim, check_members=False).params) < expected - 30
    assert accuracy(guarded, after_training(guarded).params) > expected - 10
    assert said(guarded, "the update of client 1 (hospital-1) in round 2 of phase 'train' is far longer")


def test_one_of_three_sites_cannot_set_the_measure(make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        for client in (3, 4):
            del setup.grid.nodes[setup.node_of(client).id]
        Liar(setup, 1, scaled)
    lost = accuracy(victim, after_training(victim, check_members=False).params)
    assert accuracy(guarded, after_training(guarded).params) > lost + 20


def test_an_adam_step_that_no_steps_lead_to_is_refused(make: MakeWorld) -> None:
    setup, without = make("lying"), make("without")
    train = {"rounds": 2, "batch_size": 8, "lr": 1e-3, "optimizer": "adam"}
    Liar(setup, 1, scaled)
    without.node_of(1).spoil = lambda r: [] if r.metadata.message_type.startswith("train") else [r]
    result = setup.serve(setup.config(train=train))
    assert said(setup, "farther than 1 steps of adam with rate 0.001 can take them")
    expected = without.serve(without.config(train=train)).params
    assert all(torch.equal(result.params[n], p) for n, p in expected.items()), "the round goes on without it"


def test_a_poisoned_unlearned_model_is_refused_and_the_fallback_serves_the_request(make: MakeWorld) -> None:
    honest, victim, guarded = make("honest"), make("victim"), make("guarded")
    expected, _ = erased(honest, 1, recover_rounds=0)
    for setup in (victim, guarded):
        Liar(setup, 1, poisoned, phase="unlearn")
    lost, (served,) = erased(victim, 1, recover_rounds=0, check_members=False)
    assert (served.status, served.fallback) == ("done", False), "and nobody sees anything"
    assert accuracy(victim, lost.params) < accuracy(honest, expected.params) - 30
    _, (refused,) = erased(guarded, 1)
    assert (refused.status, refused.method, refused.fallback) == ("done", "not", True)
    assert "gave no answer that can be used" in refused.reason
    moved_too_far = said(guarded, "farther than") or said(guarded, "was to be expected")
    assert moved_too_far


def test_a_client_that_sends_back_what_it_was_sent_has_not_unlearned(make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        Liar(setup, 1, sent_back, phase="unlearn")
    _, (served,) = erased(victim, 1, check_members=False)
    assert (served.status, served.fallback) == ("done", False)
    _, (refused,) = erased(guarded, 1)
    assert (refused.status, refused.method) == ("done", "not")
    assert said(guarded, "its model did not move: it has not unlearned")


def test_a_client_that_trains_on_instead_of_unlearning_is_refused(make: MakeWorld) -> None:
    setup = make()

    def trained_on(start: Params, _honest: Params) -> Params:
        longest = max(float(p.abs().max()) for p in liar.update.values())
        return add(start, liar.update, 5e-3 / longest)  # within what Adam's steps can do

    liar = Liar(setup, 1, trained_on, phase="unlearn")
    _, (refused,) = erased(setup, 1)
    assert (refused.status, refused.method) == ("done", "not")
    assert said(setup, "it trained instead of unlearning: the cosine with its last update is 1.00")


class Empty(Liar):
    """A liar that says that it has no example."""

    def spoil(self, reply: Message) -> list[Message]:
        lied = super().spoil(reply)
        lies = self.now.startswith(self.phase) and reply.has_content() and wire.PARAMS in reply.content
        return reworded(examples=0)(reply) if lies else lied


def noise(_start: Params, honest: Params) -> Params:
    torch.manual_seed(1)
    return {n: 1e4 * torch.randn_like(p) for n, p in honest.items()}


@pytest.mark.parametrize("closed", [False, True])
def test_a_leaver_that_says_it_has_no_examples_is_judged_all_the_same(closed: bool, make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        if closed:
            close(setup)
        Empty(setup, 1, noise, phase="unlearn")
    settings: dict[str, Any] = {"recover_rounds": 0, "method": {"name": "fedau"}}
    lost, (served,) = erased(victim, 1, check_members=False, **settings)
    assert (served.status, served.fallback) == ("done", False)
    assert max(float(p.abs().max()) for p in lost.params.values()) > 1e3, "its noise is the model of all"
    kept, (refused,) = erased(guarded, 1, **settings)
    assert (refused.status, refused.method, refused.fallback) == ("done", "not", True)
    assert max(float(p.abs().max()) for p in kept.params.values()) < 1e3
    assert said(guarded, "it answers without an example that counts")


def test_a_leaver_of_a_closed_federation_cannot_say_that_it_has_one_example(make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        close(setup)
        Liar(setup, 3, lambda start, honest: add(start, sub(honest, start), 0.1), phase="unlearn", examples=1)
    _, (served,) = erased(victim, 3, recover_rounds=0, check_members=False)
    assert (served.status, served.fallback) == ("done", False)
    _, (refused,) = erased(guarded, 3, recover_rounds=0)
    assert (refused.status, refused.method, refused.fallback) == ("done", "not", True)
    assert said(guarded, "it says that it has 1 examples, and it was enrolled with 30 that are not erased")


def test_a_site_that_is_revoked_while_it_answers_does_not_get_past_the_judge(make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        close(setup)
        liar = Liar(setup, 1, noise, phase="unlearn")
        node = setup.node_of(1)

        def revoked(reply: Message, setup: Setup = setup, liar: Liar = liar) -> list[Message]:
            if liar.now.startswith("unlearn"):
                close(setup, revoked=(1,))
            return liar.spoil(reply)

        node.spoil = revoked
    settings: dict[str, Any] = {"recover_rounds": 0, "method": {"name": "fedau"}}
    lost, _ = erased(victim, 1, check_members=False, **settings)
    assert max(float(p.abs().max()) for p in lost.params.values()) > 1e3
    began = guarded.time.time
    kept, (refused,) = erased(guarded, 1, **settings)
    assert (refused.status, refused.method, refused.fallback) == ("done", "not", True)
    assert max(float(p.abs().max()) for p in kept.params.values()) < 1e3
    assert "takes no part any more" in refused.reason
    assert guarded.time.time - began < 600, "nobody waits for it until the deadline"


def test_zeros_for_a_measurement_leave_the_model_as_it_was_and_the_fallback_serves(make: MakeWorld) -> None:
    setup = make()
    Liar(setup, 1, lambda _, honest: {n: torch.zeros_like(p) for n, p in honest.items()}, phase="unlearn")
    _, (refused,) = erased(setup, 1, method={"name": "ssd"})
    assert (refused.status, refused.method) == ("done", "not")
    assert refused.reason == "the model after the unlearning is the one before it"


@pytest.mark.parametrize("together", [False, True])
def test_a_partner_that_does_nothing_does_not_void_anothers_erasure(together: bool, make: MakeWorld) -> None:
    victim, guarded = make("victim"), make("guarded")
    for setup in (victim, guarded):
        Liar(setup, 3, sent_back, phase="unlearn", examples=HUGE)
    kept, served = erased(victim, 1, 3, together=True, check_members=False, recover_rounds=0)
    assert [e.status for e in served] == ["done", "done"]
    gone, entries = erased(guarded, 1, 3, together=together, recover_rounds=0)
    assert [(e.client, e.method) for e in entries] == [(1, "fedquit"), (3, "not")]
    first = next(e for e in entries if e.client == 1)
    assert not first.fallback
    assert forget_accuracy(victim, kept.params, 1) > forget_accuracy(guarded, gone.params, 1) + 20


def test_requests_that_cancel_each_other_are_served_one_by_one(make: MakeWorld) -> None:
    setup = make()
    _, entries = erased(setup, 1, 3, together=True)
    assert [(e.client, e.status, e.method) for e in entries] == [(1, "done", "fedquit"), (3, "done", "fedquit")]
    assert said(setup, "r0001, r0002 are served one by one: together they cancel a part of each other's unlearning")


def test_nothing_that_judged_a_client_outlives_it(make: MakeWorld) -> None:
    setup = make()
    after_training(setup)
    memory = setup.folder / "state" / "memory"
    of_client = [p.name for p in memory.iterdir() if "update%2F1" in p.name]
    assert of_client, "one update is kept while the client is there"
    setup.outbox(1).file()
    after_training(setup)
    assert not [p.name for p in memory.iterdir() if "update%2F1" in p.name]
    assert [p.name for p in memory.iterdir() if "update%2F0" in p.name]
