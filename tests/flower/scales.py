# SPDX-License-Identifier: Apache-2.0
"""A way to the SuperLink that counts the bytes that pass, as a network would carry them: TLS and all."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer


class Scales(ThreadingTCPServer):
    """Connections to it go on to another address; `up` and `down` are the bytes towards it and back."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.up = self.down = 0
        self.behind = ("", 0)
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def way_to(self, address: str) -> str:
        """Where to connect instead."""
        host, _, port = address.rpartition(":")
        self.behind = (host, int(port))
        return f"127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """Let nobody in any more."""
        self.shutdown()
        self.server_close()


class _Connection(BaseRequestHandler):
    server: Scales

    def handle(self) -> None:
        with socket.create_connection(self.server.behind) as far:
            back = threading.Thread(target=self._carry, args=(far, self.request, "down"), daemon=True)
            back.start()
            self._carry(self.request, far, "up")
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with suppress(OSError):  # either end may hang up at any time
            while data := source.recv(1 << 16):
                with self.server.lock:
                    setattr(self.server, direction, getattr(self.server, direction) + len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
