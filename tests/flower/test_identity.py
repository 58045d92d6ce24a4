# SPDX-License-Identifier: Apache-2.0
"""A node is who its registered key says, and keeps its number for ever."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

from fedquit.data.federated import FederatedData
from fedquit.errors import InputError, RequestError, StoreError
from fedquit.flower.client import home_from
from fedquit.flower.identity import fingerprint, identity_of, takes_part
from fedquit.flower.membership import read_membership, write_membership
from fedquit.flower.roster import Identity, Roster
from fedquit.models import FunctionalModel
from flower.grid_world import Setup

pytestmark = pytest.mark.flower

KEY = b"a public key"


def test_a_registered_key_is_the_identity_whatever_the_node_claims() -> None:
    node = NodeInfo(node_id=5, public_key=KEY, name="hospital")
    assert identity_of(node, "3") == Identity(f"key:{fingerprint(KEY)}", "hospital", True)
    assert identity_of(NodeInfo(node_id=99, public_key=KEY, name="hospital"), None) == identity_of(node, "7")


@pytest.mark.parametrize("name", [None, ""])
def test_a_node_that_registered_itself_is_only_what_it_claims(name: str | None) -> None:
    node = NodeInfo(node_id=5, public_key=KEY, name=name)
    assert identity_of(node, "3") == Identity("partition:3", "", False)
    for odd in (None, "", "-1", "../x", "3" * 10, 3):
        assert identity_of(node, odd) is None


def test_numbers_are_given_in_order_kept_and_never_given_twice(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    b, a, c = (Identity(f"key:{n}{n}{n}{n}{n}{n}{n}{n}", n, True) for n in "bac")
    roster.enrol([(b, 1), (a, 2)])
    roster.enrol([(c, 3), (a, 5)])
    expected = [("a", 0, 5), ("b", 1, 1), ("c", 2, 3)]
    again = Roster(tmp_path)
    assert [(m.name, m.number, m.examples) for m in again.members.values()] == expected
    again.note({1: 9})
    assert Roster(tmp_path).examples == {0: 5, 1: 9, 2: 3}
    tens = Roster(tmp_path / "other")
    tens.enrol([(Identity(f"partition:{i}", "", False), 1) for i in (10, 9, 2)])
    assert [m.key for m in tens.members.values()] == ["partition:2", "partition:9", "partition:10"]


def test_an_operator_names_a_client_in_several_ways(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    roster.enrol(
        [(Identity("key:abcdef0123456789", "north", True), 1), (Identity("key:abcdef01ffff", "south", True), 1)]
    )
    assert roster.find("north").number == 0
    assert roster.find("1").name == "south"
    assert roster.find("abcdef012345").name == "north"
    assert roster.find("key:abcdef01ffff").name == "south"
    for words in ("", "abcdef01", "abc", "west"):
        with pytest.raises(RequestError, match="must name one: known are 0: north, 1: south"):
            roster.find(words)


def test_a_client_keeps_its_number_behind_another_node_and_a_ghost_is_not_asked(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path
) -> None:
    setup = Setup(toy_data, toy_model, tmp_path)
    ghost = setup.node_of(1)

    def restarts(message: Message) -> None:
        """In the first round, the node comes back under another id, and the old one seems to be online still."""
        if message.metadata.message_type == "train.fedquit" and 1 not in setup.grid.nodes:
            setup.grid.nodes[1] = dataclasses.replace(ghost, id=1, asked=[])
            ghost.deaf = True
            ghost.asked.clear()

    setup.grid.before = restarts
    setup.serve(setup.config(train={"rounds": 3, "batch_size": 8}))
    assert setup.grid.nodes[1].asked.count("train.fedquit") == 2
    assert ghost.asked.count("train.fedquit") == 1, "in the first round, and then never again"
    clients = json.loads((tmp_path / "state" / "clients.json").read_text())
    assert [(m["number"], m["key"].partition(":")[0]) for m in clients] == [(i, "key") for i in range(5)]


def test_a_home_is_the_nodes_own_or_one_below_the_runs(tmp_path: Path) -> None:
    from flwr.app import Context, RecordDict

    def context(node: dict[str, str | int], run: dict[str, str]) -> Context:
        return Context(1, 2, node, RecordDict(), run)  # type: ignore[arg-type]

    assert home_from(context({"fedquit-home": "/h"}, {"fedquit.home": "/r"})) == Path("/h")
    assert home_from(context({"partition-id": 3}, {"fedquit.home": "/r"})) == Path("/r/partition-3")
    with pytest.raises(InputError, match="has no home"):
        home_from(context({"partition-id": 3}, {"fedquit.home": ""}))


# A closed federation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enrolled:
    """A site, as the operator's list has it."""

    name: str
    fingerprints: tuple[str, ...]
    examples: int = 100
    revoked: float | None = None


OLD, NEW, OTHER = b"the first key", b"the key in use", b"the key of nobody"


def test_in_a_closed_federation_a_site_is_its_first_key_whichever_key_it_uses(tmp_path: Path) -> None:
    assert read_membership(tmp_path) is None, "without a list the federation is not closed"
    write_membership(tmp_path, [Enrolled("hospital", (fingerprint(OLD), fingerprint(NEW)))])
    sites = read_membership(tmp_path)
    before = identity_of(NodeInfo(node_id=1, public_key=OLD, name="hospital"), None)
    rotated = NodeInfo(node_id=2, public_key=NEW, name="hospital")
    assert identity_of(rotated, None, sites) == before, "an old state directory knows it by that key"
    assert takes_part(rotated, sites)
    for node in (
        NodeInfo(node_id=1, public_key=OLD, name="hospital"),  # given up
        NodeInfo(node_id=3, public_key=OTHER, name="hospital"),  # registered by somebody else
        NodeInfo(node_id=4, public_key=NEW),  # not registered
        NodeInfo(node_id=5),
    ):
        assert identity_of(node, "3", sites) is None
        assert not takes_part(node, sites)


def test_a_revoked_site_takes_no_part(tmp_path: Path) -> None:
    write_membership(tmp_path, [Enrolled("hospital", (fingerprint(OLD),), revoked=1.0)])
    sites = read_membership(tmp_path)
    assert sites == {}
    assert not takes_part(NodeInfo(node_id=1, public_key=OLD, name="hospital"), sites)


def test_a_damaged_list_of_sites_stops_the_server(tmp_path: Path) -> None:
    for content in ("{}", '[{"name": "x"}]', '[{"name": "x", "examples": 1, "keys": [], "revoked": false}]'):
        (tmp_path / "sites.json").write_text(content)
        with pytest.raises(StoreError, match="not a list of sites"):
            read_membership(tmp_path)
    (tmp_path / "sites.json").write_text("[")
    with pytest.raises(StoreError):
        read_membership(tmp_path)
