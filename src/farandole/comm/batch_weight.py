"""The weight of this rank's batch in the mean over samples.

[Note: shares follow the batch] A loop may fetch ahead (a prefetcher, ``list(loader)``, several batches for one
step), so the batch drawn last is not always the one in use. What a loader hands out is noted with its weight,
and the model's forward pass looks up the tensors that it is given:

1. by memory: the tensors, or views of them, are those of a batch that was handed out;
2. else (moved to another device, cast, augmented) by order: batches are used in the order in which they were
   drawn. Where that leaves batches of unequal weight to choose from, the ranks compare sizes, and what is
   still not certain is an error on all of them.

The weight goes with the graph: backward begins with the weight of the pass whose output it starts from. Nothing is
noted before a loader begins an epoch whose batches may be unequal.

[Note: the true mean] A rank's loss is the mean over its own samples. With n_r of N samples on rank r,
the mean over all samples is the sum of (n_r / N) times each rank's gradient: with equal batches that is
the plain average of the ranks, with a short last batch it is not. `factor` is n_r x size / N: 1 when
batches are equal, 0 for a rank whose batch is only a placeholder. The loader knows it without
a message, because every rank computes the same division of the data. Which batch is in use: `DrawnBatches`.

[Note: weights by count] A loss that is a mean over tokens has as its n_r the tokens of rank r. Only the loop knows
them: it gives its count with `fd.weight`, the ranks add up their counts, and the factor that comes of it stands in
for that of the samples until the next call. A placeholder counts for nothing whatever its tokens. The loop must
give a count for each step: gradients that would go by the count of an earlier step are refused.

Ranks that shuffle by different epochs lose and repeat samples, and nothing else shows it. A loop that goes back
and forth between loaders within their epochs may do so differently on each rank, and is not compared.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.vocabulary.errors import ConfigError

# The tensors in a batch or in a model's output: nests of containers, dataclasses and plain objects.

_MOST_TENSORS = 64
_DEPTH = 4
"""Containers within containers."""


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers and plain objects, the first `_MOST_TENSORS` of them."""
    yield from islice(_walk(value, depth), _MOST_TENSORS)


def _walk(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _walk(part, depth - 1)


# Bound methods that are called as long as their objects live.


class Listeners:
    """Bound methods, in the order in which they were added. They do not keep their objects alive."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., object]]] = []

    def add(self, method: Callable[..., object], *, first: bool = False) -> None:
        """Call `method` too, for as long as its object lives; `first`: before all that are here."""
        self._methods = [each for each in self._methods if each() is not None]
        self._methods.insert(0 if first else len(self._methods), weakref.WeakMethod(method))

    def clear(self) -> None:
        """Call none of them any more."""
        self._methods.clear()

    def __call__(self, *arguments: Any) -> None:
        """Call them all. One that is added meanwhile is not called yet."""
        for each in list(self._methods):
            method = each()
            if method is not None:
                method(*arguments)


# Which of the batches that were drawn a model sees: batches may be drawn long before they are used.

_REMEDY = "draw one batch at a time, give the model the loader's own tensors, or use drop_last=True"

Ask = Callable[[list[bool]], list[list[bool]]]
"""Tells all ranks which candidates this rank's input may be; returns the answers of all ranks."""


class Origin(NamedTuple):
    """Which loader drew a batch, and in which of its epochs."""

    loader: int
    epoch: int
    order: int = 0
    """The epoch, if the order of the samples goes by it; else 0."""


class Drawn:
    """A batch that was handed out."""

    def __init__(self, tensors: Sequence[torch.Tensor], factor: float, samples: int, origin: Origin) -> None:
        self.factor = factor
        self.origin = origin
        self.number = 0
        self.used_after = -1
        """How many batches had been drawn when it was used first; -1: it was not used yet."""
        self.is_over = False
        """Whether its loop ended after it was used."""
        self.sizes = {max(samples, 1)} | {tensor.shape[0] for tensor in tensors if tensor.dim()}
        self.places = [place for tensor in tensors if (place := _storage_range(tensor)) is not None]

    @property
    def is_gone(self) -> bool:
        """Whether the memory that was handed out is not referenced any more."""
        return all(place.storage.expired() for place in self.places)

    def may_be(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an input has as many samples as this batch."""
        return any(tensor.shape[0] in self.sizes for tensor in tensors if tensor.dim())


class DrawnBatches:
    """The batches that are waiting to be used, and those that may be used again."""

    def __init__(self) -> None:
        self._waiting: list[Drawn] = []
        self._by_storage: dict[int, list[tuple[_StorageRange, Drawn]]] = {}
        self._count = 0
        self._current: Drawn | None = None
        self._ahead: Origin | None = None
        """Which loop used a batch when it had drawn later ones."""
        self._clean_at = 64

    def add(self, batch: Any, factor: float, samples: int, origin: Origin) -> None:
        """Note a batch that is being handed out."""
        drawn = Drawn(list(tensors_in(batch)), factor, samples, origin)
        self._count += 1
        drawn.number = self._count
        for place in drawn.places:
            self._by_storage.setdefault(place.key, []).append((place, drawn))
        self._waiting.append(drawn)
        if len(self._by_storage) > self._clean_at:
            self._clean()

    def loop_ends(self, origin: Origin) -> None:
        """No more batches come from `origin`."""
        current = self._current
        if current is not None and current.origin == origin:
            current.is_over = True

    def used_by(self, inputs: Any, ask: Ask) -> float:
        """Return the weight of the batch whose tensors `inputs` are. To be called where a forward pass begins."""
        tensors = list(tensors_in(inputs))
        found = self._by_memory(tensors)
        if len({drawn.factor for drawn in found}) > 1:
            raise ConfigError(
                "one forward pass is given tensors of two batches that weigh differently "
                f"(this rank's shares of them are {_shares(found)} times the mean share)",
                remedy="give the model one batch at a time, or use drop_last=True for both loaders",
            )
        if found:
            drawn: Drawn | None = found[-1]
        else:
            drawn = self._by_order(tensors, ask)
        if drawn is None:
            return 1.0
        self._use(drawn, sure=bool(found))
        if not found:  # what was made of the batch belongs to it: another pass over the same tensors is certain
            for tensor in tensors[:4]:
                place = _storage_range(tensor)
                if place is not None:
                    drawn.places.append(place)
                    self._by_storage.setdefault(place.key, []).append((place, drawn))
        return drawn.factor

    def used_unseen(self) -> float | None:
        """Return the weight for a backward pass of which no forward pass of a model told; None: keep the last."""
        if not self._waiting:
            return None
        if len({drawn.factor for drawn in self._waiting}) > 1:
            raise _uncertain(self._waiting, "the distributed model itself was not called")
        self._use(self._waiting[0], sure=False)
        return self._current.factor if self._current is not None else None

    def _by_memory(self, tensors: Sequence[torch.Tensor]) -> list[Drawn]:
        found: list[Drawn] = []
        for tensor in tensors:
            place = _storage_range(tensor)
            known = () if place is None else self._by_storage.get(place.key, ())
            assert place is not None or not known, "only what has a place is known"
            if place is not None and len(known) > 1:  # batches that are views of one large tensor
                known = [entry for entry in known if entry[0].overlaps(place)]
            # The newest: the same rows may have been another batch in an earlier epoch.
            found += [known[-1][1]] if known and known[-1][1] not in found else []
        return found

    def _by_order(self, tensors: Sequence[torch.Tensor], ask: Ask) -> Drawn | None:
        current, waiting = self._current, list(self._waiting)
        if not waiting:
            return None if current is None or current.is_over else current
        candidates = waiting
        if current is not None and (waiting[0].number <= current.used_after or waiting[0].origin == self._ahead):
            candidates = [current, *waiting]  # drawn ahead, so the one in use may be used once more
        if len({drawn.factor for drawn in candidates}) == 1:
            return waiting[0]
        answers = ask([drawn.may_be(tensors) for drawn in candidates])
        if len({len(each) for each in answers}) == 1:
            left = [drawn for i, drawn in enumerate(candidates) if all(fits[i] for fits in answers)]
            if len({drawn.factor for drawn in left}) == 1:
                fresh = [drawn for drawn in left if drawn is not current]
                return (fresh or left)[0]
        raise _uncertain(candidates, "it is given tensors that no loader handed out")

    def _use(self, drawn: Drawn, *, sure: bool) -> None:
        if drawn.used_after < 0:
            drawn.used_after = self._count
            self._waiting.remove(drawn)
            if self._waiting and self._waiting[0].number < drawn.number:
                self._waiting = [other for other in self._waiting if not _was_skipped(other, drawn, sure)]
            if any(other.origin == drawn.origin for other in self._waiting):
                self._ahead = drawn.origin
        self._current = drawn

    def _clean(self) -> None:
        """Forget memory that is not referenced any more, and views that will not come again."""
        newest = {
            drawn.origin.loader: drawn.origin.epoch for kept in self._by_storage.values() for _, drawn in kept
        }
        for key, kept in list(self._by_storage.items()):
            left = [
                (place, drawn)
                for place, drawn in kept
                if not place.storage.expired()
                and not (
                    place.is_part and drawn.used_after >= 0 and drawn.origin.epoch < newest[drawn.origin.loader]
                )
            ]
            if left:
                self._by_storage[key] = left
            else:
                del self._by_storage[key]
        self._clean_at = max(64, 2 * len(self._by_storage))


class _StorageRange(NamedTuple):
    """Where a tensor lies. The storage's address is not reused while this exists."""

    storage: StorageWeakRef
    key: int
    begin: int
    end: int
    is_part: bool
    """Whether the storage is much larger than the tensor."""

    def overlaps(self, other: _StorageRange) -> bool:
        return self.begin < other.end and other.begin < self.end


def _storage_range(tensor: torch.Tensor) -> _StorageRange | None:
    with suppress(RuntimeError, NotImplementedError):  # sparse, nested and fake tensors have no one place
        storage = tensor.untyped_storage()
        begin, strides = tensor.data_ptr(), tensor.stride()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True) if length)
        end = begin + (last + 1) * tensor.element_size() if tensor.numel() else begin
        return _StorageRange(
            StorageWeakRef(storage), storage._cdata, begin, end, storage.nbytes() > 2 * (end - begin) + 4096
        )
    return None


def _was_skipped(other: Drawn, used: Drawn, sure: bool) -> bool:
    """Return whether a loop has passed `other` over: it uses a later one of the same loader."""
    if other.number > used.number or other.origin.loader != used.origin.loader:
        return False
    return other.origin.epoch < used.origin.epoch or (sure and other.is_gone)


def _uncertain(candidates: Sequence[Drawn], why: str) -> ConfigError:
    return ConfigError(
        f"fd.shard: it is not certain which of {len(candidates)} batches the model sees, and they weigh "
        f"differently (this rank's shares are {_shares(candidates)} times the mean share): they were drawn ahead, "
        f"and {why}",
        remedy=_REMEDY,
    )


def _shares(batches: Sequence[Drawn]) -> str:
    return ", ".join(f"{factor:.4g}" for factor in dict.fromkeys(drawn.factor for drawn in batches))


# How much of the global batch this rank holds, so that a mean over ranks is the mean over samples.


# Which epoch the samples of a batch are of: compared between the ranks at each exchange of gradients.
class EpochInUse:
    """The epoch of the batch that was handed out last, in the thread that trains."""

    def __init__(self) -> None:
        self._current: Origin | None = None
        self._left_open: set[Origin] = set()
        """Loops that another one came between before they ended."""
        self._is_mixed = False
        self.number = 0
        """What must be equal on all ranks; 0 where there is nothing to compare."""

    def hand_out(self, origin: Origin) -> None:
        """A batch of `origin` is used next."""
        if origin == self._current:
            return
        if self._current is not None:
            self._left_open.add(self._current)
        self._is_mixed = self._is_mixed or origin in self._left_open
        self._current = origin
        self.number = 0 if self._is_mixed else origin.order

    def loop_ends(self, origin: Origin) -> None:
        """No more batches come from `origin`."""
        self._left_open.discard(origin)
        if self._current == origin:
            self._current = None
            self.number = 0


# How many samples of this rank a backward pass is of, where a loader of `fd.shard` knows.
class SamplesInUse:
    """The samples of the batch that was handed out last."""

    def __init__(self) -> None:
        self._by_loader: dict[int, int] = {}
        """Batches that were handed out and that no backward pass has followed."""
        self._known: int | None = None

    def hand_out(self, loader: int, samples: int) -> None:
        """A loader, by its number, hands out a batch of so many samples of this rank; 0 for a placeholder."""
        self._by_loader[loader] = samples

    def of_pass(self) -> int | None:
        """Return the samples of the backward pass that begins; None: not known.

        Several passes may use one batch. Batches of two loaders in one pass are not added up: what its loss is
        a mean over is not known.
        """
        if self._by_loader:
            several = [*self._by_loader.values()]
            self._known = several[0] if len(several) == 1 else None
            self._by_loader.clear()
        return self._known


@dataclass
class BatchWeight:
    """The current factor, and who wants to know before it changes."""

    factor: float = 1.0
    by_samples: float = 1.0
    """The factor by samples, which is `factor` unless the loop gave a count. See [Note: weights by count]."""
    count_number: int = 0
    """Which of the loop's counts is in use; 0: none."""
    watches: bool = False
    """Whether batches may be unequal, so that it matters which of them is in use."""
    epoch: EpochInUse = field(default_factory=EpochInUse)
    """Which epoch the samples are of."""
    samples: SamplesInUse = field(default_factory=SamplesInUse)
    """How many they are."""
    _listeners: Listeners = field(default_factory=Listeners)
    _drawn: DrawnBatches = field(default_factory=DrawnBatches)
    _thread: int = field(default_factory=threading.get_ident)
    _entered: float | None = None
    """The factor that a forward pass told since the last backward pass began; None: there was none."""
    _task: int = -1
    """The backward pass whose factor is known, by autograd's number, and that factor."""
    _task_factor: float = 1.0
    _counts_given: int = 0
    _is_placeholder: bool = False
    """Whether the batch in use was a placeholder when the count was given."""

    def set(self, factor: float) -> None:
        """Announce the factor by samples of the batch that is about to be used."""
        self.by_samples = factor
        if not self.count_number:
            self._announce(factor)

    def set_by_count(self, factor: float | None) -> None:
        """Announce the factor by count, which stays until the next call; None: by samples again."""
        if factor is None:
            self.count_number = 0
        else:
            self._counts_given += 1
            self.count_number, self._is_placeholder = self._counts_given, self.by_samples == 0.0
        self._announce(self.by_samples if factor is None else factor)

    def at_backward(self, factor: float) -> float:
        """Return the factor in a backward pass whose forward pass had `factor`."""
        return self.factor if self.count_number else factor

    def _announce(self, factor: float) -> None:
        if factor == self.factor:
            return
        previous, self.factor = self.factor, factor
        self._listeners(previous, factor)

    def subscribe(self, listener: Callable[[float, float], None]) -> None:
        """Call the bound method `listener(previous, new)` on every change, for as long as its object lives."""
        self._listeners.add(listener)

    # -- see [Note: shares follow the batch] ------------------------------------------------

    def hand_out(self, batch: Any, factor: float, samples: int, origin: Origin) -> None:
        """A loader hands out `batch`: it is in use from now on, unless forward passes say otherwise."""
        if self.watches:
            self._drawn.add(batch, factor, samples, origin)
        if threading.get_ident() == self._thread:
            self.epoch.hand_out(origin)
            self.samples.hand_out(origin.loader, samples)
            self.set(factor)

    def loop_ends(self, origin: Origin) -> None:
        """The loop over a loader has ended, by itself or by ``break``."""
        if self.watches:
            self._drawn.loop_ends(origin)
        if threading.get_ident() == self._thread:
            self.epoch.loop_ends(origin)
            self.set(1.0)

    def forward_begins(self, inputs: Any, ask: Ask) -> float:
        """Take the factor of the batch whose tensors `inputs` are, and return it."""
        factor = self._drawn.used_by(inputs, ask)
        self._entered = factor
        self.set(factor)
        return factor

    def backward_begins(self, task: int, factor: float) -> None:
        """Take the factor of the forward pass that backward pass `task` starts from."""
        if task != self._task:
            self._task, self._task_factor = task, factor
            self.set(factor)
        elif factor != self._task_factor:
            raise ConfigError(
                "one backward pass holds the losses of two batches that weigh differently (this rank's shares of "
                f"them are {self._task_factor:.4g} and {factor:.4g} times the mean share)",
                remedy="call backward() for each, or use drop_last=True for both loaders",
            )

    def pass_opens(self, task: int) -> float:
        """Return the factor of backward pass `task`, whose first gradient is ready."""
        if self.watches and task != self._task:
            factor = self._drawn.used_unseen() if self._entered is None else self._entered
            self._task, self._task_factor = task, self.factor if factor is None else factor
            self.set(self._task_factor)
        self._entered = None
        if self.count_number and (self.by_samples == 0.0) != self._is_placeholder:
            raise ConfigError(
                "fd.weight was given the count of another batch than the one in use: batches were drawn ahead, "
                "and one of the two is a placeholder",
                remedy="call fd.weight between the forward pass of the batch and backward()",
            )
        return self.factor
