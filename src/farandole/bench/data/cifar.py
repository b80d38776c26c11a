"""CIFAR-10's binary format: records of one label byte and 3 x 32 x 32 bytes of red, green and blue.

Source of the format: Krizhevsky, "The CIFAR-10 dataset", binary version.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from ...core.vocabulary.errors import DataError
from .images import LabelledImages, check_labels, read_bytes

RECORD_BYTES = 1 + 3 * 32 * 32
TRAINING_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)
_REMEDY = "the directory of CIFAR-10's binary version has data_batch_1.bin to data_batch_5.bin and test_batch.bin"


def load_cifar10(directory: Path, *, train: bool) -> LabelledImages:
    """Return the training or test images, (3, 32, 32) floats, of a directory with the binary files."""
    place = directory
    # A directory that cannot be looked into is reported by the read below.
    with contextlib.suppress(OSError):
        inside = directory / "cifar-10-batches-bin"
        place = inside if inside.is_dir() else directory
    parts = [_read(place / name) for name in (TRAINING_FILES if train else TEST_FILES)]
    labels = torch.cat([records[:, 0] for records in parts])
    images = torch.cat([records[:, 1:] for records in parts]).view(-1, 3, 32, 32)
    return LabelledImages(images, labels, mean=0.473, deviation=0.251)


def _read(path: Path) -> torch.Tensor:
    raw = read_bytes(path, _REMEDY)
    if not raw or len(raw) % RECORD_BYTES:
        raise DataError(
            f"{path}: {len(raw)} bytes, expected a multiple of {RECORD_BYTES} (1 label and 3072 image bytes)",
            remedy="the file is damaged, or not of the binary version",
        )
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, RECORD_BYTES)
    check_labels(path, records[:, 0])
    return records
