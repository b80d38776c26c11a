"""Images with labels in memory, and the checks that every reader of them makes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset

from ...core.vocabulary.errors import DataError

CLASSES = 10


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


def check_labels(path: Path, labels: torch.Tensor) -> None:
    """Raise `DataError` for a label that is none of the ten classes."""
    if labels.numel() and int(labels.max()) >= CLASSES:
        first = int((labels >= CLASSES).nonzero()[0])
        raise DataError(f"{path}: label {int(labels[first])} of image {first}, expected 0 to {CLASSES - 1}")


def read_bytes(path: Path, remedy: str) -> bytes:
    """Return a file's bytes; raise `DataError` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}", remedy=remedy) from None
