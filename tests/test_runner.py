# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import run_client
from fedquit import unlearn
from fedquit.core import Request
from fedquit.core.fedavg import cross_entropy
from fedquit.core.params import fingerprint, mix
from fedquit.data.samples import choose_samples
from fedquit.engine import Address
from fedquit.errors import FedquitError, NonFiniteError, RequestError, StoreError
from fedquit.methods.fedquit import FedQUIT
from fedquit.running.recipe import Recipe
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.store import StateFile, locked
from fedquit.running.training_cache import Silent, train
from worlds import tiny


def phases(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["phase"]: row for row in results["rows"]}


def state_of(out: Path, name: str, request: int = 0) -> dict[str, torch.Tensor]:
    loaded = StateFile(out / f"request-{request}" / f"{name}.safetensors").load()
    assert loaded is not None
    return loaded[0].params


def test_results_have_the_fields_that_were_promised(tmp_path: Path) -> None:
    results = run(tiny(), tmp_path / "a")
    on_disk = json.loads((tmp_path / "a" / "results.json").read_text())
    assert on_disk == json.loads(json.dumps(results))
    assert on_disk["schema"] == 1
    fields = {"schema", "recipe", "recipe_hash", "versions", "code", "computed", "rows", "clients", "reference_key"}
    assert set(on_disk) == fields
    assert on_disk["computed"] == {"device": "cpu", "precision": "float32"}
    assert {c: sum(counts) for c, counts in on_disk["clients"].items()} == {
        str(c): len(at) for c, at in build_setup(tiny()).data.train.items()
    }
    density = on_disk["rows"][0]["true_logits"]
    width = [b - a for a, b in itertools.pairwise(density["edges"])]
    assert sum(d * w for d, w in zip(density["density"], width, strict=True)) == pytest.approx(1.0, abs=1e-2)
    assert on_disk["versions"]["torch"] == torch.__version__
    assert [r["phase"] for r in on_disk["rows"]] == ["original", "retrained", "unlearned", "recovered"]
    promised = {"method", "phase", "clients", "seed", "rounds", "seconds", "test_acc", "retain_acc", "forget_acc"}
    for row in on_disk["rows"]:
        assert promised <= set(row)
        assert row["clients"] == [1]
        assert all(0 <= row[k] <= 100 for k in ("test_acc", "retain_acc", "forget_acc"))
    assert [r["rounds"] for r in on_disk["rows"]] == [3, 3, 1, 2]
    assert [r["method"] for r in on_disk["rows"]] == ["original", "retrain", "fedquit", "fedquit"]


def test_the_price_of_forgetting_is_the_rise_of_the_retained_clients_loss(tmp_path: Path) -> None:
    rows = phases(run(tiny(), tmp_path / "a"))
    setup = build_setup(tiny())
    kept = torch.cat([setup.data.train[c] for c in (0, 2, 3)])
    original = train(setup, setup.data, tmp_path / "cache", reporter=Silent()).progress.state.params
    losses = [
        float(cross_entropy(setup.model(p, setup.data.x[kept]), setup.data.y[kept]).mean())
        for p in (original, state_of(tmp_path / "a", "unlearned"))
    ]
    assert rows["unlearned"]["price_of_forgetting"] == pytest.approx(losses[1] - losses[0], abs=1e-12)


def test_the_unlearning_round_is_algorithm_1_on_the_client_s_own_data(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    setup = build_setup(tiny())
    original = train(setup, setup.data, tmp_path / "cache", reporter=Silent()).progress.state.params
    mine = setup.data.train[1]
    seed = Address(0, "unlearn-0", 0, 0).seed_for(1)
    by_engine = state_of(tmp_path / "a", "unlearned")

    module = setup.model.build().double()
    module.load_state_dict(original)
    by_hand = unlearn(module, (setup.data.x[mine], setup.data.y[mine]), lr=1e-2, seed=seed)
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(by_engine[name], parameter.detach(), rtol=0, atol=1e-12)


def test_several_clients_are_averaged_by_the_sizes_of_their_forget_sets(tmp_path: Path) -> None:
    both = {"request": [{"clients": [1, 2], "samples": 0.5}], "data": {"partition": "lda", "alpha": 1.0}}
    run(tiny(**both), tmp_path / "a")
    setup = build_setup(tiny(**both))
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    sizes = [e["examples"] for e in events if e["phase"] == "unlearn-0"]
    assert sizes[0] != sizes[1]
    original = train(setup, setup.data, tmp_path / "cache", reporter=Silent()).progress.state.params
    chosen = choose_samples(setup.data, (1, 2), 0.5, "random", 0)
    snapshots = []
    for c in (1, 2):
        x, y = setup.data.x[chosen[c]], setup.data.y[chosen[c]]
        seed = Address(0, "unlearn-0", 0, 0).seed_for(c)
        snapshots.append(run_client(setup.model, FedQUIT(lr=1e-2).distill, x, y, {"start": original}, seed)[0])
    expected = mix(snapshots[0], snapshots[1], sizes[0] / sum(sizes))
    for name, tensor in state_of(tmp_path / "a", "unlearned").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


def test_in_sequence_each_client_starts_from_the_last_one_s_snapshot(tmp_path: Path) -> None:
    request = [{"clients": [2, 0]}]
    results = run(tiny(request=request, method={"name": "fedquit", "lr": 1e-2, "order": "sequential"}), tmp_path / "a")
    assert phases(results)["unlearned"]["rounds"] == 2
    setup = build_setup(tiny())
    w = train(setup, setup.data, tmp_path / "cache", reporter=Silent()).progress.state.params
    for turn, c in enumerate((2, 0)):
        x, y = setup.data.x[setup.data.train[c]], setup.data.y[setup.data.train[c]]
        seed = Address(0, "unlearn-0", turn, 0).seed_for(c)
        w = run_client(setup.model, FedQUIT(lr=1e-2).distill, x, y, {"start": w}, seed)[0]
    for name, tensor in state_of(tmp_path / "a", "unlearned").items():
        torch.testing.assert_close(tensor, w[name], rtol=0, atol=1e-12)


def test_one_client_in_parallel_is_one_client_in_sequence(tmp_path: Path) -> None:
    prints = [
        phases(run(tiny(method={"name": "fedquit", "order": order}), tmp_path / order))["recovered"]["fingerprint"]
        for order in ("parallel", "sequential")
    ]
    assert prints[0] == prints[1]


def test_after_a_sample_request_the_client_stays_with_the_rest(tmp_path: Path) -> None:
    results = run(tiny(request=[{"clients": [1], "samples": 0.5}]), tmp_path / "a")
    assert all(row["samples"] for row in results["rows"])
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    whole = len(build_setup(tiny()).data.train[1])
    sizes = {e["phase"]: e["examples"] for e in events if e["client"] == 1}
    assert sizes["unlearn-0"] == round(whole / 2)
    assert sizes["recover-0"] == whole - round(whole / 2)


def test_a_second_request_finds_the_recovered_model_and_forgets_both(tmp_path: Path) -> None:
    results = run(tiny(request=[{"clients": [1]}, {"clients": [3]}]), tmp_path / "a")
    first = {r["phase"]: r for r in results["rows"] if r["request"] == 0}
    second = {r["phase"]: r for r in results["rows"] if r["request"] == 1}
    assert second["original"]["fingerprint"] == first["recovered"]["fingerprint"]
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert {e["client"] for e in events if e["phase"] == "recover-1"} == {0, 2}
    setup = build_setup(tiny())
    data = setup.data.mark(Request((1,))).after(Request((1,))).mark(Request((3,))).after(Request((3,)))
    gold = train(setup, data, tmp_path / "cache", reporter=Silent())
    assert second["retrained"]["fingerprint"] == fingerprint(gold.progress.state.params)
    loaded = StateFile(tmp_path / "a" / "request-1" / "recovered-0.safetensors").load()
    assert loaded is not None
    assert loaded[0].clock == 3 + 2 + 2, "the learning rate goes on falling"


def test_a_forgotten_client_comes_back_only_if_enrolled_anew(tmp_path: Path) -> None:
    back: list[dict[str, Any]] = [{"clients": [1]}, {"kind": "join", "clients": [1], "rounds": 2}]
    with pytest.raises(RequestError, match="enrol it anew"):
        run(tiny(request=back), tmp_path / "a")
    assert not (tmp_path / "cache").exists(), "it is refused before any work begins"
    back[1]["anew"] = True
    results = run(tiny(request=back), tmp_path / "b")
    assert results["rows"][-1]["phase"] == "joined"
    events = [json.loads(line) for line in (tmp_path / "b" / "events.jsonl").read_text().splitlines()]
    assert [e["client"] for e in events if e["phase"] == "join-1"] == [0, 1, 2, 3] * 2


def test_recovery_takes_no_round_where_the_accuracy_is_there_already(tmp_path: Path) -> None:
    easy = tiny(seed=2, method={"name": "natural"}, recover={"until": "retrained"}, train={"rounds": 20})
    rows = phases(run(easy, tmp_path / "a"))
    assert rows["unlearned"]["test_acc"] >= rows["retrained"]["test_acc"]
    assert rows["recovered"]["rounds"] == 0
    assert rows["recovered"]["fingerprint"] == rows["original"]["fingerprint"]


def test_recovery_stops_at_the_first_round_that_reaches_retrain(tmp_path: Path) -> None:
    broken = {"name": "fedquit", "lr": 0.3, "epochs": 3.0}
    recipe = tiny(method=broken, recover={"until": "retrained", "max_rounds": 40}, data={"alpha": 1.0})
    rows = phases(run(recipe, tmp_path / "a"))
    target, curve = rows["retrained"]["test_acc"], rows["recovered"]["curve"]
    assert [p["round"] for p in curve] == list(range(rows["recovered"]["rounds"] + 1))
    assert len(curve) > 1
    assert all(p["test_acc"] < target for p in curve[:-1])
    assert curve[-1]["test_acc"] >= target
    assert curve[-1]["test_acc"] == rows["recovered"]["test_acc"]


def test_the_mean_of_three_recoveries_is_compared_where_the_paper_s_rule_is_chosen(tmp_path: Path) -> None:
    broken = {"name": "fedquit", "lr": 0.3, "epochs": 3.0}
    recipe = tiny(method=broken, recover={"until": "retrained-mean-of-3", "max_rounds": 40})
    rows = phases(run(recipe, tmp_path / "a"))
    curves = [json.loads((tmp_path / "a" / "request-0" / f"curve-{i}.json").read_text()) for i in range(3)]
    assert len({json.dumps(c) for c in curves}) == 3, "the three differ in their random numbers"
    means = [sum(p["test_acc"] for p in points) / 3 for points in zip(*curves, strict=True)]
    target = rows["retrained"]["test_acc"]
    assert all(m < target for m in means[:-1])
    assert means[-1] >= target
    assert rows["recovered"]["runs"] == 3
    assert rows["recovered"]["test_acc"] == pytest.approx(means[-1])


def test_original_retrain_and_natural_are_the_references(tmp_path: Path) -> None:
    engine = {"name": "sequential"}  # bit for bit what the loop below computes
    natural = phases(run(tiny(method={"name": "natural"}, engine=engine), tmp_path / "natural"))
    assert natural["unlearned"]["rounds"] == 0
    assert natural["unlearned"]["fingerprint"] == natural["original"]["fingerprint"]
    assert natural["unlearned"]["price_of_forgetting"] == 0
    retrain = phases(run(tiny(method={"name": "retrain"}, engine=engine), tmp_path / "retrain"))
    assert retrain["unlearned"]["rounds"] == 3
    setup = build_setup(tiny())
    alone = setup.data.mark(Request((1,))).after(Request((1,)))
    w = setup.initial
    for clock in range(3):
        parts = []
        for c in (0, 2, 3):
            mine = alone.train[c]
            seed = Address(0, "unlearn-0", clock, 0).seed_for(c)
            task = setup.training.task_at(clock)
            parts.append(
                (run_client(setup.model, task, alone.x[mine], alone.y[mine], {"start": w}, seed)[0], len(mine))
            )
        n = sum(size for _, size in parts)
        w = {k: sum((p[k] * size for p, size in parts[1:]), parts[0][0][k] * parts[0][1]) / n for k in w}
    assert retrain["unlearned"]["fingerprint"] == fingerprint(w)


def test_the_same_command_again_does_no_work_and_says_the_same(tmp_path: Path) -> None:
    first = run(tiny(), tmp_path / "a")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    again = run(tiny(), tmp_path / "a")
    assert again["rows"] == first["rows"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")} == stamps


def test_a_folder_belongs_to_one_recipe(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    with pytest.raises(StoreError, match=r"another recipe \(it differs in seed\): choose another --out"):
        run(tiny(seed=1), tmp_path / "a")


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    a, b = phases(run(tiny(), tmp_path / "a")), phases(run(tiny(seed=1), tmp_path / "b"))
    assert all(a[phase]["fingerprint"] != b[phase]["fingerprint"] for phase in a)


def test_partial_participation_asks_so_many_each_round(tmp_path: Path) -> None:
    recipe = tiny(train={"rounds": 3, "clients_per_round": 2}, recover={"max_rounds": 6})
    run(recipe, tmp_path / "a")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    rounds: dict[int, list[int]] = {}
    for e in events:
        if e["phase"] == "recover-0":
            rounds.setdefault(e["round"], []).append(e["client"])
    assert [len(asked) for asked in rounds.values()] == [2] * 6
    assert len({tuple(asked) for asked in rounds.values()}) > 1
    assert not any(1 in asked for asked in rounds.values())


def test_weights_that_explode_are_named_and_the_previous_state_stays(tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteError, match=r"the reply of client \d in round \d of phase 'train' holds NaN or infinity"
    ):
        run(tiny(train={"lr": 1e300}), tmp_path / "a")
    with pytest.raises(NonFiniteError, match="phase 'unlearn-0'"):
        run(
            tiny(method={"name": "fedquit", "lr": 1.7e308, "optimizer": "sgd", "batch_size": 2, "epochs": 5.0}),
            tmp_path / "b",
        )
    assert not (tmp_path / "b" / "results.json").exists()
    assert not (tmp_path / "b" / "request-0" / "unlearned.safetensors").exists()


def test_a_damaged_state_is_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    (tmp_path / "a" / "results.json").unlink()
    path = tmp_path / "a" / "request-0" / "unlearned.safetensors"
    content = path.read_bytes()[:-3] + b"abc"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"unlearned\.safetensors is damaged"):
        run(tiny(), tmp_path / "a")
    assert path.read_bytes() == content
    path.unlink()
    assert run(tiny(), tmp_path / "a")["rows"]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"clients": [9]}, "client 9 is not in the federation"),
        ({"clients": [0, 1, 2, 3]}, "names every client"),
        ({"clients": []}, "names no client"),
        ({"clients": [1, 1]}, "names a client twice"),
        ({"clients": [1], "samples": 0.5, "choose": "rarest"}, "rare"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedquitError, match=sentence):
        run(tiny(request=[request_]), tmp_path / "a")
    assert not (tmp_path / "a" / "results.json").exists()


def test_without_a_retrain_there_is_no_such_row(tmp_path: Path) -> None:
    results = run(tiny(retrain=False), tmp_path / "a")
    assert [r["phase"] for r in results["rows"]] == ["original", "unlearned", "recovered"]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert isinstance(tiny(), Recipe)


def test_a_training_in_another_precision_is_another_training(tmp_path: Path) -> None:
    for number, precision in enumerate(("float32", "tf32", "bf16", "auto"), start=1):
        recipe = tiny(model={"dtype": "float32"}, train={"rounds": 1}, engine={"precision": precision})
        setup = build_setup(recipe)
        train(setup, setup.data, tmp_path / "cache", reporter=Silent())
        assert cached(tmp_path) == min(number, 3), "auto is float32 on a CPU"


def cached(where: Path) -> int:
    return len(list((where / "cache").iterdir()))


def test_what_determines_a_training_is_its_key(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"train": {"rounds": 2}},
        {"train": {"lr": 0.2}},
        {"model": {"name": "mlp"}},
        {"model": {"name": "mlp", "options": {"hidden": 7}}},
        {"data": {"seed": 1}},
        {"data": {"holdout": 0.1}},
    ]
    run(tiny(retrain=False), tmp_path / "a")
    for number, change in enumerate(changes, start=2):
        run(tiny(retrain=False, **change), tmp_path / f"run{number}")
        assert cached(tmp_path) == number, change
    run(tiny(retrain=False, request=[{"clients": [3]}], method={"name": "not"}), tmp_path / "same")
    assert cached(tmp_path) == len(changes) + 1


def test_a_network_that_was_edited_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = "nn.Flatten(), nn.Linear(16, 8), nn.{}(), nn.Linear(8, c)"
    source = f"from torch import nn\ndef net(s, c):\n    return nn.Sequential({layers})\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, layer in enumerate(("ReLU", "Tanh"), start=1):
        (tmp_path / "edited.py").write_text(source.format(layer))
        sys.modules.pop("edited", None)
        importlib.invalidate_caches()
        run(tiny(model={"name": "edited:net"}, retrain=False), tmp_path / f"run{number}")
        assert cached(tmp_path) == number
    with pytest.raises(StoreError, match="with another network, though the recipe reads the same"):
        run(tiny(model={"name": "edited:net"}, retrain=False), tmp_path / "run1")


def test_a_partition_file_that_was_edited_is_noticed(tmp_path: Path) -> None:
    parts = {str(c): list(range(c * 20, c * 20 + 20)) for c in range(4)}
    file = tmp_path / "parts.json"
    file.write_text(json.dumps(parts))
    changes: dict[str, Any] = {"data": {"partition": "file", "partition_file": str(file)}}
    run(tiny(**changes), tmp_path / "a")
    parts["0"], parts["1"] = parts["1"], parts["0"]
    file.write_text(json.dumps(parts))
    with pytest.raises(StoreError, match="holds a run on other data"):
        run(tiny(**changes), tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"request": [{"clients": [99]}]}, "client 99 is not in the federation"),
        ({"request": [{"clients": [1], "samples": 0.999}]}, "everything it has"),
        ({"request": [{"clients": [1]}, {"clients": [1]}]}, "has been forgotten already"),
        ({"request": [{"clients": [1]}, {"kind": "join", "clients": [77]}]}, "it never was in this federation"),
        ({"request": [{"clients": [1], "samples": 0.5}], "method": {"name": "pga"}}, "PGA forgets whole clients"),
        ({"method": {"name": "fukd"}, "data": {"public": 0.0}}, "fukd needs data of the server's own"),
        ({"model": {"name": "cnn"}, "data": {"options": {"size": 3}}}, "from 4x4 on"),
        ({"model": {"name": "worlds:wrong_outputs"}}, "gives 4 logits and the data has 3 classes"),
        ({"model": {"name": "worlds:wrong_inputs"}}, r"cannot take examples of shape \(1, 4, 4\)"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work_and_leaves_nothing(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(FedquitError, match=sentence):
        run(tiny(**change), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_share_a_cache(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "seam_methods:SubtractAndDistil", "target": 1}, train={"rounds": 12}, retrain=False)
    alone = phases(run(recipe, tmp_path / "alone" / "run"))
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            run(recipe, tmp_path / "shared" / f"run{number}")
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    for number in range(3):
        shared = json.loads((tmp_path / "shared" / f"run{number}" / "results.json").read_text())
        assert phases(shared)["recovered"]["fingerprint"] == alone["recovered"]["fingerprint"]
    assert cached(tmp_path / "shared") == 1


@pytest.mark.parametrize("name", ["fedau", "fedosd", "not"])
def test_a_training_from_the_cache_gives_the_same_as_a_fresh_one(name: str, tmp_path: Path) -> None:
    recipe = tiny(method={"name": name})
    fresh, cached_one = (run(recipe, tmp_path / x, cache=tmp_path / "cache")["rows"] for x in "ab")
    assert [r["fingerprint"] for r in fresh] == [r["fingerprint"] for r in cached_one]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "a"), pytest.raises(StoreError, match="another process is running in"):
        run(tiny(), tmp_path / "a")


@pytest.mark.parametrize("samples", [0.0, 0.5])
@pytest.mark.parametrize("teacher", ["min", "random", "logit_ladder"])
def test_sequences_go_through_a_whole_federation(teacher: str, samples: float, tmp_path: Path) -> None:
    recipe = tiny(
        data={"name": "seam_methods:sequence_data", "options": {}, "public": 0.0, "holdout": 0.0},
        model={"name": "seam_methods:sequence_net"},
        method={"name": "fedquit", "lr": 0.1, "teacher": teacher, "epochs": 3.0},
        train={"rounds": 6, "lr": 1.0},
        request=[{"clients": [1], "samples": samples}],
    )
    rows = phases(run(recipe, tmp_path / "a"))
    assert rows["original"]["test_acc"] > 40, "every position counts; chance is 20"
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"] + 0.05


def test_forget_accuracy_is_that_of_the_marked_samples(tmp_path: Path) -> None:
    options = {"examples": 200, "noise": 3.0, "classes": 3, "size": 4}
    recipe = tiny(request=[{"clients": [1], "samples": 0.3}], data={"options": options})
    rows = phases(run(recipe, tmp_path / "a"))
    setup = build_setup(recipe)
    chosen = choose_samples(setup.data, (1,), 0.3, "random", 0)[1]
    others = torch.cat([setup.data.train[c] for c in (0, 2, 3)])
    kept = torch.cat([others, setup.data.train[1][~torch.isin(setup.data.train[1], chosen)]])
    params = state_of(tmp_path / "a", "unlearned")
    for name, positions in (("forget", chosen), ("retain", kept), ("holdout", setup.data.holdout[1])):
        hits = setup.model(params, setup.data.x[positions]).argmax(-1) == setup.data.y[positions]
        assert rows["unlearned"][f"{name}_acc"] == pytest.approx(100 * float(hits.double().mean())), name


def test_retrain_as_a_method_uses_no_forgotten_sample(tmp_path: Path) -> None:
    run(tiny(method={"name": "retrain"}, request=[{"clients": [1], "samples": 0.5}]), tmp_path / "a")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert {e["split"] for e in events} == {"retain"}
    whole = len(build_setup(tiny()).data.train[1])
    assert {e["examples"] for e in events if e["client"] == 1} == {whole - round(whole / 2)}


def test_after_a_join_the_next_request_finds_the_model_that_was_trained_with_it(tmp_path: Path) -> None:
    back = {"kind": "join", "clients": [1], "anew": True, "rounds": 2}
    events: list[dict[str, Any]] = [{"clients": [1], "samples": 0.5}, {"clients": [1]}, back, {"clients": [2]}]
    results = run(tiny(request=events), tmp_path / "a")
    joined = next(r for r in results["rows"] if r["phase"] == "joined")
    last = {r["phase"]: r for r in results["rows"] if r["request"] == 3}
    assert last["original"]["fingerprint"] == joined["fingerprint"]
    log = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    whole = len(build_setup(tiny()).data.train[1])
    came_back = {e["examples"] for e in log if e["client"] == 1 and e["phase"] == "join-2"}
    assert came_back == {whole - round(whole / 2)}, "samples that were forgotten before stay forgotten"
    assert {e["client"] for e in log if e["phase"] == "recover-3"} == {0, 1, 3}


def test_the_next_request_finds_what_is_left(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[int, int], str]] = []

    @dataclasses.dataclass(frozen=True)
    class Looks(FedQUIT):
        def unlearn(self, fed: Any, state: Any, trained: Any, request: Any) -> Any:
            seen.append((len(state.kept), dict(trained.examples), fingerprint(trained.params)))
            return super().unlearn(fed, state, trained, request)

    sys.modules["worlds"].Looks = Looks  # type: ignore[attr-defined]
    recipe = tiny(request=[{"clients": [1], "samples": 0.5}, {"clients": [3]}], method={"name": "worlds:Looks"})
    results = run(recipe, tmp_path / "a")
    sizes = {c: len(t) for c, t in build_setup(tiny()).data.train.items()}
    assert seen[0][1] == sizes
    assert seen[1][1] == {**sizes, 1: sizes[1] - round(sizes[1] / 2)}
    found = [r["fingerprint"] for r in results["rows"] if r["phase"] == "original"]
    assert [s[2] for s in seen] == found
    assert [r["rounds"] for r in results["rows"] if r["phase"] == "original"] == [3, 2]


def test_losses_that_are_not_finite_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="some logits are not finite"):
        run(tiny(method={"name": "worlds:Overflow"}), tmp_path / "a")


def test_fixed_budgets_look_at_the_same_recovery_after_the_last_round_that_they_pay_for(tmp_path: Path) -> None:
    recipe = tiny(recover={"until": "rounds", "max_rounds": 2, "budgets": [0.5, 0.3, 0.75]}, train={"rounds": 8})
    results = run(recipe, tmp_path / "a")
    budgets = [r for r in results["rows"] if r["phase"] == "budget"]
    assert [r["budget"] for r in budgets] == [0.3, 0.5, 0.75]
    assert [r["rounds"] for r in budgets] == [2, 3, 5], "of 8 rounds; unlearning takes a part of one"
    for r in budgets:
        assert r["budget"] - 1 / 8 < r["budget_spent"] <= r["budget"]
    recovered = phases(results)["recovered"]
    assert budgets[0]["fingerprint"] == recovered["fingerprint"], "the same rounds, with the same random numbers"
    again = run(recipe, tmp_path / "a")
    assert again["rows"] == results["rows"]


def test_a_method_that_costs_more_than_a_budget_before_recovery_says_so(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "mode"}, recover={"until": "rounds", "max_rounds": 0, "budgets": [0.05]})
    (row,) = [r for r in run(recipe, tmp_path / "a")["rows"] if r["phase"] == "budget"]
    assert row["rounds"] == 0
    assert row["budget_spent"] > 1


def test_two_snapshots_and_the_distance_to_retrain_are_in_the_rows(tmp_path: Path) -> None:
    rows = phases(run(tiny(data={"options": {"examples": 400, "noise": 3.0, "classes": 3, "size": 4}}), tmp_path / "a"))
    assert rows["unlearned"]["leakage_auc"] > 0.5, "confidence falls on the forgotten data more than elsewhere"
    assert 0 <= rows["recovered"]["forget_js"] < rows["unlearned"]["forget_js"] <= math.log(2)
    assert "forget_js" not in rows["retrained"]
    natural = phases(run(tiny(method={"name": "natural"}), tmp_path / "b"))
    assert natural["unlearned"]["leakage_auc"] == 0.5, "the same model twice gives nothing away"


def test_a_model_that_only_left_relearns_at_once_and_one_that_forgot_takes_longer(tmp_path: Path) -> None:
    options = {"examples": 200, "noise": 3.0, "classes": 3, "size": 4}
    shape: dict[str, Any] = {
        "data": {"options": options},
        "train": {"rounds": 10, "epochs": 8.0},
        "evaluate": {"relearn": 8},
    }
    shape |= {"recover": {"until": "rounds", "max_rounds": 0}}
    natural = phases(run(tiny(method={"name": "natural"}, **shape), tmp_path / "natural"))["recovered"]
    forgot = phases(run(tiny(method={"name": "retrain"}, **shape), tmp_path / "retrain"))["recovered"]
    assert natural["relearn_ratio"] == 0.0, "what was never gone needs no step"
    assert forgot["relearn_ratio"] is None or forgot["relearn_ratio"] > 0
    assert len(natural["relearn_curve"]) == 9
    assert natural["relearn_curve"][0] == natural["forget_acc"]
