"""A thread's stack, read as a user reads it: the line of their own code, and the operation it called there.

Frames of Farandole, torch, the standard library and other installed packages are not the user's own. A loop that
lies in an installed package (a trainer) is shown by the line that called it.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ...core.host.stacks import stack_of

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_DEBUGGERS = ("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.core.debugger", "ipdb", "pudb")
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "_fn", "profile_hook_step", "_call_impl"})
_ENDS = ("farandole.train.crash_report", "farandole.train.session")
_EXCHANGES = ("farandole.comm", "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
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
    return any(call.function.endswith("excepthook") or call.is_in(*_ENDS) for call in stack)


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
