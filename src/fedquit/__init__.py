# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning that runs.

For a PyTorch model and a forget set, without any federation:

    unlearned = fedquit.unlearn(model, forget_set, lr=1e-4)
    z_virt = fedquit.virtual_logits(logits, labels, teacher="min")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedquit.distill.unlearning import unlearn as unlearn
    from fedquit.distill.virtual_teacher import virtual_logits as virtual_logits
    from fedquit.errors import FedquitError as FedquitError

__version__ = "0.1.0"
__all__ = ["FedquitError", "__version__", "unlearn", "virtual_logits"]

_HOMES = {
    "FedquitError": "fedquit.errors",
    "unlearn": "fedquit.distill.unlearning",
    "virtual_logits": "fedquit.distill.virtual_teacher",
}


def __getattr__(name: str) -> object:
    """Import on first use: `fedquit --version` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedquit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
