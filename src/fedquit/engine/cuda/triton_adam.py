# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW on the rows of all clients, in one Triton kernel.

Operation: m <- b1 * m + (1 - b1) * g, v <- b2 * v + (1 - b2) * g^2, w <- d * w - lr * (m / c1) / (sqrt(v / c2) + eps),
and the bfloat16 copy of w. Adam adds weight_decay * w to g and has d = 1; AdamW has d = 1 - lr * weight_decay.
Shapes: w, m, v (K, N) in float32, the copy of w and g (K, N), taken as K * N numbers.
Tiling: a program updates 1024 numbers with 4 warps.
Limit: HBM. A number moves 28 bytes: 12 + 2 read (w, m, v, g), 12 + 2 written (w, m, v, the copy).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fedquit.engine.cuda.triton_common import launch

BLOCK = 1024  # numbers


@dataclass(frozen=True)
class AdamRates:
    """What changes from step to step, in memory, each (): a CUDA graph reads it there.

    Attributes:
        lr: The learning rate.
        decay: What the parameters are multiplied with.
        c1: The bias correction of the first moment, 1 - b1^t.
        c2: That of the second.
    """

    lr: Tensor
    decay: Tensor
    c1: Tensor
    c2: Tensor


@triton.jit
def _adam_kernel(
    rows_ptr,
    low_ptr,
    m_ptr,
    v_ptr,
    g_ptr,
    lr_ptr,
    decay_ptr,
    c1_ptr,
    c2_ptr,
    count,
    L2: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take BLOCK numbers one step on."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = index < count
    p = tl.load(rows_ptr + index, mask=mask)
    g = tl.load(g_ptr + index, mask=mask).to(tl.float32) + L2 * p
    m = BETA1 * tl.load(m_ptr + index, mask=mask) + (1 - BETA1) * g
    v = BETA2 * tl.load(v_ptr + index, mask=mask) + (1 - BETA2) * g * g
    lr = tl.load(lr_ptr).to(tl.float32)
    c1 = tl.load(c1_ptr).to(tl.float32)
    c2 = tl.load(c2_ptr).to(tl.float32)
    p = tl.load(decay_ptr).to(tl.float32) * p - lr * (m / c1) / (tl.sqrt(v / c2) + EPS)
    tl.store(rows_ptr + index, p, mask=mask)
    tl.store(low_ptr + index, p.to(low_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + index, m, mask=mask)
    tl.store(v_ptr + index, v, mask=mask)


def adam_(
    rows: Tensor,
    low: Tensor,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    rates: AdamRates,
    *,
    l2: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Take a step of Adam in place.

    Args:
        rows: The parameters, (K, N), float32.
        low: Their copy in lower precision, (K, N).
        moments: The first and the second, (K, N), float32.
        gradient: (K, N).
        rates: What changes from step to step.
        l2: The weight decay that is added to the gradient; 0 where it is decoupled.
        betas: b1 and b2.
        eps: Added to the root of the second moment.
    """
    count = rows.numel()
    grid = (triton.cdiv(count, BLOCK),)
    tensors = rows, low, *moments, gradient, rates.lr, rates.decay, rates.c1, rates.c2
    constants = {"L2": l2, "BETA1": betas[0], "BETA2": betas[1], "EPS": eps, "BLOCK": BLOCK}
    launch(_adam_kernel, grid, *tensors, count, **constants, num_warps=4)
