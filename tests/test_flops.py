# SPDX-License-Identifier: Apache-2.0
"""Every count against one by hand: products and convolutions, 2 for a multiply-add, backward to what is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.core import Batch, Local, Model, Params, Sent, Task
from fedquit.core.fedavg import Learn
from fedquit.engine.plan import make_plan
from fedquit.methods.fedau import LearnBoth, TrainHead
from fedquit.methods.fedquit import Distill
from fedquit.methods.fukd import Imitate
from fedquit.methods.fused import TrainAdapters, places
from fedquit.methods.mode import Guide
from fedquit.methods.pga import Ascend
from fedquit.models import FunctionalModel, load_model
from fedquit.running.flops import Flops, Shape, batches, step_flops
from seam_methods import Fisher, Outputs

FASHION = Shape((1, 28, 28))
MLP = 2 * (784 * 64 + 64 * 10)  # forward of one example
MLP_BACK = 2 * MLP - 2 * 784 * 64  # nobody needs the gradient of the input
CONV1, CONV2, LINEAR = 2 * 14 * 14 * 16 * 9 * 1, 2 * 7 * 7 * 32 * 9 * 16, 2 * 32 * 49 * 10
CNN = CONV1 + CONV2 + LINEAR
CNN_BACK = 2 * CNN - CONV1


def start_of(model: Model) -> dict[str, Params]:
    return {"start": model.init(0)}


@pytest.fixture(scope="module")
def mlp() -> FunctionalModel:
    return load_model("mlp", (1, 28, 28), 10)


@pytest.fixture(scope="module")
def cnn() -> FunctionalModel:
    return load_model("cnn", (1, 28, 28), 10)


def test_an_mlp_by_hand(mlp: FunctionalModel) -> None:
    assert step_flops(mlp, Learn(), start_of(mlp), FASHION, 7) == 7 * (MLP + MLP_BACK)


def test_a_cnn_by_hand(cnn: FunctionalModel) -> None:
    assert step_flops(cnn, Learn(), start_of(cnn), FASHION, 5) == 5 * (CNN + CNN_BACK)


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.GroupNorm(2, out)
        self.b, self.norm_b = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(2, out)
        short = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.GroupNorm(2, out))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm_a(self.a(x)))
        return functional.relu(self.norm_b(self.b(inner)) + self.short(x))


def resnet18() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*w) for w in [*widths, (512, 512, 1)]]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


def resnet18_macs() -> int:
    """Multiply-adds of a forward at 32x32."""
    stem, stage1 = 32 * 32 * 64 * 27, 4 * 32 * 32 * 64 * 64 * 9
    later = 0
    for side, width in ((16, 128), (8, 256), (4, 512)):
        first, others, short = width // 2 * width * 9, 3 * width * width * 9, width // 2 * width
        later += side * side * (first + others + short)
    return stem + stage1 + later + 51_200


@pytest.fixture(scope="module")
def resnet() -> FunctionalModel:
    return FunctionalModel(resnet18)


def test_a_resnet18_by_hand(resnet: FunctionalModel) -> None:
    assert sum(p.numel() for p in resnet.init(0).values()) == 11_220_132
    macs, stem = resnet18_macs(), 32 * 32 * 64 * 27
    assert f"{macs / 1e6:.1f}" == "555.5"
    flops = Flops(resnet, Shape((3, 32, 32)))
    assert flops.step(Learn(), start_of(resnet), 32) == 32 * 2 * (3 * macs - stem)


class Speaker(nn.Module):
    """Embedding 128, LSTM of 256 units, 65 characters."""

    def __init__(self, *, both_ways: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 128)
        self.lstm = nn.LSTM(128, 256, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(512 if both_ways else 256, 65)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(x))[0])
        return logits


TEXT = Shape((80,), (80,), torch.long)
LSTM = 80 * 2 * 4 * 256 * (128 + 256)


def test_an_lstm_by_hand() -> None:
    model = FunctionalModel(Speaker)
    head = 80 * 2 * 256 * 65
    assert step_flops(model, Learn(), start_of(model), TEXT, 3) == 3 * 3 * (LSTM + head)


def test_an_lstm_of_two_layers_both_ways_by_hand() -> None:
    model = FunctionalModel(lambda: Speaker(both_ways=True, layers=2))
    second, head = 80 * 2 * 4 * 256 * (512 + 256), 80 * 2 * 512 * 65
    assert step_flops(model, Learn(), start_of(model), TEXT, 2) == 2 * 3 * (2 * LSTM + 2 * second + head)


def test_an_lstm_in_double_precision_runs_in_kernels_that_torch_sees() -> None:
    model = FunctionalModel(Speaker, torch.float64)
    found = step_flops(model, Learn(), start_of(model), TEXT, 2)
    assert found == pytest.approx(2 * 3 * (LSTM + 80 * 2 * 256 * 65), rel=0.003)  # no gradient of the first state


def test_the_character_lstm_by_hand() -> None:
    model, head = load_model("char_lstm", (80,), 65), 80 * 2 * 256 * 65
    first = 2 * 4 * 256 * 256  # nobody needs the gradient of the first state
    found = Flops(model, TEXT).step(Learn(), start_of(model), 16)
    assert found == 16 * (3 * (LSTM + head) - first)


def test_the_packaged_resnet18_by_hand() -> None:
    model, stem = load_model("resnet18", (3, 32, 32), 100), 32 * 32 * 64 * 27
    assert step_flops(model, Learn(), start_of(model), Shape((3, 32, 32)), 2) == 2 * 2 * (3 * resnet18_macs() - stem)


DEPTHWISE = 2 * 8 * 8 * 6 * 9  # one channel in, whatever their number


def test_a_depthwise_convolution_by_hand() -> None:
    first, head = 2 * 8 * 8 * 3 * 6, 2 * 6 * 64 * 5
    layers = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Flatten(), nn.Linear(6 * 64, 5)
    model = FunctionalModel(lambda: nn.Sequential(*layers))
    found = step_flops(model, Learn(), start_of(model), Shape((3, 8, 8)), 4)
    assert found == 4 * (3 * (first + DEPTHWISE + head) - first)


def test_the_first_layer_s_groups_have_no_gradient_of_the_data() -> None:
    layers = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Flatten(), nn.Linear(6 * 64, 5)
    model = FunctionalModel(lambda: nn.Sequential(*layers))
    found = step_flops(model, Learn(), start_of(model), Shape((6, 8, 8)), 4)
    assert found == 4 * (2 * DEPTHWISE + 3 * 2 * 6 * 64 * 5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_grouped_convolution_with_a_stride_by_hand(groups: int) -> None:
    first, conv, head = 2 * 9 * 7 * 2 * 4, 2 * 5 * 4 * (4 // groups) * 8 * 9, 2 * 8 * 20 * 3
    layers = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 8, 3, 2, 1, groups=groups), nn.Flatten(), nn.Linear(8 * 20, 3)
    model = FunctionalModel(lambda: nn.Sequential(*layers))
    found = step_flops(model, Learn(), start_of(model), Shape((2, 9, 7)), 3)
    assert found == 3 * (3 * (first + conv + head) - first)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_transposed_convolution_works_at_each_place_of_its_input(groups: int) -> None:
    first, up, head = 2 * 5 * 4 * 2 * 4, 2 * 5 * 4 * 4 * (8 // groups) * 4, 2 * 8 * 80 * 3
    layers = nn.Conv2d(2, 4, 1), nn.ConvTranspose2d(4, 8, 2, 2, groups=groups), nn.Flatten(), nn.Linear(8 * 80, 3)
    model = FunctionalModel(lambda: nn.Sequential(*layers))
    found = step_flops(model, Learn(), start_of(model), Shape((2, 5, 4)), 3)
    assert found == 3 * (3 * (first + up + head) - first)


def test_a_frozen_grouped_convolution_has_the_gradient_of_its_input_alone() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6 * 64, 5)

        def forward(self, x: Tensor) -> Tensor:
            seen = functional.conv2d(self.first(x), torch.ones(6, 1, 3, 3), padding=1, groups=6)
            logits: Tensor = self.head(seen.flatten(1))
            return logits

    model, first, head = FunctionalModel(Frozen), 2 * 8 * 8 * 3 * 6, 2 * 6 * 64 * 5
    found = step_flops(model, Learn(), start_of(model), Shape((3, 8, 8)), 4)
    assert found == 4 * (2 * first + 2 * DEPTHWISE + 3 * head)


def mit_b0_macs(side: int, classes: int) -> int:
    """Multiply-adds of a forward: patches, and in each of two layers attention and a mixing with a depthwise filter."""
    found, before = 256 * classes, 3
    for width, kernel, stride, shrink in ((32, 7, 4, 8), (64, 3, 2, 4), (160, 3, 2, 2), (256, 3, 2, 1)):
        side //= stride
        words, seen = side**2, (side // shrink) ** 2
        shrinking = words * width**2 if shrink > 1 else 0
        attention = 2 * words * width**2 + shrinking + 2 * seen * width**2 + 2 * words * seen * width
        mixing = 2 * words * width * 4 * width + words * 4 * width * 9
        found += words * before * width * kernel**2 + 2 * (attention + mixing)
        before = width
    return found


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore:mit_b0 begins untrained")
def test_mit_b0_by_hand() -> None:
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    model, images, patches = load_model("mit_b0", (3, 224, 224), 100), Shape((3, 224, 224)), 56 * 56 * 3 * 32 * 49
    macs, start = mit_b0_macs(224, 100), start_of(model)
    assert f"{2 * macs / 1e9:.3f}" == "0.904"
    step = step_flops(model, Learn(), start, images, 2)
    assert step == 2 * 2 * (3 * macs - patches)
    teacher = step_flops(model, Distill(), start, images, 2) - step
    assert teacher == 2 * 2 * macs, "a forward"


class Looker(nn.Module):
    """Attention with 2 heads of 4 over 6 words, from embeddings of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(5, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(2, 3)
        seen = functional.scaled_dot_product_attention(q, k, v)
        logits: Tensor = self.head(seen.transpose(1, 2).flatten(2))
        return logits


def test_attention_by_hand() -> None:
    model = FunctionalModel(Looker)
    linears, product = 2 * 6 * (8 * 24 + 8 * 5), 2 * 2 * 6 * 6 * 4
    found = step_flops(model, Learn(), start_of(model), Shape((6,), (6,), torch.long), 3)
    assert found == 3 * (3 * linears + (2 + 5) * product)


def test_fedquit_pays_for_the_teacher_s_forward(cnn: FunctionalModel) -> None:
    assert step_flops(cnn, Distill(), start_of(cnn), FASHION, 4) == 4 * (CNN + CNN + CNN_BACK)


def test_mode_pays_for_the_degraded_model_s_forward(cnn: FunctionalModel) -> None:
    sent = {**start_of(cnn), "degraded": cnn.init(1)}
    assert step_flops(cnn, Guide(), sent, FASHION, 4) == 4 * (CNN + CNN + CNN_BACK)


def test_fedau_s_head_alone_has_no_backward_through_the_body(cnn: FunctionalModel) -> None:
    start = cnn.init(0)
    head = {n: p for n, p in start.items() if n.startswith("7.")}
    assert step_flops(cnn, TrainHead(), {"start": start, "head": head}, FASHION, 4) == 4 * (CNN + LINEAR)


def test_two_heads_cost_two_forwards_and_two_backwards(cnn: FunctionalModel) -> None:
    assert step_flops(cnn, LearnBoth(), start_of(cnn), FASHION, 4) == 4 * 2 * (CNN + CNN_BACK)


def test_what_a_client_has_at_home_is_stood_in_for(mlp: FunctionalModel) -> None:
    assert step_flops(mlp, Ascend(), start_of(mlp), FASHION, 4) == 4 * (MLP + MLP_BACK)


def test_curvature_costs_a_second_way_back(mlp: FunctionalModel) -> None:
    plain = step_flops(mlp, Learn(), start_of(mlp), FASHION, 4)
    curved = step_flops(mlp, Learn(Local(optimizer="adahessian")), start_of(mlp), FASHION, 4)
    assert plain + 4 * MLP_BACK <= curved <= 4 * plain


def adapters(start: Params) -> Params:
    return {"adapter:1.weight": torch.zeros(len(places(start["1.weight"].shape, 0.1, 0)))}


KINDS: dict[str, tuple[Task, Callable[[Params], dict[str, Params]]]] = {
    "learn": (Learn(), lambda w: {"start": w}),
    "distill": (Distill(), lambda w: {"start": w}),
    "guide": (Guide(), lambda w: {"start": w, "degraded": w}),
    "head": (TrainHead(), lambda w: {"start": w, "head": {n: w[n] for n in ("3.weight", "3.bias")}}),
    "both heads": (LearnBoth(), lambda w: {"start": w}),
    "ascend": (Ascend(), lambda w: {"start": w}),
    "imitate": (Imitate(), lambda w: {"start": w, "teacher": w}),
    "adapters": (TrainAdapters(), lambda w: {"start": w, "adapters": adapters(w)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_small_batches_give_every_batch_size(kind: str, mlp: FunctionalModel) -> None:
    task, sends = KINDS[kind]
    sent, flops = sends(mlp.init(0)), Flops(mlp, FASHION)
    for size in (1, 5, 32):
        assert flops.step(task, sent, size) == step_flops(mlp, task, sent, FASHION, size) > 0


@dataclass(frozen=True)
class WithProduct(Learn):
    """A product that no example takes part in."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        first = params["1.weight"]
        return super().loss(model, params, sent, batch) + (first @ first.T).sum()


def test_what_a_step_does_once_is_counted_once(mlp: FunctionalModel) -> None:
    sent, once = start_of(mlp), 2 * 64 * 784 * 64
    expected = 9 * (MLP + MLP_BACK) + 3 * once
    assert Flops(mlp, FASHION).step(WithProduct(), sent, 9) == expected
    assert step_flops(mlp, WithProduct(), sent, FASHION, 9) == expected


@pytest.mark.parametrize("examples", [0, 1, 5, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("epochs", [0.0, 0.01, 0.29, 0.5, 1.0, 1.5, 2.0, 3.25])
@pytest.mark.parametrize("batch_size", [1, 8, 32, 200])
def test_the_steps_are_those_of_the_plan(examples: int, epochs: float, batch_size: int) -> None:
    local = Local(epochs, batch_size)
    assert batches(examples, local) == Counter(len(s) for s in make_plan(examples, local, seed=1).steps)


def test_a_client_s_work_is_the_sum_over_its_steps(mlp: FunctionalModel) -> None:
    flops, sent, each = Flops(mlp, FASHION), start_of(mlp), MLP + MLP_BACK
    assert flops.at_client(Learn(Local(2.0, 8)), sent, 21) == 42 * each
    assert flops.at_client(Learn(Local(1.5, 8)), sent, 21) == (21 + 8) * each  # 4 of 6 steps
    assert flops.at_client(Learn(Local(0.5, 8)), sent, 21) == 8 * each  # 1 of 3
    assert flops.at_client(Learn(Local(0.01, 8)), sent, 5) == 5 * each  # at least one
    assert flops.at_client(Learn(Local(0.0, 8)), sent, 21) == flops.at_client(Learn(), sent, 0) == 0


def test_a_measurement_of_gradients_is_a_forward_and_a_backward_pass(
    mlp: FunctionalModel, cnn: FunctionalModel
) -> None:
    for model, forward, backward in ((mlp, MLP, MLP_BACK), (cnn, CNN, CNN_BACK)):
        flops, sent = Flops(model, FASHION), start_of(model)
        for size in (1, 4, 32):
            assert step_flops(model, Fisher(), sent, FASHION, size) == size * (forward + backward)
        assert flops.at_client(Fisher(Local(batch_size=8)), sent, 21) == 21 * (forward + backward)


def test_a_measurement_without_gradients_is_a_forward_pass(cnn: FunctionalModel) -> None:
    assert Flops(cnn, FASHION).at_client(Outputs(Local(batch_size=8)), start_of(cnn), 21) == 21 * CNN


def test_fewer_steps_cost_less(mlp: FunctionalModel) -> None:
    flops, sent, each = Flops(mlp, FASHION), start_of(mlp), MLP + MLP_BACK
    task = Learn(Local(10.0, 8))  # 21 examples: batches of 8, 8 and 5
    assert [flops.at_client(task, sent, 21, steps) for steps in (0, 1, 2, 3, 4, 6)] == [
        examples * each for examples in (0, 8, 16, 21, 29, 42)
    ]
    assert flops.at_client(task, sent, 21, 30) == flops.at_client(task, sent, 21)


def test_the_server_works_on_its_public_data(mlp: FunctionalModel) -> None:
    flops, start = Flops(mlp, FASHION, public_examples=12), mlp.init(0)
    found = flops.at_server(Imitate(Local(3.0, 8)), {"start": start, "teacher": start})
    assert found == 36 * (MLP + MLP + MLP_BACK)


def test_a_kind_of_task_is_counted_once(mlp: FunctionalModel) -> None:
    calls = []

    @dataclass(frozen=True)
    class Seen(Learn):
        rule: str = "a"

        def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
            calls.append(len(batch.y))
            return super().loss(model, params, sent, batch)

    flops, sent = Flops(mlp, FASHION), start_of(mlp)
    for t in range(5):
        local = Local(1.0, 8 + t, lr=0.1 * 0.99**t)
        flops.at_client(Seen(local, remember=str(t)), {"start": mlp.init(t)}, 20 + t)
    assert len(calls) == 2
    flops.at_client(Seen(rule="b"), sent, 20)
    flops.at_client(Seen(), {**sent, "teacher": sent["start"]}, 20)
    flops.at_client(replace(Seen(), local=Local(optimizer="adahessian")), sent, 20)
    assert len(calls) == 8


def test_counting_disturbs_nothing(cnn: FunctionalModel) -> None:
    start, before = cnn.init(0), torch.random.get_rng_state()
    copy = {n: p.clone() for n, p in start.items()}
    with torch.no_grad():  # as where a server counts between rounds
        assert Flops(cnn, FASHION).at_client(Ascend(), {"start": start}, 10) > 0
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(p, copy[n]) and not p.requires_grad for n, p in start.items())


def test_the_shape_of_examples() -> None:
    found = Shape.of(torch.zeros(9, 80, dtype=torch.long), torch.zeros(9, 80, dtype=torch.long))
    assert found == TEXT
    assert math.prod(found.zeros(3).u.shape) == 240
