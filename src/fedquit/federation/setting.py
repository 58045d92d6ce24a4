# SPDX-License-Identifier: Apache-2.0
"""A setting of one's own: a network and the clients' data as objects, the rest as a recipe has it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fedquit.core import ClientId
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import AS_STORED, Preprocessing
from fedquit.distill.batches import IGNORE, Batches, Collate, Data, Labels, Reader, describe, unwrapped
from fedquit.errors import InputError, RequestError
from fedquit.models import build_seeded
from fedquit.running.in_memory import Given, GivenData, GivenModel
from fedquit.running.recipe import Recipe, Settings, changed, load
from fedquit.utils.names import unknown

OWN = {"data.holdout": 0.2, "recover.control": True}  # where no recipe says otherwise: a verdict, and its control

BATCH = 1024  # examples that are read at a time
MASK = "attention_mask"  # as Hugging Face names it
Who = Hashable  # the name of a client, as the mapping of the clients' data has it


class Setting:
    """What a federation consists of: the clients' data, the network, and how it is trained.

    What is not given comes from the recipe: without `clients` its data, without `model` its network.

    Args:
        model: a function without arguments that returns a new module with random weights, or the name of a network.
        clients: each client's training data by its name: a pair of tensors `(inputs, labels)`, a mapping of tensors as
            Hugging Face has it, or a Dataset or DataLoader of such. A DataLoader's data set is read in its own order,
            without shuffling, and whole. Of a mapping the one entry is taken that the network reads; for a causal
            language model of Hugging Face its labels are shifted, so that those at a position are of the next token.
        test: the test data; needed with `clients`.
        labels: the key of the labels in a mapping, or (batch) -> labels; by default `labels` or `label`.
        collate: makes a batch of a list of a dataset's samples; by default torch's. A DataLoader has its own.
        classes: the number of classes; else one more than the largest label.
        preprocessing: of inputs that are bytes, such as `fedquit.data.Pixels`.
        recipe: a packaged recipe, a .toml file or a `Recipe`, for training, method, recovery and evaluation; else the
            defaults of all keys, with a fifth of each client's data held out and Natural as the control.
        settings: changes of its keys: `{"train.rounds": 5}`, or `["train.rounds=5"]` as `--set` takes them.

    Raises:
        InputError: for data or values that cannot be used.
        UnknownNameError: for a recipe, key or name that does not exist.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | str | None = None,
        clients: Mapping[Any, Data] | None = None,
        test: Data | None = None,
        *,
        labels: Labels | None = None,
        collate: Collate | None = None,
        classes: int | None = None,
        preprocessing: Preprocessing = AS_STORED,
        recipe: str | Path | Recipe | None = None,
        settings: Settings = (),
    ) -> None:
        objects: dict[str, Given] = {}
        keys: dict[str, Any] = {}
        self.ids: dict[Who, ClientId] | None = None
        made = _made(model) if callable(model) else None
        if clients is not None:
            if not isinstance(clients, Mapping):
                raise InputError(f"clients are {describe(clients)}: give a mapping of each client's name to its data.")
            if test is None:
                raise InputError("the clients' data is given and no test data: give test=… as well.")
            self.ids = {name: number for number, name in enumerate(clients)}
            reading = _Reading.of(made, labels, collate)
            data = _joined(clients, test, classes, preprocessing, reading)
            name = data.name
            objects[name] = data
            keys |= {"data.name": name, "data.options": {}, "data.partition": "file", "data.partition_file": ""}
            keys["data.clients"] = len(clients)
        elif test is not None:
            raise InputError("test data is given and no clients: give clients=… as well.")
        if callable(model):
            network = GivenModel(model)
            name = network.name
            objects[name] = network
            keys |= {"model.name": name, "model.options": {}}
        elif model is not None:
            keys |= {"model.name": model, "model.options": {}}
        plain = recipe if isinstance(recipe, Recipe) else _loaded(recipe)
        self.objects = objects
        self.recipe = changed(changed(plain, keys), settings)

    def ids_of(self, who: object) -> tuple[ClientId, ...]:
        """The numbers of one client or several.

        Args:
            who: the name of a client, or a list or set of names; numbers where the data comes from a recipe.

        Raises:
            RequestError: for nobody.
            UnknownNameError: for a client that is not there.
        """
        known = self.ids
        single = who in known if known is not None and isinstance(who, Hashable) else isinstance(who, int | str)
        names: Sequence[Any] = [who] if single or not isinstance(who, list | tuple | set | frozenset) else list(who)
        if not names:
            raise RequestError("nobody is named as the client to forget: name at least one.")
        if known is None:
            numbers = [_client_number(name) for name in names]
            for name, number in zip(names, numbers, strict=True):
                if number is None:
                    raise unknown("client", str(name), map(str, range(self.recipe.data.clients)))
            return tuple(sorted(number for number in numbers if number is not None))
        for name in names:
            if name not in known:
                raise unknown("client", str(name), map(str, known))
        return tuple(sorted(known[name] for name in names))


def as_setting(what: str | Path | Recipe | Setting, settings: Settings = ()) -> Setting:
    """The setting that a caller means, with some keys changed.

    Args:
        what: a setting, a recipe, or where one lies.
        settings: as `Setting` takes them.
    """
    if not isinstance(what, Setting):
        return Setting(recipe=what, settings=settings)
    other = Setting.__new__(Setting)
    other.ids, other.objects = what.ids, what.objects
    other.recipe = changed(what.recipe, settings)
    return other


def _made(model: Callable[[], nn.Module]) -> nn.Module:
    """The module that a factory makes with seed 0.

    Raises:
        InputError: for something that is no factory without arguments, or one that does not make new weights.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        raise InputError(f"the model is a {name} that exists: give a function that makes new ones, as `lambda: Net()`.")
    try:
        inspect.signature(model).bind()
    except ValueError:  # of a function that has none
        pass
    except TypeError as error:
        raise InputError(
            f"the model's factory needs arguments ({error}): give a function without any, as `lambda: Net(10)`."
        ) from error
    made, again = (build_seeded(model, seed=0) for _ in range(2))
    shared = {id(p) for p in made.parameters() if p.requires_grad} & {id(p) for p in again.parameters()}
    if made is again or shared:
        raise InputError("the model's factory returns the same weights twice: let it make a new module at each call.")
    return made


def _loaded(recipe: str | Path | None) -> Recipe:
    return changed(Recipe(), OWN) if recipe is None else load(str(recipe))


def _client_number(name: object) -> ClientId | None:
    """The number in 3, "3" or numpy's 3; None for anything else."""
    if isinstance(name, str):
        return int(name) if name.strip().isdecimal() else None
    try:
        return operator.index(name)  # type: ignore[arg-type]
    except TypeError:
        return None


class _AnyNetwork(nn.Module):
    """Stands for a network that a recipe names: it takes what it is given."""

    def forward(self, **inputs: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Reading:
    """How the clients' data becomes pairs of tensors.

    Attributes:
        reader: splits a batch into inputs and labels, as for one model.
        first: the input that the network takes first; None where any will do.
        shifts: whether labels in a mapping are those of the same position, and the network predicts the next.
        collate: makes a batch of samples.
    """

    reader: Reader
    first: str | None
    shifts: bool
    collate: Collate | None

    @classmethod
    def of(cls, network: nn.Module | None, labels: Labels | None, collate: Collate | None) -> _Reading:
        module = _AnyNetwork() if network is None else network
        reader = Reader(module, labels=labels, shift=False)
        names = list(inspect.signature(unwrapped(module).forward).parameters)
        first = names[0] if network is not None and reader.keys is not None and names else None
        return cls(reader, first, Reader(module).shift, collate)

    def pairs(self, data: Data, whose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of somebody's data, in their order, as pairs of tensors."""
        for inputs, given, batch in self._split(data, whose):
            x, labels = self._only(inputs, whose), given
            if isinstance(batch, Mapping) and self.shifts:
                if labels.ndim != 2 or labels.shape != x.shape[:2]:
                    raise InputError(
                        f"the data of {whose} has inputs of shape {tuple(x.shape)} and labels of shape "
                        f"{tuple(labels.shape)}: a causal language model needs a label for each token."
                    )
                x, labels = x[:, :-1], labels[:, 1:]
            if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
                raise InputError(f"the labels of {whose} are {labels.dtype}: give class numbers of an integer type.")
            if bool((labels == IGNORE).any()):
                raise InputError(
                    f"labels of {whose} are {IGNORE}, which a federation cannot leave out: "
                    "cut texts to one length without padding, and give every position its label."
                )
            yield x, labels

    def _split(self, data: Data, whose: str) -> Iterator[tuple[Any, Tensor, Any]]:
        """Inputs and labels of each batch, and the batch; errors name whose it is."""
        try:
            for batch in Batches(data, 1, BATCH, collate=self.collate):
                yield *self.reader.split(batch), batch
        except InputError as error:
            raise InputError(f"the data of {whose}: {error}") from error

    def _only(self, inputs: object, whose: str) -> Tensor:
        """The one tensor among inputs that a network of a federation reads."""
        if isinstance(inputs, Mapping):
            named = dict(inputs)
            mask = named.pop(MASK, None) if len(named) > 1 else None
            if isinstance(mask, Tensor) and not bool((mask == 1).all()):
                raise InputError(
                    f"the {MASK} of {whose} hides positions, and a federation gives a network one tensor: "
                    "let its forward make the mask from the tokens, and leave the entry out."
                )
            inputs = list(named.values())
            if len(named) == 1 and self.first is not None and self.first not in named:
                raise InputError(
                    f"the data of {whose} has the input {next(iter(named))!r}, and the network takes {self.first!r} "
                    "first: let the two have the same name."
                )
        if isinstance(inputs, tuple | list) and len(inputs) == 1:
            inputs = inputs[0]
        if isinstance(inputs, Tensor):
            return inputs
        raise InputError(
            f"the data of {whose} has the inputs {describe(inputs)}: a federation gives a network one tensor; "
            "join them into one that its forward takes apart."
        )


def _joined(
    clients: Mapping[Any, Data], test: Data, classes: int | None, preprocessing: Preprocessing, reading: _Reading
) -> GivenData:
    """All clients' examples in one data set, client after client."""
    if len(clients) < 2:
        raise InputError(f"there is data of {len(clients)} clients: a federation has at least two.")
    pairs = [_tensors(data, f"client {name!r}", reading) for name, data in clients.items()]
    test_x, test_y = _tensors(test, "the test set", reading)
    shapes = {tuple(x.shape[1:]) for x, _ in (*pairs, (test_x, test_y))}
    if len(shapes) > 1:
        raise InputError(f"examples have the shapes {sorted(shapes)}: those of all clients and of the test are alike.")
    labels = torch.cat([y for _, y in pairs])
    if classes is None:
        classes = int(max(labels.max(), test_y.max())) + 1
    inputs = torch.cat([x for x, _ in pairs])
    dataset = Dataset(inputs, labels, test_x, test_y, classes, preprocessing)
    parts: dict[ClientId, Tensor] = {}
    begin = 0
    for number, (x, _) in enumerate(pairs):
        parts[number] = torch.arange(begin, begin + len(x))
        begin += len(x)
    return GivenData(dataset, parts)


def _tensors(data: Data, whose: str, reading: _Reading) -> tuple[Tensor, Tensor]:
    """All examples of a data set as a pair of tensors, in their order."""
    data = _in_order(data, whose) if isinstance(data, DataLoader) else data
    pairs = list(reading.pairs(data, whose))
    inputs = [x for x, _ in pairs]
    labels = [y for _, y in pairs]
    shapes = {(tuple(x.shape[1:]), tuple(y.shape[1:])) for x, y in zip(inputs, labels, strict=True)}
    if len(shapes) > 1:
        raise InputError(
            f"batches of {whose} have examples and labels of the shapes {sorted(shapes)}: pad all to the same."
        )
    if not _reads_again(data, pairs[0], reading):
        raise InputError(
            f"the data of {whose} differs from one reading to the next: give the examples without random augmentation "
            "and in a fixed order."
        )
    return torch.cat(inputs).cpu(), torch.cat(labels).cpu()


def _reads_again(data: Data, first: tuple[Tensor, Tensor], reading: _Reading) -> bool:
    """Whether another reading begins with the same batch."""
    try:
        again = next(reading.pairs(data, "anybody"))
    except InputError:  # nothing is left of it
        return False
    pairs = list(zip(first, again, strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)


def _in_order(loader: DataLoader[Any], whose: str) -> DataLoader[Any]:
    """A loader over the same data set, in its own order and whole: without shuffling, and without `drop_last`."""
    dataset = loader.dataset
    chosen: object = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        chosen = loader.batch_sampler
    elif isinstance(dataset, IterableDataset):
        chosen = None
    plain = chosen is None or type(chosen) is SequentialSampler
    size = len(dataset) if isinstance(dataset, Sized) else None
    shuffled = type(chosen) is RandomSampler and not chosen.replacement and chosen.num_samples == size
    if not plain and not shuffled:
        raise InputError(
            f"the DataLoader of {whose} chooses examples by {describe(chosen)}, which cannot be undone: "
            "give the data set itself, or a torch.utils.data.Subset of it."
        )
    return DataLoader(dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
