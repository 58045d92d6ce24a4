# SPDX-License-Identifier: Apache-2.0
"""Worlds over Flower's messages, in one process; without the extra `flower` nothing here is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedquit.data.federated import FederatedData
from fedquit.models import FunctionalModel

if TYPE_CHECKING:
    from flower.grid_world import MakeWorld, Setup


@pytest.fixture
def make(toy_data: FederatedData, toy_model: FunctionalModel, tmp_path: Path) -> MakeWorld:
    """A world of the toy data in a folder of its own."""
    from flower import grid_world

    def made(name: str = "world", **options: Any) -> Setup:
        return grid_world.Setup(toy_data, toy_model, tmp_path / name, **options)

    return made
