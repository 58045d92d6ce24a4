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

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fedquit.engine.stacked.flat import computed, flattened, result_of
from fedquit.engine.stacked.work import GradientFunction, StepResult, StepTensors

log = logging.getLogger(__name__)

Compile = Literal["auto", "always", "never"]
Compiled = Callable[..., Sequence[Tensor]]
Compiler = Callable[[GraphModule, list[Tensor]], Compiled]

MIN_CLIENTS = 2  # fewer are asked once, as in unlearning, or are computed by whoever asks
MIN_STEPS = 2_000  # of a training: compiling took 34 and 60 s, and saved a GPT and a BERT of ten clients 24 and 20 ms
MIN_NUMBERS = 20_000_000  # parameters of all clients: a step of a small network has not 20 ms to save
OPTIONS: dict[str, Any] = {"unroll_reductions_threshold": 10}  # of the compiler: sums of 3 x 3 taps have no loop
MAX_OPERATIONS = 12_000  # of a step: a recurrent network that is written out takes the compiler minutes


def inductor(graph: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Compile by torch's own compiler: Triton on a GPU, C++ on a CPU."""
    with warnings.catch_warnings(), _repeatable():
        warnings.simplefilter("ignore")  # about the compiler's own code
        from torch._inductor import compile as compile_graph  # takes seconds to import

        compiled: Compiled = compile_graph(graph, [*inputs], options=OPTIONS)
    return compiled


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Let a compiler write programs that give the same bits every time they run.

    Gradients of embeddings would else be added up in whatever order threads come, and the order of a sum be chosen by
    timing. The switch is torch's own, and the compiler reads it while it writes.
    """
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = False  # it would be written to find errors, and there is none
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


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
        began = time.monotonic()
        with torch.autograd.set_multithreading_enabled(False):  # a thread of autograd's would not be traced
            graph = make_fx(outputs)(*given)
        operations = len(graph.graph.nodes)
        if operations > MAX_OPERATIONS:
            raise TooLargeError(f"a step has {operations} operations, and at most {MAX_OPERATIONS} are compiled")
        traced = time.monotonic()
        with torch.no_grad():
            drop_aliases(graph)
            compute_host_constants(graph, step.share.device)
            function = self.compiler(graph, given)
        took = traced - began, time.monotonic() - traced
        log.info("A step of %d operations was traced in %.1f s and compiled in %.1f s.", operations, *took)
        return function, places, count


def drop_aliases(graph: GraphModule) -> None:
    """Leave out operations that only rename a tensor: a fifth of a traced step, each of which costs a compiler time.

    Args:
        graph: Of operations; changed in place.
    """
    same_shape = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.expand.default}
    for node in list(graph.graph.nodes):
        alias = node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        if alias or (node.target in same_shape and _shape(node) == _shape(node.args[0])):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


def _shape(node: Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None


def compute_host_constants(graph: GraphModule, device: torch.device) -> None:
    """Compute now what follows from constants in the host's memory alone, up to where it lies on the device.

    A network may make a tensor of a number in its forward pass, as `torch.tensor(0.5, device=x.device)` does. Every
    step would copy it from the host's memory, which a CUDA graph cannot.

    Args:
        graph: Of operations; changed in place.
        device: Where the step is computed.
    """
    known: dict[Node, Tensor] = {}  # in the host's memory
    replaced = False
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            if isinstance(constant, Tensor) and constant.device != device:
                known[node] = constant
        elif node.all_input_nodes and all(n in known for n in node.all_input_nodes) and _is_pure(node):
            value = node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
            if not isinstance(value, Tensor):
                continue
            if value.device != device:
                known[node] = value
                continue
            name = f"_constant_of_{node.name}"
            graph.register_buffer(name, value, persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
            replaced = True
    if replaced:
        graph.graph.eliminate_dead_code()
        graph.recompile()


def _is_pure(node: Node) -> bool:
    """Whether a node computes the same from the same, and changes nothing."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
