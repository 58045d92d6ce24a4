# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against plain torch: on a GPU, or on a CPU in Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed: make test-kernels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set: make test-kernels", allow_module_level=True)

from fedquit.core import Local
from fedquit.engine.cuda import triton_gemm as gemm
from fedquit.engine.cuda import triton_norm, triton_sgd
from fedquit.engine.cuda import triton_tma as tma
from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.cuda.ops import CudaOps, StackedConv
from fedquit.engine.cuda.triton_adam import AdamRates, adam_
from fedquit.engine.cuda.triton_common import Tile, compile_ahead, launch
from fedquit.engine.optim import OPTIMIZERS, Adam, Signal
from fedquit.engine.stacked.layout import Layout
from fedquit.models.fused import conv_with_input
from fedquit.models.resnet import BasicBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter knows no bfloat16
CLIENTS, BATCH = 2, 3
SMALL = Tile(16, 16, 16)
needs_tma = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9, reason="this GPU is no Hopper: TMA is not used"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def short(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose products are exact on a GPU, too, where factors of float32 are rounded."""
    return drawn(*shape, seed=seed).to(HALF).float()


def last(x: Tensor) -> Tensor:
    return x.detach().permute(0, 1, 3, 4, 2).contiguous()


def first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("width", "channels", "out", "size", "stride"),
    [(4, 16, 32, 3, 1), (8, 16, 32, 3, 2), (4, 16, 16, 1, 2), (5, 32, 16, 1, 1), (6, 16, 16, 3, 2)],
)
def test_a_convolution_with_weights_for_each_client_is_torchs_for_each(
    width: int, channels: int, out: int, size: int, stride: int
) -> None:
    x = short(CLIENTS, BATCH, channels, width, width).requires_grad_()
    w = short(CLIENTS, out, channels, size, size, seed=1).requires_grad_()
    y = torch.stack([functional.conv2d(a, b, stride=stride, padding=size // 2) for a, b in zip(x, w, strict=True)])
    g = short(*y.shape, seed=2)
    of_x, of_w = torch.autograd.grad(y, (x, w), g)
    taps = w.detach().permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous()
    close(first(gemm.conv_forward(last(x), taps, stride, SMALL)), y.detach())
    close(first(gemm.conv_input_gradient(last(g), taps, stride, width, SMALL)), of_x)
    for split in (1, 2):
        by_tap = gemm.conv_weight_gradient(last(x), last(g), size, stride, SMALL, split)
        close(by_tap.unflatten(1, (size, size)).permute(0, 4, 3, 1, 2), of_w)
        into = torch.zeros_like(taps)
        gemm.conv_weight_gradient(last(x), last(g), size, stride, SMALL, split, into)
        close(into, by_tap)
    close(first(gemm.conv_input_gradient(last(g), taps, stride, width, SMALL, addend=last(x))), of_x + x.detach())


@needs_tma
@pytest.mark.parametrize(
    ("width", "channels", "out", "tile"),
    [
        (4, 64, 128, Tile(64, 128, 64)),  # eight images in a TMA tile, of which there are three
        (8, 128, 64, Tile(64, 64, 128)),
        (16, 64, 64, Tile(64, 64, 64)),  # four rows of one image
        (8, 64, 64, None),
    ],
)
def test_a_convolution_by_tma_is_torchs_for_each(width: int, channels: int, out: int, tile: Tile | None) -> None:
    """The clients' weights lie in rows, as in the engine; what is computed, too, and nothing beside it is touched."""
    x = short(CLIENTS, BATCH, channels, width, width).requires_grad_()
    w = (short(CLIENTS, out, channels, 3, 3, seed=1) / 32).requires_grad_()
    y = torch.stack([functional.conv2d(a, b, padding=1) for a, b in zip(x, w, strict=True)])
    g = short(*y.shape, seed=2)
    of_x, of_w = torch.autograd.grad(y, (x, w), g)
    rows = torch.zeros(CLIENTS, w[0].numel() + 128, dtype=HALF, device=DEVICE)
    taps = rows[:, 64:-64].view(CLIENTS, 9, channels, out)
    taps.copy_(w.detach().permute(0, 3, 4, 2, 1).flatten(1, 2))
    images, gradient = last(x).to(HALF), last(g).to(HALF)
    assert tma.covers(images, taps, 3, 1, out)
    near(first(tma.conv(images, taps, tile)), y.detach())
    narrow = tile and Tile(64, tile.n, 64)
    near(first(tma.conv(gradient, taps, narrow, backward=True)), of_x)
    near(first(tma.conv(gradient, taps, narrow, backward=True, addend=images)), of_x + x.detach())
    if width == 4:
        assert not tma.covers_weight_gradient(
            images, gradient, 3, 1
        )  # a step takes the rows of one image, which are too few
        return
    assert tma.covers_weight_gradient(images, gradient, 3, 1)
    for split in (0, 1, 2, 3):
        by_tap = tma.weight_gradient(images, gradient, split=split)
        near(by_tap.unflatten(1, (3, 3)).permute(0, 4, 3, 1, 2), of_w)
        buffer = torch.zeros_like(rows)
        into = buffer[:, 64:-64].view_as(taps)
        tma.weight_gradient(images, gradient, into, split=split)
        near(into, by_tap)
        assert not buffer[:, :64].any()
        assert not buffer[:, -64:].any()


@needs_tma
@pytest.mark.parametrize(("width", "channels", "tile"), [(4, 64, Tile(64, 128, 64)), (8, 128, None)])
def test_the_images_gradient_at_stride_2_by_tma_is_torchs(width: int, channels: int, tile: Tile | None) -> None:
    x = short(CLIENTS, BATCH, 64, 2 * width, 2 * width).requires_grad_()
    w = short(CLIENTS, channels, 64, 3, 3, seed=1) / 32
    y = torch.stack([functional.conv2d(a, b, stride=2, padding=1) for a, b in zip(x, w, strict=True)])
    g = short(*y.shape, seed=2)
    (of_x,) = torch.autograd.grad(y, x, g)
    taps = w.permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous().to(HALF)
    gradient = last(g).to(HALF)
    assert tma.covers_strided(gradient, taps, 3, 2)
    near(first(tma.strided_input_gradient(gradient, taps, tile)), of_x)
    plus = last(x).to(HALF)
    near(first(tma.strided_input_gradient(gradient, taps, tile, plus)), of_x + x.detach())
    near(first(gemm.conv_input_gradient(gradient, taps, 2, 2 * width, addend=plus)), of_x + x.detach())


def near(a: Tensor, b: Tensor) -> None:
    """As near as 16 bits are."""
    assert float((a.float() - b.float()).abs().max()) < 2 * torch.finfo(HALF).eps * float(b.abs().max())


@pytest.mark.parametrize(
    ("size", "stride", "width", "channels", "out"),
    [
        (1, 1, 8, 64, 64),
        (3, 2, 8, 64, 64),
        (3, 1, 6, 64, 64),
        (3, 1, 8, 16, 64),
        (3, 1, 8, 64, 32),
        (3, 1, 128, 64, 64),
    ],
)
def test_what_tma_does_not_cover_is_left_to_the_other_kernels(
    size: int, stride: int, width: int, channels: int, out: int
) -> None:
    x, w = torch.zeros(1, 1, width, width, channels), torch.zeros(1, size * size, channels, out)
    assert not tma.covers(x, w, size, stride, out)


def test_weights_that_are_not_aligned_are_not_read_by_tma() -> None:
    x, count = torch.zeros(2, 1, 8, 8, 64, dtype=HALF), 9 * 64 * 64
    rows, odd = torch.zeros(2, count + 8, dtype=HALF), torch.zeros(2, count + 9, dtype=HALF)
    assert tma.covers(x, rows[:, :-8].view(2, 9, 64, 64), 3, 1, 64)
    assert not tma.covers(x, rows[:, 1:-7].view(2, 9, 64, 64), 3, 1, 64)  # 2 bytes past a multiple of 16
    assert not tma.covers(x, odd[:, :-9].view(2, 9, 64, 64), 3, 1, 64)  # rows of 18 bytes more than such a multiple
    assert not tma.covers(x[:, :0], rows[:, :-8].view(2, 9, 64, 64), 3, 1, 64)  # nothing at all


@needs_tma
def test_the_convolutions_of_a_network_go_to_tma_where_it_covers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[str] = []
    for name in ("conv", "strided_input_gradient", "weight_gradient"):
        monkeypatch.setattr(tma, name, lambda *given, name=name, **named: went.append(name))
    x, w = drawn(1, BATCH, 8, 8, 64).to(HALF), drawn(1, 9, 64, 64).to(HALF)
    gemm.conv_forward(x, w, 1)
    gemm.conv_input_gradient(x, w, 1, 8)
    gemm.conv_weight_gradient(x, x, 3, 1)
    assert went == ["conv", "conv", "weight_gradient"]
    gemm.conv_forward(x, w, 2)
    gemm.conv_input_gradient(x, w, 2, 16)
    assert went[3:] == ["strided_input_gradient"]


@pytest.mark.parametrize(("relu", "shortcut"), list(product((True, False), repeat=2)))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_normalisation_shortcut_and_relu_are_torchs(relu: bool, shortcut: bool, groups: int) -> None:
    if shortcut and not relu:
        pytest.skip("no network has it")
    channels = 8
    x, s = (drawn(CLIENTS, BATCH, channels, 4, 4, seed=i).requires_grad_() for i in (0, 1))
    rows = drawn(CLIENTS, 3 * channels, seed=2)  # weights and biases lie in rows, as in the engine
    weight, bias = (rows[:, a : a + channels].detach().requires_grad_() for a in (0, channels))
    y = torch.stack([functional.group_norm(x[k], groups, weight[k], bias[k]) for k in range(CLIENTS)])
    y = y + s if shortcut else y
    y = functional.relu(y) if relu else y
    g = drawn(*y.shape, seed=3)
    wanted = torch.autograd.grad(y, (x, weight, bias, *([s] if shortcut else [])), g)
    w, b = weight.detach(), bias.detach()
    out, mean, scale = triton_norm.norm_forward(last(x), w, b, last(s) if shortcut else None, groups, 1e-5, relu=relu)
    close(first(out), y.detach())
    of_x, sums, through = triton_norm.norm_backward(
        last(g), last(x), out, w, b, mean, scale, groups, relu=relu, shortcut=shortcut
    )
    of_weight, of_bias = triton_norm.norm_weight_gradients(sums, w.dtype)
    close(first(of_x), wanted[0])
    close(of_weight, wanted[1])
    close(of_bias, wanted[2])
    assert (through is None) == (not shortcut)
    if through is not None:
        close(first(through), wanted[3])


IN_SHARED_MEMORY = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fedquit.engine.cuda import triton_tma as tma

SHAPE = {"width": 8, "channels_in": 64, "channels_out": 128, "HEIGHT": 8}
CONV = {**SHAPE, "IMAGES": 2, "BLOCK_M": 128, "BLOCK_K": 64, "ADD": True}
X, WEIGHTS, TURNED = (f"tensordesc<bf16[1,{sides}]>" for sides in ("2,8,8,64", "128,64", "64,128"))
OUT = {"addend_ptr": "*bf16", "out_ptr": "*bf16", "out_client_stride": "i32"}
for kernel, given, fixed, warps in (
    (tma._conv_kernel, {"x": X, "w": WEIGHTS, **OUT, "rows": "i32"}, {**CONV, "BACKWARD": True}, 8),
    (tma._conv_kernel, {"x": X, "w": TURNED, **OUT, "rows": "i32"}, {**CONV, "BACKWARD": False}, 8),
    (tma._strided_input_gradient_kernel, {"g": X, "w": WEIGHTS, **OUT, "images": "i32"}, CONV, 8),
    (
        tma._weight_gradient_kernel,
        {"x": "tensordesc<bf16[1,1,8,8,64]>", "g": "tensordesc<bf16[1,1,64,64]>", "out_ptr": "*fp32"}
        | dict.fromkeys(("out_client_stride", "out_part_stride", "images", "blocks_each"), "i32"),
        {**SHAPE, "BLOCK_M": 64, "BLOCK_N": 64},
        4,
    ),
):
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    types = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, places)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3}).asm["ttgir"]
    assert "warp_group_dot " in code and "async_tma_copy_global_to_local" in code, "neither TMA nor tensor cores"
    assert "ttg.local_load" not in code, f"{kernel.__name__} reads a TMA tile into registers"
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernels themselves are tried")
def test_no_tma_tile_takes_a_detour_through_registers(tmp_path: Path) -> None:
    """Triton 3.6 lets the next tile overwrite one that is still being read into registers: results would be wrong."""
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", IN_SHARED_MEMORY], capture_output=True, text=True, check=False, env=known
    )
    assert done.returncode == 0, done.stderr


class Kernel:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.done.append(f"run {grid} {given} {named}")

    def warmup(self, *given: Any, grid: tuple[int, ...], **named: Any) -> None:
        self.done.append(f"compiled {grid} {given} {named}")


def test_ahead_of_time_kernels_are_compiled_and_not_run_also_in_the_backward_pass() -> None:
    kernel = Kernel()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            launch(kernel, (1,), 7, many=2)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            launch(kernel, (2,), 8)
            return 2 * gradients[0]

    def both_ways() -> None:
        doubled: Tensor = Twice.apply(torch.ones(2, device=DEVICE, requires_grad=True))  # type: ignore[no-untyped-call]
        doubled.sum().backward()

    with compile_ahead():
        both_ways()
    assert kernel.done == ["compiled (1,) (7,) {'many': 2}", "compiled (2,) (8,) {}"]
    both_ways()
    assert kernel.done[2:] == ["run (1,) (7,) {'many': 2}", "run (2,) (8,) {}"]


class Launches:
    """Stands in for a kernel, and notes for what Triton would compile it anew."""

    def __init__(self, kernel: Any) -> None:
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # in the interpreter, and outside
        self.names, self.seen = kernel.arg_names, set[object]()
        self.any = {*(options["do_not_specialize"] or ()), *(options["do_not_specialize_on_alignment"] or ())}

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *given, **named: self.seen.add(
            tuple(self._kind(n, v) for n, v in {**dict(zip(self.names, given, strict=False)), **named}.items())
        )

    def _kind(self, name: str, value: Any) -> object:
        if name.isupper():
            return name, value
        offset = value.storage_offset() * value.itemsize if isinstance(value, Tensor) else value
        return (name,) if name in self.any else (name, offset == 1, offset % 16 == 0)


def launches(monkeypatch: pytest.MonkeyPatch, name: str) -> set[object]:
    stand_in = Launches(getattr(triton_norm, name))
    monkeypatch.setattr(triton_norm, name, stand_in)
    return stand_in.seen


def test_a_batch_of_any_size_needs_no_other_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [launches(monkeypatch, name) for name in ("_forward_kernel", "_backward_kernel", "_sum_over_batch_kernel")]
    for batch in (32, 31, 12, 1):
        x, w = torch.zeros(CLIENTS, batch, 4, 4, 16), torch.zeros(CLIENTS, 16)
        out, mean, scale = triton_norm.norm_forward(x, w, w, None, 2, 1e-5, relu=True)
        triton_norm.norm_weight_gradients(
            triton_norm.norm_backward(x, x, out, w, w, mean, scale, 2, relu=True, shortcut=False)[1], w.dtype
        )
    assert [len(kinds) for kinds in seen] == [1, 1, 1]


def test_parts_of_a_sum_are_added_up_in_any_number_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedquit.engine.cuda import triton_common as common

    for many in (1, 3):
        parts, rows = drawn(CLIENTS, many, 5, 300), torch.zeros(CLIENTS, 2000, device=DEVICE)
        common.sum_partials(parts, rows[:, 100:1600].view(CLIENTS, 5, 300))
        close(rows[:, 100:1600].view(CLIENTS, 5, 300), parts.sum(1))
        assert not rows[:, :100].any()
        assert not rows[:, 1600:].any()
    stand_in = Launches(common._sum_partials_kernel)
    monkeypatch.setattr(common, "_sum_partials_kernel", stand_in)
    for many in (2, 3, 16):
        common.sum_partials(torch.zeros(CLIENTS, many, 64), torch.zeros(CLIENTS, 64))
    assert len(stand_in.seen) == 1


def test_sgd_moves_the_parameters_and_their_copy() -> None:
    rows, gradient, lr = drawn(2, 100), drawn(2, 100, seed=1), torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    copy, wanted = torch.zeros_like(rows, dtype=HALF), rows - 0.3 * (gradient + 0.01 * rows)
    triton_sgd.sgd_(rows, copy, gradient, lr, 0.01)
    close(rows, wanted)
    assert torch.equal(copy, rows.to(HALF))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_moves_the_parameters_their_copy_and_its_moments(optimizer: str) -> None:
    """Three steps, beside the optimizer's own rule in float64."""
    local = Local(optimizer=optimizer, lr=0.3, weight_decay=0.1)
    rule = OPTIMIZERS[optimizer]
    assert isinstance(rule, Adam)
    rows, copy = drawn(2, 1500), torch.zeros(2, 1500, dtype=HALF, device=DEVICE)
    moments = torch.zeros_like(rows), torch.zeros_like(rows)
    wanted = {"": rows.double()}
    slots = {name: {"": torch.zeros_like(wanted[""])} for name in rule.slots}
    for t in (1, 2, 3):
        gradient = drawn(2, 1500, seed=t).to(HALF)
        numbers = 0.3, 1 - 0.3 * 0.1 if rule.decoupled else 1.0, 1 - rule.beta1**t, 1 - rule.beta2**t
        rates = AdamRates(*(torch.tensor(n, dtype=torch.float64, device=DEVICE) for n in numbers))
        adam_(
            *(rows, copy, moments, gradient, rates),
            l2=0.0 if rule.decoupled else 0.1,
            betas=(rule.beta1, rule.beta2),
            eps=rule.eps,
        )
        wanted, slots = rule.step(wanted, slots, Signal(t, {"": gradient.double()}), local)
    close(rows, wanted[""].float())
    assert torch.equal(copy, rows.to(HALF))
    for moment, name in zip(moments, rule.slots, strict=True):
        close(moment, slots[name][""].float())


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_with_a_bias(stride: int) -> None:
    x, w, b = drawn(CLIENTS, BATCH, 16, 8, 8), drawn(CLIENTS, 16, 16, 3, 3, seed=1) / 12, drawn(CLIENTS, 16, seed=2)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.conv2d(x, w, b, stride=stride, padding=1)

    own = [t.requires_grad_() for t in (x, w, b)]
    alone = torch.stack([layer(x[k], w[k], b[k]) for k in range(CLIENTS)])
    low = [t.detach().to(HALF).requires_grad_() for t in own]
    with CudaOps(None):
        assert "StackedConv" not in _functions(vmap(layer)(*low)), "torch's own, unless it is asked for"
    with CudaOps(None, biases=True):
        many = vmap(layer)(*low)
    assert "StackedConv" in _functions(many), "the kernel is used"
    wanted = torch.autograd.grad(alone.square().mean(), own)
    for a, b_ in zip(torch.autograd.grad(many.float().square().mean(), low), wanted, strict=True):
        assert float((a.float() - b_).norm()) < 10 * torch.finfo(HALF).eps * float(b_.norm())


def _functions(out: Tensor) -> str:
    """The names of what computed a tensor."""
    names, waiting = [], [out.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None:
            names.append(function.name())
            waiting += [f for f, _ in function.next_functions]
    return " ".join(names)


def test_a_network_may_ask_for_relu_in_place() -> None:
    """ReLU in place, as many networks have it, on what a kernel gave."""
    x, w = drawn(CLIENTS, BATCH, 16, 4, 4), drawn(CLIENTS, 16, 16, 3, 3, seed=1) / 12
    weight, bias = drawn(CLIENTS, 16, seed=2), drawn(CLIENTS, 16, seed=3)

    def network(w: Tensor, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        out = functional.group_norm(functional.conv2d(x, w, padding=1), 2, weight, bias)
        done: Tensor = functional.relu(out, inplace=True).float().square().mean()
        return done

    own = [t.requires_grad_() for t in (w, weight, bias)]
    alone = torch.stack([network(w[k], weight[k], bias[k], x[k]) for k in range(CLIENTS)]).sum()
    low = [t.detach().to(HALF).requires_grad_() for t in own]
    with CudaOps(None):
        many = vmap(network)(low[0], low[1], low[2], x.to(HALF)).sum()
    for a, b in zip(torch.autograd.grad(many, low), torch.autograd.grad(alone, own), strict=True):
        assert float((a.float() - b).abs().max()) < 20 * torch.finfo(HALF).eps * float(b.abs().max())


class LateBuffer(GradientBuffer):
    """What the side stream computes is there once it is synchronised, and no sooner: until then it is NaN."""

    def __init__(self, weights: Tensor, sizes: Mapping[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(weights, sizes)
        self._late: list[Callable[[], object]] | None = None
        self._waiting: list[Callable[[], object]] = []
        for module, name in ((gemm, "conv_weight_gradient"), (triton_norm, "norm_weight_gradients")):
            monkeypatch.setattr(module, name, partial(self._put_off, getattr(module, name)))

    def _put_off(self, kernel: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._late is None:
            return kernel(*given, **named)
        outputs = [named["out"]] if "out" in named else given[-1]
        for out in outputs:
            out.fill_(torch.nan)
        self._late.append(lambda: kernel(*given, **named))
        return None

    @contextlib.contextmanager
    def side_stream(self, *inputs: Tensor) -> Iterator[None]:
        self._late = self._waiting
        yield
        self._late = None

    def synchronise(self) -> None:
        for work in self._waiting:
            work()
        self._waiting.clear()


TAPS = {"w": (32, 32, 3, 3)}
OWN = {"a": (32,), "b": (32,)}
conv, norm = functional.conv2d, functional.group_norm


@pytest.mark.parametrize(
    ("shapes", "network", "claimed"),
    [
        (TAPS, lambda p, x: conv(x, p["w"], padding=1), 1),
        (TAPS, lambda p, x: conv(conv(x, p["w"], padding=1), p["w"], padding=1), 1),
        (TAPS, lambda p, x: conv(conv(x, p["w"], padding=1), p["w"], padding=2, dilation=2), 1),
        (TAPS, lambda p, x: conv(conv(x, p["w"], padding=2, dilation=2), p["w"], padding=1), 1),
        (TAPS, lambda p, x: conv(conv(x, p["w"], padding=1), p["w"].transpose(0, 1), padding=1), 1),
        (TAPS, lambda p, x: conv(x, p["w"], padding=1) + p["w"].square().sum(), 1),
        ({"w": (32, 32, 1, 1)}, lambda p, x: conv(x[:, :16], p["w"][:, :16]), 0),
        (OWN, lambda p, x: norm(x, 2, p["a"], p["b"]), 2),
        (OWN, lambda p, x: norm(x[:, :16], 2, p["a"][:16], p["b"][:16]), 0),
        (OWN, lambda p, x: norm(x, 2, p["a"], p["b"]) + p["b"].view(-1, 1, 1), 2),
        (OWN, lambda p, x: norm(norm(x, 2, p["a"], p["b"]), 2, p["a"], p["b"]), 2),
        ({"a": (32,)}, lambda p, x: norm(x, 2, p["a"], p["a"]), 0),
        ({"a": (2, 32)}, lambda p, x: norm(x, 2, p["a"][0], p["a"][1]), 0),
    ],
    ids=[
        *("once", "twice", "dilated after", "dilated before", "turned", "with a penalty", "a part"),
        *("a norm", "part of a norm", "its bias elsewhere", "a norm twice", "weight for bias", "one for both"),
    ],
)
def test_no_gradient_is_read_before_it_is_there(
    shapes: dict[str, tuple[int, ...]],
    network: Callable[[dict[str, Tensor], Tensor], Tensor],
    claimed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(shapes, output_channels_last=True)
    flat = torch.zeros(CLIENTS, layout.row_size, dtype=HALF, device=DEVICE)
    layout.fill(flat, {n: drawn(CLIENTS, *s, seed=i) / 8 for i, (n, s) in enumerate(shapes.items())})
    x, buffer = drawn(CLIENTS, BATCH, 32, 4, 4, seed=9), LateBuffer(flat, layout.sizes, monkeypatch)
    leaves = {n: p.detach().requires_grad_() for n, p in layout.views(flat).items()}
    with CudaOps(buffer):
        total = vmap(lambda p, x: network(p, x).float().square().mean())(leaves, x.to(HALF)).sum()
    of_leaves = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    buffer.synchronise()
    assert len(buffer.claimed) == claimed
    layout.fill(buffer.gradients, dict(zip(shapes, of_leaves, strict=True)), buffer.claimed)

    whole = {n: p.detach().float().contiguous().requires_grad_() for n, p in layout.views(flat).items()}
    losses = [network({n: p[k] for n, p in whole.items()}, x[k]).square().mean() for k in range(CLIENTS)]
    wanted = torch.autograd.grad(torch.stack(losses).sum(), list(whole.values()))
    for name, gradient in zip(shapes, wanted, strict=True):
        here = layout.views(buffer.gradients)[name].float()
        assert float((here - gradient).norm()) < 10 * torch.finfo(HALF).eps * float(gradient.norm()), name


@pytest.mark.parametrize("channels", [16, 24])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_adds_what_comes_back_for_the_input_that_it_keeps(
    channels: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back is read where it lies; only where the channels do not fill a tile is it copied."""
    sent, added = list[int](), list[int]()
    input_gradient: Callable[..., Tensor] = gemm.conv_input_gradient

    def conv_input_gradient(*given: Any, addend: Tensor) -> Tensor:
        added.append(addend.data_ptr())
        return input_gradient(*given, addend=addend)

    def seen(of_kept: Tensor) -> None:
        sent.append(of_kept.data_ptr())

    monkeypatch.setattr(gemm, "conv_input_gradient", conv_input_gradient)
    x, w = short(CLIENTS, BATCH, channels, 4, 4), short(CLIENTS, 16, channels, 3, 3, seed=1) / 16

    def network(w: Tensor, x: Tensor) -> Tensor:
        out, kept = conv_with_input(x, w, stride)
        total: Tensor = out.float().square().sum() + (kept.float() * 3).square().sum()
        return total

    whole = [t.clone().requires_grad_() for t in (w, x)]
    alone = torch.stack([network(whole[0][k], whole[1][k]) for k in range(CLIENTS)]).sum()
    low = [t.to(HALF).requires_grad_() for t in (w, x)]
    images = low[1].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # channels last, as kernels leave them
    out, kept = StackedConv.apply(images, low[0], stride, None, True)  # type: ignore[no-untyped-call]
    kept.register_hook(seen)
    torch.autograd.grad(out.float().sum() + kept.float().square().sum(), low)
    assert (sent == added) == (channels == 16)
    with CudaOps(None):
        many = vmap(network)(*low).sum()
    for gradient, wanted in zip(torch.autograd.grad(many, low), torch.autograd.grad(alone, whole), strict=True):
        near(gradient / 4, wanted / 4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("twice", [False, True])
def test_a_block_under_vmap_is_the_block_of_each_client(stride: int, twice: bool) -> None:
    """In 16 bits, so to two digits; `twice` uses the same weights in two passes, whose gradients add up.

    The weights are drawn here, not by the block: a unit within rounding of zero would be on one side of its ReLU in
    16 bits and on the other in 32, and so few units make that a different gradient.
    """
    block = BasicBlock(16, 16 if stride == 1 else 32, stride, 2).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(block.parameters()):
            p.copy_(drawn(*p.shape, seed=i) * p[0].numel() ** -0.5)
    names = [n for n, _ in block.named_parameters()]
    weights = {n: torch.stack([p.detach() * f for f in (1.0, 0.7)]) for n, p in block.named_parameters()}
    x = drawn(CLIENTS, BATCH, 16, 4, 4, seed=5)

    def loss(params: dict[str, Tensor], images: Tensor) -> Tensor:
        out = functional_call(block, params, (images,))
        more = functional_call(block, params, (2 - images,)) if twice else out
        mean: Tensor = (out * out + more).float().mean()
        return mean

    def gradients(buffer: GradientBuffer | None, rows: dict[str, Tensor]) -> list[Any]:
        leaves = {n: p.detach().requires_grad_() for n, p in rows.items()}
        if buffer is None:
            total = torch.stack([loss({n: p[k] for n, p in leaves.items()}, x[k]) for k in range(CLIENTS)]).sum()
        else:
            with CudaOps(buffer):
                total = vmap(loss)(leaves, x.to(HALF)).sum()
        return list(torch.autograd.grad(total, list(leaves.values()), allow_unused=buffer is not None))

    layout = Layout({n: tuple(p.shape[1:]) for n, p in weights.items()}, output_channels_last=True)
    flat = torch.zeros(CLIENTS, layout.row_size, dtype=HALF, device=DEVICE)
    layout.fill(flat, weights)
    buffer = GradientBuffer(flat, layout.sizes)
    of_leaves = gradients(buffer, layout.views(flat))
    buffer.synchronise()
    layout.fill(buffer.gradients, dict(zip(names, of_leaves, strict=True)), buffer.claimed)
    placed = layout.views(buffer.gradients)
    for name, wanted in zip(names, gradients(None, weights), strict=True):
        assert float((placed[name].float() - wanted).norm()) < 10 * torch.finfo(HALF).eps * float(wanted.norm()), name
