# SPDX-License-Identifier: Apache-2.0
"""Parameters in files: safetensors with a checksum, whole or not there. Nothing is ever pickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedquit.core import Params
from fedquit.core.params import fingerprint
from fedquit.errors import StoreError
from fedquit.utils import files

Meta = Mapping[str, Any]


def save_params(path: Path, params: Params, meta: Meta | None = None) -> None:
    """Write parameters to a file, on the disk when this returns.

    Args:
        path: the file; what was there stays until the new content is safe.
        params: tensors by name, on any device.
        meta: some JSON to keep beside them.
    """
    whole: Params = {}
    addresses: set[int] = set()
    for name, tensor in params.items():
        whole[name] = tensor.detach().cpu().contiguous()
        if whole[name].data_ptr() in addresses:  # safetensors wants every tensor to have memory of its own
            whole[name] = whole[name].clone()
        addresses.add(whole[name].data_ptr())
    # Safetensors sorts the names; methods that speak of the first or the last layer need them in their own order.
    described = json.dumps({"names": list(whole), "meta": dict(meta or {})})
    files.write_atomic(path, save(whole, metadata={"checksum": _checksum(whole, described), "described": described}))


def load_params(path: Path) -> tuple[Params, Meta]:
    """Read what `save_params` wrote; a damaged file is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    described = head.get("described", "")
    if head.get("checksum") != _checksum(tensors, described):
        raise _damaged(path, "its checksum does not fit")
    head = json.loads(described)
    return {name: tensors[name] for name in head["names"]}, head["meta"]


def read_meta(path: Path) -> Meta:
    """What `save_params` was told to keep beside the parameters, from the file's head alone."""
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get("described", "")
        meta: Meta = json.loads(described)["meta"]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    return meta


def numbers_in(path: Path) -> int:
    """The bytes of the numbers in such a file, from its head alone."""
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - head


def _checksum(params: Params, described: str) -> str:
    return hashlib.blake2b(f"{fingerprint(params)}{described}".encode(), digest_size=16).hexdigest()


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"the checkpoint {path} is damaged ({why}): restore it from a backup, or run into another folder."
    )
