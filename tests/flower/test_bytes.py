# SPDX-License-Identifier: Apache-2.0
"""What travels is what the meter counts, and an overhead that docs/flower.md states."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch

from fedquit.data.federated import FederatedData
from fedquit.models import FunctionalModel
from flower.grid_world import Setup
from own_networks import adapted_net

pytestmark = pytest.mark.flower

DOCS = Path(__file__).parents[2] / "docs" / "flower.md"


@pytest.mark.parametrize("frozen", [False, True])
def test_bytes_on_the_wire_are_those_counted_and_the_stated_overhead(
    toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path, frozen: bool
) -> None:
    """Of a network with a frozen layer, what is trained travels alone: adapters cost what adapters hold."""
    if frozen:
        toy_model = FunctionalModel(partial(adapted_net, (1, 6, 6), 5), torch.float64)
        assert set(toy_model.init(0)) == {"1.down", "1.up", "3.weight", "3.bias"}
    stated = re.search(r"at most ([\d,]+) bytes\s+for a message and ([\d,]+) for each tensor", DOCS.read_text())
    assert stated
    message, tensor = (int(n.replace(",", "")) for n in stated.groups())
    setup = Setup(toy_data, toy_model, tmp_path)
    setup.serve(setup.config())
    setup.grid.down_bytes = setup.grid.up_bytes = 0
    setup.outbox(1).file()
    (entry,) = setup.serve(setup.config()).erasures
    down = sum(entry.costs[p]["down_bytes"] for p in ("unlearning", "recovery"))
    up = sum(entry.costs[p]["up_bytes"] for p in ("unlearning", "recovery"))
    trips = sum(entry.costs[p]["participations"] for p in ("unlearning", "recovery"))
    assert trips == 1 + 4
    assert down == trips * sum(p.nbytes for p in toy_model.init(0).values())
    most = trips * (message + tensor * len(toy_model.init(0)))
    for counted, measured in ((down, setup.grid.down_bytes), (up, setup.grid.up_bytes)):
        assert counted < measured <= counted + most, dataclasses.asdict(entry)["costs"]
        assert measured - counted > most / 2, "the overhead that is stated is not far from the truth"
