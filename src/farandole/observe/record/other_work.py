"""CPU time of this process's other Python threads, and of its children.

While a Python thread computes, the training thread may wait for the GIL. Threads of this package and those that no
Python code runs on (of torch's operations) are left out. Children are the workers of a loader, as a rule.
"""

from __future__ import annotations

import linecache
import os
import threading
from contextlib import suppress
from pathlib import Path

from ...core.host.stacks import StackFrame, stack_of

_OURS = "farandole"
_TASKS = Path("/proc/self/task")
_STARTERS = ("/threading.py", "/concurrent/futures/thread.py")


def thread_seconds() -> dict[int, float]:
    """Return the CPU time of each so far, by the kernel's number; nothing where the kernel does not tell."""
    found = {}
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.native_id is None or thread.name.startswith(_OURS):
            continue
        with suppress(OSError, IndexError):  # one that has ended meanwhile
            fields = (_TASKS / str(thread.native_id) / "schedstat").read_text().split()
            found[thread.native_id] = int(fields[0]) / 1e9
    return found


def children_seconds() -> dict[int, float]:
    """Return the CPU time of each child so far, by its number; nothing where the kernel does not tell."""
    numbers: list[str] = []
    for task in _TASKS.glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            numbers += task.read_text().split()
    found = {}
    for number in numbers:
        with suppress(OSError, IndexError):  # a child that has
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            found[int(number)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def place_of(number: int) -> str:
    """Return what a thread runs, as "function at file.py:line"; empty if it has ended."""
    thread = next((each for each in threading.enumerate() if each.native_id == number), None)
    if thread is None or thread.ident is None:
        return ""
    frames = [each for each in stack_of(thread.ident) if not each.file.endswith(_STARTERS)]
    if not frames:
        return ""
    outermost = frames[-1]  # what the thread was started for
    return f"{outermost.function} at {Path(outermost.file).name}:{_begin_of(outermost)}"


def _begin_of(place: StackFrame) -> int:
    """Return the line in which a function begins; that which it is in, where its file does not tell."""
    begin = f"def {place.function}("
    lines = linecache.getlines(place.file)[: place.line]
    return next((n for n in range(len(lines), 0, -1) if lines[n - 1].lstrip().startswith(begin)), place.line)
