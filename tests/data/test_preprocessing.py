# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from fedquit.core import SERVER, Local
from fedquit.data import FederatedData
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import DRAWS, ROTATION, AsStored, Pixels, Vary
from fedquit.engine import ClientIndices, Examples
from fedquit.engine.plan import make_plan
from fedquit.errors import InputError
from fedquit.models import load_model

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
STILL = 0.5  # no turn, no shift


def images(n: int = 3, side: int = 32) -> Tensor:
    return torch.randint(256, (n, 3, side, side), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def look(vary: Vary = "none", size: int = 0) -> Pixels:
    return Pixels(MEAN, STD, size, vary)


def test_plain_is_scaled_and_normalised_channel_by_channel() -> None:
    x = images()
    seen = look().plain(x)
    for c in range(3):
        torch.testing.assert_close(seen[:, c], (x[:, c].float() / 255 - MEAN[c]) / STD[c])
    assert look().shape((3, 32, 32)) == (3, 32, 32)


def test_plain_resizes_where_the_network_wants_another_size() -> None:
    seen = look(size=48).plain(images())
    torch.testing.assert_close(seen, functional.interpolate(look().plain(images()), (48, 48), mode="bilinear"))
    assert look(size=48).shape((3, 32, 32)) == (3, 48, 48) == tuple(seen.shape[1:])


def test_without_turn_shift_or_flip_the_varied_image_is_the_plain_one() -> None:
    u = torch.tensor([[STILL, STILL, STILL, 0.0]]).expand(3, 4)
    torch.testing.assert_close(look("rotate-pad-crop-flip").varied(images(), u), look().plain(images()))


@given(dy=st.integers(-2, 2), dx=st.integers(-2, 2), flip=st.booleans())
def test_a_shift_brings_in_zeros_and_a_flip_mirrors(dy: int, dx: int, flip: bool) -> None:
    x, size = images(1), 32
    u = torch.tensor([[STILL, (dy + 2.5) / 5, (dx + 2.5) / 5, 0.9 if flip else 0.1]])
    padded = functional.pad(look().plain(x), (2, 2, 2, 2))
    by_hand = padded[..., 2 + dy : 2 + dy + size, 2 + dx : 2 + dx + size]
    by_hand = by_hand.flip(-1) if flip else by_hand
    torch.testing.assert_close(look("rotate-pad-crop-flip").varied(x, u), by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("turn", [0.0, 0.3, 0.999])
def test_a_turn_is_scipys_with_mirrored_surroundings(turn: float) -> None:
    x = images(1)
    seen = look("rotate-pad-crop-flip").varied(x, torch.tensor([[turn, STILL, STILL, 0.0]]))
    degrees = math.degrees((2 * turn - 1) * ROTATION)
    by_hand = ndimage.rotate(look().plain(x)[0].numpy(), degrees, axes=(2, 1), reshape=False, order=1, mode="reflect")
    torch.testing.assert_close(seen[0], torch.from_numpy(by_hand), atol=1e-3, rtol=1e-3)


@given(dy=st.integers(0, 20), dx=st.integers(0, 20), flip=st.booleans())
def test_enlarge_and_crop_is_interpolation_and_a_slice(dy: int, dx: int, flip: bool) -> None:
    x = images(1)
    u = torch.tensor([[(dy + 0.5) / 21, (dx + 0.5) / 21, 0.9 if flip else 0.1]])
    large = functional.interpolate(look().plain(x), (244, 244), mode="bilinear")
    by_hand = large[..., dy : dy + 224, dx : dx + 224]
    by_hand = by_hand.flip(-1) if flip else by_hand
    torch.testing.assert_close(look("enlarge-crop-flip", 224).varied(x, u), by_hand, atol=2e-4, rtol=1e-3)


def test_a_resized_crop_of_everything_is_the_image_and_a_small_one_is_a_part_of_it() -> None:
    x = torch.arange(64).reshape(1, 1, 1, 64).expand(1, 3, 64, 64).to(torch.uint8)  # brightness = column
    grey = replace(look("resized-crop-flip"), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    square = 0.5  # of the ratios between 3/4 and 4/3
    whole = grey.varied(x, torch.tensor([[1.0, square, 0.3, 0.7, 0.0]]))
    torch.testing.assert_close(whole, x.float(), atol=1e-3, rtol=0)
    left, right = (grey.varied(x, torch.tensor([[0.0, square, 0.5, at, 0.0]])) for at in (0.0, 1.0))
    width = 64 * math.sqrt(0.08)
    assert left.min() < 0.5
    assert left.max() == pytest.approx(width - 0.5, abs=0.6)
    assert right.max() > 62.4
    assert right.min() == pytest.approx(64 - width - 0.5, abs=0.6)


@pytest.mark.parametrize("vary", list(DRAWS))
def test_every_example_is_varied_by_its_own_numbers_alone(vary: Vary) -> None:
    x, u = images(4), torch.rand(4, DRAWS[vary], generator=torch.Generator().manual_seed(0))
    together = look(vary).varied(x, u)
    alone = torch.cat([look(vary).varied(x[i : i + 1], u[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone)
    assert (vary == "none") == torch.equal(together, look().plain(x))


def test_a_model_makes_stored_bytes_ready_and_takes_ready_ones_as_they_are() -> None:
    model = load_model("cnn", (3, 32, 32), 5, look=look())
    params = model.init(0)
    assert torch.equal(model(params, images()), model(params, look().plain(images())))
    double = load_model("cnn", (3, 32, 32), 5, look=look(), dtype=torch.float64)
    assert double(double.init(0), images()).dtype == torch.float64


def test_training_sees_augmented_examples_with_the_plans_numbers_and_unlearning_plain_ones() -> None:
    data = Dataset(images(6), torch.arange(6) % 2, images(2), torch.tensor([0, 1]), 2, look("rotate-pad-crop-flip"))
    federated = FederatedData(data, {0: torch.arange(6)})
    mine = Examples.of(federated, ClientIndices.of(federated, 0, "all", 3))
    plan = make_plan(6, Local(batch_size=4), 7, draws=mine.look.draws)
    without = make_plan(6, Local(batch_size=4), 7)
    assert torch.equal(plan.steps[0], without.steps[0])
    assert torch.equal(plan.noise[1], without.noise[1])
    at, u = plan.steps[0], plan.variation[0]
    assert u.shape == (4, 4)
    assert not torch.equal(u, plan.noise[0])
    assert torch.equal(mine.batch(at, plan.noise[0], u).x, data.look.varied(data.x[at], u))
    assert torch.equal(mine.batch(at, plan.noise[0]).x, data.look.plain(data.x[at]))


def test_the_look_is_part_of_what_data_is_known_by() -> None:
    def known(vary: Vary) -> str:
        data = Dataset(images(2), torch.tensor([0, 1]), images(2), torch.tensor([0, 1]), 2, look(vary))
        return FederatedData(data, {SERVER: torch.arange(2)}).fingerprint()

    assert known("none") != known("rotate-pad-crop-flip")


def test_what_cannot_be_is_refused() -> None:
    y = torch.tensor([0, 1])
    with pytest.raises(InputError, match="store them as uint8"):
        Dataset(images(2).float(), y, images(2).float(), y, 2, look())
    with pytest.raises(InputError, match="one mean and one standard deviation"):
        Pixels((0.5,), (0.2, 0.3))
    with pytest.raises(InputError, match="no augmentation 'spin'"):
        Pixels(MEAN, STD, 0, "spin")  # type: ignore[arg-type]
    assert AsStored().plain(y) is y
    assert AsStored().varied(y, y) is y
    assert AsStored().shape((2,)) == (2,)
