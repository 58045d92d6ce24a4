# SPDX-License-Identifier: Apache-2.0
"""Batches as people have them, and how a model reads one.

A batch is a pair (inputs, labels), where the inputs are a tensor, a list for `model(*inputs)` or a mapping for
`model(**inputs)`; or one mapping that holds the labels under a key of their own, as Hugging Face has it. A hook
`forward(model, batch)` reads anything else.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedquit.errors import FedquitError, InputError

Data = Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | Mapping[str, Any] | Sequence[Any]
Forward = Callable[[nn.Module, Any], object]
Labels = str | Callable[[Any], Tensor]
Collate = Callable[[list[Any]], Any]

IGNORE = -100  # the label that PyTorch's and Hugging Face's losses leave out
LABEL_KEYS = ("labels", "label")
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how Hugging Face names models whose logits are of the next token
EMPTY = "the data is empty: give at least one sample."
WRAP = (
    "wrap the data so that it gives pairs (inputs, labels), or mappings with integer `labels`; "
    "`forward` and `labels` read any other batch"
)
FORMS = "give a pair of tensors (inputs, labels), a mapping of tensors, a Dataset or a DataLoader"
SHOWN = 4  # parts of a batch that an error names
UNCOLLATED = (  # what torch says where samples do not make a batch
    "default_collate: ",
    "stack expects each tensor to be equal size",
    "each element in list of batch should be of equal size",
)
OF_INPUTS = (RuntimeError, TypeError, IndexError, ValueError, AssertionError)  # of inputs with another shape or type
OF_HOOKS = (*OF_INPUTS, AttributeError, KeyError)  # of a hook that looks for what a batch or an output does not have


class Batches:
    """All batches of all epochs.

    Args:
        data: a map-style dataset, a pair (inputs, labels) or a mapping of tensors with the same first dimension, or a
            DataLoader, whose own batches are taken.
        epochs: passes over it.
        batch_size: samples in a batch; a DataLoader has its own.
        generator: shuffles each epoch; None keeps the order.
        collate: makes one batch of a list of samples; torch's `default_collate` if it is not given.

    Raises:
        InputError: for data that is empty or is none of these.
    """

    def __init__(
        self,
        data: Data,
        epochs: int,
        batch_size: int,
        generator: torch.Generator | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.data = as_pair(data)
        self.epochs = epochs
        self.collate = collate or collated
        self.orders = list[Tensor]()  # the positions of each batch
        if isinstance(self.data, DataLoader):
            return
        if isinstance(self.data, IterableDataset):
            raise InputError("an IterableDataset has no length to shuffle over: pass it inside a DataLoader.")
        size = _size(self.data)
        if size == 0:
            raise InputError(EMPTY)
        # All orders are drawn before anything else, so that the batches depend on the seed alone.
        orders = [torch.randperm(size, generator=generator) if generator else torch.arange(size) for _ in range(epochs)]
        self.orders = [order[start : start + batch_size] for order in orders for start in range(0, size, batch_size)]

    def __len__(self) -> int:
        return self.epochs * len(self.data) if isinstance(self.data, DataLoader) else len(self.orders)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.data, DataLoader):
            for _ in range(self.epochs):
                empty = True
                for batch in self._loaded(self.data):
                    empty = False
                    yield batch
                if empty:
                    raise InputError(EMPTY)
        elif isinstance(self.data, tuple | Mapping):
            for order in self.orders:
                yield mapped(self.data, partial(_rows, order))
        else:
            samples: Any = self.data
            for order in self.orders:
                chosen = [samples[i] for i in order.tolist()]
                try:
                    batch = self.collate(chosen)
                except OF_INPUTS as error:
                    raise _uncollated(error) from error
                yield batch

    def _loaded(self, loader: DataLoader[Any]) -> Iterator[Any]:
        try:
            yield from loader
        except (RuntimeError, TypeError) as error:
            if any(words in str(error) for words in UNCOLLATED):
                raise _uncollated(error) from error
            raise


class Reader:
    """Gives batches to a model, and returns its logits with the classes in the last dimension, and their labels.

    Args:
        model: tells which keys of a mapping it takes, and whether it predicts the next token.
        forward: (model, batch) -> logits; by default `model(inputs)`, `model(*inputs)` or `model(**inputs)`.
        labels: the key of the labels in a mapping, or (batch) -> labels; by default `labels` or `label`, or the second
            of a pair.
        shift: whether the logits at a position are of the next label, as in causal language models; `auto` asks the
            names of Hugging Face's classes.
        class_dim: where the logits have their classes: -1, or 1 for the (B, C, H, W) of segmentation.
        ignore_index: a label that is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        forward: Forward | None = None,
        labels: Labels | None = None,
        shift: bool | Literal["auto"] = "auto",
        class_dim: int = -1,
        ignore_index: int = IGNORE,
    ) -> None:
        base = unwrapped(model)
        if forward is not None and not callable(forward):
            raise InputError(f"`forward` is {describe(forward)}: give a function (model, batch) -> logits.")
        if labels is not None and not isinstance(labels, str) and not callable(labels):
            raise InputError(f"`labels` is {describe(labels)}: give the key of the labels, or (batch) -> labels.")
        self.forward = forward
        self.labels = labels
        self.shift = any(name in kind.__name__ for kind in type(base).__mro__ for name in CAUSAL)
        if shift != "auto":
            self.shift = shift
        self.class_dim = class_dim
        self.ignore_index = ignore_index
        self.prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        parameters = inspect.signature(base.forward).parameters
        self.keys = None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(parameters)

    def split(self, batch: Any) -> tuple[Any, Tensor]:  # noqa: ANN401 - whatever a DataLoader gives
        """What `logits` takes, and the labels that its logits have.

        Raises:
            InputError: for a batch without labels, or one that is empty.
        """
        inputs, labels = self._parts(batch)
        if not isinstance(labels, Tensor):
            raise InputError(f"the labels of a batch are {describe(labels)}: give a tensor of class numbers.")
        if labels.numel() == 0:
            raise InputError(EMPTY)
        if not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool:
            labels = labels.long()  # losses and scores take few of the integer types
        if self.shift:
            if labels.ndim < 2 or labels.shape[1] < 2:
                raise InputError(
                    f"labels of shape {tuple(labels.shape)} have no next position to predict: give sequences (B, T), "
                    "or shift=False."
                )
            labels = labels[:, 1:]
        return (batch if self.forward else inputs), labels

    def logits(self, model: nn.Module, inputs: Any) -> Tensor:  # noqa: ANN401 - the first part of `split`
        """The logits (…, C) of a batch.

        Raises:
            InputError: for inputs that the model cannot take, or an output that holds no logits.
        """
        lists = [name for name, part in inputs.items() if isinstance(part, list)] if isinstance(inputs, Mapping) else []
        of_batches = OF_HOOKS if self.forward or lists else OF_INPUTS
        try:
            output = self._output(model, inputs)
        except (FedquitError, torch.OutOfMemoryError):
            raise
        except of_batches as error:
            what, advice = "the model", "give inputs of the shape and type that it was trained on, or `forward`"
            if self.forward:
                what, advice = "`forward`", "repair it for such batches"
            elif lists:
                advice = (
                    f"let the data give a tensor under {lists[0]!r}, as with set_format('torch'), or give `collate`"
                )
            raise InputError(f"{what} fails on a batch of {_shown(inputs)}: {first_line(error)}; {advice}.") from error
        logits = logits_of(output)
        if self.class_dim not in (-1, logits.ndim - 1):
            if not -logits.ndim <= self.class_dim < logits.ndim:
                raise InputError(
                    f"logits of shape {tuple(logits.shape)} have no dimension {self.class_dim}: "
                    "let class_dim be that of their classes, or leave it out."
                )
            logits = logits.movedim(self.class_dim, -1)
        return logits[:, :-1] if self.shift else logits

    def _output(self, model: nn.Module, inputs: Any) -> object:  # noqa: ANN401 - the first part of `split`
        if self.forward:
            return self.forward(model, inputs)
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

    def kept(self, labels: Tensor) -> Tensor | None:
        """A mask of the labels that count; None where all do."""
        mask = labels != self.ignore_index
        return None if bool(mask.all()) else mask

    def _parts(self, batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
        if callable(self.labels):
            try:
                labels = self.labels(batch)
            except (LookupError, TypeError, AttributeError) as error:
                raise InputError(
                    f"`labels` fails on a batch that is {describe(batch)}: {first_line(error)}; "
                    "repair it for such batches."
                ) from error
            return batch if not isinstance(batch, Mapping) else self._accepted(batch, None), labels
        if isinstance(batch, Mapping):
            key = self.labels or next((key for key in LABEL_KEYS if key in batch), None)
            if key is None or key not in batch:
                raise InputError(
                    f"a batch is {describe(batch)} without {key or 'labels'!r}: "
                    "name the key of its labels, for example labels='y'."
                )
            return self._accepted(batch, key), batch[key]
        if isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, labels = batch
            if isinstance(inputs, Tensor | tuple | list | Mapping) and isinstance(labels, Tensor):
                return inputs, labels
        raise InputError(f"a batch is {describe(batch)}: {WRAP}.")

    def _accepted(self, batch: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        """The entries that the model takes; for an encoder with a decoder also what the decoder reads."""
        inputs = {name: part for name, part in batch.items() if name != key and name not in LABEL_KEYS}
        if self.keys is not None:
            inputs = {name: part for name, part in inputs.items() if name in self.keys}
        if self.prepare and key and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self.prepare(labels=batch[key])
        if not inputs and not self.forward:
            raise InputError(f"a batch is {describe(batch)}, and the model takes none of these: give `forward`.")
        return inputs


def collated(samples: list[Any]) -> Any:  # noqa: ANN401 - a batch
    """Collate as torch does, but for lists of numbers in mappings, which torch would turn around: they become tensors.

    Data sets of Hugging Face give lists, unless `set_format("torch")` was called.
    """
    return default_collate([_with_tensors(sample) if isinstance(sample, Mapping) else sample for sample in samples])


def _with_tensors(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample whose lists of numbers are tensors."""
    return {name: torch.tensor(part) if _numbers(part) else part for name, part in sample.items()}


def _numbers(part: object) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(entry, int | float) for entry in part)


def as_pair(data: Any) -> Any:  # noqa: ANN401 - whatever somebody gives
    """Return a list [x, y] of two tensors as the tuple (x, y), and all else as it is."""
    pair = isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return tuple(data) if pair else data


def mapped(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - a batch
    """A batch with every tensor in it changed."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, Mapping):
        return {name: mapped(part, change) for name, part in thing.items()}
    if isinstance(thing, tuple | list):
        parts = [mapped(part, change) for part in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)  # a NamedTuple takes its fields
    return thing


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and PEFT's adapters, whose `forward` says what it takes."""
    inner: Any = getattr(model, "_orig_mod", model)
    base: nn.Module = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return base


def describe(thing: object) -> str:
    """Return the types in a batch or an output as a phrase for an error."""
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {_some([type(part).__name__ for part in thing])}"
    if isinstance(thing, Mapping):
        return f"a {type(thing).__name__} of {_some([str(key) for key in thing])}"
    return f"a {type(thing).__name__}"


def _some(words: Sequence[str]) -> str:
    more = [f"{len(words) - SHOWN} more"] if len(words) > SHOWN else []
    return ", ".join([*words[:SHOWN], *more]) or "nothing"


def _shown(inputs: object) -> str:
    """Inputs by their shapes and types, as a phrase for an error."""
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape)}"
    if isinstance(inputs, Mapping):
        return _some([f"{name}: {_shown(part)}" for name, part in inputs.items()])
    if isinstance(inputs, tuple | list):
        return _some([_shown(part) for part in inputs])
    return describe(inputs)


def first_line(error: BaseException) -> str:
    """What an error says, in one line that another sentence can take in; of a loader's worker, its own last line."""
    said = f"no entry {error}" if isinstance(error, KeyError) else str(error)  # which says its key alone
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if "Traceback" in str(error) else lines[0]).rstrip(".:;")


def _uncollated(error: Exception) -> InputError:
    return InputError(
        f"samples do not make a batch: {first_line(error)}; let the data set give tensors of one shape, or give "
        "`collate`, or a DataLoader with a collate_fn."
    )


def logits_of(output: object) -> Tensor:
    """Return the logits in what a model returned: the tensor itself, or its attribute or entry `logits`."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"the model returns {describe(output)}: it must return logits, or an object with them as `.logits`; "
        "`forward` can choose one of several outputs."
    )


def are_probabilities(logits: Tensor) -> bool:
    """Whether rows (…, C) lie in [0, 1] and sum to 1."""
    rows = logits.float()
    rounding = 1e-3 if logits.dtype.itemsize > 2 else 1e-2
    return bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < rounding).all())


def refuse_probabilities(logits: Tensor, forward: Forward | None = None) -> None:
    """Raise an InputError where a model returns probabilities: rows that lie in [0, 1] and sum to 1.

    Args:
        logits: what is taken for logits, (…, C).
        forward: the hook that chose them; with one there is a warning alone, since logits can look the same.
    """
    if not are_probabilities(logits):
        return
    if forward is not None:
        warnings.warn(
            "`forward` returns rows that sum to 1, and they are taken for logits: if they are probabilities, "
            "let it return their logarithm.",
            stacklevel=2,
        )
        return
    raise InputError(
        "the model returns probabilities, rows that sum to 1, where logits are needed: leave its last softmax out, "
        "or give forward=lambda model, batch: model(batch[0]).log(); if they are logits that sum to 1, give "
        "forward=lambda model, batch: model(batch[0])."
    )


def _rows(order: Tensor, tensor: Tensor) -> Tensor:
    return tensor[order.to(tensor.device)]


def _leaves(data: Any) -> Iterator[Any]:  # noqa: ANN401 - a batch
    if isinstance(data, tuple | list | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _leaves(part)
    else:
        yield data


def _size(data: Any) -> int:  # noqa: ANN401 - as `Batches` takes it
    """How many samples there are."""
    if isinstance(data, tuple | Mapping):
        if any(isinstance(leaf, np.ndarray) for leaf in _leaves(data)):
            raise InputError(f"data is {describe(data)}: make tensors of arrays, with torch.as_tensor.")
        if isinstance(data, tuple) and not (len(data) == 2 and isinstance(data[1], Tensor)):
            raise InputError(f"data is {describe(data)}: {FORMS}.")
        tensors = [leaf for leaf in _leaves(data) if isinstance(leaf, Tensor)]
        if not tensors:
            raise InputError(EMPTY if not data else f"data is {describe(data)} without any tensor: {FORMS}.")
        sizes = {tuple(tensor.shape[:1]) for tensor in tensors}
        if len(sizes) != 1 or () in sizes:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputError(
                f"the tensors have the shapes {shapes}: their first dimensions must be equal, one label a sample."
            )
        return len(tensors[0])
    other = isinstance(data, Tensor | np.ndarray | str | bytes)
    if other or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InputError(f"data is {describe(data)}: {FORMS}.")
    return len(data)
