"""Dividing a stream (an IterableDataset): every rank reads it and keeps its own part of each batch.

The length is not known before the end, so what the reducer must know of a batch travels with it,
out of the worker process, as `ShardedBatch`.

[Note: resuming a stream] A dataset that has ``state_dict`` and ``load_state_dict`` tells after each batch where it
is, in each worker, and a resumed epoch begins there. Torch asks its workers for batches in turn, beginning with
worker 0; so each worker up to the one that had the last batch gives an empty batch first, which is dropped. A
batch that is not full was the stream's last: by then it has ended, and its state may be that of the next epoch's
beginning. So that state is marked, and a worker that resumes there has nothing left in its epoch. Any other stream
is read up to the place.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from ...core.vocabulary.errors import ConfigError
from .partition import Part, Partition

_EMPTY = Part(range(0), 0, 0.0)
_NOTHING = object()
_ENDED = "$ended"
"""The only key of a state that was read when the stream had ended."""


class _Sample(NamedTuple):
    value: Any
    part: Part
    worker: int
    state: Any


class ShardedBatch(NamedTuple):
    """A collated batch with what is known of it."""

    batch: Any
    part: Part
    worker: int = 0
    state: Any = None
    """That of the dataset after this batch; None where it has none."""

    @property
    def is_empty(self) -> bool:
        """Whether it only takes a worker's turn. See [Note: resuming a stream]."""
        return not self.part.positions


def new_reading(workers: int, unit: int) -> dict[str, Any]:
    """Return how a stream is read by so many workers, in batches of all ranks of `unit` samples."""
    return {"workers": workers, "unit": unit, "last": -1, "states": [None] * max(workers, 1)}


def note_reading(reading: dict[str, Any], batch: ShardedBatch) -> None:
    """Note a batch that was handed out."""
    reading["last"] = batch.worker
    reading["states"][batch.worker] = batch.state


def stream_state(reading: dict[str, Any]) -> dict[str, Any]:
    """Return what a state keeps of it: without the dataset's states where JSON would change them."""
    states: Any = reading["states"]
    kept = None
    with suppress(TypeError, ValueError):
        kept = json.loads(json.dumps(states))
    return {**reading, "states": copy.deepcopy(states) if kept == states else None}


def has_states(source: Any) -> bool:
    """Return whether a streaming dataset can tell where it is, and continue there."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


class divide_stream(IterableDataset[_Sample]):  # noqa: N801 - used as a function
    """This rank's samples of the stream `source`, batch by batch."""

    def __init__(self, source: IterableDataset[Any], partition: Partition) -> None:
        super().__init__()
        self.source = source
        self.resume: dict[str, Any] | None = None
        """Where the next iteration begins."""
        self._partition = partition
        self.keeps_states = False
        """Whether its batches bring the dataset's state."""

    def __iter__(self) -> Iterator[_Sample]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        resume, self.resume = self.resume, None  # a worker that lives on begins the next epoch at its beginning
        if resume is not None:
            state, has_ended = _unmarked(resume["states"][worker])
            if state is not None:
                self.source.load_state_dict(state)  # type: ignore[attr-defined]
            if info is not None and worker <= resume["last"]:
                yield from [_Sample(None, _EMPTY, worker, None)] * self._partition.own_size
            if has_ended:
                self._end(state)
                return
        samples = iter(self.source)
        while True:
            batch = list(islice(samples, self._partition.whole))
            if not batch or (len(batch) < self._partition.whole and self._partition.drop_last):
                return
            state = copy.deepcopy(self.source.state_dict()) if self.keeps_states else None  # type: ignore[attr-defined]
            if self.keeps_states and len(batch) < self._partition.whole:
                state = {_ENDED: state}
            part = self._partition.part(0, len(batch))
            if part is not None:
                values = [batch[i] for i in part.positions] if part.samples else batch[:1]
                for value in values:
                    yield _Sample(value, part, worker, state)

    def _end(self, state: Any) -> None:
        """Leave the source where its epoch has ended, in `state`: at the end, or at the next one's beginning."""
        samples = iter(self.source)  # at the end, this is what the source still expects: an iteration of nothing
        is_next_epoch = next(samples, _NOTHING) is not _NOTHING
        del samples
        if is_next_epoch:
            self.source.load_state_dict(state)  # type: ignore[attr-defined]

    def refuse_state(self, used: int, reading: Mapping[str, Any], workers: int) -> None:
        """Raise `ConfigError` for a state of a stream that was read in another way."""
        unit = self._partition.whole
        if reading["workers"] != workers:
            raise ConfigError(
                f"load_state_dict: the stream was read by {reading['workers']} workers, and this loader has "
                f"{workers}",
                remedy=f"resume with num_workers={reading['workers']}, or save the state at the end of an epoch",
            )
        if self._can_seek(reading):
            return
        if used % unit or (workers > 1 and reading["unit"] != unit):
            raise ConfigError(
                f"load_state_dict: {used} samples of the stream were used, in batches of {reading['unit']} of all "
                f"ranks, and this loader's are of {unit}",
                remedy="resume with the same batch size and number of ranks",
            )

    def continued(self, reading: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return where the next iteration begins; None: at the beginning."""
        return copy.deepcopy(reading) if reading is not None and self._can_seek(reading) else None

    def batches_to_drop(self, used: int) -> int:
        """Return how many batches come before the first one of the iteration that has just begun."""
        if self.resume is None:
            return used // self._partition.whole
        return self.resume["last"] + 1 if self.resume["workers"] else 0

    def _can_seek(self, reading: Mapping[str, Any]) -> bool:
        return self.keeps_states and reading["states"] is not None and reading["last"] >= 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)  # set_epoch, for one

    def __len__(self) -> int:
        """Samples on this rank, placeholders included; a TypeError when the stream has no length."""
        total = len(self.source)  # type: ignore[arg-type]
        return sum(len(part.positions) for part in self._partition.parts(total))

    @staticmethod
    def collate(collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[_Sample]], ShardedBatch]:
        """Return a collate function that keeps what is known of the batch beside it."""
        return _Collate(collate_fn)


def _unmarked(state: Any) -> tuple[Any, bool]:
    """Return a dataset's state, and whether the stream had ended there."""
    if isinstance(state, dict) and set(state) == {_ENDED}:
        return state[_ENDED], True
    return state, False


class _Collate:
    """A class, so that it reaches workers that are not forked."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[_Sample]) -> ShardedBatch:
        _, part, worker, state = samples[0]
        batch = self._collate_fn([sample.value for sample in samples]) if part.positions else None
        return ShardedBatch(batch, part, worker, state)
