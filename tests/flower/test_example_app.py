# SPDX-License-Identifier: Apache-2.0
"""The example app's own settings, and the changes by which the documentation makes an app erasable."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedquit.errors import UnknownNameError
from fedquit.flower.config import ServerConfig
from fedquit.flower.deploy.demo import SETTINGS, app_folder
from fedquit.methods import METHODS

pytestmark = pytest.mark.flower


def run_config(project: str, **changes: Any) -> dict[str, Any]:
    """What a run is given: the app's table, flattened as Flower does it, and what the run sets."""
    from flwr.common.config import flatten_dict, fuse_dicts

    named = flatten_dict(tomllib.loads(project)["tool"]["flwr"]["app"]["config"])
    return dict(fuse_dicts(named, {"fedquit.state": "state", **changes}))  # a key that the app does not name is refused


@pytest.fixture
def project() -> str:
    return (app_folder() / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_the_app_can_choose_any_method(name: str, project: str) -> None:
    config = ServerConfig.of(run_config(project, **{"fedquit.method.name": name}))
    expected = METHODS[name](lr=1e-3) if name == "fedquit" else METHODS[name]()  # type: ignore[call-arg]
    assert config.build_method() == expected, "FedQUIT has the app's rate, and every other method its own settings"


def test_the_demo_sets_keys_that_the_app_names(project: str) -> None:
    config = ServerConfig.of(run_config(project, **SETTINGS))
    assert config.method == {"name": "fedquit", "lr": SETTINGS["fedquit.method.fedquit.lr"]}


def test_settings_beside_the_name_hold_as_ever() -> None:
    config = ServerConfig.of({"fedquit.state": "state", "fedquit.method.name": "pga", "fedquit.method.lr": 0.5})
    assert config.method == {"name": "pga", "lr": 0.5}


def test_a_table_for_no_method_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="fedquitt"):
        ServerConfig.of({"fedquit.state": "state", "fedquit.method.fedquitt.lr": 0.5})


# The documentation's changes -----------------------------------------------------------------------------------------

TASK = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

def load_partition(number):
    return torch.zeros(4, 2), torch.full((4,), number)

def test_accuracy(params):
    return 50.0
"""


def files(side: str) -> dict[str, str]:
    """The files in the documentation before (-) or after (+) its changes."""
    text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    diffs = re.findall(r"```diff\n # (\S+)\n(.*?)```", text, re.DOTALL)
    return {
        name: "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in f" {side}\n")
        for name, diff in diffs
    }


@pytest.mark.parametrize("side", "-+")
def test_the_documented_app_can_be_loaded_before_and_after(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    package = tmp_path / "documented"
    package.mkdir()
    for name, text in {"__init__.py": "", "task.py": TASK, **files(side)}.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        client, server = (importlib.import_module(f"documented.{name}_app") for name in ("client", "server"))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "documented"]:
            del sys.modules[name]
    assert isinstance(client.app, ClientApp)
    assert isinstance(server.app, ServerApp)
    assert hasattr(client, "erasable") == hasattr(server, "serve") == (side == "+")


def test_the_documented_settings_are_understood() -> None:
    changed = {"fedquit.train.rounds": 7, "fedquit.method.fedquit.lr": 0.5}
    config = ServerConfig.of(run_config(files("+")["pyproject.toml"], **changed))
    assert (config.train.rounds, config.train.lr) == (7, 0.1)
    assert config.method == {"name": "fedquit", "lr": 0.5}
