# SPDX-License-Identifier: Apache-2.0
"""Networks as functions of their parameters: `load_model("cnn", (1, 28, 28), 10)`.

One's own is a factory `(input_shape, classes, **options) -> nn.Module`, named as `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.models.small import cnn, mlp
from fedquit.names import imported, lookup, refuse_unknown_options

__all__ = ["MODELS", "FunctionalModel", "load_model", "refuse_unsuitable"]

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn}


@dataclass(frozen=True)
class FunctionalModel:
    """A `fedquit.core.Model` from a factory of modules: parameters go in with every call, none are kept."""

    build: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    _module: nn.Module = field(init=False, repr=False, compare=False)  # lends its forward, never its weights

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise InputError(f"a model cannot have parameters of {self.dtype}: take torch.float32 or torch.float64.")
        module = self._built(seed=0)
        refuse_unsuitable(module)
        object.__setattr__(self, "_module", _quiet(module))

    def signature(self) -> str:
        """What the network is made of, in words: part of what a trained model is known by."""
        return repr(self._module)

    def init(self, seed: int) -> Params:
        """Fresh parameters; the same seed gives the same ones, and torch's own random numbers go on undisturbed."""
        return {n: p.detach() for n, p in self._built(seed).named_parameters()}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits; of an output object with `.logits`, those."""
        constants = {n: b.to(x.device) for n, b in self._module.named_buffers()}
        # strict: a parameter that is missing must not be silently replaced by the module's own.
        output = functional_call(self._module, {**constants, **params}, (x,), strict=True)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model returned {type(output).__name__}: its forward must return logits, a tensor.")
        return logits

    def _built(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: that would reseed the accelerators too, which the fork does not cover.
            torch.default_generator.manual_seed(seed)
            module = self.build()
        if not isinstance(module, nn.Module):
            raise InputError(f"the model's factory returned {type(module).__name__}: it must return a torch.nn.Module.")
        return module.to(self.dtype)


def load_model(
    name: str, /, input_shape: tuple[int, ...], classes: int, *, dtype: torch.dtype = torch.float32, **options: object
) -> FunctionalModel:
    """The model of that name in `MODELS`, or the one that `package.module:function` builds."""
    factory = imported(name, "model") if ":" in name else lookup(MODELS, name, "model")
    if not callable(factory):
        raise InputError(f"model {name!r} is not a function: name one that takes (input_shape, classes, **options).")
    refuse_unknown_options(f"model {name!r}", factory, options, skip=2)
    return FunctionalModel(partial(factory, tuple(input_shape), classes, **options), dtype)


def refuse_unsuitable(module: nn.Module) -> None:
    """Refuse layers that a federation cannot train and unlearn faithfully, and name the first one."""
    for path, layer in module.named_modules():
        reason = _unsuitable(layer)
        if reason:
            where = f"layer {path!r} ({type(layer).__name__})" if path else f"the model ({type(layer).__name__})"
            raise InputError(f"{where} {reason}; `fedquit.unlearn` alone, on one machine, accepts it as it is.")


def _unsuitable(layer: nn.Module) -> str:
    if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
        return (
            "keeps running statistics of the clients' data, which neither averaging nor unlearning would cover: "
            "use torch.nn.GroupNorm instead"
        )
    if (isinstance(layer, _DropoutNd) and layer.p > 0) or (isinstance(layer, nn.RNNBase) and layer.dropout > 0):
        return "drops units at random, and engines could not agree on its random numbers: set its dropout to 0"
    return ""


def _quiet(module: nn.Module) -> nn.Module:
    """In evaluation mode, so that nothing random is left in any forward."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.train()  # without dropout it makes no difference, but cuDNN has no gradient in evaluation mode
    return module
