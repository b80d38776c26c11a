"""What one operation asks for, beside its tensors: made when a script calls it, or when a graph is traced."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....comm.named_ops.operations import Kind, Reduction, Request
from ....comm.named_ops.reductions import refuse_reduction
from ....comm.native.build import Recipe, Unusable, load
from ....core.env import native_loops_are_wanted
from ....core.host.installed import CPP
from ....core.vocabulary.codec_spec import NONE
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...exchange.layouts import layouts
from ...exchange.step_watch import RoundPart
from ..installed import tf

TITLES: dict[Kind, str] = {
    "allreduce": "HorovodAllreduce",
    "allgather": "HorovodAllgather",
    "broadcast": "HorovodBroadcast",
    "alltoall": "HorovodAlltoall",
    "reducescatter": "HorovodReducescatter",
}
"""How errors call an operation: programs look for these words."""


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class OperationCall:
    """One operation, or a group of them. The same on all ranks, but for sizes that may differ."""

    kind: Kind
    process_set: ProcessSet = global_process_set
    name: str | None = None
    """What the script calls it."""
    own_name: str | None = None
    """The engine's name, whatever graph the operation is in: for gradients."""
    ignore_name_scope: bool = False
    grouped: bool = False
    reduction: Reduction = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    codec: str = NONE
    chosen_with: str = ""
    """See `Request`."""
    consumes: bool = False
    """Whether the tensor is a buffer of the caller alone, so that the result may be written into it."""
    layout: str = ""
    """What is in the buffer; compared between the ranks when the operation runs first."""
    part: RoundPart | None = None
    """Its place in an exchange of gradients, for the records; None: it is in none."""

    def __post_init__(self) -> None:
        """Raise ValueError for arguments that no rank can mean."""
        expected = (
            ("name", self.name is None or isinstance(self.name, str), "a text, the same on all ranks, or None"),
            ("process_set", isinstance(self.process_set, ProcessSet), "a ProcessSet"),
            ("root", _is_number(self.root, Integral), "the number of a rank"),
            ("prescale", _is_number(self.prescale, Real), "a number"),
            ("postscale", _is_number(self.postscale, Real), "a number"),
        )
        for field, is_good, what in expected:
            if not is_good:
                raise ValueError(f"{self.title}: {field}={getattr(self, field)!r}: expected {what}")

    @property
    def title(self) -> str:
        """How errors call it."""
        return TITLES[self.kind]

    @property
    def set_number(self) -> int:
        """The engine's number of the process set; raises ValueError where there is none."""
        return set_number(self.process_set, self.kind.capitalize())

    @property
    def keeps_shape(self) -> bool:
        """Whether results are of the shapes of the tensors, and may lie in their place."""
        return self.kind in ("allreduce", "broadcast")

    def names(self, count: int) -> list[str]:
        """Return the engine's names outside a graph. A number is taken for what the script gave no name."""
        if self.own_name is not None:
            return [self.own_name]
        if self.grouped:
            return names_of_group(f"grouped_{self.kind}", self.name, self.process_set, count)
        return [operation_names.name(self.kind, self.name, self.process_set)]

    def names_in_graph(self, node: str, count: int) -> list[str]:
        """Return the engine's names inside a graph, where each node has a name of its own."""
        if self.own_name is not None:
            return [self.own_name]
        name = f"{self.kind}.{node.rpartition('/')[2] if self.ignore_name_scope else node}"
        return [f"{name}_{i + 1}of{count}" for i in range(count)] if self.grouped else [name]

    def requests(self, names: Sequence[str], tensors: Sequence[torch.Tensor], *, in_place: bool) -> list[Request]:
        """Return what the engine is asked for. `in_place`: `tensors` take the results.

        Raises ValueError for what this rank alone can see is wrong.
        """
        number = self.set_number
        splits = None
        if self.kind == "alltoall" and len(tensors) > 1:
            splits = self._splits(tensors[1])
        requests = []
        for name, tensor in zip(names, tensors, strict=False):  # the splits of an alltoall have no name
            self._check(tensor)
            requests.append(
                Request(
                    name,
                    self.kind,
                    tensor,
                    in_place=in_place,
                    reduction=self.reduction,
                    prescale=self.prescale,
                    postscale=self.postscale,
                    root=self.root,
                    splits=splits,
                    process_set=number,
                    codec=self.codec if tensor.dtype.is_floating_point else NONE,
                    chosen_with=self.chosen_with,
                )
            )
        return requests

    def layout_question(self, name: str) -> Request | None:
        """Return what is to be exchanged before the operation `name`: layouts that were not compared."""
        return layouts.question(name, self.layout, self.set_number) if self.layout else None

    def results(self, found: Sequence[Any]) -> list[torch.Tensor]:
        """Return the results of the requests as a list of tensors."""
        if self.kind == "alltoall":
            return list(found[0])
        return list(found)

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 and not self.keeps_shape:
            raise ValueError(f"{self.kind.capitalize()} does not support scalar inputs (give them a dimension)")
        if self.kind in ("allreduce", "reducescatter"):
            reason = refuse_reduction(tensor.dtype, self.reduction)
            if reason:
                raise ValueError(f"Tensor type {tensor.dtype} is not supported. ({self.reduction}: {reason})")

    def _splits(self, splits: torch.Tensor) -> tuple[int, ...]:
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"alltoall: splits are {str(splits.dtype).removeprefix('torch.')} of shape "
                f"{tuple(splits.shape)}, expected int32 and one dimension"
            )
        return tuple(splits.tolist())


# The library with `FarandoleExchange` and `FarandoleClock`: compiled when a graph first needs it, kept, loaded.
#
# See `comm.native.build` for where it is kept. Without a compiler, or with FARANDOLE_NATIVE=0, there is none, and
# graphs call a Python function instead.


_FRAMEWORK = "libtensorflow_framework.so.2"
_HANDLE, _NUMBERS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)


class Library(NamedTuple):
    """The operation, and the functions by which it is served; `exchange.cc` says what each does."""

    operation: Any
    clock: Any
    next: Any
    post: Any
    look: Any
    tensor: Any
    output: Any
    finish: Any
    fail: Any
    clocks: Any


@cache
def find_library() -> Library | None:
    """Return the library; None, with a warning, where there can be none. The first call may take seconds."""
    if not native_loops_are_wanted():
        return None
    folder = Path(tf.__file__).parent
    if not (folder / _FRAMEWORK).exists():
        _warn(f"{folder} has no {_FRAMEWORK}")
        return None
    recipe = Recipe(
        Path(__file__).with_name("exchange.cc"),
        compilers=CPP,
        flags=("-std=c++17", "-O2", "-fvisibility=hidden", "-fPIC", "-shared"),
        libraries=(f"-L{folder}", f"-l:{_FRAMEWORK}"),
        made_for=(tf.__version__,),
    )
    try:
        return load(recipe, _load)
    except (Unusable, AttributeError, tf.errors.OpError) as problem:
        _warn(str(problem))
        return None


def _warn(why: str) -> None:
    warnings.warn(
        f"farandole: operations inside graphs go through tf.numpy_function, one after the other: {why}. "
        "Install a C++ compiler (g++) to have them run beside each other",
        RuntimeWarning,
        stacklevel=2,
    )


def _load(path: str) -> Library:
    made = tf.load_op_library(path)
    library = ctypes.CDLL(path)  # the same one: it is loaded once

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = library[f"farandole_{name}"]
        found.restype, found.argtypes = result, arguments
        return found

    return Library(
        made.farandole_exchange,
        made.farandole_clock,
        function("next", _HANDLE, _NUMBERS),
        function("post", None, ctypes.c_int64),
        function("look", ctypes.c_int, _HANDLE, _NUMBERS, _NUMBERS, ctypes.POINTER(ctypes.c_char_p)),
        function("tensor", _HANDLE, _HANDLE, ctypes.c_int, _NUMBERS, ctypes.c_int),
        function("output", _HANDLE, _HANDLE, ctypes.c_int, ctypes.c_int, _NUMBERS, ctypes.c_int),
        function("finish", None, _HANDLE),
        function("fail", None, _HANDLE, ctypes.c_int, ctypes.c_char_p),
        function("clocks", ctypes.c_int, _NUMBERS, ctypes.c_int),
    )
