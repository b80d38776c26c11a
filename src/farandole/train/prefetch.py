"""`fd.prefetch`: batches of any loader, drawn and copied ahead of the loop.

[Note: workers by measurement] The first steps draw in the loop's thread, one after the other, so that nothing
contends: what a batch takes, what of it is CPU work, and what the rest of a step takes. By the formulas of the
diagnosis (`loader_fixes`) follows the smallest number of workers with the shortest step. Torch starts workers
where an iteration begins; until then the thread loads, and steps are timed, too. With workers they have to be
shorter, or there are none again. Each rank chooses for itself.

::

    for x, y in fd.prefetch(loader, depth=2):
        ...

What a batch does where it is handed out happens when the loop gets it: see [Note: drawn ahead, told later] in
`told_later`. The first batch of each iteration is drawn by the loop's thread, which would wait for it anyway:
where epochs begin, ranks may send each other their order, and workers start.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from ..comm.device.accelerator import accelerators, current_index
from ..comm.device.streams import Streams, streams_of
from ..comm.world.world import has_world, world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import DataWait
from ..core.vocabulary.text import write_notice
from ..core.vocabulary.units import format_seconds, format_share
from ..observe.diagnose.loader_fixes import LoaderFacts
from ..parallel.instrument.training_facts import note_loader, own_cores
from .data.ahead_thread import AheadThread, draw_into
from .data.loader import ShardedLoader
from .data.loader_watch import leave_out, samples_of
from .data.rank_sampler import generator_states
from .data.told_later import DrawnAhead, Handover, LoopWait, Tell, drawing_for, drawn_ahead
from .data.worker_cores import LEAST_BATCHES, TunedLoaders, on_worker_cores, worker_cores

# Copies of batches on an accelerator, made on a stream of their own while the step before computes.
#
# The thread that draws pins a batch and tells the copies to their stream. The loop's stream waits for them where
# the loop takes the batch; the host does not. Their memory is of the copies' stream, so it is kept until the
# loop's stream is done with it, too.


class SentBatch(NamedTuple):
    """A batch whose tensors are on their way to the device."""

    batch: Any
    copies: dict[int, torch.Tensor]
    """On the device, by the identity of the tensor that was drawn."""
    arrived: Any
    """The event behind the last copy."""


class DeviceCopies:
    """Sends batches to one device."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams

    def send(self, batch: Any) -> SentBatch:
        """Begin to copy the tensors in dicts, lists and tuples; called by the thread that draws.

        Tensors that are on an accelerator already, and objects of other kinds, stay as they are.
        """
        copies: dict[int, torch.Tensor] = {}
        with self._streams.on(self._streams.copies):
            sent = self._send(batch, copies)
            return SentBatch(sent, copies, self._streams.record())

    def receive(self, sent: SentBatch) -> None:
        """Let the current stream use a batch from now on; called by the loop."""
        self._streams.wait(sent.arrived)
        for tensor in sent.copies.values():
            self._streams.keep(tensor)

    def _send(self, value: Any, copies: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies and value.device.type == "cpu":
                copies[id(value)] = self._copy(value)
            return copies.get(id(value), value)
        if isinstance(value, Mapping):
            return _rebuilt(value, {key: self._send(each, copies) for key, each in value.items()})
        if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
            packed: Any = value
            moved = packed.to(self._device, non_blocking=True)
            copies.update((id(old), new) for old, new in zip(packed, moved, strict=True) if new is not old)
            return moved
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._send(each, copies) for each in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._send(each, copies) for each in value)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not tensor.is_nested:
            return self._streams.to_device(tensor)
        return tensor.to(self._device)


def _rebuilt(old: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `old` with other values."""
    if type(old) is dict:
        return values
    if isinstance(old, MutableMapping):
        made = copy.copy(old)
        made.update(values)
        return made
    kind: Any = type(old)
    return kind(values)


# ``fd.prefetch(loader, workers="auto")``: how many workers a loader gets, by what its batches and the steps
# take.

_FIRST_BATCHES = 2
"""Not timed: caches are cold."""
_FIRST_STEPS = 4
"""The same, where a thread or workers begin to load ahead."""
_BATCHES_EACH = 2
"""That a worker has ahead: torch's own."""
_SLACK = 1.25
"""Times a usual batch that workers should keep up with: batches differ."""
_NEARLY = 1.02
_LEAST_GAIN = 0.03


class WorkerChoice:
    """The workers of one loader. See [Note: workers by measurement]."""

    def __init__(self, most: int, cores: float, computing_cores: float) -> None:
        """`cores`: for a rank and its workers; `computing_cores`: those that it computes with."""
        self._most, self._cores, self._computing_cores = most, cores, computing_cores
        self._waits: list[LoopWait] = []
        self._expected_seconds = 0.0
        """A step with the thread takes so long, as far as the formulas know."""
        self._before_seconds = 0.0
        self.workers = 0
        """The next iteration has so many."""
        self.phase = "load"
        """What is timed: "load" (batches, and steps), "thread" or "workers" (steps); "over": nothing."""

    def note(self, wait: LoopWait) -> None:
        """The loop asked for a batch, and has it."""
        if self.phase == "over":
            return
        self._waits.append(wait)
        if self.phase == "load" and len(self._waits) > _FIRST_BATCHES + LEAST_BATCHES:
            self._choose()

    def begin(self) -> int:
        """Return the number of workers of the iteration that begins."""
        seconds = self._step_seconds()
        self._waits = []
        if self.phase == "thread":
            self._before_seconds = seconds or self._expected_seconds
            self.phase = "workers" if self.workers else "over"
        elif self.phase == "workers" and seconds is not None:
            self._judge(seconds)
        return self.workers

    def _choose(self) -> None:
        waits = self._waits[_FIRST_BATCHES:]
        self._waits, self.phase = [], "thread"
        batch = statistics.median(each.end_seconds - each.begin_seconds for each in waits[1:])
        cpu = min(batch, statistics.median(each.cpu_seconds for each in waits[1:]))
        rest = statistics.median(b.begin_seconds - a.end_seconds for a, b in pairwise(waits))
        facts = LoaderFacts(0, batch, batch + rest, cpu, self._cores, self._computing_cores, None)
        self._expected_seconds = thread = facts.step_prefetched or batch + rest
        steps = {count: facts.step_with(count, _SLACK) for count in range(1, self._most + 1)}
        count = next(count for count, step in steps.items() if step <= _NEARLY * min(steps.values()))
        step = facts.step_with(count)
        said = (
            f"prefetch: a batch takes {format_seconds(batch)} ({format_seconds(cpu)} of it CPU work) and the rest "
            f"of a step {format_seconds(rest)}, with {self._cores:.2g} core{'s' * (self._cores != 1)}"
        )
        if step > (1 - _LEAST_GAIN) * thread:
            _say(f"{said}: no workers, as the thread alone should do as well: {format_seconds(thread)} a step")
            return
        self.workers = count
        _say(
            f"{said}: num_workers={count} from the next epoch on; a step should then take {format_seconds(step)} "
            f"instead of {format_seconds(thread)} with the thread alone"
        )

    def _judge(self, seconds: float) -> None:
        self.phase = "over"
        gain = 1 - seconds / self._before_seconds
        took = f"a step takes {format_seconds(seconds)}, and {format_seconds(self._before_seconds)} without"
        if gain >= _LEAST_GAIN:
            _say(f"prefetch: num_workers={self.workers} stays: {took} ({format_share(gain)} less)")
            return
        _say(f"prefetch: num_workers={self.workers} gains nothing: {took}; no workers from the next epoch on")
        self.workers = 0

    def _step_seconds(self) -> float | None:
        waits = self._waits[_FIRST_STEPS:]
        if len(waits) <= LEAST_BATCHES:
            return None
        return statistics.median(b.begin_seconds - a.begin_seconds for a, b in pairwise(waits))


def open_choice(loader: Any) -> WorkerChoice | None:
    """Return the choice for a loader; None for one whose workers the script has set.

    Raises `ConfigError` for what is no DataLoader, and for a stream, which its workers divide.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = "a stream (an IterableDataset)" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
        raise ConfigError(
            f'prefetch: workers = "auto" is for a DataLoader of a dataset with indexes, and this is {kind}',
            remedy="leave workers out, and give num_workers to the loader where it has them",
        )
    if loader.num_workers or loader.persistent_workers:
        return None
    cores = float(len(worker_cores()) or os.cpu_count() or 1)
    own = float(len(own_cores()) or cores)
    if has_world() and own >= (os.cpu_count() or 1):  # ranks that are not bound share them
        cores, own = (max(1.0, each / world().local_size) for each in (cores, own))
    return WorkerChoice(max(1, int(cores)), cores, min(own, torch.get_num_threads()))


def set_workers(loader: Any, workers: int) -> None:
    """Let the next iteration have so many, unless `farandole tune` sets them."""
    if has_world() and world().session.kept(TunedLoaders) is not None:
        return
    if workers != loader.num_workers:
        loader.num_workers = workers
        loader.prefetch_factor = _BATCHES_EACH if workers else None


def _say(text: str) -> None:
    if not has_world() or world().is_main:
        write_notice(text)


# `fd.prefetch`: a thread loads batches, and copies them to the device, while the step before computes.

T = TypeVar("T")

_JOIN_SECONDS = 2.0
"""How long a loop that is left waits for a batch that is being drawn: one of a loader that hangs never comes."""
_DRAWS_NUMBERS = (
    "warning: fd.prefetch: this loader draws random numbers from the generators of the training, in a thread now: "
    "which batch gets which, and which dropout gets, depends on timing. With num_workers=1 or more the random "
    "numbers of a loader of fd.shard go by the place in the data, and a run repeats to the bit"
)


def prefetch(
    loader: Iterable[T],
    *,
    depth: int = 2,
    device: torch.device | str | None = None,
    workers: str | None = None,
) -> Prefetched[T]:
    """Return an iterable of the batches of `loader` that loads them in a thread, ahead of the loop.

    Args:
        loader: of `fd.shard`, a DataLoader with or without workers, or any other iterable of batches. An iterator,
            such as a generator, is read ahead: what was drawn and not used comes in the next iteration.
        depth: how many batches may have been drawn beyond the one that the loop has.
        device: where tensors in dicts, lists and tuples are copied, through pinned memory. By default the
            device of `fd.world()`. On the CPU nothing is copied.
        workers: if "auto", a DataLoader without workers gets as many as its batches and the steps are measured to
            need, from the second epoch on; rank 0 says what it chose and why. One that has workers keeps them.

    Returns:
        An iterable with the length of `loader` and its attributes (``set_epoch``, ``sampler``, ``state_dict``). An
        error of the loader is raised in the loop, where its batch would have come. Saved states, batch weights and
        recorded waits are those of the batch that the loop has.

    Raises:
        ConfigError: `loader` is no iterable, `depth` is no number from 1, `device` is none, or `workers` is "auto"
            and `loader` no DataLoader of a dataset with indexes.

    Example::

        loader = fd.prefetch(fd.shard(loader), depth=2)
        for epoch in range(epochs):
            for x, y in loader:
                ...
    """
    if not hasattr(loader, "__iter__"):
        raise ConfigError(f"prefetch: expected an iterable of batches, got {type(loader).__name__}")
    if type(depth) is not int or depth < 1:
        raise ConfigError(f"prefetch: depth is {depth!r}, expected a number of batches from 1")
    if workers not in (None, "auto"):
        raise ConfigError(
            f'prefetch: workers is {workers!r}, expected "auto"',
            remedy="give a number to the DataLoader: num_workers=",
        )
    choice = None if workers is None else open_choice(loader)
    return Prefetched(loader, depth, None if device is None else _read_device(device), choice)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A batch that was drawn, with what is to be done when the loop has it."""

    sent: SentBatch
    tells: list[Tell]


class _Reader(Generic[T]):
    """Draws from one iterator, in whichever thread asks. Holds nothing of the loop, which may be dropped."""

    def __init__(self, iterator: Iterator[T], ahead: DrawnAhead, copies: DeviceCopies | None, alone: Lock) -> None:
        self.iterator: Iterator[T] | None = iterator
        """None when the loop was left."""
        self.ahead, self.copies = ahead, copies
        self._draws_alone = alone
        self._has_gradients = torch.is_grad_enabled()
        self.thread = AheadThread(self.draw, ahead.depth, "farandole-prefetch")
        self.has_ended = False
        """Whether the loop has seen the end."""

    def draw(self) -> _Ready:
        """Draw the next batch and send it to the device."""
        with self._draws_alone, drawing_for(self.ahead), torch.set_grad_enabled(self._has_gradients):
            if self.iterator is None:
                raise StopIteration
            batch = next(self.iterator)
            sent = SentBatch(batch, {}, None) if self.copies is None else self.copies.send(batch)
            return _Ready(sent, self.ahead.take())

    def go_on(self) -> _Reader[T]:
        """Return one that draws what comes next, after this one's thread has ended."""
        assert self.iterator is not None, "an iterator that is the loader is kept"
        later = _Reader(self.iterator, self.ahead, self.copies, self._draws_alone)
        for drawn in self.thread.rest():
            later.thread.put(drawn)
        return later

    def leave(self, goes_on: bool) -> None:
        """End the thread; unless `goes_on`, end the iteration, too."""
        has_ended = self.thread.close(_JOIN_SECONDS)
        if goes_on:
            return
        for end in self.ahead.ends:
            end()
        self.iterator = None
        if has_ended:
            # The end that was drawn has this reader in its traceback, and what was to be told has the iterator:
            # workers would live until garbage is collected, and torch then waits 5 s for each.
            self.thread.rest()
            self.ahead.take()


class Prefetched(Generic[T]):
    """The batches of a loader, drawn ahead. Made by `prefetch`; all else is asked of the loader."""

    _times_iteration = True
    """For `fd.record`: waits are recorded already."""

    def __init__(
        self, loader: Iterable[T], depth: int, device: torch.device | None, choice: WorkerChoice | None
    ) -> None:
        self.loader = loader
        self.depth = depth
        self._device = device
        self._choice = choice
        self._draws_alone = Lock()
        self._reader: _Reader[T] | None = None
        """That of the iteration that began last."""
        self._batches: weakref.ref[PrefetchedBatches[T]] | None = None
        self._is_looked_at = not isinstance(loader, DataLoader)
        """Whether it was seen if the loader draws random numbers."""

    def __iter__(self) -> Iterator[T]:
        before, running = self._reader, None if self._batches is None else self._batches()
        if before is not None and before.thread.is_closed:
            before.thread.join()  # two threads would draw at a time
        elif before is not None and before.iterator is self.loader and running is not None:
            return running  # as of the iterator itself, loops over it share what comes
        if before is not None and before.iterator is self.loader:
            self._reader = before.go_on()
        else:
            self._reader = self._open()
        looks = not self._is_looked_at and not getattr(self.loader, "num_workers", 0)
        self._is_looked_at = True
        is_iterator = self._reader.iterator is self.loader
        batches = PrefetchedBatches(self._reader, self._choice, is_iterator=is_iterator, looks=looks)
        self._batches = weakref.ref(batches)
        return batches

    def __len__(self) -> int:
        """Return that of the loader; raise `TypeError` where it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        value = getattr(self.loader, name)
        if isinstance(self.loader, ShardedLoader):  # counts what the loop has
            return value
        if name == "state_dict":
            return partial(self._state, value)
        return partial(self._load, value) if name == "load_state_dict" else value

    def _state(self, state_dict: Callable[[], Any]) -> Any:
        if self._reader is not None and not self._reader.has_ended:
            raise ConfigError(
                f"fd.prefetch: the state of a {type(self.loader).__name__} in an epoch counts batches that were "
                "drawn ahead and that the loop has not had: a run that resumed there would miss them",
                remedy="save the state at the end of an epoch, or prefetch a loader of fd.shard",
            )
        return state_dict()

    def _load(self, load_state_dict: Callable[[Any], Any], state: Any) -> Any:
        if self._reader is not None:
            self._reader.thread.close()
            self._reader = None
        return load_state_dict(state)

    def _open(self) -> _Reader[T]:
        if self._choice is not None:
            set_workers(self.loader, self._choice.begin())
        ahead = DrawnAhead(self.depth)
        with drawing_for(ahead), on_worker_cores():
            iterator = iter(self.loader)
        leave_out(iterator)
        if has_world() and not isinstance(self.loader, ShardedLoader):
            note_loader(world(), self.loader, len(worker_cores()) or None, self.depth)
        return _Reader(iterator, ahead, self._copies(), self._draws_alone)

    def _copies(self) -> DeviceCopies | None:
        ours = world().device if has_world() else torch.device("cpu")
        device = ours if self._device is None else self._device
        if device.type != "cpu" and ":" not in str(device):  # a thread has a current device of its own
            here = current_index()
            device = ours if device.type == ours.type else torch.device(device.type, here)
        streams = streams_of(device)
        return None if streams is None else DeviceCopies(device, streams)


class PrefetchedBatches(Iterator[T]):
    """One iteration. When it is dropped, its thread ends."""

    def __init__(self, reader: _Reader[T], choice: WorkerChoice | None, *, is_iterator: bool, looks: bool) -> None:
        """`is_iterator`: what it draws from goes on afterwards; `looks`: whether random numbers are drawn."""
        self._reader = reader
        self._choice = choice
        self._looks = looks
        self._leave = weakref.finalize(self, reader.leave, is_iterator)

    def __next__(self) -> T:
        begin, cpu = time.monotonic(), time.thread_time()
        reader = self._reader
        if drawn_ahead() is not None:
            raise ConfigError(
                "fd.prefetch: a loop over it is inside what another fd.prefetch reads ahead",
                remedy="use one of the two",
            )
        if self._choice is not None and self._choice.phase == "load":
            reader.thread.put(draw_into(reader.draw))  # nothing beside it, to be timed
        elif not reader.thread.is_started:
            self._start()
        try:
            ready = reader.thread.take()
        except BaseException as error:
            if reader.thread.is_closed:  # not so where this thread was interrupted, and the other goes on
                reader.has_ended = isinstance(error, StopIteration)
                _tell(reader.ahead.take(), Handover(begin, cpu))
                self._leave()
            raise
        handover, batch = Handover(begin, cpu), ready.sent.batch
        if self._choice is not None:
            self._choice.note(handover.whole_wait)
        if reader.copies is not None:
            reader.copies.receive(ready.sent)
            handover.copies = ready.sent.copies
        if ready.tells:
            _tell(ready.tells, handover)
        elif has_world() and torch.is_grad_enabled():
            wait = handover.wait()
            world().session.recorder.record(DataWait(*wait[:2], samples_of(batch), wait.cpu_seconds))
        result: T = batch
        return result

    def _start(self) -> None:
        """Draw the first batch here, and let the thread go on."""
        reader = self._reader
        reader.ahead.may_begin = True
        if reader.thread.is_empty:
            reader.thread.put(draw_into(reader.draw))
        if self._looks and not reader.thread.has_ended:  # the first draw may begin a sampler, which takes a number
            before = generator_states()
            reader.thread.put(draw_into(reader.draw))
            if generator_states() != before and (not has_world() or world().is_main):
                write_notice(_DRAWS_NUMBERS)
        reader.ahead.may_begin = False
        with on_worker_cores():  # which the thread has from the one that starts it
            reader.thread.start()


def _tell(tells: list[Tell], handover: Handover) -> None:
    for each in tells:
        each(handover)


def _read_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(f"prefetch: device {device!r} is none: {problem}") from None
    kind, _ = accelerators()
    if found.type not in ("cpu", kind):
        raise ConfigError(
            f"prefetch: device {device!r} is not there: this process has "
            f"{f'the CPU and {kind}' if kind else 'the CPU alone'}"
        )
    return found
