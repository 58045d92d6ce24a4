# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 and CIFAR-100, and what happens to files that only look like theirs."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data.published_world import PARTITIONS, SAMPLES, copied, small_cifar10, small_cifar100, unpacked
from data.samples import make
from fedquit.data import federate
from fedquit.data.catalog import Damaged
from fedquit.data.cifar import CIFAR10, CIFAR100, check_cifar, cifar10, cifar100, read_batch, read_cifar
from fedquit.data.preprocessing import Pixels
from fedquit.errors import InputError

SAMPLE = SAMPLES / "cifar-100-python" / "train"


def read(path: Path, images: int = 3, classes: int = 100) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    x, y = np.zeros((images, 3072), dtype=np.uint8), np.zeros(images, dtype=np.int64)
    read_batch(path, "fine_labels", classes, x, y)
    return x, y


def test_the_samples_are_what_their_script_makes_and_what_pickle_reads() -> None:
    rng = np.random.default_rng(0)
    for name, content in {**make.cifar100(rng), **make.cifar10(rng)}.items():
        assert (SAMPLES / name).read_bytes() == content
        assert isinstance(pickle.loads(content, encoding="latin1"), dict)


def test_cifar100_reads_what_pickle_would() -> None:
    data = read_cifar(small_cifar100(), SAMPLES)
    for name, x, y in (("train", data.x, data.y), ("test", data.test_x, data.test_y)):
        theirs = pickle.loads((SAMPLES / "cifar-100-python" / name).read_bytes(), encoding="latin1")
        assert torch.equal(x, torch.from_numpy(theirs["data"]).view(-1, 3, 32, 32))
        assert y.tolist() == theirs["fine_labels"]
    assert data.x.dtype == torch.uint8
    assert data.y.dtype == torch.long
    assert data.classes == 100


def test_cifar10_joins_its_batches_in_order() -> None:
    data = read_cifar(small_cifar10(), SAMPLES)
    assert data.y.tolist() == [9, 8, 7, 6, 5]
    assert data.test_y.tolist() == [4]
    for k in range(5):
        path = SAMPLES / "cifar-10-batches-py" / f"data_batch_{k + 1}"
        theirs = pickle.loads(path.read_bytes(), encoding="latin1")
        assert data.x[k].flatten().tolist() == theirs["data"][0].tolist()


def test_the_look_is_that_of_the_authors_and_follows_the_options() -> None:
    small = small_cifar100()
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    assert read_cifar(small, SAMPLES).look == Pixels(mean, std, vary="rotate-pad-crop-flip")
    assert read_cifar(small, SAMPLES, augment=False).look == Pixels(mean, std)
    large = read_cifar(small, SAMPLES, size=224)
    assert large.look == Pixels(mean, std, size=224, vary="enlarge-crop-flip")
    assert large.x.shape == (3, 3, 32, 32), "stored as published"
    assert large.shape == (3, 224, 224)
    assert read_cifar(small, SAMPLES, size=224, augment=False).look == Pixels(mean, std, size=224)
    ten = Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), vary="rotate-pad-crop-flip")
    assert read_cifar(small_cifar10(), SAMPLES).look == ten
    with pytest.raises(InputError, match="size is 0"):
        read_cifar(small, SAMPLES, size=0)


@pytest.mark.parametrize("load", [cifar10, cifar100])
def test_an_absent_set_says_what_to_fetch_and_where_to_put_it(load: Callable[..., Any], tmp_path: Path) -> None:
    number = load.__name__.removeprefix("cifar")
    with pytest.raises(InputError) as refused:
        load(folder=tmp_path)
    said = str(refused.value)
    assert f"CIFAR-{number} is not in {tmp_path}: run `fedquit data get cifar{number} --data-dir {tmp_path}`" in said
    assert f"fetch https://www.cs.toronto.edu/~kriz/cifar-{number}-python.tar.gz" in said
    assert f"save it as {tmp_path}/cifar-{number}-python.tar.gz" in said


@pytest.mark.parametrize("load", [cifar10, cifar100])
def test_there_is_no_way_around_the_published_checksums(load: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"is not the published file \(its md5 differs\); delete .* and run `fedquit"):
        load(folder=SAMPLES)


def test_a_file_with_one_bit_changed_is_refused_before_it_is_read(tmp_path: Path) -> None:
    place = copied("cifar-100-python", tmp_path)
    small = small_cifar100(tmp_path)
    content = bytearray((place / "test").read_bytes())
    content[-100] ^= 1  # a pixel: only a checksum can tell
    (place / "test").write_bytes(content)
    read(place / "test", 2)
    with pytest.raises(InputError, match="test is not the published file"):
        read_cifar(small, tmp_path)
    with pytest.raises(InputError, match="test is not the published file"):
        check_cifar(small, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    small = small_cifar100()
    place = copied("cifar-100-python", tmp_path)
    (place / "test").unlink()
    with pytest.raises(InputError, match=r"test cannot be read \(No such file or directory\); delete"):
        read_cifar(small, tmp_path)


def test_a_check_reads_every_file_and_tells_how_far_it_is(tmp_path: Path) -> None:
    place = copied("cifar-100-python", tmp_path)
    small = small_cifar100(tmp_path)
    seen: list[tuple[str, int, int]] = []
    words = check_cifar(small, tmp_path, progress=lambda *step: seen.append(step))
    assert words == "3 + 2 images, 100 classes; 3 files with the published md5"
    assert seen == [("checksums", k, 3) for k in (1, 2, 3)]
    (place / "meta").write_bytes(b"")
    with pytest.raises(InputError, match="meta is not the published file"):
        check_cifar(small, tmp_path)


# ---- files in the wrong layout: the checksum is out of the way, the reader stands alone


def entries(**changes: Any) -> dict[str, Any]:
    x = np.arange(3 * 3072, dtype=np.int64).astype(np.uint8).reshape(3, 3072)
    return {"filenames": ["a", "b", "c"], "fine_labels": [1, 2, 3], "data": x} | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fine_labels": [1, 2]}, "holds 2 fine_labels for 3 images"),
        ({"fine_labels": [1, 2, 3, 4]}, "holds 4 fine_labels for 3 images"),
        ({"fine_labels": "none"}, "holds no fine_labels for 3 images"),
        ({"fine_labels": [1, 2, 100]}, "that are not numbers below 100"),
        ({"fine_labels": ["a", "b", "c"]}, "that are not numbers below 100"),
        ({"data": np.zeros((2, 3072), dtype=np.uint8)}, r"the shape 2 x 3072, not \(3, 3072\)"),
        ({"data": np.zeros((4, 3072), dtype=np.uint8)}, r"the shape 4 x 3072, not \(3, 3072\)"),
        ({"data": np.zeros((3, 3071), dtype=np.uint8)}, r"the shape 3 x 3071, not \(3, 3072\)"),
        ({"data": [1, 2, 3]}, "its images are no array of bytes"),
    ],
)
def test_another_shape_or_number_of_labels_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(make.batch(entries()))
    read(path)
    path.write_bytes(make.batch(entries(**changes)))
    with pytest.raises(Damaged, match=says):
        read(path)


def test_a_set_without_images_is_refused(tmp_path: Path) -> None:
    without = entries()
    del without["data"]
    (tmp_path / "train").write_bytes(make.batch(without))
    with pytest.raises(Damaged, match="for 3 images"):
        read(tmp_path / "train")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole, path = SAMPLE.read_bytes(), tmp_path / "train"
    cuts = {0, 1, 5, len(whole) // 2, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 60), *range(300)}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(Damaged, match="is not in the published layout"):
            read(path)
    path.write_bytes(whole[: len(whole) - 5000])
    with pytest.raises(Damaged, match="it ends in the middle of the images"):
        read(path)
    path.write_bytes(whole + b".")
    with pytest.raises(Damaged, match="something follows its end"):
        read(path)


# ---- malicious pickles


class Runs:
    """Unpickling this runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


def call(witness: Path) -> bytes:
    """The signs that call os.system when a pickle is loaded."""
    return b"cposix\nsystem\nU" + bytes([len(f"touch {witness}")]) + f"touch {witness}".encode() + b"\x85R"


def array_signs(whole: bytes) -> slice:
    return slice(whole.index(b"cnumpy.core.multiarray"), whole.rindex(b"u."))


def attacks(witness: Path) -> dict[str, bytes]:
    whole = make.batch(entries())
    array = whole[array_signs(whole)]
    dtype = b"U\x02u1K\x00K\x01\x87R"

    def instead(of: bytes, by: bytes) -> bytes:
        assert of in whole
        return whole.replace(of, by, 1)

    return {
        "a call instead of everything": pickle.dumps(Runs(witness), protocol=2),
        "a call as the value of data": whole.replace(array, call(witness)),
        "a call among the labels": instead(b"K\x02", call(witness)),
        "a call before the end": whole[:-2] + b"U\x01xq\x09" + call(witness) + b"u.",
        "a call after the end": whole + call(witness) + b".",
        "another function to make the array": instead(b"cnumpy.core.multiarray\n_reconstruct\n", b"cposix\nsystem\n"),
        "scalar, which unpickles objects": instead(
            b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy.core.multiarray\nscalar\n"
        ),
        "an array of another class": instead(b"cnumpy\nndarray\n", b"cposix\nsystem\n"),
        "an array of objects": instead(dtype, b"U\x02O8K\x00K\x01\x87R"),
        "an array whose bytes are objects": instead(b"\x89T", b"\x89]" + call(witness) + b"T"),
        "a class of the new numpy": instead(b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"),
        "a class with a state": whole[:-2] + b"U\x01xq\x09cbuiltins\nobject\n)\x81}U\x01aK\x01sbu.",
        "a state set on a list": instead(b"]q\x03", b"]q\x03}U\x08__dict__K\x01sb"),
        "a key twice": whole[:-2] + b"U\x0bfine_labelsq\x09]q\x09(K\x01K\x01K\x01eu.",
        "the array itself called": whole[:-4] + b"tRu.",
        "no sign to remember by": instead(b"]q\x03", b"]a\x03\x00\x00\x00"),
        "an extension code": instead(b"K\x02", b"\x82\x01"),
        "a persistent object": instead(b"K\x02", b"Pposix.system\n"),
        "an instance by name": instead(b"K\x02", b"(U\x04trueiposix\nsystem\n"),
        "an object by its class": instead(b"K\x02", b"(cposix\nsystem\nU\x04trueo"),
        "a name from the stack": instead(b"K\x02", b"\x8c\x05posix\x8c\x06system\x93"),
        "deep nesting": whole[:6] + b"U\x01xq\x09" + b"]q\x09(" * 100_000 + b"e" * 100_000 + b"u.",
        "deep tuples": whole[:6] + b"U\x01xq\x09" + b")" + b"\x85" * 100_000 + b"u.",
        "a memo that doubles": whole[:6] + b"U\x01xq\x09" + b"]q\x01" + b"(h\x01h\x01e]q\x01" * 64 + b"u.",
        "a memo of a huge number": instead(b"q\x02", b"r\xff\xff\xff\x7f").replace(b"K\x02", b"j\xff\xff\xff\x7f", 1),
        "four gigabytes of text announced": whole[:6] + b"T" + struct.pack("<I", 2**32 - 1) + b"x",
        "eight exabytes of bytes announced": whole[:6] + b"\x8e" + struct.pack("<Q", 2**63 - 1) + b"x",
        "an array of four gigabytes announced": whole.replace(struct.pack("<I", 9216), struct.pack("<I", 2**32 - 1), 1),
        "rows that were never sent": whole.replace(b"(K\x01K\x03M", b"(K\x01M\xff\xffM", 1),
        "a frame announced": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + whole[2:],
    }


NAMES = sorted(attacks(Path("witness")))


@pytest.mark.parametrize("name", NAMES)
def test_a_malicious_pickle_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    witness = tmp_path / "w"
    path = tmp_path / "train"
    path.write_bytes(attacks(witness)[name])
    with pytest.raises(Damaged, match="is not in the published layout"):
        read(path)
    assert not witness.exists()


def test_the_attacks_would_work_on_pickle_itself(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    ran: set[str] = set()
    for name in NAMES:
        if name.startswith("a call") and "after" not in name:
            witness = tmp_path / f"{len(ran)}"
            code = f"import pickle; pickle.loads({attacks(witness)[name]!r}, encoding='latin1')"
            subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
            assert witness.exists(), name
            ran.add(name)
    assert len(ran) == 4


def test_reading_names_no_function_and_imports_no_pickle() -> None:
    source = Path(sys.modules[read_batch.__module__].__file__ or "").read_text()
    for word in ("import pickle", "import_module", "__import__", "getattr", "eval(", "exec(", "np.load"):
        assert word not in source


@settings(max_examples=300)
@given(at=st.integers(0, 10**6), by=st.binary(min_size=1, max_size=6), cut=st.integers(0, 6))
def test_whatever_is_spliced_in_reads_as_images_or_is_refused(
    at: int, by: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = SAMPLE.read_bytes()
    at %= len(whole)
    path = tmp_path_factory.getbasetemp() / "spliced"
    path.write_bytes(whole[:at] + by + whole[at + cut :])
    try:
        x, y = read(path)
    except Damaged:
        return
    assert x.shape == (3, 3072)
    assert 0 <= y.min() <= y.max() < 100


def test_files_longer_than_the_buffer_are_read_in_any_order(tmp_path: Path) -> None:
    """The header of the array may lie anywhere in the reader's buffer, also across its end."""
    path = tmp_path / "train"
    for filler in range(8100, 8200, 7):
        names = ["x" * 250] * (filler // 253) + ["x" * (filler % 253)]
        path.write_bytes(make.batch(entries(filenames=names)))
        x, y = read(path)
        assert y.tolist() == [1, 2, 3]
        assert x[2, 5] == (2 * 3072 + 5) % 256


# ---- the real thing


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("cifar100", tmp_path_factory.mktemp("cifar100"))


@pytest.mark.slow
def test_the_real_cifar100_is_whole_and_fits_the_authors_partitions(real: Path) -> None:
    assert check_cifar(CIFAR100, real) == "50,000 + 10,000 images, 100 classes; 3 files with the published md5"
    data = cifar100(folder=real)
    assert data.x.shape == (50_000, 3, 32, 32)
    assert data.test_x.shape == (10_000, 3, 32, 32)
    assert data.y.bincount().tolist() == [500] * 100
    assert data.test_y.bincount().tolist() == [100] * 100
    assert data.y[:3].tolist() == [19, 29, 0]
    mean = data.x.float().div_(255).mean(dim=(0, 2, 3))
    assert torch.allclose(mean, torch.tensor(CIFAR100.mean), atol=2e-4)
    for name, sizes in (
        ("cifar100_lda0.1_clients10.json", [5972, 4756, 5155, 5978, 6514, 4617, 4231, 5052, 2893, 4799]),
        ("cifar100_iid_clients10.json", [5000] * 10),
    ):
        dealt = federate(data, partition="file", partition_file=PARTITIONS / name)
        assert [len(dealt.train[c]) for c in range(10)] == sizes
    classes = [len(dealt.dataset.y[at].unique()) for at in dealt.train.values()]
    assert min(classes) == 100, "the last one was the even one"


@pytest.mark.slow
def test_the_authors_partition_of_cifar100_is_skewed_by_the_real_labels(real: Path) -> None:
    """With another order of the images it would be a random one, and every client would have every class."""
    data = cifar100(folder=real)
    dealt = federate(data, partition="file", partition_file=PARTITIONS / "cifar100_lda0.1_clients10.json")
    counts = torch.tensor(list(dealt.label_counts().values()))
    assert (counts == 0).float().mean() > 0.2
    assert counts.max() > 400


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak memory")
def test_loading_cifar100_needs_little_more_memory_than_its_images(real: Path) -> None:
    code = (
        "import re, sys, pathlib\n"
        "from fedquit.data.cifar import cifar100\n"
        "status = pathlib.Path('/proc/self/status')\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status.read_text()).group(1))\n"
        "before = peak(); data = cifar100(folder=sys.argv[1]); print(peak() - before)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(real)], env=environment, capture_output=True, text=True, check=True
    )
    arrays = 60_000 * 3072 / 1024
    assert arrays * 0.9 < int(done.stdout) < arrays * 1.15


@pytest.mark.slow
def test_the_real_cifar10_is_whole_and_fits_the_authors_partition(tmp_path: Path) -> None:
    data = cifar10(folder=unpacked("cifar10", tmp_path))
    assert data.x.shape == (50_000, 3, 32, 32)
    assert data.y.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    dealt = federate(data, partition="file", partition_file=PARTITIONS / "cifar10_lda0.3_clients10.json")
    sizes = [2968, 2238, 4541, 2278, 7305, 13500, 4951, 4453, 2715, 5048]
    assert [len(dealt.train[c]) for c in range(10)] == sizes


def test_the_published_numbers_are_there() -> None:
    for kind, files in ((CIFAR10, 7), (CIFAR100, 3)):
        assert len(kind.md5) == files
        assert {*kind.train, *kind.test} < set(kind.md5)
        assert len(set(kind.md5.values())) == files
        assert kind.images * len(kind.train) == 50_000
