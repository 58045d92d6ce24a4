# SPDX-License-Identifier: Apache-2.0
"""MiT-B0, the smallest encoder of SegFormer (Xie et al., NeurIPS 2021), with a linear head, from `transformers`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fedquit.errors import InputError

# As on the hub under nvidia/mit-b0; written out, since a library's defaults change.
ARCHITECTURE: dict[str, Any] = {
    "num_channels": 3,
    "num_encoder_blocks": 4,
    "hidden_sizes": [32, 64, 160, 256],
    "depths": [2, 2, 2, 2],
    "num_attention_heads": [1, 2, 5, 8],
    "sr_ratios": [8, 4, 2, 1],
    "patch_sizes": [7, 3, 3, 3],
    "strides": [4, 2, 2, 2],
    "mlp_ratios": [4, 4, 4, 4],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "reshape_last_stage": True,
}
# Engines must agree bit for bit, so nothing is dropped at random: see docs/models.md.
NOTHING_RANDOM = {"drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALLEST = 32  # pixels a side: four stages leave one thirty-second of it
UNTRAINED = "none"


def mit_b0(input_shape: tuple[int, ...], classes: int, *, weights: str = UNTRAINED) -> nn.Module:
    """MiT-B0, the smallest encoder of SegFormer, with a new linear head (extra `transformers`).

    Args:
        input_shape: (3, height, width) of one image, 32x32 at least.
        classes: the number of classes, C.
        weights: of the encoder: "none" for random ones, a name on the Hugging Face hub, or a folder.
    """
    if len(input_shape) != 3 or input_shape[0] != 3 or min(input_shape[1:]) < SMALLEST:
        raise InputError(
            f"mit_b0 needs colour images (3, height, width) from {SMALLEST}x{SMALLEST} on, not {tuple(input_shape)}: "
            "scale them up, or use another model."
        )
    transformers = _transformers()
    # Plain attention: the fused kernels cannot be differentiated twice, which the optimizer
    # adahessian does.
    config = transformers.SegformerConfig(
        **ARCHITECTURE, **NOTHING_RANDOM, num_labels=classes, attn_implementation="eager"
    )
    network: nn.Module = transformers.SegformerForImageClassification(config)  # draws the head, whatever the encoder
    if weights == UNTRAINED:
        warnings.warn(
            'mit_b0 begins untrained, and the paper\'s began pretrained: set model.options.weights = "nvidia/mit-b0".',
            stacklevel=2,
        )
    else:
        network.get_submodule("segformer").load_state_dict(_encoder(transformers, weights))
    return network


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")  # here alone: it is an extra, and takes seconds
    except ImportError as error:
        raise InputError(
            "mit_b0 needs transformers, and it cannot be imported: pip install 'fedquit[transformers]'."
        ) from error


def _encoder(transformers: ModuleType, weights: str) -> dict[str, Tensor]:
    """Load the tensors of a pretrained encoder; none may be missing from the file."""
    try:
        with _quiet(transformers):
            encoder, info = transformers.SegformerModel.from_pretrained(weights, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(_unloadable(weights)) from error
    differing = [name for name, value in ARCHITECTURE.items() if getattr(encoder.config, name, value) != value]
    missing = sorted(info["missing_keys"])
    if differing or missing:
        reason = f"its {differing[0]} differs" if differing else f"it has no {missing[0]}"
        raise InputError(
            f"{weights} does not hold the encoder of mit_b0 ({reason}): give nvidia/mit-b0 or a copy of it."
        )
    tensors: dict[str, Tensor] = encoder.state_dict()
    return tensors


def _unloadable(weights: str) -> str:
    if Path(weights).is_dir():
        return f"the folder {weights} holds no network that transformers can read: make it with save_pretrained."
    return (
        f"the weights {weights!r} are neither a folder here nor could they be fetched from the hub: check the name, "
        "connect to the network for the first run, or copy them here and give the folder."
    )


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Silence progress bars and warnings about the old head, which is dropped on purpose."""
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
