# SPDX-License-Identifier: Apache-2.0
"""The same federation in other frameworks, where they are installed: the extra `bench`.

Each trains the benchmark's own network on the same clients with the same batch size, rate and epochs, in the
framework's own simulation; what it does about rounds, messages and data is its own affair.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from fedquit.bench.settings import Setting, Way
from fedquit.core import Params
from fedquit.errors import InputError


@dataclass(frozen=True)
class Peer:
    """A framework: the package to look for, and how to build its federation."""

    package: str
    build: Callable[[Setting], Way]
    distribution: str  # its name on the index

    @property
    def title(self) -> str:
        """With its version."""
        return f"{self.distribution} {version(self.distribution)}"


@contextlib.contextmanager
def fastest_threads(setting: Setting) -> Iterator[None]:
    """As many as the plain loop is fastest with."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    yield
    torch.set_num_threads(before)


def require(peer: Peer) -> None:
    """Refuse a framework that is not there."""
    if importlib.util.find_spec(peer.package) is None:
        raise InputError(f"{peer.package} is not installed: pip install 'fedquit[bench]', or leave it out of --peers.")


def _loss(module: torch.nn.Module, dataset: Any, at: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    from fedquit.bench.settings import training_inputs

    return functional.cross_entropy(module(training_inputs(dataset, at)), dataset.y[at])


class Flower:
    """Flower's simulation (Ray): every client is an actor's task, parameters travel as records."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.params = setting, setting.start

    def rounds(self, count: int) -> list[float]:
        """So many rounds on; the seconds are those between the server's rounds, once every actor has been at work."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import Grid, ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation

        setting, start, stamps, last = self.setting, self.params, list[float](), dict[str, torch.Tensor]()
        client, server = ClientApp(), ServerApp()
        build, data, local = setting.model.build, setting.data, setting.local

        @client.train()
        def train(message: Message, context: Any) -> Message:  # noqa: ANN401
            torch.set_num_threads(1)  # an actor for each core
            module = build()
            module.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
            mine = data.train[int(context.node_config["partition-id"])]
            starting = message.content["config"]["server-round"] == 1  # the actors start: nobody steps
            optimizer = torch.optim.SGD(module.parameters(), local.lr)
            for at in () if starting else mine[torch.randperm(len(mine))].split(local.batch_size):
                optimizer.zero_grad()
                _loss(module, data.dataset, at).backward()
                optimizer.step()
            metrics = MetricRecord({"num-examples": len(mine)})
            content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
            return Message(content=content, reply_to=message)

        def stamp(number: int, arrays: ArrayRecord) -> MetricRecord:
            stamps.append(time.perf_counter())
            last.update(arrays.to_torch_state_dict())
            return MetricRecord({"round": number})

        @server.main()
        def main(grid: Grid, context: Any) -> None:  # noqa: ANN401
            clients = len(data.train)
            strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients,
                              min_available_nodes=clients)  # fmt: skip
            strategy.start(
                grid, ArrayRecord(start), num_rounds=count + 1, train_config=ConfigRecord(), evaluate_fn=stamp
            )

        logging.getLogger("flwr").setLevel(logging.ERROR)
        backend = {"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}}
        run_simulation(server, client, num_supernodes=len(data.train), backend_config=backend)  # type: ignore[arg-type]
        self.params = dict(last)
        return [b - a for a, b in pairwise(stamps[1:])]


class Pfl:
    """Apple's pfl: a simulated backend in one process, a model that knows its loss."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.module = setting, _with_loss(setting)

    @property
    def params(self) -> Params:
        """Where it stands."""
        return {n: p.detach().clone() for n, p in self.module.inner.named_parameters()}

    def rounds(self, count: int) -> list[float]:
        """So many rounds on."""
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
        from pfl.callback.base import TrainingProcessCallback
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        setting, stamps = self.setting, [time.perf_counter()]
        data, local = setting.data, setting.local

        class Stamp(TrainingProcessCallback):  # type: ignore[misc]
            def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Any]:
                from pfl.metrics import Metrics

                stamps.append(time.perf_counter())
                return False, Metrics()

        def user(client: int) -> Dataset:
            mine = data.train[client][torch.randperm(len(data.train[client]))]
            return Dataset(raw_data=[data.x[mine], data.y[mine]], user_id=str(client))

        clients = list(data.clients)
        federated = FederatedDataset(user, get_user_sampler("minimize_reuse", clients))
        model = PyTorchModel(
            self.module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.module.parameters(), 1.0),
        )
        settings = NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=1_000_000,
            train_cohort_size=len(clients),
            val_cohort_size=0,
        )
        steps = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=local.lr, local_batch_size=local.batch_size)
        backend = SimulatedBackend(training_data=federated, val_data=None)
        with fastest_threads(self.setting), contextlib.redirect_stdout(io.StringIO()):  # it prints what it measures
            FederatedAveraging().run(
                algorithm_params=settings,
                backend=backend,
                model=model,
                model_train_params=steps,
                model_eval_params=None,
                callbacks=[Stamp()],
            )
        return [b - a for a, b in pairwise(stamps)]


class Fluke:
    """fluke: clients and a server as objects, parameters passed between them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.federation: Any = _fluke(setting)

    @property
    def params(self) -> Params:
        """Where it stands."""
        return {n: p.detach().clone() for n, p in self.federation.server.model.named_parameters()}

    def rounds(self, count: int) -> list[float]:
        """So many rounds on."""
        took = []
        for _ in range(count):
            began = time.perf_counter()
            with fastest_threads(self.setting), contextlib.redirect_stdout(io.StringIO()):
                self.federation.run(n_rounds=1, eligible_perc=1.0)
            took.append(time.perf_counter() - began)
        return took


def _with_loss(setting: Setting) -> Any:  # noqa: ANN401 - pfl's protocol is made of names
    from fedquit.bench.settings import varied

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = setting.model.build()
            self.inner.load_state_dict(setting.start)

        def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
            return functional.cross_entropy(self.inner(varied(setting.data.dataset.look, x)), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            return {}

    return Net()


def _fluke(setting: Setting) -> Any:  # noqa: ANN401
    _declare_missing_operators()
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

    from fedquit.bench.settings import varied

    data, look, local = setting.data, setting.data.dataset.look, setting.local
    loaders = [
        FastDataLoader(
            data.x[mine],
            data.y[mine],
            num_labels=data.dataset.classes,
            batch_size=local.batch_size,
            shuffle=True,
            skip_singleton=False,
            transforms=lambda x: varied(look, x),
        )
        for mine in data.train.values()
    ]
    everyone = DummyDataContainer(loaders, [None] * len(loaders), None, data.dataset.classes)
    FlukeENV().set_seed(0)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False, eval_every=1)
    module = setting.model.build()
    module.load_state_dict(setting.start)
    client = {
        "batch_size": local.batch_size,
        "local_epochs": 1,
        "loss": torch.nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": local.lr},
        "scheduler": {"name": "StepLR", "gamma": 1.0, "step_size": 1},
    }
    settings = {"client": client, "server": {"weighted": True}, "model": module}
    return FedAVG(len(loaders), DataSplitter(everyone, distribution="iid"), settings)


def _declare_missing_operators() -> None:
    """Torchvision from the index expects two operators of a GPU build when it is imported: their names are enough."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            library.define(name)
        except RuntimeError:  # it is there
            continue
    _DECLARED.append(library)  # an operator lives as long as its library


_DECLARED: list[Any] = []


PEERS: dict[str, Peer] = {
    "flower": Peer("flwr", Flower, "flwr"),
    "pfl": Peer("pfl", Pfl, "pfl"),
    "fluke": Peer("fluke", Fluke, "fluke-fl"),
}
