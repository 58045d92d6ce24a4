# SPDX-License-Identifier: Apache-2.0
"""BatchNorm that stays at its client: FedBN.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021.

Scales, shifts and running statistics of BatchNorm are each client's own: they lie in its memory, are never averaged and
never travel. What the server knows as the model is the rest. A client completes whatever whole model it is sent with
its own layers, does its task, keeps the layers and answers with the rest. A client that comes for the first time begins
with the layers that the run's seed gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedquit.core.types import Batch, ClientId, Measurement, Memory, Model, Params, Sent
from fedquit.errors import InputError

LAYERS = "batchnorm"  # the name of a client's layers in its memory
OWNER = "client {}:"  # what precedes the names of a client's layers among the parameters that are evaluated


@runtime_checkable
class LocalModel(Protocol):
    """A network of which some layers stay at the clients."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in their order."""

    @property
    def local_names(self) -> frozenset[str]:
        """The names of those that stay at the clients; none where all are averaged."""

    def first_layers(self, seed: int) -> Params:
        """Return the layers of a client that comes for the first time."""


@dataclass(frozen=True)
class BeginAnew(Measurement):
    """Give up one's own layers: the next task begins with the first ones. Nothing is measured, sent or sent back."""

    def begin(self, sent: Sent) -> Params:
        return {}

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        return {}


def local_names(model: Model) -> frozenset[str]:
    """Return the names of the parameters that stay at the clients, of most networks none."""
    return model.local_names if isinstance(model, LocalModel) else frozenset()


def shared_part(model: Model, params: Params) -> Params:
    """Return the parameters that are averaged and travel; `params` itself where all do."""
    names = local_names(model)
    return {n: p for n, p in params.items() if n not in names} if names else params


def local_part(model: Model, params: Params) -> Params:
    """Return the parameters that stay at the clients."""
    names = local_names(model)
    return {n: p for n, p in params.items() if n in names}


def completed(model: Model, shared: Params, layers: Params) -> Params:
    """Return a whole model in the order of its parameters.

    Args:
        model: the network.
        shared: what the server knows.
        layers: a client's own.
    """
    assert isinstance(model, LocalModel)
    whole = {**shared, **layers}
    return {n: whole[n] for n in model.names if n in whole}


def with_layers(model: Model, sent: Sent, layers: Params) -> Sent:
    """Complete the whole models among what a client was sent; an update of some tensors stays as it is.

    Args:
        model: the network.
        sent: named sets of parameters.
        layers: the client's own.
    """
    assert isinstance(model, LocalModel)
    shared = set(model.names) - model.local_names
    return {name: completed(model, p, layers) if p.keys() == shared else p for name, p in sent.items()}


def layers_by_client(homes: Memory, without: Iterable[ClientId] = ()) -> dict[ClientId, Params]:
    """Return the layers that clients keep at home, by client.

    Args:
        homes: the clients' memories, by "client/name".
        without: clients whose layers are left out, for example since they go with clients that leave.
    """
    left_out = set(without)
    owners = [int(client) for key in homes for client, _, name in [key.partition("/")] if name == LAYERS]
    layers = {client: homes[home_key(client)] for client in sorted(owners) if client not in left_out}
    return {client: own for client, own in layers.items() if own}


def home_key(client: ClientId) -> str:
    """Return the key of a client's layers in the memory of all clients."""
    return f"{client}/{LAYERS}"


def is_layers_key(key: str) -> bool:
    """Return whether a key of the clients' memories, "client/name", is that of layers."""
    return key.partition("/")[2] == LAYERS


def with_all_layers(shared: Params, layers: Mapping[ClientId, Params]) -> Params:
    """Return the models of all clients as one set of parameters; the layers' names tell their client.

    Args:
        shared: what the server knows.
        layers: of each client; without any, `shared` itself is returned.
    """
    if not layers:
        return shared
    own = {OWNER.format(c) + n: p for c, mine in layers.items() for n, p in mine.items()}
    return {**shared, **own}


def separated(params: Params) -> tuple[Params, dict[ClientId, Params]]:
    """Take apart what `with_all_layers` has put together: the shared parameters, and the layers of each client."""
    before, after = OWNER.split("{}")
    shared: Params = {}
    layers: dict[ClientId, Params] = {}
    for name, tensor in params.items():
        client, found, own = name.removeprefix(before).partition(after)
        if name.startswith(before) and found and client.isdecimal():
            layers.setdefault(int(client), {})[own] = tensor
        else:
            shared[name] = tensor
    return shared, layers


def mean_layers(layers: Mapping[ClientId, Params], examples: Mapping[ClientId, int]) -> Params:
    """Return the mean of clients' layers with their numbers of examples as weights.

    Args:
        layers: of each client, at least one.
        examples: of each client, n_k.
    """
    total = sum(examples[c] for c in layers)
    if total == 0:
        raise InputError("no client with layers of its own has any data: there is nothing to average.")
    (first, *_) = layers.values()
    return {n: sum((examples[c] / total) * own[n] for c, own in layers.items()) for n in first}  # type: ignore[misc]
