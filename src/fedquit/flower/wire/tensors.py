# SPDX-License-Identifier: Apache-2.0
"""Model parameters on the wire: one Flower array for each tensor, in order and in its own precision.

Flower's arrays are the bytes that `numpy.save` writes. They are parsed here without pickle, and the header is compared
with the length of the data before any memory is allocated.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.flower.wire.errors import InvalidMessage, shortened

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def params_to_record(params: Params) -> ArrayRecord:
    """Parameters as Flower arrays, by name."""
    for name, tensor in params.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name!r} is {tensor.dtype}, which Flower cannot carry: use float32 or float64.")
    return ArrayRecord({name: Array(p.detach().cpu().contiguous().numpy()) for name, p in params.items()})


def params_from_record(record: ArrayRecord) -> Params:
    """Parameters from Flower arrays; raises `InvalidMessage` where one cannot be read."""
    return {str(name): _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> torch.Tensor:
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"it is stored as {array.stype!r}")
        return torch.from_numpy(_parsed(array.data))
    except Exception as error:  # numpy parses headers as Python literals, which can fail in many ways
        raise InvalidMessage(f"the tensor {name!r} cannot be read ({shortened(error)}).") from error


def _parsed(data: bytes) -> NDArray[Any]:
    """The array that `numpy.save` wrote."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("it is of another version")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or len(data) - stream.tell() != math.prod(shape) * dtype.itemsize:
        raise ValueError("its head does not describe it")
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if by_column else "C").copy()
