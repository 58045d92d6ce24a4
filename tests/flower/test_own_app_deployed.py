# SPDX-License-Identifier: Apache-2.0
"""The app of docs/flower-app.md, with its own optimizer, DataLoader and FedAdam, in a federation of real processes."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedquit.flower.outbox import CONTACT_FILE, Outbox
from flower.own_app_page import PROJECT, keeping, write_app
from flower.real_world import Federation, running_in

pytestmark = [pytest.mark.flower, pytest.mark.faults, pytest.mark.timeout(900)]
LEAVING = 2
ROUNDS = 6
ROUND = re.compile(rf"\[ROUND (\d+)/{ROUNDS}\]")


class Deployed(Federation):
    """The app on a SuperLink and three SuperNodes, with TLS and node keys."""

    def __init__(self, folder: Path) -> None:
        app = folder / "app"
        write_app(app, keeping())
        (app / "pyproject.toml").write_text(PROJECT)
        super().__init__(folder, 3, app=app)
        self.model = folder / "model.pt"
        self.forgotten = folder / "forgotten.json"
        self.settings = {"rounds": ROUNDS, "model": str(self.model), "forgotten": str(self.forgotten)}

    @property
    def round(self) -> int:
        """The last one that the run's log names."""
        return max((int(n) for n in ROUND.findall("\n".join(self.heard))), default=0)

    def request(self, *arguments: str) -> str:
        """What `fedquit request` says at the node that leaves."""
        command = [sys.executable, "-m", "fedquit", "request", "--home", str(self.homes[LEAVING]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def test_an_app_with_its_own_training_forgets_a_client_in_a_real_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "app")
    with Deployed(tmp_path) as fed:
        fed.begin()
        fed.wait(lambda: fed.round >= 3, "training did not begin")
        before = torch.load(fed.model)
        assert (fed.homes[LEAVING] / CONTACT_FILE).exists()
        assert "is filed" in fed.request()
        fed.finish()
        assert "served" in fed.request("--show")
        heard = "\n".join(fed.heard)
        nodes = dict(re.findall(r"configure_train: node (\d+) unlearns \((client)\)", heard))
    assert running_in(tmp_path) == []
    stored = json.loads(fed.forgotten.read_text())
    (erasure,) = stored["served"]
    assert [str(erasure["node"])] == [str(node) for node in stored["erased"]] == list(nodes), "one unlearned, once"
    assert stored["recovered"] >= 2, "the others trained on"
    assert stored["untold"] == {}
    assert [entry.id for entry in Outbox(fed.homes[LEAVING]).entries()] == [erasure["request"]]

    try:
        task = importlib.import_module("task")
    finally:
        sys.modules.pop("task", None)
    of_client = task.PARTS[LEAVING]
    parts = {
        "forget": (task.DIGITS.x[of_client], task.DIGITS.y[of_client]),
        "test": (task.DIGITS.test_x, task.DIGITS.test_y),
    }
    accuracies: dict[str, dict[str, float]] = {}
    for when, state in (("before", before), ("after", torch.load(fed.model))):
        model = task.make_model()
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            right = {name: (model(x).argmax(-1) == y).float().mean() for name, (x, y) in parts.items()}
        accuracies[when] = {name: 100 * float(share) for name, share in right.items()}
        sys.stdout.write(f"{when}: {accuracies[when]}\n")  # docs/flower-app.md has these, with -s
    assert accuracies["after"]["forget"] < accuracies["before"]["forget"] - 5
    assert accuracies["after"]["test"] > 60, "the others have recovered it"
