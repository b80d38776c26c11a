"""What a loader's worker and the disk give, on all ranks at once."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.cluster import Coefficient
from .figures import rate_figure
from .rounds import Case, affordable, sample, slowest

_SAMPLE_SHAPE = (3, 64, 64)
_BATCH = 32
_BATCHES = 16
_FILE_BYTES = (1 * 2**20, 4 * 2**20, 16 * 2**20)
_PIECE_BYTES = 2**20
_FAILED = 1e9
"""Seconds of what could not be done."""


class _Samples(Dataset[torch.Tensor]):
    """Images in memory; a worker copies and normalises each."""

    def __init__(self) -> None:
        self._images = torch.zeros(256, *_SAMPLE_SHAPE, dtype=torch.float32)

    def __len__(self) -> int:
        """How many there are in one pass."""
        return _BATCH * _BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one image."""
        return (self._images[index % len(self._images)] - 0.5) / 0.25


def measure_loader(world: World, seconds: float) -> Coefficient:
    """Return bytes per second of batches that one worker process makes of images in memory.

    Called by all ranks, whose workers work at the same time.
    """
    loader = DataLoader(_Samples(), batch_size=_BATCH, num_workers=1)

    def measure(_: int) -> float:
        begin, count = 0.0, 0
        for number, _batch in enumerate(loader):
            begin = time.perf_counter() if number == 1 else begin  # the worker is at work
            count = number
        return (time.perf_counter() - begin) / max(1, count - 1)

    nbytes = 4.0 * _BATCH * torch.Size(_SAMPLE_SHAPE).numel()
    return rate_figure(nbytes, slowest(sample(world, [Case("loader", nbytes, measure)], seconds)[0]))


def measure_disk(world: World, directory: str, seconds: float) -> tuple[Coefficient | None, Coefficient | None]:
    """Return bytes per second that a rank writes (with fsync) and reads, while all ranks do. Called by all ranks.

    In a folder that is removed, inside of `directory` where this host has it, else where temporary files are. None
    where some rank cannot write.
    """
    folder = _own_folder(directory)
    try:
        if any(all_gather_json(world, "measure/disk", folder is None)) or folder is None:
            return None, None
        path = folder / "measured"
        written = [Case("write", float(size), partial(_write, path, size)) for size in _FILE_BYTES]
        write = affordable(world, written, 0.3 * seconds)[-1]
        write.repeats = 1
        read = Case("read", write.work, partial(_read, path))
        # The last is measured first: there is a file to read.
        read_times, write_times = (slowest(each) for each in sample(world, [read, write], 0.7 * seconds))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if _FAILED in (*read_times, *write_times):
        return None, None
    return rate_figure(write.work, write_times), rate_figure(write.work, read_times)


def _own_folder(directory: str) -> Path | None:
    """Return a new folder of this rank alone; None where none can be made."""
    for place in (directory, None):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=".farandole-measure-", dir=place))
    return None


def _write(path: Path, size: int, _: int) -> float:
    """Return the seconds of writing a file down to the disk; `_FAILED` where it is full."""
    piece = os.urandom(min(size, _PIECE_BYTES))
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return _FAILED
    return time.perf_counter() - begin


def _read(path: Path, _: int) -> float:
    """Return the seconds of reading the file, which the page cache has forgotten where the kernel obeys."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return _FAILED
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while os.read(descriptor, _PIECE_BYTES):
            pass
        return time.perf_counter() - begin
    except OSError:
        return _FAILED
    finally:
        os.close(descriptor)
