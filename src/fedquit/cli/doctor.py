# SPDX-License-Identifier: Apache-2.0
"""`fedquit doctor`: what is installed, what computes, where data lies, and what is missing for which command."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from fedquit.cli.data import DataDir
from fedquit.cli.screen import LOOK, PLAIN, AsJson
from fedquit.cli.screen import out as screen

State = Literal["ok", "absent", "problem"]
COLOURS: dict[State, str] = {"ok": "green", "absent": "yellow", "problem": "bold red"}
NEEDED_FOR = {
    "flower": "federations on Flower (fedquit flower)",
    "transformers": "MiT-B0 and Hugging Face models",
    "ray": "fedquit study run --workers ray",
    "peft": "LoRA adapters",
    "pandas": "to_pandas of results",
}
LITTLE = 2e9  # bytes of disk below which a training may not fit


@dataclass(frozen=True)
class Observation:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        state: "ok"; "absent", which some commands need; "problem", which must be mended.
        details: What was seen.
        next_step: What to do; "" where nothing must be done.
    """

    what: str
    state: State
    details: str
    next_step: str = ""


def doctor(
    folder: Annotated[Path, typer.Option("--out", help="The folder for results whose disk is looked at.")] = Path(),
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, which engine and GPU compute, where data lies, and what is missing.

    Exit code 1 where something must be mended.
    """
    observations = [
        *_installed(),
        *_computing(),
        *_disks({"results": folder, "data": _data(data_dir)}),
        *_data_sets(_data(data_dir)),
    ]
    if as_json:
        typer.echo(json.dumps([asdict(observation) for observation in observations]))
    else:
        screen.print(_table(observations))
        for observation in observations:
            if observation.next_step:
                screen.print(f"{observation.what}: {observation.next_step}", **PLAIN)
    if any(observation.state == "problem" for observation in observations):
        raise typer.Exit(1)


def _table(observations: Iterable[Observation]) -> Table:
    table = Table(**LOOK)
    for column in ("what", "state", "details"):
        table.add_column(column, overflow="fold")
    for observation in observations:
        table.add_row(
            escape(observation.what),
            f"[{COLOURS[observation.state]}]{observation.state}[/]",
            escape(observation.details),
        )
    return table


def _installed() -> Iterator[Observation]:
    from fedquit.results.study_folder import code_name
    from fedquit.utils.version import code_version

    yield Observation(
        "fedquit", "ok", f"{code_name(code_version())}, Python {platform.python_version()} ({sys.executable})"
    )
    try:
        lines = metadata.requires("fedquit") or []
    except metadata.PackageNotFoundError:
        yield Observation("packages", "absent", "fedquit is not installed here", "run `pip install -e .` in the clone.")
        return
    required = [Requirement(line) for line in lines]
    yield from requirement_observations(required, "", "the packages that every command needs")
    for extra, purpose in NEEDED_FOR.items():
        yield from requirement_observations(required, extra, purpose)


def requirement_observations(required: Iterable[Requirement], extra: str, purpose: str) -> Iterator[Observation]:
    """Compare the packages of an extra, or those that have no extra, with what is installed.

    Args:
        required: All that fedquit's metadata names.
        extra: Of these; "" for what is always needed.
        purpose: What they are for, in words.
    """
    own = [one for one in required if _belongs(one, extra)]
    if not own:
        return
    absent: list[str] = []
    wrong: list[str] = []
    there: list[str] = []
    for one in own:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            absent.append(one.name)
            continue
        fits = one.specifier.contains(version, prereleases=True)
        (there if fits else wrong).append(
            f"{one.name} {version}" if fits else f"{one.name} {version}, not {one.specifier}"
        )
    what = f"extra {extra}" if extra else "packages"
    install = f"run `pip install 'fedquit[{extra}]'`." if extra else "run `pip install fedquit` again."
    if wrong:
        yield Observation(what, "problem", f"{'; '.join(wrong)}: for {purpose}", install)
    elif absent:
        state: State = "absent" if extra else "problem"
        yield Observation(what, state, f"{', '.join(absent)} not installed: for {purpose}", install)
    else:
        yield Observation(what, "ok", ", ".join(there))


def _belongs(one: Requirement, extra: str) -> bool:
    """Whether a requirement is one of an extra, and of no environment without it."""
    if one.marker is None:
        return not extra
    return one.marker.evaluate({"extra": extra}) and (not extra or not one.marker.evaluate({"extra": ""}))


def _computing() -> Iterator[Observation]:
    import torch

    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU is seen by the driver"
        yield Observation(
            "device", "ok", f"CPU, {threads}; {why}; engine auto: stacked or threaded, by the network's size"
        )
        return
    name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    yield Observation("device", "ok", f"{name}, {total / 1e9:.0f} GB, {threads}; engine auto: stacked, in bf16")
    try:
        yield Observation("kernels", "ok", f"Triton {metadata.version('triton')}")
    except metadata.PackageNotFoundError:
        advice = "install the Triton that belongs to your torch; without it ResNet-18 runs several times slower."
        yield Observation("kernels", "problem", "a GPU without Triton", advice)


def _data(data_dir: Path | None) -> Path:
    from fedquit.data.catalog import data_folder

    return data_folder(data_dir)


def _disks(folders: dict[str, Path]) -> Iterator[Observation]:
    for name, folder in folders.items():
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Observation(f"disk of {name}", "problem", f"{there} cannot be written", "choose another folder.")
        elif free < LITTLE:
            yield Observation(f"disk of {name}", "problem", f"{free / 1e9:.1f} GB free in {there}", "make room.")
        else:
            yield Observation(f"disk of {name}", "ok", f"{free / 1e9:.0f} GB free in {there}")


def _data_sets(folder: Path) -> Iterator[Observation]:
    from fedquit.data.published import PUBLISHED

    here = [name for name, published in PUBLISHED.items() if published.source.place(folder).exists()]
    absent = [name for name in PUBLISHED if name not in here]
    if here:
        yield Observation("data sets", "ok", f"{', '.join(here)} in {folder}; `fedquit data check` verifies them")
    if absent:
        advice = f"run `fedquit data get {absent[0]}` where a recipe needs it; the demo needs none."
        yield Observation("data sets", "absent", f"{', '.join(absent)} not in {folder}", advice)
