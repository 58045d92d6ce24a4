# SPDX-License-Identifier: Apache-2.0
"""What a member of a closed federation can do to the others with well-formed replies, and what stops it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedquit.core import Params
from fedquit.flower.identity import fingerprint
from fedquit.flower.membership import write_membership
from flower.grid_world import MakeWorld, Setup, Spoil, lines
from flower.test_refusals import reworded, said_of_itself

pytestmark = pytest.mark.flower


@dataclass(frozen=True)
class Enrolled:
    """A site, as the operator's list has it."""

    name: str
    examples: int
    fingerprints: tuple[str, ...]
    revoked: float | None = None


def close(setup: Setup, revoked: Sequence[int] = (), **examples: int) -> None:
    """Make the federation closed: each client is a site that was enrolled with the examples that it has.

    Args:
        setup: the federation.
        revoked: clients whose sites are revoked.
        examples: other numbers, by "c" and the client.
    """
    state = setup.folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    sites = []
    for client in setup.data.clients:
        key = fingerprint(f"public key of {client}".encode())
        when = 1.0 if client in revoked else None
        agreed = examples.get(f"c{client}", len(setup.data.train[client]))
        sites.append(Enrolled(f"hospital-{client}", agreed, (key,), when))
    write_membership(state, sites)


def distance(one: Params, other: Params) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def clients(folder: Path) -> dict[str, int]:
    return {m["name"]: m["examples"] for m in json.loads((folder / "state" / "clients.json").read_text())}


def test_an_inflated_number_of_examples_does_not_replace_the_model(make: MakeWorld) -> None:
    honest, lying, open_door = make("honest"), make("lying"), make("open")
    for setup in (honest, lying):
        close(setup)
    for setup in (lying, open_door):
        setup.node_of(1).spoil = reworded(examples=10**12)
    expected = honest.serve(honest.config()).params
    assert distance(lying.serve(lying.config()).params, expected) == 0.0, "it counts as if it had told the truth"
    assert distance(open_door.serve(open_door.config()).params, expected) > 1e-3, "and otherwise its model is the mean"


def test_what_a_node_says_of_itself_is_bounded_in_the_same_way(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    setup.node_of(1).spoil = said_of_itself(examples=10**9)
    setup.serve(setup.config())
    assert clients(setup.folder)["hospital-1"] == len(setup.data.train[1])
    assert any("hospital-1 says that it has 1000000000 examples and counts for" in line for line in lines(setup.folder))


def test_a_revoked_site_and_a_key_of_nobody_are_asked_nothing(make: MakeWorld) -> None:
    setup = make()
    close(setup, revoked=[2])
    setup.node_of(0).key = b"a key that somebody else registered"
    setup.serve(setup.config())
    for client in (0, 2):
        assert setup.node_of(client).asked == []
        assert f"hospital-{client}" not in clients(setup.folder)
    assert setup.node_of(1).asked


def test_a_site_that_is_revoked_during_a_run_is_asked_no_more(make: MakeWorld) -> None:
    setup = make()
    close(setup)
    node = setup.node_of(2)
    asked_before: list[int] = []

    def evaluate(_: Params) -> float:
        if not asked_before:
            close(setup, revoked=[2])
            asked_before.append(len(node.asked))
        return 50.0

    setup.serve(setup.config(), evaluate=evaluate)
    assert asked_before == [len(node.asked)]
    assert "train.fedquit" in node.asked, "it took part until then"


def test_erased_samples_count_no_more_whatever_the_site_says_until_the_operator_agrees_otherwise(
    make: MakeWorld,
) -> None:
    setup = make()
    close(setup)
    setup.serve(setup.config())
    assert clients(setup.folder)["hospital-0"] == 23
    setup.outbox(0).file(positions=[0, 1, 2])
    setup.serve(setup.config())
    assert clients(setup.folder)["hospital-0"] == 20
    setup.node_of(0).spoil = says_always(10**9)
    setup.serve(setup.config(train={"rounds": 3, "batch_size": 8}))
    assert clients(setup.folder)["hospital-0"] == 20, "what was erased is not said back"
    close(setup, c0=40)
    setup.serve(setup.config(train={"rounds": 4, "batch_size": 8}))
    assert clients(setup.folder)["hospital-0"] == 40, "the operator's number is that of today"
    setup.node_of(0).spoil = lambda reply: [reply]
    setup.serve(setup.config(train={"rounds": 5, "batch_size": 8}))
    assert clients(setup.folder)["hospital-0"] == 40, "and holds whatever the site says"


def says_always(examples: int) -> Spoil:
    """Of a node that says, in every answer, that it has so many examples."""
    in_replies, of_itself = reworded(examples=examples), said_of_itself(examples=examples)
    return lambda reply: [last for first in in_replies(reply) for last in of_itself(first)]


@pytest.mark.parametrize("said", [1, 5, 10**12])
def test_whatever_number_of_examples_a_site_says_the_pinned_one_is_its_weight(said: int, make: MakeWorld) -> None:
    honest, lying, open_door = make("honest"), make("lying"), make("open")
    for setup in (honest, lying):
        close(setup)
    for setup in (lying, open_door):
        setup.node_of(1).spoil = says_always(said)
    expected = honest.serve(honest.config()).params
    assert distance(lying.serve(lying.config()).params, expected) == 0.0
    assert clients(lying.folder) == clients(honest.folder)
    assert any(
        f"hospital-1 says that it has {said} examples and counts for the" in line for line in lines(lying.folder)
    )
    assert distance(open_door.serve(open_door.config()).params, expected) > 1e-4, "where nobody agreed on a number"


def test_samples_that_a_site_with_fewer_examples_than_agreed_erases_are_taken_off(make: MakeWorld) -> None:
    setup = make()
    close(setup, c0=100)  # it has 23
    setup.serve(setup.config())
    assert clients(setup.folder)["hospital-0"] == 100
    setup.outbox(0).file(positions=[0, 1, 2])
    setup.serve(setup.config())
    assert clients(setup.folder)["hospital-0"] == 97
    events = map(json.loads, (setup.folder / "state" / "events.jsonl").read_text().splitlines())
    replies = [e for e in events if e["event"] == "reply" and e["client"] == 0 and e["phase"] == "recover-0"]
    assert [reply["examples"] for reply in replies] == [97], "from the first round without them on"
    setup.serve(setup.config(train={"rounds": 3, "batch_size": 8}))
    assert clients(setup.folder)["hospital-0"] == 97


@pytest.mark.parametrize("part", range(5))
def test_fifty_honest_erasures_over_methods_and_partitions_raise_no_alarm(part: int) -> None:
    """Ten of the fifty of benchmarks/member_checks.py, which has the figures of docs/flower.md; each method once."""
    benchmark = loaded("member_checks")
    fifty = list(benchmark.cases(50))
    assert {case.partition for case in fifty} == set(benchmark.PARTITIONS)
    ten = fifty[10 * part : 10 * part + 10]
    assert {case.method for case in ten} == set(benchmark.METHODS)
    measured = [benchmark.measure(case, rounds=3) for case in ten]
    assert [(each.case, each.alarms) for each in measured if each.alarms or each.fallback] == []
    assert {each.status for each in measured} == {"done"}
    assert min(each.rounds for each in measured) >= 3
    assert sum(each.least is not None for each in measured) >= 8, "they were judged, where anything was to be expected"


def loaded(name: str) -> Any:
    """A script of benchmarks/."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
