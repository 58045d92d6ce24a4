# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: train, take the request, retrain for comparison, unlearn, recover, evaluate.

Every round is on disk before the next begins, so the same command goes on where a killed one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedquit import __version__
from fedquit.audit.evaluation import Evaluation
from fedquit.audit.metrics.relearn import relearn_time
from fedquit.core import ClientId, Params, Request, State, Trained
from fedquit.core.fedavg import fedavg
from fedquit.data.federated import FederatedData
from fedquit.data.samples import choose_samples
from fedquit.engine import computing
from fedquit.errors import InputError, RequestError, StoreError
from fedquit.results.averages import mean_curve, mean_of_recoveries
from fedquit.results.folders import RESULTS, refuse_overwriting, write_results
from fedquit.results.schema import SCHEMA
from fedquit.running.costs import Metered
from fedquit.running.membership import Membership
from fedquit.running.recipe import EventRecipe, Recipe
from fedquit.running.rows import Recovery, Row, RowMaker
from fedquit.running.session import Event, Progress, Session, advance
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import Journal, Memories, StateFile, locked, save_params
from fedquit.running.training_cache import Attached, Reporter, Silent, driven, train
from fedquit.utils.files import append_line, read_json, write_json
from fedquit.utils.version import code_version

log = logging.getLogger(__name__)
FLOOR_SEED = 1_000_003  # added to a seed for the second Retrain


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
    setup = build_setup(recipe)
    say_engine(setup)
    serving = _Serving(setup, out, cache, reporter, attached or {recipe.method_name: setup.method})
    with locked(out):
        refuse_overwriting(out, RESULTS)
        _claim(out, setup)
        rows = list(serving.rows())
        results = {"schema": SCHEMA, "recipe": recipe.to_dict(), "versions": versions(), "rows": rows}
        results["code"] = code_version()
        results["recipe_hash"] = recipe.hash
        results["computed"] = {"device": _device_name(setup.device), "precision": setup.precision}
        results["clients"] = setup.data.label_counts()
        return write_results(out, results)


def say_engine(setup: Setup) -> None:
    """Which engine does the work, and why."""
    log.info("engine: %s on %s, %s (%s)", setup.chosen.name, setup.device, setup.precision, setup.chosen.why)


def retrain_again(recipe: Recipe, cache: Path, *, reporter: Reporter | None = None) -> Row:
    """Retrain for the recipe's first request with another seed: how far two Retrains differ is the noise floor."""
    other = dataclasses.replace(recipe, seed=recipe.seed + FLOOR_SEED)
    found = retrained(other, cache, reporter or Silent(), "Retrain again: the noise floor")
    gold = retrained(recipe, cache, Silent())
    who = evaluation_of(build_setup(recipe))
    row = RowMaker(who, recipe, 0, _request(recipe.request[0]))
    return row("retrain", "retrained again", found) | who.distance(found.state.params, gold.state.params)


def retrained(recipe: Recipe, cache: Path, reporter: Reporter, title: str = "Retrain: from scratch") -> Progress:
    """Retrain for the recipe's first request alone, from the cache where it is there."""
    setup, event = build_setup(recipe), recipe.request[0]
    data = _marked(event, setup.data, recipe).after(_request(event))
    return train(setup, data, cache, reporter=reporter, title=title).progress


def require_servable(setup: Setup, event: EventRecipe) -> None:
    """Refuse a request to forget of clients that are not here or all that are here, or of no data or all of it."""
    _marked(event, setup.data, setup.recipe)


def evaluation_of(setup: Setup) -> Evaluation:
    """What the recipe's first request is judged on."""
    event = setup.recipe.request[0]
    return _evaluation(setup, _marked(event, setup.data, setup.recipe), _request(event))


def _claim(out: Path, setup: Setup) -> None:
    """A folder belongs to one recipe, with one setup: going on with another would mix two runs."""
    path = out / "recipe.json"
    mine = {"recipe": _claimed(setup), "data and network": setup.fingerprint()}
    if not path.exists():
        write_json(path, mine)
        return
    theirs = read_json(path)
    differing = sorted(_differences(theirs.get("recipe"), mine["recipe"]))
    if differing:
        raise StoreError(
            f"{out} holds a run of another recipe (it differs in {', '.join(differing[:3])}): "
            "choose another --out, or delete the folder."
        )
    if theirs != mine:
        raise StoreError(
            f"{out} holds a run on other data, or with another network, though the recipe reads the same: "
            "choose another --out, or delete the folder."
        )


def _claimed(setup: Setup) -> dict[str, Any]:
    """All that determines a run: of how it is computed, the precision alone."""
    return setup.recipe.to_dict() | {"engine": {"precision": setup.precision}}


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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True)
class Standing:
    """Where a federation stands between two events."""

    data: FederatedData
    membership: Membership
    trained: Trained
    kept: Memories
    progress: Progress  # of the phase that led here
    before_leaving: Mapping[ClientId, FederatedData] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A request and the data with its examples marked, checked before any work begins."""

    number: int
    request: Request
    data: FederatedData
    folder: Path


class _Serving:
    """The events of a recipe, one after the other, from Original on."""

    def __init__(self, setup: Setup, out: Path, cache: Path, reporter: Reporter, attached: Attached) -> None:
        self.setup, self.out, self.cache, self.reporter, self.attached = setup, out, cache, reporter, attached
        self.recipe, self.method, self.name = setup.recipe, setup.method, setup.recipe.method_name
        self._check_events()

    def rows(self) -> Iterator[Row]:
        """One row for each phase of each request."""
        standing = self._original()
        for number, event in enumerate(self.recipe.request):
            serve = self._join if event.kind == "join" else self._forget
            standing = yield from serve(number, event, standing)

    def _check_events(self) -> None:
        """Look through all events before any work begins: a request that cannot be served is refused at once."""
        if self.method.needs_public_data and len(self.setup.data.public) == 0:
            raise InputError(f"{self.name} needs data of the server's own, and there is none: set data.public = 0.05.")
        data, members = self.setup.data, Membership(self.setup.data.clients)
        before: dict[ClientId, FederatedData] = {}
        for event in self.recipe.request:
            if event.kind == "join":
                members = members.join(event.clients, anew=event.anew)
                data = _joined(data, event.clients, before)
                continue
            request = _request(event)
            members.check(request)
            self.method.check(request)
            before |= dict.fromkeys(request.clients, data)
            data, members = _marked(event, data, self.recipe).after(request), members.serve(request)

    def _original(self) -> Standing:
        event = next((e for e in self.recipe.request if e.kind == "forget"), None)
        data, request = self.setup.data, _request(event) if event else None
        ahead = event and any(m.knows_request for m in self.attached.values())
        seen = _marked(event, data, self.recipe) if event and ahead else data
        title = "Original: everybody trains"
        hooks: dict[str, Any] = {"attached": self.attached, "request": request}
        found = train(self.setup, seen, self.cache, reporter=self.reporter, title=title, **hooks)
        return Standing(data, Membership(data.clients), found.trained, found.kept, found.progress)

    def _begin(
        self, data: FederatedData, kept: Memories, present: tuple[ClientId, ...], journal: Path | None = None
    ) -> tuple[Session, Metered]:
        """A federation for a phase, and the meter around it."""
        session = Session(
            self.setup.engine(data, kept.clients),
            self.recipe.seed,
            present,
            Journal(journal) if journal else None,
            kept.own,
            self._log,
        )
        return session, Metered(session, lambda: kept.stored(self.name, self.method.at_home), self.setup.flops)

    def _log(self, event: Event) -> None:
        append_line(self.out / "events.jsonl", json.dumps(event))

    def _forget(self, number: int, event: EventRecipe, found: Standing) -> Generator[Row, None, Standing]:
        request, data = _request(event), _marked(event, found.data, self.recipe)
        served = Served(number, request, data, self.out / f"request-{number}")
        who = _evaluation(self.setup, data, request)
        row = RowMaker(who, self.recipe, number, request)
        yield row("original", "original", found.progress) | who.true_logits(found.progress.state.params)

        before, gold, target = found.progress.state.params, None, math.inf
        if self.recipe.retrain:
            title = "Retrain: from scratch, without them"
            gold = train(self.setup, data.after(request), self.cache, reporter=self.reporter, title=title).progress
            yield row("retrain", "retrained", gold) | who.against(before, gold.state.params, None)
            target = who.accuracy("test", gold.state.params) or 0.0
        wanted = gold.state.params if gold else None

        found, unlearned = self._unlearn(served, found)
        price = {"price_of_forgetting": who.price_of_forgetting(before, unlearned.state.params)}
        yield row(self.name, "unlearned", unlearned) | price | who.against(before, unlearned.state.params, wanted)

        runs = self._recover(served, found, unlearned.state.fresh(), who, target)
        rows = [row(self.name, "recovered", r.progress) | who.against(before, r.state.params, wanted) for r in runs]
        if not (served.folder / "model.safetensors").exists():
            save_params(served.folder / "model.safetensors", runs[0].state.params)
        again = self._relearned(who, found, runs[0].state, wanted) if wanted else {}
        yield mean_of_recoveries(rows) | {"curve": mean_curve([r.curve for r in runs])} | again
        if gold:
            yield from self._at_budgets(served, found, unlearned, row, gold)

        progress = dataclasses.replace(runs[0].progress, state=runs[0].state.settled())
        return dataclasses.replace(
            found,
            data=data.after(request),
            membership=found.membership.serve(request),
            trained=_now(found.trained, progress, data.after(request)),
            kept=runs[0].kept,
            progress=progress,
            before_leaving={**found.before_leaving, **dict.fromkeys(request.clients, found.data)},
        )

    def _unlearn(self, served: Served, found: Standing) -> tuple[Standing, Progress]:
        kept = Memories.open(served.folder / "unlearning", found.kept)
        trained = dataclasses.replace(found.trained, memory=kept.of(self.name))
        session, fed = self._begin(served.data, kept, found.membership.active, served.folder / "journal")
        rounds, file = self.method.rounds(trained, served.request), StateFile(served.folder / "unlearned.safetensors")

        def step(state: State) -> State:
            return self.method.unlearn(fed, state, trained, served.request)

        phase = advance(session, f"unlearn-{served.number}", found.progress.state.fresh(), step, file, rounds, fed)
        unlearned = driven(phase, self.reporter, f"Unlearning: {self.name}", rounds)
        return dataclasses.replace(found, kept=kept, trained=trained), unlearned

    def _recover(self, served: Served, found: Standing, start: State, who: Evaluation, target: float) -> list[Recovery]:
        """Ordinary training without the forgotten data, until the test accuracy reaches Retrain's or rounds are up.

        The paper compares the test accuracy "averaged over three runs": then three recoveries go on side by side, with
        other random numbers, until the mean of their accuracies is there.
        """
        spec, request = self.recipe.recover, served.request
        most = spec.max_rounds if self.method.recovers else 0
        left = served.data.after(request)  # the forgotten data is out of reach, whatever a method asks for
        runs = []
        for i in range(3 if spec.until == "retrained-mean-of-3" else 1):
            kept = Memories.open(served.folder / f"recovery-{i}", found.kept)
            session, fed = self._begin(left, kept, left.clients)
            step = partial(self._recovery_round, fed, found.trained, request)
            phase = f"recover-{served.number}" + (f"-run{i}" if i else "")
            file = StateFile(served.folder / f"recovered-{i}.safetensors")
            rounds = advance(session, phase, start, step, file, meter=fed)
            runs.append(Recovery(rounds, who, served.folder / f"curve-{i}.json", kept))
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

    def _relearned(self, who: Evaluation, found: Standing, recovered: State, gold: Params) -> Row:
        """How fast the forgotten comes back, against Retrain; the level to reach is that of the model before."""
        epochs = self.recipe.evaluate.relearn
        if not epochs:
            return {}
        task = found.trained.training.task_at(recovered.clock)
        with computing(self.setup.precision, self.setup.device):
            curves = [who.relearned(params, task, epochs) for params in (recovered.params, gold)]
        level = who.accuracy("forget", found.progress.state.params) or 0.0
        took = relearn_time(*curves, level=level)
        ratio = took.ratio if math.isfinite(took.ratio) else None
        return {"relearn_ratio": ratio, "relearn_bound": took.bound, "relearn_curve": curves[0]}

    def _at_budgets(
        self, served: Served, found: Standing, unlearned: Progress, row: RowMaker, gold: Progress
    ) -> Iterator[Row]:
        """The same recovery, looked at after the last round that each share of Retrain's bytes pays for.

        Unlearning counts. Where it has cost more than a share by itself, the row has no rounds and says what was spent.
        """
        left, request = served.data.after(served.request), served.request
        done = served.folder / "budgets.json"
        rows: list[Row] = read_json(done) if done.exists() else []
        yield from rows
        budgets = sorted(self.recipe.recover.budgets)[len(rows) :]
        if not budgets:
            return
        session, fed = self._begin(left, Memories.open(served.folder / "budgets", found.kept), left.clients)
        step = partial(self._recovery_round, fed, found.trained, request)
        file = StateFile(served.folder / "budgets.safetensors")
        rounds = advance(session, f"recover-{served.number}", unlearned.state.fresh(), step, file, meter=fed)
        progress = next(rounds)
        self.reporter.phase("Recovery: on to fixed budgets", None, progress.state.round)
        whole = gold.costs.bytes
        for budget in budgets:
            while unlearned.costs.bytes + progress.costs.bytes + _a_round(progress, gold) <= budget * whole + 1e-6:
                progress = next(rounds)
                self.reporter.round(progress.state.round, f"budget {budget:.0%}")
            spent = unlearned.costs.bytes + progress.costs.bytes
            rows = [*rows, row(self.name, "budget", progress) | {"budget": budget, "budget_spent": spent / whole}]
            write_json(done, rows)
            yield rows[-1]

    def _recovery_round(self, fed: Metered, trained: Trained, request: Request, state: State) -> State:
        return self.method.recover(fed, state, trained, request)

    def _join(self, number: int, event: EventRecipe, found: Standing) -> Generator[Row, None, Standing]:
        """Clients join, or are enrolled anew, and training goes on with them."""
        members = found.membership.join(event.clients, anew=event.anew)
        data = _joined(found.data, event.clients, found.before_leaving)
        folder = self.out / f"request-{number}"
        kept = Memories.open(folder / "joining", found.kept)
        session, fed = self._begin(data, kept, members.active)
        file = StateFile(folder / "joined.safetensors")

        def step(state: State) -> State:
            return fedavg(fed, state, found.trained.training, members.active)

        phase = advance(session, f"join-{number}", found.progress.state.fresh(), step, file, event.rounds, fed)
        progress = driven(phase, self.reporter, "Training with the clients that joined", event.rounds)
        who = _evaluation(self.setup, data, Request(event.clients))
        yield RowMaker(who, self.recipe, number, None)(self.name, "joined", progress)
        trained = _now(found.trained, progress, data)
        changes: dict[str, Any] = {"data": data, "membership": members, "trained": trained}
        return dataclasses.replace(found, kept=kept, progress=progress, **changes)


def _a_round(progress: Progress, gold: Progress) -> float:
    """The bytes of one more round, as those before it took; of the first, as Retrain's took."""
    known = progress if progress.state.round else gold
    return known.costs.bytes / max(known.state.round, 1)


def _evaluation(setup: Setup, data: FederatedData, request: Request) -> Evaluation:
    return Evaluation(
        setup.evaluation_model, data, request, setup.recipe.evaluate.attacks, setup.recipe.seed, setup.trigger
    )


def _marked(event: EventRecipe, data: FederatedData, recipe: Recipe) -> FederatedData:
    """The data with the examples of a request marked: which ones belongs to the data, not to the run's seed."""
    samples = None
    if event.samples:
        samples = choose_samples(data, event.clients, event.samples, event.choose, recipe.data.seed)
    return data.mark(_request(event), samples)


def _request(event: EventRecipe) -> Request:
    return Request(event.clients, samples=event.samples > 0)


def _joined(
    data: FederatedData, clients: Sequence[ClientId], before_leaving: Mapping[ClientId, FederatedData]
) -> FederatedData:
    for client in clients:  # each with what it had when it left: samples forgotten before stay forgotten
        if client not in before_leaving:
            raise RequestError(f"client {client} cannot join: it never was in this federation, and has no data here.")
        data = data.join(client, before_leaving[client])
    return data


def _now(trained: Trained, progress: Progress, data: FederatedData) -> Trained:
    """What the next request finds."""
    examples = {c: len(data.view(c, "all")) for c in data.clients}
    return dataclasses.replace(trained, params=progress.state.params, examples=examples)
