"""What a fix depends on and no clock shows: threads, cores, the loader's workers, the optimizer's options.

Facts are read where the code passes anyway and recorded when they change. Nothing is asked of a device.

[Note: the same bits as unobserved] Without a hook the reducer multiplies each gradient by 1/N while it copies
it into the bucket, and sums. With one it copies, so the hook multiplies: the same products, the same sum, one
more pass over the bucket. N is the group's size; under ``join(divide_by_initial_world_size=False)`` the
reducer divides by those that are left, which a hook cannot know.

[Note: memory of others] The planner predicts what a model and its optimizers hold. A process on a CPU holds more:
the interpreter, libraries, data. What is resident when the plan is applied, less the tensors of the model and the
optimizers, is that rest, which is taken off the peak. On an accelerator the allocator counts tensors alone.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...comm.codecs.registry import can_have
from ...comm.device.accelerator import peak_bytes
from ...comm.world.session import next_power_of_two
from ...comm.world.world import World
from ...core.env import read_run_settings
from ...core.host.process_status import peak_resident_bytes, resident_bytes
from ...core.link import ring_sent_bytes
from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.events import BucketTimes, Setup, SetupValue
from ...core.vocabulary.run_files import hide_secrets
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_numbers
from ..model import Strategy

# The buckets of a stock DistributedDataParallel, timed by a hook that does what it does without one.


def watch_buckets(model: DistributedDataParallel) -> Callable[[], tuple[BucketTimes, ...]]:
    """Time the buckets of `model`; return what gives, and forgets, those of the exchange that has ended.

    A model that has a communication hook keeps it, and its buckets are not seen.
    """
    buckets = _watched.get(model)
    if buckets is None:
        buckets = _watched[model] = _Buckets(model.process_group)
        if not getattr(model, "_comm_hooks", None) and model.logger is not None:
            # The reducer reads annotations, and refuses those that are texts.
            try:
                model.register_comm_hook(None, lambda state, bucket: buckets.reduce(bucket))
            finally:  # the hook is the reducer's; this list would be saved with the model
                getattr(model, "_comm_hooks", []).clear()
    return buckets.take


_watched: weakref.WeakKeyDictionary[DistributedDataParallel, _Buckets] = weakref.WeakKeyDictionary()


class _Buckets:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._open: list[list[Any]] = []

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        size = self._group.size()
        tensor.mul_(1.0 / size)
        nbytes = tensor.numel() * tensor.element_size()
        times: list[Any] = [nbytes, ring_sent_bytes(nbytes, size), time.monotonic(), 0.0]
        self._open.append(times)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            times[3] = time.monotonic()
            return future.value()[0]

        made: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return made

    def take(self) -> tuple[BucketTimes, ...]:
        closed, self._open = self._open, []
        now = time.monotonic()
        return tuple(
            BucketTimes(nbytes, sent, None, launch, launch, launch, end or now)
            for nbytes, sent, launch, end in closed
        )


_TEXT_KEPT = 4000
_OF_ELEMENTS = CodecSpec.parse("int8")


class TrainingFacts:
    """The facts of one session; `note` records those that are new."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._known: dict[str, SetupValue] = {}

    def note(self, values: Mapping[str, SetupValue]) -> None:
        """Record the values that differ from what was recorded."""
        changed = {name: value for name, value in values.items() if self._known.get(name, ...) != value}
        if changed:
            self._known.update(changed)
            self._here.session.recorder.record(Setup(changed))

    def known(self, name: str) -> SetupValue:
        """Return what was recorded by a name; None: nothing."""
        return self._known.get(name)

    def after_step(self, step: int) -> int:
        """Look again at what a script may change at any time; ever more rarely."""
        computes = self._known.get(events.SETUP_FRONT_END) in (None, "keras on torch")
        self.note(
            {
                events.SETUP_THREADS: torch.get_num_threads() if computes else None,
                events.SETUP_CORES: len(own_cores()) or os.cpu_count(),
                events.SETUP_CORE_LIST: write_numbers(own_cores()) or None,
                events.SETUP_FROZEN: not gc.isenabled() or gc.get_freeze_count() > 0,
            }
        )
        return next_power_of_two(step)


def own_cores() -> set[int]:
    """Return the cores that this process may run on; none where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def facts_of(here: World) -> TrainingFacts:
    """Return the facts of the world's session."""
    return here.session.keep(TrainingFacts, lambda: TrainingFacts(here))


def watch_facts(here: World) -> None:
    """Record the facts of this rank from now on."""
    facts = facts_of(here)
    facts.note({events.SETUP_DEVICE: here.device.type})
    if here.rank == 0:
        words = [word for word in getattr(sys, "orig_argv", sys.argv) if word]
        facts.note({events.SETUP_ARGUMENTS: shlex.join(hide_secrets(words))[:_TEXT_KEPT]})
    here.session.steps.after_step(facts.after_step)


def note_loader(here: World, loader: Any, worker_cores: int | None, prefetch: int | None) -> None:
    """Record how a loader loads, when an iteration begins.

    `worker_cores`: how many cores its workers may use; `prefetch`: how many batches a thread draws ahead.
    """
    facts_of(here).note(
        {
            events.SETUP_WORKERS: _count(getattr(loader, "num_workers", None)),
            events.SETUP_PERSISTENT: _flag(getattr(loader, "persistent_workers", None)),
            events.SETUP_BATCH: _count(getattr(loader, "batch_size", None)),
            events.SETUP_WORKER_CORES: worker_cores,
            events.SETUP_PREFETCH: prefetch,
        }
    )


def note_workers(here: World, workers: Any) -> None:
    """Record how many workers a loader has of which only the iterator is known."""
    facts_of(here).note({events.SETUP_WORKERS: _count(workers)})


def note_optimizer(here: World, optimizer: Optimizer) -> None:
    """Record how the optimizer that counts the steps computes."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    parameters = [each for other in optimizer.param_groups for each in other["params"]]
    facts_of(here).note(
        {
            events.SETUP_OPTIMIZER: type(optimizer).__name__,
            events.SETUP_FUSED: _flag(group.get("fused")),
            events.SETUP_FOREACH: _flag(group.get("foreach")),
            events.SETUP_MOMENTUM: bool(group["momentum"]) if "momentum" in group else None,
            events.SETUP_TENSORS: len(parameters),
            events.SETUP_ELEMENTS: sum(each.numel() for each in parameters),
            events.SETUP_CODABLE: _codable_share(parameters),
        }
    )


def _codable_share(parameters: Sequence[torch.Tensor]) -> float | None:
    """Return the share that codecs take; None of FSDP1's flat parameters, whose matrices are not seen."""
    trained = [each for each in parameters if each.requires_grad]
    if any(type(each).__name__ == "FlatParameter" or hasattr(each, "_fsdp_flattened") for each in trained):
        return None
    coded = sum(each.numel() for each in trained if can_have(each, _OF_ELEMENTS))
    return coded / max(1, sum(each.numel() for each in trained))


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


# Records a plan that the script gave, what a plan predicts, and what its peak of memory is measured against.


class PredictedFacts(Strategy):
    """The facts of one model."""

    def is_asked(self) -> bool:
        """Where the plan says what it should take, or comes from the script."""
        return bool(self.plan.predicted) or self.call.given is not None

    def check(self) -> None:
        """Look what is resident before anything is changed."""
        predicted = bool(self.plan.predicted)
        self._other_bytes = _other_bytes(self.mesh.here, self.model, self.optimizers) if predicted else None

    def finish(self) -> None:
        """Record them, when the model is divided: what dividing it took is not the training's."""
        here, given = self.mesh.here, self.call.given
        if given is not None and read_run_settings().plan_file is None:
            changed = {key: value for key, (value, _) in given.differences(Plan()).items()}
            here.session.recorder.record(events.Setup({events.SETUP_PLAN: json.dumps(changed)}))
        if self.plan.predicted:
            facts: dict[str, events.SetupValue] = {
                events.SETUP_PREDICTED: json.dumps(dict(self.plan.predicted)),
                events.SETUP_OTHER_BYTES: self._other_bytes,
                events.SETUP_PEAK_BEFORE: peak_of(here)(),
            }
            here.session.recorder.record(events.Setup(facts))


def peak_of(here: World) -> Callable[[], int | None]:
    """Return what gives the most bytes until now: allocated on this rank's accelerator, or resident."""
    return peak_resident_bytes if here.device.type == "cpu" else partial(peak_bytes, here.device)


def _other_bytes(here: World, model: nn.Module, optimizers: Sequence[Optimizer]) -> int | None:
    """Return what is not the model's. See [Note: memory of others]."""
    if here.device.type != "cpu":
        return 0
    resident = resident_bytes()
    if resident is None:
        return None
    parameters = [*model.parameters()]
    states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
    tensors = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None), *states]
    own = {}
    for each in tensors:
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            own[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return max(0, resident - sum(own.values()))
