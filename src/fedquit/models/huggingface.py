# SPDX-License-Identifier: Apache-2.0
"""Networks of `transformers` in a federation: causal language models and classifiers of texts, with or without LoRA.

Attention masks are made here, as additive masks of four dimensions: given a mask of two, transformers branches on its
values, which `torch.func.vmap` does not allow. Attention is plain (`eager`), since the fused kernels on a CPU have no
batching rule.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedquit.core.projection import Projection
from fedquit.errors import InputError
from fedquit.utils.names import unknown

Head = Literal["causal", "classes"]
Lora = Literal["average", "freeze_a"]
UNTRAINED = "none"


class Tokens(nn.Module):
    """A network of transformers that reads tokens (B, T).

    A causal one whose last step is its head returns a `Projection`, so that a loss need not hold all its logits. One
    that changes what the head gives (Gemma 2 caps it, Granite and Cohere scale it), or whose head has an adapter,
    returns logits; so does a classifier.
    """

    def __init__(self, network: nn.Module, *, causal: bool, pad: int) -> None:
        super().__init__()
        self.network = network
        self.causal = causal
        self.pad = pad
        self.projects = False  # until `ends_with_its_head` has been asked

    def forward(self, x: Tensor) -> Projection | Tensor:
        """Return a projection to (B, T, V), or logits (B, C)."""
        if not self.projects:
            logits: Tensor = self.network(**self._given(x)).logits
            return logits
        head = self._head()
        return Projection(self._states(x), head.weight, head.bias)

    def ends_with_its_head(self) -> bool:
        """Return whether the logits are the last states times the head's weights and nothing else, on two tokens.

        The head gets a stand-in whose outputs are large, since a soft cap hardly shows on those of a new network.
        """
        head = self._head()
        if not self.causal or type(head) is not nn.Linear:  # an adapter is another class
            return False
        read: list[Tensor] = []

        def stand_in(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            read.append(inputs[0])
            return torch.linspace(-1000.0, 1000.0, output.numel(), dtype=output.dtype).reshape(output.shape)

        x = torch.zeros(1, 2, dtype=torch.long)
        modes = {layer: layer.training for layer in self.modules()}
        hook = head.register_forward_hook(stand_in)
        try:
            self.eval()
            with torch.no_grad():
                logits = self.network(**self._given(x)).logits
                states = self._states(x)
        except (AttributeError, TypeError):  # a network that does not tell its states
            return False
        finally:
            hook.remove()
            for layer, mode in modes.items():
                layer.training = mode
        given = torch.linspace(-1000.0, 1000.0, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
        return len(read) == 1 and torch.equal(read[0], states) and torch.equal(logits, given)

    def _given(self, x: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": x, "attention_mask": self._mask(x)}
        if self.causal:
            given["position_ids"] = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            given["use_cache"] = False
        return given

    def _states(self, x: Tensor) -> Tensor:
        """Return the states before the head, (B, T, D)."""
        body: Any = self.network.get_decoder()  # type: ignore[operator]
        states: Tensor = body(**self._given(x)).last_hidden_state
        return states

    def _head(self) -> Any:  # noqa: ANN401 - whatever the network has, or None
        return self.network.get_output_embeddings()  # type: ignore[operator]

    def _mask(self, x: Tensor) -> Tensor:
        """Return the additive mask (B, 1, T, T): 0 where a position may be read."""
        length = x.shape[1]
        allowed = (x != self.pad)[:, None, None, :].expand(-1, 1, length, -1)
        if self.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        dtype = next(self.network.parameters()).dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=x.device).masked_fill(~allowed, torch.finfo(dtype).min)


def huggingface(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    architecture: str = "gpt2",
    head: Head = "causal",
    weights: str = UNTRAINED,
    pad: int = -1,
    lora: int = 0,
    lora_mode: Lora = "average",
    lora_alpha: float = 0.0,
    lora_targets: str = "all-linear",
    **config: Any,  # noqa: ANN401 - whatever the architecture's configuration has
) -> nn.Module:
    """Build a network of transformers by the name of its architecture (extra `transformers`; LoRA: extra `peft`).

    Args:
        input_shape: (T,) of one example: its tokens.
        classes: of a causal model the vocabulary, V; of a classifier the number of classes, C.
        architecture: transformers' `model_type`: "gpt2", "llama", "bert", …
        head: "causal" predicts the next token at each position, "classes" one class for a text.
        weights: "none" for random ones; a folder that `save_pretrained` wrote; or a `model.safetensors` of a run with
            the same model, without LoRA.
        pad: the token that fills texts up and that no position reads; -1 for none.
        lora: the rank of adapters; 0 trains the whole network. The network under them stays as `weights` says.
        lora_mode: "average" trains and averages A and B; "freeze_a" trains B alone, whose mean is exact.
        lora_alpha: the adapters are scaled by lora_alpha / lora; 0 for twice the rank.
        lora_targets: which layers get adapters, as peft names them, separated by commas.
        config: of the architecture: `n_layer = 2`, `hidden_size = 64`, … For a classifier, `vocab_size` too.
    """
    if len(input_shape) != 1:
        raise InputError(f"huggingface reads tokens (T,), and examples have shape {tuple(input_shape)}: use text data.")
    for name, value, choices in (("head", head, get_args(Head)), ("lora_mode", lora_mode, get_args(Lora))):
        if value not in choices:
            raise unknown(f"{name} of model 'huggingface'", value, choices)
    network = _network(_library("transformers", "transformers"), architecture, head, weights, classes, config)
    module = Tokens(network, causal=head == "causal", pad=pad)
    if weights.endswith(".safetensors"):
        _load(module, Path(weights))
    if lora:
        _add_adapters(module, lora, lora_mode, lora_alpha or 2 * lora, lora_targets)
    module.projects = module.ends_with_its_head()
    return module


def _network(
    transformers: ModuleType, architecture: str, head: Head, weights: str, classes: int, config: dict[str, Any]
) -> nn.Module:
    auto = transformers.AutoModelForCausalLM if head == "causal" else transformers.AutoModelForSequenceClassification
    size = {"vocab_size": classes} if head == "causal" else {"num_labels": classes}
    try:
        if Path(weights).is_dir():
            loaded = auto.from_pretrained(weights, **size, **config, attn_implementation="eager", dtype=torch.float32)
            network: nn.Module = loaded
            return network
        special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # texts here have none
        described = transformers.AutoConfig.for_model(architecture, **{**special, **size, **config})
        network = auto.from_config(described, attn_implementation="eager")
    except (ValueError, KeyError, OSError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"transformers cannot build {architecture!r} with head {head!r} ({reason}): give a model_type that it has, "
            "and options of its configuration."
        ) from error
    return network


def _load(module: nn.Module, file: Path) -> None:
    """Load the parameters of a run with the same model."""
    try:
        tensors = load_file(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): name the model.safetensors of a run.") from error
    names = dict(module.named_parameters())
    if tensors.keys() != names.keys() or any(tensors[n].shape != p.shape for n, p in names.items()):
        raise InputError(f"{file} holds the parameters of another model: give the options that it was trained with.")
    module.load_state_dict(tensors, strict=False)  # tied tensors are there under their first name


def _add_adapters(module: Tokens, rank: int, mode: Lora, alpha: float, targets: str) -> None:
    """Freeze the network and put adapters on its layers."""
    peft = _library("peft", "peft")
    wanted = targets if targets == "all-linear" else targets.split(",")
    described = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=wanted)
    module.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # peft sets it right for GPT-2's layers
            peft.inject_adapter_in_model(described, module.network)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"no layer takes an adapter ({reason}): name layers in lora_targets.") from error
    if mode == "freeze_a":
        for name, p in module.named_parameters():
            if "lora_A" in name or "lora_embedding_A" in name:
                p.requires_grad_(False)


def _library(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)  # here alone: it is an extra, and takes seconds
    except ImportError as error:
        raise InputError(
            f"model 'huggingface' needs {name}, and it cannot be imported: pip install 'fedquit[{extra}]'."
        ) from error
