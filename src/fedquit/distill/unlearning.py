# SPDX-License-Identifier: Apache-2.0
"""FedQUIT at the client: make a model forget samples, with nothing but the model and those samples.

The student starts as a copy of the given model and distils a virtual teacher: the given model's own
logits with the true class pushed down (`fedquit.distill.virtual_teacher`). This is Algorithm 1 of
the paper.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedquit.distill.losses import LOSSES, distillation_loss
from fedquit.distill.virtual_teacher import check_labels, checked_options
from fedquit.errors import InputError, NonFiniteError
from fedquit.utils.names import lookup

Data = Dataset[Any] | DataLoader[Any] | tuple[Tensor, Tensor]


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer for convolutional networks."""
    return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-7)


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer for transformers, with the weight decay that Keras has by default."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-7, weight_decay=0.004)


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Plain steps without momentum: the optimizer that the paper's bound on the drift is about."""
    return torch.optim.SGD(parameters, lr=lr)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
}


def unlearn(
    model: nn.Module,
    data: Data,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int = 32,
    teacher: str = "min",
    loss: str = "kl",
    optimizer: str = "adam",
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = False,
    **teacher_options: float,
) -> nn.Module:
    """Return a copy of the model that has forgotten the data; the given model is left as it is.

    The teacher is the given model in evaluation mode. The student learns in training mode, as the
    authors have it: its dropout is active and its BatchNorm statistics move. It is returned in the
    modes the given model was in, and parameters that do not require a gradient stay as they are. No
    global random state is read or changed: the same seed gives the same student.

    Args:
        model: any module that maps a batch to logits `(B, C)` or `(B, T, C)`, or to an object with
            `.logits`.
        data: what to forget: a map-style dataset of pairs (x, y), a tuple (x, y) of tensors, or a
            DataLoader of such pairs, whose own batches are then taken. The last batch may be a
            small one; none is dropped.
        lr: the learning rate.
        epochs: passes over the data.
        batch_size: samples per step; a DataLoader has its own.
        teacher: a name from `fedquit.distill.virtual_teacher.TEACHERS`.
        loss: a name from `fedquit.distill.losses.LOSSES`.
        optimizer: `adam`, `adamw` or `sgd`.
        seed: fixes the order of the samples, dropout, and the labels of the teacher `random`.
        device: where to work and where the student is returned; by default where the model's
            parameters are.
        progress: show a bar with the time left.
        teacher_options: `v` of the teacher `fixed`, `tau` of `temperature`, `k` of `topk`.

    Returns:
        The student: a new module on `device`, whose gradients are empty.

    Raises:
        InputError: for data, labels, a model or numbers that cannot be used.
        UnknownNameError: for a teacher, loss, optimizer or teacher option that does not exist.
        NonFiniteError: if the given model returns, or the student arrives at, NaN or infinity.
    """
    settings = checked_options(teacher, teacher_options)
    lookup(LOSSES, loss, "loss")
    new_optimizer = lookup(OPTIMIZERS, optimizer, "optimizer")
    if not is_rate(lr):
        raise InputError(f"lr is {lr} and has to be a finite number above 0, such as 1e-4.")
    check_count("epochs", epochs)
    check_count("batch_size", batch_size)
    place = torch.device(device) if device is not None else next((p.device for p in model.parameters()), CPU)

    generator = torch.Generator().manual_seed(seed)
    batches = Batches(as_pair(data), epochs, batch_size, generator)
    original = copy.deepcopy(model).to(place).eval()
    student = copy.deepcopy(model).to(place).train()
    student.zero_grad(set_to_none=True)
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("the model has no parameter that requires a gradient, so nothing can be unlearned: thaw some.")
    optimizing = new_optimizer(trainable, lr)

    with own_randomness(seed, place), torch.enable_grad():
        for x, y in with_progress(batches) if progress else batches:
            inputs, labels = x.to(place), y.to(place)
            with torch.no_grad():
                global_logits = logits_of(original(inputs))
            check_labels(labels, global_logits)
            if not global_logits.isfinite().all():
                raise NonFiniteError("the given model returns non-finite logits: check its weights and the data.")
            losses = distillation_loss(
                student_logits(student, inputs),
                global_logits,
                labels,
                torch.rand(labels.shape, generator=generator).to(place),
                teacher=teacher,
                loss=loss,
                **settings,
            )
            optimizing.zero_grad()
            losses.mean().backward()
            optimizing.step()

    if not all(weight.isfinite().all() for weight in (*student.parameters(), *student.buffers())):
        raise NonFiniteError(f"the student's weights are no longer finite after unlearning with lr={lr}: lower it.")
    student.zero_grad(set_to_none=True)
    for copied, given in zip(student.modules(), model.modules(), strict=True):
        copied.training = given.training
    return student


CPU = torch.device("cpu")
EMPTY = "the data is empty: give at least one sample to forget."
WRAP = "wrap the data so that it gives pairs (x, y) of an input tensor and integer labels"


def is_rate(lr: object) -> bool:
    """Whether `lr` is a finite number above 0."""
    return isinstance(lr, int | float) and math.isfinite(lr) and lr > 0


def as_pair(data: Any) -> Data:  # noqa: ANN401 - whatever somebody gives
    """Return a list [x, y] of two tensors as the tuple (x, y), and all else as it is."""
    pair = isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return tuple(data) if pair else data


def check_count(name: str, count: object) -> None:
    """Raise an InputError unless `count` is a positive integer; `name` begins its sentence."""
    if not isinstance(count, int) or count < 1:
        raise InputError(f"{name} is {count!r} and has to be an integer of at least 1.")


class Batches:
    """All batches of all epochs, as pairs (x, y)."""

    def __init__(self, data: Data, epochs: int, batch_size: int, generator: torch.Generator) -> None:
        self.data = data
        self.epochs = epochs
        self.orders = list[Tensor]()  # the positions of each batch
        if isinstance(data, DataLoader):
            return
        if isinstance(data, IterableDataset):
            raise InputError("an IterableDataset has no length to shuffle over: pass it inside a DataLoader.")
        if isinstance(data, tuple):
            check_pair(data)
            if data[0].ndim == 0 or data[0].shape[:1] != data[1].shape[:1]:
                raise InputError(
                    f"x has shape {tuple(data[0].shape)} and y has shape {tuple(data[1].shape)}: "
                    "their first dimensions must be equal, one label for each sample."
                )
        elif isinstance(data, Tensor | Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise InputError(f"data is a {type(data).__name__}: {WRAP}, as a Dataset, a DataLoader or one tuple.")
        size = len(data[0]) if isinstance(data, tuple) else len(data)  # type: ignore[arg-type]
        if size == 0:
            raise InputError(EMPTY)
        # All orders are drawn before anything else, so that the batches depend on the seed alone.
        orders = [torch.randperm(size, generator=generator) for _ in range(epochs)]
        self.orders = [order[start : start + batch_size] for order in orders for start in range(0, size, batch_size)]

    def __len__(self) -> int:
        return self.epochs * len(self.data) if isinstance(self.data, DataLoader) else len(self.orders)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self.data, DataLoader):
            for _ in range(self.epochs):
                empty = True
                for batch in self.data:
                    empty = False
                    yield check_pair(batch)
                if empty:
                    raise InputError(EMPTY)
        elif isinstance(self.data, tuple):
            for order in self.orders:
                yield self.data[0][order], self.data[1][order]
        else:
            for order in self.orders:
                yield check_pair(default_collate([self.data[i] for i in order.tolist()]))


def check_pair(batch: object) -> tuple[Tensor, Tensor]:
    """Return the batch if it is a pair of tensors that are not empty; raise an InputError otherwise."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if y.numel() == 0:
                raise InputError(EMPTY)
            return x, y
    raise InputError(f"a batch is {describe(batch)}: {WRAP}.")


def describe(thing: object) -> str:
    """Return the types in a batch or an output as a phrase for an error."""
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {', '.join(type(part).__name__ for part in thing) or 'nothing'}"
    return f"a {type(thing).__name__}"


def logits_of(output: object) -> Tensor:
    """Return the logits in what a model returned: the tensor itself, or its attribute `.logits`."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"the model returns {describe(output)}: it must return logits, or an object with them as `.logits`."
    )


def student_logits(student: nn.Module, inputs: Tensor) -> Tensor:
    """Return the student's logits; explain the error where one sample alone cannot pass BatchNorm."""
    try:
        return logits_of(student(inputs))
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise InputError(
                "a batch of one sample cannot pass BatchNorm in training mode: "
                "choose a batch_size that does not leave one sample over."
            ) from error
        raise


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed dropout and the like, and restore the random state of the CPU and of the device afterwards."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # torch.manual_seed would reach every accelerator, also those whose state is not kept here.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def with_progress(batches: Batches) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield the batches and show a progress bar on the standard error stream."""
    from rich.console import Console
    from rich.progress import track

    try:
        total = len(batches)
    except TypeError:  # a DataLoader over an IterableDataset does not know
        total = None
    return track(batches, "Unlearning", total=total, console=Console(stderr=True))
