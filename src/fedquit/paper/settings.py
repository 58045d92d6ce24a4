# SPDX-License-Identifier: Apache-2.0
"""The paper's settings, and which of them a record belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedquit.results.schema import number
from fedquit.results.words import count


@dataclass(frozen=True)
class PaperSetting:
    """A federation of the paper, as its recipe below `settings/` has it."""

    title: str
    data: str
    partition: str
    clients: int
    model: str
    rounds: int
    alpha: float = 0.1
    clients_per_round: int = 0


SETTINGS = {
    "cifar100-iid": PaperSetting("CIFAR-100, IID, ResNet-18", "cifar100", "iid", 10, "resnet18", 200),
    "cifar100-lda": PaperSetting("CIFAR-100, LDA 0.1, ResNet-18", "cifar100", "lda", 10, "resnet18", 200),
    "cifar10-lda": PaperSetting("CIFAR-10, LDA 0.3, ResNet-18", "cifar10", "lda", 10, "resnet18", 200, alpha=0.3),
    "cifar100-lda-mit-b0": PaperSetting("CIFAR-100, LDA 0.1, MiT-B0", "cifar100", "lda", 10, "mit_b0", 50),
    "cub200-lda": PaperSetting("CUB-200, LDA 0.1, MiT-B0", "cub200", "lda", 10, "mit_b0", 50),
    "cifar100-lda-100-clients": PaperSetting(
        "CIFAR-100, LDA 0.1, ResNet-18, 100 clients", "cifar100", "lda", 100, "resnet18", 600, clients_per_round=10
    ),
    "cub200-lda-100-clients": PaperSetting(
        "CUB-200, LDA 0.1, MiT-B0, 100 clients", "cub200", "lda", 100, "mit_b0", 200, clients_per_round=10
    ),
    "shakespeare": PaperSetting(
        "Tiny-Shakespeare, LSTM, 80 clients", "shakespeare", "chunks", 80, "char_lstm", 200, clients_per_round=8
    ),
}


def setting_of(recipe: Mapping[str, Any], *, smoke: bool = False) -> tuple[str, str]:
    """The setting of the paper that a recipe is, or "" and what keeps it from being one.

    Args:
        recipe: In plain values, as a record holds it.
        smoke: Whether it is a recipe at its smallest size, which only its title tells.
    """
    if smoke:
        return _smoke_setting(str(recipe.get("title", "")))
    data, model, train = (_section(recipe, name) for name in ("data", "model", "train"))
    for name, setting in SETTINGS.items():
        same = (data.get("name"), _partition(data), data.get("clients"), model.get("name")) == (
            setting.data,
            setting.partition,
            setting.clients,
            setting.model,
        )
        if not same or (setting.partition == "lda" and data.get("alpha") != setting.alpha):
            continue
        if train.get("rounds") != setting.rounds:
            return "", f"its training has {count(number(train.get('rounds')), 'round')} in place of {setting.rounds}"
        if train.get("clients_per_round", 0) not in (setting.clients_per_round, setting.clients_per_round or 10):
            return "", f"{train.get('clients_per_round')} clients take part in a round"
        if train.get("epochs", 1.0) != 1.0:
            return "", f"its clients train {train.get('epochs')} epochs a round in place of 1"
        return name, ""
    return "", "it is of no setting of the paper"


def _smoke_setting(title: str) -> tuple[str, str]:
    from fedquit.running.recipe import load

    for name in SETTINGS:
        if title == f"{load(f'settings/{name}').title} (smoke)":
            return name, ""
    return "", "its title is not that of a setting at its smallest size"


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}


def _partition(data: Mapping[str, Any]) -> str:
    """How the data is divided; of a partition file its name tells."""
    partition = str(data.get("partition", ""))
    if partition != "file":
        return partition
    return "iid" if "iid" in str(data.get("partition_file", "")) else "lda"


def request_of(recipe: Mapping[str, Any], clients: int) -> str:
    """What a recipe's first request asks to forget, as a key has it.

    Args:
        recipe: In plain values.
        clients: How many leave.
    """
    requests = recipe.get("request")
    first = requests[0] if isinstance(requests, list) and requests and isinstance(requests[0], Mapping) else {}
    share = number(first.get("samples")) or 0.0
    if share:
        return f"samples-{share:g}"
    return {1: "client", 2: "pair"}.get(clients, f"{clients} clients")


_STORED_AS = "store"  # the number format of a stored history: the same method in less space


def method_of(section: Mapping[str, Any], setting: str) -> str:
    """A method with the options in which it is neither its default nor what the setting's recipe says.

    Args:
        section: `[method]` of a recipe.
        setting: A setting of the paper.

    Returns:
        For example `fedosd`, `fedosd lr=0.0004`, `fedquit teacher=flatten` or `fedquit tau=2`.
    """
    name = str(section.get("name", "fedquit"))
    usual = _usual(name, setting)
    unnamed = {"name", _STORED_AS}
    given = {key: value for key, value in section.items() if key not in unnamed and value != usual.get(key)}
    if "tau" in given or given.get("teacher") == "temperature":
        tau = float(given.pop("tau", 1.0))
        given.pop("teacher", None)
        given |= {"teacher": "flatten"} if math.isinf(tau) else {} if tau == 1 else {"tau": tau}
    return " ".join([name, *(f"{key}={_text(value)}" for key, value in sorted(given.items()))])


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _usual(name: str, setting: str) -> dict[str, Any]:
    """The options of a method that need no mention: its defaults, and those of the setting's recipe."""
    from fedquit.methods import METHODS  # late: it needs torch
    from fedquit.running.recipe import load

    usual = {field.name: field.default for field in fields(METHODS[name])} if name in METHODS else {}
    own = load(f"settings/{setting}").method if setting in SETTINGS else {}
    return {**usual, **own} if own.get("name") == name else usual
