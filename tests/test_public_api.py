# SPDX-License-Identifier: Apache-2.0
"""The curated public API, name by name, so that a change is deliberate (docs/api.md says what is stable)."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedquit

API: dict[str, list[str]] = {
    "fedquit": [
        "ComparisonResult",
        "Evidence",
        "FedquitError",
        "Forgotten",
        "InputError",
        "NoExamplesError",
        "NonFiniteError",
        "RequestError",
        "RunResult",
        "Setting",
        "StoreError",
        "StudyResult",
        "UnknownNameError",
        "__version__",
        "compare",
        "evaluate",
        "forget",
        "recover",
        "run",
        "study",
        "trainer_options",
        "unlearn",
        "virtual_logits",
    ],
    "fedquit.core": [
        "SERVER",
        "Batch",
        "ClientId",
        "EarlyStopping",
        "Effort",
        "Federation",
        "Knob",
        "Learn",
        "Local",
        "Measurement",
        "Memory",
        "Method",
        "Model",
        "Params",
        "Part",
        "Program",
        "Reply",
        "Request",
        "Sent",
        "Split",
        "State",
        "Step",
        "Task",
        "Trained",
        "Training",
        "cross_entropy",
        "mean",
        "per_example_gradients",
        "require_whole_clients",
    ],
    "fedquit.distill": ["LOSSES", "TEACHERS", "distillation_loss", "unlearn", "virtual_logits"],
    "fedquit.methods": ["METHODS"],
    "fedquit.data": ["DATASETS", "PARTITIONS", "Dataset", "FederatedData", "Pixels", "federate", "load_dataset"],
    "fedquit.models": ["MODELS", "FunctionalModel", "load_model", "refuse_unsuitable"],
    "fedquit.audit": [
        "ATTACKS",
        "METRICS",
        "REFERENCE_ATTACKS",
        "Scores",
        "auc",
        "forgetting_quality",
        "klom",
        "lira_offline",
        "lira_online",
        "rmia",
        "roc",
        "score_examples",
        "ulira",
    ],
    "fedquit.audit.attacks": ["ATTACKS", "REFERENCE_ATTACKS", "Attack"],
    "fedquit.running": ["Recipe", "Setup", "build_setup", "load"],
    "fedquit.studies": ["Candidate", "Sweep", "sweep_rates"],
    "fedquit.federation": ["ComparisonResult", "RunResult", "Setting", "StudyResult", "compare", "run", "study"],
    "fedquit.single": ["Evidence", "Forgotten", "NoRateError", "evaluate", "forget", "recover", "trainer_options"],
    "fedquit.check": ["PartResult", "Report", "Violation", "check_method"],
    "fedquit.flower": [
        "ClientData",
        "Erasure",
        "Forgetting",
        "ServerConfig",
        "Unlearning",
        "arrays_of",
        "erasable",
        "erasing_mod",
        "remaining",
        "serve",
    ],
    "fedquit.results": [
        "MEASURES",
        "SCHEMA",
        "Comparison",
        "Measure",
        "MethodSummary",
        "RequestRows",
        "ResultSet",
        "RunResults",
        "load_results",
        "open_folders",
        "read_comparison",
        "read_run",
        "summarise",
    ],
    "fedquit.report": ["ENDINGS", "FORMATS", "load_results", "write_report"],
}
LAZY = (
    *("fedquit", "fedquit.distill", "fedquit.audit", "fedquit.running"),
    *("fedquit.studies", "fedquit.check", "fedquit.flower", "fedquit.single", "fedquit.federation"),
)
RESERVED = {"forget", "unlearn", "recover", "evaluate", "run", "compare", "study"}  # for functions of the API


def imported(package: str) -> object:
    if package == "fedquit.flower":
        pytest.importorskip("flwr")
    return importlib.import_module(package)


@pytest.mark.parametrize("package", API)
def test_a_package_exports_the_listed_names_and_no_others(package: str) -> None:
    module = imported(package)
    assert sorted(module.__all__) == sorted(API[package])  # type: ignore[attr-defined]
    for name in API[package]:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", LAZY)
def test_dir_of_a_lazy_package_shows_its_exports(package: str) -> None:
    assert dir(imported(package)) == sorted(API[package])


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_is_not_there_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'unlern'"):
        _ = imported(package).unlern  # type: ignore[attr-defined]


def test_the_top_level_functions_are_those_of_distill() -> None:
    assert fedquit.unlearn is importlib.import_module("fedquit.distill").unlearn
    assert fedquit.unlearn.__module__ == "fedquit.distill.unlearning"
    assert fedquit.virtual_logits.__module__ == "fedquit.distill.virtual_teacher"


@pytest.mark.parametrize(
    "package",
    [
        *("fedquit", "fedquit.distill", "fedquit.audit", "fedquit.running"),
        *("fedquit.studies", "fedquit.check", "fedquit.federation"),
    ],
)
def test_importing_a_lazy_package_does_not_import_torch(package: str) -> None:
    check = f"import sys, {package}; print(sorted({{'torch', 'numpy', 'matplotlib'}} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_no_module_bears_a_name_that_is_reserved_for_a_function() -> None:
    modules = [info.name for info in pkgutil.walk_packages(fedquit.__path__, "fedquit.", onerror=lambda name: None)]
    assert len(modules) > 100
    assert [name for name in modules if name.rpartition(".")[2] in RESERVED] == []


def test_every_public_name_is_itself_after_all_submodules_were_imported() -> None:
    script = """
import importlib, inspect, json, pkgutil, sys, warnings
import fedquit

warnings.simplefilter("ignore")
for info in pkgutil.walk_packages(fedquit.__path__, "fedquit.", onerror=lambda name: None):
    if info.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(info.name)
    except ImportError:  # an extra that is not installed, such as Triton
        pass
shadowed = []
for package in json.loads(sys.argv[1]):
    for name in importlib.import_module(package).__all__:
        if inspect.ismodule(getattr(sys.modules[package], name)):
            shadowed.append(f"{package}.{name}")
print(json.dumps([len([name for name in sys.modules if name.startswith("fedquit.")]), shadowed]))
"""
    packages = [name for name in API if name != "fedquit.flower" or find_spec("flwr")]
    command = [sys.executable, "-c", script, json.dumps(packages)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    imported_modules, shadowed = json.loads(answer.stdout.splitlines()[-1])
    assert imported_modules > 150
    assert shadowed == []


@pytest.mark.parametrize("package", API)
def test_no_exported_name_is_also_a_module_of_its_package(package: str) -> None:
    module = imported(package)
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}  # type: ignore[attr-defined]
    assert modules & set(API[package]) == set()


# ---- documentation of arguments

# Exports whose docstrings do not explain every argument yet.
NOT_YET: set[str] = set()


def documented_names(docstring: str) -> set[str]:
    """The names under `Args:` and `Attributes:` of a Google-style docstring."""
    names: set[str] = set()
    for section in re.findall(r"^ *(?:Args|Attributes):\n((?: +.*\n?|\n)*)", docstring, re.MULTILINE):
        names |= set(re.findall(r"^ +([a-z_]\w*): ", section, re.MULTILINE))
    return names


def commented_fields(cls: type) -> set[str]:
    """The fields of a dataclass that a comment on their line explains."""
    return set(re.findall(r"^    (\w+): .*  # \S", inspect.getsource(cls), re.MULTILINE))


def arguments(function: object, *, method: bool = False) -> list[str]:
    parameters = list(inspect.signature(function).parameters)  # type: ignore[arg-type]
    return parameters[1:] if method else parameters


def qualified(thing: object) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"  # type: ignore[attr-defined]


def exported_callables() -> dict[str, object]:
    """Functions and classes of the API, by the name under which they are exported."""
    callables: dict[str, object] = {}
    for package, names in API.items():
        if package == "fedquit.flower" and find_spec("flwr") is None:
            continue
        module = importlib.import_module(package)
        for name in names:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("fedquit.")):
                callables[f"{package}.{name}"] = thing
    return callables


def named_functions() -> dict[str, object]:
    """What a recipe can name, with options that are arguments."""
    from fedquit.data import DATASETS
    from fedquit.models import MODELS

    return {qualified(make): make for make in (*DATASETS.values(), *MODELS.values())}


def own_methods(cls: type) -> Iterator[object]:
    """The public methods that a class adds to those of its bases."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and not name.startswith("_") and name not in inherited:
            yield function


def undocumented(thing: object) -> set[str]:
    """The arguments of a function, or the fields of a dataclass, that its docstring does not explain."""
    if not inspect.isclass(thing):
        wanted = arguments(thing)
        explained = documented_names(inspect.getdoc(thing) or "")
    elif dataclasses.is_dataclass(thing):
        wanted = [f.name for f in dataclasses.fields(thing) if f.init]
        own = [base for base in thing.__mro__ if dataclasses.is_dataclass(base)]  # a subclass inherits fields
        explained = set[str]().union(*(documented_names(inspect.getdoc(base) or "") for base in own))
        explained |= set[str]().union(*(commented_fields(base) for base in own))
    else:
        return set()
    return set(wanted) - explained if len(wanted) > 1 else set()


def test_every_exported_callable_documents_each_of_its_arguments() -> None:
    things = exported_callables() | named_functions()
    assert len(things) > 40
    missing = {name: sorted(undocumented(thing)) for name, thing in things.items() if name not in NOT_YET}
    assert {name: names for name, names in missing.items() if names} == {}


def test_every_public_method_of_an_exported_class_has_a_docstring() -> None:
    classes = [thing for thing in exported_callables().values() if inspect.isclass(thing)]
    assert [qualified(m) for cls in classes for m in own_methods(cls) if not inspect.getdoc(m)] == []


def test_a_method_with_several_arguments_documents_them_or_its_class_does() -> None:
    missing: dict[str, list[str]] = {}
    for name, cls in exported_callables().items():
        if not inspect.isclass(cls) or name in NOT_YET:
            continue
        for method in own_methods(cls):
            wanted = [argument for argument in arguments(method, method=True) if argument != "self"]
            text = f"{inspect.getdoc(cls)}\n{inspect.getdoc(method)}"
            unexplained = [n for n in wanted if n not in documented_names(text) and f"`{n}`" not in text]
            if len(wanted) > 1 and unexplained:
                missing[qualified(method)] = unexplained
    assert missing == {}


def test_the_page_names_every_package_and_its_example_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for package in API:
        assert f"| `{package}` |" in page or package == "fedquit.audit.attacks"
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    answer = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("{0: ")


def test_the_parser_of_docstrings_reads_sections() -> None:
    text = """Do it.

    Args:
        first: a thing,
            in two lines.
        second: another.

    Returns:
        third: not an argument.
    """
    assert documented_names(inspect.cleandoc(text)) == {"first", "second"}
