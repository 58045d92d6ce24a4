# SPDX-License-Identifier: Apache-2.0
"""The setup of a recipe: its data, divided among clients, its network, training and engine."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedquit.audit.canaries import Canaries, plant_canaries
from fedquit.audit.metrics.backdoor import Trigger
from fedquit.audit.passes import Passes
from fedquit.audit.poison import plant, trigger_for
from fedquit.core import Memory, Model, Params, Training
from fedquit.core.local_layers import shared_part
from fedquit.core.method import Method, require_covered
from fedquit.core.params import fingerprint, placed
from fedquit.data import federate, load_dataset
from fedquit.data.federated import Dataset, FederatedData
from fedquit.distill.batches import are_probabilities
from fedquit.distill.virtual_teacher import check_labels
from fedquit.engine import Address, Choice, Engine, GraphCache, Precision, choose, evaluation_model_of, open_engine
from fedquit.engine.local_layers import first_layers
from fedquit.errors import InputError
from fedquit.models import FunctionalModel, load_model
from fedquit.running.flops import Flops, Shape
from fedquit.running.in_memory import given_data, given_model, is_in_memory
from fedquit.running.recipe import ModelRecipe, Recipe
from fedquit.utils.names import source_of

PROBED = 4  # examples on which two networks of the same layers are told apart


@dataclass(frozen=True)
class Setup:
    """A recipe's data, network and training, ready to use.

    Attributes:
        recipe: the recipe.
        data: its data, divided among clients, on the device.
        model: its network.
        training: its ordinary training.
        initial: the network's first parameters that travel, on the device.
        method: its unlearning method.
        flops: counts floating-point operations, and remembers the counts.
        trigger: the backdoor in the leaving clients' data, where the recipe asks for one.
        canaries: those in the leaving clients' data, where the recipe asks for the one-run audit.
        graphs: captured steps, shared by the engines of this setup.
    """

    recipe: Recipe
    data: FederatedData
    model: FunctionalModel
    training: Training
    initial: Params
    method: Method
    flops: Flops  # remembers what it has counted
    trigger: Trigger | None = None  # the backdoor in the leaving clients' data, where the recipe asks for one
    canaries: Canaries | None = None
    graphs: GraphCache = field(default_factory=GraphCache, repr=False, compare=False)  # shared by its engines
    passes: Passes = field(default_factory=Passes, repr=False, compare=False)  # what the evaluation has computed

    def fingerprint(self) -> str:
        """Return a hash of what a recipe only names: data, network and first parameters."""
        data = self.data.dataset
        parts = {"test_x": data.test_x, "test_y": data.test_y}
        parts |= {f"holdout {c}": h for c, h in self.data.holdout.items()}
        words = [self.data.fingerprint(), fingerprint(parts), self.network]
        return hashlib.blake2b("".join(words).encode(), digest_size=16).hexdigest()

    @property
    def network(self) -> str:
        """A hash of the network: layers, first parameters, and a user's own source code.

        A network that was given as an object may have no source: what it computes is in the hash, too.
        """
        words = [self.model.signature(), fingerprint(self.initial), source_of(self.recipe.model.name)]
        words += [self._behaviour] if is_in_memory(self.recipe.model.name) else []
        return hashlib.blake2b("".join(words).encode(), digest_size=16).hexdigest()

    @cached_property
    def _behaviour(self) -> str:
        return self.model.behaviour(self.data.dataset.x[:PROBED])

    def with_recipe(self, recipe: Recipe) -> Setup:
        """Return the setup of another recipe; on the same data and network it shares them, and the captured steps."""
        if not _on_same_data(self.recipe, recipe):
            return build_setup(recipe)
        initial = self.initial
        if recipe.seed != self.recipe.seed:
            whole = self.model.init(Address(recipe.seed, "init").seed_for("server"))
            initial = placed(shared_part(self.model, whole), self.device)
        training = recipe.train.training()
        require_covered(recipe.build_method(), self.model, initial | first_layers(self.model, recipe.seed))
        return dataclasses.replace(
            self, recipe=recipe, training=training, initial=initial, method=recipe.build_method()
        )

    def engine(self, data: FederatedData, homes: Memory) -> Engine:
        """Open the engine that the recipe names.

        Args:
            data: the clients' data.
            homes: the clients' own memories.
        """
        spec = self.recipe.engine
        name = self.chosen.name
        options = self.precision, spec.width, self.graphs, spec.compile, self.recipe.train.rounds
        return open_engine(name, self.model, data, homes, *options)

    @cached_property
    def chosen(self) -> Choice:
        """The engine, chosen once where the recipe leaves it open."""
        whole = self.initial | placed(first_layers(self.model, self.recipe.seed), self.device)
        return choose(self.recipe.engine.name, self.model, self.data, whole)

    @property
    def evaluation_model(self) -> Model:
        """The network as the evaluation runs it."""
        return evaluation_model_of(self.model, self.precision, self.device)

    @property
    def device(self) -> torch.device:
        """The device that holds the data and does the work."""
        return self.data.y.device

    @property
    def precision(self) -> Precision:
        """The precision in which the network computes."""
        spec = self.recipe.engine.precision
        if self.model.dtype != torch.float32:
            return "float32"
        if spec != "auto":
            return spec
        return "bf16" if self.device.type == "cuda" else "float32"


def build_setup(recipe: Recipe) -> Setup:
    """Load a recipe's data, divide it among clients, and build the network.

    Raises:
        InputError: if the data is absent, or the network does not fit it.
    """
    spec = recipe.data
    dtype = getattr(torch, recipe.model.dtype)
    given = given_data(spec.name)
    dataset = given.dataset if given else load_dataset(spec.name, folder=spec.folder or None, **spec.options)
    if dataset.x.is_floating_point():
        dataset = dataclasses.replace(dataset, x=dataset.x.to(dtype), test_x=dataset.test_x.to(dtype))
    device = chosen_device(recipe.engine.device)
    data = federate(
        dataset,
        partition=spec.partition,
        clients=spec.clients,
        alpha=spec.alpha,
        seed=spec.seed,
        holdout=spec.holdout,
        holdout_by_class=spec.holdout_by_class,
        public=spec.public,
        partition_file=spec.partition_file,
        parts=given.parts if given else None,
    )
    trigger = None
    evaluate = recipe.evaluate
    if evaluate.backdoor:
        trigger = trigger_for(dataset, evaluate.backdoor_target, evaluate.backdoor_size)
        data = plant(data, recipe.request[0].clients, evaluate.backdoor, trigger, spec.seed)
    data, canaries = _with_canaries(recipe, data)
    model = _network(recipe.model, dataset, dtype)
    initial = model.init(Address(recipe.seed, "init").seed_for("server"))
    _probe(model, initial, dataset)
    model.settle(dataset.x[:2])  # refuses at once what could not be trained
    data = dataclasses.replace(data, dataset=data.dataset.to(device))
    require_covered(recipe.build_method(), model, initial)
    initial = placed(shared_part(model, initial), device)
    flops = Flops(model, Shape.of(dataset.x, dataset.y), len(data.public))
    training = recipe.train.training()
    return Setup(recipe, data, model, training, initial, recipe.build_method(), flops, trigger, canaries)


def _network(spec: ModelRecipe, dataset: Dataset, dtype: torch.dtype) -> FunctionalModel:
    given = given_model(spec.name)
    if given:
        return FunctionalModel(given.build, dtype, dataset.look, spec.batchnorm)
    return load_model(
        spec.name,
        dataset.shape,
        dataset.classes,
        dtype=dtype,
        look=dataset.look,
        batchnorm=spec.batchnorm,
        **spec.options,
    )


def _on_same_data(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes have the same data, network and engine, and nothing planted for a request."""
    planted = any(recipe.evaluate.backdoor or recipe.audit.canaries for recipe in (one, other))
    return not planted and (one.data, one.model, one.engine) == (other.data, other.model, other.engine)


def _with_canaries(recipe: Recipe, data: FederatedData) -> tuple[FederatedData, Canaries | None]:
    """The data with the canaries that the recipe asks for; each client's coins have an address of their own."""
    spec = recipe.audit
    if not spec.canaries:
        return data, None
    clients = recipe.request[0].clients
    seeds = {client: Address(recipe.seed, "canaries").seed_for(client) for client in clients}
    planted, sets = plant_canaries(data, seeds, spec.canaries, spec.kinds)
    return planted, Canaries(clients, sets, spec.k * len(clients), spec.delta)


def chosen_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is a GPU where there is one.

    Raises:
        InputError: if this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"there is no device {name!r} here: set engine.device to cpu, or leave it out.") from error
    return torch.zeros(1, device=device).device


def _probe(model: Model, initial: Params, dataset: Dataset) -> None:
    """Run the network on one example, to refuse at once one that does not fit the data."""
    x, y = dataset.x[:1], dataset.y[:1]
    try:
        logits = model(initial, x)
    except (RuntimeError, TypeError, IndexError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"the model cannot take examples of shape {tuple(x.shape[1:])} ({reason}): "
            "let its forward take examples of this shape and type, or change the data."
        ) from error
    check_labels(y, logits)
    if are_probabilities(logits):
        raise InputError("the model returns probabilities where logits are needed: leave its last softmax out.")
    if logits.shape[-1] != dataset.classes:
        raise InputError(
            f"the model gives {logits.shape[-1]} logits and the data has {dataset.classes} classes: make them equal."
        )
