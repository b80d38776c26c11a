"""The end of a backward pass in which several engines took part: they finish in one order on all ranks.

[Note: one order] Graphs of two models may run in another order on another rank. An engine that ended its
exchange as soon as autograd came to its end would wait for a rank that waits, in another engine, for this one.
So what each has left to launch is launched first, in the order in which the engines were made, and only then is
anything waited for.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch


class Exchanging(Protocol):
    """An engine whose pass is over."""

    order: int
    """When it was made, among those of this process."""

    def launch_what_is_left(self) -> None:
        """Launch buckets that are not complete; in the first pass, agree on buckets."""

    def land(self) -> None:
        """Wait for everything that was launched."""


_waiting: dict[int, list[Exchanging]] = {}
"""By autograd's number of the pass."""


def finish_with_others(task: int, engine: Exchanging) -> None:
    """Finish the exchange of `engine` with those of the others, when all have come to the end of pass `task`."""
    if task not in _waiting:
        _waiting[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(partial(_finish, task))
    _waiting[task].append(engine)


def _finish(task: int) -> None:
    engines = sorted(_waiting.pop(task), key=lambda engine: engine.order)
    for engine in engines:
        engine.launch_what_is_left()
    for engine in engines:
        engine.land()
