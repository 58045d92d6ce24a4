# SPDX-License-Identifier: Apache-2.0
"""That the benchmark of the data measures what it says, on a federation small enough for a test."""

from __future__ import annotations

import dataclasses
import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from data.published_world import unpacked
from fedquit.bench import data as benched
from fedquit.bench.data import Sizes, measured, peak_memory, whole
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import Pixels
from fedquit.engine import Examples
from fedquit.errors import InputError

LITTLE = Sizes(
    clients=2,
    steps=3,
    evaluated=4,
    settings=("model.name=mlp", "data.options={examples=300}", "data.partition=iid", "data.clients=5"),
)


def test_every_figure_of_the_requirements_is_there_with_its_limit(tmp_path: Path) -> None:
    bench = measured(tmp_path, 1, LITTLE)
    limits = {f.name: (f.limit, f.unit) for f in bench.figures if f.limit is not None}
    assert limits == {
        "peak memory, 5 clients, mlp, after evaluation": (1.5, "GB"),
        "copies of the images in memory": (1.1, ""),
        "input, of a training step": (10.0, "%"),
        "Python calls for each image": (1.0, ""),
    }
    by = {f.name: f for f in bench.figures}
    assert by["copies of the images in memory"].value > 1
    assert by["Python calls for each image"].kept is True

    (loading,) = [f for f in bench.figures if f.name == "loading CIFAR-100"]
    assert loading.kept is None, "without the published files there is no verdict on loading them"
    assert loading.note.startswith("random pixels of the same size")

    peaks = [f.value for f in bench.figures if f.name.startswith("peak memory")]
    assert len(peaks) == 5
    assert all(b > a - 0.001 for a, b in pairwise(peaks)), "it only grows, but for what the kernel counts late"
    assert peaks[0] > 0.05, "python with torch"


def test_random_pixels_are_as_many_as_asked_for() -> None:
    data = whole(examples=50)
    assert (tuple(data.x.shape), len(data.test_y), data.classes) == ((50, 3, 32, 32), 10_000, 100)


def test_a_copy_of_the_images_is_noticed_and_a_view_is_none() -> None:
    gc.collect()
    x = torch.zeros(400, 3, 32, 32, dtype=torch.uint8)
    y = torch.zeros(400, dtype=torch.long)
    data = Dataset(x, y, x[:200], y[:200], 2, Pixels((0.5,) * 3, (0.5,) * 3))
    once = benched._copies(data)
    copied = data.x.clone()
    assert benched._copies(data) == pytest.approx(once + copied.nbytes / (data.x.nbytes + data.test_x.nbytes))


def test_work_for_each_image_is_noticed() -> None:
    mine = Examples.unmarked(
        torch.zeros(64, 3, 4, 4, dtype=torch.uint8), torch.zeros(64, dtype=torch.long), Pixels((0.5,) * 3, (0.5,) * 3)
    )

    def one_by_one(count: int) -> None:
        torch.stack([mine.look.plain(mine.x[i : i + 1]) for i in range(count)])

    assert benched._calls(lambda: one_by_one(64)) - benched._calls(lambda: one_by_one(1)) >= 63
    assert benched._calls(lambda: benched._batch(mine, 64)) - benched._calls(lambda: benched._batch(mine, 1)) < 10


def test_the_peak_is_never_below_what_is_held() -> None:
    held = torch.zeros(40_000_000, dtype=torch.uint8)
    held.fill_(1)
    assert peak_memory() > held.nbytes


@pytest.mark.parametrize("sizes", [Sizes(clients=0), Sizes(steps=0), Sizes(evaluated=0)])
def test_nothing_cannot_be_measured(sizes: Sizes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one"):
        measured(tmp_path, 1, sizes)
    with pytest.raises(InputError, match="at least one"):
        measured(tmp_path, 0, dataclasses.replace(sizes, clients=1, steps=1, evaluated=1))


@pytest.mark.slow
def test_the_published_files_are_loaded_where_they_are(tmp_path: Path) -> None:
    settings = ("model.name=mlp", "data.partition=iid")
    found = measured(unpacked("cifar100", tmp_path), 1, dataclasses.replace(LITTLE, settings=settings))
    (loading,) = [f for f in found.figures if f.name == "loading CIFAR-100"]
    assert (loading.limit, loading.note) == (5.0, "the published files")
    (copies,) = [f for f in found.figures if f.name.startswith("copies")]
    assert 1 <= copies.value < 1.02, "one copy, and one hundredth at a client"
