"""The IDX format of MNIST and Fashion-MNIST: four bytes of magic, big-endian sizes, then the numbers.

Source of the format: LeCun, Cortes and Burges, "The MNIST database", file formats.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

from ...core.errors import DataError
from .images import LabelledImages, check_labels, read_bytes

UNSIGNED_BYTE = 0x08
LARGEST_BYTES = 2**30
"""No file of this kind is larger; a compressed one that claims to be is refused."""
_REMEDY = "on Debian: apt-get install dataset-fashion-mnist (in /usr/share/datasets/fashion-mnist)"


def read_idx(path: Path) -> torch.Tensor:
    """Return the numbers of an IDX file of unsigned bytes (gzipped or not) in their shape.

    Raises `DataError`, before any memory is taken for the contents, when header and size disagree.
    """
    raw = read_bytes(path, _REMEDY)
    if raw[:2] == b"\x1f\x8b":
        raw = _decompress(path, raw)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise DataError(f"{path}: begins with {raw[:4].hex() or 'nothing'}, expected an IDX header (0000....)")
    kind, dimensions = raw[2], raw[3]
    if kind != UNSIGNED_BYTE:
        raise DataError(f"{path}: element type 0x{kind:02x}, expected 0x08 (unsigned bytes)")
    header = 4 + 4 * dimensions
    if not 1 <= dimensions <= 4 or len(raw) < header:
        raise DataError(f"{path}: {dimensions} dimensions in {len(raw)} bytes, expected 1 to 4 and their sizes")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected = header + math.prod(shape)
    if len(raw) != expected:
        sizes = " x ".join(map(str, shape))
        raise DataError(f"{path}: {len(raw)} bytes, expected {expected} for {sizes}", remedy="the file is damaged")
    if expected == header:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).view(shape)


def load_idx_images(directory: Path, *, train: bool) -> LabelledImages:
    """Return the training or test images, (1, 28, 28) floats, of a directory with the four IDX files."""
    part = "train" if train else "t10k"
    image_path, label_path = _find(directory, f"{part}-images"), _find(directory, f"{part}-labels")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.dim() != 3 or labels.dim() != 1:
        raise DataError(
            f"{image_path} has {images.dim()} dimensions and {label_path.name} {labels.dim()}, expected 3 and 1"
        )
    if len(images) != len(labels):
        raise DataError(f"{image_path}: {len(images)} images but {len(labels)} labels in {label_path.name}")
    check_labels(label_path, labels)
    return LabelledImages(images.unsqueeze(1), labels, mean=0.286, deviation=0.353)


def _find(directory: Path, stem: str) -> Path:
    dimensions = 3 if stem.endswith("images") else 1
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(f"{directory} has no {names[0]} (or .gz)", remedy=_REMEDY)


def _decompress(path: Path, raw: bytes) -> bytes:
    worker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        data = worker.decompress(raw, LARGEST_BYTES)
    except (zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(f"{path}: is no gzip file ({problem})", remedy="the file is damaged") from None
    if worker.unconsumed_tail:
        raise DataError(f"{path}: unpacks to more than {LARGEST_BYTES} bytes, expected an IDX file")
    if not worker.eof:
        raise DataError(f"{path}: ends in the middle of its gzip stream", remedy="the file is damaged")
    return data
