# SPDX-License-Identifier: Apache-2.0
"""A recipe so small that a whole run takes a second."""

from __future__ import annotations

from typing import Any

from fedquit.recipe import Recipe, build

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
