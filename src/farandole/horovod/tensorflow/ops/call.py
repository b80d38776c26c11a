"""What one operation asks for, beside its tensors: made when a script calls it, or when a graph is traced."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ....comm.native.build import Recipe, Unusable, load
from ....core.env import native_loops_are_wanted
from ....core.host.installed import CPP
from ....core.vocabulary.codec_spec import NONE
from ...common.basics import basics
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import UNKNOWN, ProcessSet, global_process_set
from ...exchange.layouts import layouts
from ...exchange.step_watch import RoundPart
from ...named_ops.operations import DTYPES, Kind, Reduction, Request
from ...named_ops.reductions import refuse_reduction
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


# Rank and size as tensors: graphs read them when they run, not when they are traced.


def rank_op(name: str | None = None) -> Any:
    """Return this rank, an int32 scalar."""
    return _scalar(basics.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this rank among those of its host, an int32 scalar."""
    return _scalar(basics.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks of this host, an int32 scalar."""
    return _scalar(basics.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, an int32 scalar. The graph fails where there is none."""
    return _scalar(lambda: len(_ranks(process_set_id)), name)


def set_rank_op(process_set: ProcessSet) -> Any:
    """Return this rank's place in a process set, an int32 scalar."""
    return _scalar(lambda: process_set.rank() or 0, None)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 where this rank is a member of a process set, else 0, an int32 scalar.

    Negative where there is no answer: -1 before `init`, -2 for a set that does not exist.
    """

    def included() -> int:
        if not basics.is_initialized():
            return -1
        sets = basics.running.engine.process_sets
        return -2 if process_set_id not in sets else int(basics.rank() in sets[process_set_id])

    return _scalar(included, name)


def _ranks(process_set_id: int) -> tuple[int, ...]:
    sets = basics.running.engine.process_sets
    if process_set_id not in sets:
        raise ValueError(UNKNOWN)
    return sets[process_set_id]


def _scalar(ask: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(ask(), tf.int32)
    found = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, name=name)
    found.set_shape([])
    return found


# The number of the world, as a tensor: graphs read it when they run.
#
# It counts shutdowns. An operation in a graph takes it as an input, so nothing that goes into an operation is
# constant (see `exchange.cc`), and one that began in a world that is over is refused in the next.


class WorldNumber:
    """The number of this process's world."""

    def __init__(self) -> None:
        self.number = 0
        self._variable: Any = None

    def tensor(self) -> Any:
        """Return the number as a tensor of the graph that is being made."""
        if tf.executing_eagerly():
            return tf.constant(self.number, tf.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            if self._variable is None:
                self._variable = tf.Variable(
                    self.number, trainable=False, dtype=tf.int64, name="farandole_generation"
                )
        return self._variable.read_value()

    def next(self) -> None:
        """The world is over."""
        self.number += 1
        if self._variable is not None:
            with tf.init_scope():
                self._variable.assign(self.number)


generation = WorldNumber()
"""That of this process."""
basics.call_on_shutdown(generation.next)


# Tensors of TensorFlow, arrays of NumPy and memory as torch tensors, and back.
#
# [Note: aligned] TensorFlow wants memory to begin at a multiple of 64 bytes, and ends the process if it does not:
# so what does not is copied. Views are not copies: what comes from TensorFlow is read alone, unless it is a buffer
# of the caller alone.


ALIGNMENT_BYTES = 64
"""See [Note: aligned]."""


def torch_type(dtype: Any) -> torch.dtype:
    """Return torch's type for one of TensorFlow's; raise ValueError for those that cannot travel."""
    found = DTYPES.get(dtype.name)
    if found is None:
        raise ValueError(f"Tensor type {dtype.name} is not supported.")
    return found


def from_eager(tensor: Any) -> torch.Tensor:
    """Return a view of an eager tensor; of one on an accelerator a copy in the host's memory."""
    torch_type(tensor.dtype)
    if not tensor.device.endswith("CPU:0"):
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    view: torch.Tensor = torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return view


def to_eager(tensor: torch.Tensor) -> Any:
    """Return a torch tensor as an eager one, without a copy where its memory is aligned."""
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT_BYTES:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.data_ptr() % ALIGNMENT_BYTES:  # torch aligns its memory alike; another allocator may not
            return tf.constant(to_array(tensor, tf.as_dtype(str(tensor.dtype).removeprefix("torch."))))
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def from_array(array: Any, dtype: Any) -> torch.Tensor:
    """Return a view of an array that TensorFlow handed to Python."""
    wanted = torch_type(dtype)
    whole = np.ascontiguousarray(array).reshape(np.shape(array))
    if wanted.itemsize == 1 or wanted is torch.bfloat16:  # NumPy has no such types of its own
        plain = whole.reshape(-1).view(np.uint8 if wanted.itemsize == 1 else np.int16)
        return torch.from_numpy(plain).view(wanted).view(whole.shape)
    return torch.from_numpy(whole)


def to_array(tensor: torch.Tensor, dtype: Any) -> Any:
    """Return a torch tensor as an array of a type that TensorFlow takes."""
    tensor = tensor.contiguous()
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.bfloat16:
        plain = torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16
        return tensor.reshape(-1).view(plain).numpy().view(dtype.as_numpy_dtype).reshape(tensor.shape)
    return tensor.numpy()


def from_memory(address: int | None, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of memory that TensorFlow keeps for as long as an operation runs."""
    if not nbytes or address is None:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
