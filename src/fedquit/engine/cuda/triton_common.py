# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share: tile sizes, launches, compilation ahead of time, and the sum of split reductions."""

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

_COMPILE_ONLY: ContextVar[bool] = ContextVar("compile_only", default=False)  # compile what is launched, do not run it
SUM_BLOCK = 1024  # numbers of a split reduction that one program adds up
MAX_COMPILERS = 32  # threads: each takes some memory, and there are fewer than a hundred kernels


@dataclass(frozen=True)
class Tile:
    """How a program computes its part of a matrix product (M x K) (K x N).

    Attributes:
        m: Rows of the output tile.
        n: Columns of the output tile.
        k: Depth of one step of the sum.
        warps: Groups of 32 threads that work on the tile.
        stages: Steps whose operands are in shared memory or on the way there.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


def power_of_two_divisor(number: int, most: int) -> int:
    """Return the largest power of two that divides the number, at most `most`."""
    return min(number & -number, most)


def empty_output(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate what a kernel writes; zeros where kernels are only compiled, so that nobody reads garbage."""
    return (torch.zeros if _COMPILE_ONLY.get() else torch.empty)(shape, dtype=dtype, device=device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:  # noqa: ANN401 - Triton's own
    """Launch a kernel, or only compile it inside `compile_ahead`.

    Args:
        kernel: A function under `triton.jit`.
        grid: The number of programs along each axis.
        args: The kernel's arguments.
        options: Its compile-time constants, `num_warps` and `num_stages`.
    """
    if _COMPILE_ONLY.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels that are launched inside, on all cores at once, without running them."""
    token = _COMPILE_ONLY.set(True)
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # a thread of autograd's would not see the variable
            ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as compilers,
            triton.AsyncCompileMode(compilers, ignore_errors=True),  # an error is raised where the kernel is run
        ):
            yield
    finally:
        _COMPILE_ONLY.reset(token)


@triton.jit
def store_tile(tile, out_ptr, addend_ptr, offsets, mask, ADD: tl.constexpr) -> None:
    """Store out = tile + addend, in the output's type; the tile and the sum are in float32."""
    if ADD:
        tile += tl.load(addend_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _sum_partials_kernel(partials_ptr, out_ptr, out_client_stride, count, splits, BLOCK: tl.constexpr):
    """out[k, i] = sum over s of partials[k, s, i], in float32 and always in the order of s.

    Shapes: partials (K, splits, count), out (K, count). Tiling: a program adds up BLOCK numbers of one client.
    Limit: HBM, each partial is read once.
    """
    client = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = index < count
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partials_ptr + (client * splits + split) * count + index, mask=mask, other=0.0)
    tl.store(out_ptr + client * out_client_stride + index, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_partials(partials: Tensor, out: Tensor) -> None:
    """Add up the partial sums of a split reduction, always in the same order: results repeat bit for bit.

    Args:
        partials: (K, splits, ...), float32.
        out: (K, ...), dense for each client; written to.
    """
    clients, splits = partials.shape[:2]
    count = partials[0, 0].numel()
    grid = (triton.cdiv(count, SUM_BLOCK), clients)
    launch(_sum_partials_kernel, grid, partials, out, out.stride(0), count, splits, BLOCK=SUM_BLOCK, num_warps=4)
