"""What drives named operations on a device: a thread, by collectives of the backend, on a stream of its own.

A thread, as who announces an operation must not wait for the other ranks. Its jobs come in the agreed order of
large operations, which is one for all process sets: so are the collectives of all its groups. What travels is
bytes, so that every type does. Rows are added up here, in the order of ranks: the bits of tensors in CPU memory.

[Note: done on the device] An operation is done when the device has passed it. So its result may be used on any
stream; and as its memory was taken on the stream of this thread, who waits for it keeps it for its own stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ...comm.collectives import all_reduce
from ...comm.device.accelerator import set_device, synchronize_stream
from ...comm.device.streams import streams_of
from ...comm.messages import GroupRank, Message, bytes_of, received_shape
from ...comm.transport.comm_thread import BucketWork, CommThread, SegmentWork
from ...comm.transport.group_messages import drive, exchange_by_group
from ...comm.transport.rank_group import PieceExchange, RankGroup
from ...comm.world.world import World
from ...core.link import ring_sent_bytes
from .operations import DTYPES, Operation, Signature
from .reductions import adasum, finish, fold, scale

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 20e-6, 1e-3


def device_kind(world: World) -> str:
    """Return the kind of this rank's device; empty if tensors there cannot travel by groups of the backend."""
    if streams_of(world.device) is None or world.group is None or world.groups.ranks is not None:
        return ""
    try:
        world.group._get_backend(world.device)
    except RuntimeError:
        return ""
    return world.device.type


class DeviceGroups:
    """Groups of the backend for the tensors on this rank's device, by ranks. To be made by all ranks."""

    def __init__(self, world: World) -> None:
        streams = streams_of(world.device)
        assert streams is not None, "asked by `device_kind`"
        self.device, self.streams = world.device, streams
        self._world = world
        self.backend = _backend(world.group, world.device)
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.add(tuple(range(world.size)))

    def add(self, ranks: tuple[int, ...]) -> None:
        """Make the group of `ranks`, ascending; to be called by all ranks, in the same order.

        It stays when its process set is removed: operations of that may be on their way, and it may come again.
        """
        if len(ranks) == 1 or ranks in self._by_ranks:
            return
        group = self._world.new_group(ranks=ranks)
        if group is not None:  # connections are made by the first collective, in which all must take part
            all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group)
        self._by_ranks[ranks] = group

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all ranks, whose numbers in it are those of the world."""
        group = self._by_ranks[tuple(range(self._world.size))]
        assert group is not None, "this rank is one of them"
        return group

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of `ranks`; None where there is none."""
        return self._by_ranks.get(ranks)

    def abort(self) -> None:
        """Let the device give up what is on its way, where the backend can."""
        for group in self._by_ranks.values():
            with suppress(RuntimeError, AttributeError):
                if group is not None:
                    group.abort()


class GroupThread(CommThread):
    """Drives jobs whose tensors are on one device, in the order of submission, which all ranks agree on."""

    def __init__(self, groups: DeviceGroups) -> None:
        self.device, self.streams = groups.device, groups.streams
        self.backend = groups.backend
        self._groups, self._given_up = groups, False
        self._present: dict[int, tuple[int, ...]] = {}
        """By number of job: the ranks that take part."""
        super().__init__(None)

    def submit_for(
        self,
        ranks: tuple[int, ...],
        items: Sequence[SegmentWork],
        complete: Callable[[], object],
        failed: Callable[[BaseException], object],
        number: int,
    ) -> BucketWork:
        """Queue a job of `ranks`, which have a group; see `submit`."""
        self._present[number] = ranks
        return self.submit(items, None, complete, failed=failed, number=number)

    def land(self, finish: Callable[[], None]) -> None:
        """Do `finish` behind the job, and return when the device has passed it. See [Note: done on the device]."""
        with self.streams.on(self.streams.operations):
            finish()
            done = self.streams.record()
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self.streams.has_passed(done):
            if self._given_up:
                raise RuntimeError("the operations on the device were given up")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)

    def abort(self) -> None:
        """Fail what is on its way."""
        self._given_up = True
        self._groups.abort()

    def _conduct(self, job: BucketWork) -> None:
        set_device(self.device)
        job.begin_seconds, present = time.monotonic(), self._present.pop(job.number)
        with self.streams.on(self.streams.operations):
            for item in job.items:
                item.finish(drive(item, partial(self._carry, job, present, count(1))))
        if job.complete is not None:
            job.complete()
        job.end_seconds = time.monotonic()

    def _carry(
        self,
        job: BucketWork,
        present: tuple[int, ...],
        rounds: Iterator[int],
        message: Message | PieceExchange,
        circle: RankGroup,
    ) -> torch.Tensor:
        job.rounds = max(job.rounds, next(rounds))
        seat, group = circle.seat, self._groups.of(present)
        assert group is not None, "made with its process set"
        if isinstance(message, PieceExchange):
            job.sent_bytes += exchange_pieces(message, range(seat.size), seat, group)
            return torch.empty(0, dtype=torch.uint8)
        passes = 1 if message.operation == "all_to_all" else seat.size
        job.sent_bytes += ring_sent_bytes(message.tensor.nbytes * passes, seat.size, passes=1)
        if circle.ranks == present:
            return exchange_bytes(message, seat, group)
        # A group of just these may be made meanwhile: ranks would not know of it at once.
        return exchange_among(message, circle, self._groups.everyone)


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend of a group for a device: "nccl" of "cpu:gloo,cuda:nccl"."""
    return dict(each.split(":") for each in dist.get_backend_config(group).split(",")).get(device.type, "")


def exchange_bytes(message: Message, seat: GroupRank, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange a message of any type, as `exchange_by_group` does those of the backend's types."""
    tensor, shape = message.tensor.contiguous(), received_shape(message, seat)
    if not tensor.numel():
        return tensor.new_empty(shape)
    sent = bytes_of(tensor).view(seat.size if message.operation == "all_to_all" else 1, -1)
    received = exchange_by_group(Message(sent, message.operation), seat, group)
    return received.view(-1).view(tensor.dtype).view(shape)


def exchange_among(message: Message, circle: RankGroup, everyone: dist.ProcessGroup) -> torch.Tensor:
    """Exchange a message among ranks that have no group of their own: by sends and receives in that of all."""
    tensor, seat = message.tensor.contiguous(), circle.seat
    received = tensor.new_empty(received_shape(message, seat))
    outgoing = list(tensor) if message.operation == "all_to_all" else [tensor] * seat.size
    received[seat.rank].copy_(outgoing[seat.rank])
    exchange_pieces(PieceExchange(outgoing, list(received)), circle.ranks, seat, everyone)
    return received


def exchange_pieces(
    pieces: PieceExchange, numbers: Sequence[int], seat: GroupRank, group: dist.ProcessGroup
) -> int:
    """Exchange pieces of any length and type; return how many bytes this rank sends.

    `numbers`: those of the ranks in `group`.
    """
    calls, sent_bytes = [], 0
    for step in range(1, seat.size):
        target, source = (seat.rank + step) % seat.size, (seat.rank - step) % seat.size
        out, into = pieces.outgoing[target], pieces.incoming[source]
        if out.numel():
            calls.append(dist.P2POp(dist.isend, bytes_of(out), group=group, group_peer=numbers[target]))
            sent_bytes += out.nbytes
        if into.numel():
            calls.append(dist.P2POp(dist.irecv, bytes_of(into), group=group, group_peer=numbers[source]))
    works: Sequence[Any] = dist.batch_isend_irecv(calls) if calls else ()
    for work in works:
        work.wait()
    return sent_bytes


# Small operations: the data travels with the announcement, and every member does all the work itself.
#
# One way over the network, no second message. `inline_payloads` is what a member sends to each other one,
# `inline_result` what it makes of all of them.


CPU = torch.device("cpu")
SMALL_BYTES = 64 * 1024
"""What a rank sends in all for a small operation, at most."""

_IN_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8)


def is_small(signature: Signature, size: int) -> bool:
    """Return whether this rank's data travels along. Alone, nothing is sent: everything is small."""
    if size == 1:
        return True
    return signature.device == "cpu" and signature.is_exact and signature.nbytes * (size - 1) <= SMALL_BYTES


def inline_payloads(operation: Operation, rank: int) -> list[bytearray]:
    """Return what this rank gives to each member, in their order; equal ones are one object."""
    signature, tensor, members = operation.signature, operation.tensor, operation.members
    if tensor is None or (signature.kind == "broadcast" and signature.root != rank):
        return [bytearray()] * len(members)
    whole = to_bytes(input_of(operation))
    if signature.kind == "alltoall":
        return _cut(whole, signature.row_bytes, signature.splits)
    if signature.kind == "reducescatter" and signature.shape:
        return _cut(whole, signature.row_bytes, shares(signature.shape[0], len(members)))
    return [whole] * len(members)


def inline_result(operation: Operation, told: Sequence[bytearray], rank: int) -> torch.Tensor | object:
    """Return the operation's result from what each present member gave to this one, where its tensor is."""
    made, tensor = _result(operation, told, rank), operation.tensor
    if tensor is None or tensor.is_cpu:
        return made
    if isinstance(made, tuple):
        return (to_device_of(tensor, made[0]), *made[1:])
    return to_device_of(tensor, made) if isinstance(made, torch.Tensor) else made


def _result(operation: Operation, told: Sequence[bytearray], rank: int) -> torch.Tensor | object:
    signature = operation.signature
    kind = signature.kind
    if kind == "barrier":
        return None
    dtype = DTYPES[signature.dtype]
    if kind == "allreduce":
        return deliver(operation, _reduce(operation, [to_tensor(data, dtype) for data in told]))
    place = operation.present.index(rank)
    if kind == "reducescatter":
        total = _reduce(operation, [to_tensor(data, dtype) for data in told])
        return total.view(shares(signature.shape[0], operation.size)[place], *signature.shape[1:])
    if kind == "broadcast":
        assert operation.tensor is not None, "a broadcast has a tensor"
        if signature.root == rank:
            return operation.request.tensor
        return deliver(operation, to_tensor(told[operation.present.index(signature.root)], dtype))
    joined = to_tensor(bytearray().join(told), dtype)
    if kind == "allgather":
        return joined.view(sum(each.shape[0] for each in operation.told.values()), *signature.shape[1:])
    received = [each.splits[place] for each in operation.told.values()]
    return joined.view(sum(received), *signature.shape[1:]), torch.tensor(received, dtype=torch.int32)


def _reduce(operation: Operation, rows: list[torch.Tensor]) -> torch.Tensor:
    signature = operation.signature
    dtype = rows[0].dtype
    if signature.reduction == "adasum":
        wide = [row if dtype in (torch.float32, torch.float64) else row.float() for row in rows]
        total = alone(adasum(wide, shared=False))
    else:
        total = fold(rows, signature.reduction, zeros_too=zeros_matter(operation))
    return finish(total, dtype, signature.reduction, operation.size, signature.postscale)


def zeros_matter(operation: Operation) -> bool:
    """Return whether the zeros of absent members change the result."""
    return bool(operation.absent) and operation.signature.reduction in ("min", "max", "product")


def deliver(operation: Operation, flat: torch.Tensor) -> torch.Tensor:
    """Return `flat` in the tensor's shape; in the submitter's own tensor, where it asked for that."""
    request = operation.request
    if request.in_place or request.kind == "broadcast":
        assert operation.tensor is not None, "checked at submission"
        assert request.tensor is not None, "checked at submission"
        operation.tensor.copy_(flat.view(operation.tensor.shape))
        return request.tensor
    return flat.view(operation.signature.shape)


def input_of(operation: Operation, home: torch.device = CPU) -> torch.Tensor:
    """Return the operation's tensor, scaled, in the memory of `home`."""
    tensor = operation.tensor
    assert tensor is not None, "checked at submission"
    if tensor.device != home:
        if operation.ready_event is not None:
            operation.ready_event.synchronize()
        tensor = tensor.to(home)
    return scale(tensor, operation.signature.prescale)


def to_device_of(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `result` where `tensor` is; it is all there."""
    if result.device == tensor.device:
        return result
    moved = result.to(tensor.device)
    synchronize_stream(tensor.device)
    return moved


def alone(conversation: object) -> torch.Tensor:
    """Return the result of a conversation with one rank, which sends no message."""
    try:
        next(conversation)  # type: ignore[call-overload]
    except StopIteration as end:
        found: torch.Tensor = end.value
        return found
    raise AssertionError("a conversation with one rank sends no message")


def shares(rows: int, size: int) -> tuple[int, ...]:
    """Return the rows of each member: the first ``rows % size`` have one more.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(rows // size + (place < rows % size) for place in range(size))


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """Return a copy of a contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return bytearray()
    if tensor.dtype in _IN_NUMPY:  # the usual types take the short way
        return bytearray(tensor.numpy().data)  # .data: an array without dimensions would be taken for a number
    return bytearray(bytes_of(tensor).numpy())


def to_tensor(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor in the memory of `data`."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _cut(whole: bytearray, row_bytes: int, rows: Sequence[int]) -> list[bytearray]:
    parts, begin = [], 0
    for number in rows:
        parts.append(whole[begin : begin + number * row_bytes])
        begin += number * row_bytes
    return parts
