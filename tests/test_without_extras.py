# SPDX-License-Identifier: Apache-2.0
"""The package works without its extras, and names the one that is missing.

`make test-core` runs these tests where nothing of the extras is installed. Where they are, the interpreter that runs
each program is told that there is no flwr and no transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OF_FLOWER = ("flwr", "cryptography", "h11", "yaml", "prometheus_client")  # packages of the extra `flower`
HIDE = "import sys; sys.modules.update(flwr=None, transformers=None, cryptography=None, h11=None)\n"
IMPORT_ALL = """
import importlib, json, pkgutil, warnings
import fedquit
warnings.simplefilter("ignore", DeprecationWarning)
missing, loaded = {}, 0
for module in pkgutil.walk_packages(fedquit.__path__, "fedquit.", onerror=lambda name: None):
    if module.name.endswith("__main__") or ".app." in module.name:
        continue
    try:
        importlib.import_module(module.name)
        loaded += 1
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps({"missing": missing, "loaded": loaded}))
"""
COMMAND = "import runpy; runpy.run_module('fedquit', run_name='__main__', alter_sys=True)"


def python(program: str, *words: str, where: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", HIDE + program, *words]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)


def test_every_module_but_flowers_own_can_be_imported(tmp_path: Path) -> None:
    done = python(IMPORT_ALL, where=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["loaded"] > 90
    for module, name in answer["missing"].items():
        if module.startswith("fedquit.engine.cuda.triton_"):
            assert name.partition(".")[0] == "triton", module
        else:
            assert module.startswith("fedquit.flower."), f"{module} needs {name}"
            assert name.partition(".")[0] in OF_FLOWER, module


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("flower", ["flower", "demo"]),
        ("flower", ["flower", "serve", ".", "--state", "s"]),
        ("flower", ["flower", "node", "--superlink", "h:1", "--home", "h"]),
        ("flower", ["flower", "init", "project", "--host", "localhost"]),
        ("flower", ["flower", "join", "site"]),
        ("transformers", ["run", "settings/cifar100-lda-mit-b0", "--smoke", "--out", "out"]),
        ("bench", ["bench", "round", "--peers", "flower"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value,
)
def test_a_command_that_needs_an_extra_names_it(extra: str, words: list[str], tmp_path: Path) -> None:
    done = python(COMMAND, *words, where=tmp_path)
    assert done.returncode > 0
    assert f"pip install 'fedquit[{extra}]'" in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["models", "methods"])
def test_lists_need_no_extra(kind: str, tmp_path: Path) -> None:
    done = python(COMMAND, "list", kind, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3


WHY_NO_FLOWER = """
from fedquit.check.on_flower import why_not
from fedquit.methods.fedquit import FedQUIT
print(why_not(FedQUIT()))
"""


def test_a_check_needs_no_extra_and_says_why_it_skips_flower(tmp_path: Path) -> None:
    done = python(COMMAND, "check", "fedquit", "--quick", "--json", where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"]
    done = python(WHY_NO_FLOWER, where=tmp_path)
    assert done.stdout.startswith("the extra `flower` is not installed: pip install")


def test_a_run_from_the_request_to_the_report_needs_no_extra(tmp_path: Path) -> None:
    done = python(COMMAND, "run", "demo", "--smoke", "--out", "runs/demo", where=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python(COMMAND, "report", "runs/demo", where=tmp_path)
    assert done.returncode == 0, done.stderr
    phases = {row["phase"] for row in json.loads((tmp_path / "runs/demo/results.json").read_text())["rows"]}
    assert phases >= {"original", "unlearned", "recovered", "retrained"}
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 10_000
