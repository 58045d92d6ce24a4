# SPDX-License-Identifier: Apache-2.0
"""Steps of small networks on a CPU: traced once into a graph of operations, and replayed.

Python, `vmap` and autograd take a third of the time of such a step. Once a step of one shape has been taken often
enough, `make_fx` traces its forward and backward pass into a list of ATen operations, which is run from then on: the
same operations on the same numbers, bit for bit, and no compiler is needed.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fedquit.core import Params, Sent
from fedquit.engine.stacked.eager import run_eagerly
from fedquit.engine.stacked.schedule import Job
from fedquit.engine.stacked.work import GradientFunction, Gradients, Work

log = logging.getLogger(__name__)
_aten = torch.ops.aten
_AUTOGRAD_ONLY = _aten.detach.default, _aten.alias.default
_VIEWS = _aten.view.default, _aten.slice.Tensor, _aten.expand.default
STEPS_BEFORE_TRACING = 100  # tracing takes a quarter of a second, which so many replays save
MAX_NUMBERS = 1 << 21  # in all rows: a step of more is long, and its overhead does not matter

Traced = Callable[..., Sequence[Tensor]]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: short operations gain nothing from a second, and wait long for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class TracedStep:
    """The step of one shape."""

    taken: int = 0  # times
    traced: Traced | None = None
    untraceable: bool = False


@dataclass
class TracedSteps:
    """The steps of one kind of work, by the shape (width, B) of their batches."""

    by_shape: dict[tuple[int, ...], TracedStep] = field(default_factory=dict)

    def gradients(
        self,
        gradients_of: GradientFunction,
        shared: Sent,
        share: Tensor,
        params: Params,
        copies: Params,
        per_client: Sent,
        batch: Sequence[Tensor],
    ) -> tuple[Tensor, Gradients]:
        """Compute losses and gradients, by the traced step where there is one.

        Args:
            gradients_of: What is traced, with the arguments that follow.
            shared: What all clients were sent.
            share: The weight of each example in its client's loss, (width, B).
            params: Leaves (width, *shape).
            copies: None are traced: there are none in float32.
            per_client: What each client was sent, (width, *shape).
            batch: The fields of a `Batch`, each (width, B, ...).
        """
        step = self.by_shape.setdefault(tuple(share.shape), TracedStep())
        step.taken += 1
        inputs = [share, *batch, *params.values(), *_tensors(shared), *_tensors(per_client)]
        if step.traced is None and step.taken > STEPS_BEFORE_TRACING and not step.untraceable:
            self._trace(step, partial(_flattened, gradients_of, shared, params, per_client, len(batch)), inputs)
        if step.traced is None:
            return gradients_of(shared, share, params, copies, per_client, batch)
        with torch.no_grad():
            loss, *gradients = step.traced(*inputs)
        return loss, gradients

    def _trace(self, step: TracedStep, function: Callable[..., list[Tensor | None]], inputs: Sequence[Tensor]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        try:
            step.traced = _simplified(make_fx(function)(*(t.detach() for t in inputs)), inputs)
        except Exception as error:  # whatever a network does that cannot be traced, it goes on eagerly
            log.debug("a step is not replayed: %s", error)
            step.untraceable = True


def _flattened(
    gradients_of: GradientFunction, shared: Sent, params: Params, per_client: Sent, batch: int, *inputs: Tensor
) -> list[Tensor | None]:
    """Compute losses and gradients from one flat list of tensors, with the names of the structured arguments."""
    share, *rest = inputs
    others = iter(rest[batch:])
    leaves = {n: next(others).detach().requires_grad_() for n in params}
    shared = {name: {n: next(others) for n in part} for name, part in shared.items()}
    per_client = {name: {n: next(others) for n in part} for name, part in per_client.items()}
    loss, gradients = gradients_of(shared, share, leaves, {}, per_client, rest[:batch])
    return [loss.detach(), *gradients]


def _tensors(sent: Mapping[str, Params]) -> list[Tensor]:
    return [p for params in sent.values() for p in params.values()]


def _simplified(traced: GraphModule, inputs: Sequence[Tensor]) -> Traced:
    """Drop operations that change nothing and call the others directly; the graph as traced if that differs."""
    shorter = copy.deepcopy(traced)
    for node in list(shorter.graph.nodes):
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            shorter.graph.erase_node(node)
    shorter.graph.eliminate_dead_code()
    for node in shorter.graph.nodes:
        if isinstance(node.target, OpOverload):
            node.target = _direct_call(node.target)
    shorter.recompile()
    with torch.no_grad():
        try:
            same = all(_same(a, b) for a, b in zip(shorter(*inputs), traced(*inputs), strict=True))
        except Exception as error:
            log.debug("a step is replayed as it was traced: %s", error)
            same = False
    return shorter.forward if same else traced.forward


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _changes_nothing(node: Node) -> bool:
    if node.target in _AUTOGRAD_ONLY:
        return True
    return node.target in _VIEWS and _shape(node) == _shape(node.args[0])


def _shape(node: Any) -> object:  # noqa: ANN401
    return node.meta["tensor_meta"].shape


def _direct_call(op: OpOverload) -> Callable[..., Any]:
    """Return the function of torch with the same name, which parses its arguments in half of the time."""
    name = "view" if op is _aten._unsafe_view.default else op.overloadpacket.__name__
    candidates = getattr(torch, name, None), getattr(Tensor, name, None)
    return next((f for f in candidates if isinstance(f, BuiltinFunctionType | MethodDescriptorType)), op)


@dataclass(frozen=True)
class ReplayedSteps:
    """Runs the steps of some clients on one core, from traced steps as soon as there are some."""

    work: Work
    traced: TracedSteps

    def run(self, jobs: Sequence[Job]) -> None:
        """Run a round."""
        with one_thread():
            run_eagerly(self.work, jobs, partial(self.traced.gradients, self.work.gradients))
