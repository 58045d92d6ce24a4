# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: setup, training cache, lifecycle, costs, and the files of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.running.recipe import Recipe as Recipe
    from fedquit.running.recipe import load as load
    from fedquit.running.setup import Setup as Setup
    from fedquit.running.setup import build_setup as build_setup

__all__ = ["Recipe", "Setup", "build_setup", "load"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.running.recipe": ["Recipe", "load"],
            "fedquit.running.setup": ["Setup", "build_setup"],
        },
    )
