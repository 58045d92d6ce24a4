# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning on Flower: real processes, TLS, and nodes that have keys of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.flower.client import ClientData as ClientData
    from fedquit.flower.client import erasable as erasable
    from fedquit.flower.config import ServerConfig as ServerConfig
    from fedquit.flower.server import serve as serve

__all__ = ["ClientData", "ServerConfig", "erasable", "serve"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.flower.client": ["ClientData", "erasable"],
            "fedquit.flower.config": ["ServerConfig"],
            "fedquit.flower.server": ["serve"],
        },
    )
