# SPDX-License-Identifier: Apache-2.0
"""A closed federation for tests: a project, sites, and whoever knocks at its front."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedquit.flower.closed.project import Project, Settings
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.environment import LOOPBACK, free_ports

CUT = (OSError, http.client.HTTPException)  # what a client sees whose connection is refused: ssl.SSLError is an OSError


# The front of another user, who need not be able to read this Python.
AS_USER = """
import os, sys
import fedquit.flower.closed.front as front
from fedquit.flower.closed.greeting import Greeting
Greeting.own()
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[3]))
front.main(*sys.argv[1:3])
"""


def new_project(folder: Path, seconds: float = 86_400.0) -> Project:
    """A project on free ports of loopback, whose certificates are valid for so many seconds."""
    port, superlink_port = free_ports(2)
    return Project.init(folder, Settings(LOOPBACK, port, LOOPBACK, superlink_port, seconds / 86_400.0))


def enrolled(project: Project, folder: Path, name: str, examples: int = 1000) -> SiteFolder:
    """A site of the project."""
    site = SiteFolder(folder)
    site.join()
    site.install(project.enrol(name, site.request.read_bytes(), examples))
    return site


def without_certificate(project: Project) -> ssl.SSLContext:
    """A stranger who has the authority's certificate, which is no secret."""
    return ssl.create_default_context(cafile=str(project.folder / "ca.crt"))


def with_certificate(project: Project, pem: Path) -> ssl.SSLContext:
    """Somebody who trusts the project's authority and shows the certificate of that file."""
    context = without_certificate(project)
    context.load_cert_chain(pem)
    return context


def connect(project: Project, context: ssl.SSLContext, timeout: float = 20.0) -> http.client.HTTPSConnection:
    """A connection to the front, which is made with the first request."""
    settings = project.settings
    return http.client.HTTPSConnection(settings.host, settings.port, timeout=timeout, context=context)


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """The status and the body of the answer to a request."""
    given = {"content-type": "application/protobuf", "accept": "application/protobuf", **(headers or {})}
    connection.request("POST", path, body, given)
    response = connection.getresponse()
    return response.status, response.read()


@contextlib.contextmanager
def running(
    project: Project, log: Path, user: int | None = None, *, files: int | None = None, size: int | None = None
) -> Iterator[None]:
    """The project's front in a process of its own, as `fedquit flower serve` starts it; no SuperLink is behind it.

    Args:
        project: whose front it is.
        log: of the front.
        user: who runs it; the present user if None.
        files: how many it may have open at once; as many as usual if None.
        size: of the largest file that it can write, in bytes, as on a disk that is full; any if None.
    """
    settings = project.settings
    command = [sys.executable, "-m", "fedquit.flower.closed.front", str(project.folder), str(log)]

    def limit() -> None:
        for kind, most in ((resource.RLIMIT_NOFILE, files), (resource.RLIMIT_FSIZE, size)):
            if most is not None:
                resource.setrlimit(kind, (most, most))

    options: dict[str, Any] = {"preexec_fn": limit, "stderr": subprocess.DEVNULL} if files or size else {}
    if user is not None:
        command = [sys.executable, "-c", AS_USER, *command[-2:], str(user)]
    with subprocess.Popen(command, **options) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                with contextlib.suppress(OSError), socket.create_connection((settings.host, settings.port), 5):
                    break
                time.sleep(0.05)
            yield
            assert process.poll() is None, "it has gone on until now"
        finally:
            process.terminate()
