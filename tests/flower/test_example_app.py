# SPDX-License-Identifier: Apache-2.0
"""The example app's own settings."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fedquit.errors import UnknownNameError
from fedquit.flower.config import ServerConfig
from fedquit.flower.demo import SETTINGS, app_folder
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


def test_settings_beside_the_name_hold_as_ever(project: str) -> None:
    config = ServerConfig.of({"fedquit.state": "state", "fedquit.method.name": "pga", "fedquit.method.lr": 0.5})
    assert config.method == {"name": "pga", "lr": 0.5}


def test_a_table_for_no_method_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="fedquitt"):
        ServerConfig.of({"fedquit.state": "state", "fedquit.method.fedquitt.lr": 0.5})
