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

from fedquit.engine.cuda import triton_gemm as kernels
from fedquit.engine.cuda import triton_tma as boxes
from fedquit.engine.cuda.ops import Rerouted, Room, StackedConv
from fedquit.engine.cuda.triton_common import Tiles, compiled_ahead, launch
from fedquit.engine.stacked.engine import Layout
from fedquit.models.fused import conv_keeping
from fedquit.models.resnet import BasicBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter knows no bfloat16
CLIENTS, BATCH = 2, 3
SMALL = Tiles(16, 16, 16)
needs_boxes = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9, reason="this GPU is no Hopper: it reads no boxes"
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
    close(first(kernels.conv(last(x), taps, stride, SMALL)), y.detach())
    close(first(kernels.conv_back(last(g), taps, stride, width, SMALL)), of_x)
    for split in (1, 2):
        found = kernels.conv_weights(last(x), last(g), size, stride, SMALL, split)
        close(found.unflatten(1, (size, size)).permute(0, 4, 3, 1, 2), of_w)
        into = torch.zeros_like(taps)
        kernels.conv_weights(last(x), last(g), size, stride, SMALL, split, into)
        close(into, found)
    close(first(kernels.conv_back(last(g), taps, stride, width, SMALL, plus=last(x))), of_x + x.detach())


@needs_boxes
@pytest.mark.parametrize(
    ("width", "channels", "out", "tiles"),
    [
        (4, 64, 128, Tiles(64, 128, 64)),  # eight images in a box, of which there are three
        (8, 128, 64, Tiles(64, 64, 128)),
        (16, 64, 64, Tiles(64, 64, 64)),  # four rows of one image
        (8, 64, 64, None),
    ],
)
def test_a_convolution_read_in_boxes_is_torchs_for_each(
    width: int, channels: int, out: int, tiles: Tiles | None
) -> None:
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
    assert boxes.fits(images, taps, 3, 1, out)
    near(first(boxes.conv(images, taps, tiles)), y.detach())
    narrow = tiles and Tiles(64, tiles.columns, 64)
    near(first(boxes.conv(gradient, taps, narrow, back=True)), of_x)
    near(first(boxes.conv(gradient, taps, narrow, back=True, plus=images)), of_x + x.detach())
    if width == 4:
        assert not boxes.weights_fit(images, gradient, 3, 1)  # a step takes the rows of one image, which are too few
        return
    assert boxes.weights_fit(images, gradient, 3, 1)
    for split in (0, 1, 2, 3):
        found = boxes.conv_weights(images, gradient, split=split)
        near(found.unflatten(1, (3, 3)).permute(0, 4, 3, 1, 2), of_w)
        room = torch.zeros_like(rows)
        into = room[:, 64:-64].view_as(taps)
        boxes.conv_weights(images, gradient, into, split=split)
        near(into, found)
        assert not room[:, :64].any()
        assert not room[:, -64:].any()


@needs_boxes
@pytest.mark.parametrize(("width", "channels", "tiles"), [(4, 64, Tiles(64, 128, 64)), (8, 128, None)])
def test_the_way_back_through_a_stride_read_in_boxes_is_torchs(width: int, channels: int, tiles: Tiles | None) -> None:
    x = short(CLIENTS, BATCH, 64, 2 * width, 2 * width).requires_grad_()
    w = short(CLIENTS, channels, 64, 3, 3, seed=1) / 32
    y = torch.stack([functional.conv2d(a, b, stride=2, padding=1) for a, b in zip(x, w, strict=True)])
    g = short(*y.shape, seed=2)
    (of_x,) = torch.autograd.grad(y, x, g)
    taps = w.permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous().to(HALF)
    gradient = last(g).to(HALF)
    assert boxes.strided_fits(gradient, taps, 3, 2)
    near(first(boxes.conv_back_strided(gradient, taps, tiles)), of_x)
    plus = last(x).to(HALF)
    near(first(boxes.conv_back_strided(gradient, taps, tiles, plus)), of_x + x.detach())
    near(first(kernels.conv_back(gradient, taps, 2, 2 * width, plus=plus)), of_x + x.detach())


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
def test_what_does_not_fit_into_boxes_is_left_to_the_other_kernels(
    size: int, stride: int, width: int, channels: int, out: int
) -> None:
    x, w = torch.zeros(1, 1, width, width, channels), torch.zeros(1, size * size, channels, out)
    assert not boxes.fits(x, w, size, stride, out)


def test_weights_at_odd_places_are_not_read_as_boxes() -> None:
    x, count = torch.zeros(2, 1, 8, 8, 64, dtype=HALF), 9 * 64 * 64
    rows, odd = torch.zeros(2, count + 8, dtype=HALF), torch.zeros(2, count + 9, dtype=HALF)
    assert boxes.fits(x, rows[:, :-8].view(2, 9, 64, 64), 3, 1, 64)
    assert not boxes.fits(x, rows[:, 1:-7].view(2, 9, 64, 64), 3, 1, 64)  # 2 bytes past a multiple of 16
    assert not boxes.fits(x, odd[:, :-9].view(2, 9, 64, 64), 3, 1, 64)  # rows of 18 bytes more than such a multiple
    assert not boxes.fits(x[:, :0], rows[:, :-8].view(2, 9, 64, 64), 3, 1, 64)  # nothing at all


@needs_boxes
def test_the_convolutions_of_a_network_go_to_the_boxes_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[str] = []
    for name in ("conv", "conv_back_strided", "conv_weights"):
        monkeypatch.setattr(boxes, name, lambda *given, name=name, **named: went.append(name))
    x, w = drawn(1, BATCH, 8, 8, 64).to(HALF), drawn(1, 9, 64, 64).to(HALF)
    kernels.conv(x, w, 1)
    kernels.conv_back(x, w, 1, 8)
    kernels.conv_weights(x, x, 3, 1)
    assert went == ["conv", "conv", "conv_weights"]
    kernels.conv(x, w, 2)
    kernels.conv_back(x, w, 2, 16)
    assert went[3:] == ["conv_back_strided"]


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
    out, mean, scale = kernels.norm(last(x), w, b, last(s) if shortcut else None, groups, 1e-5, relu=relu)
    close(first(out), y.detach())
    of_x, sums, through = kernels.norm_back(
        last(g), last(x), out, w, b, mean, scale, groups, relu=relu, shortcut=shortcut
    )
    of_weight, of_bias = kernels.norm_sums(sums, w.dtype)
    close(first(of_x), wanted[0])
    close(of_weight, wanted[1])
    close(of_bias, wanted[2])
    assert (through is None) == (not shortcut)
    if through is not None:
        close(first(through), wanted[3])


IN_SHARED_MEMORY = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fedquit.engine.cuda import triton_tma as boxes

SHAPE = {"width": 8, "channels_in": 64, "channels_out": 128, "HIGH": 8}
CONV = {**SHAPE, "IMAGES": 2, "COLUMNS": 128, "DEPTH": 64, "PLUS": True}
X, WEIGHTS = "tensordesc<bf16[1,2,8,8,64]>", "tensordesc<bf16[1,128,64]>"
AT = {"plus_at": "*bf16", "out_at": "*bf16", "out_client": "i32"}
for kernel, given, fixed, warps in (
    (boxes._conv, {"x": X, "w": WEIGHTS, **AT, "rows": "i32"}, {**CONV, "BACK": True}, 8),
    (boxes._conv, {"x": X, "w": "tensordesc<bf16[1,64,128]>", **AT, "rows": "i32"}, {**CONV, "BACK": False}, 8),
    (boxes._conv_back_strided, {"g": X, "w": WEIGHTS, **AT, "images": "i32"}, CONV, 8),
    (
        boxes._conv_weights,
        {"x": "tensordesc<bf16[1,1,8,8,64]>", "g": "tensordesc<bf16[1,1,64,64]>", "out_at": "*fp32"}
        | dict.fromkeys(("out_client", "out_part", "images", "blocks_each"), "i32"),
        {**SHAPE, "ROWS": 64, "COLUMNS": 64},
        4,
    ),
):
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    types = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, places)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3}).asm["ttgir"]
    assert code.count("warp_group_dot ") and code.count("async_tma_copy_global_to_local"), "neither boxes nor products"
    assert "ttg.local_load" not in code, f"{kernel.__name__} reads a box into registers"
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernels themselves are tried")
def test_no_box_takes_a_detour_through_registers(tmp_path: Path) -> None:
    """Triton 3.6 lets the next box overwrite one that is still being read into registers: results would be wrong."""
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    told = [sys.executable, "-c", IN_SHARED_MEMORY]
    done = subprocess.run(told, capture_output=True, text=True, check=False, env=known)
    assert done.returncode == 0, done.stderr


class Kernel:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.done.append(f"run {grid} {given} {named}")

    def warmup(self, *given: Any, grid: tuple[int, ...], **named: Any) -> None:
        self.done.append(f"compiled {grid} {given} {named}")


def test_ahead_of_time_kernels_are_compiled_and_not_run_also_on_the_way_back() -> None:
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

    with compiled_ahead():
        both_ways()
    assert kernel.done == ["compiled (1,) (7,) {'many': 2}", "compiled (2,) (8,) {}"]
    both_ways()
    assert kernel.done[2:] == ["run (1,) (7,) {'many': 2}", "run (2,) (8,) {}"]


class Launches:
    """Stands in for a kernel, and notes for what Triton would compile it anew."""

    def __init__(self, kernel: Any) -> None:
        told = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # in the interpreter, and outside
        self.names, self.seen = kernel.arg_names, set[object]()
        self.any = {*(told["do_not_specialize"] or ()), *(told["do_not_specialize_on_alignment"] or ())}

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
    stand_in = Launches(getattr(kernels, name))
    monkeypatch.setattr(kernels, name, stand_in)
    return stand_in.seen


def test_a_batch_of_any_size_needs_no_other_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [launches(monkeypatch, name) for name in ("_norm", "_norm_back", "_norm_sums")]
    for batch in (32, 31, 12, 1):
        x, w = torch.zeros(CLIENTS, batch, 4, 4, 16), torch.zeros(CLIENTS, 16)
        out, mean, scale = kernels.norm(x, w, w, None, 2, 1e-5, relu=True)
        kernels.norm_sums(kernels.norm_back(x, x, out, w, w, mean, scale, 2, relu=True, shortcut=False)[1], w.dtype)
    assert [len(kinds) for kinds in seen] == [1, 1, 1]


def test_parts_of_a_sum_are_added_up_in_any_number_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedquit.engine.cuda import triton_common as common

    for many in (1, 3):
        parts, rows = drawn(CLIENTS, many, 5, 300), torch.zeros(CLIENTS, 2000, device=DEVICE)
        common.summed(parts, rows[:, 100:1600].view(CLIENTS, 5, 300))
        close(rows[:, 100:1600].view(CLIENTS, 5, 300), parts.sum(1))
        assert not rows[:, :100].any()
        assert not rows[:, 1600:].any()
    stand_in = Launches(common._summed)
    monkeypatch.setattr(common, "_summed", stand_in)
    for many in (2, 3, 16):
        common.summed(torch.zeros(CLIENTS, many, 64), torch.zeros(CLIENTS, 64))
    assert len(stand_in.seen) == 1


def test_sgd_moves_the_parameters_and_their_copy() -> None:
    rows, gradient, lr = drawn(2, 100), drawn(2, 100, seed=1), torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    copy, wanted = torch.zeros_like(rows, dtype=HALF), rows - 0.3 * (gradient + 0.01 * rows)
    kernels.sgd_(rows, copy, gradient, lr, 0.01)
    close(rows, wanted)
    assert torch.equal(copy, rows.to(HALF))


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
    with Rerouted(None):
        many = vmap(network)(low[0], low[1], low[2], x.to(HALF)).sum()
    for a, b in zip(torch.autograd.grad(many, low), torch.autograd.grad(alone, own), strict=True):
        assert float((a.float() - b).abs().max()) < 20 * torch.finfo(HALF).eps * float(b.abs().max())


class Late(Room):
    """What is computed beside is there when the streams meet, and no sooner: until then its place holds no number."""

    def __init__(self, weights: Tensor, extents: Mapping[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(weights, extents)
        self._late: list[Callable[[], object]] | None = None
        self._waiting: list[Callable[[], object]] = []
        for name in ("conv_weights", "norm_sums"):
            monkeypatch.setattr(kernels, name, partial(self._put_off, getattr(kernels, name)))

    def _put_off(self, kernel: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._late is None:
            return kernel(*given, **named)
        into = [named["into"]] if "into" in named else given[-1]
        for place in into:
            place.fill_(torch.nan)
        self._late.append(lambda: kernel(*given, **named))
        return None

    @contextlib.contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        self._late = self._waiting
        yield
        self._late = None

    def meet(self) -> None:
        for work in self._waiting:
            work()
        self._waiting.clear()


TAPS = {"w": (32, 32, 3, 3)}
OWN = {"a": (32,), "b": (32,)}
conv, norm = functional.conv2d, functional.group_norm


@pytest.mark.parametrize(
    ("shapes", "network", "beside"),
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
    beside: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(shapes, convolutions_last=True)
    flat = torch.zeros(CLIENTS, layout.starts[-1], dtype=HALF, device=DEVICE)
    layout.fill(flat, {n: drawn(CLIENTS, *s, seed=i) / 8 for i, (n, s) in enumerate(shapes.items())})
    x, room = drawn(CLIENTS, BATCH, 32, 4, 4, seed=9), Late(flat, layout.extents, monkeypatch)
    leaves = {n: p.detach().requires_grad_() for n, p in layout.views(flat).items()}
    with Rerouted(room):
        total = vmap(lambda p, x: network(p, x).float().square().mean())(leaves, x.to(HALF)).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    room.meet()
    assert len(room.claimed) == beside
    layout.fill(room.gradients, dict(zip(shapes, found, strict=True)), room.claimed)

    whole = {n: p.detach().float().contiguous().requires_grad_() for n, p in layout.views(flat).items()}
    losses = [network({n: p[k] for n, p in whole.items()}, x[k]).square().mean() for k in range(CLIENTS)]
    wanted = torch.autograd.grad(torch.stack(losses).sum(), list(whole.values()))
    for name, gradient in zip(shapes, wanted, strict=True):
        here = layout.views(room.gradients)[name].float()
        assert float((here - gradient).norm()) < 10 * torch.finfo(HALF).eps * float(gradient.norm()), name


@pytest.mark.parametrize("channels", [16, 24])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_adds_what_comes_back_for_the_input_that_it_keeps(
    channels: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back is read where it lies; only where the channels do not fill a tile is it copied."""
    sent, added = list[int](), list[int]()
    back: Callable[..., Tensor] = kernels.conv_back

    def conv_back(*given: Any, plus: Tensor) -> Tensor:
        added.append(plus.data_ptr())
        return back(*given, plus=plus)

    def seen(of_kept: Tensor) -> None:
        sent.append(of_kept.data_ptr())

    monkeypatch.setattr(kernels, "conv_back", conv_back)
    x, w = short(CLIENTS, BATCH, channels, 4, 4), short(CLIENTS, 16, channels, 3, 3, seed=1) / 16

    def network(w: Tensor, x: Tensor) -> Tensor:
        out, kept = conv_keeping(x, w, stride)
        found: Tensor = out.float().square().sum() + (kept.float() * 3).square().sum()
        return found

    whole = [t.clone().requires_grad_() for t in (w, x)]
    alone = torch.stack([network(whole[0][k], whole[1][k]) for k in range(CLIENTS)]).sum()
    low = [t.to(HALF).requires_grad_() for t in (w, x)]
    images = low[1].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # channels last, as kernels leave them
    out, kept = StackedConv.apply(images, low[0], stride, None, True)  # type: ignore[no-untyped-call]
    kept.register_hook(seen)
    torch.autograd.grad(out.float().sum() + kept.float().square().sum(), low)
    assert (sent == added) == (channels == 16)
    with Rerouted(None):
        many = vmap(network)(*low).sum()
    for found, wanted in zip(torch.autograd.grad(many, low), torch.autograd.grad(alone, whole), strict=True):
        near(found / 4, wanted / 4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("twice", [False, True])
def test_a_rerouted_block_under_vmap_is_the_block_of_each_client(stride: int, twice: bool) -> None:
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
        found: Tensor = (out * out + more).float().mean()
        return found

    def gradients(room: Room | None, rows: dict[str, Tensor]) -> list[Any]:
        leaves = {n: p.detach().requires_grad_() for n, p in rows.items()}
        if room is None:
            total = torch.stack([loss({n: p[k] for n, p in leaves.items()}, x[k]) for k in range(CLIENTS)]).sum()
        else:
            with Rerouted(room):
                total = vmap(loss)(leaves, x.to(HALF)).sum()
        return list(torch.autograd.grad(total, list(leaves.values()), allow_unused=room is not None))

    layout = Layout({n: tuple(p.shape[1:]) for n, p in weights.items()}, convolutions_last=True)
    flat = torch.zeros(CLIENTS, layout.starts[-1], dtype=HALF, device=DEVICE)
    layout.fill(flat, weights)
    room = Room(flat, layout.extents)
    found = gradients(room, layout.views(flat))
    room.meet()
    layout.fill(room.gradients, dict(zip(names, found, strict=True)), room.claimed)
    placed = layout.views(room.gradients)
    for name, wanted in zip(names, gradients(None, weights), strict=True):
        assert float((placed[name].float() - wanted).norm()) < 10 * torch.finfo(HALF).eps * float(wanted.norm()), name
