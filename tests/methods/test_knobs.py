# SPDX-License-Identifier: Apache-2.0
"""Every method declares what sets its strength, with a range that can be swept."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, get_type_hints

import pytest

from fedquit.core import Federation, Knob, Method, Request, State, Trained
from fedquit.errors import InputError, UnknownNameError
from fedquit.methods import METHODS
from fedquit.running.recipe import build

README = Path(__file__).parent.parent.parent / "docs" / "methods" / "README.md"
NONE = {"not", "natural", "retrain"}  # a sign is changed or not; nothing is done; the reference of all
DERIVED = 0  # a default that stands for a value of the training
STRENGTH = re.compile(r"lr|.*_lr|epochs|weight|strength|.*_rounds")  # names of fields that set a strength
NO_STRENGTH = {("fedosd", "recovery_lr"): "of the recovery, and only where it is projected"}


def faults(name: str, cls: type[Method]) -> list[str]:
    """What is wrong with the knobs of a method, in words."""
    wrong = []
    types = get_type_hints(cls)
    defaults = {f.name: f.default for f in fields(cls)}
    if "knobs" not in vars(cls):
        wrong.append("it does not say which knobs it has")
    for knob in cls.knobs:
        kind = types.get(knob.field)
        if knob.field not in defaults or kind not in (int, float):
            wrong.append(f"{knob.field} is no number among its fields")
            continue
        if {type(knob.low), type(knob.high)} != {kind}:
            wrong.append(f"the ends of {knob.field} are not of type {kind.__name__}")
        values = [defaults[knob.field], *(p[knob.field] for p in cls.presets.values() if knob.field in p)]
        if any(value != DERIVED and not knob.low <= value <= knob.high for value in values):
            wrong.append(f"{knob.field} has a value outside of its range")
    declared = [knob.field for knob in cls.knobs]
    if len(set(declared)) < len(declared):
        wrong.append("a knob is declared twice")
    for field in defaults:
        if STRENGTH.fullmatch(field) and field not in declared and (name, field) not in NO_STRENGTH:
            wrong.append(f"{field} is no knob")
    return wrong


@pytest.mark.parametrize("name", METHODS)
def test_the_knobs_of_a_method_are_its_strengths_within_their_ranges(name: str) -> None:
    assert faults(name, METHODS[name]) == []


def test_three_methods_have_no_knob_and_say_so() -> None:
    assert {name for name, cls in METHODS.items() if cls.knobs == ()} == NONE


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NONE])
@pytest.mark.parametrize("n", [2, 5])
def test_a_method_can_be_built_at_every_value_of_a_knob(name: str, n: int) -> None:
    """As a recipe builds it, which refuses 2.0 where a whole number is wanted; with every preset."""
    for preset in ("", *METHODS[name].presets):
        changes = METHODS[name].presets.get(preset, {})
        for knob in METHODS[name].knobs:
            for value in knob.values(n):
                method = build(METHODS[name], {**changes, knob.field: value}, "method")
                assert getattr(method, knob.field) == value


def test_the_page_lists_every_knob() -> None:
    lines = README.read_text().splitlines()
    at = lines.index("| method | option | from | to | scale |")
    rows = [line for line in lines[at + 2 :] if line.startswith("|")]
    shown = [(*re.findall(r"`([^`]+)`", row), *(cell.strip() for cell in row.split("|")[3:6])) for row in rows]
    declared = [
        (name, knob.field, f"{knob.low:g}", f"{knob.high:g}", knob.scale)
        for name, cls in METHODS.items()
        for knob in cls.knobs
    ]
    assert shown == declared


def test_values_are_spaced_on_the_scale_and_reach_both_ends() -> None:
    assert Knob("lr", 1e-5, 1e-2).values(4) == [1e-5, 1e-4, 1e-3, 1e-2]
    assert Knob("lr", 1e-3, 1e-1).values(2) == [1e-3, 1e-1]
    assert Knob("weight", 0.5, 1.0, "linear").values(3) == [0.5, 0.75, 1.0]
    assert Knob("momentum", 0.1, 0.7, "linear").values(4) == [0.1, 0.3, 0.5, 0.7]
    assert Knob("v", -1.0, 1.0, "linear").values(3) == [-1.0, 0.0, 1.0]


def test_values_of_whole_numbers_are_whole_and_named_once() -> None:
    values = Knob("rounds", 1, 100).values(5)
    assert values == [1, 3, 10, 32, 100]
    assert all(isinstance(value, int) for value in values)
    assert Knob("layers", 1, 3, "linear").values(9) == [1, 2, 3]
    assert all(isinstance(value, float) for value in Knob("epochs", 1.0, 4.0).values(3))


@pytest.mark.parametrize("n", [1, 0, -1])
def test_fewer_than_two_values_are_refused(n: int) -> None:
    with pytest.raises(InputError, match="cannot reach from one end of 'lr' to the other: ask for 2 or more"):
        Knob("lr", 1e-5, 1e-2).values(n)


def test_a_range_that_cannot_be_swept_is_refused() -> None:
    for low, high in ((1.0, 1.0), (2.0, 1.0), (0.1, float("inf")), (float("nan"), 1.0)):
        with pytest.raises(InputError, match=r"the knob 'lr' goes from .*: give low below high"):
            Knob("lr", low, high)
    for low in (0.0, -1.0):
        with pytest.raises(InputError, match="on a log scale: begin above 0"):
            Knob("lr", low, 1.0)
        assert Knob("lr", low, 1.0, "linear").low == low
    with pytest.raises(UnknownNameError, match="unknown scale of a knob 'lin': did you mean 'linear'"):
        Knob("lr", 0.1, 1.0, "lin")  # type: ignore[arg-type]


# What the test of the methods would say to a method that declares its knobs wrongly.


@dataclass(frozen=True)
class Plain(Method):
    lr: float = 1e-2
    rounds_: int = 3
    name: str = ""

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("lr", 1e-3, 1e-1),)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state


@dataclass(frozen=True)
class Silent(Plain):
    weight: float = 0.5


@dataclass(frozen=True)
class Weightless(Plain):
    weight: float = 0.5
    knobs = (Knob("lr", 1e-3, 1e-1),)


@dataclass(frozen=True)
class Missing(Plain):
    knobs = (Knob("lr", 1e-3, 1e-1), Knob("rate", 1e-3, 1e-1))


@dataclass(frozen=True)
class Wordy(Plain):
    knobs = (Knob("lr", 1e-3, 1e-1), Knob("name", 1, 2))


@dataclass(frozen=True)
class Fractional(Plain):
    knobs = (Knob("lr", 1e-3, 1e-1), Knob("rounds_", 1.0, 4.5))


@dataclass(frozen=True)
class Outside(Plain):
    knobs = (Knob("lr", 1e-1, 1.0),)


@dataclass(frozen=True)
class PresetOutside(Plain):
    presets = {"strong": {"lr": 1.0}}  # noqa: RUF012
    knobs = (Knob("lr", 1e-3, 1e-1),)


@dataclass(frozen=True)
class Twice(Plain):
    knobs = (Knob("lr", 1e-3, 1e-1), Knob("lr", 1e-4, 1e-1))


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Plain, []),
        (Silent, ["it does not say which knobs it has", "weight is no knob"]),
        (Weightless, ["weight is no knob"]),
        (Missing, ["rate is no number among its fields"]),
        (Wordy, ["name is no number among its fields"]),
        (Fractional, ["the ends of rounds_ are not of type int"]),
        (Outside, ["lr has a value outside of its range"]),
        (PresetOutside, ["lr has a value outside of its range"]),
        (Twice, ["a knob is declared twice"]),
    ],
)
def test_a_wrong_declaration_is_found(cls: type[Method], expected: list[str]) -> None:
    assert faults("mine", cls) == expected
