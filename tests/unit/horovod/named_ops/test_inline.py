"""Named operations whose data travels with their announcement."""

from __future__ import annotations

import pytest

from farandole.horovod.named_ops.group_thread import SMALL_BYTES, is_small
from farandole.horovod.named_ops.operations import Signature


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_alone_everything_is_small_as_there_are_no_connections(device: str, codec: str) -> None:
    large = Signature("a", 0, "allreduce", "float32", (SMALL_BYTES,), codec=codec, device=device)
    assert is_small(large, 1)
    assert not is_small(large, 2)


def test_with_others_small_operations_are_exact_and_in_cpu_memory() -> None:
    small = Signature("a", 0, "allreduce", "float32", (10,))
    assert is_small(small, 2)
    assert not is_small(small._replace(device="cuda"), 2)
    assert not is_small(small._replace(codec="int8"), 2)
    assert not is_small(small._replace(shape=(SMALL_BYTES // 4,)), 3)
