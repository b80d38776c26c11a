"""What a fix depends on and no clock shows: threads, cores, the loader's workers, the optimizer's options.

Facts are read where the code passes anyway and recorded when they change. Nothing is asked of a device.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...comm.codecs.eligibility import can_have
from ...comm.world.world import World
from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.events import Setup, SetupValue
from ...core.vocabulary.rank_lists import write_numbers
from ...core.vocabulary.run_files import hide_secrets

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

    def after_step(self, step: int) -> None:
        """Look again at what a script may change at any time; ever more rarely."""
        if step & (step - 1) == 0:
            computes = self._known.get(events.SETUP_FRONT_END) in (None, "keras on torch")
            self.note(
                {
                    events.SETUP_THREADS: torch.get_num_threads() if computes else None,
                    events.SETUP_CORES: len(own_cores()) or os.cpu_count(),
                    events.SETUP_CORE_LIST: write_numbers(own_cores()) or None,
                    events.SETUP_FROZEN: not gc.isenabled() or gc.get_freeze_count() > 0,
                }
            )


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
