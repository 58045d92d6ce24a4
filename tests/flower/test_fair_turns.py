# SPDX-License-Identifier: Apache-2.0
"""One client never stops the others: silence, floods, too few that stay, and requests that are taken back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Message

from fedquit.core import ClientId
from fedquit.flower import sqlite_wipe
from fedquit.flower.fairness import TRIES, Queue
from fedquit.flower.identity import fingerprint
from fedquit.flower.ledger import Erasure
from fedquit.flower.notices import write_notices
from fedquit.flower.outbox import Inbox, last_contact
from fedquit.flower.server import ServerResult
from fedquit.flower.token_bucket import TokenBucket
from flower.grid_world import MakeWorld, Setup, lines
from flower.test_life import (
    Killed,
    asks_for_more,
    at_task,
    few,
    files_once,
    gone,
    killed_everywhere,
    old_models,
    same,
    seen,
    words_of,
)
from flower.test_member_checks import close

pytestmark = pytest.mark.flower
__all__ = ["few"]  # a fixture of another module

HOUR = 3600.0
DAY = 24 * HOUR
TRAIN: dict[str, Any] = {"rounds": 4, "batch_size": 8, "lr": 0.1}


def rounds_of(setup: Setup) -> int:
    """How many rounds of any kind were run."""
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    return len({(e["phase"], e["round"]) for e in events if e["event"] == "reply"})


# Silence -------------------------------------------------------------------------------------------------------------


def asks_and_is_silent(setup: Setup, client: ClientId, requests: int) -> None:
    """The client is online and answers everything but the tasks of its own requests."""
    for place in range(requests):
        setup.outbox(client).file(positions=[place])

    def before(message: Message) -> None:
        if message.metadata.message_type == "train.fedquit":
            words = words_of(message)
            silent = words["client"] == client and words["serving"]["kind"] != ""
            setup.node_of(client).spoil = gone if silent else lambda reply: [reply]

    setup.grid.before = before


def test_sample_requests_with_silence_in_between_do_not_stall_the_others(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    asks_and_is_silent(setup, 1, 8 - 1)
    began = setup.time.time
    found = setup.serve(setup.config(train={**TRAIN, "rounds": 6}))
    assert found.rounds == 6
    said = list(lines(setup.folder))
    assert any("did not answer: r0001, r0002" in line and "training goes on" in line for line in said)
    trained = next(i for i, line in enumerate(said) if line.startswith("training round 6"))
    served = next(i for i, line in enumerate(said) if line.endswith(" done"))
    assert trained < served, "nobody waited for it: training was over first"
    assert setup.time.time - began < 2 * HOUR, "it was 16 hours"
    assert {(e.status, e.fallback) for e in found.erasures} == {("done", True)}, "its deadline came, and the fallback"
    assert len({e.attempts for e in found.erasures}) == 1, "they were served as one"
    assert {e.status for e in setup.outbox(1).entries()} == {"served"}


def test_training_goes_on_without_a_client_that_leaves_and_is_away(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    Inbox(setup.folder / "state").file("hospital-1")
    setup.node_of(1).online = False
    setup.trained_by()
    found = setup.serve(setup.config(train=TRAIN))
    assert found.rounds == 4
    said = list(lines(setup.folder))
    assert said.index("training round 4 of 4 (4 replies)") < next(i for i, s in enumerate(said) if "r0001 start" in s)
    assert seen(found) == [(1, "done", "not", True)]
    assert "did not answer before the deadline" in found.erasures[0].reason


@pytest.mark.parametrize("closed", [False, True])
def test_a_leaver_that_is_away_does_not_stall_training_that_needs_all_sites(closed: bool, make: MakeWorld) -> None:
    setup = make()
    if closed:
        close(setup)
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}, min_nodes=5))
    Inbox(setup.folder / "state").file("hospital-1")
    setup.node_of(1).online = False
    began = setup.time.time
    found = setup.serve(setup.config(train=TRAIN, min_nodes=5))
    assert found.rounds == 4
    assert seen(found) == [(1, "done", "not", True)]
    said = list(lines(setup.folder))
    assert said.index("training round 4 of 4 (4 replies)") < next(i for i, s in enumerate(said) if "r0001 start" in s)
    assert setup.time.time - began < 1.2 * HOUR


def test_a_site_that_was_revoked_is_erased_at_once(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    close(setup, revoked=(4,))
    Inbox(setup.folder / "state").file("hospital-4")
    began = setup.time.time
    found = setup.serve(setup.config(train={**TRAIN, "rounds": 1}, deadline=2 * HOUR))
    assert seen(found) == [(4, "done", "not", True)]
    assert found.erasures[0].reason == "client 4 (hospital-4) takes no part any more"
    assert setup.time.time - began < 60, "it can never answer"


def test_others_are_heard_while_one_that_is_away_is_waited_for(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(train={**TRAIN, "rounds": 1}, deadline=2 * HOUR)
    setup.serve(config)
    Inbox(setup.folder / "state").file("hospital-1")
    setup.node_of(1).online = False
    began = setup.time.time
    filed: list[float] = []

    def wake(now: float) -> None:
        if now > began + 60 and not filed:
            filed.append(now)
            setup.outbox(2).file(positions=[0])

    setup.time.wakes.append(wake)
    found = setup.serve(config)
    other = next(e for e in found.erasures if e.client == 2)
    assert other.status == "done"
    assert other.attempts[0] - filed[0] < 600, "it was the deadline of the other"


def test_a_client_that_does_not_answer_is_left_alone_between_rounds(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    state = setup.folder / "state"
    asked: list[int] = []

    def gives_notice(_client: ClientId) -> None:  # of one more request in every round, and never answers about any
        asked.append(1)
        ids = frozenset(f"{i:016x}" for i in range(len(asked)))
        write_notices(state, {fingerprint(b"public key of 1"): ids})
        setup.node_of(1).spoil = lambda reply: [] if reply.metadata.message_type.startswith("query") else [reply]

    at_task(setup, "train", gives_notice)
    setup.serve(setup.config(train={**TRAIN, "rounds": 6}))
    mute = [line for line in lines(setup.folder) if "did not say who it is" in line]
    assert 1 <= len(mute) <= 3, "not once a round"


# The floor -----------------------------------------------------------------------------------------------------------


def test_the_floor_of_a_closed_federation_binds_its_cohorts(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    with pytest.raises(Exception, match="clients-per-round is 1, and the floor of this closed federation is 3"):
        setup.serve(setup.config(train={**TRAIN, "clients_per_round": 1}))
    assert setup.trained_by() == set()
    assert setup.serve(setup.config(train={**TRAIN, "clients_per_round": 3})).rounds == 4
    for client in (1, 2, 3, 4):
        setup.node_of(client).spoil = lambda reply: [] if reply.metadata.message_type.startswith("train") else [reply]
    with pytest.raises(Exception, match="and the floor is 3"):
        setup.serve(setup.config(train={**TRAIN, "clients_per_round": 3, "rounds": 5}, min_replies=1, timeout=30.0))


def test_a_federation_that_was_closed_is_never_open_again(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config())
    (setup.folder / "state" / "sites.json").unlink()
    setup.trained_by()
    with pytest.raises(Exception, match=r"holds a closed federation and has no sites.json"):
        setup.serve(setup.config(train=TRAIN))
    assert setup.trained_by() == set()
    close(setup)
    assert setup.serve(setup.config(train=TRAIN)).rounds == 4


def test_a_list_that_vanishes_in_a_run_ends_it(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    at_task(setup, "train", lambda _: (setup.folder / "state" / "sites.json").unlink(missing_ok=True))
    with pytest.raises(Exception, match=r"holds a closed federation and has no sites.json"):
        setup.serve(setup.config(train=TRAIN))


def test_a_damaged_list_that_is_written_again_in_a_moment_ends_nothing(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    path = setup.folder / "state" / "sites.json"
    sleep = setup.time.sleep

    def damage(_: ClientId) -> None:
        path.write_bytes(path.read_bytes()[:100])

    def mended(seconds: float) -> None:
        sleep(seconds)
        close(setup)  # as `serve` does

    at_task(setup, "train", damage)
    setup.time.sleep = mended  # type: ignore[method-assign]
    assert setup.serve(setup.config(train=TRAIN)).rounds == 4


# Files that are kept twice, and traces -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ledger.json", "ledger.copy.json", "clients.json", "clients.copy.json"])
def test_a_damaged_copy_is_told_of_and_written_anew(name: str, make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    path = setup.folder / "state" / name
    path.write_text("{")
    setup.serve(setup.config())
    twin = path.with_name(name.replace(".copy", "") if ".copy" in name else name.replace(".json", ".copy.json"))
    assert json.loads(path.read_text()) == json.loads(twin.read_text())
    assert sum(name in line and "look after the disk" in line for line in lines(setup.folder)) == 1


def test_a_request_is_not_done_while_flowers_database_cannot_be_wiped(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_wipe, "WAIT", 0.01)
    monkeypatch.setattr(sqlite_wipe, "PAUSE", 0.01)
    setup = make()
    setup.serve(setup.config())
    database = setup.folder / "state" / sqlite_wipe.FOLDER / sqlite_wipe.DATABASE
    database.parent.mkdir(parents=True)
    setup.outbox(1).file()
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("CREATE TABLE message (content TEXT)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Exception, match="r0001 cannot be finished"):
            setup.serve(setup.config())
        ledger = json.loads((setup.folder / "state" / "ledger.json").read_text())
        assert (ledger["phase"]["kind"], ledger["entries"][0]["status"]) == ("erase", "recovered")
        other.execute("ROLLBACK")
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "fedquit", False)]


def test_a_mute_client_is_warned_of_once_a_day(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.node_of(2).online = False
    for hours in (25, 1, 1, 24):
        setup.time.time += hours * HOUR
        setup.serve(setup.config())
    warned = [line for line in lines(setup.folder) if "client 2 (hospital-2) was last here" in line]
    assert [line.partition(" days")[0][-1] for line in warned] == ["1", "2"]


def test_several_clients_that_are_away_are_waited_for_together_and_served_as_they_come(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    for client in (1, 3):
        Inbox(setup.folder / "state").file(f"hospital-{client}")
        setup.node_of(client).online = False
    back = setup.time.time + 600
    setup.time.wakes.append(lambda now: setattr(setup.node_of(3), "online", now > back))
    found = setup.serve(setup.config())
    outcomes = {client: (status, method) for client, status, method, _ in seen(found)}
    assert outcomes == {3: ("done", "fedquit"), 1: ("done", "not")}
    assert any("r0001, r0002 wait for clients that are away" in line for line in lines(setup.folder))
    assert setup.time.time < back + 1.2 * HOUR


def test_a_silent_client_that_comes_back_in_time_is_served_by_the_method_and_once(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    setup.outbox(1).file()
    silences: list[int] = []

    def dies_once(_client: ClientId) -> None:
        silences.append(1)
        setup.node_of(1).spoil = gone if len(silences) == 1 else lambda reply: [reply]

    before = setup.grid.before

    def watch(message: Message) -> None:
        before(message)
        if message.metadata.message_type == "train.fedquit" and words_of(message)["serving"]["kind"] == "client":
            dies_once(words_of(message)["client"])

    setup.grid.before = watch
    found = setup.serve(setup.config(train=TRAIN, timeout=30.0))
    assert seen(found) == [(1, "done", "fedquit", False)]
    history = [s for s, _ in found.erasures[0].history]
    assert history == ["received", "started", "received", "started", "unlearned", "recovered", "done"]
    assert len(found.erasures[0].attempts) == 2
    phases = {words for words in lines(setup.folder) if "training goes on" in words}
    assert len(phases) == 1
    assert old_models(setup, found.params) == ["model.safetensors", "state.copy.safetensors", "state.safetensors"]


def test_who_is_punctual_is_served_before_who_is_silent(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    for client in (1, 3):
        setup.outbox(client).file()
    setup.node_of(3).spoil = gone
    found = setup.serve(setup.config(train=TRAIN))
    by_client = {e.client: e for e in found.erasures}
    assert (by_client[1].status, by_client[1].method) == ("done", "fedquit")
    assert (by_client[3].status, by_client[3].fallback) == ("done", True)
    assert len(by_client[1].attempts) == 1, "the first start was no try of its own"


@pytest.mark.slow
def test_killed_while_a_silent_client_waits_the_server_ends_as_if_nothing_had_happened(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lived(name: str, kill: bool) -> ServerResult:
        setup = make(name)
        setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
        asks_and_is_silent(setup, 1, 2)
        config = setup.config(train=TRAIN)
        if kill:
            before = setup.grid.before

            def dies(message: Message) -> None:
                before(message)
                if (
                    message.metadata.message_type == "train.fedquit"
                    and words_of(message)["address"]["phase"] == "train-1"
                ):
                    raise Killed

            setup.grid.before = dies
            with pytest.raises(Killed):
                setup.serve(config)
            setup.grid.before = before
        return setup.serve(config)

    straight, killed = lived("straight", False), lived("killed", True)
    assert seen(straight) == seen(killed)
    assert same(straight.params, killed.params)


# Floods --------------------------------------------------------------------------------------------------------------


def test_a_flood_of_sample_requests_costs_a_few_erasures_and_then_one_a_day(make: MakeWorld) -> None:
    setup = make()
    usual = make("usual")
    for w in (setup, usual):
        w.node_of(1).spoil = asks_for_more("samples", 16)
    usual.serve(usual.config(method={"name": "not"}, recover_rounds=3))
    assert rounds_of(usual) <= 2 + 3 * 3, "it was 84"
    config = setup.config(method={"name": "not"}, recover_rounds=3, request_burst=1)
    found = setup.serve(config)
    assert found.rounds == 2
    assert rounds_of(setup) == 2 + 3
    assert len({when for e in found.erasures for when in e.attempts}) == 1
    assert any(e.status == "received" for e in found.erasures), "the others wait"
    assert found.next_time is not None
    assert 0 < found.next_time - setup.time.time <= DAY
    before = rounds_of(setup)
    again = setup.serve(config)
    assert rounds_of(setup) == before, "a run before that day does nothing"
    setup.time.time = found.next_time + 1
    later = setup.serve(config)
    assert rounds_of(setup) - before == 3, "one erasure for all that waited"
    assert sum(e.status == "done" for e in later.erasures) >= sum(e.status == "done" for e in again.erasures) + 16


def test_a_flood_keeps_nobody_else_from_being_forgotten(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "not"}, recover_rounds=1)
    setup.serve(config)
    setup.node_of(1).spoil = asks_for_more("samples", 16)
    setup.outbox(3).file(positions=[0])
    found = setup.serve(setup.config(method={"name": "not"}, recover_rounds=1, together=False))
    order = [e.client for e in sorted(found.erasures, key=lambda e: e.attempts or (9e9,)) if e.attempts]
    assert 3 in list(dict.fromkeys(order))[:2], "it has the next turn but one at the latest"
    assert next(e.status for e in found.erasures if e.client == 3) == "done"


def test_the_requests_of_one_client_for_samples_are_served_as_one(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    for places in ([0, 1], [5], [7, 8]):
        setup.outbox(3).file(positions=places)
    before = rounds_of(setup)
    found = setup.serve(setup.config())
    assert [s for _, s, _, _ in seen(found)] == ["done"] * 3
    assert rounds_of(setup) - before == 2, "one unlearning and one recovery"
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    told = {e["phase"]: e["examples"] for e in events if e["event"] == "reply" and e["client"] == 3}
    assert (told["unlearn-0"], told["recover-0"]) == (5, 25), "with the samples of all three"


def entry(client: ClientId, **changes: Any) -> Erasure:
    made = Erasure(f"r{client:04d}", client, "client", f"{client:x}", "client", True, since=1000.0)
    return dataclasses.replace(made, **changes)


def queue(*entries: Erasure, now: float = 1000.0, here: set[ClientId] | None = None, patient: bool = False) -> Queue:
    online = {e.client for e in entries} if here is None else here
    return Queue(entries, online, now, TokenBucket(3, DAY), HOUR, 600.0, patient)


def test_when_a_request_can_be_started() -> None:
    new = entry(1)
    assert queue(new).ready() == [new]
    assert queue(new, here=set()).ready() == [], "training goes on without it"
    assert queue(new, here=set()).next_time() == 1000.0 + HOUR
    assert queue(new, here=set(), patient=True).ready() == [new], "nobody waits for it"
    assert queue(new, here=set(), now=1000.0 + HOUR).ready() == [new]
    assert queue(new, here=set(), now=1000.0 + HOUR).is_overdue(new)
    assert not queue(new, now=1000.0 + 9 * HOUR).is_overdue(new), "who is here and was never tried is tried"
    tried = entry(1, attempts=(1000.0,))
    assert queue(tried, now=1600.0).ready() == []
    assert queue(tried, now=1000.0 + 1200.0).ready() == [tried]
    spent = entry(1, id="r0009", status="done", attempts=(1001.0, 1002.0))  # with the first, all tokens
    assert queue(spent, tried, now=1000.0 + 1200.0).ready() == [], "its bucket is empty"
    assert queue(spent, tried, now=1002.0 + DAY).ready() == [tried]
    often = entry(1, attempts=tuple(1000.0 + i for i in range(TRIES)))
    assert queue(often, now=1000.0 + HOUR / 2).ready() == []
    other = entry(2)
    assert queue(tried, other, now=9e5).ready() == [other, tried], "who was served longest ago comes first"
    assert queue(entry(2, kind="samples"), tried, now=9e5).ready()[0] == tried, "whole clients before samples"
    ahead = entry(1, id="r0009", status="done", attempts=(9e7, 9e7, 9e7))  # of a clock that was a thousand days ahead
    assert queue(ahead, new).ready() == [new], "nobody waits for that day"
    received = entry(1, since=9e7)
    assert not queue(received, here=set(), now=HOUR - 1).is_overdue(received)
    assert queue(received, here=set(), now=HOUR).is_overdue(received), "nor for a deadline after it"


def test_a_clock_that_is_set_back_a_little_makes_no_request_overdue() -> None:
    """A time server's correction, in a run that is older than a deadline."""
    for tried in ((), (DAY,)):
        fresh = entry(1, since=DAY, attempts=tried)
        for back in (0.0, 5.0, 300.0):
            assert not dataclasses.replace(queue(fresh, here=set(), now=DAY - back), began=0.0).is_overdue(fresh)
        after = dataclasses.replace(queue(fresh, here=set(), now=DAY + HOUR), began=0.0)
        assert after.is_overdue(fresh), "its deadline is where it was"


# Too few that stay ---------------------------------------------------------------------------------------------------


def test_an_erasure_that_leaves_fewer_than_the_floor_withdraws_the_model_and_training_pauses(make: MakeWorld) -> None:
    setup = make()
    close(setup, revoked=(3, 4))
    config = setup.config(min_nodes=1, method={"name": "federaser"})
    before = setup.serve(config).params
    assert list((setup.folder / "state" / "memory").iterdir())
    setup.outbox(1).file()
    found = setup.serve(setup.config(min_nodes=1, method={"name": "federaser"}, train=TRAIN))
    assert seen(found) == [(1, "done", "withdrawal", True)]
    assert "2 may take part, and the floor is 3: the model was withdrawn" in found.erasures[0].reason
    assert found.paused == "training pauses: 2 may take part, and the floor is 3; it goes on when more are enrolled"
    assert found.paused in list(lines(setup.folder)), "the operator is told"
    assert [e.status for e in setup.outbox(1).entries()] == ["served"], "and so is the owner"
    assert json.loads((setup.folder / "state" / "result.json").read_text())["paused"] == found.paused
    assert old_models(setup, before) == []
    assert not (setup.folder / "state" / "model.safetensors").exists()
    assert [p for p in (setup.folder / "state" / "memory").iterdir() if p.stat().st_size] == []
    setup.trained_by()
    assert setup.serve(setup.config(min_nodes=1, train=TRAIN)).rounds == 0
    assert setup.trained_by() == set(), "nobody is asked to train"
    close(setup, revoked=(4,))  # another is enrolled
    went_on = setup.serve(setup.config(min_nodes=1, train=TRAIN))
    assert (went_on.rounds, went_on.paused) == (4, "")
    assert setup.trained_by() == {0, 2, 3}, "from the beginning, and never the one that left"


def test_the_quorum_is_a_fraction_of_the_sites_and_never_falls_below_the_floor(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    for client in (2, 3, 4):
        setup.node_of(client).online = False
    with pytest.raises(Exception, match="the round needs 3 nodes"):
        setup.serve(setup.config(min_nodes=1, wait=50.0))
    with pytest.raises(Exception, match="the round needs 4 nodes"):
        setup.serve(setup.config(min_nodes=1, wait=50.0, quorum=0.8))
    assert setup.serve(setup.config(min_nodes=1, wait=50.0, floor=2, quorum=0.4)).rounds == 2
    setup.outbox(1).file()
    for client in (2, 3, 4):
        setup.node_of(client).online = True
    assert seen(setup.serve(setup.config(min_nodes=1))) == [(1, "done", "fedquit", False)]
    setup.node_of(4).online = False
    setup.node_of(3).online = False
    with pytest.raises(Exception, match="the round needs 3 nodes"):  # of four that stay, not one less
        setup.serve(setup.config(min_nodes=1, wait=50.0, train=TRAIN))


def test_revoked_sites_leave_the_quorum(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    for client in (3, 4):
        setup.node_of(client).online = False
    with pytest.raises(Exception, match="the round needs 5 nodes"):
        setup.serve(setup.config(min_nodes=5, wait=50.0))
    close(setup, revoked=(3, 4))
    assert setup.serve(setup.config(min_nodes=5, wait=50.0)).rounds == 2


def test_a_revocation_takes_effect_within_the_round(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    asked: list[ClientId] = []

    def revokes(client: ClientId) -> None:
        asked.append(client)
        if len(asked) == 7:  # in the middle of the second round
            close(setup, revoked=(4,))

    at_task(setup, "train", revokes)
    setup.serve(setup.config(train=TRAIN))
    setup.grid.before = lambda message: None
    assert asked.count(4) <= 2, "it is asked for nothing in the rounds that follow"
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    counted = [e["examples"] for e in events if e["event"] == "reply" and e["client"] == 4]
    assert counted[1:] in ([], [0]), "and its reply to the round that was under way counts for nothing"


def test_fewer_replies_than_the_floor_are_never_averaged(make: MakeWorld) -> None:
    setup = make()
    close(setup, revoked=(3, 4))
    before = setup.serve(setup.config(min_nodes=1)).params
    setup.node_of(1).spoil = gone
    with pytest.raises(Exception, match=r"2 of 3 clients gave an answer that counts .* the floor is 3"):
        setup.serve(setup.config(min_nodes=1, train=TRAIN))
    assert "model.safetensors" in old_models(setup, before), "the model is as it was"
    setup.node_of(1).spoil = lambda reply: [reply]
    at_task(setup, "train", lambda _: close(setup, revoked=(2, 3, 4)))  # while the round is under way
    found = setup.serve(setup.config(min_nodes=1, train=TRAIN))
    assert (found.rounds, found.paused[:15]) == (2, "training pauses")


@pytest.mark.parametrize("phase", ["unlearn-0", "recover-0"])
def test_sites_that_are_revoked_while_a_request_is_served_do_not_keep_it_open(phase: str, make: MakeWorld) -> None:
    setup = make()
    close(setup)
    config = setup.config(recover_rounds=2, method={"name": "pga"})
    setup.serve(config)
    setup.outbox(1).file()
    at_task(setup, phase, lambda _: close(setup, revoked=(2, 3, 4)))
    found = setup.serve(config)
    assert seen(found) == [(1, "done", "withdrawal", True)]
    assert found.paused
    assert [e.status for e in setup.outbox(1).entries()] == ["served"]


@pytest.mark.slow
def test_killed_at_a_write_while_the_model_is_withdrawn(few: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_everywhere(few, monkeypatch, every=3, floor=3)


# Receipts, notices and requests that are taken back ------------------------------------------------------------------


def test_a_request_that_waits_is_receipted_and_one_that_nobody_received_is_not(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(request_burst=1)
    setup.serve(config)
    contact = last_contact(setup.home(1))
    assert contact is not None
    assert setup.outbox(1).file(positions=[0]).receipt is None
    setup.serve(config)
    setup.outbox(1).file(positions=[1])
    found = setup.serve(config)
    first, second = setup.outbox(1).entries()
    assert (first.status, second.status) == ("served", "pending"), "its next turn is tomorrow"
    assert second.receipt is not None
    assert (second.receipt.number, second.receipt.by) == ("r0002", contact.federation)
    assert second.receipt.at == found.erasures[1].history[0][1]
    assert "received" in second.received


def test_a_request_is_taken_back_until_it_is_served(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(request_burst=1, request_every=DAY)
    setup.serve(config)
    setup.outbox(1).file(positions=[0])
    setup.serve(config)
    waits = setup.outbox(1).file(positions=[1])
    setup.serve(config)
    setup.outbox(1).withdraw(waits.id)
    found = setup.serve(config)
    assert [e.status for e in found.erasures] == ["done", "withdrawn"]
    assert [e.status for e in setup.outbox(1).entries()] == ["served", "withdrawn"]
    setup.time.time += 2 * DAY
    again = setup.serve(setup.config(train=TRAIN))
    assert [e.status for e in again.erasures] == ["done", "withdrawn"]
    assert again.erasures[1].told


def test_a_request_that_is_taken_back_too_late_is_served(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    filed = setup.outbox(1).file(positions=[0, 1])
    at_task(setup, "unlearn-0", lambda _: setup.outbox(1).withdraw(filed.id))
    found = setup.serve(setup.config())
    assert [e.status for e in found.erasures] == ["done"]
    assert [e.status for e in setup.outbox(1).entries()] == ["served"]


def test_a_request_that_never_reached_the_server_is_taken_back_and_nothing_is_forgotten(make: MakeWorld) -> None:
    setup = make()
    before = setup.serve(setup.config()).params
    setup.outbox(1).withdraw(setup.outbox(1).file().id)
    found = setup.serve(setup.config())
    assert same(found.params, before)
    assert found.erased == frozenset()
    assert [e.status for e in setup.outbox(1).entries()] == ["withdrawn"]
    setup.outbox(1).file()
    assert setup.serve(setup.config()).erased == {1}, "and it may ask again"


def test_the_operator_takes_a_request_of_his_own_back(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    inbox = Inbox(setup.folder / "state")
    inbox.file("hospital-1")
    setup.node_of(1).online = False

    def takes_back(_client: ClientId) -> None:
        if not list(inbox.waiting()) and "r0001" in (setup.folder / "state" / "ledger.json").read_text():
            inbox.withdraw("r0001")

    at_task(setup, "train", takes_back)
    found = setup.serve(setup.config(train=TRAIN))
    assert [e.status for e in found.erasures] == ["withdrawn"]
    assert found.erased == frozenset()


def test_a_notice_lets_the_server_ask_a_client_that_is_not_in_the_cohort(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    one_by_one = {**TRAIN, "clients_per_round": 1}
    state = setup.folder / "state"
    asked: list[ClientId] = []

    def notices(client: ClientId) -> None:
        asked.append(client)
        others = [c for c in setup.data.clients if c not in asked]
        if len(asked) == 1:
            filed = files_once(setup, others[0])
            filed(client)
            (entry,) = setup.outbox(others[0]).entries()
            write_notices(state, {fingerprint(f"public key of {others[0]}".encode()): frozenset([entry.id])})

    at_task(setup, "train", notices)
    found = setup.serve(setup.config(train=one_by_one, floor=1))
    assert [e.status for e in found.erasures] == ["done"]
    said = list(lines(setup.folder))
    asks = next(i for i, line in enumerate(said) if "asks to be forgotten" in line)
    assert not any(line.startswith("training round 2") for line in said[:asks]), "at once, and not at the end"


def test_a_whole_federation_that_was_down_for_a_year_serves_the_request_that_waited(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    setup.outbox(1).file()
    setup.outbox(2).file(positions=[0, 1])

    def stopped(_client: ClientId) -> None:
        raise Killed

    at_task(setup, "unlearn-0", stopped)
    with pytest.raises(Killed):
        setup.serve(setup.config(train={**TRAIN, "rounds": 1}))
    setup.grid.before = lambda message: None
    setup.time.time += 365 * DAY
    for node in setup.grid.nodes.values():
        node.online = False
    back = setup.time.time + 300  # the sites are started some minutes after the server

    def wake(now: float) -> None:
        for node in setup.grid.nodes.values():
            node.online = now > back

    setup.time.wakes.append(wake)
    found = setup.serve(setup.config(train=TRAIN))
    assert seen(found) == [(1, "done", "fedquit", False), (2, "done", "fedquit", False)]
    assert found.rounds == 4, "and training goes on, with more rounds than before"


# One list, with its history ------------------------------------------------------------------------------------------


def test_the_list_of_clients_says_who_joined_left_and_came_back_and_when_each_was_last_here(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.serve(setup.config())
    close(setup, revoked=(4,))
    setup.node_of(2).online = False
    setup.time.time += 3 * DAY
    setup.serve(setup.config(floor=2))
    close(setup)
    setup.serve(setup.config())
    listed = json.loads((setup.folder / "state" / "clients.json").read_text())
    histories = {m["name"]: [what for what, _ in m["history"]] for m in listed}
    assert histories["hospital-0"] == ["joined"]
    assert histories["hospital-1"] == ["joined", "forgotten"]
    assert histories["hospital-4"] == ["joined", "revoked", "returned"]
    last = json.loads((setup.folder / "state" / "seen.json").read_text())
    assert setup.time.time - last["0"] < DAY < setup.time.time - last["2"]
    assert any("client 2 (hospital-2) was last here 3 days ago" in line for line in lines(setup.folder))
    assert not any("client 1 (hospital-1) was last here" in line for line in lines(setup.folder))
