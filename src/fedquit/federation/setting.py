# SPDX-License-Identifier: Apache-2.0
"""A setting of one's own: a network and the clients' data as objects, the rest as a recipe has it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquit.core import ClientId
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import AS_STORED, Preprocessing
from fedquit.distill.batches import Batches, Data, describe
from fedquit.errors import InputError, RequestError
from fedquit.running.in_memory import Given, GivenData, GivenModel
from fedquit.running.recipe import Recipe, Settings, changed, load
from fedquit.utils.names import unknown

Who = Hashable  # the name of a client, as the mapping of the clients' data has it


class Setting:
    """What a federation consists of: the clients' data, the network, and how it is trained.

    What is not given comes from the recipe: without `clients` its data, without `model` its network.

    Args:
        model: a function without arguments that returns a new module with random weights, or the name of a network.
        clients: each client's training data by its name: a pair of tensors `(inputs, labels)`, or a Dataset or
            DataLoader of such pairs.
        test: the test data; needed with `clients`.
        classes: the number of classes; else one more than the largest label.
        preprocessing: of inputs that are bytes, such as `fedquit.data.Pixels`.
        recipe: a packaged recipe, a .toml file or a `Recipe`, for training, method, recovery and evaluation; else the
            defaults of all keys.
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
            objects[data.name] = data
            keys |= {"data.name": data.name, "data.options": {}, "data.partition": "file", "data.partition_file": ""}
            keys["data.clients"] = len(clients)
        elif test is not None:
            raise InputError("test data is given and no clients: give clients=… as well.")
        if callable(model):
            network = GivenModel(model)
            objects[network.name] = network
            keys |= {"model.name": network.name, "model.options": {}}
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
            return tuple(sorted(int(name) for name in names))
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
    return Recipe() if recipe is None else load(str(recipe))


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
    for batch in Batches(data, 1, 1024):
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise InputError(
                f"the data of {whose} gives {describe(batch)}: a federation trains on pairs of tensors "
                "(inputs, labels); wrap the data so that it gives them."
            )
        inputs.append(batch[0])
        labels.append(batch[1])
    return torch.cat(inputs).cpu(), torch.cat(labels).cpu()
