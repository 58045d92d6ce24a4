# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedquit import __version__
from fedquit.cli import main
from fedquit.running.recipe import packaged

HERE = Path(__file__).parent
TINY = """
title = "tiny"
[data]
name = "synthetic"
options = { examples = 120, test_examples = 60, classes = 3, size = 4 }
partition = "iid"
clients = 4
holdout = 0.2
[model]
name = "mlp"
[train]
rounds = 2
[[request]]
clients = [1]
[method]
name = "fedquit"
lr = 1e-3
[recover]
until = "rounds"
max_rounds = 1
"""


def fedquit(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "fedquit", *words]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_the_version_comes_without_torch(tmp_path: Path) -> None:
    done = fedquit("--version", where=tmp_path)
    assert done.stdout == f"fedquit {__version__}\n"
    code = "import sys, fedquit.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_run_prints_a_table_and_leaves_a_report(recipe: Path, tmp_path: Path) -> None:
    done = fedquit("run", str(recipe), "--out", "runs/a", where=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("original", "retrained", "unlearned", "recovered", "Price of forgetting", "report.html"):
        assert word in done.stdout
    assert "Original: everybody trains" in done.stderr
    assert (tmp_path / "runs/a/report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "runs/a/results.json").read_text())["schema"] == 1


def test_every_command_speaks_json(recipe: Path, tmp_path: Path) -> None:
    run = fedquit("run", str(recipe), "--out", "runs/a", "--set", "seed=3", "--json", where=tmp_path)
    assert {r["seed"] for r in json.loads(run.stdout)["rows"]} == {3}
    report = fedquit("report", "runs/a", "--out", "r.html", "--json", where=tmp_path)
    assert json.loads(report.stdout) == {"report": "r.html"}
    assert fedquit("report", "runs/a", "--out", "r.csv", where=tmp_path).returncode == 0
    assert (tmp_path / "r.csv").read_text().count("\n") >= 4
    (tmp_path / "runs/a/report.html").unlink()
    assert fedquit("report", "runs/a", where=tmp_path).stdout == "Report: runs/a/report.html\n"
    assert (tmp_path / "runs/a/report.html").read_text().startswith("<!doctype html>")
    sweep = fedquit("sweep", str(recipe), "--out", "runs/s", "--lr", "1e-4,1e-2", "--json", where=tmp_path)
    assert [c["lr"] for c in json.loads(sweep.stdout)["rates"]] == [0.0, 1e-4, 1e-2]
    recipes = fedquit("list", "recipes", "--json", where=tmp_path)
    assert set(json.loads(recipes.stdout)) == set(packaged())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", ["fedquit", "natural", "retrain"]),
        (
            "teachers",
            [
                "min",
                "fixed",
                "entropy",
                "temperature",
                "flatten",
                "topk",
                "logit_ladder",
                "probability_ladder",
                "incompetent",
                "random",
            ],
        ),
        ("losses", ["kl", "ce", "mse", "cosine"]),
        ("attacks", ["song_svc", "yeom", "song_entropy", "rmia", "ulira"]),
        ("metrics", ["accuracy", "loss", "gap", "price_of_forgetting", "model_test"]),
        ("datasets", ["fashion_mnist_mini", "digits", "synthetic"]),
        ("models", ["mlp", "cnn"]),
        ("recipes", ["demo"]),
    ],
)
def test_list_names_them_all_with_a_line_each(
    kind: str, names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fedquit", "list", kind])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(names) <= set(lines)
    assert all(len(line) > 10 for line in lines.values())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "dem", "--out", "x"], "unknown recipe 'dem': did you mean 'demo'?"),
        (
            ["run", "tiny.toml", "--out", "x", "--set", "method.lrr=1"],
            "unknown key in method 'lrr': did you mean 'lr'?",
        ),
        (["run", "tiny.toml", "--out", "x", "--set", "data.name=digit"], "did you mean 'digits'?"),
        (["run", "tiny.toml", "--out", "x", "--set", "model.name=cn"], "did you mean 'cnn'?"),
        (["run", "tiny.toml", "--out", "x", "--set", "engine.name=seqential"], "did you mean 'sequential'?"),
        (["run", "tiny.toml", "--out", "x", "--set", "train.optimizer=sdg"], "did you mean 'sgd'?"),
        (["run", "tiny.toml", "--out", "x", "--set", "request.0.clients=[77]"], "client 77 is not in the federation"),
        (["run", "tiny.toml", "--out", "tiny.toml/x"], "cannot write"),
        (["report", "nowhere", "--out", "r.html"], "no results.json in nowhere"),
        (["report", "nowhere"], "no results.json in nowhere"),
        (["report", "nowhere", "--format", "htm"], "unknown format 'htm': did you mean 'html'?"),
        (
            ["report", "nowhere", "--out", "r.md", "--format", "html"],
            "r.md ends in .md, and the format asked for is html",
        ),
        (["sweep", "tiny.toml", "--out", "x", "--set", "data.holdout=0"], "add --set data.holdout=0.2"),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_a_fault_is_one_sentence_and_exit_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedquit", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.strip().splitlines()[-1].startswith("error: ")
    assert sentence in printed.err


def test_a_fault_reaches_the_shell_without_a_traceback(tmp_path: Path) -> None:
    done = fedquit("run", "dem", "--out", "x", where=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: unknown recipe 'dem': did you mean 'demo'? `fedquit list recipes` names them all.\n"


def test_help_says_where_to_begin_and_every_command_is_in_a_group(tmp_path: Path) -> None:
    done = fedquit("--help", where=tmp_path)
    for words in ("Begin here", "Run, compare and report", "Run a federation", "Begin with `fedquit demo`"):
        assert words in done.stdout
    assert "─ Commands ─" not in done.stdout, "a command without a group"


def test_an_unknown_command_is_answered_once_with_the_nearest(tmp_path: Path) -> None:
    done = fedquit("rn", where=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("Did you mean 'run'?") == 1


def test_an_unknown_kind_of_list_names_the_right_ones(tmp_path: Path) -> None:
    done = fedquit("list", "metods", where=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown kind of list 'metods': did you mean 'methods'?")
