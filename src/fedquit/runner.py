# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: train, take the request, retrain for comparison, unlearn, recover, evaluate.

Every round is on disk before the next begins, so the same command goes on where a killed one stopped. Original and
Retrain lie in a cache, under the hash of what determines them, and serve every method on the same setting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from fedquit import __version__
from fedquit.core import ClientId, Memory, Model, Params, Request, State, Trained, Training
from fedquit.data import federate, load_dataset
from fedquit.data.federated import FederatedData
from fedquit.data.samples import choose_samples
from fedquit.engine import Address, Engine, open_engine
from fedquit.errors import StoreError
from fedquit.evaluate import Evaluation, separation
from fedquit.fedavg import fedavg
from fedquit.membership import Membership
from fedquit.method import Method
from fedquit.models import load_model
from fedquit.params import fingerprint
from fedquit.recipe import EventRecipe, Recipe
from fedquit.session import Event, Progress, Session, advance
from fedquit.store import Journal, Kept, StateFile, append_line, locked, read_json, write_json

SCHEMA = 1
CACHE_SCHEMA = 1  # raise it whenever the same recipe would train another model
Row = dict[str, Any]


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
class World:
    """A recipe's data, network and training, ready to use."""

    recipe: Recipe
    data: FederatedData
    model: Model
    training: Training
    initial: Params
    method: Method

    def engine(self, data: FederatedData, homes: Memory) -> Engine:
        """The engine that the recipe names, over this data."""
        return open_engine(self.recipe.engine.name, self.model, data, homes)


def open_world(recipe: Recipe) -> World:
    """Load the data, deal it out, and build the network."""
    spec = recipe.data
    dtype = getattr(torch, recipe.model.dtype)
    dataset = load_dataset(spec.name, **spec.options)
    if dataset.x.is_floating_point():
        dataset = dataclasses.replace(dataset, x=dataset.x.to(dtype), test_x=dataset.test_x.to(dtype))
    data = federate(
        dataset,
        partition=spec.partition,
        clients=spec.clients,
        alpha=spec.alpha,
        seed=spec.seed,
        holdout=spec.holdout,
        public=spec.public,
        partition_file=spec.partition_file,
    )
    shape = tuple(dataset.x.shape[1:])
    model = load_model(recipe.model.name, shape, dataset.classes, dtype=dtype, **recipe.model.options)
    initial = model.init(Address(recipe.seed, "init").seed_for("server"))
    return World(recipe, data, model, recipe.train.training(), initial, recipe.build_method())


def run(recipe: Recipe, out: Path, *, cache: Path | None = None, reporter: Reporter | None = None) -> dict[str, Any]:
    """Carry out a recipe in the folder `out`, or go on with it, and return what `results.json` holds."""
    reporter = reporter or Silent()
    cache = cache or out.parent / "cache"
    with locked(out):
        _claim(out, recipe)
        world = open_world(recipe)
        rows = list(_Serving(world, out, cache, reporter).rows())
        results = {"schema": SCHEMA, "recipe": recipe.to_dict(), "versions": versions(), "rows": rows}
        write_json(out / "results.json", results)
    return results


def _claim(out: Path, recipe: Recipe) -> None:
    """A folder belongs to one recipe: going on with another would mix two runs."""
    path, mine = out / "recipe.json", json.loads(json.dumps(recipe.to_dict()))
    if path.exists():
        differing = sorted(_differences(read_json(path), mine))
        if differing:
            raise StoreError(
                f"{out} holds a run of another recipe (it differs in {', '.join(differing[:3])}): "
                "choose another --out, or delete the folder."
            )
    else:
        write_json(path, mine)


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON is anything
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where


def versions() -> dict[str, str]:
    """What the results were computed with."""
    packages = {name: metadata.version(name) for name in ("numpy", "scipy", "scikit-learn", "safetensors")}
    return {"fedquit": __version__, "python": platform.python_version(), "torch": torch.__version__, **packages}


@dataclass(frozen=True)
class Federated:
    """A trained federation: its model, what the server and the clients keep, and the work behind it."""

    trained: Trained
    kept: Kept
    state: State
    seconds: float


def train(
    world: World, data: FederatedData, cache: Path, reporter: Reporter, title: str, request: Request | None = None
) -> Federated:
    """Train a federation on this data from scratch, or take it from the cache.

    With a `request` to come, a method that must prepare for it (it watches, or replaces a client's task) is attached.
    """
    attached = world.method if request and world.method.shapes_training else None
    folder, training = cache / _training_key(world, data, attached, request), world.training
    kept = Kept.open(folder)
    session = Session(world.engine(data, kept.clients), world.recipe.seed, data.clients, memories=kept.own)

    hooks: dict[str, Any] = {}
    if attached and request:
        hooks["watch"] = lambda round, start, reply: attached.watch(kept.server, round, start, reply)
        hooks["replace_task"] = lambda task, client: attached.training_task(task, client, request)

    def step(state: State) -> State:
        return fedavg(session, state, training, data.clients, **hooks)

    with locked(folder, wait=True):
        file = StateFile(folder / "state.safetensors")
        rounds = advance(session, "train", State(world.initial), step, file, training.rounds)
        progress = _driven(rounds, reporter, title, training.rounds)
    examples = {c: len(data.view(c, "all")) for c in data.clients}
    trained = Trained(progress.state.params, world.initial, training, examples, kept.server)
    return Federated(trained, kept, progress.state, progress.seconds)


def _training_key(world: World, data: FederatedData, attached: Method | None, request: Request | None) -> str:
    recipe = world.recipe
    what = {
        "schema": CACHE_SCHEMA,
        "data": data.fingerprint(),
        "model": dataclasses.asdict(recipe.model),
        "train": dataclasses.asdict(recipe.train),
        "seed": recipe.seed,
        "attached": repr((recipe.method_name, attached, request)) if attached else "",
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()


def _driven(rounds: Iterator[Progress], reporter: Reporter, title: str, total: int | None) -> Progress:
    last = next(rounds)
    reporter.phase(title, total, last.state.round)
    for last in rounds:
        reporter.round(last.state.round, "")
    return last


class _Serving:
    """The events of a recipe, one after the other, from Original on."""

    def __init__(self, world: World, out: Path, cache: Path, reporter: Reporter) -> None:
        self.world, self.out, self.cache, self.reporter = world, out, cache, reporter
        self.recipe = world.recipe
        self.data, self.membership = world.data, Membership(world.data.clients)
        self.before_leaving: dict[ClientId, FederatedData] = {}

    def rows(self) -> Iterator[Row]:
        """One row for each phase of each request."""
        requests = self._requests()
        first = next((r for r in requests if r is not None), None)
        original = train(self.world, self.data, self.cache, self.reporter, "Original: everybody trains", first)
        self.trained, self.kept = original.trained, original.kept
        self.state, self.seconds = original.state, original.seconds
        for number, (event, request) in enumerate(zip(self.recipe.request, requests, strict=True)):
            if request is None:
                yield self._join(number, event)
            else:
                yield from self._forget(number, event, request)

    def _requests(self) -> list[Request | None]:
        """Look through all events before any work begins: a request that cannot be served is refused at once."""
        members = self.membership
        found: list[Request | None] = []
        for event in self.recipe.request:
            if event.kind == "join":
                members = members.join(event.clients, anew=event.anew)
                found.append(None)
                continue
            request = Request(event.clients, samples=event.samples > 0)
            members = members.serve(request)
            self.world.method.check(request)
            found.append(request)
        return found

    def _session(self, data: FederatedData, kept: Kept, journal: Path | None = None) -> Session:
        return Session(
            self.world.engine(data, kept.clients),
            self.recipe.seed,
            self.membership.active,
            Journal(journal) if journal else None,
            kept.own,
            self._log,
        )

    def _log(self, event: Event) -> None:
        append_line(self.out / "events.jsonl", json.dumps(event))

    def _forget(self, number: int, event: EventRecipe, request: Request) -> Iterator[Row]:
        world, method, folder = self.world, self.world.method, self.out / f"request-{number}"
        method_name, samples = self.recipe.method_name, None
        if request.samples:
            samples = choose_samples(self.data, event.clients, event.samples, event.choose, self.recipe.seed)
        data = self.data.mark(request, samples)
        who = Evaluation(world.model, data, request)
        row = _RowMaker(who, self.recipe, number, request)
        yield row("original", "original", self.state, self.trained.training.rounds, self.seconds)

        target = math.inf
        if self.recipe.retrain:
            reference = train(
                world, data.after(request), self.cache, self.reporter, "Retrain: from scratch, without them"
            )
            yield row("retrain", "retrained", reference.state, self.trained.training.rounds, reference.seconds)
            target = who.test(reference.state.params).accuracy

        self.kept = Kept.open(folder / "unlearning", self.kept)
        self.trained = dataclasses.replace(self.trained, memory=self.kept.server)
        session = self._session(data, self.kept, folder / "journal")
        rounds = method.rounds(self.trained, request)
        unlearned = _driven(
            advance(
                session,
                f"unlearn-{number}",
                self.state.fresh(),
                lambda state: method.unlearn(session, state, self.trained, request),
                StateFile(folder / "unlearned.safetensors"),
                rounds,
            ),
            self.reporter,
            f"Unlearning: {method_name}",
            rounds,
        )
        price = who.price_of_forgetting(self.state.params, unlearned.state.params)
        unlearned_row = row(method_name, "unlearned", unlearned.state, unlearned.state.round, unlearned.seconds)
        yield unlearned_row | {"price_of_forgetting": price}

        self.membership = self.membership.serve(request)
        runs = self._recover(number, data, request, unlearned.state.fresh(), who, target)
        rows = [row(method_name, "recovered", r.state, r.state.round, r.seconds) for r in runs]
        yield _mean_row(rows) | {"curve": _mean_curve([r.curve for r in runs])}

        self.state = dataclasses.replace(runs[0].state, kept={})
        self.seconds, self.kept = runs[0].seconds, runs[0].kept
        self.before_leaving |= dict.fromkeys(request.clients, self.data)
        self.data = data.after(request)
        self.trained = dataclasses.replace(self.trained, params=self.state.params)

    def _recover(
        self, number: int, data: FederatedData, request: Request, start: State, who: Evaluation, target: float
    ) -> list[_Recovery]:
        """Ordinary training without the forgotten data, until the test accuracy reaches Retrain's or rounds are up.

        The paper compares the test accuracy "averaged over three runs": then three recoveries go on side by side, with
        other random numbers, until the mean of their accuracies is there.
        """
        spec, method, folder = self.recipe.recover, self.world.method, self.out / f"request-{number}"
        runs = []
        for i in range(3 if spec.until == "retrained-mean-of-3" else 1):
            kept, phase = (
                Kept.open(folder / f"recovery-{i}", self.kept),
                f"recover-{number}" + (f"-run{i}" if i else ""),
            )
            session = self._session(data, kept)
            rounds = advance(
                session,
                phase,
                start,
                lambda state, session=session: method.recover(session, state, self.trained, request),  # type: ignore[misc]
                StateFile(folder / f"recovered-{i}.safetensors"),
            )
            runs.append(_Recovery(rounds, who, folder / f"curve-{i}.json", kept))
        self.reporter.phase("Recovery: ordinary training goes on", spec.max_rounds, runs[0].state.round)
        while True:
            behind = min(r.state.round for r in runs)
            if all(r.state.round == behind for r in runs):
                accuracy = sum(r.test_accuracy for r in runs) / len(runs)
                self.reporter.round(behind, f"test {accuracy:.1f} %")
                reached = spec.until != "rounds" and accuracy >= target
                if reached or behind >= spec.max_rounds:
                    return runs
            for r in runs:
                if r.state.round == behind:
                    r.step()

    def _join(self, number: int, event: EventRecipe) -> Row:
        """Clients join, or are enrolled anew, and training goes on with them."""
        self.membership = self.membership.join(event.clients, anew=event.anew)
        for client in event.clients:  # with what it had when it left: samples forgotten before stay forgotten
            self.data = self.data.join(client, self.before_leaving[client])
        folder, training = self.out / f"request-{number}", self.trained.training
        self.kept = Kept.open(folder / "joining", self.kept)
        session = self._session(self.data, self.kept)
        joined = _driven(
            advance(
                session,
                f"join-{number}",
                self.state.fresh(),
                lambda state: fedavg(session, state, training, self.membership.active),
                StateFile(folder / "joined.safetensors"),
                event.rounds,
            ),
            self.reporter,
            "Training with the clients that joined",
            event.rounds,
        )
        self.state, self.seconds = joined.state, joined.seconds
        self.trained = dataclasses.replace(self.trained, params=joined.state.params)
        row = _RowMaker(Evaluation(self.world.model, self.data, Request(event.clients)), self.recipe, number, None)
        return row(self.recipe.method_name, "joined", joined.state, joined.state.round, joined.seconds)


class _Recovery:
    """One recovery, step by step, with its accuracies so far."""

    def __init__(self, rounds: Iterator[Progress], who: Evaluation, curve: Path, kept: Kept) -> None:
        self.kept = kept
        self._rounds, self._who, self._path = rounds, who, curve
        self.curve: list[dict[str, float]] = read_json(curve) if curve.exists() else []
        self._take(next(rounds))

    def _take(self, progress: Progress) -> None:
        self.state, self.seconds = progress.state, progress.seconds
        self.test_accuracy = self._who.test(self.state.params).accuracy
        point = {"round": self.state.round, "test_acc": self.test_accuracy}
        forget = self._who.forget(self.state.params)
        if forget:
            point["forget_acc"] = forget.accuracy
        self.curve = [*(p for p in self.curve if p["round"] < self.state.round), point]
        write_json(self._path, self.curve)

    def step(self) -> None:
        """One more round."""
        self._take(next(self._rounds))


@dataclass(frozen=True)
class _RowMaker:
    """Turns a state into a row of the results."""

    who: Evaluation
    recipe: Recipe
    number: int
    request: Request | None

    def __call__(self, method: str, phase: str, state: State, rounds: int, seconds: float) -> Row:
        found = {
            "test": self.who.test,
            "retain": self.who.retain,
            "forget": self.who.forget,
            "holdout": self.who.holdout,
        }
        scores = {name: judge(state.params) for name, judge in found.items()}
        traces: Row = {}
        if scores["forget"] and scores["holdout"]:
            apart = separation(scores["forget"].losses, scores["holdout"].losses)
            traces = {"auc": apart.auc, "auc_low": apart.low, "auc_high": apart.high}
        return {
            "method": method,
            "phase": phase,
            "request": self.number,
            "clients": list(self.who.request.clients),
            "samples": bool(self.request and self.request.samples),
            "seed": self.recipe.seed,
            "rounds": rounds,
            "seconds": round(seconds, 3),
            **{f"{name}_acc": s.accuracy if s else None for name, s in scores.items()},
            **{f"{name}_loss": s.loss if s else None for name, s in scores.items()},
            **traces,
            "fingerprint": fingerprint(state.params),
        }


def _mean_row(rows: list[Row]) -> Row:
    """The first row, with the measures averaged over all (one, or the paper's three recoveries)."""
    measures = [k for k in rows[0] if (k.endswith(("_acc", "_loss")) or k.startswith("auc")) and rows[0][k] is not None]
    return rows[0] | {k: sum(r[k] for r in rows) / len(rows) for k in measures} | {"runs": len(rows)}


def _mean_curve(curves: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    return [
        {key: sum(p[key] for p in points) / len(points) for key in points[0]} for points in zip(*curves, strict=True)
    ]
