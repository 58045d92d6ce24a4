# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one client is trained with, asks to be forgotten, and is unlearned, in real processes on loopback.

The accuracies at the end are the only part that a real federation could not have: the demo reads the server's models
and all nodes' data, which lie on one machine here, and simulates Retrain and Natural with them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedquit.errors import InputError, StoreError
from fedquit.flower.deploy.commands import Value
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.processes import Say
from fedquit.flower.deploy.references import RETRAINS, References, app_config, forget_verdict
from fedquit.flower.deploy.stack import Stack
from fedquit.flower.deploy.supervision import STATE, Plan, run_until_finished
from fedquit.flower.sqlite_wipe import FOLDER
from fedquit.inference.gaps import GapVerdict
from fedquit.models import FunctionalModel
from fedquit.results.verdicts import forget_gap

if TYPE_CHECKING:
    from fedquit.core import Params, State

HERE = Path(__file__).parent
NODES = 4
LEAVING = 0  # the node whose owner asks
ROUNDS = 4
RECOVERY_ROUNDS = 1
SETTINGS: dict[str, Value] = {
    "fedquit.train.rounds": ROUNDS,
    "fedquit.train.epochs": 4.0,  # much work in each round, since a round takes seconds whatever it does
    "fedquit.method.fedquit.lr": 4e-3,
    "fedquit.recover-rounds": RECOVERY_ROUNDS,
    "fedquit.min-nodes": NODES,
    "partitions": NODES,
}
NOTE = re.compile(r"fedquit: (.*)")  # a sentence of the server, among the lines of Flower's log
BEFORE, UNLEARNED, RECOVERED = "before", "unlearned", "recovered"
NATURAL, RETRAIN = "Natural", "Retrain"


def app_folder() -> Path:
    """The directory of the example app, in the installed package or in the clone."""
    for folder in (HERE.parent / "app", HERE.parents[3] / "examples" / "flower_app"):
        if (folder / "pyproject.toml").exists():
            return folder
    raise StoreError("the example app is not there: install fedquit again.")


def run(out: Path | None = None, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Run the demo.

    Args:
        out: a new folder that keeps logs, keys and state; without one they are deleted.
        say: takes one sentence for the operator.

    Returns:
        What was measured: accuracies in percent, bytes, seconds, and the ledger's entry of the erasure.
    """
    if out and out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give a new folder, since keys are never used twice.")
    with contextlib.ExitStack() as cleanup:
        folder = out or Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="fedquit-")))
        app = Path(shutil.copytree(app_folder(), folder / "flower-app"))  # Flower writes into the app's folder
        return _run_in(folder.resolve(), app, say)


def _run_in(folder: Path, app: Path, say: Say) -> dict[str, Any]:
    began = time.monotonic()
    state = folder / "state"
    homes = [folder / f"node-{i}" for i in range(NODES)]
    configs: list[dict[str, Value]] = []
    for i, home in enumerate(homes):
        configs.append({"partition-id": i, "num-partitions": NODES, "fedquit-home": str(home)})
    flower = state / FOLDER  # whose database is wiped before a request is done
    say(f"a SuperLink and {NODES} SuperNodes start, with TLS and a key for each; their logs are in {flower / 'logs'}.")
    with Stack(flower, configs, say=say) as stack:
        say(f"all are there, on {stack.control.address}. Each message starts a process: a round takes ten seconds.")
        owner = _Owner(state, homes[LEAVING], say)
        plan = Plan(app, {**SETTINGS, STATE: str(state)})
        run_app = partial(
            run_until_finished, plan, stack.control, folder / "run.json", superlink=stack.superlink, hear=owner
        )
        run_id = run_app()
        if not _erasures(state):  # the log was late, and the request came after the last round
            owner.ask()
            say("the run had ended before the request came: another goes on from its state and serves it.")
            run_id = run_app()
        traffic = stack.control.run(run_id)["network-traffic"]
        say("all processes stop.")
    erasures = _erasures(state)
    if not erasures:
        raise DeploymentError("the node's request never reached the server: give --out and look at the logs there.")
    models = {when: found.params for when, found in owner.states.items()}
    models[RECOVERED] = _params(state / "model.safetensors")
    say(f"Natural and {RETRAINS} Retrains are simulated on the same data: what to compare with.")
    compared = _references(app, state, owner.states.get(BEFORE))
    accuracies = _accuracies(app, {**models, **compared})
    return {
        "nodes": NODES,
        "leaving": f"node-{LEAVING}",
        "accuracy": accuracies,
        **_compared(accuracies),
        "bytes": traffic["total-bytes"],
        "seconds": time.monotonic() - began,
        "erasure": erasures[0],
    }


class _Owner:
    """The owner of the leaving node's data: reads the run's log, asks to be forgotten, and copies the models."""

    def __init__(self, state: Path, home: Path, say: Say) -> None:
        self.states: dict[str, State] = {}
        self._state = state
        self._home = home
        self._say = say
        self._has_asked = False

    def __call__(self, line: str) -> None:
        match = NOTE.search(line)
        if not match:
            return
        note = match[1]
        self._say(note)
        if note.startswith(f"training round {ROUNDS - 1} "):
            self.ask()
        if "started, with" in note:
            self._copy_model(BEFORE, "before.safetensors")
        if note.startswith("recovery round 0 "):
            self._copy_model(UNLEARNED, "phases/*/state.safetensors")

    def _copy_model(self, when: str, pattern: str) -> None:
        """Load a model before the server replaces it; one that is replaced already is left out of the table."""
        from fedquit.running.store import StateFile

        for path in self._state.glob(pattern):
            with contextlib.suppress(StoreError):
                loaded = StateFile(path).load()
                if loaded is not None and loaded[0].round == 0:
                    self.states[when] = loaded[0]

    def ask(self) -> None:
        """File the request, once."""
        from fedquit.flower.outbox import Outbox

        if self._has_asked:
            return
        self._has_asked = True
        entry = Outbox(self._home).file()
        self._say(f"the owner of node-{LEAVING}'s data asks to be forgotten: request {entry.id} lies in its outbox.")


def _params(path: Path) -> Params:
    from fedquit.running.store import load_params

    return load_params(path)[0]


def _erasures(state: Path) -> list[dict[str, Any]]:
    from fedquit.utils.files import read_json

    return list(read_json(state / "result.json")["erasures"])


def _references(app: Path, state: Path, before: State | None) -> dict[str, Params]:
    """Natural, and Retrains of other seeds; none where the model that the request found was replaced too soon."""
    if before is None:
        return {}
    task = _task(app)
    config = app_config(app, {**SETTINGS, STATE: str(state)})
    references = References(FunctionalModel(task.Net), task.dealt(NODES), config.training, LEAVING)
    models = {NATURAL: references.natural(before, RECOVERY_ROUNDS, config.run_seed)}
    for number in range(1, RETRAINS + 1):
        models[f"{RETRAIN} {number}"] = references.retrain(before.clock, config.run_seed + number)
    return models


def _accuracies(app: Path, models: Mapping[str, Params]) -> dict[str, dict[str, float]]:
    """Accuracies in percent, by model: on the test data, and on the data of the node that left."""
    task = _task(app)
    x, y = task.load_partition(LEAVING, NODES)
    in_order = [when for when in (BEFORE, UNLEARNED, RECOVERED) if when in models]
    accuracies = {}
    for when in [*in_order, *(name for name in models if name not in in_order)]:
        params = models[when]
        accuracies[when] = {"test": task.test_accuracy(params), "forget": task.accuracy(params, x, y)}
    return accuracies


def _compared(accuracies: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One row for all Retrains, in their place, and what may be said of the recovered model beside them."""
    retrains = [accuracies.pop(when) for when in list(accuracies) if when.startswith(RETRAIN)]
    if not retrains:
        return {}
    accuracies[RETRAIN] = {key: sum(row[key] for row in retrains) / len(retrains) for key in ("test", "forget")}
    verdict = forget_verdict(accuracies[RECOVERED]["forget"], [row["forget"] for row in retrains])
    return {"retrains": retrains, "verdict": asdict(verdict)}


def _task(app: Path) -> ModuleType:
    """The app's module with its network and data, loaded from its file as Flower does: the app is not installed."""
    spec = importlib.util.spec_from_file_location("fedquit_demo_task", app / "forgetting" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(results: dict[str, Any]) -> list[str]:
    """The results as lines of text."""
    leaving = results["leaving"]
    lines = [
        f"{leaving} asked to be forgotten; {results['erasure']['method']} served it (accuracies in %)",
        "",
        f"              test   data of {leaving}",
    ]
    for when, row in results["accuracy"].items():
        lines.append(f"  {when:<10} {row['test']:>5.1f}   {row['forget']:>5.1f}{_note(when, results)}")
    lines.append("")
    if "verdict" in results:
        verdict = GapVerdict(**results["verdict"])
        lines.append(f"{results['erasure']['method']}: {forget_gap(verdict)}")
        lines.append("One client and one run: whether the method forgets better than leaving does, it cannot tell.")
    kilobytes = results["bytes"] / 1000
    lines.append(f"{results['seconds']:.0f} s in all, {kilobytes:,.0f} kB on the wire; no process is left behind.")
    return lines


def _note(when: str, results: dict[str, Any]) -> str:
    """What a row of the table is, where its name does not say it."""
    if when == NATURAL:
        return "   the node leaves, nothing is unlearned, the others train on as long"
    if when == RETRAIN:
        forget = [row["forget"] for row in results["retrains"]]
        return f"   trained without the node, {len(forget)} seeds: {min(forget):.1f} to {max(forget):.1f}"
    return ""
