"""Readers of data sets: files generated in their formats, and every way of being damaged."""

from __future__ import annotations

import contextlib
import gzip
import os
import struct
import sysconfig
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.bench.data import load_idx_images, load_text, read_idx
from farandole.core.vocabulary.errors import DataError

FASHION = Path("/usr/share/datasets/fashion-mnist")


def idx(*shape: int, data: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def mnist(directory: Path, *, labels: bytes = b"\x00\x09\x05", count: int = 3, packed: bool = True) -> Path:
    images = idx(count, 28, 28, data=bytes(i % 256 for i in range(count * 784)))
    for stem, content in (("images-idx3", images), ("labels-idx1", idx(len(labels), data=labels))):
        for part in ("train", "t10k"):
            name = f"{part}-{stem}-ubyte" + (".gz" if packed else "")
            (directory / name).write_bytes(gzip.compress(content) if packed else content)
    return directory


@pytest.mark.parametrize("packed", [True, False])
def test_images_in_idx_files(tmp_path: Path, packed: bool) -> None:
    images = load_idx_images(mnist(tmp_path, packed=packed), train=True)
    assert len(images) == 3
    image, label = images[1]
    assert (image.shape, image.dtype, label) == ((1, 28, 28), torch.float32, 9)
    raw = read_idx(next(tmp_path.glob("train-images*")))
    torch.testing.assert_close(image[0] * (0.353 * 255) + 0.286 * 255, raw[1].float(), atol=1e-3, rtol=0)


def test_real_fashion_mnist() -> None:
    if not FASHION.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    training = load_idx_images(FASHION, train=True)
    assert (len(training), len(load_idx_images(FASHION, train=False))) == (60000, 10000)
    sample = torch.stack([training[i][0] for i in range(0, 60000, 60)])
    assert abs(float(sample.mean())) < 0.05
    assert abs(float(sample.std()) - 1) < 0.05


DAMAGED = {
    "empty": (b"", "begins with nothing"),
    "no magic": (b"\x01\x00\x08\x01\0\0\0\0", "begins with 01000801, expected an IDX header"),
    "floats": (idx(1, data=b"1234", kind=0x0D), "element type 0x0d, expected 0x08"),
    "no dimension": (b"\0\0\x08\0", "0 dimensions in 4 bytes"),
    "too many": (b"\0\0\x08\x09" + b"\0" * 36, "9 dimensions"),
    "no sizes": (b"\0\0\x08\x03\0\0", "3 dimensions in 6 bytes"),
    "short": (idx(10, data=b"123"), "11 bytes, expected 18 for 10"),
    "long": (idx(1, data=b"123"), "11 bytes, expected 9 for 1"),
    "ten gigabytes": (idx(100_000, 100_000, data=b""), "expected 10000000012 for 100000 x 100000"),
    "ten gigabytes in gzip": (
        gzip.compress(idx(100_000, 100_000, data=b"")),
        "claims 10000000000 bytes (100000 x 100000), expected at most 1073741824",
    ),
    "no number": (idx(0, 2**32 - 1, 2**32 - 1, 2**32 - 1, data=b""), "hold no number, expected at least one"),
    "short in gzip": (gzip.compress(idx(10, data=b"123")), "11 bytes, expected 18 for 10"),
    "long in gzip": (gzip.compress(idx(1, data=b"123")), "more than 9 bytes, expected 9 for 1"),
    "junk after gzip": (gzip.compress(idx(1, data=b"1")) + b"junk", "is no gzip file"),
    "wrong checksum": (gzip.compress(idx(1, data=b"1"))[:-8] + bytes(4) + b"\x09\0\0\0", "is no gzip file"),
    "bad gzip": (b"\x1f\x8b" + b"x" * 20, "is no gzip file"),
    "cut gzip": (gzip.compress(idx(5000, data=bytes(range(250)) * 20))[:60], "ends in the middle of its gzip"),
}


@pytest.mark.parametrize("kind", sorted(DAMAGED))
def test_damaged_idx_files(tmp_path: Path, kind: str) -> None:
    content, words = DAMAGED[kind]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "apt-get install dataset-fashion-mnist" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_memory_grows_with_the_file_and_not_with_its_claims(tmp_path: Path) -> None:
    bomb, sparse = tmp_path / "bomb", tmp_path / "sparse"
    bomb.write_bytes(gzip.compress(idx(3, data=bytes(50_000_000)), 1))
    sparse.write_bytes(idx(3, data=b"abc"))
    os.truncate(sparse, 50_000_000)
    tracemalloc.start()
    try:
        for path in (bomb, sparse):
            with pytest.raises(DataError, match="expected 11 for 3"):
                read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_gzip_of_several_members(tmp_path: Path) -> None:
    content = idx(2, 3, data=b"abcdef")
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(content[:14]) + gzip.compress(content[14:]))
    assert read_idx(path).tolist() == [list(b"abc"), list(b"def")]


def test_names_with_a_dot(tmp_path: Path) -> None:
    for path in sorted(mnist(tmp_path).iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert [load_idx_images(tmp_path, train=False)[i][1] for i in range(3)] == [0, 9, 5]


def test_missing_directories_and_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*: No such file"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"nowhere is no directory, expected one with train-images-idx3-ubyte"):
        load_idx_images(tmp_path / "nowhere", train=True)
    with pytest.raises(DataError, match="File name too long") as caught:
        load_idx_images(Path("x" * 300), train=True)
    assert caught.value.remedy


def test_images_and_labels_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 images but 2 labels in train-labels-idx1-ubyte.gz"):
        load_idx_images(mnist(tmp_path, labels=b"\1\2"), train=True)
    with pytest.raises(DataError, match="label 10 of image 1, expected 0 to 9"):
        load_idx_images(mnist(tmp_path, labels=b"\1\x0a\2"), train=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(idx(3, 5, 6, data=bytes(90)))
    with pytest.raises(DataError, match="images of 5 x 6, expected 28 x 28"):
        load_idx_images(tmp_path, train=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(idx(3, data=b"abc"))
    with pytest.raises(DataError, match="has 1 dimensions"):
        load_idx_images(tmp_path, train=True)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no train-images-idx3-ubyte .*apt-get install dataset-fashion-mnist"):
        load_idx_images(tmp_path, train=True)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.booleans(), st.booleans())
def test_any_bytes_are_numbers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, with_magic: bool, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    data = (b"\0\0\x08" + data) if with_magic else data
    path.write_bytes(gzip.compress(data) if packed else data)
    with contextlib.suppress(DataError):
        assert read_idx(path).numel() <= len(data)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 2**16, 2**32 - 1]), max_size=5), st.binary(max_size=8), st.booleans())
def test_any_sizes_are_numbers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: bytes, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "sizes"
    content = idx(*shape, data=data)
    path.write_bytes(gzip.compress(content) if packed else content)
    with contextlib.suppress(DataError):
        assert list(read_idx(path).shape) == shape


def test_text_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, validation = load_text(context=64, limit_bytes=200_000)
    again, _ = load_text(context=64, limit_bytes=200_000)
    assert len(training) == (180_000 - 1) // 64
    assert len(validation) > 300
    inputs, targets = training[5]
    assert (inputs.shape, inputs.dtype) == ((64,), torch.int64)
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(targets[-1:], training[6][0][:1]), "windows follow each other"
    assert torch.equal(again[5][0], inputs), "the same on every start"
    with pytest.raises(IndexError):
        training[len(training)]
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="only 0 bytes of Python source"):
        load_text(context=64)


@pytest.mark.parametrize(
    ("context", "limit_bytes", "words"),
    [
        (0, 1000, "context of 0 bytes, expected 1 or more"),
        (64, 100, "limit_bytes is 100, expected at least 1280"),
        (64, -5, "limit_bytes is -5, expected at least 1280"),
    ],
)
def test_text_that_cannot_be_cut_into_windows(context: int, limit_bytes: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_text(context=context, limit_bytes=limit_bytes)
