# SPDX-License-Identifier: Apache-2.0
"""Fetch a published data set: a resumable download, a checksum, and all or nothing on disk.

While it is fetched, the publisher's file lies in the data folder as `NAME.part`; `NAME.part.json`
says which file it is a part of. An archive is unpacked in a hidden folder and renamed, so that a
kill leaves the whole data set or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fedquit.data.catalog import MEGABYTE, Damaged, Progress, Source, dataset_lock, no_progress, require_checksum
from fedquit.errors import InputError, StoreError
from fedquit.utils import files

PATIENCE = 60.0  # seconds without a byte
PAUSE = 1.0  # seconds before a broken download is taken up again
CHUNK = 1 << 18
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PARTIAL, NOT_THAT_RANGE = 206, 416
RESTARTS = 2  # how often a part that does not fit the server's file is deleted


def fetch(
    source: Source, folder: Path, *, url: str = "", progress: Progress = no_progress, pause: float = PAUSE
) -> bool:
    """Put a data set into the data folder.

    An archive that the user has put there is used, and stays; a downloaded one is deleted once it
    is unpacked.

    Args:
        source: the data set.
        folder: the data folder.
        url: another address of the publisher's file.
        progress: called with each step.
        pause: seconds before a broken download is resumed.

    Returns:
        Whether it was fetched; False where it was there already.

    Raises:
        StoreError: if the network, the disk or the publisher's file is at fault; the same command
            resumes.
        InputError: if an archive that the user put there is not the published one.
    """

    def note_waiting() -> None:
        progress("waiting for another process", 0, 0)

    with dataset_lock(folder, source.name, note_waiting), _explain_write_error(source, folder):
        part = folder / f"{source.archive}.part"
        own = folder / source.archive
        if source.place(folder).exists():
            _clear(source, folder, part)
            return False
        if own.exists():
            _require_published(own, source)
            _require_room(folder, source.room)
            _unpack(own, source, folder, progress)
            return True
        _download(url or source.url, part, source, progress, pause)
        _verify(part, source, url or source.url)
        if source.packed:
            _unpack(part, source, folder, progress)
        else:
            part.replace(source.place(folder))
            files.flush_folder(folder)
        _clear(source, folder, part)
        return True


@contextlib.contextmanager
def _explain_write_error(source: Source, folder: Path) -> Iterator[None]:
    """Turn an OSError of a write into a StoreError that says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise _no_room(folder, source.bytes + source.room) from error
        raise StoreError(
            f"{source.title} cannot be written to {folder} ({error.strerror or error}): choose another folder with "
            "--data-dir, or mend this one, and run the same command again."
        ) from error


def _no_room(folder: Path, needed: int) -> StoreError:
    return StoreError(
        f"there is no room in {folder}: about {needed / MEGABYTE:,.0f} MB are needed; make room or choose another "
        "folder with --data-dir, and run the same command again to go on."
    )


def _require_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _no_room(folder, needed)


def _clear(source: Source, folder: Path, part: Path) -> None:
    """Remove the temporary files of a fetch."""
    for path in (part, _note_path(part)):
        path.unlink(missing_ok=True)
    shutil.rmtree(_unpacking_folder(source, folder), ignore_errors=True)


def _require_published(own: Path, source: Source) -> None:
    try:
        require_checksum(own, source.checksum)
    except Damaged as error:
        raise InputError(f"{error}: delete it and run the same command again.") from error


def _verify(part: Path, source: Source, url: str) -> None:
    try:
        require_checksum(part, source.checksum)
    except Damaged as error:
        for path in (part, _note_path(part)):
            path.unlink(missing_ok=True)
        raise StoreError(
            f"what {url} sent is not the published {source.archive} (its checksum differs): it was removed; run the "
            "same command again, or take another mirror with --url."
        ) from error


# ---- download


@dataclass(frozen=True)
class _Note:
    """Which file of the server a part belongs to."""

    url: str = ""
    validator: str = ""  # what the server calls this version of the file
    length: int = 0  # 0: the server did not say


def _note_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_note(part: Path) -> _Note:
    try:
        note = json.loads(_note_path(part).read_text(encoding="utf-8"))
        return _Note(str(note["url"]), str(note["validator"]), int(note["length"]))
    except (OSError, ValueError, TypeError, KeyError):
        return _Note()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _download(url: str, part: Path, source: Source, progress: Progress, pause: float) -> None:
    """Download until the part is complete; resume as long as each attempt brings more."""
    if not url.lower().startswith(("http://", "https://")):
        raise InputError(f"{url} is not a web address: give one that begins with https:// or http://.")
    restarts = 0
    while True:
        before = _size(part)
        try:
            if _attempt(url, part, source, progress):
                return
            restarts += 1  # the part did not fit, and was deleted
            if restarts > RESTARTS:
                raise StoreError(f"{url} answers differently each time: take another mirror with --url.")
        except HTTPError as error:
            error.close()
            raise StoreError(
                f"{url} answered {error.code} {error.reason}: try again later, take another mirror with --url, or "
                f"{source.by_hand(part.parent)}."
            ) from error
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            size = _size(part)
            if size > before:
                time.sleep(pause)
                continue
            resumes = f" ({size / MEGABYTE:,.1f} MB are kept, and the same command goes on from there)" if size else ""
            raise StoreError(
                f"{url} cannot be reached ({getattr(error, 'reason', error)}): connect to the network and run the same "
                f"command again{resumes}, or {source.by_hand(part.parent)}."
            ) from error


def _attempt(url: str, part: Path, source: Source, progress: Progress) -> bool:
    """Make one request; return whether the part is complete (else it did not fit, and is deleted)."""
    note = _read_note(part)
    have = _size(part)  # bytes
    if note.url != url or not (note.validator or note.length):
        have = 0  # it is unknown which file it is a part of
    if have and have == note.length:
        return True
    headers = {"User-Agent": "fedquit"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if note.validator:
            headers["If-Range"] = note.validator
    try:
        answer = urlopen(Request(url, headers=headers), timeout=PATIENCE)
    except HTTPError as error:
        if not have or error.code != NOT_THAT_RANGE:
            raise
        error.close()
        if _stated_length(error.headers.get("Content-Range", "")) == have:
            return True  # all of it is here already
        part.unlink()
        return False
    with answer:
        if have and answer.status == PARTIAL:
            start = _stated_start(answer)
            length = _stated_length(answer.headers.get("Content-Range", ""))
            if start != have or (note.length and length != note.length):
                part.unlink()
                return False
        else:  # from the beginning: as asked, or the server has no ranges, or its file has changed since
            have = 0
            length = _stated_length(answer.headers.get("Content-Length", ""))
        if length and length != source.bytes:
            raise StoreError(
                f"{url} offers a file of {length:,} bytes, and {source.archive} has {source.bytes:,}: it is another "
                "file; check the address."
            )
        _require_room(part.parent, source.bytes - have + (source.room if source.packed else 0))
        if not have:
            part.unlink(missing_ok=True)
            files.write_json(_note_path(part), asdict(_Note(url, _validator(answer), length)))
        _receive(answer, part, source, progress)
    return True


def _receive(answer: HTTPResponse, part: Path, source: Source, progress: Progress) -> None:
    with part.open("ab") as file:
        have = file.tell()
        progress("downloading", have, source.bytes)
        while piece := _piece(answer):
            file.write(piece)
            have += len(piece)
            progress("downloading", have, source.bytes)
            if have > source.bytes:
                break  # it will not fit its checksum however much follows
        file.flush()
        os.fsync(file.fileno())
    if have < source.bytes:
        raise ConnectionError("the connection broke off")


def _piece(answer: HTTPResponse) -> bytes:
    try:
        return answer.read(CHUNK)
    except OSError as error:  # of the network; errors of the disk have their own message
        raise ConnectionError(error.strerror or str(error)) from error


def _validator(answer: HTTPResponse) -> str:
    """Return what identifies this version of the file; a weak ETag may not be used for ranges."""
    tag = answer.headers.get("ETag", "")
    return tag if tag.startswith('"') else answer.headers.get("Last-Modified", "")


def _stated_start(answer: HTTPResponse) -> int:
    start = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else -1


def _stated_length(header: str) -> int:
    length = header.rpartition("/")[2]
    return int(length) if length.isdigit() else 0


# ---- unpacking


def _unpacking_folder(source: Source, folder: Path) -> Path:
    return folder / f".{source.entry}.unpacking"


def _unpack(archive: Path, source: Source, folder: Path, progress: Progress) -> None:
    """Unpack the entry of an archive in a hidden folder, and rename it into place."""
    hidden = _unpacking_folder(source, folder)
    shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed: the lock is ours
    hidden.mkdir()
    try:
        with archive.open("rb") as packed, tarfile.open(fileobj=packed, mode="r:gz") as tar:
            for member in tar:
                progress("unpacking", packed.tell(), archive.stat().st_size)
                if _wanted(member, source, archive):
                    tar.extract(member, hidden, filter="data")
        entry = source.inside or source.entry
        if not (hidden / entry).exists():
            raise InputError(f"{archive} holds no {entry}: it is another file; delete it and get it again.")
        os.sync()  # thousands of files at once; the rename must not reach the disk before them
        (hidden / entry).rename(source.place(folder))
        files.flush_folder(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(f"{archive} cannot be unpacked ({error}): delete it and get it again.") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _wanted(member: tarfile.TarInfo, source: Source, archive: Path) -> bool:
    """Whether a member belongs to the entry; refuse one that could reach outside the folder."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or not (member.isreg() or member.isdir()):
        raise InputError(f"{archive} holds {member.name!r}, which is no plain file below it: nothing was unpacked.")
    return path.parts[:1] == (source.inside or source.entry,)
