"""All-reduce among the ranks of one host, for tensors that live in memory which these ranks share.

Nothing is copied in or out: `SharedTensor.mine` is where a rank computes, and where it finds the sum.

[Note: who sums what] A tensor is cut into one slice a rank. Between two barriers each rank adds its slice of
all parts into its own part, in the order r, r+1, ... of local ranks, and writes the sum into the others', in
pieces that stay in the cache between these two; native loops do float32 in one pass. An element's sum is made by
one rank and copied, so all have the same bits; and `reduce_scatter` then `all_gather` give the same bits as
`all_reduce`. Floats of 16 bits and less are added up (and divided) in float32, and rounded once.

[Note: one barrier for small tensors] With a tensor of a few KB the barriers are what costs. There each rank
copies its own into an inbox that all can read, waits at one barrier, and sums all inboxes into its own tensor,
in the order 0, 1, ... The second barrier would keep a fast rank from writing its inbox again while a slow one
still reads it; instead there are two inboxes, used alternately. A rank writes inbox k again two calls later, and
then it has passed the barrier of the call between, at which every rank arrives only after it has read inbox k.

[Note: the same memory at another address] Tensors and arrays on shared memory know its address. To keep what they
hold from being overwritten, the *shared* pages are mapped once more, at another address, and a private copy
takes the place of the old mapping. mremap(2) does both: of a shared mapping, with an old size of 0, it makes a
second one; and it moves pages over others in one step, so that no reader ever meets a hole.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core.link import ring_sent_bytes
from ...core.vocabulary.errors import ConfigError
from ..messages import GroupRank, Message, sum_into
from ..native.build import loops
from ..world.forks import memory_calls
from ..world.store_sync import all_gather_json
from ..world.world import World
from .group_messages import exchange_by_group
from .host_memory import ALIGNMENT, PAGE_BYTES, HostBarrier, Peer, Unavailable, aligned, find_peers, refuse, share
from .rank_group import RankGroup

# Replaces shared memory by a private copy, without notice to the processes that share it.
_MAY_MOVE, _FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def leave_mapping(memory: torch.Tensor) -> torch.Tensor:
    """Return the shared `memory`, uint8, at another address; where it was lies a private copy from now on.

    `memory` is a whole mapping, as `host_memory.share` and this function make it, and it is not written to
    meanwhile. Raises OSError when there is no memory for the copy.
    """
    byte_count = memory.numel()
    old = memory.data_ptr()
    again = _remap(old, 0, byte_count, _MAY_MOVE, None)
    copy = -1
    try:
        copy = _map_private(byte_count)
        ctypes.memmove(copy, old, byte_count)
        _remap(copy, byte_count, byte_count, _MAY_MOVE | _FIXED, old)
    except OSError:
        for address in (again, copy):
            if address != -1:
                memory_calls().munmap(address, byte_count)
        raise
    return _tensor_at(again, byte_count)


def _tensor_at(address: int, byte_count: int) -> torch.Tensor:
    """Return a tensor over a mapping that ends with the tensor's storage."""
    block = (ctypes.c_uint8 * byte_count).from_address(address)
    # Not at the end of the process: tensors may outlive the finalizers there.
    weakref.finalize(block, memory_calls().munmap, address, byte_count).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def _map_private(byte_count: int) -> int:
    private = memory_calls().mmap(
        None, byte_count, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    return _checked(private)


def _remap(address: int, old_bytes: int, new_bytes: int, flags: int, to: int | None) -> int:
    return _checked(memory_calls().mremap(address, old_bytes, new_bytes, flags, to))


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


__all__ = ["SharedMemory", "SharedRegion", "SharedTensor", "Unavailable"]

PIECE_BYTES = 256 * 1024
SMALL_BYTES = 16 * 1024
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "meet")


class SharedMemory:
    """What the ranks of one host share. Made by `connect`, on all ranks of the job.

    Operations on its tensors are to be called by all ranks of the host in the same order, by one thread at a
    time.
    """

    def __init__(self, world: World, peers: Sequence[Peer], timeout_seconds: float) -> None:
        """`peers`: the ranks of my host, by local rank. To be called by all ranks of the job."""
        self.local_rank = [peer.rank for peer in peers].index(world.rank)
        self.local_size = len(peers)
        self._world = world
        self._peers = peers
        self._tensor_count = 0
        pages = share(world, "shared memory", peers, PAGE_BYTES, {})
        problem = ""
        try:
            named = [replace(peer, rank=world.job_ranks[peer.rank]) for peer in peers]
            self._barrier = HostBarrier(named, self.local_rank, pages, timeout_seconds)
        except OSError as reason:
            problem = f"rank {world.job_rank} on {world.host} cannot watch its peers: {reason}"
        try:
            refuse(all_gather_json(world, "shared memory/watched", problem))
        except BaseException:
            if not problem:
                self._barrier.close()
            raise
        world.session.call_on_close(self.close)
        world.session.call_in_forked_child(self._barrier.forget)

    def while_waiting(self, meanwhile: Callable[[], bool]) -> None:
        """Have `meanwhile` called while this rank waits for others of its host; see `HostBarrier.meanwhile`."""
        self._barrier.meanwhile = meanwhile

    @classmethod
    def connect(cls, world: World, *, timeout_seconds: float) -> SharedMemory:
        """Share memory among the ranks with my `node_rank`.

        To be called by all ranks of the job, in the same order. `timeout_seconds` is how long an operation
        waits for the other ranks of the host. Raises `Unavailable`, on all ranks, when it cannot be done on
        some host, `Stalled` when a rank does not come.
        """
        return cls(world, find_peers(world), timeout_seconds)

    def allocate(self, elements: int, dtype: torch.dtype) -> SharedTensor:
        """Return a tensor of zeros that every rank of the host has a part of.

        To be called by all ranks of the job in the same order with the same arguments: raises `Mismatch`
        otherwise, on all ranks. Raises `Unavailable`, on all ranks, when memory is out.
        """
        if elements < 0 or ALIGNMENT % dtype.itemsize:
            raise ConfigError(f"cannot share {elements} elements of {dtype}")
        self._tensor_count += 1
        topic = f"shared tensor {self._tensor_count}"
        facts = {"elements": elements, "dtype": str(dtype)}
        room = aligned(elements * dtype.itemsize)
        byte_count = 3 * room if room <= SMALL_BYTES else room
        memory = share(self._world, topic, self._peers, byte_count, facts)
        return SharedTensor(memory, self.local_rank, self._barrier, elements, dtype, number=self._tensor_count)

    def allocate_region(self, byte_count: int) -> SharedRegion:
        """Return memory that several tensors use one after the other, see `tensor_in`."""
        self._tensor_count += 1
        topic, byte_count = f"shared region {self._tensor_count}", max(aligned(byte_count), 3 * SMALL_BYTES)
        memory = share(self._world, topic, self._peers, byte_count, {"bytes": byte_count})
        return SharedRegion(tuple(memory), self._tensor_count)

    def tensor_in(self, region: SharedRegion, elements: int, dtype: torch.dtype) -> SharedTensor:
        """Return a tensor at the begin of `region`, which holds what was there. Says nothing to other ranks."""
        if elements * dtype.itemsize > region.memory[0].numel():
            raise ConfigError(
                f"{elements} elements of {dtype} in shared memory of {region.memory[0].numel()} bytes"
            )
        return SharedTensor(region.memory, self.local_rank, self._barrier, elements, dtype, number=region.number)

    def close(self) -> None:
        """Leave: others that wait for me raise `PeerLost`. Tensors keep their memory until they are dropped.

        May be called twice. Called when the world closes.
        """
        self._barrier.close()


class SharedRegion(NamedTuple):
    """Memory that all ranks of the host map, used by one tensor at a time."""

    memory: tuple[torch.Tensor, ...]
    """By local rank, uint8."""
    number: int


class SharedTensor:
    """One flat tensor a rank, in memory that all ranks of the host can reach. Made by `SharedMemory.allocate`.

    The operations raise `PeerLost`, `Stalled` or `Mismatch`; contents are undefined then, and further
    operations raise the same.
    """

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        local_rank: int,
        barrier: HostBarrier,
        elements: int,
        dtype: torch.dtype,
        *,
        number: int,
    ) -> None:
        """`memory`: every local rank's, uint8: the tensor and, for a small one, two inboxes.

        `number` counts the tensors, and is the same on all ranks.
        """
        self.local_rank = local_rank
        self.sent_bytes = 0
        """By this rank to those of its host: memory needs no messages."""
        self._barrier = barrier
        self._number = number
        self._label = f"shared tensor {number}: {elements} of {dtype}"
        self._turn = 0
        self._lay_out(list(memory), elements, dtype)

    def _lay_out(self, memory: list[torch.Tensor], elements: int, dtype: torch.dtype) -> None:
        room = aligned(elements * dtype.itemsize)

        def cut(start: int) -> list[torch.Tensor]:
            return [bytes_[start : start + elements * dtype.itemsize].view(dtype) for bytes_ in memory]

        self._memory = memory
        self.parts = cut(0)
        """Every local rank's tensor, (elements,), by local rank."""
        self.mine = self.parts[self.local_rank]
        """This rank's own."""
        self._inboxes = [cut(room), cut(2 * room)] if room <= SMALL_BYTES else []
        begin, end = self.slice_bounds(self.local_rank)
        self._slices = [
            part[begin:end] for part in [*self.parts[self.local_rank :], *self.parts[: self.local_rank]]
        ]
        """My slice of every rank's part, mine first, then those of the ranks after me."""
        self._pieces = self._cut_my_slice()
        native = loops() if dtype == torch.float32 and end > begin and len(memory) > 1 else None
        self._sum_slices = None if native is None else native.row_sum(self._slices)

    def leave_memory(self) -> None:
        """Have `mine` at another address: who holds parts of it keeps what they hold now, and shares no more.

        Says nothing to other ranks; to be called between two operations. Raises RuntimeError without memory.
        """
        memory = list(self._memory)
        try:
            memory[self.local_rank] = leave_mapping(memory[self.local_rank])
        except OSError as reason:
            raise RuntimeError(
                f"a gradient of an earlier pass is kept, and its bucket's memory cannot be left to it ({reason}): "
                "keep p.grad.clone()"
            ) from None
        self._lay_out(memory, self.mine.numel(), self.mine.dtype)

    def slice_bounds(self, local_rank: int) -> tuple[int, int]:
        """Return where that rank's slice begins and ends, in elements.

        Slices begin at multiples of 64 bytes and cover the tensor in order; the last may be short or empty.
        """
        elements = self.mine.numel()
        line = ALIGNMENT // self.mine.itemsize
        length = -(-elements // (len(self.parts) * line)) * line
        return min(local_rank * length, elements), min((local_rank + 1) * length, elements)

    def all_reduce(self, divisor: int = 1) -> None:
        """Put the sum of all ranks' `mine` over `divisor` into every rank's `mine`, the same bits on all."""
        if self._inboxes:
            self._all_reduce_small(divisor)
            return
        self._wait(0)
        self._add_up(len(self.parts), divisor)
        self._wait(0)

    def reduce_scatter(self, divisor: int = 1) -> torch.Tensor:
        """Return my slice of `mine`, with the sum of all ranks' over `divisor` in it; the rest is undefined."""
        self._wait(1)
        self._add_up(1, divisor)
        self._wait(1)
        begin, end = self.slice_bounds(self.local_rank)
        return self.mine[begin:end]

    def reduce_into(self, out: torch.Tensor, divisor: int = 1) -> None:
        """Write the sum of all ranks' `mine` over `divisor`, in my slice, to `out`; `mine` stays as it is."""
        self._wait(1)
        begin = 0
        for pieces in self._pieces:
            end = begin + pieces[0].numel()
            sum_into(out[begin:end], pieces, divisor)
            begin = end
        self._wait(1)

    def all_gather(self) -> None:
        """Put every rank's slice of its `mine` into all others'."""
        self._wait(2)
        for mine, *others in self._pieces:
            for other in others:
                other.copy_(mine)
        self._wait(2)

    def meet(self) -> list[torch.Tensor]:
        """Wait until every rank of the host is here; return all ranks' tensors, by local rank, to be read.

        Before a rank writes its own again, it has met the others once more, by another tensor: see
        [Note: one barrier for small tensors].
        """
        self._wait(3)
        return self.parts

    def _all_reduce_small(self, divisor: int) -> None:
        """See [Note: one barrier for small tensors]."""
        inboxes = self._inboxes[self._turn]
        self._turn = 1 - self._turn
        inboxes[self.local_rank].copy_(self.mine)
        self._wait(0)
        sum_into(self.mine, inboxes, divisor)

    def _add_up(self, targets: int, divisor: int) -> None:
        """Add my slice of all parts up, into that of the first `targets` from mine on: mine alone, or all."""
        if self._sum_slices is not None and divisor == 1:
            self._sum_slices(targets)
            return
        for mine, *others in self._pieces:
            sum_into(mine, [mine, *others], divisor)
            for other in others[: targets - 1]:
                other.copy_(mine)

    def _cut_my_slice(self) -> list[tuple[torch.Tensor, ...]]:
        if self._slices[0].numel() == 0:
            return []
        return list(zip(*(slice_.split(PIECE_BYTES // slice_.itemsize) for slice_ in self._slices), strict=True))

    def _wait(self, operation: int) -> None:
        self._barrier.wait(self._number * len(_OPERATIONS) + operation, self._name)

    def _name(self, word: int) -> str:
        number, operation = divmod(word, len(_OPERATIONS))
        label = self._label if number == self._number else f"shared tensor {number}"
        return f"{_OPERATIONS[operation]} of {label}"


# All-reduce among the ranks of one host, for tensors on their devices, by collectives of the backend.
#
# It is `shared_tensor` where the ranks have a group instead of memory: each gets all parts of its slice, adds
# them up in the same order, and sends the sum to the others, so that all have the same bits. In bytes that is a
# reduce-scatter and an all-gather. Nothing waits on the host.


@dataclass(frozen=True)
class DeviceSlices:
    """The ranks of this rank's host. Its tensors are used on the stream that gradients travel on."""

    seat: GroupRank
    group: dist.ProcessGroup
    device: torch.device

    @property
    def local_size(self) -> int:
        """Ranks of the host."""
        return self.seat.size

    def allocate(self, elements: int, dtype: torch.dtype) -> DeviceSliceTensor:
        """Return a tensor of zeros that every rank of the host has one like. `elements` divide by the ranks."""
        return DeviceSliceTensor(self, torch.zeros(elements, dtype=dtype, device=self.device))

    def exchange(self, message: Message) -> torch.Tensor:
        """Exchange a message with the host's ranks, and return what is received."""
        return exchange_by_group(message, self.seat, self.group)


@dataclass(frozen=True)
class SlicesByHost:
    """How codecs exchange where hosts have several ranks with accelerators: inside each host first."""

    across: RankGroup
    """Those who carry the same slice on other hosts."""
    inside: DeviceSlices
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    """The group of `across`, and that of this host."""


class DeviceSliceTensor:
    """One flat tensor a rank, added up slice by slice. Made by `DeviceSlices.allocate`."""

    def __init__(self, slices: DeviceSlices, mine: torch.Tensor) -> None:
        self.mine = mine
        """This rank's own, (elements,)."""
        self.local_rank = slices.seat.rank
        self.sent_bytes = ring_sent_bytes(mine.nbytes, slices.local_size, passes=2)
        """By this rank to those of its host, in `reduce_scatter` and `all_gather`."""
        self._slices = slices

    def leave_memory(self) -> None:
        """Go on in fresh memory, of zeros: others hold parts of `mine`."""
        self.mine = torch.zeros_like(self.mine)

    def slice_bounds(self, local_rank: int) -> tuple[int, int]:
        """Return where that rank's slice begins and ends, in elements."""
        length = self.mine.numel() // self._slices.local_size
        return local_rank * length, (local_rank + 1) * length

    def reduce_scatter(self, divisor: int = 1) -> torch.Tensor:
        """Return my slice of `mine`, with the sum of all ranks' over `divisor` in it; the rest is as it was."""
        mine = self.mine.view(self._slices.local_size, -1)
        rows = self._slices.exchange(Message(mine, "all_to_all"))
        after_me, before_me = rows[self.local_rank + 1 :], rows[: self.local_rank]
        own = mine[self.local_rank]
        sum_into(own, [own, *after_me, *before_me], divisor)
        return own

    def all_gather(self) -> None:
        """Put every rank's slice into all others' `mine`."""
        own = self.mine.view(self._slices.local_size, -1)[self.local_rank]
        self.mine.copy_(self._slices.exchange(Message(own, "all_gather")).view(-1))
