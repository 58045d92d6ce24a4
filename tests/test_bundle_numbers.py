# SPDX-License-Identifier: Apache-2.0
"""Half precision within its stated bounds, bundles that read as they were written, and the committed ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedquit.audit.half_precision import auc_bounds, rounding_error, stored_scores
from fedquit.audit.scores import score_logits
from fedquit.cli import main
from fedquit.errors import StoreError
from fedquit.inference.trace import area
from fedquit.results.bundles import (
    ROUNDING,
    SCORES,
    Reference,
    SettingKey,
    bundle_notes,
    counted,
    halved,
    read_bundle,
    write_reference,
)
from fedquit.running.recipe import Recipe, build

COMMITTED = Path(__file__).parents[1] / "results" / "references"
MOST_BYTES = 20_000_000  # of all committed bundles

phis = arrays(np.float64, st.integers(1, 30), elements=st.floats(-80, 80, allow_nan=False))
texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)


@given(phis)
def test_half_precision_keeps_the_order_and_moves_a_score_by_at_most_2_to_the_minus_11(
    values: npt.NDArray[np.float64],
) -> None:
    stored = halved(values)
    error = np.abs(stored.astype(np.float64) - values)
    assert (error <= ROUNDING * np.abs(values) + 2.0**-25).all()
    assert (error <= rounding_error(stored)).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(stored[order].astype(np.float64)) >= 0).all()


@given(phis, phis)
def test_the_exact_auc_lies_within_the_bounds_and_moves_by_half_the_ties_at_most(
    members: npt.NDArray[np.float64], outsiders: npt.NDArray[np.float64]
) -> None:
    exact = area(members, outsiders).value
    small = halved(members), halved(outsiders)
    wide = small[0].astype(np.float64), small[1].astype(np.float64)
    low, high = auc_bounds(*wide, (rounding_error(small[0]), rounding_error(small[1])))
    assert low - 1e-12 <= exact <= high + 1e-12
    ties = float((wide[0][:, None] == wide[1][None, :]).mean())
    assert abs(area(*wide).value - exact) <= ties / 2 + 1e-12


def test_a_score_beyond_the_range_may_have_been_any_larger_one() -> None:
    stored = halved(np.array([1e9, -1e9, 65504.0, 3.0]))
    assert stored.tolist() == [65504.0, -65504.0, 65504.0, 3.0]
    assert rounding_error(stored)[:3].tolist() == [np.inf] * 3
    low, high = auc_bounds(np.array([65504.0]), np.array([65504.0]), (np.array([np.inf]), np.array([np.inf])))
    assert (low, high) == (0.0, 1.0)


@given(st.data())
def test_loss_and_confidence_follow_from_phi_for_single_labels_and_sequences(data: st.DataObject) -> None:
    import torch

    shape = data.draw(st.sampled_from([(5, 4), (3, 6, 4)]))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    exact = score_logits(logits, labels)
    positions = 1 if labels.dim() == 1 else labels.shape[1]
    kept: dict[str, Any] = {key: getattr(exact, key) for key in SCORES}
    kept["correct"] = counted(exact.correct, positions)
    stored = stored_scores(kept, exact.label, positions)
    for key in ("loss", "confidence", "correct", "phi", "entropy"):
        assert getattr(stored, key) == pytest.approx(getattr(exact, key), rel=1e-9, abs=1e-12)
    kept |= {key: halved(getattr(exact, key)) for key in SCORES}
    halves = stored_scores(kept, exact.label, positions)
    assert halves.loss == pytest.approx(exact.loss, abs=ROUNDING * float(np.abs(exact.phi).max()) + 1e-7)


def record(**changes: Any) -> dict[str, Any]:
    rows = [
        {"method": "retrain", "phase": "retrained", "request": 0, "clients": [3], "rounds": n, "test_acc": 50.0}
        for n in (8, 9)
    ]
    plain = {
        "schema": 1,
        "kind": "reference",
        "role": "retrained",
        "target": [3],
        "seed": 4,
        "key": {"data": "a", "partition": "b", "training": "c"},
        "scores": {"test": 4, "forget": 2},
        "rows": {"3": rows},
    }
    return plain | changes


def scores_of(sizes: dict[str, int], draw: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    kept: dict[str, npt.NDArray[Any]] = {}
    for name, size in sizes.items():
        kept |= {f"{name}.{key}": halved(draw.normal(size=size)) for key in SCORES}
        kept[f"{name}.correct"] = (np.arange(size) % 2).astype(np.uint8)
    return kept


@given(
    seed=st.integers(0, 2**31),
    key=st.builds(SettingKey, texts, texts, texts),
    target=st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(sorted),
    sizes=st.fixed_dictionaries({"test": st.just(4), "forget": st.integers(1, 9)}, optional={"holdout": st.just(6)}),
)
def test_what_is_written_is_what_is_read(seed: int, key: SettingKey, target: list[int], sizes: dict[str, int]) -> None:
    name = "+".join(map(str, target))
    rows = [{**row, "clients": target} for row in record()["rows"]["3"]]
    written = record(seed=seed, key=vars(key), target=target, scores=sizes, rows={name: rows})
    kept = scores_of(sizes, np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as folder:
        write_reference(Path(folder) / "deep" / "any name.json", written, kept)
        bundle = read_bundle(Path(folder))
        (found,) = bundle.retrains(key, target)
        assert (found.seed, found.clients, found.key) == (seed, tuple(target), key)
        assert found.rows == {name: rows}
        assert {f"{kind}.{each}" for kind, given_ in found.scores.items() for each in given_} == set(kept)
        for kind, given_ in found.scores.items():
            for each, values in given_.items():
                assert values.dtype == kept[f"{kind}.{each}"].dtype
                assert np.array_equal(values, kept[f"{kind}.{each}"])


@given(st.data())
def test_a_flipped_byte_of_the_scores_header_never_passes_unseen(data: st.DataObject) -> None:
    """A damaged file is refused in a StoreError, or gives arrays of the promised types and sizes."""
    sizes = {"test": 4, "forget": 2}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.json"
        write_reference(file, record(), scores_of(sizes, np.random.default_rng(0)))
        path = file.with_suffix(".safetensors")
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(bytes(content))
        said = ""
        kept = {}
        try:
            (found,) = read_bundle(Path(folder)).references
            kept = found.scores
        except StoreError as error:
            said = str(error)
        assert "one.safetensors" in said or {name: len(each["phi"]) for name, each in kept.items()} == sizes


def test_the_sentences_over_several_runs_name_each_target_once_and_skip_runs_that_trained() -> None:
    told = {
        "bundle": "b",
        "seed": 0,
        "computed": {"device": "NVIDIA H200", "precision": "bf16"},
        "code": {"version": "0.1.0", "commit": "0123456789abcdef"},
        "left_empty": {"forget_js": "why", "relearn_ratio": "why"},
        "half_precision": ["leakage_auc"],
        "original": {"seed": 0, "same": False, "test_acc": -0.5, "forget_acc": 0.25},
    }
    runs = [{**told, "clients": [0]}, {**told, "clients": [0]}, None, {**told, "clients": [1, 2], "original": {}}]
    assert bundle_notes(runs) == [
        "Retrain without 0, 1+2 is from the bundle b (seed 0, NVIDIA H200 in bf16, fedquit 0.1.0 at 0123456789ab); "
        "it was not trained here.",
        "Left empty, as a bundle has no weights: forget_js, relearn_ratio (why).",
        "Retrain's leakage_auc come from scores in half precision.",
        "Original with seed 0 is not the bundle's (other hardware or another version): test accuracy −0.50 points and "
        "forget accuracy +0.25 points from it.",
    ]
    assert bundle_notes([None, 3]) == []


# The committed bundles


def committed() -> list[Reference]:
    return list(read_bundle(COMMITTED).references)


def test_the_committed_bundles_are_whole_small_and_of_named_settings() -> None:
    references = committed()
    size = sum(file.stat().st_size for file in COMMITTED.rglob("*") if file.is_file())
    assert size <= MOST_BYTES
    assert {file.suffix for file in COMMITTED.rglob("*") if file.is_file()} <= {".json", ".safetensors", ".md"}
    for reference in references:
        assert reference.scores
        assert reference.key is not None
        assert build(Recipe, reference.stored["recipe"], "recipe").train.rounds == reference.final_rounds
        assert len(next(iter(reference.rows.values()))) == 10
        if reference.role == "retrained":
            models = reference.file.stat().st_size + reference.scores_file.stat().st_size
            assert models < 250_000, "about 0.1 MB a model"


def most_off(bundle: str) -> float:
    """By how much half precision may move an AUC, as docs/references.md says it: sequences lie closer together."""
    return 1e-3 if bundle == "shakespeare" else 3e-4


def test_the_committed_scores_state_an_auc_within_the_stated_bounds() -> None:
    for reference in committed():
        if reference.role == "retrained":
            forget, test = (reference.scores[name]["phi"] for name in ("forget", "test"))
            low, high = auc_bounds(
                forget.astype(np.float64), test.astype(np.float64), (rounding_error(forget), rounding_error(test))
            )
            assert (high - low) / 2 < most_off(reference.file.parent.name)
            loss = stored_scores(reference.scores["forget"], np.zeros(len(forget), dtype=np.int64)).loss.mean()
            assert loss == pytest.approx(reference.row(reference.clients)["forget_loss"], abs=1e-4)


def test_show_lists_the_committed_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fedquit", "references", "show", str(COMMITTED), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    lines = json.loads(capsys.readouterr().out)
    assert len(lines) == len(committed())
    retrains = {(line["bundle"], line["without"]) for line in lines if line["model"] == "Retrain"}
    assert {("cifar100-lda0.1", str(client)) for client in range(10)} <= retrains
    assert all((line["auc_off"] is None) == (line["model"] == "Original") for line in lines)
    for line in lines:
        assert (line["auc_off"] or 0.0) < most_off(line["bundle"])
    assert max(line["auc_off"] or 0.0 for line in lines) > 0
    monkeypatch.setattr("sys.argv", ["fedquit", "references", "show", str(COMMITTED)])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert "all of them whole" in printed
    assert "Half precision moves an AUC of forget data by at most 0.000" in " ".join(printed.split())
    assert "NVIDIA H200 in bf16" in printed
