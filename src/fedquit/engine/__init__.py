# SPDX-License-Identifier: Apache-2.0
"""How clients' work is carried out: one seam, `Engine`, and what stands behind it."""

from __future__ import annotations

from collections.abc import Callable

from fedquit.core import Memory, Model
from fedquit.data.federated import FederatedData
from fedquit.engine.plan import Address
from fedquit.engine.sequential import Ask, Engine, Examples, SequentialEngine, run_client
from fedquit.names import lookup

ENGINES: dict[str, Callable[[Model, FederatedData, Memory], Engine]] = {"sequential": SequentialEngine}


def open_engine(name: str, model: Model, data: FederatedData, homes: Memory) -> Engine:
    """The engine of that name."""
    return lookup(ENGINES, name, "engine")(model, data, homes)


__all__ = ["ENGINES", "Address", "Ask", "Engine", "Examples", "SequentialEngine", "open_engine", "run_client"]
