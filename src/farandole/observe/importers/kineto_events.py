"""What of the events of PyTorch's profiler (Kineto) steps are made of, kept as numbers.

Phases are told by PyTorch's names: the loader's ``enumerate(DataLoader)``, autograd's ``evaluate_function``,
``Optimizer.step#``. Collectives are what ran on the accelerator (``nccl...Kernel``) or in gloo's thread
(``gloo:all_reduce``). Events stand in no order of time and marks of steps last, so that nothing can be summed
before the whole file is read: of most events 8 or 16 bytes are kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from .trace_text import is_number

_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_CPU = ("cpu_op", "user_annotation", "python_function")
"""Categories of CPU events."""
_COLLECTIVE = re.compile(r"^(nccl(?!.*Broadcast).*Kernel|(gloo|nccl|mpi|ucc):(?!broadcast|barrier))")
_LAUNCH = re.compile(r"^c10d::(?!wait|barrier|broadcast)\w+")
_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


class Spans:
    """Begins and ends in seconds, in the order of the file; 16 bytes each."""

    def __init__(self) -> None:
        self._begins, self._ends = array("d"), array("d")

    def add(self, begin: float, end: float) -> None:
        """Take one."""
        self._begins.append(begin)
        self._ends.append(end)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self._begins, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._begins)


class Collective(NamedTuple):
    """One that ran."""

    begin_seconds: float
    end_seconds: float
    nbytes: int
    is_kernel: bool


class KinetoEvents:
    """Takes the events of one rank's trace."""

    def __init__(self) -> None:
        self.count = 0
        self.begin_seconds, self.end_seconds = float("inf"), float("-inf")
        """Time range of the trace."""
        self.marks: list[tuple[int, float, float]] = []
        """(n, begin, end) of each ``ProfilerStep#n``."""
        self.loading, self.optimizing, self.zeroing, self.differentiating = Spans(), Spans(), Spans(), Spans()
        self.kernels = Spans()
        """Those that are no collectives."""
        self.operations, self.launches = array("d"), array("d")
        """Starts of CPU events, and of collectives if requested."""
        self.collectives: list[Collective] = []
        self._phases = {
            "Optimizer.step#": self.optimizing,
            "Optimizer.zero_grad#": self.zeroing,
            "enumerate(DataLoader)": self.loading,
            "autograd::engine::evaluate_function": self.differentiating,
        }

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        took = event.get("dur")
        if event.get("ph") != "X" or "ts" not in event or took is None or not is_number(took) or took < 0:
            return
        begin, end = float(event["ts"]) / 1e6, float(event["ts"] + took) / 1e6
        self.count += 1
        self.begin_seconds, self.end_seconds = min(self.begin_seconds, begin), max(self.end_seconds, end)
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind in _CPU:
            self._take_of_processor(kind, name, begin, end)
        if kind != "gpu_user_annotation":
            if match := _STEP.fullmatch(name):
                self.marks.append((int(match[1]), begin, end))
            is_kernel = kind == "kernel"
            if _COLLECTIVE.match(name):
                self.collectives.append(Collective(begin, end, _nbytes(event), is_kernel))
            elif is_kernel:
                self.kernels.add(begin, end)

    def _take_of_processor(self, kind: object, name: str, begin: float, end: float) -> None:
        if kind == "cpu_op":
            self.operations.append(begin)
        for prefix, spans in self._phases.items():
            if name.startswith(prefix):
                spans.add(begin, end)
        if _LAUNCH.match(name):
            self.launches.append(begin)


def _nbytes(event: dict[str, Any]) -> int:
    """Return the bytes of a collective where its arguments say how many elements of what."""
    args = event.get("args", {})
    elements, kind = args.get("In msg nelems"), args.get("dtype")
    if type(elements) is not int or not 0 <= elements < _MOST_ELEMENTS:
        return 0
    return elements * _BYTES.get(str(kind), 4)


_MOST_ELEMENTS = 1 << 50
