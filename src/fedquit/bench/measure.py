# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: a figure with its limit and its spread, and what it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedquit.errors import InputError
from fedquit.running.runner import versions
from fedquit.studies.workers import cores
from fedquit.utils.version import code_version


@dataclass(frozen=True)
class Figure:
    """One measured number: the median of some repeats, and the most that it may be."""

    name: str
    unit: str
    repeats: tuple[float, ...]
    limit: float | None = None  # None: for information
    note: str = ""  # how it was measured, where that is not plain

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.repeats)

    @property
    def kept(self) -> bool | None:
        """Whether it stays below its limit; None without one."""
        return None if self.limit is None else self.value < self.limit

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        spread = {"lowest": min(self.repeats), "highest": max(self.repeats), "repeats": list(self.repeats)}
        judged = {"limit": self.limit, "kept": self.kept, "note": self.note}
        return {"name": self.name, "value": self.value, "unit": self.unit, **spread, **judged}


@dataclass(frozen=True)
class Bench:
    """Some figures, and what they were measured on."""

    title: str
    figures: Sequence[Figure]
    machine: dict[str, Any]

    @property
    def kept(self) -> bool:
        """Whether every limit was kept."""
        return all(figure.kept is not False for figure in self.figures)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = [figure.to_dict() for figure in self.figures]
        code = {"versions": versions(), "code": code_version()}
        return {"schema": 1, "title": self.title, "machine": self.machine, **code, "figures": figures}


def chosen_device(name: str) -> torch.device:
    """By name; one that is not here is refused."""
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"there is no device {name!r} here: take cpu, or cuda on a machine with a GPU.")
    return torch.device(name)


def seconds(work: Callable[[], object], repeats: int, device: torch.device | None = None) -> tuple[float, ...]:
    """How long the work takes, each time; on a GPU until the last kernel is done."""
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return tuple(took)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on, in general words, and how busy it was with other work."""
    facts: dict[str, Any] = {"cpu_cores": cores(), "threads": torch.get_num_threads(), "processor": platform.machine()}
    facts["load"] = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None  # over the last minute
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
