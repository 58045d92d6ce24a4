# SPDX-License-Identifier: Apache-2.0
"""What may import what: every contract in pyproject.toml is kept, and notices a violation that is planted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fedquit"
FUNCTIONS = {"forget", "unlearn", "recover", "evaluate", "run", "compare", "study"}  # of the public API

LAYERS = "Layers: a package imports those below it, never those above or beside it"
CORE = "Core: a method builds on FedAvg, FedAvg on the algebra of parameters, all on the types"
ENGINE = "Engine: the order of a task's steps is planned below the engines, and sequential defines what they compute"
CUDA = "CUDA: the kernels and operations do not know the stacked engine that calls them"
AUDIT = "Audit: scores feed attacks, attacks feed metrics, the evaluation calls them all"
RUNNING = "Running: stores and costs below the session, the session below the training cache, the runner on top"
INDEPENDENT = "Methods are independent of one another"
FEDERATION = "A method reads its clients through a Federation only: no engine, no network, no data, no files"
RESULTS = "Results: the schema, the derived quantities and the inference need no torch and no drawing library"
REPORT = "The report reads JSON: it needs no torch"
NODE = "A Flower node does not know the server: its ledger, its roster, its lifecycle"
DEPLOY = "A deployment starts Flower's processes and imports none of what runs inside them"
FLOWER = "Flower is imported by fedquit.flower alone (and by the benchmark that compares with it)"
TRANSFORMERS = "transformers are imported by fedquit.models alone"
TRITON = "Triton is imported by fedquit.engine.cuda alone"
TYPER = "Typer is imported by fedquit.cli alone"
PICKLE = "Nothing is pickled"


@dataclass(frozen=True)
class Plant:
    """An import in a file where it does not belong; the file is made if there is none."""

    contract: str
    file: str  # below src/fedquit
    line: str

    def __str__(self) -> str:
        return f"{self.line} in {self.file}"


PLANTS = [
    Plant(LAYERS, "core/params.py", "import fedquit.report"),
    Plant(LAYERS, "core/params.py", "from fedquit import unlearn"),
    Plant(LAYERS, "errors.py", "from fedquit.utils import names"),
    Plant(LAYERS, "utils/files.py", "def late() -> None:\n    import fedquit.cli.screen"),
    Plant(LAYERS, "data/partition.py", "from fedquit.running.recipe import Recipe"),
    Plant(LAYERS, "methods/pga.py", "from fedquit.engine import plan"),
    Plant(LAYERS, "report/words.py", "import fedquit.flower.ledger"),
    Plant(LAYERS, "flower/config.py", "from fedquit.check import rules"),
    Plant(LAYERS, "no_layer.py", "import json"),
    Plant(LAYERS, "no_layer/__init__.py", ""),
    Plant(CORE, "core/types.py", "from fedquit.core import params"),
    Plant(CORE, "core/params.py", "from fedquit.core.method import Method"),
    Plant(ENGINE, "engine/plan.py", "from fedquit.engine import sequential"),
    Plant(ENGINE, "engine/sequential.py", "from fedquit.engine.stacked import engine"),
    Plant(CUDA, "engine/cuda/planted.py", "from fedquit.engine.stacked import engine"),
    Plant(AUDIT, "audit/scores.py", "from fedquit.audit.attacks import lira"),
    Plant(AUDIT, "audit/metrics/klom.py", "from fedquit.audit import evaluation"),
    Plant(RUNNING, "running/store.py", "from fedquit.running.session import Session"),
    Plant(RUNNING, "running/recipe.py", "from fedquit.running import setup"),
    Plant(RUNNING, "running/training_cache.py", "import fedquit.running.runner"),
    Plant(INDEPENDENT, "methods/pga.py", "from fedquit.methods import puf"),
    Plant(INDEPENDENT, "methods/fukd.py", "def late() -> None:\n    from fedquit.methods.fedquit import FedQUIT"),
    Plant(FEDERATION, "methods/pga.py", "from fedquit.utils import files"),
    Plant(FEDERATION, "methods/pga.py", "from fedquit.utils.files import write_atomic"),
    Plant(FEDERATION, "methods/fedquit.py", "import fedquit.data"),
    Plant(FEDERATION, "methods/fedosd.py", "from fedquit.data.federated import FederatedData"),
    Plant(FEDERATION, "methods/fedau.py", "from fedquit.models import load_model"),
    Plant(FEDERATION, "methods/not_.py", "from fedquit.engine.sequential import SequentialEngine"),
    Plant(RESULTS, "results/__init__.py", "import torch"),
    Plant(RESULTS, "inference/planted.py", "import torch"),
    Plant(RESULTS, "results/planted.py", "from matplotlib import pyplot"),
    Plant(RESULTS, "results/planted.py", "from fedquit.core.types import Request"),
    Plant(RESULTS, "results/planted.py", "from fedquit import unlearn"),
    Plant(REPORT, "report/words.py", "import torch.nn"),
    Plant(REPORT, "report/page.py", "from fedquit.running.runner import perform"),
    Plant(NODE, "flower/client.py", "from fedquit.flower import ledger"),
    Plant(NODE, "flower/outbox.py", "from fedquit.flower.roster import Member"),
    Plant(DEPLOY, "flower/deploy/stack.py", "from fedquit.flower import server"),
    Plant(FLOWER, "running/session.py", "import flwr"),
    Plant(FLOWER, "cli/flower.py", "def late() -> None:\n    from flwr.common import Message"),
    Plant(TRANSFORMERS, "distill/unlearning.py", "from transformers import AutoModel"),
    Plant(TRITON, "engine/stacked/planted.py", "import triton.language as tl"),
    Plant(TYPER, "studies/sweep.py", "import typer"),
    Plant(PICKLE, "utils/files.py", "import pickle"),
    Plant(PICKLE, "data/cifar.py", "def late() -> None:\n    from shelve import open"),
]


class Tree:
    """A copy of the package in which violations are planted and pulled out again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(ROOT / "pyproject.toml", folder)
        leave = shutil.ignore_patterns("__pycache__", "*.npz", "*.toml", "app")
        self.package = Path(shutil.copytree(PACKAGE, folder / "fedquit", ignore=leave))

    @contextmanager
    def planted(self, plant: Plant) -> Iterator[None]:
        file = self.package / plant.file
        text = file.read_text() if file.exists() else None
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{text or ''}\n{plant.line}\n")
        yield
        if text is not None:
            file.write_text(text)
        elif file.name == "__init__.py":
            shutil.rmtree(file.parent)
        else:
            file.unlink()

    def lint(self) -> tuple[dict[str, str], str]:
        """What the linter says of each contract, KEPT or BROKEN, and all that it printed."""
        call = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "250", "NO_COLOR": "1"}
        command = [sys.executable, "-c", call, "--cache-dir", str(self.folder / "cache")]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
        assert verdicts, done.stdout + done.stderr
        assert done.returncode == int("BROKEN" in verdicts.values()), done.stdout + done.stderr
        return verdicts, done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("architecture"))


def contracts() -> list[str]:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return [contract["name"] for contract in options["contracts"]]


def test_the_package_keeps_every_contract(tree: Tree) -> None:
    verdicts, printed = tree.lint()
    assert list(verdicts) == contracts()
    assert set(verdicts.values()) == {"KEPT"}, printed


def test_every_contract_has_a_violation_that_is_planted() -> None:
    assert {plant.contract for plant in PLANTS} == set(contracts())


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_violation_is_caught(plant: Plant, tree: Tree) -> None:
    with tree.planted(plant):
        verdicts, printed = tree.lint()
    assert verdicts[plant.contract] == "BROKEN", printed
    module = plant.file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    assert module in printed.split("Broken contracts")[1], "the import that breaks it is named"


def test_the_layers_are_exhaustive() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c for c in options["contracts"] if c["name"] == LAYERS]
    assert layers["exhaustive"]
    assert "exhaustive_ignores" not in layers
    assert layers["ignore_imports"] == ["fedquit.utils.version -> fedquit"]


def test_no_module_bears_the_name_of_a_function_of_the_public_api() -> None:
    modules = {path.stem for path in PACKAGE.rglob("*.py")}
    packages = {path.parent.name for path in PACKAGE.rglob("__init__.py")}
    assert not FUNCTIONS & (modules | packages)


QUICK = """
import sys
{statement}
heavy = {{"torch", "matplotlib", "sklearn", "scipy", "flwr", "transformers"}} & set(sys.modules)
sys.exit(f"loaded {{sorted(heavy)}}" if heavy else 0)
"""
HELP = """
from fedquit.cli import main
sys.argv = ["fedquit", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "statement",
    ["import fedquit", "import fedquit; dir(fedquit)", "import fedquit.results", "import fedquit.report", HELP],
    ids=["import", "dir", "results", "report", "help"],
)
def test_the_package_and_its_help_load_no_torch(statement: str) -> None:
    program = QUICK.format(statement=statement)
    if "report" in statement:
        program = program.replace('"matplotlib", ', "")  # the report draws
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reading_a_recipe_loads_nothing_that_only_an_evaluation_needs() -> None:
    """Every worker process, ClientApp and command reads one: scipy and scikit-learn take as long as torch."""
    program = QUICK.format(statement="import fedquit.running.recipe").replace('"torch", ', "")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What an extra brings may be imported by these modules alone; they say which extra it is.
OF_EXTRAS = {
    "pandas": ("fedquit.results.frames",),
    "peft": ("fedquit.flower.own_training",),
    "flwr": ("fedquit.flower.", "fedquit.bench.peers"),
    "cryptography": ("fedquit.flower.deploy.keys", "fedquit.flower.closed.", "fedquit.flower.operations."),
    "prometheus_client": ("fedquit.flower.operations.metrics",),
    "h11": ("fedquit.flower.closed.",),
    "yaml": ("fedquit.flower.closed.",),
    "pfl": ("fedquit.bench.peers",),
    "fluke": ("fedquit.bench.peers",),
    "triton": ("fedquit.engine.cuda.",),  # comes with torch on Linux
}
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}  # whose name is not that of their package


def test_every_import_is_of_a_declared_dependency() -> None:
    """What merely happens to be installed with something else is not there without the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[ ]", line)[0] for line in project["dependencies"]}
    graph = grimp.build_graph("fedquit", include_external_packages=True, cache_dir=None)
    external = {module for module in graph.modules if module.partition(".")[0] != "fedquit"}
    for module in external:
        top = module.partition(".")[0]
        importers = graph.find_modules_that_directly_import(module)
        if top in sys.stdlib_module_names or DISTRIBUTIONS.get(top, top) in declared:
            continue
        assert top in OF_EXTRAS, f"{top} is imported by {sorted(importers)} and not declared in pyproject.toml"
        strangers = [importer for importer in importers if not importer.startswith(OF_EXTRAS[top])]
        assert not strangers, f"{top} comes with an extra and is imported by {strangers}"
