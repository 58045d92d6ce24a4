# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a federation (`types`), methods, FedAvg, and the algebra of parameters."""

from __future__ import annotations

from fedquit.core.fedavg import Learn, cross_entropy
from fedquit.core.gradients import per_example_gradients
from fedquit.core.method import Knob, Method, require_whole_clients
from fedquit.core.params import mean
from fedquit.core.stopping import EarlyStopping
from fedquit.core.types import (
    SERVER,
    Batch,
    ClientId,
    Effort,
    Federation,
    Local,
    Measurement,
    Memory,
    Model,
    Params,
    Part,
    Program,
    Reply,
    Request,
    Sent,
    Split,
    State,
    Step,
    Task,
    Trained,
    Training,
)

__all__ = [
    "SERVER",
    "Batch",
    "ClientId",
    "EarlyStopping",
    "Effort",
    "Federation",
    "Knob",
    "Learn",
    "Local",
    "Measurement",
    "Memory",
    "Method",
    "Model",
    "Params",
    "Part",
    "Program",
    "Reply",
    "Request",
    "Sent",
    "Split",
    "State",
    "Step",
    "Task",
    "Trained",
    "Training",
    "cross_entropy",
    "mean",
    "per_example_gradients",
    "require_whole_clients",
]
