# SPDX-License-Identifier: Apache-2.0
"""A recipe so small that a whole run takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fedquit.core import Federation, Request, State, Trained
from fedquit.core.method import Method
from fedquit.running.recipe import Recipe, build

TINY: dict[str, Any] = {
    "title": "tiny",
    "data": {
        "name": "synthetic",
        "options": {"examples": 120, "test_examples": 60, "classes": 3, "size": 4},
        "partition": "iid",
        "clients": 4,
        "public": 0.2,
        "holdout": 0.2,
    },
    "model": {"name": "seam_methods:small_net", "dtype": "float64"},
    "train": {"rounds": 3, "batch_size": 8, "lr": 0.1},
    "request": [{"clients": [1]}],
    "method": {"name": "fedquit", "lr": 1e-2},
    "recover": {"until": "rounds", "max_rounds": 2},
}


def tiny(**changes: Any) -> Recipe:
    """The tiny recipe with some sections changed: `tiny(method={...}, train={"rounds": 5})`."""
    values = dict(TINY)
    for key, change in changes.items():
        values[key] = (
            {**TINY[key], **change} if isinstance(change, dict) and key in TINY and key != "method" else change
        )
    return build(Recipe, values, "recipe")


def wrong_outputs(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with one output too many."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes + 1))


def wrong_inputs(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network for other examples."""
    return nn.Sequential(nn.Flatten(), nn.Linear(99, classes))


@dataclass(frozen=True)
class Overflow(Method):
    """Weights that are finite, with logits that are not."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next({n: p * 0 + 1e308 for n, p in state.params.items()})
