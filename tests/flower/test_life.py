# SPDX-License-Identifier: Apache-2.0
"""The life of a federation that forgets: requests come in, are served once, and nobody who was forgotten comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedquit.core import ClientId, Params
from fedquit.data.federated import FederatedData
from fedquit.errors import InputError, RequestError, StoreError
from fedquit.flower import intake, wire
from fedquit.flower.client import ClientData, erasable
from fedquit.flower.intake import MOST_REQUESTS
from fedquit.flower.outbox import Inbox
from fedquit.flower.presence import NodesMissing
from fedquit.flower.server import ServerResult
from fedquit.flower.twice import copy_of, write_json_twice
from fedquit.methods import METHODS
from fedquit.methods.not_ import NoT
from fedquit.models import FunctionalModel
from fedquit.running.store import load_params
from fedquit.utils import files
from flower.grid_world import MakeWorld, Setup, lines

pytestmark = pytest.mark.flower

LONG: dict[str, Any] = {"train": {"rounds": 3, "batch_size": 8, "lr": 0.1}}


def words_of(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(message.content.config_records[wire.ASK]["words"]))
    return found


def at_task(setup: Setup, phase: str, act: Callable[[ClientId], object]) -> None:
    """Act whenever a task of that phase is about to be sent to a client."""

    def before(message: Message) -> None:
        if message.metadata.message_type == "train.fedquit" and words_of(message)["address"]["phase"] == phase:
            act(words_of(message)["client"])

    setup.grid.before = before


def files_once(setup: Setup, client: ClientId, **what: Any) -> Callable[[ClientId], None]:
    def act(_asked: ClientId) -> None:
        if not setup.outbox(client).entries():
            setup.outbox(client).file(**what)

    return act


def seen(outcome: ServerResult) -> list[tuple[ClientId, str, str, bool]]:
    return [(e.client, e.status, e.method, e.fallback) for e in outcome.erasures]


def same(a: Params, b: Params) -> bool:
    return all(torch.equal(a[n], p) for n, p in b.items())


def test_a_request_travels_with_a_reply_is_served_and_training_goes_on_without_the_client(make: MakeWorld) -> None:
    setup = make()
    at_task(setup, "train", files_once(setup, 1))
    asked: list[tuple[str, ClientId]] = []
    filing = setup.grid.before

    def noting(message: Message) -> None:
        filing(message)
        if message.metadata.message_type == "train.fedquit":
            asked.append((words_of(message)["address"]["phase"], words_of(message)["client"]))

    setup.grid.before = noting
    found = setup.serve(setup.config(**LONG))
    assert seen(found) == [(1, "done", "fedquit", False)]
    assert [s for s, _ in found.erasures[0].history] == ["received", "started", "unlearned", "recovered", "done"]
    assert found.erased == {1}
    assert found.rounds == 3, "the rounds that remain are trained"
    by_phase = {p: {c for q, c in asked if q == p} for p, _ in asked}
    others = {0, 2, 3, 4}
    assert by_phase == {"train": others | {1}, "unlearn-0": {1}, "recover-0": others, "train-1": others}
    assert [e.status for e in setup.outbox(1).entries()] == ["served"], "and its owner can see it"
    assert found.erasures[0].told
    assert found.erasures[0].costs["unlearning"]["participations"] == 1


def old_models(setup: Setup, before: Params) -> list[str]:
    """Files of the server that hold the model before."""
    found = []
    for path in sorted((setup.folder / "state").rglob("*.safetensors")):
        flat, _ = load_params(path)
        stored = {n.removeprefix("params:"): p for n, p in flat.items()}
        if stored.keys() >= before.keys() and same(before, {n: stored[n] for n in before}):
            found.append(path.name)
    return found


def test_nothing_from_before_the_unlearning_is_left_on_disk(make: MakeWorld) -> None:
    setup = make()
    before = setup.serve(setup.config()).params
    assert old_models(setup, before) == ["model.safetensors", "state.copy.safetensors", "state.safetensors"]
    setup.outbox(1).file()
    meanwhile: list[list[str]] = []
    at_task(setup, "recover-0", lambda _: meanwhile.append(old_models(setup, before)))
    setup.serve(setup.config())
    looked_at = ["before.copy.safetensors", "before.safetensors"]
    assert meanwhile == [looked_at] * 4, "while it recovers, methods may look back"
    assert old_models(setup, before) == []
    assert [p.name for p in (setup.folder / "state" / "phases").iterdir()] == ["000003"]


def spoil(path: Path) -> None:
    """One bad sector in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 512] = bytes(512)
    path.unlink()  # a model that was loaded from it looks at the old file
    path.write_bytes(content)


@pytest.mark.parametrize("copy", [False, True], ids=["the file", "its copy"])
def test_a_bad_sector_in_a_checkpoint_ends_nothing(copy: bool, make: MakeWorld) -> None:
    straight, setup = make("straight"), make("spoilt")
    expected = [straight.serve(straight.config(train=LONG["train"] | {"rounds": n})) for n in (2, 3)][-1]
    setup.serve(setup.config())
    (path,) = (setup.folder / "state" / "phases").rglob("state.safetensors")
    spoil(copy_of(path) if copy else path)
    for name in ("ledger.json", "clients.json"):
        book = setup.folder / "state" / name
        (copy_of(book) if copy else book).write_bytes(b"\0" * 40)
    found = setup.serve(setup.config(**LONG))
    assert found.rounds == 3
    assert same(found.params, expected.params), "no round is lost or repeated"
    assert any("its copy is used" in line for line in lines(setup.folder)) != copy
    spoil(path)
    spoil(copy_of(path))
    with pytest.raises(StoreError, match="cannot be read, nor its copy: restore the whole state directory") as refusal:
        setup.serve(setup.config(**LONG))
    assert "delete" not in str(refusal.value)


def test_a_bad_sector_after_an_erasure_does_not_bring_the_forgotten_back(make: MakeWorld) -> None:
    setup = make()
    before = setup.serve(setup.config()).params
    setup.outbox(1).file()
    after = setup.serve(setup.config()).params
    (path,) = (setup.folder / "state" / "phases").rglob("state.safetensors")
    spoil(path)
    assert same(setup.serve(setup.config()).params, after)
    assert old_models(setup, before) == []

    second = make("while recovering")
    second.serve(second.config())
    second.outbox(1).file()

    def spoil_before(_: ClientId) -> None:
        spoil(second.folder / "state" / "before.safetensors")
        second.grid.before = lambda message: None

    at_task(second, "recover-0", spoil_before)
    assert seen(second.serve(second.config())) == [(1, "done", "fedquit", False)]
    left = [p.name for p in (second.folder / "state").rglob("before*")]
    assert left == [], "neither of the two"


def test_the_forgotten_never_take_part_again_whatever_happens(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.serve(setup.config())
    setup.trained_by()
    assert setup.serve(setup.config(**LONG)).rounds == 3
    assert setup.trained_by() == {0, 2, 3, 4}
    setup.grid.nodes[99] = dataclasses.replace(setup.node_of(1), id=99)  # the same key behind another node
    del setup.grid.nodes[setup.node_of(1).id]
    setup.serve(setup.config(train={"rounds": 5, "batch_size": 8}))
    assert setup.trained_by() == {0, 2, 3, 4}


def test_a_forgotten_client_refuses_to_work_even_if_it_is_asked(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.serve(setup.config())
    books = json.loads((setup.folder / "state" / "ledger.json").read_text())
    write_json_twice(setup.folder / "state" / "ledger.json", {**books, "erased": []})
    setup.serve(setup.config(**LONG))
    assert any(
        "client 1" in line and "has been forgotten at its owner's request" in line for line in lines(setup.folder)
    )


def test_several_requests_are_served_in_one_round_or_one_after_another(make: MakeWorld) -> None:
    phases: dict[bool, list[str]] = {}
    for together in (True, False):
        setup = make(f"together-{together}")
        config = setup.config(together=together, check_members=not together)  # which would serve these one by one
        setup.serve(config)
        for client in (1, 3):
            setup.outbox(client).file()
        found = setup.serve(config)
        assert seen(found) == [(1, "done", "fedquit", False), (3, "done", "fedquit", False)]
        events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
        names = [e["phase"] for e in events if e["event"] == "reply" and e["phase"] != "train"]
        phases[together] = list(dict.fromkeys(names))
    assert phases[True] == ["unlearn-0", "recover-0"]
    assert phases[False] == ["unlearn-0", "recover-0", "unlearn-1", "recover-1"]


def test_samples_are_forgotten_and_never_used_again_while_the_client_stays(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(0).file(positions=[3, 1, 7])
    found = setup.serve(setup.config())
    assert seen(found) == [(0, "done", "fedquit", False)]
    assert found.erased == frozenset()
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    told = {(e["phase"], e["split"]): e["examples"] for e in events if e["event"] == "reply" and e["client"] == 0}
    assert told == {("train", "all"): 23, ("unlearn-0", "forget"): 3, ("recover-0", "retain"): 20}
    setup.serve(setup.config(**LONG))
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    assert next(e["examples"] for e in events if e.get("phase") == "train-1" and e["client"] == 0) == 20
    clients = json.loads((setup.folder / "state" / "clients.json").read_text())
    assert clients[0]["examples"] == 20


def test_forgotten_samples_are_out_of_the_very_next_round_of_training(make: MakeWorld) -> None:
    setup = make()
    at_task(setup, "train", files_once(setup, 0, positions=[3, 1, 7]))
    setup.serve(setup.config(**LONG))
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    after = [e["examples"] for e in events if e.get("phase") == "train-1" and e["client"] == 0]
    assert after == [20, 20]


def test_a_fraction_of_samples_is_drawn_once_and_written_down(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    filed = setup.outbox(3).file(fraction=0.2)
    setup.serve(setup.config())
    entry = setup.outbox(3).get(filed.id)
    assert entry.status == "served"
    assert len(entry.positions) == 6
    assert len(set(entry.positions)) == 6
    assert max(entry.positions) < 30


def with_first_samples(setup: Setup, client: ClientId, count: int) -> None:
    """From now on the client's data is only its first samples."""
    mine = setup.data.train[client][:count]
    own = ClientData(setup.data.x[mine], setup.data.y[mine], setup.data.dataset.look, mine)
    setup.node_of(client).app = erasable(ClientApp(), model=lambda _: setup.model, data=lambda _: own)


def test_data_that_has_lost_forgotten_samples_is_refused_with_what_to_do(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    filed = setup.outbox(0).file(positions=[19, 20, 22])
    setup.serve(setup.config())
    with_first_samples(setup, 0, 20)
    assert setup.serve(setup.config(**LONG)).rounds == 3
    (said,) = [line for line in lines(setup.folder) if "did not say who it is" in line]
    assert f"{filed.id}.json names sample 22, and this client has only 20 samples now: give it its data" in said


def test_data_that_loses_samples_while_they_are_being_forgotten_is_refused_with_what_to_do(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(0).file(positions=[19, 20, 22])
    at_task(setup, "unlearn-0", lambda _: with_first_samples(setup, 0, 20))
    assert seen(setup.serve(setup.config())) == [(0, "done", "not", True)]
    assert any("it refuses: " in line and "names sample 22, and this" in line for line in lines(setup.folder))


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [([8], "names sample 8, and this client has 8"), (list(range(8)), "every sample that is left")],
)
def test_samples_that_cannot_be_forgotten_are_refused_at_the_client(
    positions: list[int], sentence: str, make: MakeWorld
) -> None:
    setup = make()
    setup.outbox(1).file(positions=positions)
    found = setup.serve(setup.config())
    assert found.erasures == ()
    (entry,) = setup.outbox(1).entries()
    assert entry.status == "refused"
    assert sentence in entry.reason


def test_an_operator_can_file_a_request_by_name_or_key(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    clients = json.loads((setup.folder / "state" / "clients.json").read_text())
    Inbox(setup.folder / "state").file("hospital-4")
    Inbox(setup.folder / "state").file(clients[2]["key"])
    nobody = Inbox(setup.folder / "state").file("nobody")
    found = setup.serve(setup.config())
    assert {(e.client, e.status, e.source) for e in found.erasures} == {
        (4, "done", "operator"),
        (2, "done", "operator"),
    }
    assert list(Inbox(setup.folder / "state").waiting()) == []
    assert any("'nobody' names 0 clients" in line for line in lines(setup.folder))
    kept = setup.folder / "state" / "requests" / f"{nobody.id}.refused"
    assert json.loads(kept.read_text())["client"] == "nobody", "what an operator asked for is never deleted unserved"
    (sentence,) = Inbox(setup.folder / "state").problems()
    assert str(kept) in sentence


def test_a_client_that_is_asked_for_twice_is_forgotten_once(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file(positions=[0])
    setup.outbox(1).file()
    Inbox(setup.folder / "state").file("hospital-1")
    found = setup.serve(setup.config())
    kinds = {(e.source, e.kind): (e.status, e.method) for e in found.erasures}
    assert kinds == {
        ("client", "client"): ("done", "fedquit"),
        ("client", "samples"): ("done", ""),
        ("operator", "client"): ("done", ""),
    }
    assert {e.status for e in setup.outbox(1).entries()} == {"served"}


def test_before_the_first_round_there_is_nothing_to_forget(make: MakeWorld) -> None:
    setup = make()
    setup.outbox(1).file()
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "", False)]
    assert setup.trained_by() == {0, 2, 3, 4}


def test_the_last_client_is_forgotten_by_dropping_the_model(make: MakeWorld) -> None:
    setup = make()
    before = setup.serve(setup.config()).params
    for client in range(5):
        setup.outbox(client).file()
    found = setup.serve(setup.config(floor=1))
    methods = ["fedquit"] * 4 + ["withdrawal"]
    assert [(s, m) for _, s, m, _ in seen(found)] == [("done", method) for method in methods]
    assert "the model was withdrawn" in found.erasures[4].reason
    assert found.erased == set(range(5))
    assert "0 may take part, and the floor is 1" in found.paused
    assert old_models(setup, before) == []
    assert not (setup.folder / "state" / "model.safetensors").exists()
    assert [e.status for c in range(5) for e in setup.outbox(c).entries()] == ["served"] * 5


def test_an_unauthenticated_node_is_refused_unless_that_is_allowed(make: MakeWorld) -> None:
    setup = make(authenticated=False)
    setup.serve(setup.config())
    setup.outbox(1).file()
    found = setup.serve(setup.config())
    assert [(e.client, e.status, e.authenticated) for e in found.erasures] == [(1, "failed", False)]
    assert "allow-unauthenticated" in found.erasures[0].reason
    assert found.erased == frozenset()
    (entry,) = setup.outbox(1).entries()
    assert entry.status == "refused", "and its owner can see it"
    setup.outbox(1).file()
    found = setup.serve(setup.config(allow_unauthenticated=True))
    assert [(e.client, e.status) for e in found.erasures] == [(1, "failed"), (1, "done")]


def test_a_client_that_comes_back_before_its_deadline_is_served_once(make: MakeWorld) -> None:
    setup, plain = make(), make("plain")
    for w in (setup, plain):
        w.serve(w.config())
        w.outbox(1).file()
    gone: list[float] = []

    def dies(_client: ClientId) -> None:
        if not gone:
            gone.append(setup.time.time + 200)
            setup.node_of(1).online = False

    at_task(setup, "unlearn-0", dies)
    setup.time.wakes.append(lambda now: setattr(setup.node_of(1), "online", not gone or now > gone[0]))
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "fedquit", False)]
    asked = [line for line in lines(setup.folder) if "asking client 1 (hospital-1) again" in line]
    assert 5 <= len(asked) <= 8, "it says so about every half minute, not all the time"
    assert setup.time.time < gone[0] + 10, "and notices soon that it is back"
    assert same(found.params, plain.serve(plain.config()).params)


@pytest.mark.parametrize("fallback", ["not", "retrain"])
def test_a_client_that_never_comes_back_is_forgotten_by_the_fallback(fallback: str, make: MakeWorld) -> None:
    setup = make()
    config = setup.config(fallback=fallback, deadline=300.0)
    before = setup.serve(config).params
    setup.outbox(1).file()
    at_task(setup, "unlearn-0", lambda _: setattr(setup.node_of(1), "online", False))
    found = setup.serve(config)
    assert seen(found) == [(1, "done", fallback, True)]
    assert "did not answer before the deadline" in found.erasures[0].reason
    assert found.erased == {1}
    assert 1e9 + 300 <= setup.time.time < 1e9 + 320
    assert not same(found.params, before)
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    asked = [e for e in events if e["event"] == "reply" and "fallback" in e["phase"]]
    assert {e["client"] for e in asked} == {0, 2, 3, 4}
    rounds = {e["phase"]: e["round"] + 1 for e in asked}
    expected = {"recover-0-fallback": 1} if fallback == "not" else {"unlearn-0-fallback": 2}
    assert rounds == expected


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("fault", ["silent", "refused"])
def test_a_client_that_vanishes_takes_the_method_away_from_nobody_else(
    fault: str, samples: bool, make: MakeWorld
) -> None:
    setup = make()
    config = setup.config(deadline=60.0, together=True)
    setup.serve(config)
    for client in (1, 3):
        setup.outbox(client).file(positions=[0, 1] if samples else ())
    setup.node_of(3).spoil = gone if fault == "silent" else not_a_number
    found = setup.serve(config)
    assert seen(found) == [(1, "done", "fedquit", False), (3, "done", "not", True)]
    assert found.erased == (frozenset() if samples else {1, 3})
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    asked = {(e["phase"], e["client"]) for e in events if e["event"] == "reply" and e["phase"] == "unlearn-1"}
    assert asked == {("unlearn-1", 1)}, "on its own, from the model without the other"
    assert found.erasures[0].reason == ""
    assert [s for s, _ in found.erasures[0].history][:4] == ["received", "started", "received", "started"]
    assert [e.status for e in setup.outbox(1).entries()] == ["served"]


def all_nodes_are_away(setup: Setup, seconds: float) -> None:
    """From now on, for so long."""
    back = setup.time.time + seconds

    def wake(now: float) -> None:
        for node in setup.grid.nodes.values():
            node.online = now > back

    wake(0)
    setup.time.wakes.append(wake)


def gone(reply: Message) -> list[Message]:
    return [] if reply.metadata.message_type.startswith("train") else [reply]


def not_a_number(reply: Message) -> list[Message]:
    if wire.PARAMS in reply.content:
        params = wire.params_from_record(reply.content.array_records[wire.PARAMS])
        reply.content[wire.PARAMS] = wire.params_to_record({n: p * float("nan") for n, p in params.items()})
    return [reply]


def test_a_server_that_comes_back_after_the_deadline_still_asks_once(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(deadline=300.0))
    setup.outbox(1).file()
    at_task(setup, "unlearn-0", lambda _: _stop_the_server())
    with pytest.raises(Killed):
        setup.serve(setup.config(deadline=300.0))
    setup.grid.before = lambda message: None
    setup.time.time += 10_000
    assert seen(setup.serve(setup.config(deadline=300.0))) == [(1, "done", "fedquit", False)]


def _stop_the_server() -> None:
    raise Killed


def test_a_leaving_client_whose_answers_cannot_be_used_is_not_asked_for_ever(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.node_of(1).spoil = not_a_number
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "not", True)]
    assert "no answer that can be used, 3 times" in found.erasures[0].reason


def test_a_part_of_a_model_never_becomes_the_model(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "pga"})  # whose answers only the client could foretell
    setup.serve(config)
    setup.outbox(1).file()

    def part(reply: Message) -> list[Message]:
        if wire.PARAMS in reply.content:
            del reply.content.array_records[wire.PARAMS][next(iter(reply.content.array_records[wire.PARAMS]))]
        return [reply]

    setup.node_of(1).spoil = part
    found = setup.serve(config)
    assert seen(found) == [(1, "done", "not", True)]
    assert "has other parameters than expected" in found.erasures[0].reason


def test_what_a_method_does_not_define_is_served_by_the_fallback(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "pga"})
    setup.serve(config)
    setup.outbox(1).file(positions=[0, 1])
    found = setup.serve(config)
    assert seen(found) == [(1, "done", "not", True)]
    assert "PGA forgets whole clients" in found.erasures[0].reason


def test_what_a_method_defines_for_one_client_only_is_served_one_after_another(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "fedosd", "unlearning_rounds": 1})
    setup.serve(config)
    for client in (1, 3):
        setup.outbox(client).file()
    assert seen(setup.serve(config)) == [(1, "done", "fedosd", False), (3, "done", "fedosd", False)]


def test_a_request_that_comes_in_during_recovery_is_served_next(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    at_task(setup, "recover-0", files_once(setup, 2))
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "fedquit", False), (2, "done", "fedquit", False)]
    assert found.erased == {1, 2}


@pytest.mark.parametrize("method", ["retrain", "federaser"])
def test_a_request_in_the_middle_of_training_undoes_as_many_rounds_as_there_were(method: str, make: MakeWorld) -> None:
    setup = make()
    at_task(setup, "train", files_once(setup, 1))
    found = setup.serve(setup.config(method={"name": method}, **LONG))
    assert seen(found) == [(1, "done", method, False)]
    said = [line for line in lines(setup.folder) if line.startswith("unlearning round")]
    assert said == ["unlearning round 0 of 1", "unlearning round 1 of 1"]
    assert found.rounds == 3


@pytest.mark.parametrize("method", ["federaser", "fukd"])
@pytest.mark.parametrize("samples", [False, True])
def test_what_the_server_kept_of_a_client_is_deleted_and_others_can_still_be_served(
    method: str, samples: bool, make: MakeWorld
) -> None:
    setup = make()
    config = setup.config(method={"name": method})
    setup.serve(config)

    assert kept_of(setup, 1)
    setup.outbox(1).file(positions=[0, 2] if samples else ())
    served = "not" if samples else method  # neither is defined for samples, so the fallback serves them
    assert seen(setup.serve(config)) == [(1, "done", served, samples)]
    assert kept_of(setup, 1) == [], "updates that were computed with the forgotten data would bring it back"
    assert kept_of(setup, 2)
    setup.outbox(2).file()
    assert seen(setup.serve(config))[1] == (2, "done", method, False)
    assert kept_of(setup, 2) == []


def kept_of(setup: Setup, client: ClientId) -> list[str]:
    """The files under a client's number at the server, whole or half-written."""
    names = (unquote(p.name) for p in (setup.folder / "state" / "memory").iterdir() if p.stat().st_size)
    return [name for name in names if name.partition("@")[0].endswith(f"/{client}")]


def test_what_another_method_kept_of_a_client_is_deleted_too(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(method={"name": "federaser"}))
    assert kept_of(setup, 1)
    setup.outbox(1).file(positions=[0, 2])
    setup.serve(setup.config())  # the operator has chosen another method
    assert kept_of(setup, 1) == []


def test_a_round_that_was_cut_off_leaves_nothing_of_who_asks_before_anything_is_trained(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    config, write, saved = setup.config(method={"name": "federaser"}), files.write_atomic, list[Path]()

    def cut(path: Path, content: bytes) -> None:
        saved.extend([path] if path.name == "state.safetensors" else [])
        if len(saved) == 2:
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", cut)
        with pytest.raises(Killed):
            setup.serve(config)
    assert kept_of(setup, 1), "the round was not committed, and has been watched"
    setup.outbox(1).file()
    assert setup.serve(config).erasures[0].reason == "nothing had been trained yet"
    assert kept_of(setup, 1) == []


def test_a_write_that_was_killed_half_way_leaves_nothing(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "federaser"})
    setup.serve(config)
    state = setup.folder / "state"
    half = [state / ".before.safetensors.0123456789abcdef"]
    half.append(state / "memory" / ".federaser%2F000000%2F1@000000000000001.safetensors.0123456789abcdef")
    for path in half:
        path.write_bytes(b"somebody's update")
    setup.outbox(1).file()
    assert seen(setup.serve(config)) == [(1, "done", "federaser", False)]
    assert not any(path.exists() for path in half)
    assert kept_of(setup, 1) == []


def test_fukd_does_not_subtract_what_was_deleted(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "fukd"})
    setup.serve(config)
    setup.outbox(1).file(positions=[0, 2])
    setup.serve(config)
    setup.outbox(1).file()
    found = setup.serve(config).erasures[1]
    assert (found.status, found.method, found.fallback) == ("done", "not", True)
    assert "contributed was deleted" in found.reason


def test_two_requests_that_name_the_same_sample(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    for positions in ([0, 1], [1, 2]):
        setup.outbox(0).file(positions=positions)
    assert [e.status for e in setup.serve(setup.config()).erasures] == ["done", "done"]
    assert [e.status for e in setup.outbox(0).entries()] == ["served", "served"]
    setup.serve(setup.config(**LONG))
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    counts = [e["examples"] for e in events if e["event"] == "reply" and e["client"] == 0]
    assert counts[-1] == counts[0] - 3, "three samples never train again"


def test_clients_that_went_without_a_word_keep_nobody_from_being_forgotten(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "retrain"}, floor=1, **LONG)
    setup.serve(setup.config(method={"name": "retrain"}))
    for client in (2, 3, 4):
        setup.node_of(client).online = False
    setup.serve(config)
    setup.outbox(1).file()
    assert seen(setup.serve(config)) == [(1, "done", "retrain", False)]


def fails_to_forget(setup: Setup, client: ClientId, monkeypatch: pytest.MonkeyPatch) -> ServerResult:
    """A client asks to be forgotten and goes silent, and the fallback breaks too."""
    setup.outbox(client).file()
    setup.node_of(client).spoil = gone

    def breaks(*_: object) -> None:
        raise RequestError("it cannot.")

    with monkeypatch.context() as patch:
        patch.setattr(NoT, "unlearn", breaks)
        return setup.serve(setup.config(deadline=60.0))


def test_a_request_that_no_method_could_serve_is_tried_again_when_it_is_filed_again(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    config = setup.config(deadline=60.0)
    before = setup.serve(config).params
    found = fails_to_forget(setup, 1, monkeypatch)
    assert [e.status for e in found.erasures] == ["failed"]
    assert found.erased == {1}, "left out, and not forgotten"
    assert same(found.params, before)
    setup.outbox(1).file()
    again = setup.serve(config)
    assert seen(again)[1] == (1, "done", "not", True)
    assert again.erased == {1}
    assert not same(again.params, before)


def test_samples_that_were_forgotten_do_not_stand_for_a_client_that_was_not(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    config = setup.config(deadline=60.0)
    setup.serve(config)
    setup.outbox(0).file(positions=[0, 1])
    before = setup.serve(config).params
    assert [e.status for e in fails_to_forget(setup, 0, monkeypatch).erasures] == ["done", "failed"]
    setup.outbox(0).file()
    again = setup.serve(config)
    assert seen(again)[2] == (0, "done", "not", True)
    assert not same(again.params, before), "done means that something was done"
    assert again.erased == {0}


@pytest.mark.parametrize("also_whole", [False, True])
def test_a_request_for_samples_does_not_bring_a_client_back_that_was_left_out(
    also_whole: bool, make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    setup.serve(setup.config())
    fails_to_forget(setup, 0, monkeypatch)
    setup.node_of(0).spoil = lambda r: [r]
    setup.outbox(0).file(positions=[0])
    if also_whole:
        setup.outbox(0).file()
    setup.trained_by()
    found = setup.serve(setup.config(**LONG))
    assert found.erased == {0}
    statuses = {e.kind: e.status for e in found.erasures[1:]}
    if also_whole:
        assert statuses == {"samples": "done", "client": "done"}, "whichever came first"
        return
    assert statuses == {"samples": "failed"}
    (reason,) = [e.reason for e in setup.outbox(0).entries() if e.kind == "samples"]
    assert "ask for that again" in reason
    assert setup.trained_by() == {1, 2, 3, 4}


def asks_for_more(kind: str, count: int) -> Callable[[Message], list[Message]]:
    """Every reply carries requests that nobody has heard of."""

    def more(reply: Message) -> list[Message]:
        if reply.has_content() and wire.REPLY in reply.content:
            words = json.loads(str(reply.content.config_records[wire.REPLY]["words"]))
            words["forget-pending"] = [{"request": secrets.token_hex(8), "kind": kind} for _ in range(count)]
            reply.content.config_records[wire.REPLY]["words"] = json.dumps(words)
        return [reply]

    return more


def test_who_asks_without_end_does_not_keep_the_server_from_ending(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.serve(setup.config())
    setup.node_of(1).spoil = asks_for_more("client", 16)
    found = setup.serve(setup.config())
    assert 16 < len(found.erasures) <= MOST_REQUESTS
    assert {e.status for e in found.erasures} == {"done"}


def test_who_stays_and_asks_for_samples_without_end_keeps_nobody_from_training_or_ending(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_BETWEEN_ROUNDS", 2)
    setup = make()
    config = setup.config(method={"name": "not"})
    setup.node_of(1).spoil = asks_for_more("samples", 1)
    found = setup.serve(config)
    assert found.rounds == 2
    assert {e.status for e in found.erasures} == {"done"}
    assert 2 < len(found.erasures) <= 6, "at most two at the beginning and in each round"
    assert len(setup.serve(config).erasures) == len(found.erasures) + 2, "the next run takes more"


def test_the_last_client_that_asks_without_end_does_not_keep_the_server_from_ending(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(min_nodes=1)
    for client in (1, 2, 3, 4):
        setup.node_of(client).online = False
    setup.serve(config)
    setup.node_of(0).spoil = asks_for_more("client", 1)
    found = setup.serve(config)
    assert [e.method for e in found.erasures if e.method] == ["withdrawal"], "it is forgotten once"
    assert {e.status for e in found.erasures} == {"done"}
    assert len(found.erasures) <= MOST_REQUESTS


def test_a_client_with_more_requests_than_a_reply_may_carry_says_them_bit_by_bit_and_the_whole_first(
    make: MakeWorld,
) -> None:
    setup = make()
    for place in range(wire.MOST_PENDING + 1):
        setup.outbox(0).file(positions=[place])
    found = setup.serve(setup.config())
    assert [e.status for e in found.erasures] == ["done"] * (wire.MOST_PENDING + 1)
    again = make("again")
    for place in range(wire.MOST_PENDING + 1):
        again.outbox(0).file(positions=[place])
    again.outbox(0).file()
    assert "client" in {e.kind for e in again.serve(again.config()).erasures}


def test_a_server_back_after_the_deadline_waits_a_while_for_its_nodes(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(deadline=300.0)
    setup.serve(config)
    setup.outbox(1).file()

    def killed(_client: ClientId) -> None:
        raise Killed

    at_task(setup, "unlearn-0", killed)
    with pytest.raises(Killed):
        setup.serve(config)
    setup.grid.before = lambda message: None
    setup.time.time += 10_000
    all_nodes_are_away(setup, 5)
    assert seen(setup.serve(config)) == [(1, "done", "fedquit", False)]


@pytest.mark.parametrize("fallback", [False, True])
def test_an_unlearning_round_waits_for_the_nodes_that_remain(fallback: bool, make: MakeWorld) -> None:
    setup = make()
    settings: dict[str, Any] = {"fallback": "retrain"} if fallback else {"method": {"name": "retrain"}}
    config = setup.config(deadline=60.0, floor=1, **settings)
    setup.serve(config)
    setup.outbox(1).file()
    setup.node_of(1).spoil = gone
    at_task(setup, "unlearn-0-fallback" if fallback else "unlearn-0", lambda _: _stop_the_server())
    with pytest.raises(Killed):
        setup.serve(config)
    setup.grid.before = lambda message: None
    all_nodes_are_away(setup, 50)
    assert seen(setup.serve(config)) == [(1, "done", "retrain", fallback)]
    missing = "the round needs 1 nodes that may take part; after 0 s still missing: client 0 (hospital-0), client 2"
    assert any(missing in line for line in lines(setup.folder)), "who leaves is not waited for"


def test_an_unlearning_round_to_which_nobody_comes_stops_and_is_gone_on_with_later(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "retrain"}, wait=100.0, floor=1)
    setup.serve(config)
    Inbox(setup.folder / "state").file("hospital-1")
    for client in (0, 2, 3, 4):
        setup.node_of(client).online = False
    with pytest.raises(NodesMissing, match=r"missing: client 0 \(hospital-0\), client 2"):
        setup.serve(config)
    setup.node_of(4).online = True
    assert seen(setup.serve(config)) == [(1, "done", "retrain", False)]


@pytest.mark.parametrize("file", ["ledger.json", "clients.json"])
def test_books_that_are_damaged_or_gone_are_not_begun_anew(file: str, make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    path = setup.folder / "state" / file
    for damaged in (path, copy_of(path)):
        damaged.write_text("{")
    with pytest.raises(StoreError, match=r"restore it from a backup. Do not delete it"):
        setup.serve(setup.config())
    missing = "has clients but no ledger.json" if file == "ledger.json" else "has no clients.json, which says who"
    for damaged in (path, copy_of(path)):
        damaged.unlink()
    with pytest.raises(StoreError, match=missing):
        setup.serve(setup.config())


def test_a_half_copied_state_directory_is_refused_and_nothing_in_it_is_changed(make: MakeWorld, tmp_path: Path) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    setup.serve(setup.config())
    state = setup.folder / "state"
    whole = Path(shutil.copytree(state, tmp_path / "whole"))
    for part in ("ledger", "clients", "phases"):
        shutil.rmtree(state)
        shutil.copytree(whole, state)
        if part == "phases":
            shutil.rmtree(state / part)
        else:
            for path in state.glob(f"{part}*.json"):
                path.unlink()
        names = sorted(str(p.relative_to(state)) for p in state.rglob("*.json"))
        with pytest.raises(StoreError, match="copied in part: restore the whole state directory") as refusal:
            setup.serve(setup.config())
        assert "delete" not in str(refusal.value)
        assert sorted(str(p.relative_to(state)) for p in state.rglob("*.json")) == names
    shutil.rmtree(state)
    shutil.copytree(whole, state)
    assert setup.serve(setup.config()).erased == {1}, "the whole copy goes on"


def test_a_list_of_clients_that_is_older_than_the_ledger_is_refused(make: MakeWorld) -> None:
    """The next client would get the number of one that was forgotten, or whose request waits."""
    setup = make()
    setup.outbox(2).file()
    setup.serve(setup.config())
    path = setup.folder / "state" / "clients.json"
    listed = json.loads(path.read_text())
    write_json_twice(path, listed[:2])
    with pytest.raises(StoreError, match=r"speaks of client 2, whom clients\.json does not list, .*copied in part"):
        setup.serve(setup.config())
    assert json.loads(path.read_text()) == listed[:2]
    write_json_twice(path, listed)
    assert setup.serve(setup.config()).erased == {2}


def test_recovery_ends_once_the_accuracy_is_there(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    accuracies = iter([10.0, 20.0, 30.0, 60.0, *[61.0] * 9])
    found = setup.serve(setup.config(recover_rounds=9, recover_until=60.0), evaluate=lambda params: next(accuracies))
    events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
    assert {e["round"] for e in events if e.get("phase") == "recover-0"} == {0}
    assert found.erasures[0].accuracy == {"before": 10.0, "unlearned": 20.0, "recovered": 61.0}


def test_what_a_leaving_client_has_answered_is_kept_though_it_is_gone_when_the_server_is_back(make: MakeWorld) -> None:
    setup, plain = make(), make("plain")
    for w in (setup, plain):
        w.serve(w.config())
        for client in (1, 3):
            w.outbox(client).file()

    def killed(client: ClientId) -> None:
        setup.node_of(3).deaf = True

    at_task(setup, "unlearn-0", killed)

    def die(_now: float) -> None:
        raise Killed

    setup.time.wakes.append(die)
    with pytest.raises(Killed):
        setup.serve(setup.config())
    setup.time.wakes.clear()
    setup.grid.before = lambda message: None
    setup.node_of(1).online = False
    setup.node_of(3).deaf = False
    found = setup.serve(setup.config())
    assert seen(found) == [(1, "done", "fedquit", False), (3, "done", "fedquit", False)]
    assert same(found.params, plain.serve(plain.config()).params)


def test_a_state_folder_belongs_to_one_seed_and_one_network(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    with pytest.raises(StoreError, match="another network and seed"):
        setup.serve(setup.config(seed=1))


def test_a_client_keeps_no_more_at_home_than_a_round_that_is_repeated_may_need(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config(method={"name": "pga"}, train={"rounds": 6, "batch_size": 8}))
    kept = [p.name for p in (setup.home(1) / "memory").rglob("*.safetensors")]
    assert len(kept) == 2, "what the last round left, and what it found"


def test_a_home_is_of_one_client_and_asks_once(make: MakeWorld) -> None:
    setup = make()
    setup.outbox(1).file(positions=[1])
    setup.outbox(1).file()
    with pytest.raises(RequestError, match="asked to be forgotten already"):
        setup.outbox(1).file()
    with pytest.raises(RequestError, match="not both"):
        setup.outbox(2).file(positions=[1], fraction=0.5)
    with pytest.raises(RequestError, match="between 0 and 1"):
        setup.outbox(2).file(fraction=1.5)
    with pytest.raises(RequestError, match="each named once"):
        setup.outbox(2).file(positions=[1, 1])


class Killed(BaseException):
    """The machine stops."""


def armed(monkeypatch: pytest.MonkeyPatch, point: int, moment: str, writes: list[Path]) -> None:
    """Stop at one write, before it or after it; the list fills with all writes."""
    write = files.write_atomic

    def watched(path: Path, content: bytes) -> None:
        if path.parent.name != "outbox" or path.exists():  # not what the data owner writes
            writes.append(path)
        if moment == "before" and len(writes) == point:
            raise Killed
        write(path, content)
        if moment == "after" and len(writes) == point:
            raise Killed

    monkeypatch.setattr(files, "write_atomic", watched)


def killed_everywhere(make: MakeWorld, monkeypatch: pytest.MonkeyPatch, every: int = 1, **settings: Any) -> list[Path]:
    def lived(name: str, point: int, moment: str) -> tuple[Setup, ServerResult, list[Path]]:
        """One round, then a request, then another round: what was stopped is started again."""
        setup = make(name)
        writes = list[Path]()
        with monkeypatch.context() as patch:
            armed(patch, point, moment, writes)
            for rounds in (1, 2):
                if rounds == 2 and not setup.outbox(1).entries():
                    files_once(setup, 1)(1)
                train = {"rounds": rounds, "batch_size": 8, "lr": 0.1}
                config = setup.config(recover_rounds=1, train=train, **settings)
                try:
                    outcome = setup.serve(config)
                except Killed:
                    outcome = setup.serve(config)
        return setup, outcome, writes

    _, expected, writes = lived("straight", 0, "never")
    for point in range(1, len(writes) + 1, every):
        moment = ("before", "after")[point % 2]
        where = f"{moment} write {point}, {writes[point - 1].name}"
        setup, found, _ = lived(f"killed-{point}", point, moment)
        assert same(found.params, expected.params), where
        assert seen(found) == seen(expected), where
        assert found.erased == expected.erased, where
        assert [e.status for e in setup.outbox(1).entries()] == ["served"], where
        events = [json.loads(line) for line in (setup.folder / "state" / "events.jsonl").read_text().splitlines()]
        at = [(e["round"], e["question"], e["client"]) for e in events if e.get("phase") == "unlearn-0"]
        assert len(at) == len(set(at)), f"{where}: asked again though the answer was on disk"
        after = [e for e in events if e["event"] == "reply" and e["phase"] in ("recover-0", "train-1")]
        assert all(e["client"] != 1 for e in after), where
    return writes


@pytest.fixture
def few(toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path) -> MakeWorld:
    small = dataclasses.replace(toy_data, train={c: toy_data.train[c][:8] for c in (0, 1, 2)})

    def made(name: str = "world", **options: Any) -> Setup:
        return Setup(small, toy_model, tmp_path / name, **options)

    return made


def test_killed_at_a_write_the_server_ends_as_if_nothing_had_happened(
    few: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "pga", "epochs": 1.0}  # its client builds on what it kept at home
    writes = killed_everywhere(few, monkeypatch, every=3, method=method)
    names = [p.name for p in writes]
    assert names.count("ledger.json") >= 6
    assert "before.safetensors" in names
    assert any("journal" in p.parts for p in writes)
    assert any("memory" in p.parts for p in writes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedquit", "lr": 1e-2},
        {"name": "pga", "epochs": 1.0},
        {"name": "seam_methods:CountTwice"},  # and does so within a round
        {"name": "federaser"},  # a server that keeps a history
        {"name": "fukd", "epochs": 1.0},  # and one that adds up
        {"name": "mode", "unlearning_rounds": 2, "degradation_rounds": 1},  # several questions in several rounds
    ],
)
def test_killed_at_every_write_of_every_kind_of_method(
    method: dict[str, Any], few: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_everywhere(few, monkeypatch, method=method)


@pytest.mark.parametrize("error", [TypeError("one argument too many"), AssertionError("never"), InputError("shapes")])
@pytest.mark.parametrize("broken", ["fedquit", "not"])
def test_an_error_in_the_code_stops_the_server_and_is_no_reason_to_fall_back(
    broken: str, error: Exception, make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    config = setup.config(deadline=60.0)
    setup.serve(config)
    setup.outbox(1).file()
    if broken == "not":  # the fallback, which a client that goes silent leads to
        setup.node_of(1).spoil = gone

    def breaks(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(METHODS[broken], "unlearn", breaks)
        with pytest.raises(type(error)):
            setup.serve(config)
        ledger = json.loads((setup.folder / "state" / "ledger.json").read_text())
        assert [e["status"] for e in ledger["entries"]] == ["started"], "the request waits for the error to be mended"
        assert ledger["phase"]["kind"] == "unlearn"
    setup.node_of(1).spoil = lambda reply: [reply]
    assert seen(setup.serve(config)) == [(1, "done", broken, broken == "not")]


def test_a_client_deletes_what_it_remembers_once_its_request_was_served(make: MakeWorld) -> None:
    setup = make()
    config = setup.config(method={"name": "pga", "epochs": 1.0})
    setup.serve(config)
    assert list((setup.home(1) / "memory").rglob("*.safetensors"))
    setup.outbox(1).file()
    setup.serve(config)
    assert not list((setup.home(1) / "memory").rglob("*.safetensors"))
    assert list((setup.home(2) / "memory").rglob("*.safetensors"))


@contextlib.contextmanager
def killed_as_erasing_begins(*, after: bool) -> Iterator[None]:
    """Stop where the ledger turns to the phase `erase`, before it is written or after."""
    write = files.write_atomic

    def stopped(path: Path, content: bytes) -> None:
        due = path.name == "ledger.json" and json.loads(content)["phase"]["kind"] == "erase"
        if not due or after:
            write(path, content)
        if due:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_atomic", stopped)
        yield


def test_a_server_killed_after_a_recovery_knows_how_many_samples_are_left(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(0).file(positions=[3, 1, 7])
    with killed_as_erasing_begins(after=False), pytest.raises(Killed):
        setup.serve(setup.config())
    assert seen(setup.serve(setup.config())) == [(0, "done", "fedquit", False)]
    clients = json.loads((setup.folder / "state" / "clients.json").read_text())
    assert clients[0]["examples"] == 20


def test_what_was_kept_of_a_client_that_could_not_be_forgotten_is_deleted_though_the_server_was_killed(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()
    setup.serve(setup.config(method={"name": "federaser"}))
    assert kept_of(setup, 1)
    with killed_as_erasing_begins(after=True), pytest.raises(Killed):
        fails_to_forget(setup, 1, monkeypatch)
    assert kept_of(setup, 1)
    after = setup.serve(setup.config())
    assert [e.status for e in after.erasures] == ["failed"]
    assert after.erased == {1}
    assert kept_of(setup, 1) == []


def test_a_ledger_of_a_version_without_a_phase_for_erasing_goes_on(make: MakeWorld) -> None:
    setup, plain = make(), make("plain")
    for w in (setup, plain):
        w.serve(w.config(method={"name": "fukd", "epochs": 1.0}))
        w.outbox(1).file()
    state = setup.folder / "state"
    with killed_as_erasing_begins(after=True), pytest.raises(Killed):
        setup.serve(setup.config(method={"name": "fukd", "epochs": 1.0}))
    ledger = json.loads((state / "ledger.json").read_text())
    assert ledger["phase"]["serving"] == ["r0001"]
    assert kept_of(setup, 1)
    ledger["phase"] |= {"kind": "train", "serving": [], "began": 0.0}  # as it was written before
    (state / "ledger.json").write_text(json.dumps(ledger))
    both = [w.serve(w.config(method={"name": "fukd", "epochs": 1.0})) for w in (setup, plain)]
    assert seen(both[0]) == seen(both[1]) == [(1, "done", "fukd", False)]
    assert same(both[0].params, both[1].params)
    assert kept_of(setup, 1) == []
