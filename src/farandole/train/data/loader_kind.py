"""What kind of DataLoader `fd.shard` was given: a subclass keeps its behaviour, or is refused by name.

[Note: loaders of other classes] The divided loader is of a class made of ours and the user's, so that an
``__iter__`` of the user's runs, and ``super().__iter__()`` in it gives the batches of this rank. A loader that
gets its batches elsewhere cannot be divided like this: one that keeps an iterator from its constructor, or
whose batch sampler was replaced.
"""

from __future__ import annotations

from collections.abc import Sized
from contextlib import suppress
from functools import lru_cache
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...core.vocabulary.errors import ConfigError

_PLAIN = "give a plain DataLoader of the same dataset, and do in the loop what the class does to batches"


@lru_cache(maxsize=64)
def divided_kind(ours: type[Any], theirs: type[Any]) -> type[Any]:
    """Return the class of a loader that is both `ours` and `theirs`."""
    if theirs is DataLoader:
        return ours
    members = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "__doc__": theirs.__doc__}
    try:
        return type(theirs.__name__, (ours, theirs), members)
    except TypeError as problem:
        raise ConfigError(
            f"shard: cannot divide a loader of class {theirs.__name__}: {problem}", remedy=_PLAIN
        ) from None


def counts_itself(kind: type[Any]) -> bool:
    """Return whether a divided loader's class has a ``__len__`` of the user's."""
    ours_and_theirs = [each for each in kind.__mro__ if "__len__" in vars(each) and issubclass(each, DataLoader)]
    return len(ours_and_theirs) > 2  # ours and torch's are always there


def refuse_divided(loader: DataLoader[Any], ours: type[Any]) -> None:
    """Raise `ConfigError` for a loader whose samples are divided over the ranks already."""
    found: Any = loader
    for _ in range(4):  # samplers within samplers
        if isinstance(found, (ours, DistributedSampler)) or _names_many(found):
            raise ConfigError(
                f"shard: the loader is divided already (by a {type(found).__name__})",
                remedy="give the plain loader, as one process would use it",
            )
        inner = getattr(found, "batch_sampler", None) if found is loader else None
        inner = inner if inner is not None else getattr(found, "sampler", None)
        if inner is None:
            return
        found = inner


def _names_many(found: Any) -> bool:
    """Return whether a sampler of another library says how many take part."""
    return any(
        isinstance(n := getattr(found, name, 1), int) and n > 1 for name in ("num_replicas", "num_processes")
    )


def refuse_strange(loader: DataLoader[Any]) -> None:
    """Raise `ConfigError` for a subclass that cannot run over other batches than those it was made for."""
    name = type(loader).__name__
    if any(each.__module__.partition(".")[0] == "torchdata" for each in type(loader).__mro__):
        raise ConfigError(
            f"shard: a {name} of torchdata keeps a place of its own, which knows nothing of ranks",
            remedy="give a DataLoader of torch.utils.data: the sharded loader has state_dict and load_state_dict",
        )
    for attribute, value in vars(loader).items():
        if isinstance(value, _BaseDataLoaderIter) and attribute != "_iterator":
            raise no_draw(type(loader), f"keeps an iterator from its constructor, in its attribute {attribute!r}")
    replaced = type(loader.batch_sampler)
    if loader.batch_size is not None and replaced not in (BatchSampler, type(None)):
        raise ConfigError(
            f"shard: the batch_sampler of this {name} was replaced by a {replaced.__name__} after it was made",
            remedy="give a plain DataLoader with batch_size, or one made with batch_sampler=",
        )


def no_draw(kind: type[Any], why: str) -> ConfigError:
    """Return the error about a class whose batches do not come from torch's own iteration."""
    return ConfigError(f"shard: a loader of class {kind.__name__} {why}: it cannot be divided", remedy=_PLAIN)


def facts_of(loader: DataLoader[Any]) -> list[tuple[str, Any]]:
    """Return what must be the same on all ranks, so that each takes its part of the same batches."""
    dataset, batches = loader.dataset, loader.batch_sampler
    facts: list[tuple[str, Any]] = [
        ("class of the loader", type(loader).__name__),
        ("class of the dataset", type(dataset).__name__),
        ("batch_size", loader.batch_size),
        ("drop_last", loader.drop_last),
    ]
    if isinstance(dataset, IterableDataset):
        return facts
    facts.append(("length of the dataset", _length(dataset)))
    if loader.batch_size is None and batches is not None:
        return [*facts, ("class of the batch_sampler", type(batches).__name__), ("batches", _length(batches))]
    sampler = loader.sampler
    return [*facts, ("class of the sampler", type(sampler).__name__), ("samples", _length(sampler))]


def _length(value: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        if isinstance(value, Sized):
            return len(value)
    return None
