# SPDX-License-Identifier: Apache-2.0
"""Partitions: which client gets which examples.

A partition is a function of the labels, the number of clients and a random generator. It returns,
for every client, the sorted positions of its examples; the same generator gives the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquit.core import ClientId
from fedquit.errors import InputError

Positions = NDArray[np.int64]  # positions, or numbers of them
TRIES = 10  # how often the authors draw before they give up on a client without data


class Partition(Protocol):
    """One way to divide the examples; each takes from the options what concerns it."""

    def __call__(
        self,
        labels: Tensor,
        clients: int,
        rng: np.random.Generator,
        *,
        alpha: float,
        file: str | Path | None,
        owner: Tensor | None = None,
    ) -> dict[ClientId, Tensor]:
        """Return the sorted positions of every client's examples.

        Args:
            labels: of all examples, `(N,)` or `(N, T)`.
            clients: how many clients.
            rng: draws whatever is random.
            alpha: of the Dirichlet distribution, for `lda`.
            file: the JSON file, for `file`.
            owner: whose each example is, `(N,)`, for `owner`; None where the data set does not say.
        """


def stream(seed: int, *purpose: object) -> np.random.Generator:
    """Return a random generator for one purpose; draws from it change no other."""
    key = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(key, "big"))


def iid(labels: Tensor, clients: int, rng: np.random.Generator, **_: object) -> dict[ClientId, Tensor]:
    """Random parts of equal size; if there is a remainder, the first clients get one more."""
    _require_enough(len(labels), clients)
    return _by_client(np.array_split(rng.permutation(len(labels)), clients))


def chunks(labels: Tensor, clients: int, rng: np.random.Generator, **_: object) -> dict[ClientId, Tensor]:
    """Contiguous parts of equal size, in the order of the data set."""
    _require_enough(len(labels), clients)
    return _by_client(np.array_split(np.arange(len(labels)), clients))


def lda(labels: Tensor, clients: int, rng: np.random.Generator, *, alpha: float, **_: object) -> dict[ClientId, Tensor]:
    """Label skew: the shares of each class are drawn from Dirichlet(alpha, …, alpha).

    Client k gets round(p_k * n) of the n examples of a class. Where rounding leaves some over,
    nobody gets them; where it runs short, the last clients get fewer. All is drawn anew while a
    client has nothing at all.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}: it must be above 0 (0.1 divides the classes very unevenly, 100 evenly).")
    if labels.dim() != 1:
        raise InputError(f"labels of shape {tuple(labels.shape)} have no single class each: use iid or chunks.")
    _require_enough(len(labels), clients)
    by_class = [np.flatnonzero(labels.numpy() == c) for c in np.unique(labels.numpy())]
    sizes = np.array([len(members) for members in by_class])
    for _try in range(TRIES):
        cuts = _cuts(rng.dirichlet(np.full(clients, alpha), size=len(sizes)), sizes)
        if np.diff(cuts, prepend=0).sum(axis=0).all():
            break
    else:
        raise InputError(
            f"with alpha={alpha}, {TRIES} draws each left one of {clients} clients without data: "
            "take fewer clients or a larger alpha."
        )
    # The part behind the last cut is what rounding left over.
    parts = [np.split(rng.permutation(members), cut)[:-1] for members, cut in zip(by_class, cuts, strict=True)]
    return _by_client([np.concatenate(part) for part in zip(*parts, strict=True)])


def _cuts(proportions: NDArray[np.float64], sizes: Positions) -> Positions:
    """Return where each client's share ends, `(classes, clients)`; at most the class's size."""
    counts = np.rint(proportions * sizes[:, None]).astype(np.int64)
    cuts: Positions = np.minimum(counts.cumsum(axis=1), sizes[:, None])
    return cuts


def by_owner(
    labels: Tensor, clients: int, rng: np.random.Generator, *, owner: Tensor | None = None, **_: object
) -> dict[ClientId, Tensor]:
    """Each owner of the data set is a client, such as a speaker of a text."""
    if owner is None:
        raise InputError("partition 'owner' needs data whose owners are known: take another partition, such as iid.")
    owners = owner.unique().tolist()
    if len(owners) != clients:
        raise InputError(f"the data has {len(owners)} owners, not {clients}: set data.clients to {len(owners)}.")
    return _by_client([np.flatnonzero(owner.numpy() == one) for one in owners])


def from_file(
    labels: Tensor, clients: int, rng: np.random.Generator, *, file: str | Path | None, **_: object
) -> dict[ClientId, Tensor]:
    """What a JSON file says: `{"0": [positions], "1": [positions], …}`."""
    if not file:
        raise InputError("partition 'file' needs a file: set partition_file to a JSON file {\"0\": [positions], …}.")
    parts = {_client_id(name, file): positions for name, positions in _read(Path(file)).items()}
    if clients > 0 and len(parts) != clients:
        raise InputError(f"partition file {file} has {len(parts)} clients, not {clients}: set clients to that.")
    owner: dict[int, ClientId] = {}
    for client, positions in parts.items():
        _check_positions(client, positions, len(labels), owner, file)
    return {c: torch.tensor(sorted(parts[c]), dtype=torch.long) for c in sorted(parts)}


def _read(path: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise InputError(f"partition file {path} cannot be read ({error.strerror}): check the path.") from error
    except InputError:
        raise
    except ValueError as error:  # not JSON, or not even text
        raise InputError(f'partition file {path} is not JSON ({error}): write {{"0": [positions], …}}.') from error
    if not isinstance(content, dict) or not content or not all(isinstance(v, list) for v in content.values()):
        raise InputError(f'partition file {path} does not map clients to lists: write {{"0": [positions], …}}.')
    return content


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a key that comes twice: JSON would keep the last and lose a client's data."""
    content: dict[str, object] = {}
    for name, value in pairs:
        if name in content:
            raise InputError(f"the partition file names client {name!r} twice: join its positions in one list.")
        content[name] = value
    return content


def _client_id(name: str, file: str | Path) -> ClientId:
    # The plain spelling only: "01" would be a second name of client 1, and -1 is the server.
    if not (name.isascii() and name.isdigit() and str(int(name)) == name):
        raise InputError(f"partition file {file} names a client {name!r}: clients are whole numbers from 0 on.")
    return int(name)


def _check_positions(
    client: ClientId, positions: list[int], examples: int, owner: dict[int, ClientId], file: str | Path
) -> None:
    for p in positions:
        if type(p) is not int or not 0 <= p < examples:
            raise InputError(
                f"partition file {file} gives client {client} the position {p!r}: positions are whole numbers from 0 "
                f"to {examples - 1} (is it a file for another data set?)."
            )
        if p in owner:
            raise InputError(
                f"partition file {file} gives position {p} to client {owner[p]} and again to client {client}: "
                "each example belongs to one client, once."
            )
        owner[p] = client


def _require_enough(examples: int, clients: int) -> None:
    if clients < 1:
        raise InputError(f"there are {clients} clients: a federation needs at least one.")
    if examples < clients:
        raise InputError(f"{examples} examples cannot be divided among {clients} clients: take fewer clients.")


def _by_client(parts: list[Positions]) -> dict[ClientId, Tensor]:
    return {k: torch.from_numpy(np.sort(part).astype(np.int64)) for k, part in enumerate(parts)}


PARTITIONS: dict[str, Partition] = {"iid": iid, "lda": lda, "chunks": chunks, "file": from_file, "owner": by_owner}
