# SPDX-License-Identifier: Apache-2.0
"""A recipe's world: its data, dealt out to clients, its network and its training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fedquit.core import Memory, Model, Params, Training
from fedquit.data import federate, load_dataset
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Engine, open_engine
from fedquit.method import Method
from fedquit.models import load_model
from fedquit.recipe import Recipe


@dataclass(frozen=True)
class World:
    """A recipe's data, network and training, ready to use."""

    recipe: Recipe
    data: FederatedData
    model: Model
    training: Training
    initial: Params
    method: Method

    def engine(self, data: FederatedData, homes: Memory) -> Engine:
        """The engine that the recipe names, over this data."""
        return open_engine(self.recipe.engine.name, self.model, data, homes)


def open_world(recipe: Recipe) -> World:
    """Load the data, deal it out, and build the network."""
    spec = recipe.data
    dtype = getattr(torch, recipe.model.dtype)
    dataset = load_dataset(spec.name, **spec.options)
    if dataset.x.is_floating_point():
        dataset = dataclasses.replace(dataset, x=dataset.x.to(dtype), test_x=dataset.test_x.to(dtype))
    data = federate(
        dataset,
        partition=spec.partition,
        clients=spec.clients,
        alpha=spec.alpha,
        seed=spec.seed,
        holdout=spec.holdout,
        public=spec.public,
        partition_file=spec.partition_file,
    )
    shape = tuple(dataset.x.shape[1:])
    model = load_model(recipe.model.name, shape, dataset.classes, dtype=dtype, **recipe.model.options)
    initial = model.init(Address(recipe.seed, "init").seed_for("server"))
    return World(recipe, data, model, recipe.train.training(), initial, recipe.build_method())
