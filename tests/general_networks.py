# SPDX-License-Identifier: Apache-2.0
"""Small networks of the kinds that have no kernels of their own, in float64, each with a federation of four clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.core import Params
from fedquit.data.federated import Dataset, FederatedData
from fedquit.models import FunctionalModel, load_model

SIZES = (9, 4, 6, 1)  # the last batches of four hold 1, 4, 2 and 1 examples
T, V = 6, 13


def mit(classes: int = 3) -> nn.Module:
    """A small network of MiT-B0's kind: overlapping patches, strided and depthwise convolutions, all with biases."""
    transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
        attn_implementation="eager",
        decoder_hidden_size=8,
    )
    return InOwnPrecision(transformers.SegformerForImageClassification(config))


class InOwnPrecision(nn.Module):
    """A network whose softmax is computed in its own precision.

    SegFormer of transformers computes it in float32, so that a float64 network would agree with itself to 1e-11 only
    where others round float32 in the same way, as a GPU and a compiler do not.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        softmax = functional.softmax

        def in_own(x: Tensor, dim: int = -1, **_: object) -> Tensor:
            return softmax(x, dim)

        with patch.object(functional, "softmax", in_own):
            return cast(Tensor, self.network(x).logits)


def batch_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=4, stride=2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 7 * 7, 3),
    )


def huggingface(architecture: str, **options: Any) -> FunctionalModel:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    by_name: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8},
        "bert": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"head": "classes", "vocab_size": V, "max_position_embeddings": 8},
    }
    sizes = by_name[architecture]
    classes = 3 if architecture == "bert" else V
    return load_model(
        *("huggingface", (T,), classes), dtype=torch.float64, architecture=architecture, pad=0, **{**sizes, **options}
    )


def images() -> FederatedData:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 3, 16, 16, generator=draw, dtype=torch.float64)
    return divided(x, torch.randint(3, (sum(SIZES),), generator=draw), 3)


def texts(classes: int) -> FederatedData:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, V, (sum(SIZES), T), generator=draw)
    x[::3, -2:] = 0  # filled up
    y = x.roll(-1, 1) if classes == V else torch.randint(classes, (sum(SIZES),), generator=draw)
    return divided(x, y, classes)


def divided(x: Tensor, y: Tensor, classes: int) -> FederatedData:
    parts = dict(enumerate(torch.arange(len(x)).split(list(SIZES))))
    return FederatedData(Dataset(x, y, x[:2], y[:2], classes), parts)


def lora() -> FunctionalModel:
    pytest.importorskip("peft", reason="needs the extra `peft`")
    return huggingface("gpt2", lora=2)


NETWORKS: dict[str, Callable[[], tuple[FunctionalModel, FederatedData]]] = {
    "mit": lambda: (FunctionalModel(mit, torch.float64), images()),
    "batch_norm": lambda: (FunctionalModel(batch_normed, torch.float64), images()),
    "bert": lambda: (huggingface("bert"), texts(3)),
    "gpt": lambda: (huggingface("gpt2"), texts(V)),
    "lora": lambda: (lora(), texts(V)),
}


def apart(actual: Params, expected: Params) -> float:
    assert actual.keys() == expected.keys()
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((actual[n] - p).abs().max()) for n, p in expected.items()) / scale
