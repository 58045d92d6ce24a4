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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fedquit.engine.stacked.eager import run_eagerly
from fedquit.engine.stacked.flat import computed, flattened
from fedquit.engine.stacked.schedule import Job
from fedquit.engine.stacked.work import GradientFunction, StepResult, StepTensors, Work

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

    def gradients(self, gradients_of: GradientFunction, step: StepTensors) -> StepResult:
        """Compute losses and gradients, by the traced step where there is one.

        Args:
            gradients_of: What is traced.
            step: What it is given. There are no copies in bfloat16 on a CPU, and networks that drop or keep statistics
                are not traced.
        """
        if step.keys is not None:
            return gradients_of(step)
        shape = self.by_shape.setdefault(tuple(step.share.shape), TracedStep())
        shape.taken += 1
        if shape.traced is None and shape.taken > STEPS_BEFORE_TRACING and not shape.untraceable:
            self._trace(shape, partial(computed, gradients_of, step), flattened(step))
        if shape.traced is None:
            return gradients_of(step)
        with torch.no_grad():
            loss, *gradients = shape.traced(*flattened(step))
        return StepResult(loss, gradients, {})

    def _trace(self, step: TracedStep, function: Callable[..., list[Tensor | None]], inputs: Sequence[Tensor]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        try:
            step.traced = _simplified(make_fx(function)(*(t.detach() for t in inputs)), inputs)
        except Exception as error:  # whatever a network does that cannot be traced, it goes on eagerly
            log.debug("a step is not replayed: %s", error)
            step.untraceable = True


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
