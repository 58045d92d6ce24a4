# SPDX-License-Identifier: Apache-2.0
"""MiT-B0: its size, where its weights come from, and that nothing in it is random. None of this needs a network."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.models import FunctionalModel, load_model

SHAPE = (3, 32, 32)
quietly = pytest.mark.filterwarnings("ignore:mit_b0 begins untrained")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


@pytest.fixture(scope="module")
def untrained(transformers: Any) -> FunctionalModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mit_b0 begins untrained")
        return load_model("mit_b0", SHAPE, 7)


@pytest.fixture(scope="module")
def params(untrained: FunctionalModel) -> Params:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mit_b0 begins untrained")
        return untrained.init(0)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained network with a head for three classes, as `save_pretrained` leaves it."""
    where = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(5)
    transformers.SegformerForImageClassification(transformers.SegformerConfig(num_labels=3)).save_pretrained(where)
    return where


def encoder_of(params: Params) -> Params:
    return {n: p for n, p in params.items() if n.startswith("segformer.")}


@pytest.mark.transformers
def test_the_encoder_has_the_paper_s_number_of_parameters(params: Params) -> None:
    assert sum(p.numel() for p in encoder_of(params).values()) == 3_319_392
    assert {n: tuple(p.shape) for n, p in params.items() if n not in encoder_of(params)} == {
        "classifier.weight": (7, 256),
        "classifier.bias": (7,),
    }
    assert list(params)[-2:] == ["classifier.weight", "classifier.bias"]  # methods find the head at the end


@pytest.mark.transformers
def test_an_untrained_network_is_announced(transformers: Any) -> None:
    with pytest.warns(UserWarning, match=r'begins untrained.*weights = "nvidia/mit-b0"'):
        load_model("mit_b0", SHAPE, 7)


@pytest.mark.transformers
def test_the_announcement_is_made_once(transformers: Any) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()  # as a user has it
        model = load_model("mit_b0", SHAPE, 7)
        model.init(0)
        model.init(1)
    assert len([w for w in seen if "begins untrained" in str(w.message)]) == 1


@pytest.mark.transformers
def test_nothing_is_random_even_in_training_mode(untrained: FunctionalModel, params: Params, images: Tensor) -> None:
    first = untrained(params, images)
    assert first.shape == (2, 7)
    assert torch.equal(first, untrained(params, images))
    module = untrained._module
    module.train()
    try:
        assert torch.equal(first, untrained(params, images))
    finally:
        module.eval()


@pytest.mark.transformers
def test_it_can_be_differentiated_twice(untrained: FunctionalModel, params: Params, images: Tensor) -> None:
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    loss = untrained(leaves, images).square().sum()
    gradient = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    along = torch.stack([g.sum() for g in gradient]).sum()
    curved = torch.autograd.grad(along, list(leaves.values()))
    assert all(bool(h.isfinite().all()) for h in curved)
    assert any(bool(h.any()) for h in curved)


@pytest.mark.transformers
def test_many_clients_run_as_one(untrained: FunctionalModel, params: Params, images: Tensor) -> None:
    several = [params, {n: 1.1 * p for n, p in params.items()}]
    stacked = {n: torch.stack([p[n] for p in several]) for n in params}
    found = torch.func.vmap(untrained, in_dims=(0, None))(stacked, images)
    for c, p in enumerate(several):
        torch.testing.assert_close(found[c], untrained(p, images), rtol=1e-4, atol=1e-6)


@quietly
@pytest.mark.transformers
def test_the_same_seed_gives_the_same_parameters(untrained: FunctionalModel, params: Params) -> None:
    again, other = untrained.init(0), untrained.init(1)
    assert all(torch.equal(again[n], p) for n, p in params.items())
    assert not torch.equal(other["classifier.weight"], params["classifier.weight"])


@pytest.mark.transformers
def test_a_folder_gives_its_encoder_and_the_head_is_new(
    transformers: Any, folder: Path, images: Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_model("mit_b0", SHAPE, 7, weights=str(folder))
    params, other = model.init(0), model.init(1)
    saved = transformers.SegformerForImageClassification.from_pretrained(folder)
    expected = {f"segformer.{n}": p for n, p in saved.segformer.named_parameters()}
    assert encoder_of(params).keys() == expected.keys()
    for name, p in expected.items():
        assert torch.equal(params[name], p), name
        assert torch.equal(other[name], p), name
    assert params["classifier.weight"].shape == (7, 256)
    assert not torch.equal(params["classifier.weight"], other["classifier.weight"])
    assert torch.equal(model(params, images), model(params, images))


@pytest.mark.transformers
def test_loading_says_nothing_and_leaves_the_library_s_voice_as_it_was(
    transformers: Any, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = transformers.utils.logging
    before = (log.get_verbosity(), log.is_progress_bar_enabled())
    try:
        log.set_verbosity_warning()
        log.enable_progress_bar()
        load_model("mit_b0", SHAPE, 7, weights=str(folder))
        assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (log.WARNING, True)
        log.disable_progress_bar()
        load_model("mit_b0", SHAPE, 7, weights=str(folder))
        assert not log.is_progress_bar_enabled()
    finally:
        log.set_verbosity(before[0])
        (log.enable_progress_bar if before[1] else log.disable_progress_bar)()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"depths": [1, 2, 2, 2]}, "its depths differs"),
        ({"num_attention_heads": [1, 1, 5, 8]}, "its num_attention_heads differs"),  # the tensors alone cannot tell
    ],
)
def test_another_encoder_is_refused(transformers: Any, tmp_path: Path, other: dict[str, Any], says: str) -> None:
    transformers.SegformerModel(transformers.SegformerConfig(**other)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"does not hold the encoder of mit_b0 \({says}\)"):
        load_model("mit_b0", SHAPE, 7, weights=str(tmp_path))


@pytest.mark.transformers
def test_an_encoder_with_tensors_missing_is_refused(transformers: Any, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    gone = next(n for n in tensors if n.endswith("layer_norm.weight"))
    save_file({n: p for n, p in tensors.items() if n != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError, match=r"does not hold the encoder of mit_b0 \(it has no .*layer_norm\.weight\)"):
        load_model("mit_b0", SHAPE, 7, weights=str(tmp_path))


@pytest.mark.transformers
def test_a_folder_of_something_else_is_refused(transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(InputError, match=r"holds no network that transformers can read: make it with save_pretrained"):
        load_model("mit_b0", SHAPE, 7, weights=str(tmp_path))


@pytest.mark.transformers
@pytest.mark.parametrize("weights", ["nvidia/mit-b0", "no such/name at all", "./not-there"])
def test_without_a_network_it_says_what_to_do(
    transformers: Any, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it was read when the library was imported
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"neither a folder here nor could they be fetched.*copy them here"):
        load_model("mit_b0", SHAPE, 7, weights=weights)


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'fedquit\[transformers\]'\.$"):
        load_model("mit_b0", SHAPE, 7)


def test_the_package_does_not_import_it_before_it_is_asked_for() -> None:
    import subprocess

    code = "import sys, fedquit.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 31, 32), (3, 32, 8), (4, 64, 64), (32, 32), (80,)])
def test_it_refuses_what_is_no_colour_image_of_its_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"mit_b0 needs colour images \(3, height, width\) from 32x32 on"):
        load_model("mit_b0", shape, 7)
