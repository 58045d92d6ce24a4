# SPDX-License-Identifier: Apache-2.0
"""The gradient buffer: which weights have a place in it, and how its side stream is synchronised, noted on a CPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedquit.engine.cuda.gradient_buffer import GradientBuffer


class Stream:
    """A stream that notes whom it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams do; the backward pass is on the stream that is current."""
    done: list[str] = []
    now = [Stream("backward", done)]

    @contextlib.contextmanager
    def stream(other: Stream) -> Iterator[None]:
        now.append(other)
        yield
        now.pop()

    stand_ins: dict[str, Any] = {"stream": stream, "current_stream": lambda device: now[-1]}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return done


def buffer_on_a_gpu(log: list[str]) -> tuple[GradientBuffer, Tensor]:
    rows = torch.zeros(2, 8)
    buffer = GradientBuffer(rows, {0: 2, 2: 4, 6: 2})
    setattr(buffer, "_stream", Stream("side", log))  # noqa: B010 - the type is that of a real stream
    buffer.begin_step()
    return buffer, rows


def test_the_side_stream_waits_for_the_backward_pass_and_is_synchronised_once(log: list[str]) -> None:
    buffer, _ = buffer_on_a_gpu(log)
    with buffer.side_stream(torch.zeros(3)):
        pass
    buffer.synchronise()
    buffer.synchronise()
    assert log == ["side waits for backward", "backward waits for side"]


def test_a_side_stream_that_was_not_used_is_not_synchronised(log: list[str]) -> None:
    """A CUDA graph may not wait for a stream that is no part of its capture."""
    buffer, _ = buffer_on_a_gpu(log)
    buffer.synchronise()
    assert log == []


def test_what_the_side_stream_reads_stays_in_memory_until_it_is_synchronised(log: list[str]) -> None:
    buffer, _ = buffer_on_a_gpu(log)
    read = torch.zeros(3)
    alive = weakref.ref(read)
    with buffer.side_stream(read):
        del read
    assert alive() is not None, "its memory would be reused by the backward pass"
    buffer.synchronise()
    assert alive() is None


def test_only_whole_parameters_are_claimed_and_only_once(log: list[str]) -> None:
    buffer, rows = buffer_on_a_gpu(log)
    assert buffer.claim(rows[:, 2:4]) is None, "a part of one"
    assert buffer.claim(rows[:, 3:7]) is None, "between two"
    assert buffer.claim(torch.zeros(2, 4)) is None, "somebody else's"
    assert buffer.claim(rows[:, :2], rows[:, :2]) is None, "twice the same"
    claimed = buffer.claim(rows[:, 2:6].view(2, 2, 2).transpose(1, 2))
    assert claimed is not None
    (gradient,) = claimed
    gradient[:] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(buffer.gradients[1], torch.tensor([0.0, 0.0, 1.0, 3.0, 2.0, 4.0, 0.0, 0.0]))
    assert buffer.claim(rows[:, 2:6]) is None, "claimed already"
    assert buffer.claim(rows[:, :2], rows[:, 2:6]) is None, "one of them claimed already"
    assert buffer.claimed == {2}
    assert buffer.claim(rows[:, :2], rows[:, 6:]) is not None


def test_a_step_begins_without_claims(log: list[str]) -> None:
    buffer, rows = buffer_on_a_gpu(log)
    with buffer.side_stream(torch.zeros(3)):
        assert buffer.claim(rows[:, :2]) is not None
    buffer.begin_step()
    buffer.synchronise()
    assert not buffer.claimed
    assert buffer.claim(rows[:, :2]) is not None
    assert log == ["side waits for backward"]


def test_on_a_cpu_there_is_one_stream(log: list[str]) -> None:
    buffer = GradientBuffer(torch.zeros(2, 8), {0: 8})
    with buffer.side_stream(torch.zeros(3)):
        pass
    buffer.synchronise()
    assert log == []
