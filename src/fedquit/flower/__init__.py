# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning on Flower: real processes, TLS, and nodes that have keys of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.flower.client import ClientData as ClientData
    from fedquit.flower.client import erasable as erasable
    from fedquit.flower.client import erasing_mod as erasing_mod
    from fedquit.flower.client import remaining as remaining
    from fedquit.flower.config import ServerConfig as ServerConfig
    from fedquit.flower.forgetting import Erasure as Erasure
    from fedquit.flower.forgetting import Forgetting as Forgetting
    from fedquit.flower.own_training import Unlearning as Unlearning
    from fedquit.flower.own_training import arrays_of as arrays_of
    from fedquit.flower.server import serve as serve

__all__ = [
    "ClientData",
    "Erasure",
    "Forgetting",
    "ServerConfig",
    "Unlearning",
    "arrays_of",
    "erasable",
    "erasing_mod",
    "remaining",
    "serve",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.flower.client": ["ClientData", "erasable", "erasing_mod", "remaining"],
            "fedquit.flower.config": ["ServerConfig"],
            "fedquit.flower.forgetting": ["Erasure", "Forgetting"],
            "fedquit.flower.own_training": ["Unlearning", "arrays_of"],
            "fedquit.flower.server": ["serve"],
        },
    )
