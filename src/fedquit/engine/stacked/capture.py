# SPDX-License-Identifier: Apache-2.0
"""Steps on a GPU: captured once as CUDA graphs, one for each number of clients, and replayed.

A CUDA graph repeats the same kernels on the same addresses. What changes from step to step (the step's number) and from
round to round (learning rate, plan, sent parameters) is therefore read from memory, and one capture serves all rounds.
Launching a step's kernels one by one would take the host longer than the GPU computes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedquit.engine.stacked.compiled import CompiledGradients, Compiler
from fedquit.engine.stacked.schedule import Job, active_clients
from fedquit.engine.stacked.work import Work

log = logging.getLogger(__name__)
COVERED = 0.5  # of a network's parameters: kernels that compute so much of it are faster than a compiler


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage: a graph that is freed during a capture, whoever held it, makes CUDA end the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def warn_once(sentence: str, told: set[str]) -> None:
    """Give a warning, unless it is among those that were given, and note it there."""
    if sentence not in told:
        told.add(sentence)
        log.warning("%s", sentence)


class DeviceClock:
    """A step that a CUDA graph reads from memory."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        """Allocate the counter and the learning rate.

        Args:
            device: The GPU.
            batch_size: Every step computes full batches, padded where a plan has less.
        """
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.lr = torch.zeros((), dtype=torch.float64, device=device)
        self.batch_size = batch_size

    @property
    def number(self) -> Tensor:
        """From 1, in float64: whole numbers would give powers in float32."""
        return (self.index[0] + 1).double()  # ()

    def set(self, lr: float) -> None:
        """Go to the beginning of a round at that learning rate."""
        self.index.zero_()
        self.lr.fill_(lr)

    def advance(self) -> None:
        """Go to the next step."""
        self.index += 1


class CapturedSteps:
    """Captures and replays the steps of some clients."""

    def __init__(
        self, work: Work, stream: torch.cuda.Stream, compiler: Compiler | None = None, told: set[str] | None = None
    ) -> None:
        """Begin without any graph.

        Args:
            work: The clients' state.
            stream: Where steps are captured.
            compiler: Compiles the steps of networks that the kernels do not cover; None compiles nothing.
            told: Warnings that were given and are not repeated.
        """
        self.work = work
        self.stream = stream
        self.compiled: CompiledGradients | None = None
        self.why = ""  # a step is not compiled; empty where it is
        self.why_eager = ""  # no step is captured; empty where they are
        self._compiler = compiler
        self._told = set() if told is None else told
        self.clock = DeviceClock(work.losses.device, work.task.local.batch_size)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the number of clients

    def run(self, jobs: Sequence[Job]) -> None:
        """Replay a round; the graphs that it needs were captured by `prepare`."""
        self.work.load(jobs)
        self.clock.set(self.work.task.local.lr)
        for width in active_clients(jobs):
            if self.why_eager:
                self._step(width)
            else:
                self.graphs[width].replay()

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Capture a step for each number of clients that the jobs need and that has no graph yet."""
        missing = set(active_clients(jobs)) - self.graphs.keys()
        if missing and not self.why_eager:
            self.capture(sorted(missing, reverse=True))

    def capture(self, widths: Sequence[int]) -> None:
        """Capture a step for each of these numbers of clients, once its kernels are compiled and it has run."""
        if not self.graphs:
            self._choose_way()
        if self.work.numerics.network_kernels:
            from fedquit.engine.cuda.triton_common import compile_ahead

            with compile_ahead():  # all kernels of all steps at once
                for width in widths:
                    self._warm_up(width)
        for width in widths:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._warm_up(width)
            torch.cuda.current_stream().wait_stream(self.stream)
            if not self._capture(width):
                break

    def _capture(self, width: int) -> bool:
        """Capture a step that has run; returns whether CUDA took it, and if not, no step is captured any more."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        try:
            with without_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                self._step(width)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
                raise
            self.why_eager = _in_words(error.__context__ or error)
            self.graphs.clear()
            self._warn(f"A step cannot be captured as a CUDA graph, and is run as torch runs it ({self.why_eager}).")
            return False
        self.graphs[width] = graph
        return True

    def _warn(self, sentence: str) -> None:
        warn_once(sentence, self._told)

    def _choose_way(self) -> None:
        """Compile the step where that is asked for and the kernels do not cover most of the network.

        A network that they cover is computed without anything that was written for the others.
        """
        work = self.work
        if work.numerics.kernels and work.numerics.general:
            from fedquit.engine.cuda.triton_common import compile_ahead

            with compile_ahead():
                self._warm_up(len(work.clients.rows))
            if work.gradient_buffer.claimed_part >= COVERED:
                self.why = "kernels cover the network"
                work.numerics = replace(work.numerics, general=False)
                return
        if self._compiler is None:
            self.why = "not asked for"
            return
        plain = work.numerics
        work.numerics = replace(plain, compiled=True)
        self.compiled = CompiledGradients(work.gradients, self._compiler)
        try:
            self._warm_up(len(work.clients.rows))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may fail on anything that a network does
            self.why = _in_words(error)
            self._warn(f"A step could not be compiled, and runs as torch runs it, slower ({self.why}).")
            work.numerics = plain
            self.compiled = None

    def _warm_up(self, width: int) -> None:
        self.clock.index.zero_()  # it may stand past the last step of a round, where there is nothing to read
        self._step(width)

    def _step(self, width: int) -> None:
        if self.compiled is None:
            self.work.step(width, self.clock, self.work.gradients)
        else:
            self.work.step(width, self.clock, self.compiled, computed=len(self.work.clients.rows))
        with torch.no_grad():
            self.clock.advance()


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
