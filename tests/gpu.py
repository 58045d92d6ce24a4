# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: the mark, and the stacked engine there with replies that come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedquit.core import Memory, Model, Params, Reply
from fedquit.core.params import placed
from fedquit.data.federated import FederatedData
from fedquit.engine import Ask, GraphCache, StackedEngine

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# A warning of torch's is shown: as an error it would end a compilation, and the step would run uncompiled.
GPU_MARKS = (needs_gpu, pytest.mark.filterwarnings("default"))
GPU = torch.device("cuda")
CPU = torch.device("cpu")


def gpu_engine(model: Model, data: FederatedData, memory: Memory | None = None, **options: Any) -> StackedEngine:
    """The stacked engine on a GPU."""
    there = replace(data, dataset=data.dataset.to(GPU))
    return StackedEngine(model, there, {} if memory is None else memory, graphs=GraphCache(), **options)


def gpu_replies(engine: StackedEngine, ask: Ask) -> list[Reply]:
    """What an engine on a GPU replies, with its parameters in the host's memory."""
    sent: dict[str, Params] = {name: placed(params, GPU) for name, params in ask.sent.items()}
    replies = engine.run(replace(ask, sent=sent))
    return [replace(reply, params=placed(reply.params, CPU)) for reply in replies]
