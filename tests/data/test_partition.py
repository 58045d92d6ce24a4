# SPDX-License-Identifier: Apache-2.0
"""Who gets which examples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.data.partition import PARTITIONS, lda, stream
from fedquit.errors import InputError

SHARED = Path(__file__).parents[3] / "shared" / "data"
AUTHORS = SHARED / "partitions" / "cifar100_lda0.1_clients10.json"
LABELS = SHARED / "cifar100_labels.npz"


def deal(
    name: str, labels: Tensor, clients: int, seed: int = 0, alpha: float = 1.0, file: Path | None = None
) -> dict[int, Tensor]:
    return PARTITIONS[name](labels, clients, np.random.default_rng(seed), alpha=alpha, file=file)


def labels_of(n: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def lda_by_hand(labels: list[int], clients: int, alpha: float, rng: np.random.Generator) -> dict[int, list[int]]:
    """The authors' rule, spelled out: one class, one client, one example at a time."""
    classes = sorted(set(labels))
    for _ in range(10):
        counts = {}
        for c in classes:
            p = rng.dirichlet([alpha] * clients)
            counts[c] = [round(float(share) * labels.count(c)) for share in p]
        left = {c: labels.count(c) for c in classes}
        got = dict.fromkeys(range(clients), 0)
        for c in classes:
            for k in range(clients):
                take = min(counts[c][k], left[c])
                left[c] -= take
                got[k] += take
        if all(got.values()):
            break
    else:
        raise RuntimeError("ten draws, and a client is empty")
    parts: dict[int, list[int]] = {k: [] for k in range(clients)}
    for c in classes:
        pool = list(rng.permutation([i for i, label in enumerate(labels) if label == c]))
        for k in range(clients):
            parts[k] += [int(i) for i in pool[: counts[c][k]]]
            pool = pool[counts[c][k] :]
    return {k: sorted(part) for k, part in parts.items()}


@settings(max_examples=60)
@given(
    n=st.integers(20, 120),
    classes=st.integers(1, 6),
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.1, 0.3, 1.0, 100.0, 1e7]),
    seed=st.integers(0, 10_000),
)
def test_lda_is_the_authors_rule(n: int, classes: int, clients: int, alpha: float, seed: int) -> None:
    labels = labels_of(n, classes, seed)
    try:
        expected = lda_by_hand(labels.tolist(), clients, alpha, np.random.default_rng(seed))
    except RuntimeError:
        with pytest.raises(InputError, match="take fewer clients or a larger alpha"):
            deal("lda", labels, clients, seed, alpha)
        return
    found = deal("lda", labels, clients, seed, alpha)
    assert {k: part.tolist() for k, part in found.items()} == expected


@settings(max_examples=60)
@given(
    name=st.sampled_from(["iid", "lda", "chunks"]),
    n=st.integers(1, 100),
    clients=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_parts_are_sorted_disjoint_in_range_and_repeat(name: str, n: int, clients: int, seed: int) -> None:
    assume(n >= 10 * clients)
    labels = labels_of(n, 3, seed)
    try:
        parts = deal(name, labels, clients, seed)
    except InputError:
        assume(False)
    assert list(parts) == list(range(clients))
    every = [i for part in parts.values() for i in part.tolist()]
    assert len(set(every)) == len(every)
    assert set(every) <= set(range(n))
    for part in parts.values():
        assert part.dtype == torch.long
        assert len(part) > 0
        assert torch.equal(part, part.sort().values)
    again = deal(name, labels, clients, seed)
    assert all(torch.equal(again[k], part) for k, part in parts.items())


@settings(max_examples=40)
@given(name=st.sampled_from(["iid", "chunks"]), n=st.integers(1, 100), clients=st.integers(1, 20))
def test_iid_and_chunks_deal_out_everything_in_equal_parts(name: str, n: int, clients: int) -> None:
    assume(n >= clients)
    parts = deal(name, labels_of(n, 3), clients)
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(n))
    sizes = {len(part) for part in parts.values()}
    assert max(sizes) - min(sizes) <= 1


def test_chunks_are_contiguous_and_iid_parts_are_not() -> None:
    labels = labels_of(60, 3)
    assert [p.tolist() for p in deal("chunks", labels, 3).values()] == [
        list(range(20)),
        list(range(20, 40)),
        list(range(40, 60)),
    ]
    assert deal("iid", labels, 3)[0].tolist() != list(range(20))
    assert deal("iid", labels, 3, seed=1)[0].tolist() != deal("iid", labels, 3, seed=2)[0].tolist()


class Fixed(np.random.Generator):
    """Draws the proportions it is told."""

    def __init__(self, *proportions: list[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self.proportions, self.draws = list(proportions), 0

    def dirichlet(self, alpha: object, size: object = None) -> np.ndarray:
        self.draws += 1
        return np.array([self.proportions.pop(0)])


def test_lda_drops_what_rounding_leaves_over() -> None:
    labels = torch.zeros(10, dtype=torch.long)
    parts = lda(labels, 3, Fixed([0.34, 0.33, 0.33]), alpha=1.0)
    assert [len(p) for p in parts.values()] == [3, 3, 3]


def test_lda_truncates_where_rounding_runs_short() -> None:
    labels = torch.zeros(10, dtype=torch.long)
    parts = lda(labels, 4, Fixed([0.16, 0.16, 0.16, 0.52]), alpha=1.0)
    assert [len(p) for p in parts.values()] == [2, 2, 2, 4]


def test_lda_rounds_halves_to_even_as_numpy_does() -> None:
    labels = torch.zeros(10, dtype=torch.long)
    assert [len(p) for p in lda(labels, 2, Fixed([0.25, 0.75]), alpha=1.0).values()] == [2, 8]


def test_lda_draws_anew_while_a_client_is_empty_and_stops_after_ten() -> None:
    labels = torch.zeros(10, dtype=torch.long)
    lucky = Fixed(*[[1.0, 0.0]] * 9, [0.5, 0.5])
    assert [len(p) for p in lda(labels, 2, lucky, alpha=1.0).values()] == [5, 5]
    assert lucky.draws == 10
    runs_short = Fixed([0.4, 0.4, 0.2], [0.25, 0.25, 0.5])  # of 4: 2 + 2, and the third client's 1 is not there
    assert [len(p) for p in lda(labels[:4], 3, runs_short, alpha=1.0).values()] == [1, 1, 2]
    unlucky = Fixed(*[[1.0, 0.0]] * 10, [0.5, 0.5])
    with pytest.raises(InputError, match="take fewer clients or a larger alpha"):
        lda(labels, 2, unlucky, alpha=1.0)


def test_lda_takes_a_large_alpha_for_equal_shares_and_a_small_one_for_skew() -> None:
    labels = torch.arange(1000) % 10
    even = deal("lda", labels, 10, alpha=1e7)
    assert all(labels[part].bincount(minlength=10).tolist() == [10] * 10 for part in even.values())
    skewed = deal("lda", labels, 10, alpha=0.1)
    largest_share = [labels[part].bincount().max().item() / len(part) for part in skewed.values()]
    assert sum(largest_share) / 10 > 0.3


def test_lda_accepts_gaps_in_the_class_numbers() -> None:
    labels = torch.tensor([2] * 20 + [7] * 20)
    parts = deal("lda", labels, 2, alpha=1e7)
    assert [labels[p].bincount(minlength=8).tolist() for p in parts.values()] == [[0, 0, 10, 0, 0, 0, 0, 10]] * 2


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_lda_refuses_a_senseless_alpha(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha is"):
        deal("lda", labels_of(10, 2), 2, alpha=alpha)


def test_lda_refuses_labels_that_are_sequences() -> None:
    with pytest.raises(InputError, match="use iid or chunks"):
        deal("lda", torch.zeros(10, 4, dtype=torch.long), 2)


@pytest.mark.parametrize("name", ["iid", "lda", "chunks"])
def test_more_clients_than_examples_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="3 examples cannot be divided among 4 clients"):
        deal(name, labels_of(3, 2), 4)
    with pytest.raises(InputError, match="at least one"):
        deal(name, labels_of(3, 2), 0)


def test_streams_differ_by_seed_and_purpose_and_repeat() -> None:
    streams = [stream(0, "a"), stream(1, "a"), stream(0, "b"), stream(0, "a", 1), stream(0, "a", -1), stream(-1, "a")]
    draws = [int(s.integers(2**62)) for s in streams]
    assert len(set(draws)) == 6
    assert int(stream(0, "a").integers(2**62)) == draws[0]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "parts.json"
    path.write_text(text)
    return path


def test_a_file_is_read_as_it_stands_with_sorted_clients_and_positions(tmp_path: Path) -> None:
    path = write(tmp_path, '{"10": [4, 2], "3": [0], "4": []}')
    parts = deal("file", labels_of(5, 2), 3, file=path)
    assert {c: p.tolist() for c, p in parts.items()} == {3: [0], 4: [], 10: [2, 4]}
    assert list(parts) == [3, 4, 10]
    assert parts[4].dtype == torch.long


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{'0': [1]}", "is not JSON"),
        ("", "is not JSON"),
        ("[[1], [2]]", "does not map clients to lists"),
        ("{}", "does not map clients to lists"),
        ('{"0": 1}', "does not map clients to lists"),
        ('{"a": [1]}', "clients are whole numbers"),
        ('{"-1": [1]}', "clients are whole numbers"),
        ('{"01": [1]}', "clients are whole numbers"),
        ('{"0": [1], "0": [2]}', "names client '0' twice"),
        ('{"0": [5]}', "the position 5: positions are whole numbers from 0 to 4"),
        ('{"0": [-1]}', "the position -1"),
        ('{"0": [1.0]}', "the position 1.0"),
        ('{"0": [true]}', "the position True"),
        ('{"0": ["1"]}', "the position '1'"),
        ('{"0": [1, 1]}', "position 1 to client 0 and again to client 0"),
        ('{"0": [1], "1": [2, 1]}', "position 1 to client 0 and again to client 1"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        deal("file", labels_of(5, 2), 0, file=write(tmp_path, text))


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\): check the path"):
        deal("file", labels_of(5, 2), 0, file=tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not JSON"):
        deal("file", labels_of(5, 2), 0, file=tmp_path / "binary.json")
    with pytest.raises(InputError, match="set partition_file"):
        deal("file", labels_of(5, 2), 0)


def test_a_file_with_another_number_of_clients_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '{"0": [1], "1": [2]}')
    assert len(deal("file", labels_of(5, 2), 0, file=path)) == 2
    with pytest.raises(InputError, match="has 2 clients, not 3"):
        deal("file", labels_of(5, 2), 3, file=path)


@pytest.mark.skipif(
    not (AUTHORS.exists() and LABELS.exists()), reason=f"needs the authors' partition file and the labels in {SHARED}"
)
def test_the_authors_own_partition_file_is_read() -> None:
    with np.load(LABELS, allow_pickle=False) as arrays:
        labels = torch.from_numpy(arrays["y_train"].astype(np.int64))
    parts = deal("file", labels, 10, file=AUTHORS)
    assert [len(parts[c]) for c in range(10)] == [5972, 4756, 5155, 5978, 6514, 4617, 4231, 5052, 2893, 4799]
    assert parts[3].tolist() == sorted(json.loads(AUTHORS.read_text())["3"])
    shares = torch.stack([labels[parts[c]].bincount(minlength=100) for c in range(10)])
    assert shares.sum(0).max() <= 500
    assert (shares.max(0).values > 150).float().mean() > 0.9, "alpha = 0.1: most classes live with one or two clients"
