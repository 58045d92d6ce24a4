# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperNode with a client certificate: `python -m fedquit.flower.closed.supernode SITE <its own arguments>`.

`flower-supernode` of Flower 1.41 has no option for a client certificate, so its HTTP client gets a TLS context that has
one. The certificate is read again when its file changes: renewal needs no restart.
"""

from __future__ import annotations

import contextlib
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

from fedquit.errors import FedquitError
from fedquit.flower.closed.apps import read_trust_file
from fedquit.flower.closed.site_folder import SiteFolder

WATCH = 1.0  # seconds between two looks at the certificate's file


def watch_certificate(site: SiteFolder, context: ssl.SSLContext, stop: threading.Event) -> None:
    """Load the site's certificate into a context again whenever its file has changed."""
    seen = _version(site.tls)
    while not stop.wait(WATCH):
        version = _version(site.tls)
        if version != seen:
            with contextlib.suppress(OSError):  # a file that cannot be read is read again
                context.load_cert_chain(site.tls)
                seen = version


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def show_certificate(site: SiteFolder) -> None:
    """Let the SuperNode of this process show the site's certificate, and trust the project's authority alone."""
    import flwr.supernode.fleet_http_connection as connection
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class Client(FleetHttpClient):
        """Flower's client over mutual TLS."""

        @classmethod
        def from_server_address(
            cls,
            server_address: str,
            insecure: bool,
            root_certificates: bytes | str | None,
            interceptors: Any,  # noqa: ANN401 - a type of Flower's
            **more: Any,  # noqa: ANN401 - Flower's own
        ) -> Client:
            if insecure:
                raise FedquitError("a site of a closed federation connects with TLS only: remove --insecure.")
            context = site.context()
            threading.Thread(target=watch_certificate, args=(site, context, threading.Event()), daemon=True).start()
            return cls(f"https://{server_address}", interceptors=interceptors, verify=context, **more)

    if vars(connection).get("FleetHttpClient") is not FleetHttpClient:
        raise FedquitError("this Flower has another client than the one that fedquit knows: install Flower 1.41.")
    vars(connection)["FleetHttpClient"] = Client


def main() -> None:
    """Run a SuperNode; the first argument is the site's folder."""
    site = SiteFolder(Path(sys.argv.pop(1)))
    read_trust_file(site.trust)  # with an empty one Flower would run every app
    if "--trusted-entities" not in sys.argv or "--isolation" not in sys.argv:
        raise FedquitError("a site of a closed federation runs signed apps only, in a process of their own.")
    show_certificate(site)
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
