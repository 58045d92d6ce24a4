# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a federation (`types`), methods, FedAvg, and the algebra of parameters."""

from __future__ import annotations

from fedquit.core.fedavg import Learn, cross_entropy
from fedquit.core.method import Knob, Method, require_whole_clients
from fedquit.core.params import mean
from fedquit.core.types import (
    SERVER,
    Batch,
    ClientId,
    Federation,
    Local,
    Memory,
    Model,
    Params,
    Reply,
    Request,
    Sent,
    Split,
    State,
    Task,
    Trained,
    Training,
)

__all__ = [
    "SERVER",
    "Batch",
    "ClientId",
    "Federation",
    "Knob",
    "Learn",
    "Local",
    "Memory",
    "Method",
    "Model",
    "Params",
    "Reply",
    "Request",
    "Sent",
    "Split",
    "State",
    "Task",
    "Trained",
    "Training",
    "cross_entropy",
    "mean",
    "require_whole_clients",
]
