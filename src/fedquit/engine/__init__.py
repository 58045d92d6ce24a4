# SPDX-License-Identifier: Apache-2.0
"""How clients' work is carried out: one seam, `Engine`, and what stands behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedquit.core import Memory, Model
from fedquit.data.federated import FederatedData
from fedquit.engine.choice import Choice, choose
from fedquit.engine.plan import Address
from fedquit.engine.precision import Precision, computing
from fedquit.engine.sequential import Ask, Engine, Examples, SequentialEngine, run_client
from fedquit.engine.stacked.engine import Recordings, StackedEngine, evaluation_model_of
from fedquit.engine.threaded import ThreadedEngine
from fedquit.utils.names import lookup

Open = Callable[[Model, FederatedData, Memory, Precision, int, Recordings], Engine]


def _sequential(
    model: Model, data: FederatedData, homes: Memory, precision: Precision, width: int, recordings: Recordings
) -> Engine:
    """One client after the other, step by step: the meaning of all others."""
    return SequentialEngine(model, data, homes, precision)


def _stacked(
    model: Model, data: FederatedData, homes: Memory, precision: Precision, width: int, recordings: Recordings
) -> Engine:
    """Many clients in one computation; on a GPU, steps are recorded and replayed."""
    return StackedEngine(model, data, homes, width, precision, recordings)


def _threaded(
    model: Model, data: FederatedData, homes: Memory, precision: Precision, width: int, recordings: Recordings
) -> Engine:
    """A client on each core, step by step; for networks that are too large to be stacked on a CPU."""
    workers = min(width or torch.get_num_threads(), torch.get_num_threads())
    return ThreadedEngine(model, data, homes, workers, precision)


def _auto(
    model: Model, data: FederatedData, homes: Memory, precision: Precision, width: int, recordings: Recordings
) -> Engine:
    """The one that is fastest here."""
    return ENGINES[choose("auto", model, data).name](model, data, homes, precision, width, recordings)


ENGINES: dict[str, Open] = {"auto": _auto, "sequential": _sequential, "stacked": _stacked, "threaded": _threaded}


def open_engine(
    name: str,
    model: Model,
    data: FederatedData,
    homes: Memory,
    precision: Precision = "float32",
    width: int = 0,
    recordings: Recordings | None = None,
) -> Engine:
    """The engine of that name."""
    known = recordings if recordings is not None else Recordings()
    return lookup(ENGINES, name, "engine")(model, data, homes, precision, width, known)


__all__ = [
    "ENGINES",
    "Address",
    "Ask",
    "Choice",
    "Engine",
    "Examples",
    "Precision",
    "Recordings",
    "SequentialEngine",
    "StackedEngine",
    "ThreadedEngine",
    "choose",
    "computing",
    "evaluation_model_of",
    "open_engine",
    "run_client",
]
