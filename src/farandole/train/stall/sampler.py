"""Where this rank stands: samples of its training thread, and what they mean.

[Note: at work inside backward] A thread that stands inside backward waits for other ranks, or swaps, or waits for
a disk: the stack is the same. It is at work if no collective was begun since the step began, as torch's groups
count them, and no frame is of code that may exchange without one. An accelerator's threads are others.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ...comm.device.streams import untraced
from ...core.failures import Kind, Position
from ...core.host.open_sockets import borrowed, open_sockets
from .call_stack import (
    Stack,
    find_operation,
    find_pause,
    find_place,
    is_at_rest,
    is_exchange,
    is_leaving,
    is_loading,
    may_exchange_unseen,
    read_stack,
)

# What this process has exchanged: bytes of its TCP connections (a slow network is no hang), and collectives.
# Acknowledged and received bytes in Linux's `struct tcp_info`, to which fields are only ever added (4.10).
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120


def collectives_begun() -> int | None:
    """Return how many collectives and messages torch's groups have begun; None where a group does not count.

    Those of torch's own code are in it, e.g. of DistributedDataParallel's reducer, which has no frame in a stack.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return int(sum(group._get_sequence_number_for_group() for group in groups))
    except RuntimeError:
        return None


def carried_bytes() -> int:
    """Return what all connections of this process have sent and received; 0 where the kernel does not say."""
    total = 0
    with suppress(OSError):
        for descriptor, _ in open_sockets():
            with suppress(OSError, struct.error), borrowed(descriptor) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    size = _COUNTS_AT + _COUNTS.size
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                    total += sum(_COUNTS.unpack_from(info, _COUNTS_AT))
    return total


STILL_SAMPLES = 3
"""A stack that is alike in so many samples, between which nothing was computed, stands."""
_BUSY_SHARE = 0.02
"""Fraction of a core, for the thread that trains; one that waits in a lock or in the kernel uses none."""
_PROCESS_SHARE = 0.2
_CARRIED_BYTES = 4096
"""Between two samples; less is a sign of life."""


class Sampler:
    """Samples one thread. Every `sample` counts what it has done since the one before."""

    def __init__(self, thread: int, phases: Sequence[str], *, on_gpu: bool) -> None:
        """`phases` are the names of the announced pauses that are open, as they change."""
        self._thread, self._phases, self._on_gpu = thread, phases, on_gpu
        self._begun: int | None = None
        """Collectives when the step began. None: not known."""
        self.reset()

    @untraced
    def begin_step(self) -> None:
        """A step begins: what is exchanged from now on is its own. Called by the thread that trains."""
        self._begun = collectives_begun()

    def reset(self) -> None:
        """Begin anew: a step was done."""
        self.stack: Stack = ()
        self.left = False
        """Whether the thread was interrupted: it stands no more where `position` says."""
        self._unchanged = 0
        """Samples in a row with this stack."""
        self._at_rest = 0
        """Samples in a row in which nothing was computed or carried."""
        self._counts: tuple[float, float, float, int] | None = None

    def sample(self) -> None:
        """Look at the thread. What it does once it is interrupted is not looked at."""
        stack = read_stack(self._thread)
        self.left = is_leaving(self._thread, stack)
        if self.left:
            return
        self._unchanged = self._unchanged + 1 if stack == self.stack else 0
        self.stack = stack
        before, self._counts = self._counts, self._count()
        if before is None:
            return
        passed, thread, process, carried = (now - then for now, then in zip(self._counts, before, strict=True))
        quiet = thread < _BUSY_SHARE * passed and process < _PROCESS_SHARE * passed and carried < _CARRIED_BYTES
        self._at_rest = self._at_rest + 1 if quiet else 0

    def position(self, rank: int, step: int) -> Position:
        """Return where the thread stands, by the samples so far."""
        kind, operation, busy = self._judge()
        return Position(rank, step, kind, find_place(self.stack), operation, busy)

    def _judge(self) -> tuple[Kind, str, bool]:
        """Return what the thread does, the name of that, and whether something moves meanwhile."""
        stack, phases = self.stack, list(self._phases)
        stands = self._unchanged >= STILL_SAMPLES
        at_rest = stands and self._at_rest >= STILL_SAMPLES
        operation = find_operation(stack)
        if pause := find_pause(stack):
            return "pause", pause, False
        if is_at_rest(stack):
            return "pause", "no code of yours", False
        is_backward = operation in ("backward", "optimizer.step", "forward")
        if is_exchange(stack) or (is_backward and at_rest and self._may_wait(stack)):
            return "waiting", operation, not at_rest
        if phases:
            return "pause", f"the phase {phases[-1]!r}", False
        if is_loading(stack):
            return "data", "the data loader", not at_rest
        if self._on_gpu and stands:
            # Kernels are queued: who stays at one instruction waits for them, with its core busy.
            return "waiting", "the GPU", False
        return ("idle" if at_rest else "working"), operation, not at_rest

    def _may_wait(self, stack: Stack) -> bool:
        """See [Note: at work inside backward]."""
        if self._on_gpu or self._begun is None or may_exchange_unseen(stack):
            return True
        return collectives_begun() != self._begun

    def _count(self) -> tuple[float, float, float, int]:
        thread = 0.0
        with suppress(OSError, OverflowError):
            thread = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        return time.monotonic(), thread, time.process_time(), carried_bytes()
