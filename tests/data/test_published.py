# SPDX-License-Identifier: Apache-2.0
"""Where data lies, the table of published sets, and the commands `fedquit data get` and `fedquit data check`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.fetch_world import Served, plain_text, serving
from data.published_world import SAMPLES, SMALL_BIRDS, copied, small_cifar10, small_cifar100, small_text
from fedquit.cli import main
from fedquit.data import DATASETS, load_dataset, published
from fedquit.data.catalog import SOTU_SOURCE, data_folder, user_cache
from fedquit.data.cifar import check_cifar
from fedquit.data.cub import check_birds
from fedquit.data.shakespeare import check_text
from fedquit.data.speakers import check_addresses
from fedquit.errors import InputError, UnknownNameError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks into the real home."""
    for name in ("FEDQUIT_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# ---- where data lies


def test_a_folder_given_comes_before_the_environment_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_folder() == tmp_path / "home" / ".cache" / "fedquit" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "fedquit" / "data"
    monkeypatch.setenv("FEDQUIT_DATA", "~/sets")
    assert data_folder() == tmp_path / "home" / "sets"
    assert data_folder("") == tmp_path / "home" / "sets"
    assert data_folder(tmp_path / "mine") == tmp_path / "mine"
    assert data_folder("~/mine") == tmp_path / "home" / "mine"


def test_every_system_has_its_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    assert user_cache("linux") == home / ".cache"
    assert user_cache("darwin") == home / "Library" / "Caches"
    assert user_cache("win32") == home / "AppData" / "Local"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert user_cache("win32") == tmp_path / "local"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert user_cache("linux") == home / ".cache"


def test_the_command_in_the_sentence_names_the_folder_only_where_it_is_another_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `fedquit data get cifar100`, or"):
        load_dataset("cifar100")
    with pytest.raises(InputError, match=re.escape(f"run `fedquit data get cifar100 --data-dir '{tmp_path}/my data'`")):
        load_dataset("cifar100", folder=tmp_path / "my data")


def test_the_environment_is_where_load_dataset_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDQUIT_DATA", str(SAMPLES))
    with pytest.raises(InputError, match="is not the published file"):
        load_dataset("cifar100")


# ---- the table


def test_every_published_set_is_a_data_set_with_a_source_of_its_own() -> None:
    assert set(published.PUBLISHED) == {"cifar10", "cifar100", "cub200", "shakespeare", "sotu"}
    for name, entry in published.PUBLISHED.items():
        assert DATASETS[name] is entry.load
        assert entry.source.name == name
        assert entry.source.url.startswith("https://")
        assert re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", entry.source.checksum)
        assert entry.source.packed == (name != "shakespeare")
    assert len({entry.source.entry for entry in published.PUBLISHED.values()}) == 5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples as if they were the published sets."""
    checks: dict[str, Any] = {
        "cifar10": lambda folder, **how: check_cifar(small_cifar10(), folder, **how),
        "cifar100": lambda folder, **how: check_cifar(small_cifar100(), folder, **how),
        "cub200": lambda folder, **how: check_birds(SMALL_BIRDS, folder, **how),
        "shakespeare": lambda folder, **how: check_text(small_text(), folder, **how),
        "sotu": lambda folder, **how: check_addresses(SOTU_SOURCE, 3, folder, **how),
    }
    for name, look in checks.items():
        monkeypatch.setitem(published.PUBLISHED, name, replace(published.PUBLISHED[name], check=look))


@pytest.mark.usefixtures("small")
def test_a_check_tells_complete_absent_and_damaged_apart(tmp_path: Path) -> None:
    for name, entry in published.PUBLISHED.items():
        assert published.check(name, tmp_path).state == "absent"
        place = copied(entry.source.entry, tmp_path)
        found = published.check(name, tmp_path)
        assert (found.state, found.path) == ("complete", place)
        victim = next(p for p in [place, *sorted(place.rglob("*"))] if p.is_file())
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
        found = published.check(name, tmp_path)
        assert found.state == "damaged"
        assert victim.name in found.details


# ---- the commands


def fedquit(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fedquit", "data", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_absent_sets_are_reported_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedquit("check", "--json", "--data-dir", str(tmp_path), monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in found] == ["cifar10", "cifar100", "cub200", "shakespeare", "sotu"]
    assert {f["state"] for f in found} == {"absent"}
    assert found[1] == {
        "name": "cifar100",
        "path": str(tmp_path / "cifar-100-python"),
        "state": "absent",
        "details": f"get it with `fedquit data get cifar100 --data-dir {tmp_path}`",
    }
    assert fedquit("check", "--data-dir", str(tmp_path), monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.count(" absent ") == 5


@pytest.mark.usefixtures("small")
def test_the_check_prints_a_table_and_a_damaged_set_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied("CUB_200_2011", tmp_path)
    place = copied("cifar-100-python", tmp_path)
    words = ("check", "cub200", "cifar100", "--data-dir", str(tmp_path))
    assert fedquit(*words, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert "every image can be decoded" in printed.out
    assert "files with the published md5" in printed.out
    assert "cub200: decoding 100 % of 5" in printed.err
    assert fedquit(*words, "--fast", monkeypatch=monkeypatch) == 0
    assert "not decoded" in capsys.readouterr().out
    (place / "train").write_bytes(b"")
    assert fedquit(*words, "--json", monkeypatch=monkeypatch) == 1
    assert [f["state"] for f in json.loads(capsys.readouterr().out)] == ["complete", "damaged"]


def test_a_wrong_name_is_told_before_anything_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("check", "get"):
        assert fedquit(command, "cifar1000", monkeypatch=monkeypatch) == 2
        printed = capsys.readouterr()
        assert "unknown published data set 'cifar1000': did you mean 'cifar100'?" in printed.err
        assert printed.out == ""
    with pytest.raises(UnknownNameError):
        published.check("digits", Path())


def test_get_fetches_and_then_says_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (SAMPLES / "tinyshakespeare.txt").read_bytes()
    with serving(Served(content=content)) as served:
        real = published.PUBLISHED["shakespeare"]
        text = plain_text(content, "https://nowhere.invalid/")
        source = replace(real.source, checksum=text.checksum, bytes=text.bytes, url=text.url)
        small = replace(real, source=source, check=lambda folder, **how: check_text(source, folder, **how))
        monkeypatch.setitem(published.PUBLISHED, "shakespeare", small)
        words = ("get", "shakespeare", "--data-dir", str(tmp_path), "--url", served.url)
        assert fedquit(*words, monkeypatch=monkeypatch) == 0
        printed = capsys.readouterr()
        place = tmp_path / "tinyshakespeare.txt"
        assert printed.out == f"Tiny Shakespeare is now in {place}.\n"
        assert f"shakespeare: downloading 100 % of {len(content)}" in printed.err
        assert place.read_bytes() == content
        assert fedquit(*words, monkeypatch=monkeypatch) == 0
        assert capsys.readouterr().out == f"Tiny Shakespeare is already in {place}.\n"
        assert fedquit(*words, "--json", monkeypatch=monkeypatch) == 0
        answer = {"name": "shakespeare", "path": str(place), "fetched": False}
        assert json.loads(capsys.readouterr().out) == answer
        assert len(served.asked) == 1
        place.write_bytes(b"to be or not to be")
        assert fedquit(*words, monkeypatch=monkeypatch) == 2
        said = capsys.readouterr().err
        assert "is not the published file" in said
        assert f"delete {place} and run" in said
        assert place.read_bytes() == b"to be or not to be", "nothing of the user's is removed"


def test_get_without_a_network_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9/cifar-100-python.tar.gz"
    words = ("get", "cifar100", "--data-dir", str(tmp_path), "--url", url)
    assert fedquit(*words, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"error: {url} cannot be reached")
    assert f"save it as {tmp_path}/cifar-100-python.tar.gz" in said[0]
