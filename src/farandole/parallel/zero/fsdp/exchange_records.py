"""Records of what FSDP2's units exchange: bytes, and from when to when this rank waited.

FSDP2 takes objects that gather and reduce. Those here do it by others, and tell the recorder of every exchange
when it was launched and what the wait for it took. On accelerators a wait is that of a stream, which the host does
not see: there only bytes are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ....comm.world.world import World
from ....core.step_model.comm_cost import ring_sent_bytes
from ....core.vocabulary import events
from ....core.vocabulary.spec import Plan


class ExchangeRecords:
    """Tells the recorder of a world what units exchange."""

    def __init__(self, here: World, plan: Plan) -> None:
        self._here = here
        facts = {
            events.SETUP_ZERO: plan.zero,
            events.SETUP_SHARD_WITHIN: plan.shard_within,
            events.SETUP_CODEC: plan.codec,
            events.SETUP_WEIGHT_CODEC: plan.weight_codec,
        }
        here.session.recorder.record(events.Setup(facts))
        self._sees_waits = here.device.type == "cpu"

    def add(self, launch: float, begin: float, end: float, sent_bytes: int) -> None:
        """Record one exchange. Times are seconds of the monotonic clock."""
        if not self._sees_waits:
            begin = end = launch
        self._here.session.recorder.record(events.Exchange((launch,), begin, end, sent_bytes))

    def watch(self, group: Any) -> None:
        """Record the exchanges of a parameter group of FSDP2 from now on."""
        group._all_gather_comm = _RecordedAllGather(self, group._all_gather_comm)
        scatter = group._reduce_scatter_comm = _RecordedReduceScatter(self, group._reduce_scatter_comm)
        if group._is_hsdp:
            hosts = group._all_reduce_process_group.size()

            def hosts_have_summed(shard: torch.Tensor) -> None:
                now = time.monotonic()
                self.add(scatter.end_seconds, scatter.end_seconds, now, ring_sent_bytes(shard.nbytes, hosts))

            group._all_reduce_hook = hosts_have_summed


def others_bytes(nbytes: int, size: int) -> int:
    """Return what a rank of `size` sends that gives each other one `nbytes`: its shard, or its part of theirs."""
    return (size - 1) * nbytes


class _RecordedAllGather(AllGather):
    def __init__(self, records: ExchangeRecords, inner: Any) -> None:
        self._records, self._inner = records, inner

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Any:
        """See `AllGather`."""
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `AllGather`."""
        launch = time.monotonic()
        work: dist.Work | None = self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )
        packed = getattr(self._inner, "sent_bytes", None)
        sent = others_bytes(input_tensor.nbytes if packed is None else packed, group.size())
        if async_op and work is not None:
            return _RecordedWork(self._records, work, launch, sent)
        self._records.add(launch, launch, time.monotonic(), sent)
        return work


class _RecordedReduceScatter(ReduceScatter):
    def __init__(self, records: ExchangeRecords, inner: Any) -> None:
        self._records, self._inner = records, inner
        self.end_seconds = 0.0
        """When the last one was over."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Any:
        """See `ReduceScatter`."""
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `ReduceScatter`."""
        begin = time.monotonic()
        work: dist.Work | None = self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
        self.end_seconds = time.monotonic()
        packed = getattr(self._inner, "sent_bytes", None)
        sent = others_bytes(output_tensor.nbytes if packed is None else packed, group.size())
        self._records.add(begin, begin, self.end_seconds, sent)
        return work


class _RecordedWork(dist.Work):
    """An exchange on its way, whose first wait is recorded."""

    def __init__(self, records: ExchangeRecords, work: dist.Work, launch_seconds: float, sent_bytes: int) -> None:
        super().__init__()
        self._records, self._work = records, work
        self._launch_seconds, self._sent_bytes = launch_seconds, sent_bytes
        self._is_over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the numbers are there."""
        begin = time.monotonic()
        self._work.wait(timeout) if timeout else self._work.wait()
        if not self._is_over:
            self._is_over = True
            self._records.add(self._launch_seconds, begin, time.monotonic(), self._sent_bytes)
        return True
