# SPDX-License-Identifier: Apache-2.0
"""Steps of any network as a compiler gets them, on a CPU: the same numbers as the sequential engine's.

CUDA graphs have a stand-in here. Unless a test says otherwise the graph of operations is run as it was traced: what a
compiler makes of it is torch's business, and takes it a minute a network on a CPU (the tests marked `slow`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fedquit.core import Local, Params, Task
from fedquit.core.fedavg import Learn
from fedquit.engine import Address, Ask, Compile, Precision, SequentialEngine, StackedEngine
from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.stacked import compiled, products
from fedquit.engine.stacked import engine as stacked
from fedquit.engine.stacked.capture import CapturedSteps, DeviceClock
from fedquit.engine.stacked.products import ProductOps, parts_of
from fedquit.methods.fedquit import Distill
from fedquit.models import FunctionalModel
from general_networks import NETWORKS, SIZES, apart
from graph_stand_ins import capture_on_cpu

EXACT = 1e-12  # of the largest parameter
LOCAL = Local(batch_size=4, lr=0.05)


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stacked engine captures its steps; a graph of operations is run as it is."""
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(stacked, "inductor", as_traced)


def as_traced(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    return graph


def steps_of(engine: StackedEngine) -> CapturedSteps:
    (steps,) = engine.graphs.captured.values()
    return steps


def agree(engine: StackedEngine, task: Task, start: Params, rounds: int = 2) -> None:
    """The same as the sequential engine, in several rounds with clients of several lengths."""
    sequential = SequentialEngine(engine.model, engine.data, {})
    for number in range(rounds):
        ask = Ask(task, tuple(range(len(SIZES))), "all", {"start": start}, Address(2, "train", number))
        expected = list(sequential.run(ask))
        for reply, wanted in zip(engine.run(ask), expected, strict=True):
            assert apart(reply.params, wanted.params) <= EXACT
            assert reply.loss == pytest.approx(wanted.loss, rel=1e-11)
        assert apart(expected[0].params, start) > 1e-5
        start = expected[0].params


@pytest.mark.parametrize("task", [Learn(LOCAL), Distill(LOCAL)], ids=["learn", "distill"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_step_is_the_sequential_one(name: str, task: Task) -> None:
    """With dropout, statistics and adapters; clients that have ended are computed and dropped."""
    model, data = NETWORKS[name]()
    engine = StackedEngine(model, data, {}, compile="always")
    agree(engine, task, model.init(3))
    if isinstance(task, Distill) and name in ("gpt", "lora"):  # chunked, to save memory: it looks at its numbers
        assert steps_of(engine).compiled is None
    else:
        assert steps_of(engine).compiled is not None, steps_of(engine).why
    assert sorted(steps_of(engine).graphs) == [1, 2, 4]


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_compiler_products_are_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(StackedEngine, "_compiles", lambda *_: False)
    model, data = NETWORKS[name]()
    engine = StackedEngine(model, data, {}, compile="always")
    agree(engine, Learn(LOCAL), model.init(3), rounds=1)
    assert steps_of(engine).compiled is None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("compile", ["default", "never", "too short", "too small", "auto", "always"])
def test_nothing_of_it_runs_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, compile: str, clip: float, optimizer: str
) -> None:
    """The mode, the optimizer's kernel and the convolutions of a step that has kernels, as on a GPU."""
    monkeypatch.setattr(StackedEngine, "uses_kernels", True)
    model, data = NETWORKS["batch_norm"]()
    if compile in ("too short", "auto"):
        monkeypatch.setattr(stacked, "MIN_NUMBERS", 1)
    options: dict[str, Any] = {"compile": compile} if compile in get_args(Compile) else {}
    options["rounds"] = 10**6 if compile in ("too small", "auto") else 2
    engine = StackedEngine(model, data, {}, precision="bf16", **options)
    task = Learn(replace(LOCAL, optimizer=optimizer, clip=clip))
    jobs = engine._jobs(Ask(task, (0, 1), "all", {"start": model.init(3)}, Address(2, "train")), task, (0, 1))
    work = engine._work(task, jobs, 4)
    work.load(jobs)
    step = work.tensors(2, DeviceClock(torch.device("cpu"), LOCAL.batch_size))
    network = work._in_bfloat16(model, step.params, step.copies, step)
    asked = compile in ("auto", "always")
    assert engine._compiles(jobs, 4) == asked
    assert isinstance(work._operations(), ProductOps) == asked
    assert network.kernel_biases == asked
    assert work._has_update_kernel() == (asked or (optimizer == "sgd" and not clip))


def test_optimizers_read_what_a_compiled_step_gave() -> None:
    model, data = NETWORKS["gpt"]()
    local = replace(LOCAL, lr=1e-3, optimizer="adamw", weight_decay=0.1, clip=1.0)
    agree(StackedEngine(model, data, {}, compile="always"), Learn(local), model.init(3))


def test_one_trace_serves_all_widths_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[GraphModule] = []

    def noted(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append(graph)
        return graph

    monkeypatch.setattr(stacked, "inductor", noted)
    model, data = NETWORKS["batch_norm"]()
    agree(StackedEngine(model, data, {}, compile="always"), Learn(LOCAL), model.init(3), rounds=3)
    assert len(traced) == 1
    assert not any("convolution" in str(node.target) for node in traced[0].graph.nodes)


def test_a_compiler_gets_few_operations_of_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """One view of all taps, and none that only renames a tensor: compiling takes as long as a step has operations."""
    traced: list[GraphModule] = []

    def noted(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append(graph)
        return graph

    monkeypatch.setattr(stacked, "inductor", noted)
    model, data = NETWORKS["mit"]()
    list(StackedEngine(model, data, {}, compile="always").run(first_round(model)))
    names = [str(node.target) for node in traced[0].graph.nodes]
    assert sum("slice_backward" in name for name in names) == 9 + 3  # the second patches, which overlap at stride 2
    assert not any("select_backward" in name or "detach" in name or "alias" in name for name in names)
    # Patches twice; both blocks forward, and backward by the images and by the taps.
    assert sum("as_strided" in name for name in names) == 2 + 2 * 3


def test_only_what_renames_a_tensor_is_dropped() -> None:
    def step(x: Tensor) -> Tensor:
        return x.detach().view(2, 3).view(3, 2).expand(3, 2).expand(2, 3, 2) * 2

    graph = make_fx(step)(torch.ones(2, 3))
    compiled.drop_aliases(graph)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called == ["aten.view.default", "aten.expand.default", "aten.mul.Tensor"]
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(graph(x), step(x))


def first_round(model: FunctionalModel) -> Ask:
    return Ask(Learn(LOCAL), (0, 1), "all", {"start": model.init(3)}, Address(2, "train"))


def test_a_compiler_that_fails_leaves_the_step_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no Triton\nhere")

    monkeypatch.setattr(stacked, "inductor", fails)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, compile="always")
    with caplog.at_level(logging.WARNING):
        agree(engine, Learn(LOCAL), model.init(3))
    assert "(RuntimeError: no Triton here)" in caplog.text
    assert steps_of(engine).compiled is None
    assert not steps_of(engine).work.numerics.compiled


def test_what_follows_from_the_hosts_constants_is_computed_once() -> None:
    """Another device than the CPU: the copy that every step would make from the host's memory."""
    elsewhere = torch.device("meta")

    def step(x: Tensor) -> Tensor:
        scale = (torch.tensor([2.0, 3.0]) * 2).to(elsewhere)
        return x * scale + torch.tensor(0.5, device=elsewhere) + torch.rand(2).to(elsewhere)

    graph = make_fx(step)(torch.empty(2, device=elsewhere))
    compiled.compute_host_constants(graph, elsewhere)
    constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    assert constants
    assert all(constant.device == elsewhere for constant in constants)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("_to_copy" in name for name in called) == 1, "random numbers stay"
    assert graph(torch.empty(2, device=elsewhere)).shape == (2,)

    def plain(x: Tensor) -> Tensor:
        return x * torch.tensor([2.0, 3.0])

    here = make_fx(plain)(torch.ones(2))
    nodes = len(here.graph.nodes)
    compiled.compute_host_constants(here, torch.device("cpu"))
    assert len(here.graph.nodes) == nodes
    assert here(torch.ones(2)).tolist() == [2.0, 3.0]


def test_copies_of_what_is_frozen_are_no_part_of_a_step() -> None:
    """They are made the first time that a network is called on a device, which may be while a step is traced."""
    model = FunctionalModel(half_frozen, torch.float64)
    params = {n: p.float() for n, p in model.init(3).items()}
    x = torch.ones(2, 4)
    graph = make_fx(lambda x, *values: model(dict(zip(params, values, strict=True)), x))(x, *params.values())
    assert not any("_to_copy" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(x, *params.values()), model(params, x))


def half_frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    network.get_submodule("0").requires_grad_(False)
    return network


def test_the_compiler_is_asked_for_programs_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process is left as it was, whatever the compiler says."""
    asked: list[tuple[bool, bool]] = []

    def noted(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
        asked.append((torch.are_deterministic_algorithms_enabled(), flags.fill_uninitialized_memory))
        raise RuntimeError("no")

    flags: Any = torch.utils.deterministic
    monkeypatch.setattr(torch._inductor, "compile", noted)
    for mode in ("default", "error"):
        torch.set_deterministic_debug_mode(mode)
        try:
            with pytest.raises(RuntimeError, match="no"):
                compiled.inductor(make_fx(torch.sin)(torch.ones(2)), [torch.ones(2)])
            assert torch.get_deterministic_debug_mode() == {"default": 0, "error": 2}[mode]
        finally:
            torch.set_deterministic_debug_mode("default")
    assert asked == [(True, False)] * 2
    assert flags.fill_uninitialized_memory


def test_a_step_of_too_many_operations_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_OPERATIONS", 50)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, compile="always")
    agree(engine, Learn(LOCAL), model.init(3), rounds=1)
    assert "at most 50 are compiled" in steps_of(engine).why


def test_memory_that_runs_out_while_compiling_halves_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError
        return graph

    monkeypatch.setattr(stacked, "inductor", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, compile="always")
    start = model.init(3)
    ask = Ask(Learn(LOCAL), tuple(range(len(SIZES))), "all", {"start": start}, Address(2, "train"))
    expected = list(SequentialEngine(model, data, {}).run(ask))
    for reply, wanted in zip(engine.run(ask), expected, strict=True):
        assert apart(reply.params, wanted.params) <= EXACT
    assert engine.graphs.max_clients == 2


def planned_jobs(clients: int, parameters: int) -> list[Any]:
    """What a decision by sizes reads of jobs."""
    return [SimpleNamespace(start={"w": torch.empty(parameters, device="meta")})] * clients


def test_which_trainings_are_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the plan, whatever part of it a resumed run has still to do."""
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, precision="bf16", rounds=30)
    assert engine.compile == "auto"
    many = planned_jobs(10, 3_345_092)  # MiT-B0
    for _ in range(2):
        assert not engine._compiles(many, 128), "no Triton"
    assert [record.getMessage() for record in caplog.records] == [stacked.NO_COMPILER]
    monkeypatch.setattr(StackedEngine, "uses_kernels", True)
    assert engine._compiles(many, 128)
    assert not engine._compiles(planned_jobs(1, 100_000_000), 1024), "one client: unlearning"
    assert not engine._compiles(planned_jobs(8, 820_000), 1024), "the LSTM of Shakespeare: its steps take 5 ms"
    assert not engine._compiles(many, 64), "30 rounds of 64 steps"
    assert not replace(engine, rounds=1)._compiles(many, 1024), "one round"
    assert not replace(engine, precision="float32")._compiles(many, 1024), "nothing is known about a compiler's gain"
    assert not replace(engine, compile="never")._compiles(many, 1024)
    assert replace(engine, compile="always")._compiles(planned_jobs(1, 1), 1)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_nothing_of_it_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    """Bit for bit as without it, also where it is asked for."""
    monkeypatch.setattr(StackedEngine, "captures_graphs", False)
    model, data = NETWORKS["gpt"]()
    replies = []
    for way in get_args(Compile):
        engine = StackedEngine(model, data, {}, precision=precision, compile=way, rounds=10**6)
        replies.append(list(engine.run(first_round(model))))
        jobs = engine._jobs(first_round(model), Learn(LOCAL), (0, 1))
        assert not isinstance(engine._work(Learn(LOCAL), jobs, 4)._operations(), ProductOps)
    for other in replies[1:]:
        for one, two in zip(replies[0], other, strict=True):
            assert all(torch.equal(one.params[n], two.params[n]) for n in one.params)


def test_a_network_that_kernels_cover_is_as_without_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that claim most gradients of a step: no compiler, no row products, no other kernel of an optimizer."""
    monkeypatch.setattr(GradientBuffer, "claimed_part", 0.9)
    kernels = SimpleNamespace(compile_ahead=contextlib.nullcontext)  # there is no Triton without a GPU
    monkeypatch.setitem(sys.modules, "fedquit.engine.cuda.triton_common", kernels)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, compile="always")
    ask = first_round(model)
    jobs = engine._jobs(ask, Learn(LOCAL), (0, 1))
    work = engine._work(Learn(LOCAL), jobs, 8)
    work.load(jobs)
    steps = CapturedSteps(work, engine.graphs.stream(data.y.device), as_traced)
    work.numerics = replace(work.numerics, kernels=True)
    monkeypatch.setattr(steps, "_warm_up", lambda width: None)
    steps._choose_way()
    assert steps.why == "kernels cover the network"
    assert steps.compiled is None
    assert not work.numerics.general


def test_a_step_that_cannot_be_captured_is_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that copies a number from the host's memory; said once, for all kinds of work and rounds."""

    def refuses(graph: object, pool: object, stream: object) -> NoReturn:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {})
    with caplog.at_level(logging.WARNING):
        agree(engine, Learn(LOCAL), model.init(3))
        agree(engine, Distill(LOCAL), model.init(3), rounds=1)
    assert [record.getMessage() for record in caplog.records] == [
        "A step cannot be captured as a CUDA graph, and is run as torch runs it "
        "(RuntimeError: operation not permitted when stream is capturing)."
    ]
    assert not any(steps.graphs for steps in engine.graphs.captured.values())


def test_memory_that_runs_out_in_a_capture_is_no_reason_to_capture_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where CUDA says something else when the capture is ended."""

    def full(graph: object, pool: object, stream: object) -> NoReturn:
        try:
            raise torch.OutOfMemoryError
        finally:
            raise RuntimeError("capture failed")

    monkeypatch.setattr(torch.cuda, "graph", full)
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {})
    jobs = engine._jobs(first_round(model), Learn(LOCAL), (0, 1))
    with pytest.raises(RuntimeError, match="capture failed"):
        engine._captured(Learn(LOCAL), jobs)
    assert not steps_of(engine).why_eager


def test_a_network_that_kernels_cover_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that have claimed most gradients of a step, as the side stream's buffer tells."""
    model, data = NETWORKS["batch_norm"]()
    engine = StackedEngine(model, data, {}, compile="always")
    ask = Ask(Learn(LOCAL), (0, 1), "all", {"start": model.init(3)}, Address(2, "train"))
    list(engine.run(ask))
    buffer = steps_of(engine).work.gradient_buffer
    sizes = dict(buffer._sizes)
    assert buffer.claimed_part == 0
    buffer.claimed.update(start for start, size in sizes.items() if size == 4 * 7 * 7 * 3)
    assert buffer.claimed_part == pytest.approx(588 / sum(sizes.values()))


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"padding": (1, 2), "stride": (2, 1)},
    {"stride": 3},
    {"stride": 3, "padding": 1},
    {"dilation": 2, "padding": 2},
    {"groups": 4, "padding": 1},
    {"groups": 4, "padding": (2, 0), "dilation": (1, 2)},
    {"groups": 4, "stride": 2, "dilation": (1, 2), "padding": 1},
    {"groups": 2},
    {"padding": "same"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_as_products(options: dict[str, Any], bias: bool) -> None:
    """Values and gradients of two clients, of images that are not square."""
    draw = torch.Generator().manual_seed(1)
    groups = options.get("groups", 1)
    x = torch.randn(2, 3, 4, 9, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 4, 4 // groups, 3, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 4, generator=draw, dtype=torch.float64, requires_grad=True)

    def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.conv2d(x, w, b if bias else None, **options)

    with ProductOps(convolutions=True):
        out = torch.func.vmap(convolved)(x, w, b)
    expected = torch.stack([convolved(x[k], w[k], b[k]) for k in range(2)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    leaves = [x, w, b] if bias else [x, w]
    found = torch.autograd.grad((out * weights).sum(), leaves)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_in_parts_is_the_whole_one(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    monkeypatch.setattr(products, "MIN_ROWS", 2)
    assert parts_of(5 * 8, 3, 6) == 8
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 5, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 3, generator=draw, dtype=torch.float64)
    w = w if frozen else torch.stack([w, 2 * w]).requires_grad_()
    in_dims = (0, None if frozen else 0)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x.transpose(0, 1), w)  # rows that do not lie in one piece

    with ProductOps(convolutions=False):
        out = torch.func.vmap(layer, in_dims)(x, w)
    expected = torch.stack([layer(x[k], w if frozen else w[k]) for k in range(2)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    leaves = [x] if frozen else [x, w]
    found = torch.autograd.grad(out.sin().sum(), leaves)
    for one, other in zip(found, torch.autograd.grad(expected.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_parts_keep_a_gpu_busy() -> None:
    assert parts_of(32 * 56 * 56, 32, 128) == 32  # MiT-B0's first stage
    assert parts_of(32 * 49, 256, 1024) == 1  # its last
    assert parts_of(8 * 128, 384, 1536) == 1  # a language model


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_what_the_compiler_makes_of_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(stacked, "inductor", compiled.inductor)
    model, data = NETWORKS[name]()
    engine = StackedEngine(model, data, {}, compile="always")
    agree(engine, Learn(LOCAL), model.init(3))
    assert steps_of(engine).compiled is not None, steps_of(engine).why
