# SPDX-License-Identifier: Apache-2.0
"""docs/references.md: its toy commands are run, and what they write is compared."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from data.published_world import PARTITIONS, unpacked
from fedquit.cli import main
from fedquit.cli.options import chosen
from fedquit.results.bundles import read_bundle
from fedquit.running.bundles import open_bundle, retrain_in, setting_key
from fedquit.running.runner import evaluation_of
from fedquit.running.setup import build_setup

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "references.md"
ALLOWED = {"forget_js"}  # what the bundle cannot give


def toy_commands() -> list[list[str]]:
    section = PAGE.read_text().split("## The same at toy size")[1].split("##")[0]
    block = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [shlex.split(line)[1:] for line in block[1].replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("toy")
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in toy_commands():
            text = io.StringIO()
            patch.setattr("sys.argv", ["fedquit", *words])
            with redirect_stdout(text), pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0
            printed.append(text.getvalue())
    return folder, printed


def without(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the table without what is named as empty, and without times."""
    return {
        key: {k: v for k, v in value.items() if k not in ALLOWED} if isinstance(value, dict) else value
        for key, value in line.items()
        if key not in ("seconds",)
    }


def test_the_tables_are_equal_but_for_what_is_named(ran: tuple[Path, list[str]]) -> None:
    folder, printed = ran
    taken, trained = (
        json.loads((folder / f"runs/{name}/comparison.json").read_text()) for name in ("taken", "trained")
    )
    assert [line["method"] for line in taken["table"]] == [
        *("original", "retrain", "retrain again"),
        "fedquit",
    ]
    for a, b in zip(trained["table"], taken["table"], strict=True):
        assert without(b) == without(a), a["method"]
    fedquit = taken["table"][3]
    assert "forget_acc" in fedquit["gaps"]
    assert "forget_js" not in fedquit["gaps"]
    assert taken["retrains"] == trained["retrains"]
    assert [row["seed"] for row in taken["retrains"]] == [1000003]
    for told in taken["retrain_from"]["runs"]:
        assert set(told["left_empty"]) == ALLOWED
        assert told["original"] == {"seed": 0, "same": True}
    assert "Retrain without 0 is from the bundle bundle (seed 0, cpu in float32" in printed[1]
    assert "Left empty, as a bundle has no weights: forget_js" in printed[1]
    table = printed[1].split("unlearned: test/forget")[0]
    assert table == printed[2].split("unlearned: test/forget")[0], "the same table"


def test_original_alone_was_trained_and_the_bundle_has_no_weights(ran: tuple[Path, list[str]]) -> None:
    folder, _ = ran
    assert len(list((folder / "runs/taken/cache").iterdir())) == 1
    assert len(list((folder / "runs/trained/cache").iterdir())) == 3
    bundle = folder / "runs/bundle"
    assert {file.suffix for file in bundle.iterdir()} == {".json", ".safetensors"}
    assert not list((folder / "runs/bundle.state").iterdir())
    for reference in read_bundle(bundle).references:
        size = reference.file.stat().st_size + reference.scores_file.stat().st_size
        assert size < 150_000


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lda", "iid"])
def test_the_committed_retrains_fit_the_documented_setting(tmp_path: Path, setting: str) -> None:
    """On the published data with the authors' partition, where they are at hand."""
    command = PAGE.read_text().split("fedquit compare ")[1].split("```")[0].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[0] == "settings/cifar100-lda"
    assert words[words.index("--partition-file") + 1] == "cifar100_lda0.1_clients10.json"
    settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    file = {"lda": "cifar100_lda0.1_clients10.json", "iid": "cifar100_iid_clients10.json"}[setting]
    data = unpacked("cifar100", tmp_path)
    recipe = chosen(f"settings/cifar100-{setting}", [*settings, "engine.device=cpu"], data, PARTITIONS / file)
    setup = build_setup(recipe)
    bundle = open_bundle(ROOT / "results" / "references", recipe)
    targets = words[words.index("--targets") + 1].split(",") if setting == "lda" else ["0", "1"]
    for target in targets:
        event = dataclasses.replace(recipe.request[0], clients=(int(target),))
        own = dataclasses.replace(setup, recipe=dataclasses.replace(recipe, request=(event,)))
        retrain = retrain_in(bundle, setting_key(setup), evaluation_of(own), recipe.seed)
        assert (retrain.reference.clients, retrain.reference.seed) == ((int(target),), 0)
        forget = evaluation_of(own).labels("forget")
        assert len(forget) == retrain.reference.sizes["forget"]


def test_the_page_names_every_field_that_is_left_empty_and_every_option() -> None:
    from fedquit.results.bundles import NO_WEIGHTS

    page = PAGE.read_text()
    for key in NO_WEIGHTS:
        assert f"`{key}`" in page
    for option in ("--retrain-from", "--time-limit", "--state", "--without-original", "--original-seeds", "--jobs"):
        assert option in page
