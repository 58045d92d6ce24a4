# SPDX-License-Identifier: Apache-2.0
"""Every setting of the paper on the published data itself: some steps of training, of unlearning, and one look."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data.published_world import PARTITIONS, unpacked
from fedquit.audit.scores import score_examples
from fedquit.cli.options import chosen
from fedquit.core import Request, State, Trained
from fedquit.core.fedavg import Learn, fedavg
from fedquit.core.params import fingerprint
from fedquit.data.preprocessing import AS_STORED
from fedquit.methods.fedquit import FedQUIT
from fedquit.running.recipe import load
from fedquit.running.session import Session
from fedquit.running.setup import Setup, build_setup

pytestmark = pytest.mark.slow
STEP = 1e-6  # of an epoch: at least one step is taken
BATCH = 4
EVALUATED = 16
# The published photographs are decoded once for each size; 64 keeps the disk small, and the network reads any. Those of
# CIFAR-100 are enlarged as they are read, to 224 as the setting says.
SMALLER = {"cub200": {"size": 64}}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


def opened(name: str, folder: Path, partition: Path | None = None) -> Setup:
    """A setting on real data, with small batches: a step of 32 through ResNet-18 takes a second and more."""
    setting = f"settings/{name}"
    recipe = chosen(setting, ["engine.device=cpu"], unpacked(load(setting).data.name, folder), partition)
    if recipe.model.name == "mit_b0":
        pytest.importorskip("transformers")
        model = dataclasses.replace(recipe.model, options={"weights": "none"})
        data = dataclasses.replace(recipe.data, options=SMALLER.get(recipe.data.name, recipe.data.options))
        recipe = dataclasses.replace(recipe, model=model, data=data)
    some = dataclasses.replace(recipe.train, epochs=STEP, batch_size=BATCH)
    return build_setup(dataclasses.replace(recipe, train=some))


@pytest.mark.filterwarnings("ignore:mit_b0 begins untrained")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10-lda", "cifar10_lda0.3_clients10.json"),
        ("cifar100-iid", "cifar100_iid_clients10.json"),
        ("cifar100-lda", "cifar100_lda0.1_clients10.json"),
        ("cifar100-lda-100-clients", None),
        pytest.param("cifar100-lda-mit-b0", None, marks=pytest.mark.transformers),
        pytest.param("cub200-lda", None, marks=pytest.mark.transformers),
        pytest.param("cub200-lda-100-clients", None, marks=pytest.mark.transformers),
        ("shakespeare", None),
    ],
)
def test_a_setting_trains_unlearns_and_is_evaluated_on_the_published_data(
    name: str, file: str | None, published: Path
) -> None:
    setup = opened(name, published, PARTITIONS / file if file else None)
    clients = setup.recipe.data.clients
    assert len(setup.data.clients) == clients
    training = dataclasses.replace(setup.training, clients_per_round=3)
    assert isinstance(training.task, Learn)
    session = Session(setup.engine(setup.data, {}), 0, setup.data.clients)
    session.enter("original", 0)
    state = fedavg(session, State(setup.initial), training, setup.data.clients)

    request = Request((clients - 1,))
    marked = setup.data.mark(request)
    fed = Session(setup.engine(marked, {}), 0, marked.clients)
    fed.enter("unlearn-0", 0)
    method = setup.method
    assert isinstance(method, FedQUIT)
    little = dataclasses.replace(method, epochs=STEP, batch_size=BATCH)
    trained = Trained(state.params, setup.initial, training, {}, {})
    unlearned = little.unlearn(fed, state.fresh(), trained, request)
    assert len({fingerprint(p) for p in (setup.initial, state.params, unlearned.params)}) == 3

    data = setup.data.dataset
    found = score_examples(setup.model, unlearned.params, data.test_x[:EVALUATED], data.test_y[:EVALUATED])
    assert len(found) == EVALUATED
    assert 0 < found.loss.mean() < 100, "after a few steps from random weights it may be large, but it is a number"
    if data.x.dtype == torch.uint8:
        assert data.look is not AS_STORED
        seen = data.look.plain(data.x[:: max(1, len(data.x) // 50)])
        assert abs(float(seen.mean())) < 0.5, "normalised"
        assert 0.5 < float(seen.std()) < 1.5
