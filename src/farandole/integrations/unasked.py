"""Records of a training by DistributedDataParallel or FSDP2 that did not ask for them, under ``farandole run``.

The shim of the launcher (`launch/job/shim`) calls `watch` with each model that the script wraps or shards.

[Note: when recording begins] As `fd.init` waits for all ranks, it needs a place where all of them come. A forward
pass is none: one rank may try the model alone. The first step of the optimizer after a backward pass that
exchanged the gradients is one: replicas that step unequally are no replicas. And every rank has left a key in the
store by then, when it wrapped the model, if it can record at all; so all ranks decide alike, without waiting.
No rank can run a pass of a sharded model alone, and a shard has a gradient only after an exchange.

[Note: the outermost] Blocks are sharded before the model that they are in, and each is one of FSDP2's models until
then. The last one that was sharded around them is the one that is recorded. Blocks that nothing is around are no
model that an optimizer has the parameters of: they are not recorded.

[Note: hooks in hooks] Torch runs the hooks of all optimizers, then those of the one that steps, and neither may
change while it is run. `fd.init` adds to the first; so it is called from the second, to which all that is
necessary was added before.

Nothing here raises. A world that the script has made itself is left to the script.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.device.accelerator import same_device
from ..comm.world.world import World, has_world, world
from ..core.env import read_elastic_settings, read_run_settings, recording_is_wanted
from ..core.rank_variables import read_rank_variables
from ..core.vocabulary.events import LIGHTNING, SETUP_LOOP, TRAINER, Setup
from ..core.vocabulary.text import write_notice
from ..parallel.instrument.phase_hooks import reduce_to_nothing, time_optimizer, watch_model, watch_optimizer
from ..parallel.instrument.training_facts import watch_buckets
from ..train.data.loader_watch import watch_loaders
from ..train.record import note_wrapper, watch_units, wrapper_of
from ..train.session import init, shutdown

_KEY = "farandole/unasked/{}"
_LOOPS = {"transformers.trainer": TRAINER, "lightning.pytorch.": LIGHTNING}
"""By the beginning of their modules' names."""
_MOST_STEPS = 64
"""Steps in which the optimizer of a model is looked for."""

_waiting: weakref.WeakKeyDictionary[nn.Module, _Meeting] = weakref.WeakKeyDictionary()
"""Models that may be recorded from a step on."""
_ours: weakref.WeakSet[World] = weakref.WeakSet()


def watch(model: nn.Module) -> None:
    """Record the training of `model` from its first step on, where that is possible and the script does not."""
    with suppress(Exception):
        place, size = read_rank_variables(), dist.get_world_size()
        if (
            not recording_is_wanted()
            or read_run_settings().run_directory is None
            or read_elastic_settings() is not None
            or place is None
            or (place.rank, place.size) != (dist.get_rank(), size)
            or not _is_on_all(model, size)
            or _is_others()
        ):
            return
        for inner in model.modules():  # see [Note: the outermost]
            _waiting.pop(inner, None)
        _store().set(_KEY.format(place.rank), "")
        _waiting[model] = _Meeting(model)
        model.register_forward_pre_hook(_FirstForward(model))
        _watch_steps()


def _is_on_all(model: nn.Module, size: int) -> bool:
    """Return whether all ranks exchange the gradients of `model`, and each has samples of its own."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_world_size(model.process_group) == size
    shards: list[Any] = [each for each in model.parameters() if hasattr(each, "device_mesh")]
    return bool(shards) and all(
        each.device_mesh.size() == size
        and (each.device_mesh.ndim == 1 or (each.device_mesh.ndim == 2 and each.placements[0].is_replicate()))
        for each in shards
    )


class _Meeting:
    """Whether a backward pass of a model has exchanged its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.has_been = False
        self.steps_left = _MOST_STEPS
        self.loop = _loop_around(sys._getframe())

    def backward_ends(self) -> tuple[()]:
        """In the place of what returns the times of buckets."""
        model: Any = self._model()
        if model is not None and model.require_forward_param_sync and not model._join_config.enable:
            self.has_been = True
        return ()


def _loop_around(frame: FrameType | None) -> str:
    """Return whose loop wraps a model here: one of `LOOPS`; empty: the script's own."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if found := next((loop for name, loop in _LOOPS.items() if module.startswith(name)), ""):
            return found
        frame = frame.f_back
    return ""


class _FirstForward:
    """A forward pre hook that hooks the first pass of the training, and is gone then."""

    def __init__(self, model: nn.Module) -> None:
        self._meeting = _waiting[model]

    def __reduce__(self) -> Any:
        return reduce_to_nothing()

    def __call__(self, model: nn.Module, arguments: Any) -> None:
        # What is in DDP, as Lightning switches that alone between evaluation and training.
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        if torch.compiler.is_compiling() or not (inner.training and torch.is_grad_enabled()):
            return
        with suppress(Exception):
            hooks = model._forward_pre_hooks
            for number in [number for number, hook in hooks.items() if hook is self]:
                del hooks[number]
            if _is_others():
                _waiting.pop(model, None)
                return
            if not isinstance(model, DistributedDataParallel):
                self._meeting.has_been = True
                return
            passes = watch_model(model, exchanges=True)
            passes.take_buckets = self._meeting.backward_ends
            passes.forward_begins(model, arguments, {})  # its own hook comes from the next pass on


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """See [Note: hooks in hooks]."""
    if torch.compiler.is_compiling() or not _waiting:
        return
    with suppress(Exception):
        is_inside = torch._C._current_graph_task_id() != -1
        if is_inside or threading.current_thread() is not threading.main_thread():
            return
        met = [(model, meeting) for model, meeting in _waiting.items() if meeting.has_been]
        every = [each for group in optimizer.param_groups for each in group["params"]] if met else []
        stepped = {id(each) for each in every if each.grad is not None}
        for model, meeting in met:
            own = {id(parameter) for parameter in model.parameters()}
            meeting.steps_left -= 1
            is_whole = isinstance(model, DistributedDataParallel) or stepped <= own
            if is_whole and stepped & own:
                optimizer.register_step_pre_hook(_Begin(model, meeting.loop))
                time_optimizer(optimizer)
                meeting.steps_left = 0
            if not meeting.steps_left:
                del _waiting[model]


class _Begin:
    """A pre hook of the optimizer that does its work once."""

    def __init__(self, model: nn.Module, loop: str) -> None:
        self._model: nn.Module | None = model
        self._loop = loop

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        with suppress(Exception):
            here = _world_for(model)
            if here is None:
                return
            watch_optimizer(optimizer, here)
            watch_loaders(here)
            if self._loop:
                here.session.recorder.record(Setup({SETUP_LOOP: self._loop}))
            if isinstance(model, DistributedDataParallel):
                watch_model(model).take_buckets = watch_buckets(model)
            else:
                watch_model(model).refuses_compiled_autograd = False  # a script that does not know us
                watch_units(model, here)


def _world_for(model: nn.Module) -> World | None:
    if has_world():
        return None if _is_others() else world()
    if not _store().check([_KEY.format(rank) for rank in range(dist.get_world_size())]):
        return None
    device = next(model.parameters()).device
    try:
        with same_device(device):
            here = init(device=device)
    except Exception as problem:
        write_notice(f"note: nothing is recorded: {problem}")
        shutdown()
        return None
    _ours.add(here)
    _end_with_group()
    note_wrapper(here, wrapper_of(model))
    return here


@cache
def _end_with_group() -> None:
    """Leave our world when the script destroys its group: it may make the next one at the same address."""
    module: Any = dist.distributed_c10d
    update = module._update_default_pg

    def update_and_leave(group: Any) -> None:
        update(group)
        if group is None and has_world() and not _is_others():
            with suppress(Exception):
                shutdown()

    module._update_default_pg = update_and_leave


def _is_others() -> bool:
    """Return whether there is a world that the script has made."""
    return has_world() and world() not in _ours


def _store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
