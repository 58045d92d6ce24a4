# SPDX-License-Identifier: Apache-2.0
"""What this machine tells without being disturbed: who listens on a port, who holds a lock, how full a disk is.

Ports and locks are read from /proc. A connection would be noted by the front as one that broke off, and taking a lock
to see whether it is free could keep a server from starting. Where there is no /proc the answer is None: not known.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp


def listeners(port: int, beside: int | None = None) -> list[str] | None:
    """The addresses of this machine on which something listens on a port, in this network namespace.

    Args:
        port: the number.
        beside: a process whose network namespace is looked at too, as far as we may: units have one of their own.
    """
    addresses: list[str] = []
    known = False
    places = [PROC / "net", *([PROC / str(beside) / "net"] if beside else [])]
    for path in [place / name for place in places for name in ("tcp", "tcp6")]:
        try:
            lines = path.read_text().splitlines()[1:]
        except OSError:
            continue
        known = True
        for line in lines:
            local, _, state = line.split()[1:4]
            address, _, number = local.partition(":")
            if state == LISTEN and int(number, 16) == port:
                addresses.append(_address(address))
    return list(dict.fromkeys(addresses)) if known else None


def _address(words: str) -> str:
    """An address of /proc/net/tcp: 32-bit words, each in the byte order of the machine, which is little-endian."""
    content = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return str(ipaddress.ip_address(content))


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock file, or 0 for none; None where that is not known."""
    try:
        status = path.stat()
    except OSError:
        return 0
    try:
        lines = (PROC / "locks").read_text().splitlines()
    except OSError:
        return None
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted:
            return int(fields[4])
    return 0


@dataclass(frozen=True)
class Disk:
    """The file system of a folder."""

    path: str
    free: int  # bytes
    total: int  # bytes

    @property
    def free_fraction(self) -> float:
        """How much of it is free."""
        return self.free / self.total if self.total else 0.0


def disks(*folders: Path) -> list[Disk]:
    """The file systems of some folders, each once."""
    by_device: dict[int, Disk] = {}
    for folder in folders:
        if folder.exists():
            usage = shutil.disk_usage(folder)
            by_device.setdefault(folder.stat().st_dev, Disk(str(folder), usage.free, usage.total))
    return list(by_device.values())
