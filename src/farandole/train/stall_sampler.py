"""Where this rank stands: samples of its training thread, and what they mean.

[Note: at work inside backward] A thread that stands inside backward waits for other ranks, or swaps, or waits for
a disk: the stack is the same. It is at work if no collective was begun since the step began, as torch's groups
count them, and no frame is of code that may exchange without one. An accelerator's threads are others.
"""

from __future__ import annotations

import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.device.streams import untraced
from ..core.failures import Kind, Position
from ..core.host.open_sockets import borrowed, open_sockets
from ..core.host.stacks import stack_of

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


# A thread's stack, read as a user reads it: the line of their own code, and the operation it called there.
#
# Frames of Farandole, torch, the standard library and other installed packages are not the user's own. A loop that
# lies in an installed package (a trainer) is shown by the line that called it.


_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_DEBUGGERS = ("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.core.debugger", "ipdb", "pudb")
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "_fn", "profile_hook_step", "_call_impl"})
_EXCHANGES = ("farandole.comm", "farandole.horovod.named_ops", "torch.distributed.distributed_c10d",
              "torch.distributed._functional_collectives")  # fmt: skip
_CALLERS_OF_EXCHANGES = ("farandole", "torch.distributed", "torch.nn.parallel")


@dataclass(frozen=True)
class Call:
    """One frame of a stack."""

    module: str
    function: str
    file: str
    line: int
    """Alike in two samples, the frame has not moved."""

    def is_in(self, *packages: str) -> bool:
        """Return whether the frame's module is one of `packages`, or inside."""
        return any(self.module == package or self.module.startswith(package + ".") for package in packages)


_modules: dict[str, str] = {}
"""Names of modules by file."""

Stack = tuple[Call, ...]
"""The outermost call first."""


def read_stack(thread: int) -> Stack:
    """Return the stack of a thread of this process; empty when it has ended."""
    calls = [Call(_module_of(file), function, file, line) for file, line, function in stack_of(thread)]
    return tuple(reversed(calls))


def _module_of(file: str) -> str:
    """Return the name of the module that a file is; empty if none is."""
    if file not in _modules:
        for name, module in sys.modules.copy().items():  # other threads import
            path = getattr(module, "__file__", None)
            if isinstance(path, str):
                _modules.setdefault(path, name)
        _modules.setdefault(file, "")
    return _modules[file]


def is_leaving(thread: int, stack: Stack) -> bool:
    """Return whether `thread` was interrupted or ends: its stack says how it ends, not where it stood."""
    handled: object = sys._current_exceptions().get(thread)
    if isinstance(handled, tuple):  # its type, itself and its traceback, until Python 3.11
        handled = handled[1]
    if isinstance(handled, KeyboardInterrupt):
        return True
    return any(call.function.endswith("excepthook") or call.is_in("farandole.train.session") for call in stack)


def find_place(stack: Stack) -> str:
    """Return the innermost line of the user's own code, ``train.py:41 (validate)``; of other code without one."""
    at = _innermost_own(stack)
    if at is None:
        at = next((i for i in reversed(range(len(stack))) if not _is_internal(stack[i].file)), None)
    if at is None:
        return ""
    call = stack[at]
    name = "" if call.function.startswith("<") else f" ({call.function})"
    return f"{_short(call.file)}:{call.line}{name}"


def find_operation(stack: Stack) -> str:
    """Return what the user's code called, such as ``fd.mean`` or ``backward``; empty: nothing that is known.

    The outermost known call below the user's innermost line; without one, the innermost known call above it, as
    for a dataset's own code inside the data loader.
    """
    own = _innermost_own(stack)
    begin = 0 if own is None else own + 1
    for at in range(begin, len(stack)):
        if name := _operation(stack, at):
            return name
    for at in range(begin - 1, -1, -1):
        if name := _operation(stack, at):
            return name
    return ""


def is_exchange(stack: Stack) -> bool:
    """Return whether the stack is inside an exchange with other ranks."""
    own = _innermost_own(stack)
    return any(call.is_in(*_EXCHANGES) for call in stack[0 if own is None else own + 1 :])


def may_exchange_unseen(stack: Stack) -> bool:
    """Return whether a stack that stands may be in an exchange without a frame of its own, e.g. FSDP's."""
    own = _innermost_own(stack)
    return any(call.is_in(*_CALLERS_OF_EXCHANGES) for call in stack[0 if own is None else own + 1 :])


def is_loading(stack: Stack) -> bool:
    """Return whether the stack is inside a data loader, or a dataset that it asks."""
    return any(call.is_in("torch.utils.data.dataloader", "farandole.train.data") for call in stack)


def find_pause(stack: Stack) -> str:
    """Return why no step is expected: ``a debugger``, ``torch.compile``; empty: no reason."""
    for call in stack:
        if call.is_in(*_DEBUGGERS):
            return "a debugger"
        if call.is_in(*_COMPILERS):
            return "torch.compile"
    return ""


def is_at_rest(stack: Stack) -> bool:
    """Return whether no code of a user's runs: a notebook between two cells, an interpreter that ends."""
    return _innermost_own(stack) is None and all(_is_internal(call.file) or _is_kernel(call) for call in stack)


def _is_kernel(call: Call) -> bool:
    starts = call.file.endswith(("/ipykernel_launcher.py", "/ipykernel/__main__.py"))  # its module is __main__
    return starts or call.is_in("ipykernel", "IPython", "tornado", "traitlets", "zmq")


def _operation(stack: Stack, at: int) -> str:
    """Return the name of a call that a user may have made; empty: it is none that we know."""
    call = stack[at]
    if call.is_in("farandole"):
        if call.is_in("farandole.train.data"):
            return "the data loader"
        import farandole

        if call.function in farandole.__all__ and not call.is_in("farandole.comm"):
            return f"fd.{call.function}"
        if call.is_in("farandole.horovod") and not call.function.startswith("_"):
            return f"hvd.{call.function}"
        return ""
    if call.function in _WRAPPERS:
        if call.is_in("torch.optim.optimizer"):
            return "optimizer.step"
        return "forward" if call.is_in("torch.nn.modules.module") else ""
    if call.is_in("torch._tensor", "torch.autograd") and call.function in ("backward", "grad"):
        return "backward"
    if call.is_in("torch.utils.data.dataloader"):
        return "the data loader"
    if call.is_in("torch.distributed.distributed_c10d") and not call.function.startswith("_"):
        return f"torch.distributed.{call.function}"
    if call.is_in("torch.optim") and call.function == "step" and not call.is_in("torch.optim.lr_scheduler"):
        return "optimizer.step"
    return ""


def _innermost_own(stack: Stack) -> int | None:
    return next((at for at in reversed(range(len(stack))) if _is_own(stack[at].file)), None)


@cache
def _is_own(file: str) -> bool:
    """Return whether a file is the user's own: neither installed, nor Python's, nor ours."""
    if _is_internal(file) or _is_installed(file):
        return False
    # A frame of no file is a text that was executed: a cell, ``python -c``.
    return not file.startswith("<") or file in ("<stdin>", "<string>") or file.startswith("<ipython-input")


@cache
def _is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, also where ``pip install --target`` put it."""
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return any(_holds_packages(entry) for entry in sys.path[1:] if entry and file.startswith(entry + "/"))


@cache
def _holds_packages(directory: str) -> bool:
    return Path(directory) != Path.cwd() and any(Path(directory).glob("*.dist-info"))


@cache
def _is_internal(file: str) -> bool:
    paths = sysconfig.get_paths()
    stdlib = tuple(paths[key] + "/" for key in ("stdlib", "platstdlib"))
    installed = "/site-packages/" in file or "/dist-packages/" in file
    inside = file.startswith((_OURS + "/", _TORCH + "/")) or (file.startswith(stdlib) and not installed)
    return inside or file.startswith("<frozen")


@cache
def _short(file: str) -> str:
    """Return a file's path as seen from the working directory, where it lies below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
