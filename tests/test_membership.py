# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from fedquit.core import Request
from fedquit.errors import RequestError
from fedquit.running.membership import Membership


def test_a_client_that_was_forgotten_is_out_for_good() -> None:
    after = Membership((0, 1, 2)).serve(Request((1,)))
    assert after.active == (0, 2)
    assert after.erased == {1}
    with pytest.raises(RequestError, match=r"client 1 was forgotten at its own request.*enrol it anew"):
        after.join([1])
    with pytest.raises(RequestError, match="has been forgotten already"):
        after.serve(Request((1,)))


def test_who_was_forgotten_long_ago_is_still_out() -> None:
    after = Membership((0, 1, 2, 3)).serve(Request((1,))).serve(Request((2,)))
    assert after.erased == {1, 2}
    with pytest.raises(RequestError, match="client 1 was forgotten"):
        after.join([1])


@pytest.mark.parametrize("clients", [[], [1, 1]])
def test_clients_join_by_name_and_once(clients: list[int]) -> None:
    with pytest.raises(RequestError, match="name each of them"):
        Membership((0, 1, 2)).serve(Request((1,))).join(clients, anew=True)


def test_enrolled_anew_it_is_a_member_again_and_may_be_forgotten_again() -> None:
    after = Membership((0, 1, 2)).serve(Request((1,))).join([1], anew=True)
    assert after.active == (0, 1, 2)
    assert after.erased == frozenset()
    assert after.serve(Request((1,))).erased == {1}


def test_clients_that_gave_up_samples_stay() -> None:
    members = Membership((0, 1, 2))
    assert members.serve(Request((1,), samples=True)) == members
    assert members.serve(Request((0, 1, 2), samples=True)) == members


def test_somebody_new_may_join_and_nobody_twice() -> None:
    assert Membership((0, 1)).join([5]).active == (0, 1, 5)
    with pytest.raises(RequestError, match="client 1 is in the federation already"):
        Membership((0, 1)).join([1])


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(()), "names no client"),
        (Request((7,)), "client 7 is not in the federation: its clients are 0, 1, 2"),
        (Request((0, 1, 2)), "names every client"),
        (Request((1, 1)), "names a client twice"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(request_: Request, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        Membership((0, 1, 2)).serve(request_)
