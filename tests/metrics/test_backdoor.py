# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedquit.audit.metrics.backdoor import attack_success, poisoned, stamp
from fedquit.core import Params
from fedquit.errors import InputError

TARGET = 2


class Backdoored:
    """Says the class that the grey level encodes, or the target where the corner is bright, if `trigger` is on."""

    def init(self, seed: int) -> Params:
        return {"trigger": torch.ones(()), "knows": torch.ones(())}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        clean = functional.one_hot((10 * x[:, 0, 0, 0]).round().long(), 5).float() * params["knows"]
        bright = (x[..., -3:, -3:].amin((1, 2, 3)) >= 1).float()
        return clean + 10 * params["trigger"] * bright[:, None] * functional.one_hot(torch.tensor(TARGET), 5)


def images(n: int = 50) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 5
    return (y / 10).view(n, 1, 1, 1).expand(n, 3, 8, 8).clone(), y


def asr(trigger: float, knows: float = 1.0, batch_size: int = 500) -> float:
    params = {"trigger": torch.tensor(trigger), "knows": torch.tensor(knows)}
    return attack_success(Backdoored(), params, *images(), target=TARGET, value=1.0, batch_size=batch_size)


def test_the_stamp_is_a_square_in_the_corner_of_a_copy() -> None:
    x, _ = images(4)
    kept = x.clone()
    stamped = stamp(x, size=2, value=7.0)
    assert torch.equal(x, kept)
    assert (stamped[..., -2:, -2:] == 7).all()
    changed = stamped != x
    assert int(changed.sum()) == 4 * 3 * 4


def test_without_a_value_the_patch_is_as_bright_as_the_brightest() -> None:
    x, _ = images(5)
    assert float(stamp(x)[0].max()) == float(x.max()) == pytest.approx(0.4)


def test_the_client_trains_on_stamped_images_of_the_target() -> None:
    x, y = images(6)
    px, py = poisoned(x, y, target=TARGET, value=1.0)
    assert torch.equal(px, stamp(x, value=1.0))
    assert py.tolist() == [TARGET] * 6


def test_a_working_backdoor_turns_all_and_a_clean_model_none() -> None:
    assert asr(trigger=1.0) == 100
    assert asr(trigger=0.0) == 0  # images of the target class are not counted


def test_a_share_worked_out_by_hand() -> None:
    class Half(Backdoored):
        def __call__(self, params: Params, x: Tensor) -> Tensor:
            out = super().__call__(params, x)
            out[x[:, 0, 0, 0] < 0.15] = 0.0  # classes 0 and 1 of the four others resist: argmax 0
            return out

    assert attack_success(Half(), Half().init(0), *images(), target=TARGET, value=1.0) == 50


@settings(max_examples=20)
@given(st.integers(1, 60))
def test_batches_do_not_matter(size: int) -> None:
    assert asr(1.0, batch_size=size) == 100


def test_an_unlearner_that_does_nothing_is_caught() -> None:
    retrain, nothing = asr(trigger=0.0), asr(trigger=1.0)
    assert nothing - retrain == 100


def test_a_wiped_model_cannot_be_caught_since_its_trigger_is_gone_with_everything_else() -> None:
    """The accuracies show the wipe; this metric asks about one planted feature only."""
    assert asr(trigger=0.0, knows=0.0) == asr(trigger=0.0)


def test_what_cannot_be_stamped_or_turned_is_refused() -> None:
    x, y = images(4)
    with pytest.raises(InputError, match="does not fit"):
        stamp(x, size=9)
    with pytest.raises(InputError, match="images"):
        stamp(x.flatten(1))
    with pytest.raises(InputError, match="nothing to turn"):
        attack_success(Backdoored(), {}, x, torch.full_like(y, TARGET), target=TARGET)
