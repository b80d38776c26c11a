"""Watched memory: every kind of write is seen, reads are not, and what cannot be watched is known before."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from farandole.core.host.process_status import M_MMAP_THRESHOLD, PAGE_BYTES, PageWatch, PrivateMemory

COUNT = 20_000_000
"""Elements of 4 bytes: memory of its own, which goes back to the kernel."""


@pytest.fixture
def watch() -> PageWatch:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # another test of this process may have kept freed memory
    try:
        return PageWatch()
    except OSError as problem:
        pytest.skip(f"this kernel does not tell which pages were written: {problem}")


def whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES


def test_writes_of_every_kind_are_seen_and_reads_are_not(watch: PageWatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)

    def read_into(x: torch.Tensor) -> None:
        with (tmp_path / "file").open("rb") as file:
            os.preadv(file.fileno(), [x.numpy().data.cast("B")[40_000:40_100]], 0)

    def by_numpy(x: torch.Tensor) -> None:
        np.asarray(x)[-COUNT // 2] = 1

    writes = {
        "data": lambda x: x.data[500_000:500_001].add_(1),
        "NumPy": by_numpy,
        "a system call": read_into,
        "memory given back": lambda x: x.untyped_storage().resize_(0),
    }
    for make in (torch.zeros, torch.ones):  # zeros have no pages before they are touched
        for name, write in writes.items():
            x = make(COUNT)
            begin, end = whole_pages(x)
            assert PrivateMemory().has(begin, end), "memory of its own"
            watch.add(begin, end)
            assert not watch.was_written(begin, end), f"before {name}"
            x[:1_000_000].sum()
            x.clone()
            assert not watch.was_written(begin, end), f"reads before {name}"
            write(x)
            assert watch.was_written(begin, end), f"{name} was not seen"
            watch.remove(begin, end)
    watch.close()
    watch.close()


def test_a_write_beside_a_watched_range_is_none_in_it(watch: PageWatch) -> None:
    x = torch.ones(COUNT)
    begin, end = whole_pages(x)
    middle = begin + 1000 * PAGE_BYTES
    watch.add(begin, middle)
    watch.add(middle, end)
    x[-2 * PAGE_BYTES] = 3.0
    assert not watch.was_written(begin, middle), "nothing was written there"
    assert watch.was_written(middle, end), "that was written"
    watch.remove(begin, end)
    watch.close()


def test_shared_memory_and_files_are_not_private(tmp_path: Path) -> None:
    shared = torch.ones(COUNT // 10).share_memory_()
    path = tmp_path / "tensor"
    path.write_bytes(bytes(1 << 20))
    mapped = torch.from_file(str(path), shared=False, size=1 << 18)
    memory = PrivateMemory()
    assert not memory.has(*whole_pages(shared)), "shared memory"
    assert not memory.has(*whole_pages(mapped)), "a file"
    assert not memory.has(0, PAGE_BYTES), "no memory"
