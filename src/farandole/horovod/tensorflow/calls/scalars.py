"""Rank and size as tensors: graphs read them when they run, not when they are traced."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....comm.named_ops.operations import DTYPES
from ...common.basics import basics
from ...common.process_sets import UNKNOWN, ProcessSet
from ..installed import tf


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
