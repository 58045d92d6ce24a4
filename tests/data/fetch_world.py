# SPDX-License-Identifier: Apache-2.0
"""A tiny published data set, and a web server that can be told to misbehave."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import random
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedquit.data.catalog import Source

CONTENT = {f"part{k}/file{n}": random.Random(10 * k + n).randbytes(60_000) for k in range(2) for n in range(3)}
NOWHERE = "http://127.0.0.1:9/tiny.tar.gz"  # nobody listens at the port for discarding


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def packed(files: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return buffer.getvalue()


# What is not below the entry is left out, as the attributes.txt of the birds is.
ARCHIVE = packed({"attributes.txt": b"not wanted"} | {f"tiny-set/{name}": c for name, c in CONTENT.items()})


def tiny(archive: bytes = ARCHIVE, url: str = NOWHERE) -> Source:
    md5 = hashlib.md5(archive, usedforsecurity=False).hexdigest()
    return Source(
        name="tiny",
        title="The tiny set",
        entry="tiny-set",
        archive="tiny.tar.gz",
        url=url,
        bytes=len(archive),
        checksum=f"md5:{md5}",
        room=400_000,
    )


def plain_text(content: bytes, url: str) -> Source:
    sha256 = hashlib.sha256(content).hexdigest()
    return Source("text", "A text", "text.txt", "text.txt", url, len(content), f"sha256:{sha256}", 0)


def complete_part(folder: Path) -> None:
    """What a download leaves that was killed right at its end."""
    (folder / "tiny.tar.gz.part").write_bytes(ARCHIVE)
    note = {"url": NOWHERE, "validator": "", "length": len(ARCHIVE)}
    (folder / "tiny.tar.gz.part.json").write_text(json.dumps(note))


@dataclass
class Served:
    """What the server has, how it behaves, and what it was asked for."""

    content: bytes = ARCHIVE
    ranges: bool = True
    etag: str = '"one"'
    modified: str = ""
    cut: list[int] = field(default_factory=list)  # how many bytes the next answers send before the connection breaks
    length: bool = True  # whether it states one
    status: int = 200  # anything else is answered without content
    redirect: bool = False
    off: int = 0  # how far before the range that was asked for the next answer begins
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    @property
    def wanted(self) -> list[str | None]:
        return [headers.get("range") for headers in self.asked]


class _Handler(BaseHTTPRequestHandler):
    served: Served

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        served = self.served
        if served.redirect and self.path != "/moved":
            self.send_response(302)
            self.send_header("Location", "/moved")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        served.asked.append({key.lower(): value for key, value in self.headers.items()})
        start, status = self._start(served)
        if served.status != 200:
            status = served.status
        body = b"" if status >= 400 else served.content[start:]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(served.content) - 1}/{len(served.content)}")
        if status == 416:
            self.send_header("Content-Range", f"bytes */{len(served.content)}")
        if served.etag:
            self.send_header("ETag", served.etag)
        if served.modified:
            self.send_header("Last-Modified", served.modified)
        if served.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body[: served.cut.pop(0)] if served.cut else body
        served.sent.append(len(body))
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = True

    def _start(self, served: Served) -> tuple[int, int]:
        wanted = self.headers.get("Range", "")
        condition = self.headers.get("If-Range")
        if not served.ranges or not wanted or (condition and condition not in (served.etag, served.modified)):
            return 0, 200
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        start, served.off = start - served.off, 0
        return (start, 206) if start < len(served.content) else (0, 416)


@contextlib.contextmanager
def serving(served: Served) -> Iterator[Served]:
    handler = type("Handler", (_Handler,), {"served": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}/tiny.tar.gz"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
