# SPDX-License-Identifier: Apache-2.0
"""Tiny Shakespeare: 1,115,394 characters of his plays, for next-character prediction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquit.data.catalog import SHAKESPEARE_SOURCE, Progress, Source, data_folder, no_progress, require_checksum
from fedquit.data.federated import Dataset
from fedquit.errors import InputError

TEST_SHARE = 10  # the last tenth of every chunk


def shakespeare(*, folder: str | Path | None = None, clients: int = 80, window: int = 80) -> Dataset:
    """Shakespeare's plays as windows of characters, 65 different ones; labels are the next characters.

    The text is cut into one chunk for each client. With the partition `chunks` and as many clients,
    or a divisor of that number, no two clients share a chunk.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`.
        clients: how many chunks.
        window: characters of one example.
    """
    return read_text(SHAKESPEARE_SOURCE, data_folder(folder), clients=clients, window=window)


def read_text(source: Source, folder: Path, *, clients: int, window: int) -> Dataset:
    """Read a text in contiguous chunks of equal length; the last tenth of each is test data.

    Args:
        source: the published text.
        folder: the data folder.
        clients: how many chunks.
        window: characters of one example.

    Returns:
        Examples `(N, window)` and labels `(N, window)`: the character that follows each.
    """
    with source.opened(folder) as path:
        require_checksum(path, source.checksum)
        tokens, vocabulary = _tokens(path)
    if clients < 1 or window < 1:
        raise InputError(f"there are clients={clients} and window={window}: each must be 1 or more.")
    length = len(tokens) // clients
    chunks = tokens[: clients * length].reshape(clients, length)
    test_length = length // TEST_SHARE
    if test_length <= window:
        raise InputError(
            f"{len(tokens):,} characters in {clients} chunks leave {test_length} test characters each, too few for a "
            f"window of {window} and its last target: take fewer clients or a smaller window."
        )
    x, y = _windows(chunks[:, : length - test_length], window)
    test_x, test_y = _windows(chunks[:, length - test_length :], window)
    return Dataset(x, y, test_x, test_y, classes=len(vocabulary))


def check_text(source: Source, folder: Path, *, fast: bool = False, progress: Progress = no_progress) -> str:
    """Check the text; see `fedquit.data.published.Check`."""
    with source.opened(folder) as path:
        require_checksum(path, source.checksum)
        tokens, vocabulary = _tokens(path)
    return f"{len(tokens):,} characters, {len(vocabulary)} different ones; the sha256 is as expected"


def _tokens(path: Path) -> tuple[NDArray[np.int64], str]:
    """Return the text as positions in its sorted alphabet, and that alphabet."""
    text = np.frombuffer(path.read_bytes(), dtype=np.uint8)  # it is plain ASCII
    letters, tokens = np.unique(text, return_inverse=True)
    return tokens.astype(np.int64), letters.tobytes().decode("latin-1")


def _windows(chunks: NDArray[np.int64], window: int) -> tuple[Tensor, Tensor]:
    """Return windows `(N, window)` without overlap, and the same one character later."""
    count = (chunks.shape[1] - 1) // window
    x, y = (chunks[:, at : at + count * window].reshape(-1, window) for at in (0, 1))
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y))
