# SPDX-License-Identifier: Apache-2.0
"""`fedquit.forget`, `recover` and `evaluate` on a network that has learnt wrong labels by heart."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fedquit
from fedquit.audit.scores import score_logits
from fedquit.errors import InputError, NonFiniteError, UnknownNameError
from fedquit.inference import trace
from fedquit.single.evidence import chance
from fedquit.single.forgetting import NoRateError, forget
from fedquit.single.methods import METHODS, random_label_losses
from fedquit.single.training import Drawn

CLASSES, WIDTH = 5, 16
Pair = tuple[Tensor, Tensor]


def sample(seed: int, n: int, wrong: float = 0.3) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    x = centres[y] + torch.randn(n, WIDTH, generator=generator)
    noisy = torch.rand(n, generator=generator) < wrong
    return x, torch.where(noisy, torch.randint(0, CLASSES, (n,), generator=generator), y)


def trained(*parts: Pair, steps: int = 400, seed: int = 0) -> nn.Module:
    x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


FORGET, HOLDOUT, RETAIN, TEST = sample(1, 700), sample(2, 1400), sample(3, 1000), sample(4, 500, wrong=0.0)


@functools.cache
def original() -> nn.Module:
    return trained(FORGET, RETAIN)


@functools.cache
def never_saw_it() -> nn.Module:
    return trained(RETAIN)


def given(**options: Any) -> fedquit.Forgotten:
    settings: dict[str, Any] = {"test": TEST, "recover_lr": 3e-3, "recover_epochs": 3, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return forget(original(), FORGET, RETAIN, HOLDOUT, **settings)


@functools.cache
def swept() -> fedquit.Forgotten:
    return given(rates=(1e-4, 1e-2, 1e-1))


def test_the_given_model_is_remembered_and_a_model_that_never_saw_the_data_is_not() -> None:
    before = fedquit.evaluate(original(), forget=FORGET, holdout=HOLDOUT, original=original())
    assert before.verdict == trace.REMEMBERED
    other = fedquit.evaluate(never_saw_it(), forget=FORGET, holdout=HOLDOUT, original=original())
    assert other.verdict == trace.FORGOTTEN
    blind = fedquit.evaluate(never_saw_it(), forget=FORGET, holdout=HOLDOUT)
    assert blind.verdict == trace.CANNOT_TELL
    assert "Original was not scored" in blind.reason
    without = fedquit.evaluate(original(), forget=FORGET)
    assert (without.verdict, without.null) == (trace.CANNOT_TELL, None)
    assert "no hold-out" in without.reason


def test_evidence_has_sizes_accuracies_and_losses_of_every_set_and_prints_as_a_table() -> None:
    found = fedquit.evaluate(original(), forget=FORGET, holdout=HOLDOUT, retain=RETAIN, test=TEST, original=original())
    assert found.sizes == {"forget": 700, "holdout": 1400, "retain": 1000, "test": 500}
    with torch.no_grad():
        logits = original()(TEST[0])
    assert found.accuracy["test"] == pytest.approx(100 * float((logits.argmax(1) == TEST[1]).double().mean()))
    assert found.loss["test"] == pytest.approx(float(cross_entropy(logits.double(), TEST[1])), rel=1e-6)
    assert len(str(found).splitlines()) == 6
    json.dumps(found.to_dict(), allow_nan=False)


def test_evidence_of_the_original_may_be_given_in_its_place_and_must_be_of_the_same_data() -> None:
    before = fedquit.evaluate(original(), forget=FORGET, holdout=HOLDOUT)
    by_model = fedquit.evaluate(never_saw_it(), forget=FORGET, holdout=HOLDOUT, original=original())
    by_evidence = fedquit.evaluate(never_saw_it(), forget=FORGET, holdout=HOLDOUT, original=before)
    assert by_model.to_dict() == by_evidence.to_dict()
    with pytest.raises(InputError, match="of other data"):
        fedquit.evaluate(never_saw_it(), forget=FORGET, holdout=RETAIN, original=before)


def test_the_smallest_rate_that_both_halves_call_forgotten_is_taken() -> None:
    result = swept()
    assert result.sweep is not None
    assert result.sweep.chosen is not None
    assert result.lr == result.sweep.chosen.lr == 1e-1
    assert result.sweep.candidates[0].verdict == trace.REMEMBERED
    assert result.before.verdict == trace.REMEMBERED
    assert result.verdict == trace.FORGOTTEN
    assert result.recovered is not None
    assert result.recovered.accuracy["test"] > result.unlearned.accuracy["test"]
    again = fedquit.evaluate(result.model, forget=FORGET, holdout=HOLDOUT, original=original())
    assert again.verdict == result.verdict
    assert again.accuracy["forget"] == result.recovered.accuracy["forget"]


def test_a_rate_that_leads_to_infinity_ends_the_search_and_not_the_call() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = forget(
            original(), FORGET, RETAIN, HOLDOUT, rates=(1e-1, 1e30, 1e38), recover_lr=3e-3, recover_epochs=3
        )
    assert result.sweep is not None
    assert [candidate.lr for candidate in result.sweep.candidates] == [1e-1]
    note = "At the rate 1e+30 the weights or logits became infinite: no larger rate was tried."
    assert note in result.notes
    assert note in [str(warning.message) for warning in seen]
    for rate, says in ((1e30, r"lr=1e\+30: lower it"), (1e38, "too large for the weights' type: lower it")):
        with pytest.raises(NonFiniteError, match=says):
            forget(original(), FORGET, RETAIN, HOLDOUT, rates=(rate,), recover_lr=3e-3)


def test_the_model_is_the_one_that_unlearn_and_recover_give_and_the_given_one_stays() -> None:
    weights = [p.clone() for p in original().parameters()]
    result = given(lr=1e-2)
    assert all(torch.equal(old, new) for old, new in zip(weights, original().parameters(), strict=True))
    student = fedquit.unlearn(original(), FORGET, lr=1e-2, norm="frozen", dropout=False)
    by_hand = fedquit.recover(student, RETAIN, lr=3e-3, epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), result.model.parameters(), strict=True))
    assert result.sweep is None
    assert result.notes == ()


def test_a_result_prints_its_table_and_verdict_and_writes_a_page(tmp_path: Path) -> None:
    result = swept()
    text = str(result)
    assert text.splitlines()[0].split() == ["accuracy", "%", "examples", "before", "unlearned", "recovered"]
    assert "forgotten within the margin: AUC" in text
    page = result.report(tmp_path).read_text()
    assert '<h1 id="verdict">Forgotten within the margin</h1>' in page
    for number in (
        result.before.accuracy["forget"],
        result.evidence.accuracy["test"],
        result.evidence.accuracy["forget"],
    ):
        assert f">{number:.1f}<" in page
    assert page.count("<tr") == 3 + 4 + 3, "two heads and the AUC, four sets, three rates"
    report = (resources.files("fedquit") / "templates" / "report.html.j2").read_text()
    (style,) = re.findall(r"<style>(.*?)\{% macro", report, re.DOTALL)
    assert style in page, "the page has the style of all reports"
    assert result.report(tmp_path / "own.html").name == "own.html"
    json.dumps(result.to_dict(), allow_nan=True)


def test_no_rate_is_named_where_the_test_does_not_catch_the_original(tmp_path: Path) -> None:
    fresh = trained(RETAIN, steps=50)
    with pytest.raises(NoRateError, match="blind: the same test does not catch Original") as raised:
        forget(fresh, FORGET, RETAIN, HOLDOUT, recover_lr=1e-3, rates=(1e-3,))
    assert [c.lr for c in raised.value.sweep.candidates] == [1e-3]
    small = (HOLDOUT[0][:120], HOLDOUT[1][:120])
    with pytest.raises(NoRateError, match="hold-out too small: 60 samples"):
        forget(original(), FORGET, RETAIN, small, recover_lr=3e-3, recover_epochs=3, rates=(1e-1,))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"holdout": None}, "none was given: give holdout=…"),
        ({"recover_lr": None}, "give recover_lr=…"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": "best"}, "lr is 'best'"),
        ({"rates": ()}, r"rates are \[\]"),
        ({"rates": (math.nan,)}, r"rates are \[nan\]"),
        ({"method": "not", "retain": None}, "needs the data that stays"),
        ({"method": "ascent", "teacher": "min", "lr": 0.1}, "has no option 'teacher'"),
        ({"margin": 0.7, "lr": 0.1}, "the margin is 0.7"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_sentence(options: dict[str, Any], says: str) -> None:
    settings: dict[str, Any] = {"retain": RETAIN, "holdout": HOLDOUT, "recover_lr": 1e-3, **options}
    with pytest.raises(InputError, match=says):
        forget(original(), FORGET, **settings)


def test_an_unknown_method_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'ascent'"):
        forget(original(), FORGET, method="asent", lr=0.1)


def test_a_rate_that_destroys_the_model_and_a_missing_recovery_are_noted() -> None:
    with pytest.warns(UserWarning, match="destroyed|do not publish") as seen:
        result = forget(original(), FORGET, holdout=HOLDOUT, test=TEST, lr=3.0)
    assert [str(w.message) for w in seen] == list(result.notes)
    assert "the model is destroyed, lower the rate" in result.notes[0]
    assert "do not publish" in result.notes[-1]
    assert result.recovered is None
    assert "recovered" not in str(result).splitlines()[0]


def test_evaluate_warns_of_a_model_that_unlearning_has_destroyed() -> None:
    sets: dict[str, Any] = {"forget": FORGET, "holdout": HOLDOUT, "original": original()}
    with pytest.warns(UserWarning, match="lr=3 .*the rate is too large, lower it"):
        destroyed = fedquit.unlearn(original(), FORGET, lr=3.0)
    with pytest.warns(
        UserWarning, match=r"^The holdout accuracy fell from .* may be destroyed, give test=… to tell\.$"
    ):
        fedquit.evaluate(destroyed, **sets)
    for name, data in (("retain", RETAIN), ("test", TEST)):  # the test data goes first
        sets[name] = data
        with pytest.warns(UserWarning, match=rf"^The {name} accuracy fell from .* is destroyed, lower the rate\.$"):
            fedquit.evaluate(destroyed, **sets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedquit.evaluate(fedquit.recover(original(), RETAIN, lr=1e-4), **sets)


def test_a_model_that_was_no_better_than_one_class_has_nothing_to_lose() -> None:
    """100 untrained networks: the difference to naming one class is chance, and none is called destroyed."""
    x, y = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(5)), torch.arange(200) % CLASSES
    sets = {"forget": (x[:100], y[:100]), "retain": (x[100:], y[100:])}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(100):
            torch.manual_seed(seed)
            one, other = (nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES)) for _ in range(2))
            fedquit.evaluate(other, **sets, original=one)  # type: ignore[arg-type]


def test_a_method_without_a_rate_is_told_to_recover_longer() -> None:
    with pytest.warns(UserWarning, match="is destroyed, give more recover_epochs, or a larger recover_lr"):
        forget(original(), FORGET, RETAIN, method="not", recover_lr=1e-7)


class Right(nn.Module):
    """Names the class that its inputs tell, in given shares of class 0 and of the others."""

    def __init__(self, of_first: float, of_others: float) -> None:
        super().__init__()
        self.shares = of_first, of_others
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y, drawn = x[:, 0].long(), x[:, 1]
        right = drawn < torch.where(y == 0, *self.shares)
        return 5 * nn.functional.one_hot(torch.where(right, y, (y + 1) % 10), 10) + x[:, 2:] + self.zero


def test_a_client_of_mostly_one_class_does_not_make_a_healthy_model_a_destroyed_one() -> None:
    """On its hold-out a model that forgot it is no better than naming the class; the test data shows its health."""
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int, first: float) -> Pair:
        is_first = torch.rand(n, generator=generator) < first
        y = torch.where(is_first, 0, torch.randint(1, 10, (n,), generator=generator))
        noise = torch.randn(n, 10, generator=generator) / 2
        return torch.cat([y[:, None].float(), torch.rand(n, 1, generator=generator), noise], 1), y

    before, after = Right(0.98, 0.85), Right(0.7, 0.85)
    sets = {"forget": drawn(400, 0.8), "holdout": drawn(400, 0.8)}
    for name in ("test", "retain"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evidence = fedquit.evaluate(after, original=before, **sets, **{name: drawn(2000, 0.1)})  # type: ignore[arg-type]
        assert evidence.accuracy["holdout"] < chance(evidence.scores["holdout"])
        assert evidence.accuracy[name] > 75
    with pytest.warns(UserWarning, match="may be destroyed, give test=… to tell"):
        fedquit.evaluate(after, original=before, **sets)  # type: ignore[arg-type]


def test_trainable_parameters_that_did_not_move_are_named() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.used(x))

    with pytest.warns(UserWarning, match=r"did not move: idle.weight, idle.bias\."):
        result = forget(Unused(), FORGET, RETAIN, lr=1e-3, recover_lr=1e-3)
    assert result.unmoved == ("idle.weight", "idle.bias")


# ---- other methods


@pytest.mark.parametrize("method", ["ascent", "random-labels"])
def test_other_methods_lower_the_forget_accuracy_and_differ_from_fedquit(method: str) -> None:
    result = given(method=method, lr=3e-3)
    assert result.unlearned.accuracy["forget"] < result.before.accuracy["forget"] - 10
    assert result.unlearned.accuracy["forget"] != given(lr=3e-3).unlearned.accuracy["forget"]


def test_not_negates_the_first_layer_and_nothing_else() -> None:
    student = METHODS["not"].run(original(), FORGET, RETAIN, {"device": None}, {})
    pairs = list(zip(original().parameters(), student.parameters(), strict=True))
    assert torch.equal(pairs[0][1], -pairs[0][0])
    assert all(torch.equal(old, new) for old, new in pairs[1:])
    result = given(method="not")
    assert result.recovered is not None
    assert result.recovered.accuracy["test"] > result.unlearned.accuracy["test"]
    with pytest.raises(InputError, match="no trainable layer with weights"):
        METHODS["not"].run(nn.BatchNorm1d(3), FORGET, RETAIN, {"device": None}, {})


def test_random_labels_are_drawn_evenly_from_the_wrong_classes() -> None:
    targets = torch.full((40_000,), 2)
    losses = random_label_losses(
        torch.eye(4).log_softmax(-1)[0].expand(40_000, 4), targets, Drawn(torch.Generator().manual_seed(0))
    )
    values, counts = losses.unique(return_counts=True)
    assert len(values) == 2, "class 0, or one of the two other wrong ones: never the true class, which would look alike"
    share = float(counts.min()) / len(targets)
    assert abs(share - 1 / 3) < 3 * math.sqrt(2 / 9 / len(targets))
    assert float(values[0]) == pytest.approx(float(-torch.eye(4).log_softmax(-1)[0][0]))


def test_scrub_alternates_steps_away_from_the_teacher_and_back() -> None:
    """Against a loop of its own, with one step in each epoch."""
    leave, stay = sample(5, 20), sample(6, 30)
    student = copy.deepcopy(original())
    for step in range(3):
        for maximise, (x, y) in ((True, leave), (False, stay)):
            if maximise and step == 2:
                continue
            optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, weight_decay=5e-4)
            with torch.no_grad():
                taught = (original()(x) / 4).log_softmax(-1)
            logits = student(x)
            far = 16 * (taught.exp() * (taught - (logits / 4).log_softmax(-1))).sum(-1).mean()
            loss = -far if maximise else 0.001 * far + 0.99 * cross_entropy(logits, y)
            student.zero_grad()
            loss.backward()
            optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = forget(original(), leave, stay, method="scrub", lr=1e-3, recover_lr=1e-3, recover_epochs=0)
    for ours, plain in zip(result.model.parameters(), student.parameters(), strict=True):
        assert torch.allclose(ours, plain, atol=1e-5)
    with pytest.raises(InputError, match="more max_steps than min_steps"):
        given(method="scrub", lr=3e-3, max_steps=4)


def test_dampening_scales_what_matters_more_to_the_forget_data() -> None:
    """Against the formula, with the squared gradient of each example from a loop of its own."""
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, CLASSES).requires_grad_(False))
    forget_data, retain_data = sample(5, 12), sample(6, 20)

    def fisher(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one, label in zip(x, y, strict=True):
            model.zero_grad()
            cross_entropy(model(one[None]), label[None]).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    found[name] = found.get(name, torch.zeros_like(p)) + p.grad**2 / len(x)
        return found

    own, others = fisher(*forget_data), fisher(*retain_data)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = forget(model, forget_data, retain_data, method="ssd", alpha=1.2, recover_lr=1e-3, recover_epochs=0)
    assert result.lr is None
    changed = 0
    for name, new in result.model.named_parameters():
        old = dict(model.named_parameters())[name]
        if name not in own:
            assert torch.equal(old, new)
            continue
        factor = torch.where(own[name] > 1.2 * others[name], (others[name] / own[name]).clamp(max=1), torch.ones(()))
        assert torch.allclose(new, factor * old, atol=1e-6)
        changed += int((factor < 1).sum())
    assert changed > 5
    with pytest.raises(InputError, match="batch_size=1"):
        forget(model, DataLoader(TensorDataset(*forget_data), batch_size=4), retain_data, method="ssd", recover_lr=1e-3)


# ---- scoring as people have their data


def test_scores_do_not_depend_on_the_form_of_the_data() -> None:
    forms: list[Any] = [FORGET, TensorDataset(*FORGET), DataLoader(TensorDataset(*FORGET), batch_size=13)]
    found = [fedquit.evaluate(original(), forget=form, holdout=HOLDOUT, original=original()) for form in forms]
    for one in found[1:]:
        assert one.accuracy == found[0].accuracy
        assert one.null is not None
        assert found[0].null is not None
        assert one.null.auc.value == pytest.approx(found[0].null.auc.value, abs=1e-9)


def test_ignored_labels_do_not_count_in_scores() -> None:
    tokens = torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    labels = tokens.roll(1, 1)
    labels[:3, 2:] = -100
    labels[5] = -100
    found = fedquit.evaluate(model, forget=(tokens, labels)).scores["forget"]
    assert len(found) == 5, "a sequence without labels is no example"
    with torch.no_grad():
        alone = score_logits(model(tokens[:1, :2]), labels[:1, :2])
    assert found.loss[0] == pytest.approx(float(alone.loss[0]))
    x, y = FORGET[0][:20], FORGET[1][:20].clone()
    y[::2] = -100
    assert fedquit.evaluate(original(), forget=(x, y)).sizes == {"forget": 10}
    with pytest.raises(InputError, match="every label of the forget data is -100"):
        fedquit.evaluate(original(), forget=(x, torch.full_like(y, -100)))


def test_images_of_labels_are_scored_as_sequences_of_positions() -> None:
    images = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    masks = torch.randint(0, 4, (6, 2, 2), generator=torch.Generator().manual_seed(1))
    layer = nn.Conv2d(3, 4, 1)
    found = fedquit.evaluate(layer, forget=(images, masks), class_dim=1)
    with torch.no_grad():
        right = (layer(images).argmax(1) == masks).double().mean()
    assert found.accuracy["forget"] == pytest.approx(100 * float(right))


def test_chance_is_the_share_of_the_most_frequent_class() -> None:
    scores = score_logits(torch.zeros(4, 3), torch.tensor([0, 0, 0, 2]))
    assert chance(scores) == 75.0
    assert chance(score_logits(torch.zeros(4, 2, 3), torch.zeros(4, 2, dtype=torch.int64))) == 0.0


def test_recover_trains_batch_norm_on_the_retain_data() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    moved, kept = (fedquit.recover(model, RETAIN, lr=1e-3, norm=norm) for norm in ("train", "frozen"))
    assert not torch.equal(dict(moved.named_buffers())["1.running_mean"], dict(model.named_buffers())["1.running_mean"])
    assert torch.equal(dict(kept.named_buffers())["1.running_mean"], dict(model.named_buffers())["1.running_mean"])


def test_forget_keeps_the_statistics_and_rests_dropout_while_it_unlearns() -> None:
    """So that the student starts as its teacher; `unlearn` alone does as the authors do."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES)
        )
    x, y = FORGET
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        student = forget(model, (x[:64], y[:64]), lr=1e-3).model
        repaired = forget(model, (x[:64], y[:64]), RETAIN, lr=1e-3, recover_lr=1e-3).model
    expected = fedquit.unlearn(model, (x[:64], y[:64]), lr=1e-3, norm="frozen", dropout=False)
    same = {name: torch.equal(tensor, expected.state_dict()[name]) for name, tensor in student.state_dict().items()}
    assert all(same.values()), same
    assert torch.equal(student[1].running_mean, model[1].running_mean)  # type: ignore[index,arg-type]
    assert torch.equal(student[1].running_var, model[1].running_var)  # type: ignore[index,arg-type]
    assert not torch.equal(repaired[1].running_mean, model[1].running_mean)  # type: ignore[index,arg-type]
    moved = fedquit.unlearn(model, (x[:64], y[:64]), lr=1e-3)
    assert not torch.equal(moved[1].running_mean, model[1].running_mean)  # type: ignore[index,arg-type]
