# SPDX-License-Identifier: Apache-2.0
"""Networks as functions of their parameters: `load_model("cnn", (1, 28, 28), 10)`.

Your own is a factory `(input_shape, classes, **options) -> nn.Module`, named as
`package.module:function`.
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
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedquit.core import Params
from fedquit.data.preprocessing import AS_STORED, Preprocessing
from fedquit.errors import InputError
from fedquit.models.lstm import char_lstm
from fedquit.models.mit import mit_b0
from fedquit.models.resnet import resnet18
from fedquit.models.small import cnn, mlp
from fedquit.utils.names import imported, lookup, refuse_unknown_options

__all__ = ["MODELS", "FunctionalModel", "load_model", "refuse_unsuitable"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "mit_b0": mit_b0,
    "char_lstm": char_lstm,
}


@dataclass(frozen=True)
class FunctionalModel:
    """A `fedquit.core.Model` from a factory of modules; parameters are arguments of every call.

    Attributes:
        build: makes the module; its random initialisation depends on torch's generator alone.
        dtype: of the parameters, float32 or float64.
        look: how examples that are stored as bytes are preprocessed.

    Raises:
        InputError: for a module that a federation cannot train and unlearn faithfully.
    """

    build: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    look: Preprocessing = AS_STORED
    _module: nn.Module = field(init=False, repr=False, compare=False)  # lends its forward, never its weights
    _constants: dict[torch.device, Params] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise InputError(f"a model cannot have parameters of {self.dtype}: take torch.float32 or torch.float64.")
        module = self._built(seed=0)
        refuse_unsuitable(module)  # in the numbers it came in: another dtype would hide what is complex or shared
        object.__setattr__(self, "_module", _without_randomness(module.to(self.dtype)))

    def signature(self) -> str:
        """Return the layers of the network as text; it enters the key of the training cache."""
        return repr(self._module)

    def layers(self) -> list[str]:
        """Return the modules by name and class, and the parameters by name and shape.

        Unlike `signature` it is the same under every version of torch: it enters the key of reference bundles.
        """
        modules = [f"{name}: {type(module).__name__}" for name, module in self._module.named_modules()]
        return modules + [f"{name}: {tuple(p.shape)}" for name, p in self._module.named_parameters()]

    def init(self, seed: int) -> Params:
        """Return fresh parameters; the seed determines them, and torch's generators stay as they were."""
        return {n: p.detach() for n, p in self._built(seed).to(self.dtype).named_parameters()}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits; examples of bytes are preprocessed first, without augmentation.

        Args:
            params: all parameters, as `init` returns them.
            x: the examples, `(B, …)`.

        Returns:
            Logits `(B, C)`, or `(B, T, C)` for sequences.
        """
        if x.dtype == torch.uint8:
            x = self.look.plain(x)
        if x.is_floating_point():
            x = x.to(next(iter(params.values())).dtype)
        # strict: a parameter that is missing must not be silently replaced by the module's own.
        output = functional_call(self._module, {**self._buffers(x.device), **params}, (x,), strict=True)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model returned {type(output).__name__}: its forward must return logits, a tensor.")
        return logits

    def _buffers(self, device: torch.device) -> Params:
        """Return the buffers on a device, kept there for CUDA graphs, which cannot copy them."""
        if device not in self._constants:
            self._constants[device] = {n: b.to(device) for n, b in self._module.named_buffers()}
        return self._constants[device]

    def _built(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: that would reseed the accelerators too, which the fork does not
            # cover.
            torch.default_generator.manual_seed(seed)
            module = self.build()
        if not isinstance(module, nn.Module):
            raise InputError(f"the model's factory returned {type(module).__name__}: it must return a torch.nn.Module.")
        return module


def load_model(
    name: str,
    /,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    dtype: torch.dtype = torch.float32,
    look: Preprocessing = AS_STORED,
    **options: object,
) -> FunctionalModel:
    """Load a network as a function of its parameters.

    Args:
        name: a name from `MODELS`, or `package.module:function` for a factory of modules.
        input_shape: of one example as the network reads it, such as `(3, 32, 32)`; see
            `Dataset.shape`.
        classes: the number of classes, C.
        dtype: of the parameters.
        look: how examples that are stored as bytes are preprocessed; see `Dataset.look`.
        options: keyword arguments of the network's factory.

    Returns:
        The network; `init` gives its first parameters.

    Raises:
        UnknownNameError: for a network or an option that does not exist.
        InputError: for a network that a federation cannot train and unlearn faithfully.
    """
    factory = imported(name, "model") if ":" in name else lookup(MODELS, name, "model")
    if not callable(factory):
        raise InputError(f"model {name!r} is not a function: name one that takes (input_shape, classes, **options).")
    refuse_unknown_options(f"model {name!r}", factory, options, skip=2)
    return FunctionalModel(partial(factory, tuple(input_shape), classes, **options), dtype, look)


def refuse_unsuitable(module: nn.Module) -> None:
    """Raise an InputError for the first layer or parameter that a federation cannot train."""
    for path, layer in module.named_modules():
        where = f"layer {path!r} ({type(layer).__name__})" if path else f"the model ({type(layer).__name__})"
        if isinstance(layer, nn.DataParallel | torch.jit.ScriptModule):
            raise InputError(f"{where} takes no parameters from outside: return the plain torch.nn.Module behind it.")
        reason = _unsuitable(layer)
        if reason:
            raise InputError(f"{where} {reason}; `fedquit.unlearn` alone, on one machine, accepts it as it is.")
    _refuse_parameters(module)


def _unsuitable(layer: nn.Module) -> str:
    if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
        return (
            "keeps running statistics of the clients' data, which neither averaging nor unlearning would cover: "
            "use torch.nn.GroupNorm instead"
        )
    if _estimates_a_norm(layer):
        return "keeps an estimate of its weights' norm, which does not follow averaged weights: use weight_norm instead"
    if _drops(layer):
        return "drops units at random, and engines could not agree on its random numbers: set its dropout to 0"
    if isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return "draws random numbers that engines could not agree on: use torch.nn.LeakyReLU or torch.nn.MaxPool2d"
    return ""


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def _estimates_a_norm(layer: nn.Module) -> bool:
    old = any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
    return old or isinstance(layer, _SpectralNorm)


def _refuse_parameters(module: nn.Module) -> None:
    """Refuse unusable parameters. One tensor may have two names: it is trained once."""
    places: dict[int, str] = {}
    for name, p in module.named_parameters():
        reason = _unusable(p)
        if not reason and p.numel() and places.setdefault(p.data_ptr(), name) != name:
            # Apart from the module, each would get values of its own, and the tie would be lost
            # without a word.
            reason = f"shares memory with {places[p.data_ptr()]!r}: assign the same torch.nn.Parameter to both"
        if reason:
            raise InputError(f"parameter {name!r} {reason}.")
    if not any(p.numel() for p in module.parameters()):
        raise InputError(
            f"the model ({type(module).__name__}) has no parameters: there is nothing to train or unlearn."
        )


def _unusable(p: nn.Parameter) -> str:
    if isinstance(p, UninitializedParameter) or p.is_meta:
        return "has no values yet: give its layer all sizes, and build it on a real device"
    if not p.is_floating_point():
        return f"is {p.dtype}, and neither optimizers nor averages cover that: use real numbers, or make it a buffer"
    if not p.requires_grad:
        return "is frozen, and a federation trains every parameter: make it a buffer, or unfreeze it"
    return ""


def _without_randomness(module: nn.Module) -> nn.Module:
    """Put the module into evaluation mode, so that its forward pass draws no random numbers."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.train()  # without dropout it makes no difference, but cuDNN has no gradient in evaluation mode
    return module
