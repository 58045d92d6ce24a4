# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedquit.core import ClientId, Memory, Params, Reply, Request, State, Training
from fedquit.core.fedavg import Learn
from fedquit.core.params import nbytes
from fedquit.errors import RequestError, StoreError
from fedquit.methods.federaser import FedEraser, calibrated, calibrated_by_tensor
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.training_cache import require_disk
from methods.method_world import Question, Scripted, close, moves, numbers, same, trained, vec
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 5, 1: 1, 2: 2}


class Guarded(dict[str, Params]):
    """A history from which one client's entries must not be read."""

    def __init__(self, content: Memory, client: ClientId) -> None:
        super().__init__(content)
        self.client = client

    def __getitem__(self, key: str) -> Params:
        assert not key.endswith(f"/{self.client}"), "the leaving client's update was read"
        return super().__getitem__(key)


def history(updates: dict[tuple[int, ClientId], Params], method: FedEraser | None = None) -> Guarded:
    """What the watcher keeps of these updates, each of them from the model (1, 1)."""
    memory: Memory = {}
    start = {n: torch.ones_like(p) for n, p in next(iter(updates.values())).items()}
    for (at, client), update in updates.items():
        reply = Reply(client, {n: start[n] + p for n, p in update.items()}, EXAMPLES[client])
        (method or FedEraser()).watch(memory, at, start, reply)
    return Guarded(memory, 0)


def test_the_first_round_is_replayed_as_it_was_without_the_client_and_nobody_is_asked() -> None:
    memory = history({(0, 0): vec(4, 0), (0, 1): vec(0, 3), (0, 2): vec(6, 0)})
    fed = Scripted(examples=EXAMPLES)
    what = trained(vec(9, 9), initial=vec(1, 1), examples=EXAMPLES, memory=memory)
    state = FedEraser().unlearn(fed, State(vec(9, 9), clock=4), what, LEAVES)
    # (1, 1) + (1 (0, 3) + 2 (6, 0)) / 3
    close(state.params, vec(5, 2))
    assert state.round == 1
    assert fed.asked == []


def test_later_rounds_take_the_fresh_direction_and_the_stored_length_of_each_client() -> None:
    memory = history({(1, 0): vec(100, 100), (1, 1): vec(6, 8), (1, 2): vec(0, 0.5)})
    fed = Scripted(moves({1: vec(0, 2), 2: vec(3, 4)}), EXAMPLES)
    what = trained(vec(9, 9), examples=EXAMPLES, memory=memory)
    state = FedEraser().unlearn(fed, State(vec(5, 2), clock=4, round=1), what, LEAVES)
    # Client 1: (0, 2) at length 10 is (0, 10). Client 2: (3, 4) at length 1/2 is (0.3, 0.4). Weights 1/3 and 2/3.
    close(state.params, vec(5 + 0.6 / 3, 2 + 10.8 / 3))
    assert state.round == 2
    (question,) = fed.asked
    assert (question.clients, question.split) == ((1, 2), "retain")
    same(question.sent["start"], vec(5, 2))
    assert question.task.local.epochs == 1.0, "half of the two epochs of training"
    assert question.task.local.lr == 0.25, "the rate of round 1 of training, not of its end"


def test_the_length_is_over_all_tensors_of_the_update_together() -> None:
    fresh = {"a": numbers(2), "b": numbers(0, 0)}
    stored = {"a": numbers(3), "b": numbers(0, 4)}
    close(calibrated(fresh, stored), {"a": numbers(5), "b": numbers(0, 0)})
    close(calibrated_by_tensor({"a": numbers(2), "b": numbers(1, 0)}, stored), {"a": numbers(3), "b": numbers(4, 0)})


def test_an_update_of_length_zero_stays_zero() -> None:
    close(calibrated(vec(0, 0), vec(3, 4)), vec(0, 0))
    close(calibrated_by_tensor(vec(0, 0), vec(3, 4)), vec(0, 0))
    close(calibrated(vec(3, 4), vec(0, 0)), vec(0, 0))


def test_an_interval_keeps_every_so_many_rounds_and_replays_those() -> None:
    method = FedEraser(interval=3)
    memory = history({(r, c): vec(r + 1, 0) for r in range(7) for c in EXAMPLES}, method)
    assert sorted(memory) == [f"{r:06d}/{c}" for r in (0, 3, 6) for c in EXAMPLES]
    what = trained(vec(9, 9), rounds=7, examples=EXAMPLES, memory=memory)
    assert method.rounds(what, LEAVES) == 3
    fed = Scripted(moves({1: vec(0, 1), 2: vec(0, 1)}), EXAMPLES)
    state = method.unlearn(fed, State(vec(0, 0), round=2), what, LEAVES)
    close(state.params, vec(0, 7))  # the length of round 6
    assert fed.asked[0].task.local.lr == 0.125, "the rate of the third replayed round"


@pytest.mark.parametrize(("rounds", "interval", "kept"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (3, 9, 1)])
def test_the_rounds_of_a_replay_are_those_that_were_kept(rounds: int, interval: int, kept: int) -> None:
    assert FedEraser(interval=interval).rounds(trained(vec(0), rounds=rounds), LEAVES) == kept


@pytest.mark.parametrize(("calibration", "epochs"), [(0.25, 0.5), (1.0, 2.0)])
def test_calibration_is_a_part_of_the_epochs_of_training(calibration: float, epochs: float) -> None:
    memory = history({(1, 1): vec(1, 0)})
    fed = Scripted(moves({1: vec(1, 0)}), EXAMPLES)
    FedEraser(calibration=calibration).unlearn(
        fed, State(vec(0, 0), round=1), trained(vec(0, 0), memory=memory), LEAVES
    )
    assert fed.asked[0].task.local.epochs == epochs


def test_the_authors_preset_gives_the_mean_update_the_stored_mean_s_length_tensor_by_tensor() -> None:
    method = FedEraser(**FedEraser.presets["authors"])
    assert (method.interval, method.calibration, method.calibrate) == (2, 0.5, "mean")
    stored = {
        (2, 0): {"a": numbers(99), "b": numbers(99, 99)},
        (2, 1): {"a": numbers(-3), "b": numbers(0, 0)},
        (2, 2): {"a": numbers(6), "b": numbers(4.5, 6)},
    }
    fresh = {1: {"a": numbers(5), "b": numbers(0, 3)}, 2: {"a": numbers(-4), "b": numbers(0, 0)}}
    memory = history(stored, method)
    fed = Scripted(moves(fresh), EXAMPLES)
    w = {"a": numbers(1), "b": numbers(1, 1)}
    state = method.unlearn(fed, State(w, round=1), trained(w, examples=EXAMPLES, memory=memory), LEAVES)
    # Weights 1/3 and 2/3. Stored means: a (-3 + 12)/3 = 3 long; b (3, 4), 5 long. Fresh means: a -1, b (0, 1).
    close(state.params, {"a": numbers(1 - 3), "b": numbers(1, 1 + 5)})


def test_a_store_in_bfloat16_halves_the_bytes_and_rounds_the_numbers() -> None:
    method = FedEraser(store="bfloat16")
    memory = history({(0, 1): vec(1 + 2**-9, -2.5)}, method)
    (entry,) = memory.values()
    assert entry["w"].dtype == torch.bfloat16
    what = trained(vec(9, 9), initial=vec(0, 0), memory=memory)
    state = method.unlearn(Scripted(), State(vec(9, 9)), what, LEAVES)
    same(state.params, vec(1, -2.5))
    assert state.params["w"].dtype == torch.float64


def test_what_was_stored_in_bfloat16_is_averaged_in_the_model_s_own_precision() -> None:
    method = FedEraser(store="bfloat16")
    memory = history({(0, 1): vec(1, 0), (0, 2): vec(1 + 2**-7, 0)}, method)
    what = trained(vec(9, 9), initial=vec(0, 0), examples=EXAMPLES, memory=memory)
    state = method.unlearn(Scripted(), State(vec(9, 9)), what, LEAVES)
    close(state.params, vec(1 + 2 * 2**-7 / 3, 0))


def test_a_round_in_which_only_leaving_clients_took_part_changes_nothing() -> None:
    memory = history({(0, 1): vec(1, 1), (1, 0): vec(3, 4)})
    fed = Scripted(examples=EXAMPLES)
    state = FedEraser().unlearn(fed, State(vec(5, 2), round=1), trained(vec(9, 9), memory=memory), LEAVES)
    same(state.params, vec(5, 2))
    assert state.round == 2
    assert fed.asked == []


def test_where_that_is_the_first_round_the_replay_begins_from_the_initial_model() -> None:
    memory = history({(0, 0): vec(3, 4), (1, 1): vec(6, 8)})
    fed = Scripted(moves({1: vec(0, 2)}), EXAMPLES)
    what = trained(vec(9, 9), initial=vec(1, 1), examples=EXAMPLES, memory=memory)
    first = FedEraser().unlearn(fed, State(vec(9, 9)), what, LEAVES)
    same(first.params, vec(1, 1))
    close(FedEraser().unlearn(fed, first, what, LEAVES).params, vec(1, 11))


def test_only_clients_that_took_part_in_a_round_replay_it() -> None:
    memory = history({(1, 0): vec(3, 4), (1, 2): vec(3, 4)})
    fed = Scripted(moves({2: vec(1, 0)}), EXAMPLES)
    state = FedEraser().unlearn(fed, State(vec(0, 0), round=1), trained(vec(9, 9), memory=memory), LEAVES)
    assert [q.clients for q in fed.asked] == [(2,)]
    close(state.params, vec(5, 0))


def test_several_clients_are_left_out_together() -> None:
    updates = {(r, c): vec(c + 1, 0) for r in (0, 1) for c in EXAMPLES}
    memory = Guarded(history(updates), 1)
    fed = Scripted(moves({2: vec(0, 7)}), EXAMPLES)
    what = trained(vec(9, 9), initial=vec(0, 0), examples=EXAMPLES, memory=memory)
    first = FedEraser().unlearn(fed, State(vec(9, 9)), what, Request((0, 1)))
    close(first.params, vec(3, 0))
    close(FedEraser().unlearn(fed, first, what, Request((0, 1))).params, vec(3, 3))


def test_a_replay_leaves_the_history_as_it_was() -> None:
    memory = history({(1, 1): vec(6, 8)})
    before = {k: v["w"].clone() for k, v in memory.items()}
    fed = Scripted(moves({1: vec(0, 2)}), EXAMPLES)
    for _ in range(2):  # a second request finds what the first did
        state = FedEraser().unlearn(fed, State(vec(0, 0), round=1), trained(vec(0, 0), memory=memory), LEAVES)
        close(state.params, vec(0, 10))
    assert all(torch.equal(memory[k]["w"], v) for k, v in before.items())


def test_the_history_of_the_paper_s_setting_is_ninety_gigabytes() -> None:
    training = Training(Learn(), rounds=200)
    model_bytes = 44_880_528  # ResNet-18 for 100 classes in float32
    assert FedEraser().history_bytes(training, 10, model_bytes) == 89_761_056_000
    assert FedEraser(interval=2).history_bytes(training, 10, model_bytes) == 44_880_528_000
    assert FedEraser(store="bfloat16").history_bytes(training, 10, model_bytes) == 44_880_528_000
    assert FedEraser(interval=150).history_bytes(training, 10, model_bytes) == 2 * 10 * model_bytes


def test_what_is_kept_is_what_was_announced(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "federaser", "interval": 2}))
    rows = run(setup.recipe, tmp_path / "a")["rows"]
    announced = setup.method.history_bytes(setup.training, 4, nbytes(setup.initial))
    stored = next(r for r in rows if r["phase"] == "unlearned")["server_storage_bytes"]
    assert stored == announced + nbytes(setup.initial), "and the global model"


def test_a_history_that_does_not_fit_on_the_disk_is_refused_with_the_bytes_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = build_setup(tiny(method={"name": "federaser"}))
    needed = 3 * 4 * nbytes(setup.initial)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _where, free=free: SimpleNamespace(free=free))
        if fits:
            require_disk(setup, tmp_path, {"federaser": setup.method})
            continue
        with pytest.raises(StoreError, match=f"keep a history of {needed:,} bytes under .* where {free:,} are free"):
            require_disk(setup, tmp_path, {"federaser": setup.method})
        with pytest.raises(StoreError, match=f"{needed:,} bytes"):
            run(setup.recipe, tmp_path / "a")
    assert not list(tmp_path.rglob("*.safetensors")), "refused before a round was trained"


def test_a_cohort_needs_room_for_those_it_asks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build_setup(tiny(method={"name": "federaser"}, train={"clients_per_round": 2}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _where: SimpleNamespace(free=3 * 2 * nbytes(setup.initial)))
    require_disk(setup, tmp_path, {"federaser": setup.method})


def test_requests_for_samples_are_refused_with_a_reason() -> None:
    with pytest.raises(RequestError, match="whole clients: the updates it stored were computed with the samples"):
        FedEraser().check(Request((0,), samples=True))
    FedEraser().check(Request((0, 1)))


def test_a_whole_run_asks_the_others_half_an_epoch_in_each_round_but_the_first(tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={"name": "federaser"}), tmp_path / "a")["rows"]}
    unlearned = rows["unlearned"]
    assert (unlearned["rounds"], unlearned["participations"], unlearned["client_epochs"]) == (3, 6, 3.0)
    assert rows["recovered"]["rounds"] == 0, "the replay is all there is"


def test_the_first_round_replayed_in_a_whole_run_is_fedavg_without_the_client(tmp_path: Path) -> None:
    once = tiny(method={"name": "federaser"}, train={"rounds": 1})
    rows = {r["phase"]: r for r in run(once, tmp_path / "a")["rows"]}
    # The clients' first updates do not depend on who else takes part, so the replay is Retrain up to rounding.
    assert rows["unlearned"]["test_loss"] == pytest.approx(rows["retrained"]["test_loss"], rel=1e-12)
    assert rows["unlearned"]["forget_loss"] == pytest.approx(rows["retrained"]["forget_loss"], rel=1e-12)


def test_the_preset_is_known_to_recipes() -> None:
    recipe = tiny(method={"name": "federaser", "preset": "authors"})
    assert recipe.build_method() == FedEraser(interval=2, calibrate="mean")


def test_the_question_is_the_same_task_as_in_training_otherwise() -> None:
    memory = history({(1, 1): vec(1, 0)})
    fed = Scripted(moves({1: vec(1, 0)}), EXAMPLES)
    what = trained(vec(0, 0), memory=memory)
    FedEraser().unlearn(fed, State(vec(0, 0), round=1), what, LEAVES)
    question: Question = fed.asked[0]
    assert isinstance(question.task, Learn)
    assert question.task.local.batch_size == what.training.task.local.batch_size
