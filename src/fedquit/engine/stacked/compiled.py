# SPDX-License-Identifier: Apache-2.0
"""Steps of any network, compiled: traced into one graph of operations, forward and backward, and fused by a compiler.

A network of a transformer's kind is a few matrix products and many small operations between them, each of which reads
and writes all activations of all clients. `make_fx` traces losses and gradients of a step (`vmap`, autograd and the
modes that replace operations are gone by then) and torch's inductor fuses what lies between the products. The compiled
step is captured as a CUDA graph like any other.

A compiled step is one for a number of clients. Where fewer have a step left, it computes for all, and the others' part
is dropped: compiling takes half a minute, far longer than the steps that it could save.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedquit.engine.stacked.flat import computed, flattened, result_of
from fedquit.engine.stacked.work import GradientFunction, StepResult, StepTensors

log = logging.getLogger(__name__)

Compile = Literal["auto", "always", "never"]
Compiled = Callable[..., Sequence[Tensor]]
Compiler = Callable[[GraphModule, list[Tensor]], Compiled]

MIN_CLIENTS = 2  # fewer are asked once, as in unlearning, or are computed by whoever asks
MIN_CLIENT_STEPS = 64  # of a round: a training of many rounds is then long enough for half a minute of compiling
MAX_OPERATIONS = 12_000  # of a step: a recurrent network that is written out takes the compiler minutes


def inductor(graph: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Compile by torch's own compiler: Triton on a GPU, C++ on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the compiler's own code
        from torch._inductor import compile as compile_graph  # takes seconds to import

        compiled: Compiled = compile_graph(graph, [*inputs])
    return compiled


class TooLargeError(Exception):
    """A step has more operations than are worth compiling."""


@dataclass
class CompiledGradients:
    """Losses and gradients of the steps of one kind of work, by a compiled function for each shape (width, B).

    Attributes:
        gradients_of: What is compiled.
        compiler: From a graph of operations to a function of the same inputs.
    """

    gradients_of: GradientFunction
    compiler: Compiler = inductor
    _by_shape: dict[tuple[int, ...], tuple[Compiled, list[int], int]] = field(default_factory=dict)

    def __call__(self, step: StepTensors) -> StepResult:
        """Compute losses and gradients; the first step of a shape is compiled first.

        Raises:
            Exception: Whatever the compiler says of a step that it cannot compile.
        """
        inputs = flattened(step)
        shape = tuple(step.share.shape)
        if shape not in self._by_shape:
            self._by_shape[shape] = self._compile(step, inputs)
        function, places, count = self._by_shape[shape]
        with torch.no_grad():
            found = function(*(t.detach() for t in inputs))
        outputs: list[Tensor | None] = [None] * count
        for place, tensor in zip(places, found, strict=True):
            outputs[place] = tensor
        return result_of(outputs, step)

    def _compile(self, step: StepTensors, inputs: Sequence[Tensor]) -> tuple[Compiled, list[int], int]:
        """Return the compiled function, which of all outputs it returns, and how many there are with those of None."""
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        places: list[int] = []
        count = 0

        def outputs(*tensors: Tensor) -> list[Tensor]:
            nonlocal count
            found = computed(self.gradients_of, step, *tensors)
            count = len(found)
            places[:] = [n for n, tensor in enumerate(found) if tensor is not None]
            return [tensor for tensor in found if tensor is not None]

        given = [t.detach() for t in inputs]
        with torch.autograd.set_multithreading_enabled(False):  # a thread of autograd's would not be traced
            graph = make_fx(outputs)(*given)
        operations = len(graph.graph.nodes)
        if operations > MAX_OPERATIONS:
            raise TooLargeError(f"a step has {operations} operations, and at most {MAX_OPERATIONS} are compiled")
        log.debug("compiling a step of %d operations", operations)
        with torch.no_grad():
            return self.compiler(graph, given), places, count
