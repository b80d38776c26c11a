"""Large operations: batches become jobs of the conductor, which moves them in the agreed order.

One thread, so that a long transfer holds up neither announcements nor small operations. Allreduces of a batch are
packed into one buffer, which travels in segments; everything else is one conversation an operation, several of
which are on their way at once.

Tensors on a device go by groups of its backend, where all ranks have one there, by most codecs too. By other
codecs, by Adasum and while a rank has joined they are copied through CPU memory.

[Note: the same states on all ranks] Counters in a state draw alike on all ranks (`randomk`), and factors are
the same (`powersgd`), so a state is made, kept and dropped by all ranks of an operation at once. They are
kept by who takes part: the ranks of one circle see the same operations in the same order, and no others, whatever
else each of them runs in other sets, or ran while some had joined.

An operation without a name has no next one, so nothing is kept for it. If names come once each, as from a
loop that counts them up, no more than `MOST_NAMES` are kept: those used last.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from ...comm.codecs.registry import make_codec, runs_on_devices
from ...comm.codecs.units import UnitStates, segment_elements
from ...comm.device.streams import streams_of
from ...comm.messages import GroupRank
from ...comm.transport.comm_thread import ITEM_TAGS, BucketWork, CommThread, Conversation, SegmentWork
from ...comm.transport.rank_group import HostGroups, RankGroup, host_groups
from ...comm.transport.transport import Transport
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from . import collectives
from .auto_codecs import AutoCodecs
from .group_thread import CPU, DeviceGroups, GroupThread, deliver, input_of, to_device_of, zeros_matter
from .operations import Operation, is_unnamed

# What the codecs of named operations keep between two of the same name.
MOST_NAMES = 1024
"""Names with a state, per group of ranks."""
_log = logging.getLogger("farandole")
_Kind = tuple[str, tuple[int, ...], str]
"""A codec, a shape and a place."""
Circle = tuple[int, tuple[int, ...]]
"""A process set, and those of its ranks that take part."""


class StatesByName:
    """The states of all operations of this rank."""

    def __init__(self) -> None:
        self._circles: dict[Circle, OrderedDict[str, tuple[_Kind, UnitStates]]] = {}
        self._warned = False

    def of(self, operation: Operation, codec: str, group: GroupRank, device: torch.device) -> UnitStates:
        """Return what is kept for the operation's name.

        It is made anew when the codec, the shape or `device`, where tensors travel, is another.
        """
        process_set, name = operation.signature.key
        shape = operation.signature.shape
        if is_unnamed(name):
            return UnitStates(make_codec(CodecSpec.parse(codec)), group)
        names = self._circles.setdefault((process_set, operation.present), OrderedDict())
        kept = names.get(name)
        kind = codec, shape, str(device)
        if kept is None or kept[0] != kind:
            kept = names[name] = (kind, UnitStates(make_codec(CodecSpec.parse(codec)), group))
        names.move_to_end(name)
        if len(names) > MOST_NAMES:
            oldest, _ = names.popitem(last=False)
            if not self._warned:
                self._warned = True
                _log.warning(
                    "operations of more than %d names used codecs: the residual of %r, which was "
                    "not used for longest, is dropped; use the same names in every step, or none",
                    MOST_NAMES,
                    oldest,
                )
        return kept[1]

    def forget(self, process_set: int) -> None:
        """Drop what is kept for a removed set."""
        self._circles = {circle: names for circle, names in self._circles.items() if circle[0] != process_set}


PIECE_BYTES = 2 * 2**20
"""Bytes of a segment that each rank sums."""
DEVICE_PIECE_BYTES = 32 * 2**20
"""The same on a device, where segments only bound the memory that a sum needs besides its tensors."""

Activity = Callable[[Sequence[str], str, float, float], None]
"""See `request.OperationLog.activity`."""
Done = Callable[[Sequence[Any], BaseException | None], None]
"""Takes the results of a batch, or what stopped it. Called from the conductor's thread."""


class DataPlane:
    """This rank's part of large operations."""

    def __init__(
        self,
        transport: Transport,
        rank: int,
        log: Activity,
        hosts: Sequence[int] | None,
        devices: DeviceGroups | None = None,
    ) -> None:
        """`hosts`: the number of each rank's host, for sums that meet there first; None: none do.

        `devices`: groups for tensors on this rank's device; None: they go through CPU memory.
        """
        self._transport = transport
        self._devices = devices
        self._on_device: GroupThread | None = None
        self._hosts = hosts
        self._rank = rank
        self._log = log
        self._conductor: CommThread | None = None
        self._states = StatesByName()
        self._auto = AutoCodecs(rank, hosts)
        self._running = 0

    def start(self, number: int, operations: Sequence[Operation], done: Done) -> None:
        """Queue a batch. All its ranks start the same batches in the same order.

        Called with the controller's lock, which `done` takes too: no operation is done before its ticket knows
        what carries it.
        """
        self._running += 1
        first, prepare = operations[0], None
        if self._goes_by_group(first):
            self._start_on_device(number, operations, done)
            return
        if self._conductor is None:
            self._conductor = CommThread(self._transport)
        codec = first.signature.codec
        if codec == AUTO:
            codec, choose = self._auto.next(first, self._groups(first, NONE))
            prepare = None if choose is None else partial(choose, self._transport)
            done = partial(self._auto.landed, first, done)
        groups = self._groups(first, codec)
        circle = RankGroup(first.present, self._rank)
        batch = _Batch(operations, circle, groups, self._log, partial(self._ended, done))
        work = self._conductor.submit(
            self._items(batch, codec), prepare, batch.complete, failed=batch.failed, number=number
        )
        _note_carrier(operations, work, codec)

    def _goes_by_group(self, operation: Operation) -> bool:
        """Return whether the tensors of an operation stay on the device; the same on all its ranks."""
        signature, tensor = operation.signature, operation.tensor
        if self._devices is None or tensor is None or streams_of(tensor.device) is None:
            return False
        fits = signature.reduction != "adasum" and (signature.is_exact or _is_for_devices(signature.codec))
        return fits and not operation.absent and self._devices.of(operation.present) is not None

    def _start_on_device(self, number: int, operations: Sequence[Operation], done: Done) -> None:
        assert self._devices is not None, "asked before"
        if self._on_device is None:
            self._on_device = GroupThread(self._devices)
        codec, done = operations[0].signature.codec, partial(self._ended, done)
        first, circle = operations[0], RankGroup(operations[0].present, self._rank)
        groups = None if codec == NONE else self._groups(first, codec)
        batch = _Batch(operations, circle, groups, self._log, done, on_device=self._on_device)
        for operation in operations:  # before it may end, and who waits looks
            operation.ticket.keep_result()
        items = self._items(batch, codec)
        work = self._on_device.submit_for(first.present, items, batch.complete, batch.failed, number)
        _note_carrier(operations, work, codec)

    def _items(self, batch: _Batch, codec: str) -> list[SegmentWork]:
        first = batch.operations[0]
        if codec != NONE:
            return batch.coded_items(self._states.of(first, codec, batch.group.seat, batch.home))
        return batch.sum_items() if first.signature.kind == "allreduce" else batch.move_items()

    def _groups(self, operation: Operation, codec: str) -> HostGroups | None:
        """Return the groups that reduce an operation host by host; None where all ranks exchange with each other.

        Adasum takes its pairs from all ranks, and a codec of matrices cannot take a slice of one.
        """
        signature = operation.signature
        if self._hosts is None or signature.kind != "allreduce" or signature.reduction == "adasum":
            return None
        if zeros_matter(operation) or (codec != NONE and _takes_matrices(codec)):
            return None
        return host_groups(operation.present, self._rank, self._hosts)

    def abort(self) -> None:
        """Make what is on its way fail at once."""
        self._transport.abort()
        if self._on_device is not None:
            self._on_device.abort()

    def close(self) -> None:
        """End the thread and close the connections; what is on its way fails."""
        if self._running:
            self.abort()
        if self._on_device is not None:
            self._on_device.close()
        if self._conductor is None:
            self._transport.close()
        else:
            self._conductor.close()

    def forget_codecs(self, process_set: int) -> None:
        """Drop what the codecs of a removed set keep, and which were chosen."""
        self._states.forget(process_set)
        self._auto.forget(process_set)

    def _ended(self, done: Done, results: Sequence[Any], error: BaseException | None) -> None:
        self._running -= 1
        done(results, error)


class _Batch:
    """Operations that travel together."""

    def __init__(
        self,
        operations: Sequence[Operation],
        circle: RankGroup,
        groups: HostGroups | None,
        log: Activity,
        done: Done,
        *,
        on_device: GroupThread | None = None,
    ) -> None:
        self.operations = operations
        self._on_device = on_device
        self.home = CPU if on_device is None else on_device.device
        """Where tensors are while they travel."""
        self._circle = circle
        self._groups = groups
        self._log = log
        self._done = done
        self._results: list[Any] = [None] * len(operations)
        self._finish: Callable[[], None] = lambda: None
        self._flat: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._queued_seconds = time.monotonic()
        self._began_seconds = 0.0

    @property
    def group(self) -> RankGroup:
        """The ranks that converse: all, or those with this rank's slice."""
        return self._circle if self._groups is None else self._groups.across

    def complete(self) -> None:
        """All conversations have ended."""
        way = "TCP" if self._on_device is None else self._on_device.backend
        self._activity(f"{way}_{self.operations[0].signature.kind.upper()}", self._began_seconds)
        if self._on_device is None:
            self._finish()
        else:
            self._on_device.land(self._finish)
        results = self._results
        self._let_go()
        self._done(results, None)

    def failed(self, problem: BaseException) -> None:
        """Something stopped it."""
        self._let_go()
        self._done([], problem)

    def _let_go(self) -> None:
        """Drop the tensors at once: this object knows itself, and would wait for Python's search for cycles."""
        self._finish, self._results, self._flat, self._out = lambda: None, [], None, None

    # -- sums ------------------------------------------------------------------------------------

    def sum_items(self) -> list[SegmentWork]:
        """Return the segments of an allreduce. Adasum needs each tensor whole: one item for each."""
        self._finish = self._unpack
        counts = [_count(operation) for operation in self.operations]
        if self.operations[0].signature.reduction == "adasum":
            bounds, begin = [], 0
            for count in counts:
                bounds.append((begin, begin + count))
                begin += count
        else:
            total = sum(counts)
            assert self.operations[0].tensor is not None, "checked at submission"
            piece_bytes = PIECE_BYTES if self._on_device is None else DEVICE_PIECE_BYTES
            fits = piece_bytes // self.operations[0].tensor.element_size() * self._circle.seat.size
            step = max(1, fits, -(-total // ITEM_TAGS))
            bounds = [(begin, min(begin + step, total)) for begin in range(0, total, step)]
        return [self._item(partial(self._sum, begin, end)) for begin, end in bounds if begin < end]

    def _sum(self, begin: int, end: int) -> Conversation:
        flat, out = (whole[begin:end] for whole in self._pack())
        if self._groups is None:
            yield from collectives.reduce_everywhere(flat, out, self.operations[0], self._circle.seat)
        else:
            yield from collectives.reduce_by_host(flat, out, self.operations[0], self._groups)

    def _pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what goes in, and where the result goes to; made when the first segment begins."""
        if self._flat is None or self._out is None:
            self._begin()
            packing_seconds = time.monotonic()
            if len(self.operations) == 1:
                operation = self.operations[0]
                self._flat = self._input(operation).reshape(-1)
                in_place = operation.request.in_place and self._is_home(operation)
                self._out = operation.tensor.view(-1) if in_place else torch.empty_like(self._flat)  # type: ignore[union-attr]
            else:
                self._flat = self._out = torch.cat(
                    [self._input(operation).reshape(-1) for operation in self.operations]
                )
                self._activity("MEMCPY_IN_FUSION_BUFFER", packing_seconds)
        return self._flat, self._out

    def _unpack(self) -> None:
        _, out = self._pack()
        if len(self.operations) == 1:
            self._results[0] = self._deliver(self.operations[0], out)
            return
        begin_seconds = time.monotonic()
        parts = out.split([_count(operation) for operation in self.operations])
        for index, (operation, part) in enumerate(zip(self.operations, parts, strict=True)):
            # A copy: a result that shared the buffer would keep all of it alive.
            self._results[index] = self._deliver(operation, part if operation.request.in_place else part.clone())
        self._activity("MEMCPY_OUT_FUSION_BUFFER", begin_seconds)

    def _deliver(self, operation: Operation, flat: torch.Tensor) -> torch.Tensor:
        tensor = operation.tensor
        assert tensor is not None, "checked at submission"
        if not self._is_home(operation):
            flat = to_device_of(tensor, flat)
        elif flat.data_ptr() == tensor.data_ptr() and operation.request.in_place:
            assert operation.request.tensor is not None, "checked at submission"
            return operation.request.tensor
        return deliver(operation, flat)

    # -- codecs ----------------------------------------------------------------------------------

    def coded_items(self, states: UnitStates) -> list[SegmentWork]:
        """Return the segments of an allreduce by a codec; the whole matrix, when the codec wants that."""
        self._finish = self._take_decoded
        total = _count(self.operations[0])
        step = max(1, total)
        if states.codec.granularity == "segment" and self._on_device is None:
            step = segment_elements(total, self._circle.seat.size, ITEM_TAGS)
        starts = range(0, total, step)
        return [
            self._item(partial(self._encode, begin, min(begin + step, total), states, index))
            for index, begin in enumerate(starts)
        ]

    def _encode(self, begin: int, end: int, states: UnitStates, index: int) -> Conversation:
        if self._flat is None or self._out is None:
            self._begin()
            self._flat = self._input(self.operations[0]).reshape(-1).float()
            self._out = torch.empty_like(self._flat)
        flat, out, operation = self._flat[begin:end], self._out[begin:end], self.operations[0]
        if self._groups is None:
            yield from collectives.encode(flat, out, states, index, operation)
        else:
            yield from collectives.encode_by_host(
                flat, out, partial(states.exchange_finite, index, among=self._circle), operation, self._groups
            )

    def _take_decoded(self) -> None:
        operation = self.operations[0]
        assert operation.tensor is not None, "checked at submission"
        out = torch.empty(0, dtype=torch.float32, device=self.home) if self._out is None else self._out
        self._results[0] = self._deliver(operation, out.to(operation.tensor.dtype))

    # -- everything else ---------------------------------------------------------------------------

    def move_items(self) -> list[SegmentWork]:
        """Return one conversation for each operation."""
        return [
            self._item(partial(self._move, operation), partial(self._take_moved, index))
            for index, operation in enumerate(self.operations)
        ]

    def _move(self, operation: Operation) -> Conversation:
        self._begin()
        tensor, kind = self._input(operation), operation.signature.kind
        if kind == "broadcast":
            flat = tensor.reshape(-1)
            root = operation.present.index(operation.signature.root)
            yield from collectives.spread(flat, root, self._circle.seat)
            return flat
        move = {
            "allgather": collectives.gather,
            "alltoall": collectives.swap,
            "reducescatter": collectives.reduce_and_scatter,
        }[kind]
        moved = yield from move(tensor, operation, self._circle.seat)
        return moved

    def _take_moved(self, index: int, moved: Any) -> None:
        operation = self.operations[index]
        tensor = operation.tensor
        assert tensor is not None, "checked at submission"
        if operation.signature.kind == "broadcast":
            is_in_place = self._is_home(operation) or operation.signature.root == self._circle.rank
            moved = operation.request.tensor if is_in_place else self._deliver(operation, moved)
        elif isinstance(moved, tuple):
            moved = (to_device_of(tensor, moved[0]), moved[1])
        else:
            moved = to_device_of(tensor, moved)
        self._results[index] = moved

    def _input(self, operation: Operation) -> torch.Tensor:
        """Return an operation's tensor where tensors travel; on a device behind what made it."""
        if self._on_device is not None and operation.ready_event is not None:
            self._on_device.streams.wait(operation.ready_event)
        return input_of(operation, self.home)

    def _is_home(self, operation: Operation) -> bool:
        return operation.tensor is not None and operation.tensor.device == self.home

    def _item(
        self, begin: Callable[[], Conversation], finish: Callable[[Any], None] = lambda result: None
    ) -> SegmentWork:
        return SegmentWork(begin, finish, self.group)

    def _begin(self) -> None:
        if not self._began_seconds:
            self._began_seconds = time.monotonic()
            self._activity("QUEUE", self._queued_seconds)

    def _activity(self, activity: str, begin_seconds: float) -> None:
        self._log([each.signature.name for each in self.operations], activity, begin_seconds, time.monotonic())


def _note_carrier(operations: Sequence[Operation], work: BucketWork, codec: str) -> None:
    nbytes = [operation.signature.nbytes for operation in operations]
    for operation, own in zip(operations, nbytes, strict=True):
        operation.ticket.carried_by(work, own / (sum(nbytes) or 1), codec)


@cache
def _is_for_devices(codec: str) -> bool:
    """Return whether tensors stay on the device; products of matrices differ from one device to another."""
    return runs_on_devices(CodecSpec.parse(codec)) and not _takes_matrices(codec)


@cache
def _takes_matrices(codec: str) -> bool:
    return make_codec(CodecSpec.parse(codec)).granularity == "matrix"


def _count(operation: Operation) -> int:
    assert operation.tensor is not None, "checked at submission"
    return operation.tensor.numel()
