# SPDX-License-Identifier: Apache-2.0
"""Imports that the docs of 0.1 showed keep working, and say what to import instead."""

from __future__ import annotations

import importlib
import sys

import pytest

MOVED = {
    "fedquit.accounting": ("fedquit.running.paper_costs", ("SETTINGS", "bill", "printed")),
    "fedquit.data.look": ("fedquit.data.preprocessing", ("Pixels",)),
    "fedquit.fedavg": ("fedquit.core.fedavg", ("fedavg", "Learn")),
    "fedquit.method": ("fedquit.core.method", ("Method",)),
    "fedquit.metrics.forgetting_quality": ("fedquit.audit.metrics.forgetting_quality", ("forgetting_quality",)),
    "fedquit.metrics.klom": ("fedquit.audit.metrics.klom", ("klom",)),
    "fedquit.params": ("fedquit.core.params", ("mean",)),
}


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_is_found_under_its_old_name_with_a_warning(old: str) -> None:
    new, names = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        alias = importlib.import_module(old)
    for name in names:
        assert getattr(alias, name) is getattr(importlib.import_module(new), name)
