# SPDX-License-Identifier: Apache-2.0
"""`fedquit.unlearn` on batches, outputs and precisions as people have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedquit.distill.stepping import SCALE, Steps, new_optimizer
from fedquit.distill.unlearning import Step, unlearn
from fedquit.distill.virtual_teacher import virtual_logits
from fedquit.errors import InputError, NonFiniteError


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def made(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(n: int = 12, count: int = 4, *rest: int) -> Tensor:
    return torch.randint(0, count, (n, *rest), generator=torch.Generator().manual_seed(7))


X, Y = made(1, 12, 3), classes()


class Mixed(nn.Module):
    """Two inputs, named as in its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(made(number, *parameter.shape))

    def forward(self, image: Tensor, scale: Tensor | None = None) -> Tensor:
        scale = image if scale is None else scale
        return torch.as_tensor(self.one(image) + self.two(scale))


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return self.rows[at]


def same(*students: nn.Module) -> bool:
    return all(torch.equal(weights(students[0]), weights(one)) for one in students)


def test_a_pair_a_mapping_nested_inputs_and_a_hook_are_the_same_data() -> None:
    model, other = Mixed(), made(2, 12, 3)
    rows = [{"image": X[i], "scale": other[i], "labels": Y[i], "idx": torch.tensor(i)} for i in range(12)]
    whole = {"image": X, "scale": other, "labels": Y}
    students = [
        unlearn(model, whole, lr=0.01, batch_size=5),
        unlearn(model, ((X, other), Y), lr=0.01, batch_size=5),
        unlearn(model, ({"image": X, "scale": other}, Y), lr=0.01, batch_size=5),
        unlearn(model, Rows(rows), lr=0.01, batch_size=5),
        unlearn(model, {"a": X, "b": other, "y": Y}, lr=0.01, batch_size=5, labels="y",
                forward=lambda m, batch: m(batch["a"], batch["b"])),
        unlearn(model, Rows([(X[i], other[i], Y[i]) for i in range(12)]), lr=0.01, batch_size=5,
                labels=lambda batch: batch[2], forward=lambda m, batch: {"logits": m(batch[0], batch[1])}),
    ]  # fmt: skip
    assert same(*students)
    assert not same(students[0], unlearn(model, (X, Y), lr=0.01, batch_size=5)), "the second input matters"


def test_a_loader_of_mappings_and_a_collate_function_give_their_batches() -> None:
    rows = [{"image": X[i], "label": Y[i]} for i in range(12)]
    loader: DataLoader[Any] = DataLoader(Rows(rows), batch_size=5)
    pairs: DataLoader[Any] = DataLoader(TensorDataset(X, Y), batch_size=5)
    assert same(unlearn(Mixed(), loader, lr=0.01), unlearn(Mixed(), pairs, lr=0.01))

    def collate(found: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {"image": torch.stack([r["image"] for r in found]), "labels": torch.tensor([r["label"] for r in found])}

    lists = Rows([{"image": X[i], "label": int(Y[i])} for i in range(12)])
    assert same(unlearn(Mixed(), lists, lr=0.01, collate=collate), unlearn(Mixed(), (X, Y), lr=0.01))


def token_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(made(number, *parameter.shape))
    return model


def test_ignored_labels_are_left_out_and_the_mean_is_over_the_others() -> None:
    tokens, targets = classes(6, 9, 4), classes(6, 9, 4)
    padded = targets.clone()
    padded[:3, 2:] = -100
    flat = (padded != -100).flatten()
    kept = (tokens.flatten()[flat], targets.flatten()[flat])
    students = [
        unlearn(token_model(), (tokens, padded), lr=0.01, batch_size=6),
        unlearn(token_model(), (tokens, padded.where(padded >= 0, -1)), lr=0.01, batch_size=6, ignore_index=-1),
        unlearn(token_model(), kept, lr=0.01, batch_size=100),
    ]
    assert torch.allclose(weights(students[0]), weights(students[2]), atol=1e-9)
    assert same(*students[:2])
    with pytest.raises(InputError, match="labels run from -100"):
        unlearn(token_model(), (tokens, padded), lr=0.01, ignore_index=-1)


def test_a_batch_whose_labels_are_all_ignored_takes_no_step() -> None:
    tokens, targets = classes(6, 9, 4), classes(6, 9, 4)
    targets[:3] = -100
    loader: DataLoader[Any] = DataLoader(TensorDataset(tokens, targets), batch_size=3)
    taken = list[Step]()
    student = unlearn(token_model(), loader, lr=0.01, callback=taken.append)
    assert [step.step for step in taken] == [1]
    assert same(
        student, unlearn(token_model(), DataLoader(TensorDataset(tokens[3:], targets[3:]), batch_size=3), lr=0.01)
    )


def test_segmentation_has_its_classes_in_dimension_1() -> None:
    def network(last: bool) -> nn.Module:
        layer = nn.Conv2d(3, 4, 1)
        with torch.no_grad():
            layer.weight.copy_(made(1, 4, 3, 1, 1))
            layer.bias.copy_(made(2, 4)) if layer.bias is not None else None
        return nn.Sequential(layer, Last()) if last else layer

    class Last(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.movedim(1, -1)

    images, masks = made(3, 6, 3, 2, 2), classes(6, 4, 2, 2)
    dense = unlearn(network(last=False), (images, masks), lr=0.01, class_dim=1)
    assert same(dense, unlearn(network(last=True), (images, masks), lr=0.01))
    with pytest.raises(InputError, match=r"labels have shape \(6, 2, 2\)"):
        unlearn(network(last=False), (images, masks), lr=0.01)
    with pytest.raises(InputError, match="have no dimension 7"):
        unlearn(network(last=False), (images, masks), lr=0.01, class_dim=7)


# ---- Hugging Face


def tiny_transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra `transformers`")


@pytest.mark.transformers
def test_a_causal_language_model_unlearns_the_next_token() -> None:
    transformers = tiny_transformers()
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    tokens = classes(6, 11, 5)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    by_hand = unlearn(
        model, (tokens, tokens[:, 1:]), lr=1e-3, forward=lambda m, b: m(input_ids=b[0]).logits[:, :-1], shift=False
    )
    student = unlearn(model, batch, lr=1e-3)
    assert torch.allclose(weights(student), weights(by_hand), atol=1e-7)
    assert not torch.allclose(weights(student), weights(unlearn(model, batch, lr=1e-3, shift=False)), atol=1e-7)
    with torch.no_grad():
        before, after = (
            cross_entropy(m(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for m in (model, student)
        )
    assert after > before


@pytest.mark.transformers
def test_a_bert_like_classifier_reads_its_mask_and_a_sequence_to_sequence_model_its_decoder_inputs() -> None:
    transformers = tiny_transformers()
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=11, num_labels=4, **shape))
    tokens, mask = classes(6, 11, 5), torch.ones(6, 5, dtype=torch.int64)
    shorter = mask.clone()
    shorter[:, 3:] = 0
    full, short = (
        unlearn(bert, {"input_ids": tokens, "attention_mask": m, "labels": Y[:6]}, lr=1e-3) for m in (mask, shorter)
    )
    assert not same(full, short), "the mask reaches the model"
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    t5 = transformers.T5ForConditionalGeneration(config)
    targets = tokens.clone()
    targets[:, 4:] = -100
    seen = list[Step]()
    student = unlearn(t5, {"input_ids": tokens, "labels": targets}, lr=1e-3, callback=seen.append)
    assert not same(t5, student)
    assert seen[0].loss > 0


def test_only_adapters_move_where_the_base_is_frozen() -> None:
    model = Mixed()
    model.one.requires_grad_(False)
    student = unlearn(model, (X, Y), lr=0.01)
    assert isinstance(student, Mixed)
    assert torch.equal(student.one.weight, model.one.weight)
    assert not torch.equal(student.two.weight, model.two.weight)


# ---- precision


class Trained:
    """A classifier that has learnt its data, and data of the same kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.centres = made(5, 6, 20) * 1.2
        self.x, self.y = self.sample(1, 240)
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 6))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        for _ in range(60):
            optimizer.zero_grad()
            cross_entropy(self.model(self.x), self.y).backward()
            optimizer.step()

    def sample(self, seed: int, n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 6, (n,), generator=generator)
        return self.centres[y] + 1.5 * torch.randn(n, 20, generator=generator), y

    def accuracy(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        kind = next(model.parameters()).dtype
        with torch.no_grad():
            return float((model(x.to(kind)).argmax(1) == y).double().mean()) * 100


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_forgets_as_in_float32(kind: torch.dtype) -> None:
    given = Trained()
    forget = (given.x[:80], given.y[:80])
    test = given.sample(9, 1000)
    full = unlearn(given.model, forget, lr=6e-3, epochs=3)
    half = unlearn(given.model.to(kind), (forget[0].to(kind), forget[1]), lr=6e-3, epochs=3)
    assert {p.dtype for p in half.parameters()} == {kind}
    given.model.float()
    moved, moved_half = (float((weights(m) - weights(given.model)).norm()) for m in (full, half))
    rounding = torch.finfo(kind).eps * float(weights(given.model).norm())
    assert abs(moved - moved_half) <= 2 * rounding, "what rounding explains, and no more"
    apart = float((weights(full) - weights(half)).norm())
    assert apart <= 4 * rounding
    for x, y in (forget, test):
        assert abs(given.accuracy(full, x, y) - given.accuracy(half, x, y)) <= 2.5
    assert given.accuracy(full, *forget) < given.accuracy(given.model, *forget) - 20


def test_float32_layers_of_a_half_model_step_by_the_same_rate() -> None:
    """The scale of a float16 loss must not reach them."""
    single, half = nn.Linear(3, 4), nn.Linear(4, 4).half()
    loss = (single(X) ** 2).sum() + half(X.half() @ torch.ones(3, 4).half()).float().sum() / 100
    before = single.weight.detach().clone()
    expected = torch.autograd.grad((single(X) ** 2).sum(), single.weight)[0]
    Steps(nn.Sequential(single, half), new_optimizer("sgd", 1e-3)).take(loss)
    assert torch.allclose(single.weight, before - 1e-3 * expected, atol=1e-6)


def test_a_gradient_that_overflows_float16_is_left_out_and_ten_in_a_row_end_it() -> None:
    model = nn.Linear(3, 4).half()
    steps = Steps(model, new_optimizer("sgd", 1e-3))
    before = weights(model)
    for number in range(9):
        steps.take((model(X.half()) * 60000).float().sum() * 60000)
        assert steps.scale == SCALE / 2 ** (number + 1)
    assert torch.equal(weights(model), before)
    with pytest.raises(NonFiniteError, match="ten gradients in a row overflow"):
        steps.take((model(X.half()) * 60000).float().sum() * 60000)


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    given = Trained()
    forget = (given.x[:80], given.y[:80])
    full, cast = (unlearn(given.model, forget, lr=1e-3, autocast=kind) for kind in (None, torch.bfloat16))
    assert {p.dtype for p in cast.parameters()} == {torch.float32}
    assert not same(full, cast)
    assert float((weights(full) - weights(cast)).norm()) < 0.25 * float((weights(full) - weights(given.model)).norm())


# ---- options


def test_an_optimizer_by_class_or_function() -> None:
    model = Mixed()
    named = unlearn(model, (X, Y), lr=0.01, optimizer="sgd")
    assert same(named, unlearn(model, (X, Y), lr=0.01, optimizer=torch.optim.SGD))
    assert same(named, unlearn(model, (X, Y), lr=7.0, optimizer=lambda p, lr: torch.optim.SGD(p, lr=0.01)))
    with pytest.raises(InputError, match="optimizer is a int"):
        unlearn(model, (X, Y), lr=0.01, optimizer=3)  # type: ignore[arg-type]


def test_a_callback_sees_each_step_and_ends_the_unlearning() -> None:
    model, seen = Mixed(), list[Step]()
    unlearn(model, (X, Y), lr=0.01, batch_size=5, epochs=2, callback=seen.append)
    assert [(s.step, s.epoch) for s in seen] == [(n, n / 3) for n in range(1, 7)]
    stopped = unlearn(model, (X, Y), lr=0.01, batch_size=5, epochs=2, callback=lambda step: step.step == 3)
    assert same(stopped, unlearn(model, (X, Y), lr=0.01, batch_size=5, epochs=2, callback=lambda s: s.epoch == 1.0))
    assert not same(stopped, unlearn(model, (X, Y), lr=0.01, batch_size=5, epochs=2))


def test_frozen_statistics_stay_and_dropout_can_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(X)  # statistics of its own
    frozen = unlearn(model, (X, Y), lr=0.01, norm="frozen", dropout=False)
    for name, buffer in frozen.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name])
    assert same(frozen, unlearn(model, (X, Y), lr=0.01, norm="frozen", dropout=False, seed=0))
    assert not same(frozen, unlearn(model, (X, Y), lr=0.01, norm="frozen"))
    one_left = unlearn(model, (X[:9], Y[:9]), lr=0.01, batch_size=4, norm="frozen")
    assert all(p.isfinite().all() for p in one_left.parameters())
    with pytest.raises(InputError, match="norm is 'eval'"):
        unlearn(model, (X, Y), lr=0.01, norm="eval")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), {}, "returns probabilities, rows that sum to 1"),
        (Mixed(), {"device": "cuda:77"}, "the device 'cuda:77' is not there"),
        (Mixed(), {"device": "tpu"}, "the device 'tpu' is not there"),
        (Mixed(), {"labels": "target"}, "without 'target'"),
    ],
)
def test_a_model_or_device_that_cannot_be_used_is_refused(model: nn.Module, options: dict[str, Any], says: str) -> None:
    data: Any = {"image": X, "labels": Y} if isinstance(model, Mixed) else (X, Y)
    with pytest.raises(InputError, match=says):
        unlearn(model, data, lr=0.01, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torch_script_module_is_refused() -> None:
    with pytest.raises(InputError, match="TorchScript"):
        unlearn(torch.jit.trace(nn.Linear(3, 4), X), (X, Y), lr=0.01)


def test_log_probabilities_are_logits() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(-1))
    plain = unlearn(model[0], (X, Y), lr=0.01)
    assert torch.allclose(weights(plain), weights(unlearn(model, (X, Y), lr=0.01)), atol=1e-6)


class Sample(NamedTuple):
    """What `default_collate` makes a batch of the same type of."""

    image: Any
    label: Any


def test_named_tuples_are_pairs() -> None:
    """As samples of a data set, as batches of a loader, and as nested inputs."""
    plain = weights(unlearn(Mixed(), (X, Y), lr=0.01))
    rows = [Sample(x, y) for x, y in zip(X, Y, strict=True)]
    for data in (Rows(rows), Sample(X, Y), (Sample(X, X), Y)):
        assert torch.equal(weights(unlearn(Mixed(), data, lr=0.01)), plain)
    loader = DataLoader(Rows(rows), batch_size=12)
    assert torch.allclose(weights(unlearn(Mixed(), loader, lr=0.01)), plain, atol=1e-6)


def test_integers_of_numpy_are_integers() -> None:
    ours = unlearn(Mixed(), (X, Y), lr=0.01, epochs=2, batch_size=5, seed=3)
    numpy = unlearn(Mixed(), (X, Y), lr=0.01, epochs=np.int64(2), batch_size=np.int32(5), seed=np.int64(3))  # type: ignore[arg-type]
    assert torch.equal(weights(numpy), weights(ours))
    seed: Any = np.int64(3)
    assert torch.equal(virtual_logits(X, Y % 3, "random", seed=seed), virtual_logits(X, Y % 3, "random", seed=3))
    with pytest.raises(InputError, match=r"^epochs is 1\.0 and has to be an integer"):
        unlearn(Mixed(), (X, Y), lr=0.01, epochs=1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^seed is 'a' and has to be an integer"):
        unlearn(Mixed(), (X, Y), lr=0.01, seed="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda model, batch: model(batch[0]).scores, "has no attribute 'scores'"),
        (lambda model, batch: {"a": model(batch[0])}["b"], "no entry 'b'"),
    ],
)
def test_a_hook_that_looks_for_what_is_not_there_is_answered_in_one_sentence(forward: Any, says: str) -> None:
    with pytest.raises(InputError, match=rf"^`forward` fails on a batch of .*{says}; repair it for such batches\.$"):
        unlearn(Mixed(), (X, Y), lr=0.01, forward=forward)


class Shares(nn.Module):
    """Scores that are no probabilities, and sum to 1 all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.layer(x).abs(), p=1, dim=-1)


def test_logits_that_sum_to_one_are_taken_where_a_hook_gives_them() -> None:
    """And refused with a sentence that says so, where no hook does; rows that are constantly 1/C too."""
    constant = nn.Linear(3, 4)
    nn.init.zeros_(constant.weight)
    nn.init.constant_(constant.bias, 0.25)
    for model in (Shares(), constant):
        with pytest.raises(InputError, match=r"if they are logits .* give forward=lambda model, batch: model"):
            unlearn(model, (X, Y), lr=0.01)
        with pytest.warns(UserWarning, match="`forward` returns rows that sum to 1"):
            student = unlearn(model, (X, Y), lr=0.01, forward=lambda model, batch: model(batch[0]))
        still = torch.equal(weights(student), weights(model))
        assert still == (model is constant), "where all logits are equal there is nothing to push down"
