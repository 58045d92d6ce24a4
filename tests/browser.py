# SPDX-License-Identifier: Apache-2.0
"""Chromium, driven over its DevTools protocol through a pair of pipes: no port, no network, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
PATIENCE = 60.0  # seconds that an answer may take on a busy machine


class Browser:
    """One page in a headless Chromium, for as long as the `with` block lasts."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM, "no Chromium was found"
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
        script = 'exec "$@" 3<&"$IN" 4>&"$OUT"'  # the protocol's pipes are the descriptors 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            env={**os.environ, "IN": str(to_browser), "OUT": str(from_browser)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer.get("result", {}))
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        """The next message of the browser."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._read, 1 << 16) if ready else b""
            assert piece, "the browser ended or does not answer"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def open(self, page: Path, *, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
        """Open a page with everything unfolded.

        Args:
            page: A file.
            width: Of the window, in pixels.
            scheme: `light` or `dark`, as the reader prefers.
            media: `screen` or `print`.
        """
        self.shape(width=width, scheme=scheme, media=media)
        self.events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.run("document.querySelectorAll('details').forEach(one => one.open = true)")

    def shape(self, *, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Change the window, the colours and the medium of the open page.

        Args:
            width: In pixels.
            scheme: `light` or `dark`.
            media: `screen` or `print`.
        """
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[feature])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key.

        Args:
            key: Its name, such as `Tab`.
            code: Its Windows key code, which the protocol asks for.
        """
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def names(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told of."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        told = [node for node in nodes if not node.get("ignored")]
        return [(str(n.get("role", {}).get("value")), str(n.get("name", {}).get("value", ""))) for n in told]

    def picture(self, file: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def printed(self) -> bytes:
        """The page as a PDF, in the size that its style sheet names."""
        self.ask("Emulation.setEmulatedMedia", media="print")
        return base64.b64decode(self.ask("Page.printToPDF", preferCSSPageSize=True)["data"])
