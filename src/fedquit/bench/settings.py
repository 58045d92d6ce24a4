# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of engines work on: two federations, and a plain loop that trains them without this package."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from fedquit.audit.evaluation import accuracy
from fedquit.core import Local, Params
from fedquit.core.fedavg import Learn
from fedquit.core.params import mean, placed
from fedquit.data import federate, load_dataset
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.preprocessing import Look, Pixels
from fedquit.engine import Address, Ask, Compile, Precision, evaluation_model_of, open_engine
from fedquit.models import FunctionalModel, load_model

RAGGED = (5972, 4756, 5155, 5978, 6514, 4617, 4231, 5052, 2893, 4799)  # CIFAR-100 by LDA: as clients really are
CPU = torch.device("cpu")
ROUND_LIMIT, FIRST_LIMIT = 1.2, 40.0  # seconds for the ResNet-18 on a GPU
FEW = 2  # clients that a part of the work is measured on: a whole round takes a CPU a quarter of an hour
CIFAR = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), vary="rotate-pad-crop-flip")


TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


# The classes and the options of `fedquit.models.huggingface`.
TOKEN_NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (
        8192,
        {"architecture": "gpt2", "n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 128}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "bert": (
        20,
        {"architecture": "bert", "head": "classes", "vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536}
        | {"num_hidden_layers": 6, "num_attention_heads": 6, "max_position_embeddings": 128},
    ),
}


@dataclass(frozen=True)
class Setting:
    """A federation, a network and how clients step; `whole` says how much larger the real thing is."""

    title: str
    data: FederatedData
    model: FunctionalModel
    start: Params
    local: Local
    whole: float = 1.0  # a round of the real setting takes so many times the steps
    note: str = ""
    threads: int = 1  # with which a loop over its clients is fastest
    limit: float | None = None  # seconds that a round of the auto engine may take
    first_limit: float | None = None  # and the first one, with all that is compiled and recorded once

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.data.y.device

    def accuracy(self, params: Params) -> float:
        """On the test set, in percent."""
        dataset = self.data.dataset
        return accuracy(evaluation_model_of(self.model, "float32", self.device), params, dataset.test_x, dataset.test_y)


def digits(device: torch.device = CPU) -> Setting:
    """Ten clients with 143 or 144 digits of 8x8 pixels, a CNN of 6,186 parameters, one epoch in batches of 32."""
    dataset = load_dataset("digits")
    model = load_model("cnn", dataset.shape, dataset.classes)
    data = federate(dataset, partition="iid", clients=10)
    data, start = replace(data, dataset=dataset.to(device)), placed(model.init(0), device)
    return Setting("10 clients x 143 digits, CNN of 6,186 parameters", data, model, start, Local(lr=0.1))


def cifar(device: torch.device, steps: int = 0, *, classes: int = 100, model: str = "resnet18") -> Setting:
    """Ten ragged clients with images of 3x32x32 as bytes, augmented; `steps` of some clients, or all of an epoch."""
    local = Local(lr=0.05)
    sizes = [steps * local.batch_size] * FEW if steps else list(RAGGED)
    dataset = noisy(sum(sizes), classes).to(device)
    data = FederatedData(dataset, dict(enumerate(torch.arange(sum(sizes)).split(sizes))))
    network = load_model(model, dataset.shape, classes, look=dataset.look)
    whole = sum(-(-n // local.batch_size) for n in RAGGED) / (steps * FEW) if steps else 1.0
    note = f"scaled from {steps} steps of each of {FEW} clients" if steps else ""
    start, title = placed(network.init(0), device), "10 ragged clients x 5,000 images, ResNet-18, augmented"
    limits = (ROUND_LIMIT, FIRST_LIMIT) if device.type == "cuda" else (None, None)
    return Setting(title, data, network, start, local, whole, note, torch.get_num_threads(), *limits)


def transformer(device: torch.device, steps: int = 10, *, clients: int = 10, size: int = 224) -> Setting:
    """The paper's MiT-B0: such images read at 224 pixels a side, AdamW; some steps of each of ten clients."""
    local = Local(lr=3e-4, optimizer="adamw")
    sizes = [steps * local.batch_size] * clients
    dataset = noisy(sum(sizes), 100).to(device)
    dataset = replace(dataset, look=replace(CIFAR, size=size, vary="enlarge-crop-flip"))
    data = FederatedData(dataset, dict(enumerate(torch.arange(sum(sizes)).split(sizes))))
    model = load_model("mit_b0", dataset.shape, 100, look=dataset.look)
    whole = sum(-(-n // local.batch_size) for n in RAGGED) / (steps * clients)
    title = f"10 ragged clients x 5,000 images read at {size} pixels, MiT-B0, AdamW"
    note = f"scaled from {steps} steps of each of {clients} clients"
    return Setting(title, data, model, placed(model.init(0), device), local, whole, note)


def tokens(
    device: torch.device, steps: int = 10, *, kind: str = "gpt", clients: int = 10, length: int = 128
) -> Setting:
    """A language model (`gpt`, 13.9 million parameters) or a classifier of texts (`bert`, 22.6 million, with dropout).

    Some steps of each of ten clients with 1,000 texts of 128 tokens, in batches of 8, AdamW.
    """
    local = Local(lr=3e-4, batch_size=8, optimizer="adamw")
    classes, options = TOKEN_NETWORKS[kind]
    draw = torch.Generator().manual_seed(0)
    count = steps * local.batch_size * clients
    starts = torch.randint(1, 1000, (count + 50, 1), generator=draw)
    x = (starts + 7 * torch.arange(length + 1)) % 1000 + 1  # a text that can be learned
    y = x[:, 1:] if kind == "gpt" else starts[:, 0] % classes
    dataset = Dataset(x[:-50, :-1], y[:-50], x[-50:, :-1], y[-50:], classes).to(device)
    data = FederatedData(dataset, dict(enumerate(torch.arange(count).split(steps * local.batch_size))))
    model = load_model("huggingface", dataset.shape, classes, **options)
    start = placed(model.init(0), device)
    millions = sum(p.numel() for p in start.values()) / 1e6
    network = f"{kind.upper()} of {millions:.1f} million parameters"
    title = f"{clients} clients x 1,000 texts of {length} tokens, {network}, AdamW"
    note = f"scaled from {steps} steps of each of {clients} clients"
    return Setting(title, data, model, start, local, 125 / steps, note)


def text(device: torch.device, *, clients: int = 8, windows: int = 156, length: int = 80, letters: int = 65) -> Setting:
    """A round of the paper's Tiny-Shakespeare: eight clients with windows of 80 letters, the next letter to be told."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(letters, (clients * windows + 50, 1), generator=draw)
    x = (starts + 7 * torch.arange(length + 1)) % letters  # a text that can be learned
    dataset = Dataset(x[:-50, :-1], x[:-50, 1:], x[-50:, :-1], x[-50:, 1:], letters).to(device)
    data = FederatedData(dataset, dict(enumerate(torch.arange(clients * windows).split(windows))))
    model = load_model("char_lstm", dataset.shape, letters)
    local = Local(batch_size=4, lr=5.0, clip=5.0)  # by the fifth round all ways tell nearly every letter
    title = f"{clients} clients x {windows} windows of {length} letters, character LSTM"
    return Setting(title, data, model, placed(model.init(0), device), local)


def noisy(examples: int, classes: int, test: int = 1_000) -> Dataset:
    """Bytes that can be learned: a picture for each class, under noise."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randint(64, 192, (classes, 3, 8, 8), generator=draw).float()
    pictures = functional.interpolate(pictures, (32, 32), mode="bilinear")
    y = torch.randint(classes, (examples + test,), generator=draw)
    x = torch.empty(examples + test, 3, 32, 32, dtype=torch.uint8)
    for part in torch.arange(len(y)).split(4_096):
        x[part] = (pictures[y[part]] + 20 * torch.randn(len(part), 3, 32, 32, generator=draw)).clamp(0, 255).byte()
    return Dataset(x[:examples], y[:examples], x[examples:], y[examples:], classes, CIFAR)


class Way(Protocol):
    """One way to train a federation."""

    @property
    def params(self) -> Params:
        """Where it stands."""

    def rounds(self, count: int) -> list[float]:
        """So many rounds on, and the seconds that each took."""


@dataclass
class Timed:
    """A way that is a function from parameters and the number of a round to parameters."""

    setting: Setting
    step: Callable[[Params, int], Params]
    threads: int
    params: Params = field(init=False)
    done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.params = self.setting.start

    def rounds(self, count: int) -> list[float]:
        """So many rounds on."""
        before = torch.get_num_threads()
        took = []
        torch.set_num_threads(self.threads)
        for _ in range(count):
            began = time.perf_counter()
            self.params = self.step(self.params, self.done)
            if self.setting.device.type == "cuda":
                torch.cuda.synchronize(self.setting.device)
            took.append(time.perf_counter() - began)
            self.done += 1
        torch.set_num_threads(before)
        return took


def plain(setting: Setting, threads: int, *, bf16: bool = False) -> Timed:
    """How anybody would write it: a module, an optimizer, and one client after the other; `bf16` under autocast."""
    training = setting.model._training
    module = copy.deepcopy(setting.model._module if training is None else training)

    def step(params: Params, number: int) -> Params:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=bf16):
            return plain_round(setting, module, params)

    return Timed(setting, step, threads)


def plain_round(setting: Setting, module: nn.Module, params: Params) -> Params:
    """One round of FedAvg, without this package."""
    data, local, total, weight = setting.data, setting.local, dict[str, torch.Tensor](), 0
    own = dict(module.to(setting.device).named_parameters())
    for mine in data.train.values():
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(params[name])
        optimizer = TORCHS[local.optimizer](own.values(), local.lr)
        for at in mine[torch.randperm(len(mine))].to(setting.device).split(local.batch_size):
            optimizer.zero_grad()
            out = module(training_inputs(data.dataset, at))
            logits = getattr(out, "logits", out)  # transformers wrap them
            functional.cross_entropy(logits.flatten(0, -2), data.y[at].flatten()).backward()
            if local.clip:
                nn.utils.clip_grad_norm_(own.values(), local.clip)
            optimizer.step()
        for name, p in own.items():
            total[name] = total.get(name, 0) + len(mine) * p.detach()
        weight += len(mine)
    return {name: p / weight for name, p in total.items()}


def training_inputs(dataset: Dataset, at: torch.Tensor) -> torch.Tensor:
    """Examples as a network reads them in training, with torch's own random numbers."""
    return varied(dataset.look, dataset.x[at])


def varied(look: Look, x: torch.Tensor) -> torch.Tensor:
    """Augmented where the data is."""
    return look.varied(x, torch.rand(len(x), look.draws, device=x.device)) if look.draws else look.plain(x)


def engine(
    setting: Setting, name: str, threads: int, precision: Precision = "float32", compile: Compile = "never"
) -> Timed:
    """One of our own."""
    torch.set_num_threads(threads)  # `auto` asks how many there are
    runs = open_engine(name, setting.model, setting.data, {}, precision, compile=compile)

    def step(params: Params, number: int) -> Params:
        ask = Ask(Learn(setting.local), setting.data.clients, "all", {"start": params}, Address(0, "train", number))
        return mean(runs.run(ask))

    return Timed(setting, step, threads)


def chosen_setting(device: torch.device, steps: int = 0) -> Setting:
    """The ResNet setting on that device: all of it on a GPU, some steps of it on a CPU."""
    return cifar(device, steps if device.type == "cpu" else 0)
