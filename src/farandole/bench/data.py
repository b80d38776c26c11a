"""Data sets in the formats in which they are found on disk. Nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import os
import struct
import sysconfig
import zlib
from pathlib import Path
from typing import IO

import torch
from torch.utils.data import Dataset

from ..core.vocabulary.errors import DataError

# Text that is on every machine: the source of Python's own standard library, as bytes.

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_SHARE = 0.1
SMALLEST_WINDOWS = 20
"""Text for fewer windows is refused: the validation part would have none."""


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes that do not overlap, each with the same shifted by one as its target."""

    def __init__(self, data: torch.Tensor, context: int) -> None:
        self._data = data
        self._context = context

    def __len__(self) -> int:
        return max(0, (self._data.numel() - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self._data[index * self._context : (index + 1) * self._context + 1].to(torch.int64)
        return window[:-1], window[1:]


def load_text(*, context: int, limit_bytes: int = 4_000_000) -> tuple[ByteWindows, ByteWindows]:
    """Return training and validation windows of `context` bytes; the last tenth is for validation.

    The files are taken in the order of their names, so the text is the same on every start.
    """
    if context < 1:
        raise DataError(f"a context of {context} bytes, expected 1 or more", remedy="give a larger context")
    least = SMALLEST_WINDOWS * context
    if limit_bytes < least:
        raise DataError(
            f"limit_bytes is {limit_bytes}, expected at least {least} for windows of {context} bytes",
            remedy="raise limit_bytes or shorten the context",
        )
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts[:-1]))
    pieces: list[bytes] = []
    size = 0
    for path in paths:
        try:
            pieces.append(path.read_bytes())
        except OSError:
            continue
        size += len(pieces[-1])
        if size >= limit_bytes:
            break
    data = torch.frombuffer(bytearray(b"".join(pieces)[:limit_bytes]), dtype=torch.uint8) if size else None
    if data is None or data.numel() < least:
        raise DataError(
            f"only {size} bytes of Python source below {root}, expected at least {least}",
            remedy="install Python with its standard library's sources",
        )
    cut = int(data.numel() * (1 - VALIDATION_SHARE))
    return ByteWindows(data[:cut], context), ByteWindows(data[cut:], context)


# The IDX format of MNIST and Fashion-MNIST: four bytes of magic, big-endian sizes, then the numbers.
#
# Source of the format: LeCun, Cortes and Burges, "The MNIST database", file formats.

UNSIGNED_BYTE = 0x08
LARGEST_BYTES = 2**30
"""No file of this kind is larger; one that claims to be is refused."""
CHUNK_BYTES = 2**20
SIDE, CLASSES = 28, 10
_REMEDY = "on Debian: apt-get install dataset-fashion-mnist (in /usr/share/datasets/fashion-mnist)"
_REPLACE = f"the file is damaged or not IDX: replace it; {_REMEDY}"


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """Bytes of images (count, channels, height, width) given as normalised floats, and their labels."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, *, mean: float, deviation: float) -> None:
        self._images = images
        self._labels = labels
        self._mean = mean * 255
        self._deviation = deviation * 255

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self._images[index].to(torch.float32) - self._mean) / self._deviation
        return image, int(self._labels[index])


def read_idx(path: Path) -> torch.Tensor:
    """Return the numbers of an IDX file of unsigned bytes (gzipped or not) in their shape.

    The header is checked against the file's size before the contents are read, and memory grows with
    what the file really holds, never with what its header claims. Raises `DataError`.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return _read(path, unpacked, None)
            return _read(path, file, os.fstat(file.fileno()).st_size)
    except (zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(f"{path}: is no gzip file ({problem})", remedy=_REPLACE) from None
    except EOFError:
        raise DataError(
            f"{path}: ends in the middle of its gzip stream, expected its end", remedy=_REPLACE
        ) from None
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}", remedy=_REMEDY) from None


def load_idx_images(directory: Path, *, train: bool) -> LabelledImages:
    """Return the training or test images, (1, 28, 28) floats, of a directory with the four IDX files."""
    part = "train" if train else "t10k"
    image_path, label_path = _find(directory, f"{part}-images"), _find(directory, f"{part}-labels")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.dim() != 3 or labels.dim() != 1:
        raise DataError(
            f"{image_path} has {images.dim()} dimensions and {label_path.name} {labels.dim()}, expected 3 and 1",
            remedy=_REPLACE,
        )
    if images.shape[1:] != (SIDE, SIDE):
        found = " x ".join(map(str, images.shape[1:]))
        raise DataError(f"{image_path}: images of {found}, expected {SIDE} x {SIDE}", remedy=_REPLACE)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path}: {len(images)} images but {len(labels)} labels in {label_path.name}, expected as many",
            remedy=f"take both files from the same data set; {_REMEDY}",
        )
    if int(labels.max()) >= CLASSES:
        first = int((labels >= CLASSES).nonzero()[0])
        raise DataError(
            f"{label_path}: label {int(labels[first])} of image {first}, expected 0 to {CLASSES - 1}",
            remedy=_REPLACE,
        )
    return LabelledImages(images.unsqueeze(1), labels, mean=0.286, deviation=0.353)


def _find(directory: Path, stem: str) -> Path:
    dimensions = 3 if stem.endswith("images") else 1
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    try:
        if not directory.is_dir():
            raise DataError(f"{directory} is no directory, expected one with {names[0]} (or .gz)", remedy=_REMEDY)
        for name in names:
            if (directory / name).is_file():
                return directory / name
    except OSError as problem:
        raise DataError(f"cannot read {directory}: {problem.strerror or problem}", remedy=_REMEDY) from None
    raise DataError(f"{directory} has no {names[0]} (or .gz)", remedy=_REMEDY)


def _read(path: Path, stream: IO[bytes] | gzip.GzipFile, size: int | None) -> torch.Tensor:
    """Read header and numbers; `size` is the file's, None where only unpacking tells."""
    shape = _read_shape(path, stream)
    header, count = 4 + 4 * len(shape), math.prod(shape)
    sizes = " x ".join(map(str, shape))
    claim = f"expected {header + count} for {sizes}"
    if not count:
        raise DataError(f"{path}: sizes {sizes} hold no number, expected at least one", remedy=_REPLACE)
    if size is not None and size != header + count:
        raise DataError(f"{path}: {size} bytes, {claim}", remedy=_REPLACE)
    if count > LARGEST_BYTES:
        raise DataError(
            f"{path}: claims {count} bytes ({sizes}), expected at most {LARGEST_BYTES}", remedy=_REPLACE
        )
    data = bytearray()
    while chunk := stream.read(min(CHUNK_BYTES, count + 1 - len(data))):
        data += chunk
    if len(data) != count:
        found = f"{header + len(data)} bytes" if len(data) < count else f"more than {header + count} bytes"
        raise DataError(f"{path}: {found}, {claim}", remedy=_REPLACE)
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def _read_shape(path: Path, stream: IO[bytes] | gzip.GzipFile) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        found = magic.hex() or "nothing"
        raise DataError(f"{path}: begins with {found}, expected an IDX header (0000....)", remedy=_REPLACE)
    kind, dimensions = magic[2], magic[3]
    if kind != UNSIGNED_BYTE:
        raise DataError(f"{path}: element type 0x{kind:02x}, expected 0x08 (unsigned bytes)", remedy=_REPLACE)
    sizes = stream.read(4 * dimensions)
    if not 1 <= dimensions <= 4 or len(sizes) < 4 * dimensions:
        found = f"{dimensions} dimensions in {4 + len(sizes)} bytes"
        raise DataError(f"{path}: {found}, expected 1 to 4 and their sizes", remedy=_REPLACE)
    return struct.unpack(f">{dimensions}I", sizes)
