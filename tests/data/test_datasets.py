# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, and `federate`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.core import SERVER
from fedquit.data import DATASETS, Dataset, FederatedData, _drawn, federate, load_dataset
from fedquit.data.partition import stream
from fedquit.errors import InputError, UnknownNameError


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("synthetic", examples=200, test_examples=10, classes=4, size=4)


def test_noise_changes_its_share_of_the_training_labels_and_nothing_else() -> None:
    clean, noisy = load_dataset("fashion_mnist_mini"), load_dataset("fashion_mnist_mini", noise=0.2)
    wrong = noisy.y != clean.y
    assert 0.18 < float(wrong.float().mean()) < 0.22
    assert set(noisy.y[wrong].tolist()) == set(range(10))
    assert torch.equal(noisy.x, clean.x)
    assert torch.equal(noisy.test_y, clean.test_y)
    assert torch.equal(load_dataset("fashion_mnist_mini", noise=0.2).y, noisy.y), "drawn once and for all"
    more = load_dataset("fashion_mnist_mini", noise=0.4).y != clean.y
    assert bool((more | ~wrong).all()), "what is wrong at a smaller share is wrong at a larger one"
    for share in (-0.1, 1.0):
        with pytest.raises(InputError, match="at least 0 and below 1"):
            load_dataset("fashion_mnist_mini", noise=share)


def test_fashion_mnist_mini_has_its_documented_shape_and_scale() -> None:
    data = load_dataset("fashion_mnist_mini")
    assert data.x.shape == (5000, 1, 28, 28)
    assert data.test_x.shape == (1000, 1, 28, 28)
    assert data.x.dtype == torch.float32
    assert data.y.bincount().tolist() == [500] * 10
    assert data.test_y.bincount().tolist() == [100] * 10
    assert data.x.min().item() == pytest.approx((0 - 0.2860) / 0.3530, abs=1e-6)
    assert data.x.max().item() == pytest.approx((1 - 0.2860) / 0.3530, abs=1e-6)
    assert abs(data.x.mean().item()) < 0.02
    assert abs(data.x.std().item() - 1) < 0.02


def test_digits_are_centred_and_split_once_and_for_all() -> None:
    data, again = load_dataset("digits"), load_dataset("digits")
    assert data.x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert abs(torch.cat([data.x, data.test_x]).mean().item()) < 1e-3
    assert (data.x.max() - data.x.min()).item() == pytest.approx(1)
    assert torch.equal(data.test_x, again.test_x)
    assert data.test_y.bincount(minlength=10).min() > 20, "a split in file order would leave out whole writers"


def test_digits_training_and_test_images_together_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    pixels = (torch.cat([data.x, data.test_x]).flatten(1) + 0.3053).mul(16).round().to(torch.long)
    rows = torch.cat([pixels, torch.cat([data.y, data.test_y])[:, None]], dim=1)
    found = load_digits()
    theirs = torch.cat([torch.tensor(found.data).long(), torch.tensor(found.target)[:, None]], dim=1)
    assert sorted(rows.tolist()) == sorted(theirs.tolist())


def test_synthetic_data_follows_its_options() -> None:
    data = load_dataset("synthetic", examples=30, test_examples=9, classes=3, channels=2, size=5, noise=0.0)
    assert data.x.shape == (30, 2, 5, 5)
    assert data.test_x.shape == (9, 2, 5, 5)
    assert data.classes == 3
    assert data.y.bincount().tolist() == [10, 10, 10]
    for c in range(3):
        both = torch.cat([data.x[data.y == c], data.test_x[data.test_y == c]])
        assert torch.equal(both, both[:1].expand_as(both)), "without noise a class is its prototype, in both sets"


def test_synthetic_noise_is_spread_about_the_prototypes() -> None:
    clean, noisy = (load_dataset("synthetic", classes=1, noise=noise, size=8) for noise in (0.0, 2.0))
    spread = (noisy.x - clean.x[:1]).std().item()
    assert spread == pytest.approx(2.0, rel=0.02)


def test_synthetic_data_depends_on_its_seed_only() -> None:
    torch.manual_seed(1)
    one = load_dataset("synthetic", seed=5)
    torch.manual_seed(2)
    assert torch.equal(one.x, load_dataset("synthetic", seed=5).x)
    assert not torch.equal(one.x, load_dataset("synthetic", seed=6).x)


@pytest.mark.parametrize(
    "options",
    [
        {"examples": 0},
        {"classes": 0},
        {"channels": 0},
        {"size": 0},
        {"test_examples": 0},
        {"noise": -1.0},
        {"noise": float("nan")},
    ],
)
def test_synthetic_data_refuses_senseless_options(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"{name}={value}"):
        load_dataset("synthetic", **options)


def test_an_unknown_data_set_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown data set 'digit': did you mean 'digits'\?"):
        load_dataset("digit")


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown option of data set '{name}' 'exampels'"):
        load_dataset(name, exampels=3)


def test_an_unknown_option_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'examples'"):
        load_dataset("synthetic", exampels=3)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_for_test.py").write_text(
        "import torch\n"
        "from fedquit.data import load_dataset\n"
        "def small(n=7): return load_dataset('synthetic', examples=n)\n"
        "def anything(**options): return load_dataset('synthetic', **options)\n"
        "def wrong(): return torch.zeros(3)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_data_for_test"


def test_ones_own_data_set_is_imported_and_gets_its_options(own_module: str) -> None:
    assert len(load_dataset(f"{own_module}:small").x) == 7
    assert len(load_dataset(f"{own_module}:small", n=9).x) == 9
    assert len(load_dataset(f"{own_module}:anything", examples=11).x) == 11


def test_ones_own_data_set_is_checked(own_module: str) -> None:
    with pytest.raises(InputError, match=r"returned Tensor: it must return a fedquit\.data\.Dataset"):
        load_dataset(f"{own_module}:wrong")
    with pytest.raises(InputError, match="is not a function"):
        load_dataset(f"{own_module}:number")
    with pytest.raises(UnknownNameError, match="did you mean 'small'"):
        load_dataset(f"{own_module}:smal")
    with pytest.raises(UnknownNameError, match="unknown option"):
        load_dataset(f"{own_module}:small", m=9)
    with pytest.raises(UnknownNameError, match="cannot be imported"):
        load_dataset("no_such_package_for_test:f")


def every_position(data: FederatedData) -> list[int]:
    parts = [data.public, *data.train.values(), *data.holdout.values()]
    return sorted(torch.cat(parts).tolist())


@settings(max_examples=40)
@given(
    partition=st.sampled_from(["iid", "chunks"]),
    clients=st.integers(1, 12),
    seed=st.integers(0, 5),
    holdout=st.floats(0, 0.99),
    public=st.floats(0, 0.9),
)
def test_federate_gives_every_example_to_one_place(
    dataset: Dataset, partition: str, clients: int, seed: int, holdout: float, public: float
) -> None:
    data = federate(dataset, partition=partition, clients=clients, seed=seed, holdout=holdout, public=public)
    assert every_position(data) == list(range(200))
    assert data.clients == tuple(range(clients))
    assert len(data.public) == math.floor(public * 200 + 1e-9)
    for c in data.clients:
        n = len(data.train[c]) + len(data.holdout[c])
        assert len(data.holdout[c]) == math.floor(holdout * n + 1e-9)
        assert len(data.train[c]) >= 1
        assert torch.equal(data.train[c], data.train[c].sort().values)


def test_a_holdout_always_leaves_an_example_to_train_on(dataset: Dataset) -> None:
    almost_one = 1 - 2**-53
    for clients in (1, 3, 200):
        data = federate(dataset, clients=clients, holdout=almost_one)
        assert all(len(t) >= 1 for t in data.train.values())


def test_federate_repeats_and_the_seed_changes_every_part(dataset: Dataset) -> None:
    a, b, c = (federate(dataset, seed=s, holdout=0.2, public=0.1, clients=4) for s in (3, 3, 4))
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()
    assert torch.equal(a.holdout[2], b.holdout[2])
    assert not torch.equal(a.public, c.public)


def test_holdouts_are_drawn_for_each_client_on_its_own(dataset: Dataset) -> None:
    data = federate(dataset, partition="chunks", clients=2, holdout=0.3)
    assert not torch.equal(data.holdout[0], data.holdout[1] - 100)


def test_a_holdout_by_class_has_the_client_s_own_classes(dataset: Dataset) -> None:
    data = federate(dataset, partition="lda", alpha=1.0, clients=3, holdout=0.3, holdout_by_class=True)
    plain = federate(dataset, partition="lda", alpha=1.0, clients=3, holdout=0.3)
    for c, held in data.holdout.items():
        assert len(held) == len(plain.holdout[c])
        everything = torch.cat([data.train[c], held])
        assert torch.equal(everything.sort().values, torch.cat([plain.train[c], plain.holdout[c]]).sort().values)
        mine, all_mine = (torch.bincount(dataset.y[at], minlength=dataset.classes) for at in (held, everything))
        assert ((mine - len(held) / len(everything) * all_mine).abs() < 1).all()
    assert any(not torch.equal(data.holdout[c], plain.holdout[c]) for c in data.holdout)


def test_each_example_is_as_likely_to_be_held_out_by_class() -> None:
    labels = torch.tensor([0] * 3 + [1] * 7)
    taken = torch.zeros(10)
    for seed in range(600):
        held, _ = _drawn(torch.arange(10), 0.4, stream(seed, "holdout", 0), labels)
        taken[held] += 1
    assert ((taken / 600 - 0.4).abs() < 4 * math.sqrt(0.4 * 0.6 / 600)).all()


def test_the_holdout_does_not_change_who_has_what(dataset: Dataset) -> None:
    with_it, without = (federate(dataset, partition="lda", alpha=1.0, clients=4, holdout=h) for h in (0.3, 0.0))
    for c in range(4):
        assert torch.equal(torch.cat([with_it.train[c], with_it.holdout[c]]).sort().values, without.train[c])
        assert 0.2 < len(with_it.holdout[c]) / len(without.train[c]) <= 0.3


def test_the_public_part_is_a_random_one(dataset: Dataset) -> None:
    public = federate(dataset, partition="chunks", clients=2, public=0.25).public
    assert not torch.equal(public, torch.arange(50))
    assert SERVER not in federate(dataset, clients=2, public=0.25).clients


def test_lda_in_federate_uses_alpha(dataset: Dataset) -> None:
    even = federate(dataset, partition="lda", alpha=1e7, clients=5)
    skewed = federate(dataset, partition="lda", alpha=0.2, clients=5)
    assert {len(t) for t in even.train.values()} == {40}
    assert len({len(t) for t in skewed.train.values()}) > 1


def test_a_file_says_who_has_what_and_the_server_takes_its_part_off(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    file.write_text(json.dumps({"0": list(range(100, 200)), "5": list(range(50))}))
    data = federate(dataset, partition="file", clients=0, partition_file=file)
    assert data.clients == (0, 5)
    assert data.train[5].tolist() == list(range(50))
    shared = federate(dataset, partition="file", clients=2, partition_file=file, public=0.4)
    ours = set(shared.public.tolist())
    assert shared.train[5].tolist() == [p for p in range(50) if p not in ours]
    assert len(shared.train[5]) < 50


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "idd"}, "did you mean 'iid'"),
        ({"holdout": 1.0}, "holdout is 1.0"),
        ({"holdout": -0.1}, "holdout is -0.1"),
        ({"public": 1.5}, "public is 1.5"),
        ({"public": float("nan")}, "public is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"clients": 0}, "at least one"),
        ({"clients": 201}, "take fewer clients"),
        ({"partition_file": "x.json"}, "set partition to 'file'"),
        ({"partition": "file"}, "set partition_file"),
    ],
)
def test_federate_refuses_what_cannot_be_dealt_out(dataset: Dataset, options: dict[str, Any], says: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=says):
        federate(dataset, **options)
