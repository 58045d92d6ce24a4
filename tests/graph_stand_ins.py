# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU: a stand-in repeats a step as it was at its capture.

What Python holds at that moment is frozen, as in a CUDA graph; only what lies in memory may change between replays.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from fedquit.engine import StackedEngine
from fedquit.engine.stacked.capture import CapturedSteps


@dataclass
class Graph:
    """A captured step."""

    steps: list[Callable[[], None]] = field(default_factory=list)

    def pool(self) -> None:
        pass

    def replay(self) -> None:
        for step in self.steps:
            step()


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


def frozen(steps: CapturedSteps) -> CapturedSteps:
    """As Python holds it now, with all its parts; tensors are shared."""
    work = copy.copy(steps.work)
    for name, part in vars(steps.work).items():
        if type(part).__module__.startswith("fedquit.engine"):
            setattr(work, name, copy.copy(part))
    copied = copy.copy(steps)
    copied.work = work
    copied.clock = copy.copy(steps.clock)
    return copied


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stacked engine capture its steps."""
    capturing: list[Graph] = []
    take = CapturedSteps._step

    @contextlib.contextmanager
    def capture(graph: Graph, pool: object, stream: Stream) -> Iterator[None]:
        assert not gc.isenabled(), "a graph that is freed now would make CUDA end the capture"
        capturing.append(graph)
        yield
        capturing.pop()

    def step(self: CapturedSteps, width: int) -> None:
        if capturing:  # nothing is computed during a capture
            capturing[-1].steps.append(partial(take, frozen(self), width))
        else:
            take(self, width)

    monkeypatch.setattr(CapturedSteps, "_step", step)
    monkeypatch.setattr(StackedEngine, "captures_graphs", True)
    stand_ins: dict[str, Any] = {"CUDAGraph": Graph, "graph": capture, "Stream": Stream, "current_stream": Stream}
    for name, stand_in in {**stand_ins, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
