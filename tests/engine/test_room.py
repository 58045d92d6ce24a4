# SPDX-License-Identifier: Apache-2.0
"""Where the weights' gradients go, and when they are there: the two streams of a GPU, written down on a CPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedquit.engine.cuda.ops import Room


class Stream:
    """A stream that notes whom it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams do; the way back is the stream that is current."""
    done: list[str] = []
    now = [Stream("way back", done)]

    @contextlib.contextmanager
    def stream(other: Stream) -> Iterator[None]:
        now.append(other)
        yield
        now.pop()

    stand_ins: dict[str, Any] = {"stream": stream, "current_stream": lambda device: now[-1]}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return done


def room_on_a_gpu(log: list[str]) -> tuple[Room, Tensor]:
    rows = torch.zeros(2, 8)
    room = Room(rows, {0: 2, 2: 4, 6: 2})
    setattr(room, "_beside", Stream("beside", log))  # noqa: B010 - the type is that of a real stream
    room.open()
    return room, rows


def test_what_is_beside_begins_when_the_way_back_has_come_so_far_and_is_met_once(log: list[str]) -> None:
    room, _ = room_on_a_gpu(log)
    with room.beside(torch.zeros(3)):
        pass
    room.meet()
    room.meet()
    assert log == ["beside waits for way back", "way back waits for beside"]


def test_nothing_is_met_where_nothing_was_beside(log: list[str]) -> None:
    """A recording may not wait for a stream that is no part of it."""
    room, _ = room_on_a_gpu(log)
    room.meet()
    assert log == []


def test_what_is_read_beside_stays_until_the_streams_meet(log: list[str]) -> None:
    room, _ = room_on_a_gpu(log)
    read = torch.zeros(3)
    alive = weakref.ref(read)
    with room.beside(read):
        del read
    assert alive() is not None, "its memory would be given to what the way back writes next"
    room.meet()
    assert alive() is None


def test_only_whole_parameters_have_a_place_and_only_once(log: list[str]) -> None:
    room, rows = room_on_a_gpu(log)
    assert room.places(rows[:, 2:4]) is None, "a part of one"
    assert room.places(rows[:, 3:7]) is None, "between two"
    assert room.places(torch.zeros(2, 4)) is None, "somebody else's"
    assert room.places(rows[:, :2], rows[:, :2]) is None, "twice the same"
    places = room.places(rows[:, 2:6].view(2, 2, 2).transpose(1, 2))
    assert places is not None
    (place,) = places
    place[:] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(room.gradients[1], torch.tensor([0.0, 0.0, 1.0, 3.0, 2.0, 4.0, 0.0, 0.0]))
    assert room.places(rows[:, 2:6]) is None, "given away"
    assert room.places(rows[:, :2], rows[:, 2:6]) is None, "one of them given away"
    assert room.claimed == {2}
    assert room.places(rows[:, :2], rows[:, 6:]) is not None


def test_a_step_begins_anew(log: list[str]) -> None:
    room, rows = room_on_a_gpu(log)
    with room.beside(torch.zeros(3)):
        assert room.places(rows[:, :2]) is not None
    room.open()
    room.meet()
    assert not room.claimed
    assert room.places(rows[:, :2]) is not None
    assert log == ["beside waits for way back"]


def test_on_a_cpu_there_is_one_stream(log: list[str]) -> None:
    room = Room(torch.zeros(2, 8), {0: 8})
    with room.beside(torch.zeros(3)):
        pass
    room.meet()
    assert log == []
