# SPDX-License-Identifier: Apache-2.0
"""A whole erasure in a real federation on this machine: trained, asked for, unlearned, recovered, and looked at.

Only the looking is not real: the demo reads the server's models from disk and the leaving node's data with the example
app's own functions, which in a federation of several parties nobody could.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedquit.errors import InputError, StoreError
from fedquit.flower.deploy.processes import DeploymentError, Say
from fedquit.flower.deploy.stack import Stack, Value
from fedquit.flower.deploy.supervision import STATE, Plan, see_through

if TYPE_CHECKING:
    from fedquit.core import Params

HERE = Path(__file__).parent
NODES, LEAVING = 4, 0
ROUNDS, RECOVERY = 4, 1
SETTINGS: dict[str, Value] = {
    "fedquit.train.rounds": ROUNDS,
    "fedquit.train.epochs": 4.0,  # few rounds, since each takes seconds; so much work in each
    "fedquit.method.fedquit.lr": 4e-3,
    "fedquit.recover-rounds": RECOVERY,
    "fedquit.min-nodes": NODES,
    "partitions": NODES,
}
NOTE = re.compile(r"fedquit: (.*)")  # what the server tells the operator, among all that Flower says
BEFORE, UNLEARNED, RECOVERED = "before", "unlearned", "recovered"


def app_folder() -> Path:
    """The example app: packaged, or in the clone."""
    for folder in (HERE.parent / "app", HERE.parents[3] / "examples" / "flower_app"):
        if (folder / "pyproject.toml").exists():
            return folder
    raise StoreError("the example app is not there: install fedquit again.")


def run(out: Path | None = None, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Carry the demo out; what was measured. Without a folder nothing is kept."""
    if out and out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give a new folder, since keys are never used twice.")
    with contextlib.ExitStack() as kept:
        folder = out or Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="fedquit-")))
        app = Path(shutil.copytree(app_folder(), folder / "flower-app"))  # Flower writes beside what it reads
        return _carry_out(folder.resolve(), app, say)


def _carry_out(folder: Path, app: Path, say: Say) -> dict[str, Any]:
    homes = [folder / f"node-{i}" for i in range(NODES)]
    nodes: list[dict[str, Value]] = [
        {"partition-id": i, "num-partitions": NODES, "fedquit-home": str(home)} for i, home in enumerate(homes)
    ]
    began = time.monotonic()
    say(f"a SuperLink and {NODES} SuperNodes start, with TLS and a key for each; their logs are in {folder / 'stack'}.")
    with Stack(folder / "stack", nodes, say=say) as stack:
        say(f"all are there, on {stack.control.address}. Each message starts a process: a round takes ten seconds.")
        watcher = _Watcher(folder / "state", homes[LEAVING], say)
        plan = Plan(app, {**SETTINGS, STATE: str(folder / "state")})
        follow = partial(see_through, plan, stack.control, folder / "run.json", superlink=stack.superlink, hear=watcher)
        run_id = follow()
        if not _erasures(folder / "state"):  # the log came late, and the request after the last round
            watcher.ask()
            say("the run had ended before the request came: another goes on from its state and serves it.")
            run_id = follow()
        traffic = stack.control.run(run_id)["network-traffic"]
        say("all processes stop.")
    erasures = _erasures(folder / "state")
    if not erasures:
        raise DeploymentError("the node's request never reached the server: give --out and look at the logs there.")
    watcher.models[RECOVERED] = _params(folder / "state" / "model.safetensors")
    measured = _measured(app, watcher.models)
    return {
        "nodes": NODES,
        "leaving": f"node-{LEAVING}",
        "accuracy": measured,
        "bytes": traffic["total-bytes"],
        "seconds": time.monotonic() - began,
        "erasure": erasures[0],
    }


class _Watcher:
    """Hears what the server says, passes it on, and acts on it: the node asks, and models are taken down."""

    def __init__(self, state: Path, home: Path, say: Say) -> None:
        self.models: dict[str, Params] = {}
        self._state, self._home, self._say = state, home, say
        self._asked = False

    def __call__(self, line: str) -> None:
        found = NOTE.search(line)
        if not found:
            return
        note = found[1]
        self._say(note)
        if note.startswith(f"training round {ROUNDS - 1} "):
            self.ask()
        if "started, with" in note:
            self._keep(BEFORE, "before.safetensors")
        if note.startswith("recovery round 0 "):
            self._keep(UNLEARNED, "phases/*/state.safetensors")

    def _keep(self, when: str, pattern: str) -> None:
        """Take a model down before the server replaces it; one that is gone already is left out of the table."""
        from fedquit.running.store import StateFile

        for path in self._state.glob(pattern):
            with contextlib.suppress(StoreError):
                found = StateFile(path).load()
                if found is not None and found[0].round == 0:
                    self.models[when] = found[0].params

    def ask(self) -> None:
        """The owner of the data asks, once."""
        from fedquit.flower.outbox import Outbox

        if self._asked:
            return
        self._asked = True
        entry = Outbox(self._home).file()
        self._say(f"the owner of node-{LEAVING}'s data asks to be forgotten: request {entry.id} lies in its outbox.")


def _params(path: Path) -> Params:
    from fedquit.running.store import load_params

    return load_params(path)[0]


def _erasures(state: Path) -> list[dict[str, Any]]:
    from fedquit.utils.files import read_json

    return list(read_json(state / "result.json")["erasures"])


def _measured(app: Path, models: Mapping[str, Params]) -> dict[str, dict[str, float]]:
    """Accuracies, in percent: on the test data, and on the data of the node that left."""
    task = _task(app)
    x, y = task.load_partition(LEAVING, NODES)
    return {
        when: {"test": task.test_accuracy(models[when]), "forget": task.accuracy(models[when], x, y)}
        for when in (BEFORE, UNLEARNED, RECOVERED)
        if when in models
    }


def _task(app: Path) -> ModuleType:
    """The app's network and data. The app is no package of ours: Flower loads it from where it lies, and so do we."""
    spec = importlib.util.spec_from_file_location("fedquit_demo_task", app / "forgetting" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(results: dict[str, Any]) -> list[str]:
    """The results in a few lines."""
    leaving, lines = results["leaving"], []
    lines.append(f"{leaving} asked to be forgotten; {results['erasure']['method']} served it (accuracies in %)")
    lines.append("")
    lines.append(f"              test   data of {leaving}")
    for when, row in results["accuracy"].items():
        lines.append(f"  {when:<10} {row['test']:>5.1f}   {row['forget']:>5.1f}")
    lines.append("")
    lines.append(
        f"{results['seconds']:.0f} s in all, {results['bytes'] / 1000:,.0f} kB on the wire; no process is left behind."
    )
    return lines
