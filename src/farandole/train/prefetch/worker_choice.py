"""``fd.prefetch(loader, workers="auto")``: how many workers a loader gets, by what its batches and the steps take.

[Note: workers by measurement] The first steps draw in the loop's thread, one after the other, so that nothing
contends: what a batch takes, what of it is CPU work, and what the rest of a step takes. By the formulas of the
diagnosis (`loader_fixes`) follows the smallest number of workers with the shortest step. Torch starts workers
where an iteration begins; until then the thread loads, and steps are timed, too. With workers they have to be
shorter, or there are none again. Each rank chooses for itself.
"""

from __future__ import annotations

import os
import statistics
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...comm.world.world import has_world, world
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.units import format_seconds, format_share
from ...observe.diagnose.finders.loader_fixes import LoaderFacts
from ...parallel.instrument.training_facts import own_cores
from ..data.ahead.told_later import LoopWait
from ..data.worker_cores import LEAST_BATCHES, TunedLoaders, worker_cores

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
