# SPDX-License-Identifier: Apache-2.0
"""Networks with dropout or BatchNorm in a step of ordinary training, the same in every engine.

Torch would draw a dropout's mask from its own generator, and BatchNorm would change its buffers in place. Here the mask
follows from the address (seed, phase, round, question, client), the step, the number of the call within the step, and
the place in the tensor; the running statistics are returned. A padded batch counts its examples alone.

Both hold for tasks that train as ordinary training does (`Task.augments`), and for the network that is trained. A
teacher, an unlearning student and every evaluation see the network as it is evaluated: nothing dropped, running
statistics for BatchNorm, and no change to them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import _C, Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fedquit.core import Model, Params
from fedquit.core.params import is_statistic
from fedquit.engine.overrides import OperatorOverride, Overrides
from fedquit.engine.plan import network_uniforms, places_in
from fedquit.errors import InputError


def training_form(model: Model, x: Tensor | None = None) -> Model | None:
    """Return the network as ordinary training computes it; None where that is how it is evaluated.

    Args:
        model: The network.
        x: Examples, on which a network that cannot tell otherwise is tried once.
    """
    settle = getattr(model, "settle", None)
    if settle is not None and x is not None:
        settle(x)
    return getattr(model, "training", None)


class TrainingModel:
    """A network in one step of one client."""

    def __init__(
        self, model: Model, form: Model, key: Tensor, share: Tensor | None = None, *, constant_places: bool = False
    ) -> None:
        """Begin a step.

        Args:
            model: The network as it is evaluated.
            form: The network as it is trained.
            key: Of the client's step, (); see `fedquit.engine.plan.step_key`.
            share: The weight of each example in the mean of its batch, (B,), 0 for padding; None where there is none.
            constant_places: The numbers that the masks are hashes of are constants for whoever traces the step.
        """
        self.model = model
        self.form = form
        self.places = _constant_places if constant_places else places_in
        self.key = key
        self.share = share
        self.calls = 0  # of random operations so far
        self.statistics: Params = {}  # after the step, by name

    def init(self, seed: int) -> Params:
        """Return fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits, of what is being trained in training mode, and of all else as it is evaluated."""
        if not any(map(_requires_grad, params.values())):
            return self.model(params, x)
        with TrainingOps(self, params, len(x)):
            return self.form(params, x)

    def uniforms(self, shape: Sequence[int]) -> Tensor:
        """Return fresh uniform numbers of that shape."""
        self.calls += 1
        return network_uniforms(self.key, self.calls, shape, self.places)


def _constant_places(numbers: int, device: torch.device) -> Tensor:
    """As `places_in`, in a table that is made now. A compiler would compute with the places as with addresses.

    Torch's own compiler does that symbolically, and the hashes leave the range of its numbers.
    """
    with _disable_current_modes():
        return places_in(numbers, device)


class MeasuringModel:
    """A network that can tell the statistics of a batch, for `fedquit.core.recalibration`."""

    def __init__(self, model: Model, form: Model) -> None:
        """Take a network as it is evaluated and as it is trained."""
        self.model = model
        self.form = form

    def init(self, seed: int) -> Params:
        """Return fresh parameters."""
        return self.model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits as they are evaluated."""
        return self.model(params, x)

    def batch_statistics(self, params: Params, x: Tensor) -> Params:
        """Return the mean and the unbiased variance of a batch at each BatchNorm layer, by the statistics' names.

        Nothing is dropped. A layer that gets one value a channel keeps its running statistics.
        """
        step = TrainingModel(self.model, self.form, torch.zeros((), dtype=torch.long, device=x.device))
        with TrainingOps(step, params, len(x), measure=True):
            self.form(params, x)
        return {n: step.statistics.get(n, p) for n, p in params.items() if is_statistic(n)}


def measuring(model: Model) -> Model:
    """Return the network as measurements see it: one with BatchNorm can tell a batch's statistics."""
    form = training_form(model)
    return model if form is None else MeasuringModel(model, form)


def _requires_grad(tensor: Tensor) -> bool:
    """Return whether a tensor is trained, also inside `vmap`, whose tensors do not say so themselves."""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


class TrainingOps(OperatorOverride):
    """While this mode is active, random operations and BatchNorm are those of this module."""

    def __init__(self, step: TrainingModel, params: Params, batch: int, *, measure: bool = False) -> None:
        """Take a step's network.

        Args:
            step: Draws the numbers and receives the statistics.
            params: Those of the call.
            batch: B.
            measure: Drop nothing, and record a batch's statistics as they are, without the running ones.
        """
        super().__init__(self._replacements())
        self.step = step
        self.names = {id(tensor): name for name, tensor in params.items() if is_statistic(name)}
        self.batch = batch
        self.measure = measure

    def _replacements(self) -> Overrides:
        own: dict[Any, Callable[..., Any]] = {
            functional.batch_norm: self.batch_norm,
            functional.dropout: self.dropout,
            functional.dropout1d: self.dropout_channels,
            functional.dropout2d: self.dropout_channels,
            functional.dropout3d: self.dropout_channels,
            functional.scaled_dot_product_attention: self.attention,
            functional.multi_head_attention_forward: self.multi_head_attention,
            torch.rand: self.rand,
            torch.rand_like: self.rand_like,
            torch.bernoulli: self.bernoulli,
            Tensor.bernoulli: self.bernoulli,
            Tensor.bernoulli_: self.bernoulli_,
        }
        return {**own, **{function: _refuse(name) for name, function in _UNCOVERED.items()}}

    # Random operations.

    def _mask(self, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
        """Return what is multiplied with: 0 with probability p, 1 / (1 - p) otherwise."""
        self._require_batch_first(shape)
        kept = (self.step.uniforms(shape) >= p).to(dtype)
        return kept / (1 - p) if p < 1 else kept  # all 0

    def _require_batch_first(self, shape: Sequence[int]) -> None:
        if len(shape) == 0 or shape[0] % self.batch:
            raise InputError(
                f"the network draws random numbers of shape {tuple(shape)} for a batch of {self.batch}: engines agree "
                "on them only where the examples come first (batch_first=True)."
            )

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """As `torch.nn.functional.dropout`; never in place."""
        if not training or self.measure or p == 0:
            return x
        return x * self._mask(x.shape, p, x.dtype)

    def dropout_channels(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """As `torch.nn.functional.dropout2d` and its kin: whole channels of an example."""
        if not training or self.measure or p == 0:
            return x
        mask = self._mask(x.shape[:2], p, x.dtype)
        return x * mask.reshape(*mask.shape, *[1] * (x.dim() - 2))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As `torch.nn.functional.scaled_dot_product_attention`, written out where it drops."""
        if dropout_p == 0 or self.measure:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-2, -1) * factor  # (..., Q, K)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value

    def multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own arguments
        """As `torch.nn.functional.multi_head_attention_forward`, whose operations inside are replaced in turn."""
        with self:
            return _plain_multi_head_attention(*args, **kwargs)

    def rand(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # noqa: ANN401 - torch's own
        """As `torch.rand`: what layers that drop whole branches draw."""
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        self._require_batch_first(shape)
        return self.step.uniforms(shape).to(dtype or torch.get_default_dtype())

    def rand_like(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # noqa: ANN401
        """As `torch.rand_like`."""
        return self.rand(x.shape, dtype=dtype or x.dtype)

    def bernoulli(self, x: Tensor, p: float | None = None, **_: Any) -> Tensor:  # noqa: ANN401
        """As `torch.bernoulli`: with the probabilities x, or p for all."""
        self._require_batch_first(x.shape)
        return (self.step.uniforms(x.shape) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(self, x: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:  # noqa: ANN401
        """As `torch.Tensor.bernoulli_`; in `vmap` it is a new tensor, since one made inside cannot hold all clients'.

        The given tensor is then filled with NaN, so that a network that reads it cannot go on with old numbers.
        """
        self._require_batch_first(x.shape)
        drawn = (self.step.uniforms(x.shape) < p).to(x.dtype)
        wrapped = _C._functorch.is_functorch_wrapped_tensor
        if not wrapped(drawn) or wrapped(x):
            return x.copy_(drawn)
        if not x.is_floating_point():
            raise InputError(f"the network calls bernoulli_ on a tensor of {x.dtype}: draw with torch.rand instead.")
        x.fill_(torch.nan)
        return drawn

    # BatchNorm.

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """As `torch.nn.functional.batch_norm`, with the new running statistics in `step.statistics`.

        A batch of one value a channel has no variance: it is normalised by the running statistics, which stay.
        """
        if not training or running_mean is None or running_var is None:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if self.step.share is not None:
            return self._weighted_batch_norm(x, running_mean, running_var, weight, bias, momentum, eps)
        if x.numel() == x.shape[1]:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        new_mean = running_mean.clone()
        new_var = running_var.clone()
        part = 1.0 if self.measure else momentum
        out = functional.batch_norm(x, new_mean, new_var, weight, bias, True, part, eps)
        self._record(running_mean, running_var, new_mean, new_var)
        return out

    def _weighted_batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalise (N, C, ...) where the examples have weights: variance biased, in the buffer n / (n - 1) of it."""
        assert self.step.share is not None
        self._require_batch_first(x.shape)
        rows = x.shape[0] // self.batch  # of each example: a network may have folded positions into the batch
        places = x[0, 0].numel()
        by_channel = [1, -1] + [1] * (x.dim() - 2)
        over = [d for d in range(x.dim()) if d != 1]
        wide = x.to(running_mean.dtype)
        share = self.step.share.to(wide.dtype).repeat_interleave(rows) / (rows * places)  # (N,)
        share = share.reshape(-1, *[1] * (x.dim() - 1))
        count = (self.step.share > 0).sum().to(wide.dtype) * (rows * places)  # of values a channel
        enough = count > 1
        mean = (wide * share).sum(over)  # (C,)
        centred = wide - mean.reshape(by_channel)
        var = (centred.square() * share).sum(over)  # (C,)
        unbiased = var * (count / (count - 1).clamp(min=1))
        new_mean = (1 - momentum) * running_mean + momentum * mean.detach()
        new_var = (1 - momentum) * running_var + momentum * unbiased.detach()
        self._record(
            running_mean,
            running_var,
            torch.where(enough, new_mean, running_mean),
            torch.where(enough, new_var, running_var),
        )
        centred = torch.where(enough, centred, wide - running_mean.reshape(by_channel))
        var = torch.where(enough, var, running_var)
        out = centred * (var + eps).rsqrt().reshape(by_channel)
        if weight is not None:
            out = out * weight.reshape(by_channel)
        if bias is not None:
            out = out + bias.reshape(by_channel)
        return out.to(x.dtype)

    def _record(self, old_mean: Tensor, old_var: Tensor, mean: Tensor, var: Tensor) -> None:
        self.step.statistics[self.names[id(old_mean)]] = mean.detach()
        self.step.statistics[self.names[id(old_var)]] = var.detach()


# Torch's own, as a function that does not ask modes first: a mode would hide what it calls from itself.
_plain_multi_head_attention = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)

_UNCOVERED: Mapping[str, Callable[..., Any]] = {
    "rrelu": functional.rrelu,
    "torch.rrelu": torch.rrelu,
    "torch.dropout": torch.dropout,
    "torch.feature_dropout": torch.feature_dropout,
    "torch.alpha_dropout": torch.alpha_dropout,
    "torch.feature_alpha_dropout": torch.feature_alpha_dropout,
    "gumbel_softmax": functional.gumbel_softmax,
    "fractional_max_pool2d": functional.fractional_max_pool2d_with_indices,
    "fractional_max_pool3d": functional.fractional_max_pool3d_with_indices,
    "alpha_dropout": functional.alpha_dropout,
    "feature_alpha_dropout": functional.feature_alpha_dropout,
    "randn": torch.randn,
    "randn_like": torch.randn_like,
    "randint": torch.randint,
    "randint_like": torch.randint_like,
    "randperm": torch.randperm,
    "multinomial": torch.multinomial,
    "normal": torch.normal,
    "normal_": Tensor.normal_,
    "uniform_": Tensor.uniform_,
    "random_": Tensor.random_,
    "exponential_": Tensor.exponential_,
    "log_normal_": Tensor.log_normal_,
    "cauchy_": Tensor.cauchy_,
    "geometric_": Tensor.geometric_,
    "poisson": torch.poisson,
    "binomial": torch.binomial,
}


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InputError(
            f"the network draws random numbers with torch's {name} in training, which engines cannot repeat: use "
            "torch.nn.Dropout, or torch.rand with the examples first."
        )

    return refuse
