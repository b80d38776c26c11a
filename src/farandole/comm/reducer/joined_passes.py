"""Backward passes that are one: what autograd runs in several calls, and reducers count once.

[Note: joined passes] A zero-bubble schedule computes the gradients of weights apart from those of inputs, in as
many calls of autograd as the graph has places that feed parameters. How many these are may differ from rank to
rank: a micro-batch of one sample has another graph. Reducers compare the number of passes with other ranks, and
from ZeRO stage 2 on exchange after each one, so all calls for one micro-batch are one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch

_numbers = count(-2, -1)  # those of autograd are not negative, and -1 is none
_joined: list[tuple[int, list[Callable[[], None]]]] = []
"""Numbers of those that run, and what is called at their ends."""


@contextmanager
def joined_passes() -> Iterator[None]:
    """Let the backward passes inside be one, which ends here; on an error it stays open, as an interrupted one."""
    ends: list[Callable[[], None]] = []
    _joined.append((next(_numbers), ends))
    try:
        yield
        for end in ends:  # an end may add another one
            end()
    finally:
        _joined.pop()


def number_of_pass() -> int:
    """Return the number of the backward pass that runs."""
    return _joined[-1][0] if _joined else torch._C._current_graph_task_id()


def at_end_of_pass(end: Callable[[], None]) -> None:
    """Call `end` when the backward pass that runs has ended."""
    if _joined:
        _joined[-1][1].append(end)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(end)
