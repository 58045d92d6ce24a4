# SPDX-License-Identifier: Apache-2.0
"""What the clients see: recovery is augmented with every method, and what unlearns on data to forget is as stored.

The network writes down whether an image that it gets is one of those stored, or a variation. No task is asked what it
claims.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor
from torch.func import debug_unwrap

from fedquit.core import SERVER, Learn, Memory, Model, Params, Reply, Request
from fedquit.data.federated import FederatedData
from fedquit.engine import Ask, SequentialEngine
from fedquit.methods import METHODS
from fedquit.running.setup import Setup, build_setup
from methods.method_world import served
from worlds import tiny

DOCS = Path(__file__).parent.parent.parent / "docs" / "methods"
LEAVES = Request((1,))
STORED, VARIED = "as stored", "augmented"

# For each method, and each preset that differs: what leaving clients see in the unlearning, what those who stay see in
# it, and what everybody sees in the recovery. "": nobody is asked for anything that uses data.
SEES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("fedquit", ""): (STORED, "", VARIED),
    ("federaser", ""): ("", VARIED, ""),
    ("pga", ""): (STORED, "", VARIED),
    ("mode", ""): (STORED, VARIED, VARIED),
    ("fedau", ""): (STORED, "", VARIED),
    ("fedau", "authors"): ("", "", VARIED),
    ("not", ""): ("", "", VARIED),
    ("fedosd", ""): (STORED, VARIED, VARIED),
    ("fedosd", "authors"): (STORED, VARIED, VARIED),
    ("ascent", ""): (STORED, "", VARIED),
    ("fedunran", ""): (STORED, "", VARIED),
    ("fukd", ""): ("", "", VARIED),
    ("rapid", ""): ("", VARIED, VARIED),
    ("fused", ""): ("", VARIED, VARIED),
    ("puf", ""): (VARIED, VARIED, VARIED),
    ("puf", "special"): (VARIED, "", VARIED),
    ("scrub", ""): (STORED, STORED, VARIED),
    ("ssd", ""): (STORED, STORED, VARIED),
    ("bad_teacher", ""): (STORED, STORED, VARIED),
    ("natural", ""): ("", "", VARIED),
    ("retrain", ""): ("", VARIED, ""),
}
CASES = [(name, preset) for name, cls in METHODS.items() for preset in ("", *cls.presets)]


def setup_of(name: str, preset: str = "") -> Setup:
    """Images of bytes, which ordinary training turns, crops and flips."""
    images = {"name": "fedquit.running.smoke:images", "options": {"like": "cifar10", "examples": 48}}
    method = {"name": name, **({"preset": preset} if preset else {})}
    return build_setup(tiny(data=images, train={"rounds": 4}, method=method, engine={"name": "sequential"}))


@dataclass
class Watched:
    """An engine whose network writes down what kind of images each visit gives it."""

    model: Model
    data: FederatedData
    memory: Memory
    seen: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    images: list[Tensor] = field(default_factory=list)  # of the present visit

    def __post_init__(self) -> None:
        self.stored = {image.numpy().tobytes() for image in self.data.dataset.look.plain(self.data.x)}

    def init(self, seed: int) -> Params:
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        self.images.append(debug_unwrap(x))  # gradients of single examples wrap them
        return self.model(params, x)

    def run(self, ask: Ask) -> Iterator[Reply]:
        phase = ask.address.phase.partition("-")[0]
        for client in ask.clients:
            who = "server" if client == SERVER else "leaving" if client in LEAVES.clients else "staying"
            replies = list(SequentialEngine(self, self.data, self.memory).run(replace(ask, clients=(client,))))
            images = [image for batch in self.images for image in batch.detach().flatten(0, -4)]
            self.images.clear()
            kinds = {STORED if image.numpy().tobytes() in self.stored else VARIED for image in images}
            self.seen[phase, who] |= kinds
            yield from replies


def watched(name: str, preset: str, where: Path) -> dict[tuple[str, str], set[str]]:
    """What was seen in two rounds of unlearning and one of recovery, by phase and by who saw it."""
    setup = setup_of(name, preset)
    session, state, trained = served(setup, where, LEAVES)
    method = setup.method
    engine = session.engine
    assert isinstance(engine, SequentialEngine)
    watching = Watched(engine.model, engine.data, engine.memory)
    session.engine = watching
    for number in range(min(2, method.rounds(trained, LEAVES))):
        session.enter("unlearn-0", number)
        state = method.unlearn(session, state, trained, LEAVES)
    if method.recovers:
        session.present = tuple(LEAVES.stay(session.present))
        session.enter("recover-0", 0)
        method.recover(session, state.fresh(), trained, LEAVES)
    return {key: kinds for key, kinds in watching.seen.items() if kinds}


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_what_each_visit_sees_is_what_the_table_says(name: str, preset: str, tmp_path: Path) -> None:
    leaving, staying, recovery = SEES.get((name, preset), SEES[name, ""])
    expected = {("unlearn", "leaving"): leaving, ("unlearn", "staying"): staying, ("recover", "staying"): recovery}
    if name == "fukd":
        expected["unlearn", "server"] = STORED
    assert watched(name, preset, tmp_path) == {key: {kind} for key, kind in expected.items() if kind}


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_every_recovery_and_every_task_of_training_is_augmented(name: str, preset: str) -> None:
    recovers = METHODS[name].recovers
    assert SEES.get((name, preset), SEES[name, ""])[2] == (VARIED if recovers else "")
    method = setup_of(name, preset).method
    assert all(method.training_task(Learn(), client, LEAVES).augments for client in range(4))


def test_the_readme_has_the_same_table() -> None:
    lines = (DOCS / "README.md").read_text().splitlines()
    at = lines.index("| method | leaving clients, in the unlearning | those who stay, in the unlearning | recovery |")
    shown = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name, *preset = re.findall(r"`([^`]+)`", first)
        shown[name, "".join(preset)] = tuple(cells)
    assert shown == SEES


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_says_what_is_seen_and_why(name: str) -> None:
    page = "baselines" if name in ("natural", "retrain") else name
    (paragraph,) = re.findall(r"^\*\*Data\.\*\* (.*?)\n\n", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    text = " ".join(paragraph.split())
    kinds = {kind for row in (SEES[name, ""], SEES.get((name, "authors"), ())) for kind in row[:2] if kind}
    if name == "fukd":
        kinds = {STORED}
    assert all(kind in text for kind in kinds), f"{page}.md does not say that data is {kinds}"
    if not kinds:
        assert "augmented" in text, f"{page}.md says nothing of the recovery"
