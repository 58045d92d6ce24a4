# SPDX-License-Identifier: Apache-2.0
"""A backdoor that the leaving client plants, from the recipe to the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.audit.metrics.backdoor import Trigger
from fedquit.audit.poison import plant, trigger_for
from fedquit.data.federated import Dataset, FederatedData
from fedquit.errors import InputError, RequestError
from fedquit.running.recipe import Recipe
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from worlds import tiny

PLANTED: dict[str, Any] = {"backdoor": 0.5, "backdoor_target": 2, "backdoor_size": 2, "attacks": []}


def poisoned_world(**changes: Any) -> Recipe:
    """Three classes of 8x8 images that a small network learns at once; client 1 plants the trigger."""
    data = {"options": {"examples": 240, "test_examples": 90, "classes": 3, "size": 8, "noise": 0.5}, "public": 0.0}
    training = {"rounds": 12, "batch_size": 8, "lr": 0.05, "weight_decay": 0.0}
    given: dict[str, Any] = {
        "data": data,
        "model": {"name": "mlp", "options": {}, "dtype": "float64"},
        "train": training,
        "evaluate": PLANTED,
        "recover": {"until": "rounds", "max_rounds": 1},
    }
    return tiny(**(given | changes))


def dealt(x: torch.Tensor, classes: int = 3) -> FederatedData:
    y = torch.arange(len(x)) % classes
    return FederatedData(Dataset(x, y, x[:6], y[:6], classes), {0: torch.arange(0, 10), 1: torch.arange(10, 30)})


@pytest.mark.parametrize(("x", "bright"), [(torch.rand(30, 1, 5, 5), None), (torch.zeros(30, 3, 5, 5).byte(), 255.0)])
def test_half_of_that_client_s_images_get_the_stamp_and_the_label_and_nothing_else_changes(
    x: torch.Tensor, bright: float | None
) -> None:
    data = dealt(x)
    trigger = trigger_for(data.dataset, target=2, size=2)
    assert trigger.value == (bright if bright is not None else float(x.max()))
    found = plant(data, [1], 0.5, trigger, seed=0)
    stamped = (found.x[..., -2:, -2:] == trigger.value).flatten(1).all(1)
    assert int(stamped.sum()) == 10
    assert not stamped[:10].any()
    assert (found.y[stamped] == 2).all()
    assert torch.equal(found.y[~stamped], data.y[~stamped])
    assert torch.equal(found.x[..., :-2, :], data.x[..., :-2, :]), "outside the square every pixel stays"
    assert found.x.dtype == x.dtype
    assert torch.equal(data.x, x), "the data that came in is as it was"


def test_the_same_seed_stamps_the_same_images_and_the_fingerprint_tells_of_it() -> None:
    data = dealt(torch.rand(30, 1, 5, 5, generator=torch.Generator().manual_seed(0)))
    trigger = Trigger(1, 2, 1.0)
    one, again, other = (plant(data, [1], 0.5, trigger, seed) for seed in (0, 0, 1))
    assert one.fingerprint() == again.fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), data.fingerprint()}) == 3


def test_what_cannot_carry_a_trigger_is_refused() -> None:
    tokens = dealt(torch.zeros(30, 7, dtype=torch.long)).dataset
    with pytest.raises(InputError, match=r"a backdoor is a stamp on images.*set evaluate\.backdoor = 0"):
        trigger_for(tokens, 0, 3)
    images = dealt(torch.rand(30, 1, 5, 5))
    with pytest.raises(InputError, match="the classes run from 0 to 2"):
        trigger_for(images.dataset, 3, 3)
    with pytest.raises(InputError, match="make it fit"):
        trigger_for(images.dataset, 0, 6)
    with pytest.raises(InputError, match="above 0 and at most 1"):
        plant(images, [1], 0.0, Trigger(0, 2, 1.0), 0)
    with pytest.raises(RequestError, match="client 7 is not in the federation"):
        plant(images, [7], 0.5, Trigger(0, 2, 1.0), 0)
    with pytest.raises(InputError, match="clients that leave whole"):
        poisoned_world(request=[{"clients": [1], "samples": 0.5}])
    with pytest.raises(InputError, match="between 0 and 1"):
        poisoned_world(evaluate={"backdoor": 1.5})


def test_only_the_leaving_clients_of_the_first_request_are_poisoned() -> None:
    clean, planted = (build_setup(poisoned_world(evaluate=e)).data for e in (PLANTED | {"backdoor": 0.0}, PLANTED))
    changed = (clean.x != planted.x).flatten(1).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(planted.train[1].tolist())
    assert len(changed) >= len(planted.train[1]) // 2 - 1
    assert torch.equal(clean.dataset.test_x, planted.dataset.test_x)


def test_a_run_shows_the_backdoor_in_original_gone_in_retrain_and_left_by_a_method_that_does_nothing(
    tmp_path: Path,
) -> None:
    nothing = poisoned_world(method={"name": "natural"}, recover={"until": "rounds", "max_rounds": 0})
    asr = {row["phase"]: row["backdoor_asr"] for row in run(nothing, tmp_path / "run")["rows"]}
    assert asr["original"] > 80
    assert asr["retrained"] < 20
    assert asr["unlearned"] == asr["recovered"] == asr["original"], "it is caught: the trigger still works"


def test_without_a_backdoor_no_row_speaks_of_one(tmp_path: Path) -> None:
    rows = run(tiny(), tmp_path / "run")["rows"]
    assert not any("backdoor_asr" in row for row in rows)
