# SPDX-License-Identifier: Apache-2.0
"""Adapters, shared memory, large vocabularies, and `transformers.Trainer`."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquit
from fedquit.audit import scores as scoring
from fedquit.audit.scores import score_logits
from fedquit.distill import chunked
from fedquit.distill.chunked import distillation_in_chunks
from fedquit.distill.losses import LOSSES, Rule, distillation_loss
from fedquit.distill.unlearning import Step, copied
from fedquit.distill.virtual_teacher import DEFAULTS, TEACHERS
from fedquit.errors import InputError

CPU = torch.device("cpu")


def made(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def two_layers(frozen: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(not frozen)
    return model


X, Y = made(1, 40, 6), torch.arange(40) % 3


# ---- no whole copies


def test_frozen_parameters_share_memory_and_trainable_ones_do_not() -> None:
    model = two_layers()
    apart = fedquit.unlearn(model, (X, Y), lr=1e-2)
    given = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not given & {tensor.data_ptr() for tensor in apart.state_dict().values()}  # unless it is asked for
    student: Any = fedquit.unlearn(model, (X, Y), lr=1e-2, share_frozen=True)
    assert all(torch.equal(one, other) for one, other in zip(student.parameters(), apart.parameters(), strict=True))
    assert student[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert student[0].weight is not model[0].weight
    assert student[2].weight.data_ptr() != model[2].weight.data_ptr()
    assert not student[0].weight.requires_grad
    before = model[0].weight.clone()
    student.half()
    assert model[0].weight.dtype == torch.float32  # what is done to the student's type or place stays there
    assert torch.equal(model[0].weight, before)


def test_a_gradient_that_somebody_left_on_the_given_model_stays() -> None:
    model = two_layers()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    student = fedquit.unlearn(model, (X, Y), lr=1e-2, share_frozen=True)
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert all(p.grad is None for p in student.parameters())


def test_the_memory_of_a_copy_is_that_of_the_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    one = copied(model, CPU, share_frozen=True)
    own = [p for p, given in zip(one.parameters(), model.parameters(), strict=True) if p.data_ptr() != given.data_ptr()]
    assert sum(p.numel() for p in own) == 500 * 4 + 4


def test_parameters_of_a_type_of_their_own_are_shared_as_they_are() -> None:
    class Packed(nn.Parameter):
        scale: float = 1.0

    model = two_layers()
    packed = Packed(model[0].weight.detach().clone(), requires_grad=False)
    packed.scale = 2.5
    model[0].weight = packed
    student = fedquit.unlearn(model, (X, Y), lr=1e-2, share_frozen=True)
    assert student[0].weight is packed  # type: ignore[index]


def test_what_is_frozen_gives_the_same_bits_as_a_whole_copy() -> None:
    model = two_layers()
    student = fedquit.unlearn(model, (X, Y), lr=1e-2)
    apart = copy.deepcopy(model)
    apart[0].requires_grad_(True)
    by_hand = fedquit.unlearn(apart, (X, Y), lr=1e-2, optimizer=_of_last_two)
    assert torch.equal(student.state_dict()["2.weight"], by_hand.state_dict()["2.weight"])


def _of_last_two(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters)[-2:], lr=lr, eps=1e-7)


# ---- large vocabularies


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_loss_in_chunks_and_its_gradient_are_those_of_the_whole(
    teacher: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, g = made(1, 4, 5, 11).double(), made(2, 4, 5, 11).double()
    y = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(3))
    u = torch.rand(4, 5, generator=torch.Generator().manual_seed(4))
    found = []
    rule = Rule(teacher, loss, **DEFAULTS)
    for size in (0, 33, 1):  # all at once, three rows, one row
        student = z.clone().requires_grad_()
        with monkeypatch.context() as patch:
            patch.setattr(chunked, "MAX_NUMBERS", size)
            losses = distillation_in_chunks(student, g, y, u, rule, large=0 if size else 10**6)
        weights = torch.arange(1.0, 5.0)
        (losses * weights).sum().backward()
        assert student.grad is not None
        found.append((losses.detach(), student.grad))
    whole = distillation_loss(z, g, y, u, teacher=teacher, loss=loss, **DEFAULTS)
    assert torch.equal(found[0][0], whole)
    for losses, gradient in found[1:]:
        torch.testing.assert_close(losses, found[0][0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_gradient_of_half_precision_logits_comes_back_in_their_type(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, g = made(1, 6, 11).to(kind), made(2, 6, 11).to(kind)
    y, u = torch.arange(6), torch.zeros(6)
    gradients = []
    for size in (0, 22):
        student = z.clone().requires_grad_()
        with monkeypatch.context() as patch:
            patch.setattr(chunked, "MAX_NUMBERS", size)
            losses = distillation_in_chunks(student, g, y, u, Rule("min", "kl", **DEFAULTS), large=0 if size else 10**6)
        (losses.mean() * 4096).backward()  # as the loss of float16 is scaled
        assert student.grad is not None
        assert student.grad.dtype == kind
        gradients.append(student.grad)
    torch.testing.assert_close(*gradients)


def test_unlearning_a_large_vocabulary_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    tokens = torch.randint(50, (6, 7))
    whole = fedquit.unlearn(model, (tokens, tokens), lr=1e-2, shift=True)
    seen: list[int] = []
    with_gradient = Rule.losses_with_gradient

    def counted(rule: Rule, student: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(student))
        return with_gradient(rule, student, *others)

    monkeypatch.setattr(Rule, "losses_with_gradient", counted)
    monkeypatch.setattr(distillation_in_chunks, "__kwdefaults__", {"large": 300})
    monkeypatch.setattr(chunked, "MAX_NUMBERS", 200)
    in_chunks = fedquit.unlearn(model, (tokens, tokens), lr=1e-2, shift=True)
    assert seen == [4] * 9, "36 positions of 50 tokens"
    for one, other in zip(whole.parameters(), in_chunks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 13), (4, 5, 13)])
def test_scores_in_chunks_are_those_of_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    z = made(1, *shape) * 20
    y = torch.randint(13, shape[:-1], generator=torch.Generator().manual_seed(2))
    whole = score_logits(z, y)
    monkeypatch.setattr(scoring, "CHUNK", 40)  # three rows at a time
    chunked = score_logits(z, y)
    for name in ("label", "correct", "confidence", "loss", "phi", "entropy", "modified_entropy"):
        assert (getattr(whole, name) == getattr(chunked, name)).all(), name


# ---- callbacks


def test_a_callback_knows_the_end_of_an_epoch_and_can_stop_there() -> None:
    model = two_layers(frozen=False)
    seen: list[Step] = []

    def stop_after_two(step: Step) -> bool:
        seen.append(step)
        return step.ends_epoch and step.epoch == 2

    fedquit.unlearn(model, (X, Y), lr=1e-3, epochs=5, batch_size=16, callback=stop_after_two)
    assert [step.ends_epoch for step in seen] == [False, False, True] * 2
    assert seen[-1].step == 6


# ---- transformers, adapters and Trainer


def tiny_gpt(tied: bool = True) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts(seed: int, count: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(40, (count, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.transformers
def test_only_the_adapters_of_peft_move_and_the_base_is_shared() -> None:
    model = tiny_gpt()
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    student = fedquit.recover(adapted, texts(1), lr=1e-2, epochs=3)  # B is zero at first: A has no gradient then
    unlearned = fedquit.unlearn(student, texts(1), lr=1e-2, share_frozen=True)
    moved, shared = set(), 0
    for (name, new), old in zip(unlearned.named_parameters(), student.parameters(), strict=True):
        if not torch.equal(new, old):
            moved.add(name)
        shared += new.data_ptr() == old.data_ptr()
    assert moved
    assert all("lora" in name for name in moved)
    assert moved == {name for name, p in unlearned.named_parameters() if p.requires_grad}
    assert shared == sum(not p.requires_grad for p in adapted.parameters())
    adapted.eval()
    unlearned.eval()
    with adapted.disable_adapter(), torch.no_grad():
        base = adapted(**texts(1)).logits
    with unlearned.disable_adapter(), torch.no_grad():  # type: ignore[operator]
        assert torch.equal(unlearned(**texts(1)).logits, base)


@pytest.mark.transformers
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weights_stay_tied(frozen: bool) -> None:
    model = tiny_gpt(tied=True)
    model.transformer.wte.requires_grad_(not frozen)
    student: Any = fedquit.unlearn(model, texts(1), lr=1e-2)
    assert student.lm_head.weight is student.transformer.wte.weight
    assert torch.equal(student.lm_head.weight, model.lm_head.weight) == frozen


@pytest.mark.transformers
def test_a_model_that_accelerate_has_offloaded_unlearns_its_adapters() -> None:
    model = tiny_gpt(tied=False)
    peft = pytest.importorskip("peft")
    accelerate = pytest.importorskip("accelerate")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    plain = fedquit.unlearn(copy.deepcopy(adapted), texts(1), lr=1e-2)
    accelerate.cpu_offload(adapted.base_model.model.lm_head, execution_device=CPU)
    assert adapted.base_model.model.lm_head.weight.is_meta
    student = fedquit.unlearn(adapted, texts(1), lr=1e-2)
    for (name, one), other in zip(student.named_parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            assert torch.equal(one, other), name


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as the datasets library has them, with a column that no model reads."""

    def __init__(self, seed: int, count: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 30, (count, 10), generator=generator)
        self.wrong = torch.rand(count, generator=generator) < 0.3
        flips = torch.randint(0, 2, (count,), generator=generator)
        self.y = torch.where(self.wrong, flips, (self.ids[:, 0] < 17).long())

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> dict[str, Any]:
        mask = [1] * 10
        return {"text": f"row {k}", "input_ids": self.ids[k].tolist(), "attention_mask": mask, "label": int(self.y[k])}


@pytest.mark.transformers
def test_a_trainer_hands_over_its_collator_optimizer_and_rate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    forget, retain, holdout = Rows(1, 24), Rows(2, 24), Rows(3, 24)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=6,
        learning_rate=2e-3,
        weight_decay=0.01,
        adam_beta2=0.98,
        max_steps=8,
        seed=7,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    together: Any = torch.utils.data.ConcatDataset([forget, retain])
    model = transformers.BertForSequenceClassification(config)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=together)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    options = fedquit.trainer_options(trainer)
    assert {key: options[key] for key in ("labels", "batch_size", "recover_lr", "autocast", "seed")} == {
        "labels": "labels",
        "batch_size": 6,
        "recover_lr": 2e-3,
        "autocast": None,
        "seed": 7,
    }
    optimizer = options["recover_optimizer"]([nn.Parameter(torch.zeros(2))], 1e-3)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    assert optimizer.defaults["weight_decay"] == 0.01
    result = fedquit.forget(trainer.model, forget, retain, holdout, lr=1e-3, **options)
    assert result.before.sizes == {"forget": 24, "holdout": 24, "retain": 24}
    trainer.model = result.model
    predicted = trainer.predict(forget)
    accuracy = 100 * float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())
    assert accuracy == pytest.approx(result.evidence.accuracy["forget"])


def test_what_is_no_trainer_is_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="a Linear has no args"):
        fedquit.trainer_options(nn.Linear(2, 2))
