"""Operations by a codec keep what was not sent for the next one of their name, and for no other."""

from __future__ import annotations

import torch

import farandole.horovod.torch as hvd
from farandole.horovod.common.basics import basics
from farandole.horovod.named_ops.engine import NamedOpsEngine
from tests.ranks.pool import ranks


@ranks(2)
def test_operations_without_a_name_leave_nothing_behind() -> None:
    hvd.init()
    x = torch.linspace(-1, 1, 8192, dtype=torch.float32) * (hvd.rank() + 1)
    for _ in range(4):
        hvd.allreduce(x, compression=hvd.Compression.int8)
        hvd.grouped_allreduce([x, x], compression=hvd.Compression.int8)
    negotiator = basics.running.engine
    assert isinstance(negotiator, NamedOpsEngine)
    plane = negotiator._controller.state.plane
    assert plane is not None
    assert plane._states._circles == {}
    first = hvd.allreduce(x, name="again", compression=hvd.Compression.int8)
    second = hvd.allreduce(x, name="again", compression=hvd.Compression.int8)
    ((_, names),) = plane._states._circles.items()
    assert list(names) == ["allreduce.again"]
    assert not torch.equal(first, second), "what was lost comes later"
    hvd.shutdown()
