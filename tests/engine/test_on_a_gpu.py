# SPDX-License-Identifier: Apache-2.0
"""General networks on a GPU: captured steps, compiled and not, are the sequential engine's on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedquit.bench.settings import cifar
from fedquit.core import Local
from fedquit.core.fedavg import Learn
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import Address, Ask, SequentialEngine
from fedquit.engine.stacked.compiled import Compile
from fedquit.models import FunctionalModel, load_model
from general_networks import NETWORKS, SIZES, apart
from gpu import GPU_MARKS, gpu_engine, gpu_replies

pytestmark = [*GPU_MARKS]
EXACT = 1e-12  # of the largest parameter
LOCAL = Local(batch_size=4, lr=0.05)


@pytest.mark.parametrize(
    ("name", "compile"),
    [*((name, "never") for name in NETWORKS), *((name, "always") for name in ("mit", "batch_norm", "bert"))],
)
def test_a_gpu_computes_what_the_sequential_engine_does(name: str, compile: Compile) -> None:
    """In float64, two rounds with clients of several lengths."""
    model, data = NETWORKS[name]()
    engine = gpu_engine(model, data, compile=compile)
    start = model.init(3)
    for number in range(2):
        ask = Ask(Learn(LOCAL), tuple(range(len(SIZES))), "all", {"start": start}, Address(2, "train", number))
        expected = list(SequentialEngine(model, data, {}).run(ask))
        found = gpu_replies(engine, ask)
        (steps,) = engine.graphs.captured.values()
        assert (steps.compiled is not None) == (compile == "always"), f"{name}, {compile}: {steps.why}"
        gaps = [apart(reply.params, wanted.params) for reply, wanted in zip(found, expected, strict=True)]
        losses = [abs(reply.loss / wanted.loss - 1) for reply, wanted in zip(found, expected, strict=True)]
        told = f"{name}, {compile}, round {number}: parameters {max(gaps):.1e} apart, losses {max(losses):.1e}"
        assert max(gaps) <= EXACT, told
        assert max(losses) <= 1e-11, told
        start = expected[0].params


class Halved(nn.Module):
    """Makes a tensor of a number in its forward pass, which a CUDA graph cannot copy to the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x)) * torch.tensor(0.5, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("compile", ["never", "always"])
def test_a_network_that_copies_from_the_host_is_trained_all_the_same(compile: Compile) -> None:
    """Compiled, the number is a constant; else steps are not captured. Both in two rounds, and then another network."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 6, generator=draw, dtype=torch.float64), torch.arange(20) % 3
    data = FederatedData(Dataset(x, y, x[:2], y[:2], 3), dict(enumerate(torch.arange(20).split([12, 8]))))
    model = FunctionalModel(Halved, torch.float64)
    engine = gpu_engine(model, data, compile=compile)
    for number in range(2):
        ask = Ask(Learn(LOCAL), (0, 1), "all", {"start": model.init(3)}, Address(2, "train", number))
        expected = list(SequentialEngine(model, data, {}).run(ask))
        for reply, wanted in zip(gpu_replies(engine, ask), expected, strict=True):
            assert apart(reply.params, wanted.params) <= EXACT
    (steps,) = engine.graphs.captured.values()
    assert bool(steps.why_eager) == (compile == "never"), steps.why_eager
    test_a_gpu_computes_what_the_sequential_engine_does("batch_norm", "never")


def test_resnet_18_is_by_default_what_it_was_to_the_last_bit() -> None:
    """In a training that is long enough for a compiler: its kernels cover it, and nothing else is done differently."""
    setting = cifar(torch.device("cpu"), 2)
    ask = Ask(Learn(setting.local), setting.data.clients, "all", {"start": setting.start}, Address(2, "train"))
    plain = gpu_engine(setting.model, setting.data, precision="bf16", rounds=10**6, compile="never")
    by_default = gpu_engine(setting.model, setting.data, precision="bf16", rounds=10**6)
    for one, other in zip(gpu_replies(plain, ask), gpu_replies(by_default, ask), strict=True):
        assert all(torch.equal(one.params[n], other.params[n]) for n in one.params)
    (steps,) = by_default.graphs.captured.values()
    assert steps.why == "kernels cover the network"


def test_a_compiled_step_repeats_on_a_gpu() -> None:
    """To the last bit, though all positions add to one row of an embedding."""
    model, data = NETWORKS["bert"]()
    ask = Ask(Learn(LOCAL), tuple(range(len(SIZES))), "all", {"start": model.init(3)}, Address(2, "train"))
    engines = [gpu_engine(model, data, compile="always") for _ in range(2)]
    first, *others = [gpu_replies(engine, ask) for engine in (*engines, engines[0], engines[0])]
    for other in others:
        assert all(torch.equal(a.params[n], b.params[n]) for a, b in zip(first, other, strict=True) for n in a.params)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("compile", ["never", "always"])
def test_bfloat16_is_near_float32(optimizer: str, compile: Compile) -> None:
    """A GPT with the optimizer's kernel, to a stated tolerance."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 64, (40, 16), generator=draw)
    parts = dict(enumerate(torch.arange(40).split([16, 8, 16])))
    data = FederatedData(Dataset(x, x.roll(-1, 1), x[:2], x[:2], 64), parts)
    sizes: dict[str, Any] = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }
    model = load_model("huggingface", (16,), 64, architecture="gpt2", attn_pdrop=0.0, **sizes)
    local = Local(batch_size=8, lr=0.1 if optimizer == "sgd" else 1e-3, optimizer=optimizer, weight_decay=0.01)
    ask = Ask(Learn(local), (0, 1, 2), "all", {"start": model.init(3)}, Address(2, "train"))
    expected = list(SequentialEngine(model, data, {}).run(ask))
    engine = gpu_engine(model, data, compile=compile, precision="bf16")
    for reply, wanted in zip(gpu_replies(engine, ask), expected, strict=True):
        moved = {n: p - ask.sent["start"][n] for n, p in wanted.params.items()}
        found = {n: p - ask.sent["start"][n] for n, p in reply.params.items()}
        norm = torch.cat([m.flatten() for m in moved.values()]).norm()
        gap = torch.cat([(found[n] - m).flatten() for n, m in moved.items()]).norm()
        assert gap < 0.25 * norm, f"{gap / norm:.3f} of the way that float32 went"
        assert reply.loss == pytest.approx(wanted.loss, rel=0.02)
    again = gpu_replies(gpu_engine(model, data, compile=compile, precision="bf16"), replace(ask))
    first = gpu_replies(engine, ask)
    assert all(torch.equal(a.params[n], b.params[n]) for a, b in zip(again, first, strict=True) for n in a.params)
