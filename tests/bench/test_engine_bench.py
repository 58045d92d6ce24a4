# SPDX-License-Identifier: Apache-2.0
"""That the benchmarks of engines measure what they say; how fast anything is belongs in their output."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.bench import agree, rounds, scale, settings
from fedquit.bench.measure import Bench
from fedquit.bench.settings import CIFAR, RAGGED, Setting, Timed, digits, engine, noisy, plain
from fedquit.cli import main
from fedquit.core import Local
from fedquit.core.params import fingerprint
from fedquit.data.federated import FederatedData
from fedquit.engine import LocalResult
from fedquit.engine.stacked.work import Work
from fedquit.errors import InputError, UnknownNameError
from fedquit.models import load_model


@pytest.fixture(scope="module")
def small() -> Setting:
    dataset = noisy(60, 4, test=40)
    data = FederatedData(dataset, dict(enumerate(torch.arange(60).split([30, 20, 10]))))
    model = load_model("cnn", dataset.shape, 4, look=dataset.look, width=4)
    return Setting("small", data, model, model.init(0), Local(batch_size=10, lr=0.05), whole=2.0, note="scaled")


def test_the_setting_of_the_digits_is_the_one_that_is_named() -> None:
    found = digits()
    assert [len(at) for at in found.data.train.values()] == [144] * 7 + [143] * 3
    assert sum(p.numel() for p in found.start.values()) == 6_186
    assert (found.local.batch_size, found.local.epochs, found.whole) == (32, 1.0, 1.0)


def test_some_steps_of_the_large_setting_are_scaled_to_the_real_clients() -> None:
    found = settings.cifar(torch.device("cpu"), steps=2, model="cnn")
    steps = sum(-(-n // 32) for n in RAGGED)
    assert all(len(at) == 64 for at in found.data.train.values())
    assert found.whole == pytest.approx(steps / 4)
    assert found.note == "scaled from 2 steps of each of 2 clients"


def test_a_text_can_be_learned_by_every_way() -> None:
    found = settings.text(torch.device("cpu"), clients=2, windows=20, length=6, letters=5)
    known = {name: way for name, way in rounds.own_ways(found).items() if "threads" not in name}
    for way in known.values():
        way.rounds(12)
    assert all(found.accuracy(way.params) > 60 for way in known.values()), "a fifth would be chance"


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore:mit_b0 begins untrained")
def test_the_transformer_takes_its_steps() -> None:
    found = settings.transformer(torch.device("cpu"), steps=1, clients=2, size=64)
    assert found.whole == pytest.approx(sum(-(-n // 32) for n in RAGGED) / 2)
    assert (
        settings.training_inputs(found.data.dataset, torch.arange(2)).shape
        == (2, 3, 64, 64)
        == (2, *found.data.dataset.shape)
    )
    for way in (plain(found, 1), engine(found, "stacked", 1)):
        before = fingerprint(way.params)
        way.rounds(1)
        assert fingerprint(way.params) != before


def test_every_way_learns_and_the_figures_are_those_of_the_turns(
    small: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways = rounds.own_ways(small)
    assert [n for n in ways if not n.startswith("plain loop")] == ["sequential engine", "auto engine (stacked)"]
    clock = iter(range(1_000_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))  # every round takes a second
    figures = rounds.compare_ways(small, ways, turns=2, rounds=3, warm_up=1)
    took = [f for f in figures if f.unit == "s a round"]
    assert [f.repeats for f in took] == [(2.0, 2.0)] * len(ways), "twice as much work in the real setting"
    assert all(f.repeats == (1.0, 1.0) for f in figures if f.unit == "x")
    assert [way.done for way in ways.values() if isinstance(way, Timed)] == [7] * len(ways), "all learn for as long"
    for way in ways.values():
        assert fingerprint(way.params) != fingerprint(small.start)
    (apart,) = [f for f in figures if f.unit == "points"]
    accuracies = [small.accuracy(w.params) for w in ways.values()]
    assert apart.value == pytest.approx(max(accuracies) - min(accuracies))
    rounds.drawn(Bench("t", figures, {}), tmp_path / "round.png")
    assert (tmp_path / "round.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def two_settings(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what is measured on a CPU, the second of which cannot be opened."""

    def broken(*_: object) -> Setting:
        raise RuntimeError("no second setting")

    found = {"digits": lambda *_: small, "cifar": broken, "text": lambda *_: replace(small, title="a text")}
    monkeypatch.setattr(rounds, "SETTINGS", found)
    monkeypatch.setattr(rounds, "WARM_UP", 1)


def test_what_was_measured_is_written_before_the_next_setting(
    two_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fedquit", "bench", "round", "--turns", "1", "--out", str(tmp_path / "made")])
    with pytest.raises(RuntimeError, match="no second setting"):
        main()
    told = json.loads((tmp_path / "made" / "round.json").read_text())
    assert told["title"] == "A round of training"
    assert {f["name"].split(": ")[0] for f in told["figures"]} == {"small"}


def test_one_setting_alone(two_settings: None) -> None:
    found = rounds.measured(only="text", turns=1, rounds=1)
    assert {f.name.split(": ")[0] for f in found.figures} == {"a text"}
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        rounds.measured(only="digit")


def test_a_round_that_takes_longer_than_it_may_is_a_failure(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))  # every round takes a second
    hurried = replace(small, whole=1.0, limit=0.9, first_limit=1.1)
    judged = {
        f.name: f.kept for f in rounds.compare_ways(hurried, rounds.own_ways(hurried), 1, 1, 1) if f.unit[0] == "s"
    }
    assert judged["small: auto engine (stacked)"] is False
    assert judged["small: the first round, auto engine"] is True
    assert judged["small: sequential engine"] is None, "the limits are the auto engine's"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_benchmark_of_a_gpu_has_its_turn_and_a_failure_is_told_at_the_end() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(["make", "bench-cuda", "PYTHON=false"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "failed: round agree unlearn scale" in done.stdout  # the round first, while caches are cold


def test_the_plain_loop_is_fedavg(small: Setting) -> None:
    still = replace(small.data.dataset, look=replace(CIFAR, vary="none"))
    data, local = replace(small.data, dataset=still), Local(batch_size=1_000, lr=0.05)
    whole = Setting("", data, small.model, small.start, local)  # one batch each, not augmented: nothing is random
    ways = plain(whole, 1), engine(whole, "sequential", 1)
    for way in ways:
        way.rounds(1)
    for name, p in ways[0].params.items():
        torch.testing.assert_close(p, ways[1].params[name], rtol=1e-4, atol=1e-5)


def test_peers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'flower'"):
        rounds.measured(peers=["flowers"])
    with pytest.raises(InputError, match="at least one turn"):
        rounds.measured(turns=0)


def test_other_frameworks_are_refused_where_they_would_not_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="leave --peers out"):
        rounds.measured(only="text", peers=["flower"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InputError, match="leave --peers out"):
        rounds.measured("cuda", peers=["flower"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "gpu"])
@pytest.mark.parametrize("measured", [rounds.measured, scale.unlearning, scale.scaling, agree.measured])
def test_a_device_that_is_not_here_is_refused(measured: Callable[[str], Bench], device: str) -> None:
    with pytest.raises(InputError, match=f"there is no device '{device}' here: take cpu"):
        measured(device)


def test_agreement_is_measured_for_every_engine_and_both_precisions() -> None:
    found = agree.measured()
    names = [f.name for f in found.figures]
    engines = ("stacked", "threaded")
    assert names == [f"{engine} engine, {dtype}" for dtype in ("float64", "float32") for engine in engines]
    assert found.kept


def test_disagreement_is_found_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Work.results

    def wrong(self: Work, *given: Any) -> Iterator[tuple[int, LocalResult]]:
        self.clients.rows *= 1 + 1e-9
        return results(self, *given)

    monkeypatch.setattr(Work, "results", wrong)
    monkeypatch.setattr(agree, "cases", lambda *a: {"one": _cases(*a)["training, sgd"]})
    monkeypatch.setattr("sys.argv", ["fedquit", "bench", "agree", "--json", "--out", str(tmp_path / "made")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "made" / "agree.json").read_text())
    assert [f["kept"] for f in told["figures"]] == [False, True, True, True]


_cases = agree.cases


def test_what_goes_wrong_in_a_later_round_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Work.results

    def wrong(self: Work, *given: Any) -> Iterator[tuple[int, LocalResult]]:
        self.clients.rows *= 1 if self.task.local.lr == agree.LOCAL.lr else 1 + 1e-9
        return results(self, *given)

    monkeypatch.setattr(Work, "results", wrong)
    monkeypatch.setattr(agree, "cases", lambda *a: {"one": _cases(*a)["training, sgd"]})
    assert [f.kept for f in agree._agreement(torch.device("cpu"), torch.float64)] == [False, True]


def test_bfloat16_is_judged_by_what_the_seeds_of_float32_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter([50.0, 53.0, 52.0, 51.0, 50.0, 54.0, 54.0, 55.0, 53.0, 53.0])
    starts: list[str] = []
    monkeypatch.setattr(Timed, "rounds", lambda self, count: starts.append(fingerprint(self.params)))
    monkeypatch.setattr(Setting, "accuracy", lambda *_: next(known))
    apart, away = agree._low_precision(torch.device("cpu"), 1, "cnn")
    assert len(set(starts)) == agree.SEEDS == 5
    assert starts[:5] == starts[5:], "both begin alike"
    assert (apart.value, away.limit) == (3.0, 3.0)
    assert away.value == pytest.approx(53.8 - 51.2)
    assert "bfloat16 54.0 54.0 55.0 53.0 53.0 %, float32 50.0 53.0 52.0 51.0 50.0 %" in away.note


def test_a_small_run_in_bfloat16_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "SEEDS", 1)
    apart, away = agree._low_precision(torch.device("cpu"), 2, "cnn")
    assert apart.value == 0
    assert away.limit == agree.CHANCE, "one seed lies nowhere apart: what is left is chance"
    low, full = (float(word) for word in away.note.split() if word.replace(".", "").isdigit())
    assert min(low, full) > 50, "a tenth would be chance"


@pytest.mark.slow
def test_a_thousand_clients_hold_few_replies_and_cost_a_line(tmp_path: Path) -> None:
    found = scale.scaling(repeats=1, rounds=1)
    held = {f.name: f.value for f in found.figures if f.unit == "replies"}
    assert len(held) == 4
    assert max(held.values()) <= 20 == min(held.values())
    by = {f.name: f.value for f in found.figures}
    few, all_ = by["25 a round"], by["1,000 clients, 100 a round, stacked engine"]
    assert by["a step at 25 clients a round costs, over one at 100"] == pytest.approx(4 * few / all_)
    scale.drawn(found, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").exists()


def test_unlearning_is_scaled_from_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little = settings.cifar(torch.device("cpu"), steps=1, model="cnn")
    monkeypatch.setattr(scale, "chosen_setting", lambda *_: little)
    monkeypatch.setattr(scale, "seconds", lambda work, n, *_: [work()] and (1.0,) * n)
    found = scale.unlearning(repeats=1, steps=1, images=100)
    by = {f.name: f for f in found.figures}
    assert by["FedQUIT's unlearning round on 5,000 images"].value == 5_000 / 32
    assert by["evaluating 60,000 images"].value == 600
    assert by["evaluating 60,000 images"].note == "scaled from 100 images"
    assert by["the same, sequential engine"].value == 5_000 / 32
    assert by["times as fast as the sequential engine"].value == 1
    scale.bars(found, tmp_path / "unlearn.png")
    assert (tmp_path / "unlearn.png").read_bytes().startswith(b"\x89PNG")
