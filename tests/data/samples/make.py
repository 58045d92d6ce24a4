# SPDX-License-Identifier: Apache-2.0
"""Makes the samples in this folder: the layouts of the published data sets, with random pixels.

`batch` writes the one kind of pickle that CIFAR's files are, sign by sign, as Python 2 once did.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HERE = Path(__file__).parent
Items = list[str] | list[int]


class Writer:
    """Writes a dictionary as Python 2 pickled it."""

    def __init__(self) -> None:
        self.out, self.memo = bytearray(b"\x80\x02}q\x01("), 1

    def put(self) -> None:
        self.memo += 1
        self.out += b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<i", self.memo)

    def text(self, text: str) -> None:
        self.out += b"U" + bytes([len(text)]) + text.encode()
        self.put()

    def items(self, items: Items) -> None:
        self.out += b"]"
        self.put()
        for start in range(0, len(items), 1000):
            self.out += b"("
            for item in items[start : start + 1000]:
                if isinstance(item, str):
                    self.text(item)
                else:
                    self.out += b"K" + bytes([item])
            self.out += b"e"

    def array(self, x: NDArray[np.uint8], *, rows: int | None = None) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        self.out += b"K\x00\x85U\x01b\x87R"
        self.put()
        stated = len(x) if rows is None else rows
        height = b"K" + bytes([stated]) if stated < 256 else b"M" + struct.pack("<H", stated)
        self.out += b"(K\x01" + height + b"M" + struct.pack("<H", x.shape[1]) + b"\x86cnumpy\ndtype\n"
        self.put()
        self.out += b"U\x02u1K\x00K\x01\x87R"
        self.put()
        self.out += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        self.out += struct.pack("<I", stated * x.shape[1]) + x.tobytes() + b"tb"

    def whole(self) -> bytes:
        return bytes(self.out + b"u.")


def batch(entries: dict[str, str | int | Items | NDArray[np.uint8]]) -> bytes:
    writer = Writer()
    for key, value in entries.items():
        writer.text(key)
        if isinstance(value, str):
            writer.text(value)
        elif isinstance(value, int):
            writer.out += b"M" + struct.pack("<H", value)
        elif isinstance(value, list):
            writer.items(value)
        else:
            writer.array(value)
    return writer.whole()


def pixels(rng: np.random.Generator, images: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (images, 3072), dtype=np.uint8)


def cifar100(rng: np.random.Generator) -> dict[str, bytes]:
    """Three training images, two test images."""
    parts: dict[str, bytes] = {}
    for name, fine in (("train", [7, 99, 0]), ("test", [3, 42])):
        names = [f"sample_s_{k:06}.png" for k in range(len(fine))]
        x = pixels(rng, len(fine))
        entries: dict[str, str | int | Items | NDArray[np.uint8]] = {
            "filenames": names,
            "batch_label": f"{name}ing batch 1 of 1",
            "fine_labels": fine,
            "coarse_labels": [label // 5 for label in fine],
            "data": x,
        }
        parts[f"cifar-100-python/{name}"] = batch(entries)
    labels: Items = [f"fine {k}" for k in range(100)]
    coarse: Items = [f"coarse {k}" for k in range(20)]
    parts["cifar-100-python/meta"] = batch({"fine_label_names": labels, "coarse_label_names": coarse})
    return parts


def cifar10(rng: np.random.Generator) -> dict[str, bytes]:
    """One image in each of the six files; here the images come before the file names."""
    parts: dict[str, bytes] = {}
    for k, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        title = f"training batch {k + 1} of 5" if k < 5 else "testing batch 1 of 1"
        entries: dict[str, str | int | Items | NDArray[np.uint8]] = {
            "batch_label": title,
            "labels": [9 - k],
            "data": pixels(rng, 1),
            "filenames": [f"sample_s_{k:06}.png"],
        }
        parts[f"cifar-10-batches-py/{name}"] = batch(entries)
    labels: Items = [f"class {k}" for k in range(10)]
    parts["cifar-10-batches-py/batches.meta"] = batch(
        {"num_cases_per_batch": 1, "label_names": labels, "num_vis": 3072}
    )
    return parts


BIRDS = (  # file, width and height, mode, class, training
    ("001.Red_Bird/b.jpg", (30, 20), "RGB", 1, 1),
    ("001.Red_Bird/a.jpg", (20, 30), "RGB", 1, 0),
    ("002.Grey_Bird/a.jpg", (24, 24), "L", 2, 1),
    ("003.Small_Bird/a.jpg", (12, 9), "RGB", 3, 0),
    ("003.Small_Bird/c.jpg", (16, 16), "RGB", 3, 1),
)


def cub200(rng: np.random.Generator, where: Path) -> None:
    """Five images in three classes; images.txt is not in alphabetical order."""
    place = where / "CUB_200_2011"
    for name, (width, height), mode, _, _ in BIRDS:
        path = place / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = rng.integers(0, 256, (3, 4) if mode == "L" else (3, 4, 3), dtype=np.uint8)
        Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR).save(path, quality=90)
    classes = sorted({name.split("/")[0] for name, *_ in BIRDS})
    tables: dict[str, list[str] | list[int]] = {
        "images.txt": [name for name, *_ in BIRDS],
        "image_class_labels.txt": [label for *_, label, _ in BIRDS],
        "train_test_split.txt": [train for *_, train in BIRDS],
        "classes.txt": classes,
    }
    for name, values in tables.items():
        (place / name).write_text("".join(f"{k} {value}\n" for k, value in enumerate(values, start=1)))


SONNET = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""


def make(where: Path) -> None:
    rng = np.random.default_rng(0)
    for name, content in {**cifar100(rng), **cifar10(rng)}.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(content)
    cub200(rng, where)
    (where / "tinyshakespeare.txt").write_text(SONNET)


if __name__ == "__main__":
    make(HERE)
