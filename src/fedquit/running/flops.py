# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a client's work, counted once for each kind of task.

A multiply-add counts as 2. The count covers matrix products, convolutions, attention and recurrent
layers, in the forward and the backward pass, of everything that a task's loss computes, a teacher's
forward pass included, or that a measurement's statistic computes. It leaves out embedding lookups
and elementwise work (activations, normalisation, the loss, the optimizer): a percent or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedquit.core import Batch, Local, Measurement, Model, Params, Sent, Task
from fedquit.core.local_layers import with_layers
from fedquit.core.params import statistics_of, weights_of
from fedquit.engine.local_layers import first_layers
from fedquit.engine.optim import OPTIMIZERS
from fedquit.engine.training import measuring
from fedquit.errors import FedquitError
from fedquit.utils.names import lookup

SMALL, LARGER = 2, 3  # the two batch sizes that are counted


@dataclass(frozen=True)
class Shape:
    """The shapes of one example and of its label.

    Attributes:
        x: of the example.
        y: of the label; () for one class number.
        dtype: of the example.
    """

    x: tuple[int, ...]
    y: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Shape:
        """Return the shape of each example of a set: x `(N, …)`, y `(N, …)`."""
        return cls(tuple(x.shape[1:]), tuple(y.shape[1:]), x.dtype)

    def zeros(self, size: int) -> Batch:
        """Return a batch of `size` examples of zeros (token 0 for networks that read tokens)."""
        noise = torch.zeros(size, *self.y)
        x = torch.zeros(size, *self.x, dtype=self.dtype)
        y = torch.zeros(size, *self.y, dtype=torch.long)
        return Batch(x, y, noise, noise, torch.zeros(size, dtype=torch.bool))


def _recurrent(
    sequence: Sequence[int], w_input: Sequence[int], w_hidden: Sequence[int], *_: object, **__: object
) -> int:
    """One direction of one layer of an LSTM, (T, B, I): its two products at each of T steps, 2 * 4H(I + H) a step."""
    return 2 * sequence[0] * sequence[1] * (math.prod(w_input) + math.prod(w_hidden))


def _recurrent_backward(*shapes: Any, **more: Any) -> int:  # noqa: ANN401 - whatever the kernel takes
    """Gradients of inputs and of weights: each costs as much as the forward pass."""
    return 2 * _recurrent(*shapes, **more)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Two products, (.., q, d) by (.., d, k) and (.., q, k) by (.., k, v)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Five products: the scores once more, the gradients of scores and values, of queries and of keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _convolution_backward(
    gradient: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    *how: Any,  # noqa: ANN401 - numbers, lists and flags
    **_: object,
) -> int:
    """Gradients of inputs and weights, where wanted: each costs as much as the forward pass."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = how
    positions = x if transposed else gradient  # at each of them every weight is used once, whatever the groups
    each = 2 * x[0] * math.prod(positions[2:]) * math.prod(weight)
    return each * sum(map(bool, wanted[:2]))


_aten = torch.ops.aten
# CPU kernels for which torch's counter has no formula (a float32 LSTM, attention), and the backward
# pass of a convolution, whose formula is wrong for groups: it counts as if every channel were
# connected to every other.
FORMULAS: dict[object, Callable[..., int]] = {
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.convolution_backward: _convolution_backward,
}


def step_flops(model: Model, task: Task, sent: Sent, shape: Shape, batch_size: int) -> int:
    """Count one optimizer step: the task's loss and its backward pass. Of a measurement, count one batch.

    What a client adds from its own memory is not known here. Tasks that can do without it are
    counted without; for the others, the parameters in `start` take its place.

    Args:
        model: the network.
        task: what the client does.
        sent: the named sets of parameters that the client received; it completes them with layers of its own.
        shape: of one example.
        batch_size: examples in the step.

    Returns:
        Floating-point operations.
    """
    sent = {name: _on_cpu(params) for name, params in sent.items()}
    layers = first_layers(model, 0)
    sent = with_layers(model, sent, layers) if layers else sent
    try:
        return _counted(model, task, sent, shape, batch_size)
    except (FedquitError, KeyError):
        memory = dict.fromkeys(task.needs, sent.get("start", {}))
        return _counted(model, task, {**memory, **sent}, shape, batch_size)


def _counted(model: Model, task: Task, sent: Sent, shape: Shape, batch_size: int) -> int:
    with torch.no_grad():
        sent = task.prepare(model, sent)
        params = task.begin(sent)
    batch = shape.zeros(batch_size)
    if isinstance(task, Measurement):
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            task.statistic(measuring(model), params, sent, batch)
        return int(counter.get_total_flops())
    leaves = {n: p.detach().requires_grad_() for n, p in weights_of(params).items()}
    curved = lookup(OPTIMIZERS, task.local.optimizer, "optimizer").wants_curvature
    trained = list(leaves.values())
    with torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        loss = task.loss(model, {**leaves, **statistics_of(params)}, sent, batch).mean()
        gradient = torch.autograd.grad(loss, trained, create_graph=curved, materialize_grads=True)
        if curved:  # a second backward pass, for the curvature along one direction
            along = torch.stack([g.sum() for g in gradient]).sum()
            torch.autograd.grad(along, trained, materialize_grads=True)
    return int(counter.get_total_flops())


def _on_cpu(params: Params) -> Params:
    return {n: p.detach().cpu() for n, p in params.items()}


def batches(examples: int, local: Local, steps: int | None = None) -> dict[int, int]:
    """Return how many steps of each batch size a client takes.

    Args:
        examples: how many the client has.
        local: how it goes through them.
        steps: how many it took; None for all that `engine.plan.make_plan` gives it.
    """
    if steps is None:
        steps = local.steps(examples)
    if steps == 0:
        return {}
    per_epoch = local.steps_per_epoch(examples)
    last = examples - (per_epoch - 1) * local.batch_size  # from 1 to batch_size
    steps_by_size = {local.batch_size: steps - steps // per_epoch}
    steps_by_size[last] = steps_by_size.get(last, 0) + steps // per_epoch
    return {size: count for size, count in steps_by_size.items() if count}


@dataclass
class Flops:
    """Counts the work on one network and one kind of example, each kind of task once.

    A loss is given for each example alone, so the cost of a step is a fixed part and a part for
    each example: two small batches determine every batch size exactly, and a ResNet-18 is counted
    in a second.

    Attributes:
        model: the network.
        shape: of one example.
        public_examples: how many examples the server has of its own.
    """

    model: Model
    shape: Shape
    public_examples: int = 0
    _known: dict[object, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)

    def step(self, task: Task, sent: Sent, batch_size: int) -> int:
        """Return the operations of one optimizer step.

        Args:
            task: what the client does.
            sent: the named sets of parameters that the client received.
            batch_size: examples in the step.
        """
        kind = _kind(task, sent)
        if kind not in self._known:
            small, larger = (step_flops(self.model, task, sent, self.shape, n) for n in (SMALL, LARGER))
            each = (larger - small) // (LARGER - SMALL)
            self._known[kind] = (small - SMALL * each, each)
        fixed, each = self._known[kind]
        return fixed + batch_size * each

    def at_client(self, task: Task, sent: Sent, examples: int, steps: int | None = None) -> int:
        """Return the operations of a client for a whole task.

        Args:
            task: what the client does.
            sent: the named sets of parameters that the client received.
            examples: how many examples the client has.
            steps: how many it took; None for all that are planned.
        """
        return sum(n * self.step(task, sent, size) for size, n in batches(examples, task.local, steps).items())

    def at_server(self, task: Task, sent: Sent, steps: int | None = None) -> int:
        """Return the operations of the server for a task on its public data.

        Args:
            task: what the server does.
            sent: the named sets of parameters for the task.
            steps: how many it took; None for all that are planned.
        """
        return self.at_client(task, sent, self.public_examples, steps)


def _kind(task: Task, sent: Mapping[str, Params]) -> object:
    """Return all that a count depends on: not the rate, the epochs or `remember`."""
    own = tuple((f.name, getattr(task, f.name)) for f in fields(task) if f.name not in ("local", "remember"))
    curved = lookup(OPTIMIZERS, task.local.optimizer, "optimizer").wants_curvature
    shapes = tuple((name, tuple((n, p.shape) for n, p in params.items())) for name, params in sorted(sent.items()))
    return type(task), own, curved, shapes
