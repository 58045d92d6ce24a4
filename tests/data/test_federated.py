# SPDX-License-Identifier: Apache-2.0
"""Data sets, views, requests and what is left after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.core import Request
from fedquit.data.federated import Dataset, FederatedData
from fedquit.errors import InputError, RequestError


def same(a: Tensor, b: Tensor) -> bool:
    return sorted(a.tolist()) == sorted(b.tolist())


def test_without_a_request_everything_is_retained(toy_data: FederatedData) -> None:
    for client, n in zip(toy_data.clients, (23, 8, 17, 30, 5), strict=True):
        assert len(toy_data.view(client, "all")) == n
        assert torch.equal(toy_data.view(client, "retain"), toy_data.view(client, "all"))
        assert len(toy_data.view(client, "forget")) == 0


def test_a_client_request_marks_all_that_the_client_has(toy_data: FederatedData) -> None:
    data = toy_data.mark(Request((2,)))
    assert torch.equal(data.view(2, "forget"), toy_data.train[2])
    assert len(data.view(2, "retain")) == 0
    assert torch.equal(data.view(0, "retain"), toy_data.train[0])
    assert not toy_data.forget, "marking returns new data and changes nothing"


def test_a_sample_request_splits_the_clients_data_in_two(toy_data: FederatedData) -> None:
    marked = {0: toy_data.train[0][::2], 3: toy_data.train[3][:7]}
    data = toy_data.mark(Request((0, 3), samples=True), marked)
    for client in (0, 3):
        forget, retain = data.view(client, "forget"), data.view(client, "retain")
        assert torch.equal(forget, marked[client])
        assert not torch.isin(forget, retain).any()
        assert same(torch.cat([forget, retain]), toy_data.train[client])
        assert torch.equal(data.view(client, "all"), toy_data.train[client])
    assert len(data.view(1, "forget")) == 0


def test_pooled_joins_the_views(toy_data: FederatedData) -> None:
    data = toy_data.mark(Request((1, 4)))
    assert same(data.pooled("forget"), torch.cat([data.train[1], data.train[4]]))
    assert same(data.pooled("retain"), torch.cat([data.train[c] for c in (0, 2, 3)]))
    assert torch.equal(data.pooled("all", (3, 0)), torch.cat([data.train[3], data.train[0]]))
    assert len(data.pooled("forget", (0,))) == 0
    assert len(data.pooled("all", ())) == 0


def test_after_a_client_request_the_client_and_its_holdout_are_gone(toy_data: FederatedData) -> None:
    request = Request((2,))
    data = toy_data.mark(request).after(request)
    assert data.clients == (0, 1, 3, 4)
    assert sorted(data.holdout) == [0, 1, 3, 4]
    assert not data.forget


def test_after_a_sample_request_the_client_stays_without_the_samples(toy_data: FederatedData) -> None:
    request, gone = Request((3,), samples=True), toy_data.train[3][5:12]
    data = toy_data.mark(request, {3: gone}).after(request)
    assert data.clients == toy_data.clients
    assert len(data.train[3]) == 23
    assert not torch.isin(gone, data.train[3]).any()
    assert torch.equal(data.holdout[3], toy_data.holdout[3])


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=4))
def test_what_any_chain_of_requests_erased_is_in_no_view(
    toy_data: FederatedData, steps: list[tuple[int, bool]]
) -> None:
    data, erased = toy_data, torch.zeros(0, dtype=torch.long)
    for client, only_samples in steps:
        if client not in data.clients or len(data.clients) == 1 or len(data.train[client]) < 2:
            continue
        request = Request((client,), samples=only_samples)
        data = data.mark(request, {client: data.train[client][::2]} if only_samples else None)
        erased = torch.cat([erased, data.view(client, "forget")])
        data = data.after(request)
        for split in ("all", "forget", "retain"):
            assert not torch.isin(erased, data.pooled(split)).any()
        assert same(torch.cat([erased, data.pooled("all")]), toy_data.pooled("all"))


def test_a_client_that_joins_again_brings_what_it_had_when_it_left(toy_data: FederatedData) -> None:
    samples, whole = Request((2,), samples=True), Request((0, 2))
    had = toy_data.mark(samples, {2: toy_data.train[2][:4]}).after(samples)
    data = had.mark(whole).after(whole).join(2, had)
    assert data.clients == (1, 2, 3, 4)
    assert torch.equal(data.train[2], toy_data.train[2][4:]), "samples that were forgotten stay forgotten"
    assert torch.equal(data.holdout[2], toy_data.holdout[2])
    assert 0 not in data.holdout


def test_samples_are_given_for_exactly_the_clients_of_the_request_and_count_once(toy_data: FederatedData) -> None:
    request = Request((1,), samples=True)
    mine = toy_data.train[1][:2]
    for wrong in ({}, {1: mine, 2: toy_data.train[2][:1]}):
        with pytest.raises(RequestError, match="give samples of exactly these"):
            toy_data.mark(request, wrong)
    twice = toy_data.mark(request, {1: torch.cat([mine, mine])})
    assert torch.equal(twice.view(1, "forget"), mine)


def test_a_second_request_cannot_name_what_the_first_erased(toy_data: FederatedData) -> None:
    first = Request((3,), samples=True)
    gone = toy_data.train[3][:4]
    data = toy_data.mark(first, {3: gone}).after(first)
    with pytest.raises(RequestError, match="samples that client 3 does not train on"):
        data.mark(first, {3: gone[:1]})
    whole = Request((3,))
    left = data.mark(whole)
    assert len(left.view(3, "forget")) == 26
    with pytest.raises(RequestError, match="client 3 is not in the federation: its clients are 0, 1, 2, 4"):
        left.after(whole).mark(whole)


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ((), "names no client"),
        ((7,), "client 7 is not in the federation"),
        ((1, 1), "names a client twice"),
        ((0, 1, 2, 3, 4), "names every client"),
    ],
)
def test_a_request_for_impossible_clients_is_refused(
    toy_data: FederatedData, clients: tuple[int, ...], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        toy_data.mark(Request(clients))


def test_every_client_may_ask_for_samples(toy_data: FederatedData) -> None:
    data = toy_data.mark(Request(toy_data.clients, samples=True), {c: t[:1] for c, t in toy_data.train.items()})
    assert len(data.pooled("forget")) == 5


def test_an_empty_forget_set_is_refused(toy_data: FederatedData) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    with pytest.raises(RequestError, match="the forget set of client 1 is empty"):
        toy_data.mark(Request((1,), samples=True), {1: nothing})
    empty_client = replace(toy_data, train={**toy_data.train, 1: nothing})
    with pytest.raises(RequestError, match="the forget set of client 1 is empty"):
        empty_client.mark(Request((1,)))


@pytest.mark.parametrize("whose", ["another client's", "the holdout's", "nobody's"])
def test_samples_that_the_client_does_not_train_on_are_refused(toy_data: FederatedData, whose: str) -> None:
    foreign = {
        "another client's": toy_data.train[2][:1],
        "the holdout's": toy_data.holdout[1][:1],
        "nobody's": torch.tensor([10**6]),
    }[whose]
    with pytest.raises(RequestError, match="samples that client 1 does not train on"):
        toy_data.mark(Request((1,), samples=True), {1: torch.cat([toy_data.train[1][:2], foreign])})


def test_samples_and_the_kind_of_request_must_agree(toy_data: FederatedData) -> None:
    with pytest.raises(RequestError, match="must say which"):
        toy_data.mark(Request((1,), samples=True))
    with pytest.raises(RequestError, match="whole clients must not"):
        toy_data.mark(Request((1,)), {1: toy_data.train[1][:1]})


def test_a_long_list_of_clients_is_cut_short_in_messages() -> None:
    with pytest.raises(RequestError, match=r"10, 11, … \(100 in all\)"):
        Request((100,)).check(range(100))


def good() -> Dataset:
    return Dataset(torch.zeros(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]), torch.ones(3, 2), torch.tensor([0, 1, 2]), 3)


@pytest.mark.parametrize("part", ["", "test_"])
def test_labels_are_checked(part: str) -> None:
    x, y = f"{part}x", f"{part}y"
    data = good()
    n = len(getattr(data, y))
    word = "test" if part else "training"
    for change, says in [
        ({y: getattr(data, y)[1:]}, f"the {word} set has {n} examples but {n - 1} labels"),
        ({y: getattr(data, y).int()}, f"the {word} labels are torch.int32"),
        ({y: getattr(data, y) + 1}, f"the {word} labels run from 1 to 3, outside 0 to 2"),
        ({y: getattr(data, y) - 1}, f"the {word} labels run from -1 to 1, outside 0 to 2"),
        ({x: getattr(data, x) * float("nan")}, f"the {word} examples hold NaN or infinity"),
        ({x: getattr(data, x) + float("inf")}, f"the {word} examples hold NaN or infinity"),
    ]:
        with pytest.raises(InputError, match=says):
            replace(data, **change)


def test_training_and_test_examples_must_be_alike() -> None:
    with pytest.raises(InputError, match=r"shape \(2,\) and test examples \(5,\)"):
        replace(good(), test_x=torch.ones(3, 5))


@pytest.mark.parametrize("part", ["", "test_"])
def test_an_empty_set_is_refused(part: str) -> None:
    data = good()
    empty: dict[str, Any] = {f"{part}x": torch.zeros(0, 2), f"{part}y": data.y[:0]}
    with pytest.raises(InputError, match=f"the {'test' if part else 'training'} set is empty"):
        replace(data, **empty)


def test_whole_numbers_and_sequences_are_fine() -> None:
    tokens = torch.zeros(6, 4, dtype=torch.long)
    assert Dataset(tokens, tokens, tokens[:2], tokens[:2], 1).classes == 1


def test_the_fingerprint_changes_when_anything_changes_that_training_sees(toy_data: FederatedData) -> None:
    x, y = toy_data.x.clone(), toy_data.y.clone()
    x[3, 0, 0, 0] += 1e-12
    y[3] = (y[3] + 1) % 5
    train = dict(toy_data.train)
    changed = [
        replace(toy_data, dataset=replace(toy_data.dataset, x=x)),
        replace(
            toy_data, dataset=replace(toy_data.dataset, x=toy_data.x.float(), test_x=toy_data.dataset.test_x.float())
        ),
        replace(toy_data, dataset=replace(toy_data.dataset, x=toy_data.x.mT)),
        replace(toy_data, dataset=replace(toy_data.dataset, y=y)),
        replace(toy_data, public=toy_data.public[1:]),
        replace(toy_data, train={**train, 0: train[0][1:]}),
        replace(toy_data, train={**train, 0: train[1], 1: train[0]}),
        replace(toy_data, train={c: t for c, t in train.items() if c != 4}),
        replace(toy_data, train={(9 if c == 4 else c): t for c, t in train.items()}),
        replace(toy_data, train={**train, 0: torch.cat([train[0], train[1][:1]]), 1: train[1][1:]}),
        replace(toy_data, train={**train, 0: torch.cat([train[0][1:], train[1][:1]])}),
    ]
    prints = [data.fingerprint() for data in (toy_data, *changed)]
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_of_equal_data_is_equal(toy_data: FederatedData) -> None:
    copy = replace(
        toy_data,
        dataset=replace(toy_data.dataset, x=toy_data.x.clone()),
        train=dict(reversed([(c, t.clone()) for c, t in toy_data.train.items()])),
    )
    assert copy.fingerprint() == toy_data.fingerprint()
