# SPDX-License-Identifier: Apache-2.0
"""CUB-200-2011: the official split, images of any size, and what is decoded once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from data.published_world import SAMPLES, SMALL_BIRDS, copied, unpacked
from data.samples.make import BIRDS
from fedquit.data import Dataset, cub
from fedquit.data.cub import Birds, check_birds, cub200, read_birds
from fedquit.data.preprocessing import Pixels
from fedquit.errors import InputError, StoreError, UnknownNameError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied("CUB_200_2011", tmp_path)
    return tmp_path


def read(folder: Path, **options: Any) -> Dataset:
    return read_birds(SMALL_BIRDS, folder, **{"size": 16, **options})


def picture(name: str) -> Image.Image:
    return Image.open(SAMPLES / "CUB_200_2011" / "images" / name).convert("RGB")


def planes(image: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(image).transpose(2, 0, 1)


def test_the_order_labels_and_split_are_the_publishers(folder: Path) -> None:
    data = read(folder)
    assert data.y.tolist() == [0, 1, 2]
    assert data.test_y.tolist() == [0, 2]
    assert data.classes == 3
    assert data.x.dtype == torch.uint8
    for x, train in ((data.x, 1), (data.test_x, 0)):
        names = [name for name, _, _, _, t in BIRDS if t == train]
        assert x.shape == (len(names), 3, 16, 16)
        for image, name in zip(x, names, strict=True):
            expected = picture(name).resize((16, 16), Image.Resampling.BILINEAR)
            assert np.array_equal(image.numpy(), planes(expected)), name


def test_grey_photographs_become_three_equal_colours(folder: Path) -> None:
    grey = read(folder).x[1]
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])
    assert len(grey.unique()) > 10


def test_native_test_images_are_the_centre_as_keras_cuts_it(folder: Path) -> None:
    data, resized = read(folder, test_crop="native"), read(folder)
    assert torch.equal(data.x, resized.x), "training images are resized all the same"
    tall = planes(picture("001.Red_Bird/a.jpg"))  # 20 wide and 30 high: larger than the crop both ways
    assert np.array_equal(data.test_x[0].numpy(), tall[:, 7:23, 2:18])
    small = picture("003.Small_Bird/a.jpg")  # 12 wide and 9 high: the central square of 9, enlarged
    expected = small.crop((1, 0, 10, 9)).resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(data.test_x[1].numpy(), planes(expected))


def test_an_image_smaller_in_one_way_only_is_cut_square_first(folder: Path) -> None:
    data = read(folder, size=24, test_crop="native")
    tall = picture("001.Red_Bird/a.jpg")  # 20 x 30 for a crop of 24
    expected = tall.crop((0, 5, 20, 25)).resize((24, 24), Image.Resampling.BILINEAR)
    assert np.array_equal(data.test_x[0].numpy(), planes(expected))


def test_the_look_is_that_of_the_authors(folder: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = read(folder)
    assert data.look == Pixels(mean, std, vary="resized-crop-flip")
    assert data.shape == (3, 16, 16)
    assert read(folder, augment=False).look == Pixels(mean, std)


def test_images_are_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, int, int]] = []
    first = read(folder, progress=lambda *step: steps.append(step))
    assert steps == [
        *(("decoding training images", k, 3) for k in (1, 2, 3)),
        *(("decoding test images", k, 2) for k in (1, 2)),
    ]
    monkeypatch.setattr(cub, "_open", lambda path: pytest.fail(f"{path} was decoded again"))
    again = read(folder, progress=lambda *step: pytest.fail("nothing is left to do"))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.test_x, again.test_x)


def test_writing_to_the_tensor_leaves_the_file_alone(folder: Path) -> None:
    first = read(folder)
    before = first.x.clone()
    first.x.zero_()
    assert torch.equal(read(folder).x, before)


@pytest.mark.parametrize("change", ["content", "time", "size", "crop", "order"])
def test_what_the_decoded_images_depend_on_makes_them_anew(change: str, folder: Path) -> None:
    if change == "order":  # then nothing but the names tells two images apart
        for name, *_ in BIRDS:
            path = folder / "CUB_200_2011" / "images" / name
            path.write_bytes(path.read_bytes().ljust(2000, b"\0"))
            os.utime(path, (1, 1))
    read(folder)
    decoded = set((folder / "decoded").glob("*.npy"))
    place = folder / "CUB_200_2011"
    image = place / "images" / BIRDS[0][0]
    options: dict[str, Any] = {}
    if change == "content":
        stamp = image.stat()
        picture(BIRDS[2][0]).save(image)
        os.utime(image, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    elif change == "time":
        os.utime(image, (1, 1))
    elif change == "order":
        lines = (place / "images.txt").read_text().splitlines()
        names = [line.split()[1] for line in lines]
        names[0], names[4] = names[4], names[0]
        (place / "images.txt").write_text("".join(f"{k} {name}\n" for k, name in enumerate(names, start=1)))
    else:
        options = {"size": 8} if change == "size" else {"test_crop": "native"}
    data = read(folder, **options)
    assert set((folder / "decoded").glob("*.npy")) > decoded
    if change == "order":
        assert np.array_equal(data.x[0].numpy(), planes(picture(BIRDS[4][0])))


def test_a_copy_of_the_folder_may_keep_its_decoded_images(folder: Path, tmp_path: Path) -> None:
    """What counts is where a file lies within the data folder, not where that folder lies."""
    read(folder)
    names = {path.name for path in (folder / "decoded").glob("*.npy")}
    moved = folder.with_name("moved")
    folder.rename(moved)
    read(moved)
    assert {path.name for path in (moved / "decoded").glob("*.npy")} == names
    moved.rename(folder)


def test_left_overs_of_a_killed_process_are_removed(folder: Path) -> None:
    left = folder / "decoded" / ".cub200-16-resized-0.npy.0.making"
    left.parent.mkdir()
    left.write_bytes(b"half")
    read(folder)
    assert not left.exists()
    assert not list((folder / "decoded").glob(".*.making"))


def test_two_at_once_decode_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    plain = cub._open

    def slow(path: Path) -> Image.Image:
        opened.append(path)
        time.sleep(0.02)
        return plain(path)

    monkeypatch.setattr(cub, "_open", slow)
    found: list[Dataset] = []
    both = [threading.Thread(target=lambda: found.append(read(folder))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(found) == 2
    assert len(opened) == 5
    assert torch.equal(found[0].x, found[1].x)


@pytest.mark.parametrize("damage", ["cut", "emptied", "text", "gone"])
def test_an_image_that_cannot_be_decoded_is_named(damage: str, folder: Path) -> None:
    path = folder / "CUB_200_2011" / "images" / "003.Small_Bird" / "c.jpg"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "emptied": b"", "text": b"a bird" * 99}[damage])
    with pytest.raises(InputError, match=r"003\.Small_Bird/c\.jpg: ") as refused:
        read(folder)
    assert f"delete {folder}/CUB_200_2011 and run `fedquit data get cub200" in str(refused.value)
    with pytest.raises(InputError, match=r"003\.Small_Bird/c\.jpg: "):
        check_birds(SMALL_BIRDS, folder)
    if damage == "gone":
        with pytest.raises(InputError, match=r"c\.jpg: "):
            check_birds(SMALL_BIRDS, folder, fast=True)
    else:
        assert check_birds(SMALL_BIRDS, folder, fast=True).endswith("not decoded")


def test_a_failure_leaves_no_half_decoded_file(folder: Path) -> None:
    (folder / "CUB_200_2011" / "images" / "003.Small_Bird" / "c.jpg").write_bytes(b"")
    with pytest.raises(InputError):
        read(folder)
    assert [p.name for p in (folder / "decoded").iterdir()] == [".cub200.lock"]


def test_damaged_decoded_images_are_told_of(folder: Path) -> None:
    read(folder)
    for path in (folder / "decoded").glob("*.npy"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StoreError, match="delete it, and it will be made anew"):
        read(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("images.txt", "5 003.Small_Bird/c.jpg\n", "", "does not name the images of images.txt"),
        ("images.txt", "5 003", "4 003", "a number comes twice"),
        ("images.txt", "5 003.Small_Bird/c.jpg", "5", "not a number and a text"),
        ("images.txt", "003.Small_Bird/c.jpg", "../../../secret.jpg", "lies outside the folder of images"),
        ("images.txt", "003.Small_Bird/c.jpg", "/secret.jpg", "lies outside the folder of images"),
        ("image_class_labels.txt", "5 3", "5 4", "there must be 3 classes"),
        ("image_class_labels.txt", "5 3", "5 0", "there must be 3 classes"),
        ("image_class_labels.txt", "5 3", "5 x", "does not end in a number"),
        ("image_class_labels.txt", "5 3", "6 3", "does not name the images"),
        ("classes.txt", "3 003.Small_Bird\n", "", "there must be 3 classes"),
        ("train_test_split.txt", "5 1", "5 0", r"the official split has 3 \+ 2 images"),
        ("train_test_split.txt", "1 1\n2 0", "1 2\n2 1", r"the official split has 3 \+ 2 images"),
    ],
)
def test_listings_that_do_not_fit_are_refused(file: str, old: str, new: str, says: str, folder: Path) -> None:
    path = folder / "CUB_200_2011" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    for use in (lambda: read(folder), lambda: check_birds(SMALL_BIRDS, folder, fast=True)):
        with pytest.raises(InputError, match=says):
            use()


def test_a_missing_listing_is_named(folder: Path) -> None:
    (folder / "CUB_200_2011" / "train_test_split.txt").unlink()
    with pytest.raises(InputError, match=r"train_test_split.txt: it cannot be read"):
        read(folder)


def test_senseless_options_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="size is 0"):
        read(folder, size=0)
    with pytest.raises(UnknownNameError, match="unknown test crop 'nativ': did you mean 'native'"):
        read(folder, test_crop="nativ")


def test_an_absent_set_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"CUB_200_2011\.tgz by other means and save it as"):
        cub200(folder=tmp_path)


def test_the_sample_is_not_the_official_set() -> None:
    with pytest.raises(InputError, match="is damaged"):
        cub200(folder=SAMPLES)


def test_the_check_decodes_everything_and_tells_how_far_it_is(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    words = check_birds(SMALL_BIRDS, folder, progress=lambda *step: seen.append(step))
    assert words == "3 + 2 images, 3 classes; every image can be decoded"
    assert seen == [("decoding", k, 5) for k in range(1, 6)]
    assert not (folder / "decoded").exists()


@pytest.mark.slow
def test_the_real_birds_have_the_official_split_and_load_fast_the_second_time(tmp_path: Path) -> None:
    folder = unpacked("cub200", tmp_path)
    assert check_birds(Birds(), folder) == "5,994 + 5,794 images, 200 classes; every image can be decoded"
    for crop in ("resized", "native"):
        data = cub200(folder=folder, size=32, test_crop=crop)
        assert data.x.shape == (5994, 3, 32, 32)
        assert data.test_x.shape == (5794, 3, 32, 32)
    counts, test_counts = data.y.bincount(), data.test_y.bincount()
    assert len(counts) == len(test_counts) == 200
    assert (int(counts.min()), int(counts.max())) == (29, 30)
    assert data.y[:2].tolist() == [0, 0]
    steps: list[object] = []
    again = cub200(folder=folder, size=32, test_crop="native", progress=lambda *step: steps.append(step))
    assert steps == []
    assert torch.equal(again.test_x, data.test_x)
