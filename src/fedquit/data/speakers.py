# SPDX-License-Identifier: Apache-2.0
"""Texts by who speaks them: a speaker is a client. The roles of Tiny Shakespeare, and the American presidents.

A text becomes tokens, characters or words, and windows of them without overlap; the label of each token is the next
one. Speakers have as much text as they have, so that clients differ in size; use the partition `owner`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from fedquit.data.catalog import (
    SHAKESPEARE_SOURCE,
    SOTU_SOURCE,
    Damaged,
    Progress,
    Source,
    data_folder,
    no_progress,
    require_checksum,
)
from fedquit.data.federated import Dataset
from fedquit.errors import InputError
from fedquit.utils.names import unknown

Unit = Literal["characters", "words"]
TEST_SHARE = 10  # the last tenth of every speaker's windows
ADDRESSES = 233
WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")
OTHER = "\N{REPLACEMENT CHARACTER}"  # stands for every word outside of the vocabulary


def shakespeare_speakers(
    *,
    folder: str | Path | None = None,
    clients: int = 20,
    window: int = 80,
    tokens: Unit = "characters",
    vocabulary: int = 0,
    skip: int = 0,
) -> Dataset:
    """The roles of Shakespeare's plays, each a client: those who speak most.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`. The text is that of `shakespeare`.
        clients: how many roles, of 301.
        window: tokens of one example.
        tokens: "characters" or "words".
        vocabulary: how many different tokens, the most frequent ones; 0 for all.
        skip: so many of those with the most text are left out, for a network that was trained on them.
    """
    with SHAKESPEARE_SOURCE.opened(data_folder(folder)) as path:
        require_checksum(path, SHAKESPEARE_SOURCE.checksum)
        texts = _roles(path.read_text(encoding="ascii"))
    return by_speaker(texts, clients=clients, window=window, tokens=tokens, vocabulary=vocabulary, skip=skip)


def sotu(
    *,
    folder: str | Path | None = None,
    clients: int = 20,
    window: int = 64,
    tokens: Unit = "words",
    vocabulary: int = 8192,
    skip: int = 0,
) -> Dataset:
    """Addresses of American presidents on the State of the Union, 1790 to 2020; each president is a client.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`.
        clients: how many presidents: those with the most text.
        window: tokens of one example.
        tokens: "characters" or "words".
        vocabulary: how many different tokens, the most frequent ones; 0 for all.
        skip: so many of those with the most text are left out, for a network that was trained on them.
    """
    with SOTU_SOURCE.opened(data_folder(folder)) as path:
        texts = _presidents(path, ADDRESSES)
    return by_speaker(texts, clients=clients, window=window, tokens=tokens, vocabulary=vocabulary, skip=skip)


def by_speaker(
    texts: Mapping[str, str], *, clients: int, window: int, tokens: Unit, vocabulary: int, skip: int = 0
) -> Dataset:
    """Cut the texts of those who speak most into windows.

    Args:
        texts: by speaker.
        clients: how many of them.
        window: tokens of one example.
        tokens: "characters" or "words".
        vocabulary: how many different tokens of all texts; 0 for all.
        skip: so many of those with the most text are left out.

    Returns:
        Examples `(N, window)`, labels `(N, window)`, and their owners, who are numbered by the length of their text.
    """
    if tokens not in get_args(Unit):
        raise unknown("unit of tokens", tokens, get_args(Unit))
    if not 1 <= clients <= len(texts) - skip or min(window - 1, vocabulary, skip) < 0:
        raise InputError(
            f"there are clients={clients}, skip={skip}, window={window} and vocabulary={vocabulary}: take 1 to "
            f"{len(texts)} clients together with those that are left out, and a window from 1 on."
        )
    units = {name: list(text) if tokens == "characters" else WORD.findall(text) for name, text in texts.items()}
    speakers = sorted(units, key=lambda name: (-len(units[name]), name))[skip : skip + clients]
    numbers = _numbered(list(units.values()), vocabulary)
    train: list[tuple[Tensor, Tensor]] = []
    test: list[tuple[Tensor, Tensor]] = []
    owners: list[Tensor] = []
    for owner, name in enumerate(speakers):
        spoken = torch.tensor([numbers.get(unit, numbers[OTHER]) for unit in units[name]])
        count = (len(spoken) - 1) // window
        held = max(1, count // TEST_SHARE)
        if count <= held:
            raise InputError(
                f"{name} says {len(spoken)} tokens, too few for windows of {window} to train and test on: take fewer "
                "clients or a smaller window."
            )
        x, y = (spoken[at : at + count * window].view(count, window) for at in (0, 1))
        train.append((x[:-held], y[:-held]))
        test.append((x[-held:], y[-held:]))
        owners.append(torch.full((count - held,), owner))
    x, y = (torch.cat(part) for part in zip(*train, strict=True))
    test_x, test_y = (torch.cat(part) for part in zip(*test, strict=True))
    return Dataset(x, y, test_x, test_y, classes=len(numbers), owner=torch.cat(owners))


def _numbered(texts: list[list[str]], vocabulary: int) -> dict[str, int]:
    """Number the tokens, the most frequent first; the first number is that of all others."""
    counts = Counter(unit for text in texts for unit in text)
    known = sorted(counts, key=lambda unit: (-counts[unit], unit))
    return {unit: number for number, unit in enumerate([OTHER, *known][: vocabulary or None])}


def _roles(text: str) -> dict[str, str]:
    """Return what each role says, joined: a speech is a block whose first line is the role and a colon."""
    spoken: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        role, _, speech = block.partition(":\n")
        if speech and "\n" not in role:
            spoken.setdefault(role, []).append(speech)
    return {role: "\n".join(speeches) for role, speeches in spoken.items()}


def _presidents(folder: Path, addresses: int) -> dict[str, str]:
    """Return what each president said in so many addresses, in the order of the years."""
    spoken: dict[str, list[str]] = {}
    files = sorted((folder / "data").glob("*.json"))
    if len(files) != addresses:
        raise Damaged(f"{folder} holds {len(files)} addresses where {addresses} are published")
    for file in files:
        try:
            address = json.loads(file.read_text(encoding="utf-8"))
            spoken.setdefault(str(address["name"]), []).append(str(address["text"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{file} cannot be read ({error})") from error
    return {name: "\n".join(texts) for name, texts in spoken.items()}


def check_addresses(
    source: Source,
    addresses: int,
    folder: Path,
    *,
    fast: bool = False,
    progress: Progress = no_progress,
) -> str:
    """Check that there are so many addresses; see `fedquit.data.published.Check`."""
    with source.opened(folder) as path:
        texts = _presidents(path, addresses)
    characters = sum(map(len, texts.values()))
    return f"{addresses} addresses of {len(texts)} presidents, {characters:,} characters"
