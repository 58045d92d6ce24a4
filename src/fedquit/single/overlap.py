# SPDX-License-Identifier: Apache-2.0
"""Sets that share samples by mistake: a hold-out that was trained on, or retained data that is to be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedquit.distill.batches import Data
from fedquit.errors import InputError


def refuse_trained_holdout(holdout: Data | None, **trained: Data | None) -> None:
    """Raise an InputError where a hold-out visibly has samples of data that was trained on.

    Args:
        holdout: the hold-out.
        trained: the other sets, by name.
    """
    for name, data in trained.items():
        if share_samples(holdout, data):
            raise InputError(f"the hold-out has samples of the {name} data: give data that was never trained on.")


def refuse_retained(forget: Data, retain: Data | None) -> None:
    """Raise an InputError where the data that stays visibly has samples that are to be forgotten."""
    if share_samples(forget, retain):
        raise InputError("the retain data has samples of the forget data, which recovery would teach: leave them out.")


def share_samples(one: object, other: object) -> bool:
    """Whether two sets visibly share samples.

    That is where they are one data set, subsets of one that have an index in common, or tensors that lie in the same
    memory. Copies are not seen.
    """
    one, other = _data_set(one), _data_set(other)
    if isinstance(one, Dataset) and isinstance(other, Dataset):
        base, indices = _indices(one)
        other_base, other_indices = _indices(other)
        if base is not other_base:
            return False
        return not (indices is not None and other_indices is not None and indices.isdisjoint(other_indices))
    pairs = list(zip(_tensors(one), _tensors(other), strict=False))
    return bool(pairs) and all(_same_memory(a, b) for a, b in pairs)


def _data_set(data: object) -> object:
    """The data set in a loader, and the tensors of a TensorDataset."""
    data = data.dataset if isinstance(data, DataLoader) else data
    return data.tensors if type(data) is TensorDataset else data


def _indices(data: Dataset[Any]) -> tuple[object, frozenset[int] | None]:
    """A data set that is no subset, and which of its samples are meant; None for all."""
    indices: list[int] | None = None
    while isinstance(data, Subset):
        chosen = [int(at) for at in data.indices]
        indices = chosen if indices is None else [chosen[at] for at in indices]
        data = data.dataset
    return data, None if indices is None else frozenset(indices)


def _tensors(data: Any) -> Iterator[Tensor]:  # noqa: ANN401 - whatever somebody gives
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, tuple | list | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors(part)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors without gaps have elements at the same place."""
    plain = all(tensor.numel() and tensor.is_contiguous() and not tensor.is_meta for tensor in (one, other))
    if not plain or one.device != other.device:
        return False
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (one, other)]
    return max(begin for begin, _ in ends) < min(end for _, end in ends)
