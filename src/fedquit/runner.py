# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: train, take the request, retrain for comparison, unlearn, recover, evaluate.

Every round is on disk before the next begins, so the same command goes on where a killed one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedquit import __version__
from fedquit.core import ClientId, Request, State
from fedquit.data.federated import FederatedData
from fedquit.data.samples import choose_samples
from fedquit.errors import InputError, StoreError
from fedquit.evaluate import Evaluation
from fedquit.fedavg import fedavg
from fedquit.membership import Membership
from fedquit.meter import Metered
from fedquit.recipe import EventRecipe, Recipe
from fedquit.rows import Recovery, Row, RowMaker, mean_curve, mean_row
from fedquit.session import Event, Progress, Session, advance
from fedquit.store import Journal, Kept, StateFile, append_line, locked, read_json, write_json
from fedquit.training import Attached, Federated, Reporter, Silent, driven, train
from fedquit.world import World, open_world

SCHEMA = 1


def run(
    recipe: Recipe,
    out: Path,
    *,
    cache: Path | None = None,
    reporter: Reporter | None = None,
    attached: Attached | None = None,
) -> dict[str, Any]:
    """Carry out a recipe in the folder `out`, or go on with it, and return what `results.json` holds.

    `attached` methods watch the training beside the recipe's own, so that one training serves them all.
    """
    reporter = reporter or Silent()
    cache = cache or out.parent / "cache"
    with locked(out):
        _claim(out, recipe)
        world = open_world(recipe)
        attached = attached or {recipe.method_name: world.method}
        rows = list(_Serving(world, out, cache, reporter, attached).rows())
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


class _Serving:
    """The events of a recipe, one after the other, from Original on."""

    def __init__(self, world: World, out: Path, cache: Path, reporter: Reporter, attached: Attached) -> None:
        self.world, self.out, self.cache, self.reporter, self.attached = world, out, cache, reporter, attached
        self.recipe, self.method, self.name = world.recipe, world.method, world.recipe.method_name
        self.data, self.membership = world.data, Membership(world.data.clients)
        self.before_leaving: dict[ClientId, FederatedData] = {}

    def rows(self) -> Iterator[Row]:
        """One row for each phase of each request."""
        requests = self._requests()
        original = self._train_original(requests)
        self.trained, self.kept, self.found = original.trained, original.kept, original.progress
        for number, (event, request) in enumerate(zip(self.recipe.request, requests, strict=True)):
            if request is None:
                yield self._join(number, event)
            else:
                yield from self._forget(number, event, request)

    def _requests(self) -> list[Request | None]:
        """Look through all events before any work begins: a request that cannot be served is refused at once."""
        if self.method.needs_public_data and len(self.data.public) == 0:
            raise InputError(f"{self.name} needs data of the server's own, and there is none: set data.public = 0.05.")
        members = self.membership
        found: list[Request | None] = []
        for event in self.recipe.request:
            if event.kind == "join":
                members = members.join(event.clients, anew=event.anew)
                found.append(None)
                continue
            request = Request(event.clients, samples=event.samples > 0)
            members = members.serve(request)
            self.method.check(request)
            found.append(request)
        return found

    def _train_original(self, requests: list[Request | None]) -> Federated:
        data = self.data
        event, request = next(
            ((e, r) for e, r in zip(self.recipe.request, requests, strict=True) if r is not None), (None, None)
        )
        if event and request and any(m.knows_request for m in self.attached.values()):
            data = self._marked(event, request)
        title = "Original: everybody trains"
        hooks: dict[str, Any] = {"attached": self.attached, "request": request}
        return train(self.world, data, self.cache, reporter=self.reporter, title=title, **hooks)

    def _marked(self, event: EventRecipe, request: Request) -> FederatedData:
        samples = None
        if request.samples:
            samples = choose_samples(self.data, event.clients, event.samples, event.choose, self.recipe.seed)
        return self.data.mark(request, samples)

    def _begin(self, data: FederatedData, kept: Kept, journal: Path | None = None) -> tuple[Session, Metered]:
        """A federation for a phase, and the meter around it."""
        session = Session(
            self.world.engine(data, kept.clients),
            self.recipe.seed,
            self.membership.active,
            Journal(journal) if journal else None,
            kept.own,
            self._log,
        )
        return session, Metered(session, lambda: kept.stored(self.name, self.method.at_home))

    def _log(self, event: Event) -> None:
        append_line(self.out / "events.jsonl", json.dumps(event))

    def _forget(self, number: int, event: EventRecipe, request: Request) -> Iterator[Row]:
        data, folder = self._marked(event, request), self.out / f"request-{number}"
        who = Evaluation(self.world.model, data, request)
        row = RowMaker(who, self.recipe, number, request)
        yield row("original", "original", self.found, self.trained.training.rounds)

        target = math.inf
        if self.recipe.retrain:
            title = "Retrain: from scratch, without them"
            gold = train(self.world, data.after(request), self.cache, reporter=self.reporter, title=title).progress
            yield row("retrain", "retrained", gold)
            target = who.test(gold.state.params).accuracy

        unlearned = self._unlearn(number, data, request, folder)
        price = who.price_of_forgetting(self.found.state.params, unlearned.state.params)
        yield row(self.name, "unlearned", unlearned) | {"price_of_forgetting": price}

        self.membership = self.membership.serve(request)
        runs = self._recover(number, data, request, unlearned.state.fresh(), who, target)
        rows = [row(self.name, "recovered", r.progress) for r in runs]
        yield mean_row(rows) | {"curve": mean_curve([r.curve for r in runs])}

        self.found, self.kept = dataclasses.replace(runs[0].progress, state=runs[0].state.settled()), runs[0].kept
        self.before_leaving |= dict.fromkeys(request.clients, self.data)
        self.data = data.after(request)
        self.trained = dataclasses.replace(self.trained, params=self.found.state.params)

    def _unlearn(self, number: int, data: FederatedData, request: Request, folder: Path) -> Progress:
        self.kept = Kept.open(folder / "unlearning", self.kept)
        self.trained = dataclasses.replace(self.trained, memory=self.kept.of(self.name))
        session, fed = self._begin(data, self.kept, folder / "journal")
        rounds, file = self.method.rounds(self.trained, request), StateFile(folder / "unlearned.safetensors")

        def step(state: State) -> State:
            return self.method.unlearn(fed, state, self.trained, request)

        phase = advance(session, f"unlearn-{number}", self.found.state.fresh(), step, file, rounds, fed)
        return driven(phase, self.reporter, f"Unlearning: {self.name}", rounds)

    def _recover(
        self, number: int, data: FederatedData, request: Request, start: State, who: Evaluation, target: float
    ) -> list[Recovery]:
        """Ordinary training without the forgotten data, until the test accuracy reaches Retrain's or rounds are up.

        The paper compares the test accuracy "averaged over three runs": then three recoveries go on side by side, with
        other random numbers, until the mean of their accuracies is there.
        """
        spec, folder = self.recipe.recover, self.out / f"request-{number}"
        most = spec.max_rounds if self.method.recovers else 0
        runs = []
        for i in range(3 if spec.until == "retrained-mean-of-3" else 1):
            kept = Kept.open(folder / f"recovery-{i}", self.kept)
            session, fed = self._begin(data, kept)
            step = partial(self._recovery_round, fed, request)
            phase = f"recover-{number}" + (f"-run{i}" if i else "")
            rounds = advance(session, phase, start, step, StateFile(folder / f"recovered-{i}.safetensors"), meter=fed)
            runs.append(Recovery(rounds, who, folder / f"curve-{i}.json", kept))
        self.reporter.phase("Recovery: ordinary training goes on", most, runs[0].state.round)
        while True:
            behind = min(r.state.round for r in runs)
            if all(r.state.round == behind for r in runs):
                accuracy = sum(r.test_accuracy for r in runs) / len(runs)
                self.reporter.round(behind, f"test {accuracy:.1f} %")
                reached = spec.until != "rounds" and accuracy >= target
                if reached or behind >= most:
                    return runs
            for r in runs:
                if r.state.round == behind:
                    r.step()

    def _recovery_round(self, fed: Metered, request: Request, state: State) -> State:
        return self.method.recover(fed, state, self.trained, request)

    def _join(self, number: int, event: EventRecipe) -> Row:
        """Clients join, or are enrolled anew, and training goes on with them."""
        self.membership = self.membership.join(event.clients, anew=event.anew)
        for client in event.clients:  # with what it had when it left: samples forgotten before stay forgotten
            self.data = self.data.join(client, self.before_leaving[client])
        folder = self.out / f"request-{number}"
        self.kept = Kept.open(folder / "joining", self.kept)
        session, fed = self._begin(self.data, self.kept)
        file = StateFile(folder / "joined.safetensors")

        def step(state: State) -> State:
            return fedavg(fed, state, self.trained.training, self.membership.active)

        phase = advance(session, f"join-{number}", self.found.state.fresh(), step, file, event.rounds, fed)
        self.found = driven(phase, self.reporter, "Training with the clients that joined", event.rounds)
        self.trained = dataclasses.replace(self.trained, params=self.found.state.params)
        who = Evaluation(self.world.model, self.data, Request(event.clients))
        return RowMaker(who, self.recipe, number, None)(self.name, "joined", self.found)
