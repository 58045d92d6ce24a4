# SPDX-License-Identifier: Apache-2.0
"""FedQUIT at the client: make a model forget samples, with nothing but the model and those samples.

The student starts as a copy of the given model and distils a virtual teacher: the given model's own
logits with the true class pushed down (`fedquit.distill.virtual_teacher`). This is Algorithm 1 of
the paper.
"""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedquit.distill.batches import (
    Batches,
    Collate,
    Data,
    Forward,
    Labels,
    Reader,
    describe,
    first_line,
    mapped,
    refuse_probabilities,
)
from fedquit.distill.chunked import distillation_in_chunks
from fedquit.distill.damage import DamageWarning, Sample, unlearning_damage
from fedquit.distill.losses import LOSSES, Rule
from fedquit.distill.stepping import NewOptimizer, Steps, new_optimizer
from fedquit.distill.virtual_teacher import check_labels, checked_options, whole_number
from fedquit.errors import InputError, NonFiniteError
from fedquit.utils.names import lookup

Callback = Callable[["Step"], object]


@dataclass(frozen=True)
class Step:
    """What a callback is told after each step.

    Attributes:
        model: the module that learns, in its training mode; it must not be changed.
        step: steps so far.
        epoch: passes over the data that are over; None where the data does not know its length.
        loss: of this step's batch, before the step.
    """

    model: nn.Module
    step: int
    epoch: float | None
    loss: float

    @property
    def ends_epoch(self) -> bool:
        """Whether a pass over the data is over with this step; False where the data does not know its length."""
        return self.epoch is not None and self.epoch > 0 and self.epoch.is_integer()


def unlearn(
    model: nn.Module,
    data: Data,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int = 32,
    teacher: str = "min",
    loss: str = "kl",
    optimizer: str | NewOptimizer = "adam",
    forward: Forward | None = None,
    labels: Labels | None = None,
    shift: bool | Literal["auto"] = "auto",
    class_dim: int = -1,
    ignore_index: int = -100,
    collate: Collate | None = None,
    norm: Literal["train", "frozen"] = "train",
    dropout: bool = True,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    callback: Callback | None = None,
    progress: bool = False,
    share_frozen: bool = False,
    **teacher_options: float,
) -> nn.Module:
    """Return a copy of the model that has forgotten the data; the given model is left as it is.

    The teacher is the given model in evaluation mode. The student learns in training mode, as the
    authors have it: its dropout is active and its BatchNorm statistics move. It is returned in the
    modes the given model was in, and parameters that do not require a gradient stay as they are.
    Parameters in half precision learn through float32 copies and come back in their own type. No
    global random state is read or changed: the same seed gives the same student. A warning says where
    the rate has destroyed the model, as far as the data to forget can tell.

    Args:
        model: any module that maps a batch to logits `(B, C)`, `(B, T, C)` or, with `class_dim`,
            `(B, C, H, W)`, or to an object with `.logits`.
        data: what to forget: a map-style dataset, a pair (inputs, labels) or a mapping of tensors,
            or a DataLoader, whose own batches are then taken. Inputs are a tensor, a list or a
            mapping. The last batch may be a small one; none is dropped.
        lr: the learning rate.
        epochs: passes over the data.
        batch_size: samples per step; a DataLoader has its own.
        teacher: a name from `fedquit.distill.virtual_teacher.TEACHERS`.
        loss: a name from `fedquit.distill.losses.LOSSES`.
        optimizer: `adam`, `adamw` or `sgd`; a class of `torch.optim`; or (parameters, lr) -> optimizer.
        forward: (model, batch) -> logits, for batches or outputs of another form.
        labels: the key of the labels in a mapping, or (batch) -> labels; by default `labels` or
            `label`, or the second of a pair.
        shift: whether the logits at a position are of the next label; `auto`: for Hugging Face's
            causal language models.
        class_dim: the dimension of the classes in the logits; 1 for segmentation.
        ignore_index: a label that is left out; the loss is the mean over the others, and a batch
            that has none takes no step.
        collate: makes a batch of a list of a dataset's samples; by default torch's.
        norm: `frozen` keeps the statistics of BatchNorm.
        dropout: whether the student's dropout is active.
        autocast: torch.bfloat16 or torch.float16 computes a float32 model's passes in it.
        seed: fixes the order of the samples, dropout, and the labels of the teacher `random`.
        device: where to work and where the student is returned; by default where the model's
            parameters are.
        callback: is told of each step; when it returns True, that step was the last.
        progress: show a bar with the time left.
        share_frozen: whether frozen parameters share memory with the given model's, so that a large model with
            adapters is not copied; whoever then changes the one in place, changes the other.
        teacher_options: `v` of the teacher `fixed`, `tau` of `temperature`, `k` of `topk`.

    Returns:
        The student: a new module on `device`, whose gradients are empty.

    Raises:
        InputError: for data, labels, a model or numbers that cannot be used.
        UnknownNameError: for a teacher, loss, optimizer or teacher option that does not exist.
        NonFiniteError: if the given model returns, or the student arrives at, NaN or infinity.
    """
    rule = Rule(teacher, loss, **checked_options(teacher, teacher_options))
    lookup(LOSSES, loss, "loss")
    make = new_optimizer(optimizer, check_rate(lr))
    epochs = check_count("epochs", epochs)
    batch_size = check_count("batch_size", batch_size)
    seed = check_options(seed, autocast, callback)
    place = place_of(model, device)

    generator = torch.Generator().manual_seed(seed)
    batches = Batches(data, epochs, batch_size, generator, collate)
    reader = Reader(model, forward=forward, labels=labels, shift=shift, class_dim=class_dim, ignore_index=ignore_index)
    student = copied(model, place, share_frozen=share_frozen)
    original = copied(student, place, share_frozen=True).eval()
    student = learner(student, norm=norm, dropout=dropout)
    steps = Steps(student, make)
    sample = Sample()

    def losses_of(batch: object) -> Tensor | None:
        inputs, targets = reader.split(batch)
        with torch.no_grad():
            global_logits = reader.logits(original, inputs)
        kept = reader.kept(targets)
        u = torch.rand(targets.shape, generator=generator).to(place)
        if kept is not None:
            if targets.shape != global_logits.shape[:-1]:
                check_labels(targets, global_logits)
            global_logits, targets, u = global_logits[kept], targets[kept], u[kept]
            if not len(targets):
                return None
        check_labels(targets, global_logits)
        check_finite_logits(global_logits)
        if not steps.taken:
            refuse_probabilities(global_logits, forward)
        logits = student_logits(reader, student, inputs)
        logits = logits if kept is None else logits[kept]
        sample.add(inputs, kept, targets, global_logits)
        return distillation_in_chunks(logits, global_logits, targets, u, rule)

    take_steps(
        steps, losses_of, batches, student, seed=seed, place=place, autocast=autocast, callback=callback,
        title="Unlearning" if progress else "",
    )  # fmt: skip
    check_taken(steps, ignore_index)
    if not is_finite(student):
        raise NonFiniteError(f"the student's weights are no longer finite after unlearning with lr={lr}: lower it.")
    damage = unlearning_damage(sample, student, reader, rule, lr)
    if damage:
        warnings.warn(damage, DamageWarning, stacklevel=2)
    return as_given(student, model)


CPU = torch.device("cpu")


def check_rate(lr: float) -> float:
    """Return a finite rate above 0; raise an InputError for any other."""
    if not is_rate(lr):
        raise InputError(f"lr is {lr!r} and has to be a finite number above 0, such as 1e-4.")
    return lr


def is_rate(lr: object) -> bool:
    """Whether `lr` is a finite number above 0."""
    return isinstance(lr, numbers.Real) and math.isfinite(lr) and float(lr) > 0


def check_count(name: str, count: object) -> int:
    """Return a positive integer, of Python's or NumPy's types; raise an InputError that begins with `name` if not."""
    whole = whole_number(count)
    if whole is None or whole < 1:
        raise InputError(f"{name} is {count!r} and has to be an integer of at least 1.")
    return whole


def check_options(seed: object, autocast: object, callback: object) -> int:
    """Return the seed; raise an InputError for a seed, a type of autocast or a callback that cannot be used."""
    whole = whole_number(seed)
    if whole is None or not -(2**63) <= whole < 2**64:
        raise InputError(f"seed is {seed!r} and has to be an integer of at most 64 bits.")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InputError(f"autocast is {autocast!r}: choose torch.bfloat16, torch.float16 or None.")
    if callback is not None and not callable(callback):
        raise InputError(f"callback is {describe(callback)}: give a function that takes a step.")
    return whole


def check_finite_logits(logits: Tensor) -> None:
    """Raise a NonFiniteError for logits of the given model that are not finite."""
    if not logits.isfinite().all():
        raise NonFiniteError("the given model returns non-finite logits: check its weights and the data.")


def check_first_logits(logits: Tensor, forward: Forward | None = None) -> None:
    """Raise an error for logits, before the first step, that are not finite or that are probabilities.

    Args:
        logits: (…, C).
        forward: the hook that chose them, if there is one.
    """
    check_finite_logits(logits)
    refuse_probabilities(logits, forward)


def check_taken(steps: Steps, ignore_index: int) -> None:
    """Raise an InputError if no batch had a label that counts, so that nothing was learnt."""
    if not steps.taken:
        raise InputError(f"every label is {ignore_index}, which is left out: give data with other labels.")


def place_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """The device that is asked for, or that of the model's parameters.

    Raises:
        InputError: for a device that is not there, something that is no module, or one that cannot be copied.
    """
    check_module(model)
    if device is None:
        return next((p.device for p in model.parameters() if not p.is_meta), CPU)
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InputError(f"the device {str(device)!r} is not there: give one that is, such as 'cpu'.") from error
    if place.type == "meta":
        raise InputError("the device 'meta' computes nothing: give one that does, such as 'cpu'.")
    return place


def check_module(model: object) -> None:
    """Raise an InputError unless `model` is a module whose parameters can be copied and have a shape."""
    if isinstance(model, type):
        raise InputError(f"the model is the class {model.__name__}: give an object of it, with its trained weights.")
    if not isinstance(model, nn.Module):
        hint = ", with load_state_dict where you have its weights" if isinstance(model, Mapping) else ""
        raise InputError(f"the model is {describe(model)}: give an nn.Module{hint}.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError("the model is a TorchScript module, whose parameters cannot be copied: give the nn.Module.")
    if isinstance(model, torch.fx.GraphModule) and "train" in vars(model):  # torch.export has replaced it
        raise InputError("the model was exported, which fixes its training mode: give the nn.Module before its export.")
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise InputError("the model has lazy layers without a shape: let one batch pass through it first.")
    without_values = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if without_values and not any(hasattr(module, "_hf_hook") for module in model.modules()):  # accelerate's offloading
        raise InputError(
            "parameters of the model are on the device 'meta', without values: load its weights, "
            "with model.to_empty(device=…) and load_state_dict."
        )


def copied(model: nn.Module, place: torch.device, *, share_frozen: bool = False) -> nn.Module:
    """A copy of a module on a device, without gradients.

    Args:
        model: the module. Parameters that lie elsewhere for the time being (meta tensors of an offloaded model) are
            left to whoever put them there.
        place: the device.
        share_frozen: whether parameters that are frozen, and on the device already, share memory with the module's.
    """
    tensors = [*model.parameters(), *model.buffers()]
    there = all(tensor.device == place or tensor.is_meta for tensor in tensors)
    try:
        copy_of = copy.deepcopy(model, _frozen_shared(model) if there and share_frozen else {})
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            f"the model cannot be copied: {first_line(error)}; give one that copy.deepcopy takes, for example without "
            "tensors that it has computed."
        ) from error
    if not there:
        copy_of = copy_of.to(place)
    for parameter in copy_of.parameters():
        if parameter.requires_grad or not share_frozen:
            parameter.grad = None
    return copy_of


def _frozen_shared(model: nn.Module) -> dict[int, Any]:
    """What `deepcopy` takes in place of frozen parameters: others over the same memory, which `.to()` leaves alone."""
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            plain = type(parameter) is nn.Parameter
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
    return shared


def is_finite(model: nn.Module) -> bool:
    """Whether all that can have changed is finite: trainable parameters, and buffers."""
    moving = [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]
    return all(bool(tensor.isfinite().all()) for tensor in moving if not tensor.is_meta)


def learner(model: nn.Module, *, norm: str, dropout: bool) -> nn.Module:
    """Put a module into training mode.

    Args:
        model: the module.
        norm: `train`, or `frozen`: BatchNorm uses its statistics and keeps them.
        dropout: whether dropout is active.
    """
    if norm not in ("train", "frozen"):
        raise InputError(f"norm is {norm!r}: choose 'train' or 'frozen'.")
    model.train()
    for module in model.modules():
        if (norm == "frozen" and isinstance(module, _NormBase)) or (
            not dropout and isinstance(module, nn.modules.dropout._DropoutNd)
        ):
            module.eval()
    return model


def as_given(student: nn.Module, model: nn.Module) -> nn.Module:
    """A student without gradients, in the modes of the model it was copied from."""
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    for one, given in zip(student.modules(), model.modules(), strict=True):
        one.training = given.training
    return student


def student_logits(reader: Reader, student: nn.Module, inputs: object) -> Tensor:
    """Return the student's logits; explain the error where one sample alone cannot pass BatchNorm."""
    try:
        return reader.logits(student, inputs)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise InputError(
                "a batch of one sample cannot pass BatchNorm in training mode: "
                "choose a batch_size that does not leave one sample over, or norm='frozen'."
            ) from error
        raise


@contextmanager
def norms_at_rest(student: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its statistics and keep them, as a federation does for a batch of one sample."""
    norms = [module for module in student.modules() if isinstance(module, _NormBase) and module.training]
    for module in norms:
        module.eval()
    try:
        yield
    finally:
        for module in norms:
            module.train()


def take_steps(
    steps: Steps,
    losses_of: Callable[[Any], Tensor | None],
    batches: Batches,
    model: nn.Module,
    *,
    seed: int,
    place: torch.device,
    autocast: torch.dtype | None = None,
    callback: Callback | None = None,
    title: str = "",
) -> None:
    """Take a step for each batch.

    Args:
        steps: the optimizer.
        losses_of: the losses of a batch, whose mean is taken; None for a batch that has none.
        batches: all of them.
        model: that learns, for the callback.
        seed: of dropout.
        place: the device.
        autocast: the type in which passes are computed; None for the model's own.
        callback: is told of each step, and may end them.
        title: of a progress bar; empty for none.
    """
    total = _length(batches)
    each = total / batches.epochs if total else None
    with own_randomness(seed, place), torch.enable_grad():
        for batch in with_progress(batches, title) if title else batches:
            with _autocast(autocast, place):
                losses = losses_of(mapped(batch, lambda tensor: tensor.to(place)))
            if losses is None:
                continue
            mean = losses.mean()
            steps.take(mean)
            if callback:
                epoch = steps.taken / each if each else None
                if callback(Step(model, steps.taken, epoch, float(mean.detach()))) is True:
                    return


def _autocast(dtype: torch.dtype | None, place: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(place.type, dtype)


def _length(batches: Batches) -> int | None:
    """How many batches there are; None where a DataLoader over an IterableDataset does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


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


def with_progress(batches: Batches, title: str) -> Iterable[Any]:
    """Yield the batches and show a progress bar on the standard error stream."""
    from rich.console import Console
    from rich.progress import track

    return track(batches, title, total=_length(batches), console=Console(stderr=True))
