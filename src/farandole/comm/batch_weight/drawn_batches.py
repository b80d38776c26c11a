"""Which of the batches that were drawn a model sees: batches may be drawn long before they are used.

[Note: shares follow the batch] A loop may fetch ahead (a prefetcher, ``list(loader)``, several batches for one
step), so the batch drawn last is not always the one in use. What a loader hands out is noted with its weight,
and the model's forward pass looks up the tensors that it is given:

1. by memory: the tensors, or views of them, are those of a batch that was handed out;
2. else (moved to another device, cast, augmented) by order: batches are used in the order in which they were
   drawn. Where that leaves batches of unequal weight to choose from, the ranks compare sizes, and what is
   still not certain is an error on all of them.

The weight goes with the graph: backward begins with the weight of the pass whose output it starts from. Nothing is
noted before a loader begins an epoch whose batches may be unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...core.vocabulary.errors import ConfigError
from .nested_tensors import tensors_in

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
