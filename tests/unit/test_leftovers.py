"""What stays in shared memory is found; what passes is not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.leftovers import left_in_memory, memory_names

pytestmark = pytest.mark.full("slow")


def test_what_stays_is_left_and_what_passes_is_not() -> None:
    before = memory_names()
    stays, passes, other = (Path(f"/dev/shm/{name}-{os.getpid()}") for name in ("farandole-a", "farandole-b", "c"))
    try:
        for path in (stays, passes, other):
            path.touch()
        remover = threading.Timer(0.2, passes.unlink)
        remover.start()
        assert left_in_memory(before) == {stays.name}
        assert left_in_memory(before, "c-") == {stays.name, other.name}
        remover.join()
    finally:
        for path in (stays, other):
            path.unlink()
    assert left_in_memory(before) & {stays.name, passes.name} == set()
