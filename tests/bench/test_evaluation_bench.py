# SPDX-License-Identifier: Apache-2.0
"""That the benchmark measures what it says; how fast anything is belongs in its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.bench import evaluation
from fedquit.bench.evaluation import SMALL, Sizes, made_up, measured
from fedquit.bench.measure import Bench, Figure, seconds
from fedquit.cli import main
from fedquit.core import Model
from fedquit.errors import InputError
from fedquit.report import load_results

LITTLE = Sizes(images=20, steps=2, points=200, runs=3, model="mlp", train=400, test=100)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return measured("cpu", 2, LITTLE)


def test_every_figure_of_the_requirements_is_there_with_its_limit(bench: Bench) -> None:
    limits = {f.name: f.limit for f in bench.figures if f.limit is not None}
    assert limits == {
        "evaluating one model, of the training": 10.0,
        "evaluating the four models of a run, of the training": 10.0,
        "support-vector attack on 200 points": 60.0,
        "support-vector attack on 200 points, every point fitted": 60.0,
        "report over 3 runs": 20.0,
        "size of the report over 3 runs": 5.0,
    }
    assert all(f.value > 0 for f in bench.figures)


def test_what_is_scaled_says_so(bench: Bench) -> None:
    by = {f.name: f for f in bench.figures}
    training, one = by["training Original and Retrain"], by["evaluating one model"]
    assert training.note == "scaled from 2 steps"
    assert one.note == "the network's part scaled from 20 images, the attacks on all"


def test_what_is_measured_on_a_part_is_scaled_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(work: Callable[[], object], repeats: int, device: object = None) -> tuple[float, ...]:
        work()
        return (1.0,) * repeats

    monkeypatch.setattr("fedquit.bench.evaluation.seconds", second)
    by = {f.name: f.value for f in measured("cpu", 1, LITTLE).figures}
    steps = 200 * 157 * 10 + 200 * 157 * 9  # of Original, and of Retrain
    assert by["training Original and Retrain"] == pytest.approx(steps / 2 / 3600), "two steps took a second"
    assert by["evaluating one model"] == 500 / 20 + 1, "20 of 500 images took a second, and so did all attacks"
    assert by["evaluating one model, of the training"] == pytest.approx(100 * 26 / (steps / 2))
    assert by["evaluating the four models of a run, of the training"] == pytest.approx(400 * 26 / (steps / 2))


def test_the_network_is_read_as_runs_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def blind(model: Model, precision: str, device: torch.device) -> Model:
        asked.append((precision, device.type))
        return evaluation._Logits()

    monkeypatch.setattr(evaluation, "evaluation_model_of", blind)
    monkeypatch.setattr(evaluation, "score_examples", lambda model, *_: asked.append(type(model)))
    list(evaluation._share(torch.device("cpu"), 1, LITTLE))
    assert asked == [("float32", "cpu"), evaluation._Logits]


def test_a_figure_is_the_median_and_its_limit_is_not_reached() -> None:
    figure = Figure("f", "s", (3.0, 1.0, 2.5), limit=2.5)
    assert (figure.value, figure.kept) == (2.5, False)
    assert Figure("f", "s", (3.0, 1.0, 2.4), limit=2.5).kept is True
    assert Figure("f", "s", (3.0,)).kept is None
    found = figure.to_dict()
    assert (found["lowest"], found["highest"], found["repeats"]) == (1.0, 3.0, [3.0, 1.0, 2.5])
    assert not Bench("b", [figure], {}).kept
    assert len(seconds(lambda: None, 4)) == 4


def test_made_up_runs_have_the_shape_of_a_real_one_and_other_numbers(tmp_path: Path) -> None:
    made_up(tmp_path / "top", 12, methods=3)
    folders = sorted(path.parent for path in (tmp_path / "top").glob("seed-*/client-*/*/results.json"))
    assert len(folders) == 12
    real = load_results(tmp_path / "real")
    some = [load_results(folder) for folder in folders]
    for found in some:
        assert [set(row) for row in found["rows"]] == [set(row) for row in real["rows"]]
    forget = {row["forget_acc"] for found in some for row in found["rows"] if row["phase"] == "recovered"}
    assert len(forget) > 6
    assert {row["phase"] for row in real["rows"]} >= {"original", "retrained", "unlearned", "recovered", "budget"}
    assert len(real["rows"][-1]["roc"]["fpr"]) == 81, "a page of real runs is as large as these"
    assert SMALL["data"]["holdout"] > 0


def test_the_command_prints_a_table_or_json_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: Bench
) -> None:
    asked: list[Any] = []

    def stand_in(device: str, repeats: int, sizes: Sizes) -> Bench:
        asked.append((device, repeats, sizes.images, sizes.steps, sizes.runs))
        return bench

    monkeypatch.setattr("fedquit.bench.evaluation.measured", stand_in)
    out = tmp_path / "figures.json"
    words = ["fedquit", "bench", "eval", "--repeats", "2", "--images", "20", "--out", str(out)]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    printed = capsys.readouterr().out
    assert "lowest to highest" in printed
    assert "kept" in printed
    assert "cpu cores" in printed
    assert json.loads(printed.splitlines()[-1]) == json.loads(out.read_text()) == bench.to_dict()
    assert {"torch", "fedquit", "python"} <= bench.to_dict()["versions"].keys()
    assert asked[0] == ("cpu", 2, 20, 10, 200)
    slow = Bench("b", [Figure("f", "s", (9.0,), limit=1.0)], {"cpu_cores": 2})
    monkeypatch.setattr("fedquit.bench.evaluation.measured", lambda *_: slow)
    monkeypatch.setattr("sys.argv", ["fedquit", "bench", "eval"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "NOT KEPT" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="there is no device 'tpu' here"):
        measured("tpu")
    with pytest.raises(InputError, match="at least one repeat"):
        measured("cpu", 0)
