# SPDX-License-Identifier: Apache-2.0
"""Which samples of a client a request marks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core import Request
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.samples import SELECTIONS, choose_samples
from fedquit.errors import InputError, RequestError, UnknownNameError


def federation(*labels: list[int]) -> FederatedData:
    """A client for each list of labels."""
    flat = torch.tensor([label for mine in labels for label in mine])
    dataset = Dataset(torch.zeros(len(flat), 1), flat, torch.zeros(1, 1), flat[:1], classes=10)
    ends = torch.tensor([0, *[len(mine) for mine in labels]]).cumsum(0).tolist()
    return FederatedData(dataset, {k: torch.arange(ends[k], ends[k + 1]) for k in range(len(labels))})


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.7),
    how=st.sampled_from(sorted(SELECTIONS)),
    seed=st.integers(0, 9),
)
def test_each_client_marks_the_rounded_part_of_its_own_samples(
    sizes: list[int], fraction: float, how: str, seed: int
) -> None:
    data = federation(*[[i % 3 for i in range(n)] for n in sizes])
    chosen = choose_samples(data, data.clients, fraction, how, seed)
    assert list(chosen) == list(data.clients)
    for c, n in enumerate(sizes):
        assert len(chosen[c]) == max(1, round(fraction * n))
        assert chosen[c].tolist() == sorted(set(chosen[c].tolist()))
        assert torch.isin(chosen[c], data.train[c]).all()
    again = choose_samples(data, data.clients, fraction, how, seed)
    assert all(torch.equal(chosen[c], again[c]) for c in chosen)


def test_random_samples_depend_on_seed_and_client_but_not_on_who_else_asks() -> None:
    data = federation([0] * 50, [0] * 50)
    one = choose_samples(data, [0, 1], 0.4, "random", seed=1)
    assert not torch.equal(one[0], one[1] - 50)
    assert not torch.equal(one[0], choose_samples(data, [0], 0.4, "random", seed=2)[0])
    assert torch.equal(one[1], choose_samples(data, [1], 0.4, "random", seed=1)[1])
    assert one[0].tolist() != list(range(20))


def test_rare_samples_come_from_the_least_represented_local_classes() -> None:
    #       position: 0  1  2  3  4  5  6  7  8  9
    data = federation([3, 3, 3, 3, 2, 2, 0, 3, 1, 1])
    chosen = [choose_samples(data, [0], k / 10, "rare", seed=0)[0].tolist() for k in range(1, 10)]
    assert chosen[0] == [6], "the only sample of class 0"
    assert chosen[2] == [6, 8, 9], "then class 1: as rare as class 2, with the lower number"
    assert chosen[3] == [4, 6, 8, 9], "then a part of class 2"
    assert chosen[4] == [4, 5, 6, 8, 9]
    assert chosen[8] == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_rare_counts_within_the_client_not_within_the_federation() -> None:
    data = federation([0] * 3 + [1] * 9, [0] * 20 + [1] * 2)
    chosen = choose_samples(data, [0, 1], 0.09, "rare", seed=0)
    assert data.y[chosen[0]].tolist() == [0]
    assert data.y[chosen[1]].tolist() == [1, 1]


def test_rare_needs_one_label_for_each_sample() -> None:
    y = torch.zeros(6, 4, dtype=torch.long)
    data = FederatedData(Dataset(torch.zeros(6, 1), y, torch.zeros(1, 1), y[:1], 2), {0: torch.arange(6)})
    with pytest.raises(InputError, match="use 'random'"):
        choose_samples(data, [0], 0.5, "rare", seed=0)
    assert len(choose_samples(data, [0], 0.5, "random", seed=0)[0]) == 3


def test_the_choice_can_be_marked(toy_data: FederatedData) -> None:
    request = Request((0, 3), samples=True)
    chosen = choose_samples(toy_data, request.clients, 0.5, "rare", seed=0)
    marked = toy_data.mark(request, chosen)
    assert len(marked.view(3, "forget")) == 15
    assert len(marked.view(3, "retain")) == 15


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 1.2, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(toy_data: FederatedData, fraction: float) -> None:
    with pytest.raises(RequestError, match="request the whole client"):
        choose_samples(toy_data, [0], fraction, "random", seed=0)


@pytest.mark.parametrize("labels", [[], [1], [1, 2, 0]])
def test_a_fraction_that_comes_to_everything_is_refused(labels: list[int]) -> None:
    data = federation([1, 2], labels)
    with pytest.raises(RequestError, match="client 1 is everything it has: request the whole client instead"):
        choose_samples(data, [1], 0.9, "random", seed=0)


def test_unknown_selections_and_clients_are_refused(toy_data: FederatedData) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'random'"):
        choose_samples(toy_data, [0], 0.5, "rnadom", seed=0)
    with pytest.raises(RequestError, match="client 9 is not in the federation"):
        choose_samples(toy_data, [9], 0.5, "random", seed=0)
