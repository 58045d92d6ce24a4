# SPDX-License-Identifier: Apache-2.0
"""How clients' tasks are carried out: an `Engine` takes an `Ask` and yields the clients' replies.

`sequential` is the reference. `stacked` and `threaded` compute the same faster; `auto` takes the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fedquit.core import Memory, Model
from fedquit.data.federated import FederatedData
from fedquit.engine.api import Ask, ClientIndices, Engine, Examples, LocalResult, client_memory, make_reply
from fedquit.engine.choice import Choice, choose
from fedquit.engine.evaluation_model import evaluation_model_of
from fedquit.engine.plan import Address
from fedquit.engine.precision import Precision, computing
from fedquit.engine.sequential import SequentialEngine, run_client, run_visit
from fedquit.engine.stacked.compiled import Compile
from fedquit.engine.stacked.engine import StackedEngine
from fedquit.engine.stacked.graph_cache import GraphCache
from fedquit.engine.threaded import ThreadedEngine
from fedquit.utils.names import lookup


@dataclass(frozen=True)
class EngineOptions:
    """What a run may ask of its engine.

    Attributes:
        precision: What networks compute in.
        width: How many clients are trained at once, at most; 0: as many as the engine likes.
        graphs: Captured and traced steps, shared by the engines over one data set.
        compile: Whether the stacked engine compiles steps on a GPU.
        rounds: Of training that are planned in all.
    """

    precision: Precision = "float32"
    width: int = 0
    graphs: GraphCache = field(default_factory=GraphCache, repr=False)
    compile: Compile = "auto"
    rounds: int = 1


EngineFactory = Callable[[Model, FederatedData, Memory, EngineOptions], Engine]


def _sequential(model: Model, data: FederatedData, memory: Memory, options: EngineOptions) -> Engine:
    """One client after the other, in plain torch: the reference for all others."""
    return SequentialEngine(model, data, memory, options.precision)


def _stacked(model: Model, data: FederatedData, memory: Memory, options: EngineOptions) -> Engine:
    """Many clients in one computation; on a GPU, steps are captured as CUDA graphs and replayed."""
    return StackedEngine(
        model,
        data,
        memory,
        width=options.width,
        precision=options.precision,
        graphs=options.graphs,
        compile=options.compile,
        rounds=options.rounds,
    )


def _threaded(model: Model, data: FederatedData, memory: Memory, options: EngineOptions) -> Engine:
    """One client on each CPU core; for networks that are too large to be stacked on a CPU."""
    threads = torch.get_num_threads()
    return ThreadedEngine(model, data, memory, min(options.width or threads, threads), options.precision)


def _auto(model: Model, data: FederatedData, memory: Memory, options: EngineOptions) -> Engine:
    """The fastest for this network, data and device."""
    return ENGINES[choose("auto", model, data).name](model, data, memory, options)


ENGINES: dict[str, EngineFactory] = {
    "auto": _auto,
    "sequential": _sequential,
    "stacked": _stacked,
    "threaded": _threaded,
}


def open_engine(
    name: str,
    model: Model,
    data: FederatedData,
    memory: Memory,
    precision: Precision = "float32",
    width: int = 0,
    graphs: GraphCache | None = None,
    compile: Compile = "auto",
    rounds: int = 1,
) -> Engine:
    """Make an engine.

    Args:
        name: One of `ENGINES`.
        model: The network that everybody trains.
        data: All clients' examples, on the device that computes.
        memory: What the clients keep between rounds, by "client/name"; the engine reads and writes it.
        precision: What networks compute in.
        width: How many clients are trained at once, at most; 0: as many as the engine likes.
        graphs: Captured and traced steps of earlier engines over the same data set; None for a cache of its own.
        compile: Whether the stacked engine compiles steps on a GPU; "auto" where the planned steps are worth it.
        rounds: Of training that are planned in all: a run that is resumed has to say the same.
    """
    options = EngineOptions(precision, width, graphs if graphs is not None else GraphCache(), compile, rounds)
    return lookup(ENGINES, name, "engine")(model, data, memory, options)


__all__ = [
    "ENGINES",
    "Address",
    "Ask",
    "Choice",
    "ClientIndices",
    "Compile",
    "Engine",
    "EngineOptions",
    "Examples",
    "GraphCache",
    "LocalResult",
    "Precision",
    "SequentialEngine",
    "StackedEngine",
    "ThreadedEngine",
    "choose",
    "client_memory",
    "computing",
    "evaluation_model_of",
    "make_reply",
    "open_engine",
    "run_client",
    "run_visit",
]
