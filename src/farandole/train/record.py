"""`fd.record`: records of a model that something else trains: DistributedDataParallel, FSDP2, one process.

Hooks that look and change nothing. See `parallel.phase_hooks` for what is a phase; buckets of
DistributedDataParallel are seen by a communication hook that does what it does without one.
"""

from __future__ import annotations

import copyreg
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm.world.world import has_world, world
from ..core.environ.env import read_run_settings
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import DataWait
from ..parallel.instrument.ddp_buckets import watch_buckets
from ..parallel.instrument.phase_hooks import watch_model, watch_optimizer
from .data.loader import ShardedLoader
from .data.loader_watch import leave_out, samples_of
from .session import init


def record(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    loader: Any = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Record where the time of a training goes that Farandole does not distribute.

    For a model in ``DistributedDataParallel``, sharded by FSDP2, or on one rank. Call it on all ranks, after the
    model was wrapped or sharded. Results stay the same, bit for bit. Calls `fd.init` if necessary.

    Args:
        model: the wrapped, sharded or plain model.
        optimizer: its optimizer, or a list; the first one counts the steps.
        loader: a DataLoader or another iterable of a Python class, whose wait for batches is recorded too.
        run_dir: directory for the events; by default the run directory of ``farandole run``.

    Raises:
        ConfigError: there is no run directory, or an argument has the wrong type.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not isinstance(model, nn.Module):
        raise ConfigError(f"record: expected a torch.nn.Module, got {type(model).__name__}")
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "nothing"
        raise ConfigError(f"record: expected a torch.optim.Optimizer or several, got {kinds}")
    if loader is not None:
        _refuse_wrong_loader(loader)
    if not has_world():
        if run_dir is None and read_run_settings().run_directory is None:
            raise ConfigError(
                "record: there is nowhere to write to",
                remedy='give run_dir="runs/name", or start with: farandole run -- python train.py',
            )
        init(run_dir=run_dir)
    elif run_dir is not None:
        raise ConfigError(
            f"record: run_dir={os.fspath(run_dir)!r}, but farandole.init was called before",
            remedy="give run_dir to farandole.init",
        )
    here = world()
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    watch = watch_model(model, exchanges=is_ddp)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        watch.take_buckets = watch_buckets(model)
    for each in optimizers:
        watch_optimizer(each, here)
    if loader is not None and not isinstance(loader, ShardedLoader):
        _watch_loader(loader)


def _refuse_wrong_loader(loader: Any) -> None:
    if isinstance(loader, Iterator) or not hasattr(type(loader), "__iter__"):
        raise ConfigError(
            f"record: the loader is a {type(loader).__name__}, expected an object that each epoch iterates over",
            remedy="give the DataLoader itself",
        )
    if not type(loader).__flags__ & _HEAP_TYPE:
        raise ConfigError(
            f"record: the loader is a {type(loader).__name__}, whose iteration cannot be timed",
            remedy="give a torch.utils.data.DataLoader, or an object of a class of yours",
        )


_HEAP_TYPE = 1 << 9
"""A class made by Python code: its objects may change to a subclass of it."""


def _watch_loader(loader: Any) -> None:
    """Make this one object time its iteration: it becomes one of a subclass of its own class."""
    kind = type(loader)
    if getattr(kind, "_times_iteration", False):
        return

    def iterate(self: Any) -> Iterator[Any]:
        iterator = kind.__iter__(self)
        leave_out(iterator)
        while True:
            begin = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if has_world() and torch.is_grad_enabled():
                world().session.recorder.record(DataWait(begin, time.monotonic(), samples_of(batch)))
            yield batch

    members = {
        "__iter__": iterate,
        "_times_iteration": True,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, protocol: _reduce_plain(self, kind, protocol),
    }
    loader.__class__ = type(kind.__name__, (kind,), members)


def _reduce_plain(loader: Any, kind: type, protocol: int) -> Any:
    """Save the loader as one of its plain class: the subclass is known to this process alone."""
    reduce_ex: Any = kind.__reduce_ex__
    reduced = reduce_ex(loader, protocol)
    if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return (_new, (kind, *reduced[1][1:]), *reduced[2:])


def _new(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)
