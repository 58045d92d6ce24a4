# SPDX-License-Identifier: Apache-2.0
"""Training a federation from scratch, or taking it from the cache.

Original and every Retrain lie under the hash of what determines them, and serve every method on the same setting.
Methods that must see the training (FedEraser keeps its history, PGA's clients their last model) are attached to it;
several can be attached to one training, each with a shelf of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedquit.core import ClientId, Federation, Memory, Params, Reply, Request, State, Task, Trained, Training
from fedquit.core.fedavg import fedavg
from fedquit.core.method import Method
from fedquit.core.params import nbytes
from fedquit.data.federated import FederatedData
from fedquit.errors import StoreError
from fedquit.running.costs import Metered
from fedquit.running.session import Progress, Session, advance
from fedquit.running.setup import Setup
from fedquit.running.store import Memories, StateFile, locked
from fedquit.utils.names import source_of

CACHE_SCHEMA = 6  # raise it whenever the same recipe would train another model, or keep it in another form
Attached = Mapping[str, Method]  # by name


class Reporter(Protocol):
    """Somebody who wants to know how far a run is."""

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins, or goes on after `done` rounds."""

    def round(self, done: int, note: str) -> None:
        """A round is over."""


class Silent:
    """Nobody is watching."""

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """Say nothing."""

    def round(self, done: int, note: str) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Federated:
    """A trained federation: what a request finds, what was kept on the way, and what it took."""

    trained: Trained
    kept: Memories
    progress: Progress


@dataclass(frozen=True)
class Hooks:
    """Methods that prepare for a request while a federation trains: they watch, or replace a client's task."""

    attached: Attached
    memory: Callable[[str], Memory]  # the shelf of each method
    request: Request | None  # which they may have to know in advance

    def replace_task(self, task: Task, client: ClientId) -> Task:
        """What this client does."""
        for method in self.attached.values():
            assert self.request is not None
            task = method.training_task(task, client, self.request)
        return task

    def watch(self, clock: int, start: Params, reply: Reply) -> None:
        """A reply passes by."""
        for name, method in self.attached.items():
            method.watch(self.memory(name), clock, start, reply)

    def after_round(self, clock: int, examples: Mapping[ClientId, int]) -> None:
        """A round is over."""
        for name, method in self.attached.items():
            method.after_round(self.memory(name), clock, examples)

    def round(self, fed: Federation, state: State, training: Training, clients: Sequence[ClientId]) -> State:
        """One round of ordinary training with all of them attached."""
        hooks: dict[str, Any] = {"watch": self.watch, "after_round": self.after_round}
        return fedavg(fed, state, training, clients, replace_task=self.replace_task, **hooks)


def train(
    setup: Setup,
    data: FederatedData,
    cache: Path,
    *,
    reporter: Reporter,
    title: str = "",
    attached: Attached | None = None,
    request: Request | None = None,
) -> Federated:
    """Train a federation on this data from scratch, or take it from the cache.

    `attached` methods prepare for a `request`: they watch, or replace a client's task.
    """
    attached = {name: m for name, m in (attached or {}).items() if m.shapes_training} if request else {}
    folder = cache / _key(setup, data, attached, request)
    with locked(folder, wait=True):  # before anything is read: another process may be at work on the same training
        kept, progress = _trained(setup, data, folder, attached, request, reporter, title)
    examples = {c: len(data.view(c, "all")) for c in data.clients}
    return Federated(Trained(progress.state.params, setup.initial, setup.training, examples, {}), kept, progress)


def _trained(
    setup: Setup,
    data: FederatedData,
    folder: Path,
    attached: Attached,
    request: Request | None,
    reporter: Reporter,
    title: str,
) -> tuple[Memories, Progress]:
    kept, file, training = (
        Memories.open(folder, device=setup.device),
        StateFile(folder / "state.safetensors"),
        setup.training,
    )
    session = Session(setup.engine(data, kept.clients), setup.recipe.seed, data.clients, memories=kept.own)
    meter = Metered(session, work=setup.flops)
    if not file.path.exists():
        require_disk(setup, folder, attached)

    hooks = Hooks(attached, kept.of, request)

    def step(state: State) -> State:
        return hooks.round(meter, state, training, data.clients)

    rounds = advance(session, "train", State(setup.initial), step, file, training.rounds, meter)
    return kept, driven(rounds, reporter, title, training.rounds)


def _key(setup: Setup, data: FederatedData, attached: Attached, request: Request | None) -> str:
    recipe = setup.recipe
    knowing = request if any(m.knows_request for m in attached.values()) else None
    what = {
        "schema": CACHE_SCHEMA,
        "data": data.fingerprint(),
        "model": dataclasses.asdict(recipe.model),
        "network": setup.network,
        "train": dataclasses.asdict(recipe.train),
        "seed": recipe.seed,
        "precision": setup.precision,
        "attached": repr((sorted(attached.items()), knowing, [source_of(n) for n in attached])) if attached else "",
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()


def require_disk(setup: Setup, folder: Path, attached: Attached) -> None:
    """Refuse a training whose history would not fit, before it begins."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = len(setup.data.clients)
    sizes = {n: m.history_bytes(setup.training, clients, nbytes(setup.initial)) for n, m in attached.items()}
    free = shutil.disk_usage(folder).free
    if sum(sizes.values()) > free:
        name = max(sizes, key=lambda n: sizes[n])
        raise StoreError(
            f"{name} would keep a history of {sizes[name]:,} bytes under {folder}, where {free:,} are free: make room, "
            "choose another --cache, or let it keep less (a larger interval, bfloat16)."
        )


def driven(rounds: Iterator[Progress], reporter: Reporter, title: str, total: int | None) -> Progress:
    """Let a phase run to its end, and say how far it is."""
    last = next(rounds)
    reporter.phase(title, total, last.state.round)
    for last in rounds:
        reporter.round(last.state.round, "")
    return last
