# SPDX-License-Identifier: Apache-2.0
"""Training a federation from scratch, or taking it from the cache.

Original and every Retrain lie under the hash of what determines them, and serve every method on the same setting.
Methods that must see the training (FedEraser keeps its history, PGA's clients their last model) are attached to it;
several can be attached to one training, each with a part of the server's memory of its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fedquit.audit.evaluation import Evaluation
from fedquit.core import Request, State, Trained
from fedquit.core.local_layers import layers_by_client
from fedquit.core.params import nbytes
from fedquit.data.federated import FederatedData
from fedquit.errors import StoreError
from fedquit.running.costs import Metered
from fedquit.running.lifecycle import Attached, Hooks
from fedquit.running.recipe import Recipe, without_later_defaults
from fedquit.running.rows import LastRounds, PathPoint
from fedquit.running.session import Progress, Rounds, Session, advance
from fedquit.running.setup import Setup
from fedquit.running.store import Memories, StateFile, locked
from fedquit.utils.names import source_of

__all__ = ["Attached", "Federated", "Hooks", "Reporter", "Silent", "driven", "require_disk", "train"]

CACHE_SCHEMA = 6  # raise it whenever the same recipe would train another model, or keep it in another form


class Reporter(Protocol):
    """Is told how far a run is."""

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins, or goes on after `done` rounds."""

    def round(self, done: int, note: str) -> None:
        """A round is over."""


class Silent:
    """A reporter that says nothing."""

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """Say nothing."""

    def round(self, done: int, note: str) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Federated:
    """A trained federation: what a request finds, what its methods remember, and what the training took."""

    trained: Trained
    memories: Memories
    progress: Progress
    last_rounds: Sequence[PathPoint] = ()  # the accuracies after each of its last rounds, where they were recorded
    training: str = ""  # the hash of what determines it: the name of its folder in the cache


def train(
    setup: Setup,
    data: FederatedData,
    cache: Path,
    *,
    reporter: Reporter,
    title: str = "",
    attached: Attached | None = None,
    request: Request | None = None,
    evaluation: Evaluation | None = None,
) -> Federated:
    """Train a federation from scratch, or take it from the cache.

    Args:
        setup: the recipe's network and training.
        data: whose clients train.
        cache: the folder of all trainings, each under the hash of what determines it.
        reporter: is told how far the training is.
        title: under which it is reported.
        attached: methods that prepare for the request: they watch, or replace a client's task.
        request: that they prepare for; without one, none is attached.
        evaluation: judges the models after the last rounds, whose accuracies are kept beside the training. A cached
            training that lacks them, of an older version, is repeated for a recipe that reads them
            (`reads_last_rounds`), and taken as it is for any other.
    """
    shaping = {name: m for name, m in (attached or {}).items() if m.shapes_training} if request else {}
    folder = cache / training_hash(setup, data, shaping, request)
    with locked(folder, wait=True):  # before anything is read: another process may be at work on the same training
        memories = Memories.open(folder, device=setup.device)
        file = StateFile(folder / "state.safetensors")
        if not file.path.exists():
            require_disk(setup, folder, shaping)
        total = setup.training.rounds
        recorder = LastRounds(evaluation, folder, total) if evaluation else None
        rounds = _rounds(setup, data, memories, file, Hooks(shaping, memories.of, request))
        progress = driven(_recorded(rounds, recorder), reporter, title, total)
        if recorder and not recorder.complete and reads_last_rounds(setup.recipe):
            again = f"{title}, once more: its last rounds were not recorded".lstrip(", ")
            _repeat(setup, data, folder / "again", recorder, Hooks(shaping, memories.of, request), reporter, again)
    last = recorder.points if recorder and recorder.complete else ()
    examples = {c: len(data.view(c, "all")) for c in data.clients}
    trained = Trained(progress.state.params, setup.initial, setup.training, examples, {})
    return Federated(trained, memories, progress, last, folder.name)


def reads_last_rounds(recipe: Recipe) -> bool:
    """Whether a recipe averages over last rounds: the paper's stop reads a single one, fixed numbers of rounds many."""
    return recipe.recover.until == "rounds"


def _recorded(rounds: Rounds, recorder: LastRounds | None) -> Rounds:
    with closing(rounds):
        for progress in rounds:
            if recorder:
                recorder.record(progress)
            yield progress


def _repeat(
    setup: Setup,
    data: FederatedData,
    folder: Path,
    recorder: LastRounds,
    hooks: Hooks,
    reporter: Reporter,
    title: str,
) -> None:
    """Train once more in a folder of its own, for the last rounds alone; the model in the cache stays."""
    memories = Memories.open(folder, device=setup.device)
    plain = Hooks(hooks.attached, memories.of, hooks.request)
    rounds = _rounds(setup, data, memories, StateFile(folder / "state.safetensors"), plain)
    driven(_recorded(rounds, recorder), reporter, title, setup.training.rounds)
    memories.close()
    shutil.rmtree(folder)


def _rounds(setup: Setup, data: FederatedData, memories: Memories, file: StateFile, hooks: Hooks) -> Rounds:
    session = Session(setup.engine(data, memories.clients), setup.recipe.seed, data.clients, memories=memories.own)
    session.layers = partial(layers_by_client, memories.clients)
    meter = Metered(session, work=setup.flops)

    def step(state: State) -> State:
        return hooks.round(meter, state, setup.training, data.clients)

    return advance(session, "train", State(setup.initial), step, file, setup.training.rounds, meter)


def training_hash(setup: Setup, data: FederatedData, attached: Attached, request: Request | None) -> str:
    """The name of a training in the cache and in records: a hash of all that determines its result.

    Args:
        setup: the network, the training, the seed and the precision.
        data: what is trained on, with its partition.
        attached: methods that shape the training, by name.
        request: what some of them must know in advance.
    """
    recipe = setup.recipe
    plain = recipe.to_dict()
    knowing = request if any(m.knows_request for m in attached.values()) else None
    what = {
        "schema": CACHE_SCHEMA,
        "data": data.fingerprint(),
        "model": without_later_defaults(plain["model"], type(recipe.model), "model"),
        "network": setup.network,
        "train": without_later_defaults(plain["train"], type(recipe.train), "train"),
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


def driven(rounds: Rounds, reporter: Reporter, title: str, total: int | None) -> Progress:
    """Let a phase run to its end. A reporter that raises stops it, with the rounds that are over on disk.

    Args:
        rounds: of the phase: where it stands, then each further round.
        reporter: is told of each.
        title: of the phase.
        total: how many rounds it has, where that is known.

    Returns:
        Where it ended.
    """
    with closing(rounds):
        last = next(rounds)
        reporter.phase(title, total, last.state.round)
        for last in rounds:
            reporter.round(last.state.round, "")
    return last
