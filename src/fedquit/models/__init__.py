# SPDX-License-Identifier: Apache-2.0
"""Networks as functions of their parameters: `load_model("cnn", (1, 28, 28), 10)`.

Your own is a factory `(input_shape, classes, **options) -> nn.Module`, named as
`package.module:function`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import _disable_current_modes

from fedquit.core import Params
from fedquit.core.params import fingerprint, is_statistic, require_same_shapes
from fedquit.core.projection import Projection
from fedquit.data.preprocessing import AS_STORED, Preprocessing
from fedquit.errors import InputError
from fedquit.models.attention import plain_in_transforms
from fedquit.models.huggingface import huggingface
from fedquit.models.lstm import char_lstm
from fedquit.models.mit import mit_b0
from fedquit.models.randomness import random_states, sources_drawn_from
from fedquit.models.resnet import resnet18
from fedquit.models.small import cnn, mlp
from fedquit.utils.names import imported, lookup, refuse_unknown_options, unknown

__all__ = ["MODELS", "FunctionalModel", "load_model", "refuse_unsuitable"]

BatchNormMode = Literal["averaged", "local"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "mit_b0": mit_b0,
    "char_lstm": char_lstm,
    "huggingface": huggingface,
}


@dataclass(frozen=True)
class FunctionalModel:
    """A `fedquit.core.Model` from a factory of modules; parameters are arguments of every call.

    What is trained are the parameters that require a gradient. BatchNorm's running statistics travel with them
    (`fedquit.core.params.is_statistic`). Frozen parameters are as the factory makes them with seed 0, whatever the seed
    of a run: they belong to the network, and are neither sent nor counted.

    Attributes:
        build: makes the module; its random initialisation depends on torch's generator alone.
        dtype: of the parameters, float32 or float64.
        look: how examples that are stored as bytes are preprocessed.
        batchnorm: whether BatchNorm's parameters and statistics are `averaged` like all others, or `local`: each
            client's own, as in FedBN (`fedquit.core.local_layers`).

    Raises:
        InputError: for a module that a federation cannot train and unlearn faithfully, or for local BatchNorm in a
            network that has none.
    """

    build: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    look: Preprocessing = AS_STORED
    batchnorm: BatchNormMode = "averaged"
    _module: nn.Module = field(init=False, repr=False, compare=False)  # lends its forward, never its weights
    _training: nn.Module | None = field(init=False, repr=False, compare=False)  # the same in training mode
    _settled: bool = field(init=False, repr=False, compare=False)  # whether `_training` is known to be needed or not
    _constants: dict[tuple[torch.device, torch.dtype], Params] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _local_names: frozenset[str] = field(init=False, repr=False, compare=False)
    _names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _first_layers: dict[int, Params] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batchnorm not in get_args(BatchNormMode):
            raise unknown("way to treat BatchNorm", self.batchnorm, get_args(BatchNormMode))
        if not self.dtype.is_floating_point:
            raise InputError(f"a model cannot have parameters of {self.dtype}: take torch.float32 or torch.float64.")
        module = build_seeded(self.build, seed=0)
        refuse_unsuitable(module)  # in the numbers it came in: another dtype would hide what is complex or shared
        module = _without_counters(module.to(self.dtype))
        object.__setattr__(self, "_names", tuple(_travelling(module)))
        object.__setattr__(self, "_local_names", self._batchnorm_names(module))
        known = all(map(_is_known, module.modules()))
        stateless = known and not any(map(_trains_differently, module.modules()))
        object.__setattr__(self, "_training", None if stateless else _in_training_mode(module))
        object.__setattr__(self, "_settled", known)
        object.__setattr__(self, "_module", _without_randomness(module))

    def _batchnorm_names(self, module: nn.Module) -> frozenset[str]:
        """Return the names of what stays at the clients."""
        if self.batchnorm == "averaged":
            return frozenset()
        layers = [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
        names = frozenset(n for n in self._names if n.rpartition(".")[0] in layers)
        if not names:
            raise InputError("the model has no BatchNorm to keep at the clients: leave model.batchnorm out.")
        if len(names) == len(self._names):
            raise InputError("all that is trained is BatchNorm: with model.batchnorm = 'local' nothing would travel.")
        return names

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in the order of `init`."""
        return self._names

    @property
    def local_names(self) -> frozenset[str]:
        """The names of BatchNorm's parameters and statistics where they are local; else none."""
        return self._local_names

    def first_layers(self, seed: int) -> Params:
        """Return the local BatchNorm of a client that comes for the first time, as `init` gives it with this seed."""
        if seed not in self._first_layers:
            fresh = self.init(seed) if self._local_names else {}
            self._first_layers[seed] = {n: p for n, p in fresh.items() if n in self._local_names}
        return self._first_layers[seed]

    def signature(self) -> str:
        """Return the layers as text, with a hash of what is frozen; it enters the key of the training cache."""
        frozen = {n: p.detach() for n, p in self._module.named_parameters() if not p.requires_grad}
        return repr(self._module) + (f" frozen {fingerprint(frozen)}" if frozen else "")

    def layers(self) -> list[str]:
        """Return the modules by name and class, and the parameters by name and shape.

        Unlike `signature` it is the same under every version of torch: it enters the key of reference bundles.
        """
        modules = [f"{name}: {type(module).__name__}" for name, module in self._module.named_modules()]
        return modules + [f"{name}: {tuple(p.shape)}" for name, p in self._module.named_parameters()]

    def init(self, seed: int) -> Params:
        """Return fresh parameters; the seed determines them, and torch's generators stay as they were.

        Frozen parameters are not among them; BatchNorm's running statistics come last.
        """
        return _travelling(build_seeded(self.build, seed).to(self.dtype))

    def module(self, params: Params) -> nn.Module:
        """Return a new module with these parameters; what is frozen is as everywhere in the federation.

        Args:
            params: all parameters, as `init` returns them.

        Raises:
            InputError: for parameters of another network.
        """
        module = build_seeded(self.build, seed=0).to(self.dtype)
        own = _travelling(module)  # shares the module's memory
        require_same_shapes(params, own, "the parameters")
        for name, tensor in own.items():
            tensor.copy_(params[name])
        return module

    def behaviour(self, x: Tensor) -> str:
        """Return a hash of the logits that the weights of seed 0 give, rounded: it tells two forwards apart.

        Float64 on the CPU makes rounding errors so small that the number of threads does not change the hash.

        Args:
            x: a few examples, `(B, …)`.
        """
        x = self.look.plain(x.cpu()) if x.dtype == torch.uint8 else x.cpu()
        try:
            logits = self._seeded_logits(x, torch.float64)
        except RuntimeError:  # the forward insists on a precision
            logits = self._seeded_logits(x, self.dtype)
        rounded = [f"{value:.5g}" for value in logits.flatten().tolist()]
        return hashlib.blake2b(f"{tuple(logits.shape)} {rounded}".encode(), digest_size=16).hexdigest()

    def _seeded_logits(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        module = build_seeded(self.build, seed=0).to(dtype).eval()
        with _seeded(0), torch.no_grad():
            output = module(x.to(dtype) if x.is_floating_point() else x)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    @property
    def training(self) -> TrainingForm | None:
        """The network as ordinary training computes it, where that differs: with dropout and batch statistics.

        A module with layers of one's own has this form until `settle` has seen that it needs none.
        """
        return TrainingForm(self) if self._training is not None else None

    def settle(self, x: Tensor) -> None:
        """Run the module once in both modes, to learn whether training mode draws or computes anything else.

        Engines call it before they train; a module of torch's own layers alone needs no look.

        Args:
            x: examples, of which at most two are used.

        Raises:
            InputError: for random numbers in evaluation, for those that torch does not draw, and for buffers that
                training changes.
        """
        if self._settled or self._training is None or len(x) == 0:
            return
        x = torch.cat([x[:2], x[:2]])[:2].cpu()  # two: one example has no variance
        evaluated, drawn, _ = self._tried(self._module, x)
        if drawn:
            raise InputError(
                f"the model draws random numbers ({drawn[0]}) where it is evaluated: draw them only in training, as in "
                "F.dropout(x, p, self.training)."
            )
        trained, drawn, changed = self._tried(self._training, x)
        if any(source != "torch" for source in drawn):
            raise InputError(
                f"the model draws random numbers from {drawn[-1]} in training, which engines cannot repeat: use "
                "torch.nn.Dropout, or torch.rand with the examples first."
            )
        if changed:
            raise InputError(
                f"the model changes its buffer {changed[0]!r} in training, which clients could not share: use "
                "BatchNorm's running statistics, or no state."
            )
        same = not drawn and torch.equal(evaluated, trained)
        if same and not any(map(_trains_differently, self._module.modules())):
            object.__setattr__(self, "_training", None)
        object.__setattr__(self, "_settled", True)

    def _tried(self, module: nn.Module, x: Tensor) -> tuple[Tensor, list[str], list[str]]:
        """Return the logits, who drew random numbers, and the buffers that changed; all is left as it was.

        With gradients, since torch has other kernels for attention without.
        """
        params = {n: p.clone() for n, p in module.named_parameters()}
        buffers = {n: b.clone() for n, b in module.named_buffers()}
        with random_states() as before, torch.enable_grad():
            logits = self._logits(module, {**params, **buffers}, x).detach()
            drawn = sources_drawn_from(before)
        constants = {n: b for n, b in module.named_buffers() if not is_statistic(n)}
        return logits, drawn, [n for n, b in constants.items() if not torch.equal(buffers[n], b)]

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits; examples of bytes are preprocessed first, without augmentation.

        Args:
            params: all parameters, as `init` returns them.
            x: the examples, `(B, …)`.

        Returns:
            Logits `(B, C)`, or `(B, T, C)` for sequences.
        """
        return self._logits(self._module, params, x)

    def projection(self, params: Params, x: Tensor) -> Projection | None:
        """Return the factors of the logits where the module tells them: one whose forward returns a `Projection`.

        Args:
            params: all parameters, as `init` returns them.
            x: the examples, `(B, …)`.
        """
        if not getattr(self._module, "projects", False):
            return None
        output = self._output(self._module, params, x)
        assert isinstance(output, Projection)
        return output

    def _logits(self, module: nn.Module, params: Params, x: Tensor) -> Tensor:
        output = self._output(module, params, x)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model returned {type(output).__name__}: its forward must return logits, a tensor.")
        return logits

    def _output(self, module: nn.Module, params: Params, x: Tensor) -> Any:  # noqa: ANN401 - a module's output
        if x.dtype == torch.uint8:
            x = self.look.plain(x)
        dtype = next(iter(params.values())).dtype
        if x.is_floating_point():
            x = x.to(dtype)
        # strict: a parameter that is missing must not be silently replaced by the module's own.
        with plain_in_transforms():
            return functional_call(module, {**self._buffers(x.device, dtype), **params}, (x,), strict=True)

    def _buffers(self, device: torch.device, dtype: torch.dtype) -> Params:
        """Return buffers and frozen parameters on a device, kept there for CUDA graphs, which cannot copy them.

        Args:
            device: where the network computes.
            dtype: in which it computes: that of frozen parameters, as of the trained ones.
        """
        key = device, dtype
        if key not in self._constants:
            # Whoever traces the network must not write these copies down as a part of it.
            with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
                buffers = {n: b.to(device) for n, b in self._module.named_buffers() if not is_statistic(n)}
                frozen = {n: p for n, p in self._module.named_parameters() if not p.requires_grad}
                self._constants[key] = buffers | {n: p.detach().to(device, dtype) for n, p in frozen.items()}
        return self._constants[key]


@dataclass(frozen=True)
class TrainingForm:
    """A network in training mode. Engines call it inside `fedquit.engine.training`, which draws all random numbers."""

    model: FunctionalModel

    def init(self, seed: int) -> Params:
        """Return fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits, with dropout and BatchNorm's batch statistics."""
        assert self.model._training is not None
        return self.model._logits(self.model._training, params, x)


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module that a factory makes with a seed; torch's generators stay as they were.

    Args:
        build: the factory.
        seed: of torch's generator on the CPU.

    Raises:
        InputError: if the factory returns something else.
    """
    with _seeded(seed):
        module = build()
    if not isinstance(module, nn.Module):
        raise InputError(f"the model's factory returned {type(module).__name__}: it must return a torch.nn.Module.")
    return module


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too, which the fork does not cover.
        torch.default_generator.manual_seed(seed)
        yield


def _travelling(module: nn.Module) -> Params:
    """Return what is trained and sent: parameters that require a gradient, and last BatchNorm's running statistics."""
    trained = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    return trained | {n: b.detach() for n, b in module.named_buffers() if is_statistic(n)}


def load_model(
    name: str,
    /,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    dtype: torch.dtype = torch.float32,
    look: Preprocessing = AS_STORED,
    batchnorm: BatchNormMode = "averaged",
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
        batchnorm: `averaged`, or `local` for BatchNorm of each client's own; see `FunctionalModel`.
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
    return FunctionalModel(partial(factory, tuple(input_shape), classes, **options), dtype, look, batchnorm)


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


_REFUSED: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (nn.SyncBatchNorm,),
        "exchanges statistics between processes, which clients are not: use torch.nn.BatchNorm2d instead",
    ),
    (
        (nn.AlphaDropout, nn.FeatureAlphaDropout),
        "drops units in a way that engines do not cover: use torch.nn.Dropout instead",
    ),
    (
        (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
        "draws random numbers that engines could not agree on: use torch.nn.LeakyReLU or torch.nn.MaxPool2d",
    ),
)


def _unsuitable(layer: nn.Module) -> str:
    for kinds, reason in _REFUSED:
        if isinstance(layer, kinds):
            return reason
    if isinstance(layer, _BatchNorm):
        return _unsuitable_batch_norm(layer)
    if any(map(is_statistic, _own_tensors(layer))):
        return "keeps running statistics, which are known of BatchNorm alone: use BatchNorm or GroupNorm instead"
    if _estimates_a_norm(layer):
        return "keeps an estimate of its weights' norm, which does not follow averaged weights: use weight_norm instead"
    if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
        return "drops units inside a kernel that draws its own random numbers: set its dropout to 0, use nn.Dropout"
    return ""


def _unsuitable_batch_norm(layer: _BatchNorm) -> str:
    if not layer.track_running_stats:
        return "normalises by the batch even where it is evaluated: set track_running_stats to True"
    if layer.momentum is None:
        return "averages over all batches, which clients count apart: give it a momentum, such as 0.1"
    return ""


def _own_tensors(layer: nn.Module) -> list[str]:
    """Return the names of a layer's own parameters and buffers, without those of layers inside it."""
    return [n for n, _ in itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))]


def _trains_differently(layer: nn.Module) -> bool:
    """Return whether a layer computes something else in training mode: BatchNorm, or dropout of any kind.

    Layers that drop say how much in a field of their own, whose name has "drop" in it: `p` of torch's own, `dropout`,
    `drop_prob`, `attention_dropout` and so on of others.
    """
    if isinstance(layer, _BatchNorm):
        return True
    name = type(layer).__name__.lower()
    rates = {
        field: value for field, value in vars(layer).items() if "drop" in field or (field == "p" and "drop" in name)
    }
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates.values())


def _is_known(layer: nn.Module) -> bool:
    """Return whether a layer is torch's own or this package's, whose fields say all that training mode changes."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return not hooked and type(layer).__module__.startswith(("torch.nn.modules.", "fedquit.models."))


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
    if not any(p.numel() for p in module.parameters() if p.requires_grad):
        raise InputError(f"the model ({type(module).__name__}) is frozen as a whole: leave some parameters trainable.")


def _unusable(p: nn.Parameter) -> str:
    if isinstance(p, UninitializedParameter) or p.is_meta:
        return "has no values yet: give its layer all sizes, and build it on a real device"
    if not p.is_floating_point():
        return f"is {p.dtype}, and neither optimizers nor averages cover that: use real numbers, or make it a buffer"
    return ""


def _without_counters(module: nn.Module) -> nn.Module:
    """Drop BatchNorm's counters of batches: only a momentum of None reads them, and that is refused."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.num_batches_tracked = None
    return module


def _in_training_mode(module: nn.Module) -> nn.Module:
    """Return a copy of the module in training mode; the tensors are those of the module."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors}).train()


def _without_randomness(module: nn.Module) -> nn.Module:
    """Put the module into evaluation mode, so that its forward pass draws no random numbers."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.train()  # without dropout it makes no difference, but cuDNN has no gradient in evaluation mode
    return module
