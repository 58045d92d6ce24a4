# SPDX-License-Identifier: Apache-2.0
"""Writing parameter files in the background, with a bound on the bytes that wait."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from fedquit.core import Params
from fedquit.running.params_file import save_params

THREADS = max(1, min(4, (os.cpu_count() or 2) // 2))  # hashing, copying and flushing a file keep one core busy


def on_host(params: Params) -> Params:
    """The tensors in the host's memory, and of a GPU's tensors copies that are complete when this returns.

    The copies are pinned: a GPU writes pinned memory at the speed of its bus, and pageable memory ten times slower.
    """
    copies: Params = {}
    stream: torch.cuda.Stream | None = None
    for name, tensor in params.items():
        if tensor.device.type == "cuda":
            stream = stream or torch.cuda.current_stream(tensor.device)
            copies[name] = _pinned_like(tensor).copy_(tensor, non_blocking=True)
        else:
            copies[name] = tensor.cpu()
    if stream is not None:
        stream.synchronize()
    return copies


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no more memory can be pinned
        return torch.empty(tensor.shape, dtype=tensor.dtype)


class BackgroundWriter:
    """Writes files in threads of its own; whoever hands over more than the bound waits for the disk.

    The threads read host memory only. A CUDA graph that the main thread is capturing would be spoiled by a CUDA call
    of any other thread, so tensors must be `on_host` before they come here.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound  # bytes
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def submit(self, path: Path, params: Params, size: int) -> Future[None]:
        """Have a file written.

        Args:
            path: the file.
            params: tensors in the host's memory, which nobody changes.
            size: their bytes.

        Returns:
            What tells when the file is on the disk, and raises what went wrong.
        """
        self._wait_until(self._bound - size)
        self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="fedquit-writer")
        future = self._pool.submit(_write, path, [params])
        self._waiting.append((future, size))
        return future

    def finish(self) -> None:
        """Wait until nothing waits; errors stay with their futures."""
        self._wait_until(0)

    def stop(self) -> None:
        """Begin nothing more, and wait for what is being written."""
        for future, _ in self._waiting:
            future.cancel()
        self.finish()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _wait_until(self, bound: int) -> None:
        """Wait until at most so many bytes are unwritten, or none."""
        self._waiting = deque((future, size) for future, size in self._waiting if not future.done())
        while self._waiting and sum(size for _, size in self._waiting) > bound:
            wait([future for future, _ in self._waiting], return_when=FIRST_COMPLETED)
            self._waiting = deque((future, size) for future, size in self._waiting if not future.done())


def _write(path: Path, handed_over: list[Params]) -> None:
    """Write a file. The list is emptied, so that no thread holds the tensors once its future is done."""
    save_params(path, handed_over.pop())
