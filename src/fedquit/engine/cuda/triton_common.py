# SPDX-License-Identifier: Apache-2.0
"""What our Triton kernels share: how they are launched, how all are compiled first, and how parts of a sum meet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)  # whether what is launched is compiled instead
SUMMED_AT_ONCE = 1024  # numbers
MOST_CORES = 32  # that compile: each takes some memory, and there are fewer than a hundred kernels


@dataclass(frozen=True)
class Tiles:
    """How a product is cut up: rows, columns and depth of a tile, and how many threads and stages work on one."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


def power(number: int, most: int) -> int:
    """The largest power of two that divides the number, but no more than that."""
    return min(number & -number, most)


def new(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a kernel writes; zeros where it is compiled only, for those who read that."""
    return (torch.zeros if _AHEAD.get() else torch.empty)(shape, dtype=dtype, device=device)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:  # noqa: ANN401 - Triton's own
    """Run a kernel, or compile it where all that is to come is compiled first."""
    if _AHEAD.get():
        kernel.warmup(*given, grid=grid, **named)
    else:
        kernel[grid](*given, **named)


@contextlib.contextmanager
def compiled_ahead() -> Iterator[None]:
    """What is launched inside is compiled, on all cores at once, and does not run; its results are zeros."""
    token = _AHEAD.set(True)
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # another thread would not know of this
            ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_CORES)) as cores,
            triton.AsyncCompileMode(cores, ignore_errors=True),  # whoever runs the kernel hears of them
        ):
            yield
    finally:
        _AHEAD.reset(token)


@triton.jit
def stored(found, out_at, plus_at, here, inside, PLUS: tl.constexpr) -> None:
    """Write a tile of what was found, plus what lies there in another tensor."""
    if PLUS:
        found += tl.load(plus_at + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + here, found.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["many"])
def _summed(parts_at, out_at, out_client, count, many, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(many):
        total += tl.load(parts_at + (client * many + part) * count + place, mask=inside, other=0.0)
    tl.store(out_at + client * out_client + place, total.to(out_at.dtype.element_ty), mask=inside)


def summed(parts: Tensor, out: Tensor) -> None:
    """Parts (K, parts, …) of a sum, always added up in the same order, into (K, …) that is dense for each client."""
    clients, many = parts.shape[:2]
    count = parts[0, 0].numel()
    grid = (triton.cdiv(count, SUMMED_AT_ONCE), clients)
    launch(_summed, grid, parts, out, out.stride(0), count, many, BLOCK=SUMMED_AT_ONCE, num_warps=4)
