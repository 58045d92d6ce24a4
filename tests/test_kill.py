# SPDX-License-Identifier: Apache-2.0
"""A run survives `kill -9` at any moment, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedquit.running.recipe import Recipe
from killable import asked_twice, outcome
from worlds import tiny

HERE = Path(__file__).parent
PLAIN: dict[str, Any] = {"evaluate": {"attacks": []}}  # it is not the attacks that are tried here


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def killed_everywhere(recipe: Recipe, where: Path, moments: str = "one") -> dict[str, Any]:
    (where / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    command = [sys.executable, str(HERE / "killable.py"), str(where / "recipe.json"), str(where / "work"), moments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def started(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedquit", *words]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_killed_at_every_write_a_three_round_method_goes_on_in_its_round(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"train": {"rounds": 2}, "recover": {"max_rounds": 1}, "retrain": False, **PLAIN}
    recipe = tiny(method={"name": "seam_methods:Degrade"}, **shape)
    report = killed_everywhere(recipe, tmp_path)
    assert report["faults"] == []
    states = [w for w in report["writes"] if w.endswith("unlearned.safetensors")]
    replies = {w.split("/")[-1].split("-question")[0] for w in report["writes"] if "/journal/" in w}
    assert len(states) == 3, "it was killed at the end of each of the three rounds"
    assert replies == {"round0", "round1", "round2"}, "and within each of them"


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("seam_methods:SubtractAndDistil", {}),  # a watcher whose sum would count a round twice
        ("seam_methods:SecondHead", {}),  # a client that builds on what it kept at home
        ("seam_methods:CountTwice", {}),  # and one that does so within a round
        ("seam_methods:ClimbAndReturn", {}),  # a program whose reply says what each part took
        ("seam_methods:StopEarly", {}),  # a task that ends before its plan, and is charged for what it took
        ("fedquit", {"recover": {"until": "retrained-mean-of-3", "max_rounds": 2}, "retrain": True}),
        ("natural", {"recover": {"max_rounds": 1, "follow": 1, "control": True}, "retrain": True}),  # the whole path
    ],
)
def test_killed_at_every_write_the_result_is_the_same(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    options = {"target": 1} if "Subtract" in method else {"lr": 0.3} if method == "fedquit" else {}  # recovery has work
    settings: dict[str, Any] = {
        "recover": {"max_rounds": 1},
        "retrain": False,
        "train": {"rounds": 2},
        **PLAIN,
    } | changes
    report = killed_everywhere(tiny(method={"name": method, **options}, **settings), tmp_path)
    assert report["faults"] == []
    assert len(report["writes"]) > 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_write_a_whole_history_of_events_is_the_same(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"clients": [1], "samples": 0.5},
        {"clients": [1]},
        {"kind": "join", "clients": [1], "anew": True},
        {"clients": [3]},
    ]
    report = killed_everywhere(tiny(request=events, train={"rounds": 2}, recover={"max_rounds": 1}), tmp_path, "all")
    assert report["faults"] == []
    assert len(report["writes"]) > 20


def test_killed_from_outside_the_same_command_goes_on(tmp_path: Path) -> None:
    recipe = tmp_path / "slow.toml"
    recipe.write_text(
        """
        [data]
        name = "synthetic"
        options = { examples = 600, size = 8 }
        partition = "iid"
        clients = 6
        [train]
        rounds = 12
        batch_size = 4
        [[request]]
        clients = [0, 1, 2]
        [method]
        name = "fedquit"
        order = "sequential"
        epochs = 10
        [recover]
        until = "rounds"
        max_rounds = 3
        """
    )

    def start(out: str) -> subprocess.Popen[bytes]:
        return started("run", str(recipe), "--out", str(tmp_path / out / "run"))

    assert start("straight").wait() == 0
    killed = tmp_path / "killed" / "run"
    kills = 0
    waited_for = [
        killed.parent / "cache",
        killed / "request-0" / "unlearned.safetensors",
        killed / "request-0" / "recovered-0.safetensors",
    ]
    for sign in waited_for:
        process = start("killed")
        while process.poll() is None and not sign.exists():
            time.sleep(0.01)
        time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert start("killed").wait() == 0
    assert kills >= 2
    assert outcome(killed) == outcome(tmp_path / "straight" / "run")
    assert asked_twice(killed, "unlearn-0") == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # four comparisons in processes of their own, on a machine that may be busy
def test_a_comparison_that_was_killed_ends_with_the_same_table(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        """
        [data]
        name = "synthetic"
        options = { examples = 200, size = 6 }
        partition = "iid"
        clients = 4
        [train]
        rounds = 4
        [recover]
        max_rounds = 2
        """
    )
    words = ["compare", str(recipe), "--methods", "federaser,pga,mode", "--targets", "0,1", "--out"]
    assert started(*words, str(tmp_path / "straight")).wait() == 0
    killed = tmp_path / "killed"
    for sign in ("seed-0/client-0/pga/recipe.json", "seed-0/client-1/mode/request-0/unlearned.safetensors"):
        process = started(*words, str(killed))
        while process.poll() is None and not (killed / sign).exists():
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert started(*words, str(killed)).wait() == 0
    tables = [json.loads((tmp_path / d / "comparison.json").read_text())["table"] for d in ("straight", "killed")]
    assert tables[0] == tables[1]
