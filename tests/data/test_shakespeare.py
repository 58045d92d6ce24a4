# SPDX-License-Identifier: Apache-2.0
"""A text cut into chunks and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.published_world import SAMPLES, copied, small_text, unpacked
from fedquit.data import Dataset, federate
from fedquit.data.catalog import SHAKESPEARE_SOURCE
from fedquit.data.shakespeare import check_text, read_text, shakespeare
from fedquit.errors import InputError

TEXT = (SAMPLES / "tinyshakespeare.txt").read_text()
ALPHABET = "".join(sorted(set(TEXT)))


def sample(clients: int, window: int) -> Dataset:
    return read_text(small_text(), SAMPLES, clients=clients, window=window)


def spelled(tokens: torch.Tensor) -> str:
    return "".join(ALPHABET[t] for t in tokens.flatten().tolist())


def test_the_windows_are_the_text_and_each_target_the_next_character() -> None:
    data = sample(clients=3, window=10)
    length = len(TEXT) // 3
    held = length // 10
    assert data.x.shape == data.y.shape == (3 * ((length - held - 1) // 10), 10)
    assert data.test_x.shape == data.test_y.shape == (3 * ((held - 1) // 10), 10)
    assert data.classes == len(ALPHABET)
    assert data.x.dtype == data.y.dtype == torch.long
    for parts, start, each in (((data.x, data.y), 0, len(data.x) // 3), ((data.test_x, data.test_y), length - held, 1)):
        for k in range(3):
            at = k * length + start
            x, y = (part[k * each : (k + 1) * each] for part in parts)
            assert spelled(x) == TEXT[at : at + 10 * each]
            assert spelled(y) == TEXT[at + 1 : at + 1 + 10 * each]


@settings(max_examples=60)
@given(clients=st.integers(1, 12), window=st.integers(1, 40))
def test_every_chunk_gives_as_many_windows_and_no_test_character_is_trained_on(clients: int, window: int) -> None:
    length = len(TEXT) // clients
    held = length // 10
    if held <= window:
        with pytest.raises(InputError, match="take fewer clients or a smaller window"):
            sample(clients, window)
        return
    data = sample(clients, window)
    assert len(data.x) % clients == 0
    assert len(data.test_x) % clients == 0
    # Where in the text each window lies follows from its number alone.
    each, test_each = len(data.x) // clients, len(data.test_x) // clients
    seen = {k * length + w * window + c for k in range(clients) for w in range(each) for c in range(window + 1)}
    unseen = {
        k * length + length - held + w * window + c
        for k in range(clients)
        for w in range(test_each)
        for c in range(window + 1)
    }
    assert not seen & unseen
    assert max(seen | unseen) < clients * length
    for k in range(clients):
        start = k * length
        assert spelled(data.y[k * each : (k + 1) * each]) == TEXT[start + 1 : start + 1 + each * window]
        start += length - held
        part = data.test_x[k * test_each : (k + 1) * test_each]
        assert spelled(part) == TEXT[start : start + test_each * window]


@pytest.mark.parametrize("clients", [1, 2, 3, 6])
def test_the_partition_chunks_gives_each_client_its_own_chunks(clients: int) -> None:
    data = sample(clients=6, window=5)
    each = len(data.x) // 6
    dealt = federate(data, partition="chunks", clients=clients)
    for c in range(clients):
        chunks = set((dealt.train[c] // each).tolist())
        assert chunks == set(range(c * 6 // clients, (c + 1) * 6 // clients))
        assert len(dealt.train[c]) == each * 6 // clients


@pytest.mark.parametrize(("clients", "window"), [(0, 10), (3, 0), (-1, 10)])
def test_senseless_numbers_are_refused(clients: int, window: int) -> None:
    with pytest.raises(InputError, match=f"clients={clients} and window={window}"):
        sample(clients, window)


def test_another_text_is_refused(tmp_path: Path) -> None:
    path = copied("tinyshakespeare.txt", tmp_path)
    source = small_text()
    path.write_text(TEXT.replace("summer", "winter"))
    for use in (lambda: read_text(source, tmp_path, clients=2, window=5), lambda: check_text(source, tmp_path)):
        with pytest.raises(InputError, match=r"tinyshakespeare.txt is not the published file \(its md5 differs\)"):
            use()
    with pytest.raises(InputError, match="its sha256 differs"):
        shakespeare(folder=SAMPLES)


def test_an_absent_text_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `fedquit data get shakespeare --data-dir") as refused:
        shakespeare(folder=tmp_path)
    assert f"fetch {SHAKESPEARE_SOURCE.url}" in str(refused.value)
    assert str(refused.value).endswith(f"save it as {tmp_path}/tinyshakespeare.txt.")


def test_the_check_counts() -> None:
    assert check_text(small_text(), SAMPLES).startswith(f"{len(TEXT)} characters, {len(ALPHABET)} different ones")


def test_the_real_text_gives_eighty_clients_156_windows_each(tmp_path: Path) -> None:
    data = shakespeare(folder=unpacked("shakespeare", tmp_path))
    assert data.classes == 65
    assert data.x.shape == (80 * 156, 80)
    assert data.test_x.shape == (80 * 17, 80)
    alphabet = sorted(set((tmp_path / "tinyshakespeare.txt").read_text()))
    assert "".join(alphabet[t] for t in data.x[0].tolist()).startswith("First Citizen:\nBefore we proceed")
    dealt = federate(data, partition="chunks", clients=80)
    assert {len(part) for part in dealt.train.values()} == {156}
    assert check_text(SHAKESPEARE_SOURCE, tmp_path).startswith("1,115,394 characters, 65 different ones")
