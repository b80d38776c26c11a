"""`fd.record`: records of a model that something else trains: DistributedDataParallel, FSDP2, one process.

Hooks that look and change nothing. See `parallel.instrument.phase_hooks` for what is a phase; buckets of
DistributedDataParallel are seen by a communication hook that does what it does without one.

[Note: an observer does not raise] Trainers hand out wrapped optimizers, loaders that cannot be hooked and models
of any kind. What cannot be recorded is said in one line, and the training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..comm.world.world import World, has_world, world
from ..core.env import read_run_settings
from ..core.job_plan import resolve_plan
from ..core.vocabulary.errors import FarandoleError
from ..core.vocabulary.events import FSDP2, SETUP_WRAPPER, WRAPPERS, Setup
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.text import write_notice
from ..launch.start.request import vain_plan
from ..parallel.data.model_changes import shared_with
from ..parallel.instrument.phase_hooks import ddp_around, inner_optimizer, watch_model, watch_optimizer
from ..parallel.instrument.training_facts import watch_buckets
from ..parallel.model import DistributedModel
from .data.loader import ShardedLoader
from .data.loader_watch import time_iteration, watch_loaders
from .session import init

T = TypeVar("T")


def record(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    loader: Any = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Record where the time of a training goes that Farandole does not distribute.

    For a model in ``DistributedDataParallel``, sharded by FSDP2, or on one rank. Call it on all ranks, after the
    model was wrapped or sharded. Results stay the same, bit for bit. Calls `fd.init` if necessary. It does not
    raise: what cannot be recorded is said on the standard error, and the training goes on.

    Args:
        model: the wrapped, sharded or plain model.
        optimizer: its optimizer, or a list; the first one counts the steps. Optimizers wrapped by Accelerate or
            Lightning are unwrapped.
        loader: a DataLoader or another iterable of a Python class, whose wait for batches is recorded too.
        run_dir: directory for the events; by default the run directory of ``farandole run``.
    """
    here = _attempt("nothing is recorded", lambda: _world(run_dir))
    if here is None:
        return
    _attempt("forward and backward are not recorded", lambda: _record_model(model, here))
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    _attempt("steps are not recorded", lambda: _record_optimizers(optimizers, here))
    if loader is not None:
        _attempt("the wait for data counts as other time", lambda: _record_loader(loader, here))


class _NotRecordable(Exception):
    """What is wrong with an argument."""


def _attempt(consequence: str, call: Callable[[], T]) -> T | None:
    """See [Note: an observer does not raise]."""
    try:
        return call()
    except (_NotRecordable, FarandoleError) as problem:
        write_notice(f"warning: record: {problem}; {consequence}")
    except Exception as problem:  # of an object of any kind
        write_notice(f"warning: record: {type(problem).__name__}: {problem}; {consequence}")
    return None


def _world(run_dir: str | os.PathLike[str] | None) -> World:
    settings = read_run_settings()
    if not has_world():
        if run_dir is None and settings.run_directory is None:
            raise _NotRecordable(
                'there is nowhere to write to (give run_dir="runs/name", or start with: farandole run -- python '
                "train.py)"
            )
        return init(run_dir=run_dir)
    if run_dir is not None and (settings.run_directory is None or Path(run_dir) != Path(settings.run_directory)):
        write_notice(
            f"warning: record: run_dir={os.fspath(run_dir)!r} is ignored, as farandole.init was called before "
            "(give run_dir to farandole.init)"
        )
    return world()


def _record_model(model: Any, here: World) -> None:
    if not isinstance(model, nn.Module):
        raise _NotRecordable(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    if wrapper is None and here.size > 1 and not wrapper_of(model):
        wrapper = ddp_around(model)  # the bare model: its wrapper exchanges the gradients
    watch = watch_model(model, exchanges=wrapper is not None)
    if wrapper is not None:
        watch.take_buckets = watch_buckets(wrapper)
    name = wrapper_of(model if wrapper is None else wrapper)
    if name and not shared_with(model, DistributedModel.all()):
        note_wrapper(here, name)
        if name == FSDP2:
            watch_units(model, here)


def note_wrapper(here: World, name: str) -> None:
    """Record which of torch's classes exchanges the gradients, and say which keys of the plan it does not heed."""
    here.session.recorder.record(Setup({SETUP_WRAPPER: name}))
    if here.is_main:
        for line in vain_plan(replace(resolve_plan(None), stall_seconds=Plan.stall_seconds)):
            write_notice(line)


def wrapper_of(model: nn.Module) -> str:
    """Return torch's class that exchanges its gradients, or nothing; those of FSDP take a second to import."""
    names = {kind.__name__ for kind in type(model).__mro__}
    return next((name for name in WRAPPERS if name in names), "")


def watch_units(model: nn.Module, here: World) -> None:
    """Record what the units of FSDP2 of `model` exchange, from now on."""
    from ..parallel.zero.exchange_records import watch_stock  # FSDP2 takes a second to import

    watch_stock(model, here)


def _record_optimizers(optimizers: list[Any], here: World) -> None:
    strange = []
    for each in optimizers:
        inner = inner_optimizer(each)
        if inner is None:
            strange.append(type(each).__name__)
        else:
            watch_optimizer(inner, here)
    if strange or not optimizers:
        raise _NotRecordable(
            f"expected a torch.optim.Optimizer or several, got {', '.join(strange) or 'an empty list'}"
        )


def _record_loader(loader: Any, here: World) -> None:
    if isinstance(loader, ShardedLoader):
        return
    if isinstance(loader, Iterator) or not hasattr(type(loader), "__iter__"):
        raise _NotRecordable(
            f"the loader is a {type(loader).__name__}, expected an object that each epoch iterates over"
        )
    if time_iteration(loader) or time_iteration(getattr(loader, "base_dataloader", None)):  # Accelerate's
        return
    if not isinstance(loader, DataLoader):
        raise _NotRecordable(f"the loader is a {type(loader).__name__}, whose iteration cannot be timed")
    watch_loaders(here)
