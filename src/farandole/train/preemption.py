"""`fd.preempted`: whether the job is about to lose its machines, agreed on by all ranks.

[Note: who is told] A scheduler warns with SIGUSR1 (``sbatch --signal=USR1@60``) or SIGTERM (Kubernetes, a
preempted job), some ranks a moment before others. If each rank believed only its own signal, one would
write a checkpoint while another waits for it in an exchange. So the answer is the same on all ranks: yes as
soon as one of them was told. Handlers exist only in programs that ask; elsewhere signals mean what they did. A
scheduler may signal each process, and the launcher passes on its own: a second SIGTERM right after the first is
the same one. A handler that the script had before is called after ours; it cannot end the rank, which has to save.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..comm.engine.redo import ask_all, sum_up
from ..comm.world.world import has_world, world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.text import write_notice
from .data.worker_cores import spare_all_workers

_WARNINGS = (signal.SIGUSR1, signal.SIGTERM)
_SAME_SECONDS = 5.0


@dataclass
class _WarningSignal:
    """Whether this process listens, and the signal that came."""

    listening: bool = False
    by: int = 0
    """The first signal that came; 0: none."""
    asked_seconds: float = 0.0
    """When SIGTERM came first; 0: never."""
    scripts: dict[int, Any] = field(default_factory=dict)
    """The handlers that were there before ours, by signal."""
    replaced: set[int] = field(default_factory=set)
    """Signals whose handler the script has replaced, which was said."""


_warning = _WarningSignal()


def preempted() -> bool:
    """Return whether the job will end soon: whether any rank has received SIGUSR1 or SIGTERM.

    Call it on all ranks once a step, at the same point of the loop and from the first step on. The first call
    installs the signal handlers. Each call is one small exchange. Another SIGTERM, 5 s or more after the first,
    ends the process as without handlers.

    Returns:
        The same bool on all ranks.

    Raises:
        ConfigError: the first call is not in the main thread, where alone Python can handle signals.
    """
    return preempted_or()[0]


def preempted_or(*others: bool) -> list[bool]:
    """Return what `preempted` does, and whether each of `others` is true on any rank, with a single exchange."""
    if not _warning.listening:
        _listen()
    _look_for_handlers()
    if not has_world() or world().size == 1:
        return [_warning.by != 0, *others]
    here = world()
    here.session.asks_all_ranks = True

    def question() -> list[float]:
        flags = torch.tensor([_warning.by != 0, *others], dtype=torch.float32, device=here.device)
        if here.size > 1:
            sum_up(here, flags, "preempted", op=dist.ReduceOp.MAX)
        return flags.tolist()

    return [bool(each) for each in ask_all(here, question)]


def _listen() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "fd.preempted() was first called in a thread", remedy="call it once in the main thread before"
        )
    for number in _WARNINGS:
        _warning.scripts[number] = signal.signal(number, _note)
    _warning.listening = True
    spare_all_workers()


def _look_for_handlers() -> None:
    """Say once that a signal does not warn any more, as the script has replaced our handler."""
    for number in _WARNINGS:
        if number not in _warning.replaced and signal.getsignal(number) is not _note:
            _warning.replaced.add(number)
            if not has_world() or world().is_main:
                write_notice(
                    f"warning: the script has set a handler of {number.name} after Farandole's: when the job is "
                    f"preempted by {number.name}, fd.preempted() stays False and no checkpoint is saved, "
                    "unless it calls the handler that was there; set it before the first fd.preempted() or "
                    "Checkpointer.after_step, and both are called"
                )


def _note(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if number == signal.SIGTERM:
        _warning.asked_seconds = _warning.asked_seconds or now
        if now - _warning.asked_seconds >= _SAME_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
    _warning.by = _warning.by or number
    handler = _warning.scripts.get(number)
    if callable(handler):
        try:
            handler(number, frame)
        except BaseException as problem:
            with suppress(RuntimeError):  # the signal came while this thread wrote
                write_notice(
                    f"the script's handler of {signal.Signals(number).name} would end this rank by "
                    f"{type(problem).__name__}, which goes on so that all ranks can save; end the loop where "
                    "fd.preempted() is true"
                )
