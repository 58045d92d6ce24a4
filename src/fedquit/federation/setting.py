# SPDX-License-Identifier: Apache-2.0
"""A setting of one's own: a network and the clients' data as objects, the rest as a recipe has it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fedquit.core import ClientId
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import AS_STORED, Preprocessing
from fedquit.distill.batches import Batches, Data, describe
from fedquit.errors import InputError, RequestError
from fedquit.running.in_memory import Given, GivenData, GivenModel
from fedquit.running.recipe import Recipe, Settings, changed, load
from fedquit.utils.names import unknown

OWN = {"data.holdout": 0.2, "recover.control": True}  # where no recipe says otherwise: a verdict, and its control

BATCH = 1024  # examples that are read at a time
Who = Hashable  # the name of a client, as the mapping of the clients' data has it


class Setting:
    """What a federation consists of: the clients' data, the network, and how it is trained.

    What is not given comes from the recipe: without `clients` its data, without `model` its network.

    Args:
        model: a function without arguments that returns a new module with random weights, or the name of a network.
        clients: each client's training data by its name: a pair of tensors `(inputs, labels)`, or a Dataset or
            DataLoader of such pairs. A DataLoader's data set is read in its own order, without shuffling, and whole.
        test: the test data; needed with `clients`.
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
        classes: int | None = None,
        preprocessing: Preprocessing = AS_STORED,
        recipe: str | Path | Recipe | None = None,
        settings: Settings = (),
    ) -> None:
        objects: dict[str, Given] = {}
        keys: dict[str, Any] = {}
        self.ids: dict[Who, ClientId] | None = None
        if clients is not None:
            if test is None:
                raise InputError("the clients' data is given and no test data: give test=… as well.")
            self.ids = {name: number for number, name in enumerate(clients)}
            data = _joined(clients, test, classes, preprocessing)
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


def _joined(clients: Mapping[Any, Data], test: Data, classes: int | None, preprocessing: Preprocessing) -> GivenData:
    """All clients' examples in one data set, client after client."""
    if len(clients) < 2:
        raise InputError(f"there is data of {len(clients)} clients: a federation has at least two.")
    pairs = [_tensors(data, f"client {name!r}") for name, data in clients.items()]
    test_x, test_y = _tensors(test, "the test set")
    shapes = {tuple(x.shape[1:]) for x, _ in (*pairs, (test_x, test_y))}
    if len(shapes) > 1:
        raise InputError(f"examples have the shapes {sorted(shapes)}: those of all clients and of the test are alike.")
    labels = torch.cat([y for _, y in pairs]).long()
    if classes is None:
        classes = int(max(labels.max(), test_y.max())) + 1
    inputs = torch.cat([x for x, _ in pairs])
    dataset = Dataset(inputs, labels, test_x, test_y.long(), classes, preprocessing)
    parts: dict[ClientId, Tensor] = {}
    begin = 0
    for number, (x, _) in enumerate(pairs):
        parts[number] = torch.arange(begin, begin + len(x))
        begin += len(x)
    return GivenData(dataset, parts)


def _tensors(data: Data, whose: str) -> tuple[Tensor, Tensor]:
    """All examples of a data set as a pair of tensors, in their order."""
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    data = _in_order(data, whose) if isinstance(data, DataLoader) else data
    for batch in Batches(data, 1, BATCH):
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise InputError(
                f"the data of {whose} gives {describe(batch)}: a federation trains on pairs of tensors "
                "(inputs, labels); wrap the data so that it gives them."
            )
        inputs.append(batch[0])
        labels.append(batch[1])
    shapes = {(tuple(x.shape[1:]), tuple(y.shape[1:])) for x, y in zip(inputs, labels, strict=True)}
    if len(shapes) > 1:
        raise InputError(
            f"batches of {whose} have examples and labels of the shapes {sorted(shapes)}: pad all to the same."
        )
    if not _reads_again(data, (inputs[0], labels[0])):
        raise InputError(
            f"the data of {whose} differs from one reading to the next: give the examples without random augmentation "
            "and in a fixed order."
        )
    return torch.cat(inputs).cpu(), torch.cat(labels).cpu()


def _reads_again(data: Data, first: tuple[Tensor, Tensor]) -> bool:
    """Whether another reading begins with the same batch."""
    try:
        again = next(iter(Batches(data, 1, BATCH)))
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
