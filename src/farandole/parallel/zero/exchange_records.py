"""What FSDP2's units exchange: recorded (bytes, and from when to when this rank waited), and compared by name.

FSDP2 takes objects that gather and reduce. Those here do it by others, and tell the recorder of every exchange
when it was launched and what the wait for it took. On accelerators a wait is that of a stream, which the host does
not see: there only bytes are recorded.

[Note: blocks alike] The blocks of a transformer have equal shapes, so a rank that skips one and a rank that skips
another make calls of equal types and lengths. Each call says for which unit it is, and ranks compare that.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ...comm.backend.group_base import calls_for
from ...comm.world.world import World
from ...core.link import ring_sent_bytes
from ...core.vocabulary import events
from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.spec import Plan

BLOCKS_ALIKE = (
    "run the same blocks in the same order on all ranks, and read their weights on all of them: draw what is "
    "skipped from a generator with the same seed on all of them, or call the block and multiply its output by zero"
)


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
        self._digest = 0

    def note(self, purpose: str) -> None:
        """Note what this rank exchanges for, in order: `take_digest` returns a number of it."""
        self._digest = zlib.crc32(purpose.encode(), self._digest)

    def take_digest(self) -> int:
        """Return a number of what was noted since the last call, small enough for exact sums of its square."""
        digest, self._digest = self._digest & 0xFFFFF, 0
        return digest

    def add(self, launch: float, begin: float, end: float, sent_bytes: int) -> None:
        """Record one exchange. Times are seconds of the monotonic clock."""
        if not self._sees_waits:
            begin = end = launch
        self._here.session.recorder.record(events.Exchange((launch,), begin, end, sent_bytes))

    def watch(self, group: Any, purpose: Callable[[], str]) -> None:
        """Record the exchanges of a parameter group of FSDP2 from now on; `purpose` says what one is for."""
        group._all_gather_comm = _RecordedAllGather(self, group._all_gather_comm, purpose)
        scatter = group._reduce_scatter_comm = _RecordedReduceScatter(self, group._reduce_scatter_comm, purpose)
        if group._is_hsdp:
            hosts = group._all_reduce_process_group.size()

            def hosts_have_summed(shard: torch.Tensor) -> None:
                now = time.monotonic()
                self.add(scatter.end_seconds, scatter.end_seconds, now, ring_sent_bytes(shard.nbytes, hosts))

            group._all_reduce_hook = hosts_have_summed


def watch_stock(model: nn.Module, here: World) -> None:
    """Record what the units of a model exchange that ``fully_shard`` has sharded, and nothing of ours.

    Units that gather and reduce by objects of the script's own keep these, and their exchanges are not seen.
    """
    units: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    groups = [
        group
        for unit in units
        for group in unit._get_fsdp_state()._fsdp_param_groups
        if type(group._all_gather_comm) is DefaultAllGather and group._all_reduce_hook is None
    ]
    within: Any = "host" if any(each._is_hsdp for each in groups) else "world"
    records = ExchangeRecords(here, Plan(zero=MOST_ZERO, shard_within=within))
    for group in groups:
        records.watch(group, partial(_name_of, group))


def _name_of(group: Any) -> str:
    return f"unit {group._module_fqn!r}"


def others_bytes(nbytes: int, size: int) -> int:
    """Return what a rank of `size` sends that gives each other one `nbytes`: its shard, or its part of theirs."""
    return (size - 1) * nbytes


@contextmanager
def _blocks_compared() -> Iterator[None]:
    """Say of blocks that differ what the user can change. See [Note: blocks alike]."""
    try:
        yield
    except Mismatch as problem:
        problem.remedy = BLOCKS_ALIKE
        raise


@contextmanager
def unit_calls(group: dist.ProcessGroup, purpose: str) -> Iterator[None]:
    """Let the calls of `group` that begin here be compared by what they are for. See [Note: blocks alike]."""
    with _blocks_compared(), calls_for(group, purpose):
        yield


class _RecordedAllGather(DefaultAllGather):
    def __init__(self, records: ExchangeRecords, inner: Any, purpose: Callable[[], str]) -> None:
        self._records, self._inner, self._purpose = records, inner, purpose

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
        with unit_calls(group, self._purpose()):
            work: dist.Work | None = self._inner(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
        packed = getattr(self._inner, "sent_bytes", None)
        sent = others_bytes(input_tensor.nbytes if packed is None else packed, group.size())
        if async_op and work is not None:
            return _RecordedWork(self._records, work, launch, sent)
        self._records.add(launch, launch, time.monotonic(), sent)
        return work


class _RecordedReduceScatter(DefaultReduceScatter):  # torch asks what the class is before it sets another
    def __init__(self, records: ExchangeRecords, inner: Any, purpose: Callable[[], str]) -> None:
        self._records, self._inner, self._purpose = records, inner, purpose
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
    ) -> dist.Work:
        """See `ReduceScatter`."""
        begin = time.monotonic()
        with unit_calls(group, self._purpose()):
            work: dist.Work = self._inner(
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
        with _blocks_compared():
            self._work.wait(timeout) if timeout else self._work.wait()
        if not self._is_over:
            self._is_over = True
            self._records.add(self._launch_seconds, begin, time.monotonic(), self._sent_bytes)
        return True
