# SPDX-License-Identifier: Apache-2.0
"""What the operator sends to a site: nothing in it is secret, and nothing in it is run."""

from __future__ import annotations

import io
import json
import re
import tarfile
from dataclasses import dataclass

from fedquit.errors import InputError
from fedquit.flower.closed.sites import check_name

MAX_FILE = 65_536  # bytes
FILES = ("site.json", "site.crt", "ca.crt", "trust.yaml")
ADDRESS = re.compile(r"(\[[0-9A-Za-z:.%_-]{2,80}\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}")  # host:port
ASK_OPERATOR = "ask the operator to send the bundle again."


@dataclass(frozen=True)
class Bundle:
    """The certificate of a site, the server that it is to trust, and whose apps it is to run."""

    name: str
    address: str  # host:port of the front
    examples: int  # as the operator enrolled them
    certificate: bytes  # PEM
    authority: bytes  # PEM; the site trusts no other
    trust: bytes  # YAML: the keys that sign apps

    def pack(self) -> bytes:
        """The bundle as a tar file."""
        about = {"name": self.name, "address": self.address, "examples": self.examples}
        contents = (json.dumps(about, indent=2).encode(), self.certificate, self.authority, self.trust)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in zip(FILES, contents, strict=True):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                entry.mode = 0o600
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    @classmethod
    def unpack(cls, content: bytes) -> Bundle:
        """The bundle that `pack` made. Only the four files are read, and nothing is written."""
        try:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
                files = {name: _member(tar, name) for name in FILES}
            about = json.loads(files["site.json"])
            check_name(about["name"])  # it becomes the name of a log
            if not ADDRESS.fullmatch(about["address"]):
                raise ValueError(about["address"])
            return cls(
                name=about["name"],
                address=about["address"],
                examples=int(about["examples"]),
                certificate=files["site.crt"],
                authority=files["ca.crt"],
                trust=files["trust.yaml"],
            )
        except (tarfile.TarError, KeyError, ValueError, TypeError, OverflowError, RecursionError, InputError) as error:
            raise InputError(f"this is no bundle of a site: {ASK_OPERATOR}") from error


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    entry = tar.getmember(name)
    file = tar.extractfile(entry) if entry.isreg() and entry.size <= MAX_FILE else None
    if file is None:
        raise ValueError(name)
    return file.read()
