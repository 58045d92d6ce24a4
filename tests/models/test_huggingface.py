# SPDX-License-Identifier: Apache-2.0
"""Networks of transformers: what they compute is what transformers computes; LoRA trains adapters alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from fedquit.core import Local, Params, Reply, Task
from fedquit.core.fedavg import Learn
from fedquit.core.params import nbytes
from fedquit.core.projection import Projection
from fedquit.data.federated import Dataset, FederatedData
from fedquit.distill.losses import distillation_loss
from fedquit.engine import Address, Ask, SequentialEngine, StackedEngine, ThreadedEngine
from fedquit.errors import InputError, UnknownNameError
from fedquit.methods.fedquit import Distill
from fedquit.models import FunctionalModel, load_model
from fedquit.running.params_file import save_params
from gpu import GPU_MARKS, gpu_engine, gpu_replies

T, V = 7, 23
# Of how far training moves. Llama computes its norms, its softmax and the angles of its positions in float32, whatever
# its own precision. Engines on a CPU round them alike, a GPU does not: one unit in the last place of each, put there on
# a CPU, moved the results of these tests by up to 6.4e-7 of the way.
FLOAT32 = 5e-6
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16},
    "llama": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2},
    "bert": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2},
}
MODERN = {**SMALL["llama"], "num_key_value_heads": 1, "num_hidden_layers": 1}
AFTER_THE_HEAD: dict[str, dict[str, Any]] = {  # what these do to the head's output
    "gemma2": {**MODERN, "head_dim": 4, "query_pre_attn_scalar": 4, "final_logit_softcapping": 0.05},
    "granite": {**MODERN, "logits_scaling": 8.0},
    "cohere": {**MODERN, "logit_scale": 0.0625},
}
ENCODER = {"head": "classes", "vocab_size": V, "max_position_embeddings": 16}


def small(architecture: str, **options: Any) -> FunctionalModel:
    if architecture == "bert":
        options = {**ENCODER, **options}
    classes = 3 if architecture == "bert" else V
    sizes = {**SMALL, **AFTER_THE_HEAD}[architecture]
    return load_model(
        "huggingface", (T,), classes, dtype=torch.float64, architecture=architecture, **{**sizes, **options}
    )


def texts(architecture: str) -> FederatedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, V, (18, T), generator=generator)
    x[::3, -2:] = 0  # filled up
    y = torch.randint(3, (18,), generator=generator) if architecture == "bert" else x.roll(-1, 1)
    parts = dict(enumerate(torch.arange(18).split([7, 3, 8])))
    return FederatedData(Dataset(x, y, x[:2], y[:2], 3 if architecture == "bert" else V), parts)


def network_of(model: FunctionalModel) -> Any:
    return model.build().network


@pytest.mark.parametrize("architecture", [*SMALL, *AFTER_THE_HEAD])
def test_a_call_is_what_transformers_computes_with_its_own_mask(architecture: str) -> None:
    model = small(architecture, pad=0)
    params = model.init(4)
    x = texts(architecture).x[:4]
    torch.manual_seed(4)
    network = network_of(model).double().eval()
    network.load_state_dict({n.removeprefix("network."): p for n, p in params.items()}, strict=False)
    network.tie_weights()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = network(input_ids=x, attention_mask=(x != 0).long()).logits
    read = x != 0 if architecture != "bert" else torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(model(params, x)[read], expected[read], rtol=1e-6, atol=1e-7)


ENGINES: dict[str, Callable[[FunctionalModel, FederatedData, Ask], Iterable[Reply]]] = {
    "stacked": lambda model, data, ask: StackedEngine(model, data, {}).run(ask),
    "threaded": lambda model, data, ask: ThreadedEngine(model, data, {}, 2).run(ask),
    "cuda": lambda model, data, ask: gpu_replies(gpu_engine(model, data), ask),
}


@pytest.mark.parametrize("engine", ["stacked", "threaded", pytest.param("cuda", marks=GPU_MARKS)])
@pytest.mark.parametrize("lora", [{}, {"lora": 2}, {"lora": 2, "lora_mode": "freeze_a"}], ids=["all", "ab", "b"])
@pytest.mark.parametrize("architecture", SMALL)
def test_engines_agree(architecture: str, lora: dict[str, Any], engine: str) -> None:
    """In training, with the dropout of GPT-2 and BERT, and in unlearning, by the chunked loss where it is causal."""
    if lora:
        pytest.importorskip("peft", reason="needs the extra `peft`")
    model, data = small(architecture, pad=0, **lora), texts(architecture)
    model.settle(data.x)
    assert (model.training is not None) == (architecture != "llama")
    start = model.init(3)
    tasks: tuple[Task, ...] = (Learn(Local(batch_size=3, lr=0.3)), Distill(Local(batch_size=3, lr=0.3)))
    for task in tasks:
        ask = Ask(task, (0, 1, 2), "all", {"start": start}, Address(1, "train"))
        expected = list(SequentialEngine(model, data, {}).run(ask))
        for reply, wanted in zip(ENGINES[engine](model, data, ask), expected, strict=True):
            assert reply.params.keys() == start.keys()
            moved = max(float((p - start[n]).abs().max()) for n, p in wanted.params.items())
            exact = 1e-12 + (FLOAT32 * moved if (architecture, engine) == ("llama", "cuda") else 0.0)
            for n, p in wanted.params.items():
                torch.testing.assert_close(reply.params[n], p, rtol=0, atol=exact)
            assert any(not torch.equal(reply.params[n], start[n]) for n in start)


def test_the_chunked_loss_is_the_one_of_the_logits() -> None:
    model, data = small("gpt2"), texts("gpt2")
    start, params = model.init(3), model.init(5)
    batch = data.x[:4], data.y[:4], torch.rand(4, T)
    projection = model.projection(params, batch[0])
    assert isinstance(projection, Projection)
    torch.testing.assert_close(projection.logits, model(params, batch[0]))
    from fedquit.core import Batch

    x, y, u = batch
    losses = Distill().loss(model, params, {"start": start}, Batch(x, y, u, u, torch.ones(4, dtype=torch.bool)))
    options = {"teacher": "min", "loss": "kl", "v": 0.0, "tau": 1.0, "k": 5}
    expected = distillation_loss(model(params, x), model(start, x), y, u, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(losses, expected)
    assert small("bert").projection(small("bert").init(0), x) is None


@pytest.mark.parametrize("architecture", AFTER_THE_HEAD)
def test_a_network_with_a_step_after_its_head_does_not_project(architecture: str) -> None:
    """And engines agree on its own logits, in training and in unlearning."""
    model, data = small(architecture, pad=0), texts(architecture)
    start = model.init(3)
    assert model.projection(start, data.x[:2]) is None
    for task in (Learn(Local(batch_size=3, lr=0.3)), Distill(Local(batch_size=3, lr=0.3))):
        ask = Ask(task, (0, 1, 2), "all", {"start": start}, Address(1, "train"))
        for one, other in zip(
            SequentialEngine(model, data, {}).run(ask), StackedEngine(model, data, {}).run(ask), strict=True
        ):
            for n, p in one.params.items():  # their norms compute in float32, whatever the network's dtype
                torch.testing.assert_close(other.params[n], p, rtol=0, atol=1e-7)


def test_a_soft_cap_that_a_new_network_never_reaches_is_seen() -> None:
    for cap, projects in ((30.0, False), (None, True)):
        assert network_projects(small("gemma2", final_logit_softcapping=cap)) == projects
    assert network_projects(small("gpt2"))
    assert network_projects(small("llama"))
    assert not network_projects(small("bert"))


def network_projects(model: FunctionalModel) -> bool:
    return model.projection(model.init(0), texts("gpt2").x[:1]) is not None


def test_an_adapter_on_the_head_counts() -> None:
    pytest.importorskip("peft", reason="needs the extra `peft`")
    model = small("gpt2", lora=2, lora_targets="lm_head", tie_word_embeddings=False)
    x, start = texts("gpt2").x[:2], model.init(0)
    assert model.projection(start, x) is None
    moved = {n: p + ("lora_B" in n) for n, p in start.items()}
    assert sorted(n.split(".")[-3] for n in start) == ["lora_A", "lora_B"]
    assert not torch.allclose(model(moved, x), model(start, x))


def test_adapters_alone_are_trained_and_sent() -> None:
    pytest.importorskip("peft", reason="needs the extra `peft`")
    whole, both, half = small("gpt2"), small("gpt2", lora=1), small("gpt2", lora=1, lora_mode="freeze_a")
    a, b = (2 * (8 + 8 + 8 + 32), 2 * (24 + 8 + 32 + 8))  # of two layers: attention in and out, perceptron in and out
    assert sum(p.numel() for p in both.init(0).values()) == a + b
    assert sum(p.numel() for p in half.init(0).values()) == b
    assert nbytes(both.init(0)) < nbytes(whole.init(0)) / 5
    assert all("lora_B" in n for n in half.init(0))
    x = texts("gpt2").x[:2]
    torch.testing.assert_close(both(both.init(7), x), whole(whole.init(0), x))  # B begins at zero, the rest is frozen


def test_adapters_on_the_network_of_an_earlier_run(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra `peft`")
    whole = small("gpt2")
    trained: Params = {n: p.float() for n, p in whole.init(9).items()}
    save_params(tmp_path / "model.safetensors", trained, {})
    both = small("gpt2", lora=1, weights=str(tmp_path / "model.safetensors"))
    x = texts("gpt2").x[:2]
    torch.testing.assert_close(both(both.init(1), x), whole({n: p.double() for n, p in trained.items()}, x))
    assert both.signature() != small("gpt2", lora=1).signature(), "what is frozen enters the key of the cache"
    with pytest.raises(InputError, match="another model"):
        small("llama", weights=str(tmp_path / "model.safetensors"))
    with pytest.raises(InputError, match=r"cannot be read.*name the model\.safetensors"):
        small("gpt2", weights=str(tmp_path / "absent.safetensors"))


def test_a_folder_that_save_pretrained_wrote(tmp_path: Path) -> None:
    model = small("gpt2")
    network = network_of(model)
    network.save_pretrained(tmp_path / "saved")
    again = load_model(
        "huggingface", (T,), V, dtype=torch.float64, architecture="gpt2", weights=str(tmp_path / "saved")
    ).init(0)
    expected = dict(network.named_parameters())
    assert all(torch.equal(p.float(), expected[n.removeprefix("network.")]) for n, p in again.items())


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((3, 8, 8), {}, r"reads tokens \(T,\)"),
        ((T,), {"architecture": "gpt-2x"}, "cannot build 'gpt-2x'"),
        ((T,), {"head": "regression"}, "head of model"),
        ((T,), {"lora_mode": "mean"}, "lora_mode of model"),
    ],
)
def test_what_cannot_be_built_says_so(shape: tuple[int, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=says):
        load_model("huggingface", shape, V, **options)
