"""CPU time of this process's other Python threads, and of its children.

While a Python thread computes, the training thread may wait for the GIL. Threads of this package and those that no
Python code runs on (of torch's operations) are left out. Children are the workers of a loader, as a rule.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

_OURS = "farandole"
_TASKS = Path("/proc/self/task")
_STARTERS = ("threading", "concurrent.futures.thread", "concurrent.futures")


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
    frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
    code = None
    while frame is not None:
        if frame.f_globals.get("__name__") not in _STARTERS:
            code = frame.f_code  # in the end the outermost: what the thread was started for
        frame = frame.f_back
    return "" if code is None else f"{code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
