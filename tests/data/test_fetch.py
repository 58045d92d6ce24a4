# SPDX-License-Identifier: Apache-2.0
"""Downloads from a real web server on this machine, and what is left on disk when something goes wrong."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.fetch_world import (
    ARCHIVE,
    CONTENT,
    NOWHERE,
    Served,
    complete_part,
    contents,
    packed,
    plain_text,
    serving,
    tiny,
)
from fedquit.data.catalog import Source
from fedquit.data.fetch import fetch
from fedquit.errors import InputError, StoreError

HERE = Path(__file__).parent
PART = "tiny.tar.gz.part"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Served()) as server:
        yield server


def get(folder: Path, served: Served, source: Source | None = None) -> bool:
    return fetch(source or tiny(url=served.url), folder, pause=0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def broken_off(folder: Path, served: Served, at: int) -> None:
    """A download that broke off there, and could not be taken up."""
    served.cut = [at, 0]
    with pytest.raises(StoreError, match="goes on from there"):
        get(folder, served)
    assert (folder / PART).read_bytes() == served.content[:at]
    served.asked.clear()
    served.sent.clear()


def test_a_set_is_downloaded_checked_unpacked_and_nothing_else_is_left(served: Served, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assert fetch(tiny(url=served.url), tmp_path / "new", progress=lambda *step: steps.append(step))
    assert contents(tmp_path / "new" / "tiny-set") == CONTENT
    assert names(tmp_path / "new") == [".tiny.lock", "tiny-set"]
    assert served.wanted == [None]
    downloads = [(done, total) for what, done, total in steps if what == "downloading"]
    assert downloads[0] == (0, len(ARCHIVE))
    assert downloads[-1] == (len(ARCHIVE), len(ARCHIVE))
    unpacking = [done for what, done, _ in steps if what == "unpacking"]
    assert unpacking == sorted(unpacking)
    assert len(unpacking) == len(CONTENT) + 1


def test_what_is_there_already_is_left_alone(served: Served, tmp_path: Path) -> None:
    (tmp_path / "tiny-set").mkdir()
    complete_part(tmp_path)
    (tmp_path / ".tiny-set.unpacking").mkdir()
    assert not get(tmp_path, served)
    assert served.asked == []
    assert names(tmp_path) == [".tiny.lock", "tiny-set"], "what an earlier fetch left over is gone"


def test_a_file_that_is_not_packed_is_put_in_its_place(tmp_path: Path) -> None:
    with serving(Served(content=b"all the world's a stage")) as served:
        source = plain_text(served.content, served.url)
        assert fetch(source, tmp_path)
        assert (tmp_path / "text.txt").read_bytes() == served.content
        assert names(tmp_path) == [".text.lock", "text.txt"]
        assert not fetch(source, tmp_path)


def test_a_broken_connection_is_taken_up_where_it_broke(served: Served, tmp_path: Path) -> None:
    served.cut = [100_000, 70_000]
    assert get(tmp_path, served)
    assert served.wanted == [None, "bytes=100000-", "bytes=170000-"]
    assert [a.get("if-range") for a in served.asked] == [None, '"one"', '"one"']
    assert served.sent == [100_000, 70_000, len(ARCHIVE) - 170_000]
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_the_next_command_goes_on_where_the_last_one_stopped(served: Served, tmp_path: Path) -> None:
    broken_off(tmp_path, served, 100_000)
    assert get(tmp_path, served)
    assert served.wanted == ["bytes=100000-"]
    assert served.sent == [len(ARCHIVE) - 100_000], "nothing is sent twice"
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_redirection_is_followed_with_the_range(served: Served, tmp_path: Path) -> None:
    served.redirect = True
    served.cut = [100_000]
    assert get(tmp_path, served)
    assert served.wanted == [None, "bytes=100000-"]


def test_a_server_without_ranges_sends_all_of_it_again(served: Served, tmp_path: Path) -> None:
    broken_off(tmp_path, served, 100_000)
    served.ranges = False
    assert get(tmp_path, served)
    assert served.sent == [len(ARCHIVE)]
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_server_that_breaks_off_at_the_same_place_each_time_is_given_up(served: Served, tmp_path: Path) -> None:
    served.ranges = False
    served.cut = [5000] * 10
    with pytest.raises(StoreError, match="the connection broke off"):
        get(tmp_path, served)
    assert len(served.asked) == 2


def test_a_file_that_changed_meanwhile_is_fetched_anew(served: Served, tmp_path: Path) -> None:
    old = ARCHIVE
    served.content = bytes(len(old))  # as long as the right one
    broken_off(tmp_path, served, 100_000)
    served.content, served.etag = old, '"two"'
    assert get(tmp_path, served)
    assert served.asked[0]["if-range"] == '"one"'
    assert contents(tmp_path / "tiny-set") == CONTENT


@pytest.mark.parametrize(
    ("etag", "modified", "condition"),
    [
        ('W/"weak"', "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"),
        ('W/"weak"', "", None),  # the length alone must do
        ("", "", None),
    ],
)
def test_a_version_is_named_only_as_the_protocol_allows(
    etag: str, modified: str, condition: str | None, served: Served, tmp_path: Path
) -> None:
    served.etag, served.modified = etag, modified
    broken_off(tmp_path, served, 100_000)
    assert get(tmp_path, served)
    assert served.wanted == ["bytes=100000-"]
    assert served.asked[0].get("if-range") == condition


def test_without_a_name_another_length_starts_anew(served: Served, tmp_path: Path) -> None:
    served.etag = ""
    broken_off(tmp_path, served, 100_000)
    note = json.loads((tmp_path / f"{PART}.json").read_text())
    (tmp_path / f"{PART}.json").write_text(json.dumps(note | {"length": 999_999}))
    assert get(tmp_path, served)
    assert served.wanted == ["bytes=100000-", None]


def test_another_range_than_the_one_asked_for_starts_anew(served: Served, tmp_path: Path) -> None:
    broken_off(tmp_path, served, 100_000)
    served.off = 10
    assert get(tmp_path, served)
    assert served.wanted == ["bytes=100000-", None]
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_part_without_a_note_or_of_another_address_is_not_trusted(served: Served, tmp_path: Path) -> None:
    for note in (None, "{", '{"url": "https://elsewhere", "validator": "x", "length": 5}', '["a"]'):
        shutil.rmtree(tmp_path / "tiny-set", ignore_errors=True)
        (tmp_path / PART).write_bytes(b"something else")
        if note is not None:
            (tmp_path / f"{PART}.json").write_text(note)
        served.asked.clear()
        assert get(tmp_path, served)
        assert served.wanted == [None]


def test_a_complete_part_needs_no_network(tmp_path: Path) -> None:
    complete_part(tmp_path)
    assert fetch(tiny(), tmp_path)
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_server_that_says_there_is_no_more_ends_the_download(served: Served, tmp_path: Path) -> None:
    """The note does not know the length, as of a server that states none; so only the server can tell."""
    (tmp_path / PART).write_bytes(ARCHIVE)
    (tmp_path / f"{PART}.json").write_text(json.dumps({"url": served.url, "validator": '"one"', "length": 0}))
    assert get(tmp_path, served)
    assert served.wanted == [f"bytes={len(ARCHIVE)}-"]
    assert served.sent == [0]


def test_a_part_longer_than_the_file_starts_anew(served: Served, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(ARCHIVE + b"more")
    (tmp_path / f"{PART}.json").write_text(json.dumps({"url": served.url, "validator": '"one"', "length": 0}))
    assert get(tmp_path, served)
    assert served.wanted == [f"bytes={len(ARCHIVE) + 4}-", None]
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_server_that_states_no_length_is_good_enough(served: Served, tmp_path: Path) -> None:
    served.length = False
    assert get(tmp_path, served)
    assert contents(tmp_path / "tiny-set") == CONTENT


def test_a_server_that_never_stops_is_cut_off(tmp_path: Path) -> None:
    received: list[int] = []
    endless = Served(content=ARCHIVE + bytes(10_000_000), length=False)
    with serving(endless) as served, pytest.raises(StoreError, match="checksum differs"):
        fetch(tiny(url=served.url), tmp_path, progress=lambda _, done, __: received.append(done))
    assert max(received) < len(ARCHIVE) + 1_000_000
    assert names(tmp_path) == [".tiny.lock"]


def test_another_file_is_refused_by_its_length_before_it_is_fetched(served: Served, tmp_path: Path) -> None:
    served.content = b"<html>Please log in to this network</html>"
    with pytest.raises(StoreError, match=r"offers a file of 42 bytes, and tiny.tar.gz has [\d,]+: it is another file"):
        get(tmp_path, served)
    assert not (tmp_path / PART).exists()


def test_a_wrong_checksum_is_refused_and_the_file_removed(served: Served, tmp_path: Path) -> None:
    served.content = ARCHIVE[:-1] + bytes([ARCHIVE[-1] ^ 1])
    with pytest.raises(StoreError, match=r"not the published tiny.tar.gz \(its checksum differs\): it was removed"):
        get(tmp_path, served)
    assert names(tmp_path) == [".tiny.lock"]
    served.content = ARCHIVE
    assert get(tmp_path, served)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_an_answer_of_failure_is_told(status: int, served: Served, tmp_path: Path) -> None:
    served.status = status
    with pytest.raises(StoreError, match=f"answered {status} .*: try again later, take another mirror with --url"):
        get(tmp_path, served)


def test_without_a_network_a_sentence_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as refused:
        fetch(tiny(), tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{NOWHERE} cannot be reached (")
    assert said.endswith(
        "Connection refused): connect to the network and run the same command again, or "
        f"fetch {NOWHERE} by other means and save it as {tmp_path}/tiny.tar.gz, and run the command then."
    )


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/x", "tiny.tar.gz"])
def test_only_the_web_is_asked(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a web address"):
        fetch(tiny(), tmp_path, url=url)


def test_an_archive_put_there_by_hand_is_unpacked_and_kept(tmp_path: Path) -> None:
    (tmp_path / "tiny.tar.gz").write_bytes(ARCHIVE)
    assert fetch(tiny(), tmp_path)
    assert contents(tmp_path / "tiny-set") == CONTENT
    assert names(tmp_path) == [".tiny.lock", "tiny-set", "tiny.tar.gz"]


def test_an_archive_put_there_by_hand_must_be_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.tar.gz").write_bytes(ARCHIVE + b" ")
    with pytest.raises(InputError, match=r"is not the published file .*: delete it"):
        fetch(tiny(), tmp_path)
    assert names(tmp_path) == [".tiny.lock", "tiny.tar.gz"]


# ---- archives that mean harm; their checksum fits, as if the publisher had been taken over


def member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HARMFUL = {
    "absolute": packed({"tiny-set/a": b"1", "/tmp/fedquit-harm": b"2"}),
    "upwards": packed({"tiny-set/a": b"1", "tiny-set/../../harm": b"2"}),
    "upwards at once": packed({"tiny-set/a": b"1", "../harm": b"2"}),
    "backslashes": packed({"tiny-set/a": b"1", "tiny-set\\..\\..\\harm": b"2"}),
    "symbolic link out": packed({"tiny-set/a": b"1"}, member("tiny-set/b", tarfile.SYMTYPE, "/etc")),
    "symbolic link within": packed({"tiny-set/a": b"1"}, member("tiny-set/b", tarfile.SYMTYPE, "a")),
    "hard link": packed({"tiny-set/a": b"1"}, member("tiny-set/b", tarfile.LNKTYPE, "/etc/passwd")),
    "device": packed({"tiny-set/a": b"1"}, member("tiny-set/null", tarfile.CHRTYPE)),
    "pipe": packed({"tiny-set/a": b"1"}, member("tiny-set/pipe", tarfile.FIFOTYPE)),
    "the entry is a link": packed({}, member("tiny-set", tarfile.SYMTYPE, "/etc")),
}


@pytest.mark.parametrize("kind", sorted(HARMFUL))
def test_an_archive_that_reaches_outside_is_refused_as_a_whole(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    refused = pytest.raises(InputError, match="is no plain file below it: nothing was unpacked")
    with serving(Served(content=HARMFUL[kind])) as served, refused:
        get(folder, served, tiny(HARMFUL[kind], served.url))
    assert not (folder / "tiny-set").exists()
    assert names(tmp_path) == ["data"]
    assert not Path("/tmp/fedquit-harm").exists()
    assert not (folder / ".tiny-set.unpacking").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (ARCHIVE[: len(ARCHIVE) // 2], "cannot be unpacked"),
        (b"no archive at all", "cannot be unpacked"),
        (packed({"other/a": b"1"}), "holds no tiny-set"),
    ],
    ids=["half of it", "a text", "another archive"],
)
def test_an_archive_that_cannot_be_used_leaves_nothing(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.tar.gz").write_bytes(content)
    with pytest.raises(InputError, match=f"{says}.*delete it and get it again"):
        fetch(tiny(content), tmp_path)
    assert names(tmp_path) == [".tiny.lock", "tiny.tar.gz"]


def test_unpacked_files_are_ordinary_ones(tmp_path: Path) -> None:
    special = tarfile.TarInfo("tiny-set/tool")
    special.mode, special.uid, special.uname = 0o6777, 4711, "somebody"
    archive = packed({}, special)
    (tmp_path / "tiny.tar.gz").write_bytes(archive)
    fetch(tiny(archive), tmp_path)
    found = (tmp_path / "tiny-set" / "tool").stat()
    assert found.st_mode & 0o7022 == 0, "no set-uid bit, and nobody else may write"
    assert found.st_uid == os.getuid()


# ---- disks, kills and other processes


def test_room_is_looked_for_before_anything_is_fetched(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = len(ARCHIVE) + 400_000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(StoreError, match=r"there is no room in .*: about 1 MB are needed; make room"):
        get(tmp_path, served)
    assert not (tmp_path / PART).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert get(tmp_path, served)


def test_a_limit_on_the_size_of_files_is_told_and_the_download_kept(served: Served, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StoreError, match="there is no room in"):
            get(tmp_path, served)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = (tmp_path / PART).stat().st_size
    assert 0 < kept <= 200_000
    served.asked.clear()
    assert get(tmp_path, served)
    assert served.wanted == [f"bytes={kept}-"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the archive, but not for what is in it."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_and_leaves_no_half_of_the_set(
    served: Served, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))  # it looked larger
    with pytest.raises(StoreError, match="there is no room in"):
        get(small_disk, served)
    assert names(small_disk) == [".tiny.lock", PART, f"{PART}.json"]
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    served.asked.clear()
    assert get(small_disk, served)
    assert served.asked == [], "the download was complete"
    assert contents(small_disk / "tiny-set") == CONTENT


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot write to .*: choose another with --data-dir"):
        fetch(tiny(), tmp_path / "file" / "data")


def test_killed_at_any_moment_all_of_it_is_there_or_nothing(tmp_path: Path) -> None:
    paths = [str(HERE.parent), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "killed_fetch.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["states"] == ["end", "nothing", "whole"], "it was killed both before and after the rename"
    assert report["touches"] > 2 * len(CONTENT)


def test_a_second_process_waits_for_the_first_and_finds_its_work_done(served: Served, tmp_path: Path) -> None:
    steps: list[str] = []
    waits = threading.Event()

    def progress(what: str, done: int, total: int) -> None:
        steps.append(what)
        waits.set()

    results: list[bool] = []
    with (tmp_path / ".tiny.lock").open("w") as lock:  # the first process
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(
            target=lambda: results.append(fetch(tiny(url=served.url), tmp_path, progress=progress))
        )
        second.start()
        assert waits.wait(10)
        assert steps == ["waiting for another process"]
        assert served.asked == []
        (tmp_path / "tiny-set").mkdir()
    second.join()
    assert results == [False]
    assert served.asked == []
