"""An accelerator that is simulated on the CPU: a wait that is left out is an error, on every run.

Operations run at once, so nothing depends on timing. Each is noted with the stream that it was told to; events
carry what has happened before them from stream to stream (vector clocks: Lamport, CACM 1978; Mattern 1989). Two
uses of the same bytes, one of them a write, that no event orders are a `Race`. So is memory that is let go while a
stream other than the one it was made on may still use it, and a copy that the host reads before it has arrived.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import farandole

MAIN, SIDE, COPIES, OPERATIONS, HOST = "main", "side", "copies", "operations", "host"
OUTSIDE = "outside"
"""Where the product's code is not on the stack."""
_PRODUCT = farandole.__path__[0]
_LOOKS_AT_SHAPES = ("empty", "new_empty", "new_zeros", "new_full")
Clock = dict[str, int]


class Race(AssertionError):
    """Two uses of the same bytes without an order."""


@dataclass(frozen=True)
class Event:
    """What has happened when it is reached: for each stream, the number of its last operation."""

    clock: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Use:
    begin: int
    end: int
    stream: str
    number: int
    writes: bool
    what: str


@dataclass
class _Memory:
    made_on: str
    storage: StorageWeakRef
    uses: list[_Use] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)
    """Streams that its allocator waits for, too."""


class Copy:
    """See `HostCopy`."""

    has_arrived = True

    def __init__(self, device: SimulatedDevice, copy: torch.Tensor, event: Event) -> None:
        self._device, self._copy, self._event = device, copy, event

    def read(self) -> torch.Tensor:
        """Return it; the host waits for it, unless that wait is left out."""
        if "read" not in self._device.left_out:
            self._device.arrive(HOST, self._event)
        self._device.use(HOST, "the host reads", [self._copy], [])
        return self._copy


class SimulatedDevice(TorchDispatchMode):
    """The streams of a device (`Streams`), and the look at every operation while it is entered.

    `left_out`: waits that are not made, to see that they are missed: "launch", "end", "read", "keep".
    """

    side = SIDE
    copies = COPIES
    operations = OPERATIONS
    model = "simulated"

    def __init__(self, left_out: Iterable[str] = ()) -> None:
        super().__init__()
        self.left_out = frozenset(left_out)
        self.current = MAIN
        self.marks_read = 0
        """How often the host asked for the time between two marks."""
        self.host_waits: list[str] = []
        """Where the host asked for a number of a tensor."""
        self._clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self._memory: dict[int, _Memory] = {}

    # -- what the product calls ----------------------------------------------------------------

    @contextmanager
    def on(self, stream: str) -> Generator[None, None, None]:
        """See `Streams`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record(self) -> Event:
        """See `Streams`."""
        return Event(tuple(self._told(self.current).items()))

    def wait(self, event: Event) -> None:
        """See `Streams`."""
        left_out = "launch" if self.current in (SIDE, OPERATIONS) else "end"
        if left_out not in self.left_out:
            self.arrive(self.current, event)

    def has_passed(self, event: Event) -> bool:
        """See `Streams`; the host knows it then, unless that wait is left out."""
        if "read" not in self.left_out:
            self.arrive(HOST, event)
        return True

    def mark(self) -> tuple[Event, float]:
        """See `Streams`."""
        return self.record(), time.monotonic()

    def seconds_between(self, first: tuple[Event, float], last: tuple[Event, float]) -> float:
        """See `Streams`."""
        self.arrive(HOST, last[0])
        self.marks_read += 1
        return last[1] - first[1]

    def keep(self, tensor: torch.Tensor) -> None:
        """See `Streams`."""
        if "keep" not in self.left_out:
            self._memory_of(tensor).kept_for.add(self.current)

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """See `Streams`."""
        copy = tensor.clone()
        return Copy(self, copy, self.record())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Streams`."""
        return tensor.clone()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Streams`."""
        return torch.empty(shape, dtype=dtype)

    # -- what happens --------------------------------------------------------------------------

    def arrive(self, stream: str, event: Event) -> None:
        """Let `stream` know what `event` knows."""
        for other, number in event.clock:
            self._clocks[stream][other] = max(self._clocks[stream][other], number)

    def use(self, stream: str, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Note one operation of a stream."""
        self._sweep()
        clock = self._told(stream)
        clock[stream] += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._note(tensor, stream, clock, what, writes=is_write)

    def _told(self, stream: str) -> Clock:
        """What the host knows has happened, has happened for all that it tells a stream."""
        self.arrive(stream, Event(tuple(self._clocks[HOST].items())))
        return self._clocks[stream]

    def _note(self, tensor: torch.Tensor, stream: str, clock: Clock, what: str, *, writes: bool) -> None:
        if not tensor.numel():
            return
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin = tensor.storage_offset() * tensor.element_size()
        end, memory = begin + reach * tensor.element_size(), self._memory_of(tensor)
        for use in memory.uses:
            is_shared = use.begin < end and begin < use.end and (use.writes or writes)
            if is_shared and clock[use.stream] < use.number:
                raise Race(f"{what} on {stream} and {use.what} on {use.stream} use the same bytes; {_place()}")
        if writes:
            memory.uses = [use for use in memory.uses if use.begin < begin or use.end > end]
        memory.uses.append(_Use(int(begin), int(end), stream, clock[stream], writes, what))

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is None or found.storage.expired():
            found = self._memory[storage._cdata] = _Memory(self.current, StorageWeakRef(storage))
        return found

    def _sweep(self) -> None:
        """Memory that was let go may be written at once by the stream that it was made on."""
        for key, memory in [(key, each) for key, each in self._memory.items() if each.storage.expired()]:
            del self._memory[key]
            for use in memory.uses:
                is_elsewhere = use.stream not in (memory.made_on, HOST, *memory.kept_for)
                if is_elsewhere and self._told(memory.made_on)[use.stream] < use.number:
                    raise Race(
                        f"memory of {memory.made_on} was let go before {use.what} on {use.stream}; {_place()}"
                    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note what it reads and writes."""
        kwargs = kwargs or {}
        name, schema = func.overloadpacket.__name__, func._schema
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.host_waits.append(_place())
        returns_views = any(
            each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
        )
        if returns_views or name == "detach":
            return result
        named = [*zip(schema.arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for argument, value in named:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
            if func.namespace == "c10d":
                writes += tensors  # collectives say nothing of what they write
            elif not name.endswith("_like") and not name.startswith(_LOOKS_AT_SHAPES):
                (writes if is_write else reads).extend(tensors)
        known = {each.untyped_storage()._cdata for each in reads + writes}
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        fresh = [each for each in made if each.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._memory_of(tensor)
        self.use(self.current, name, reads, writes + ([] if name.startswith(("empty", "new_empty")) else fresh))
        return result


class ThreadedDevice(SimulatedDevice):
    """A simulated device that two threads tell what to do: each has a current stream, and is looked at."""

    def __init__(self, *left_out: str) -> None:
        self._of_thread, self._lock = threading.local(), threading.RLock()
        super().__init__(left_out)
        self.owner = threading.current_thread()

    @property
    def current(self) -> str:
        """The stream of the thread that asks."""
        return getattr(self._of_thread, "stream", MAIN)

    @current.setter
    def current(self, stream: str) -> None:
        self._of_thread.stream = stream

    @contextmanager
    def on(self, stream: str) -> Generator[None, None, None]:
        """See `Streams`; a thread of the product's is looked at while it is on a stream."""
        with super().on(stream), nullcontext() if threading.current_thread() is self.owner else self:
            yield

    def arrive(self, stream: str, event: Event) -> None:
        """See `SimulatedDevice`."""
        with self._lock:
            super().arrive(stream, event)

    def record(self) -> Event:
        """See `SimulatedDevice`."""
        with self._lock:
            return super().record()

    def use(self, *arguments: Any) -> None:
        """See `SimulatedDevice`."""
        with self._lock:
            super().use(*arguments)

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        with self._lock:
            return super()._memory_of(tensor)


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PRODUCT)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else OUTSIDE
