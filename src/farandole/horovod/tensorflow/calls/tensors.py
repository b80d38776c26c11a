"""Tensors of TensorFlow, arrays of NumPy and memory as torch tensors, and back.

[Note: aligned] TensorFlow wants memory to begin at a multiple of 64 bytes, and ends the process if it does not: so
what does not is copied. Views are not copies: what comes from TensorFlow is read alone, unless it is a buffer
of the caller alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....comm.named_ops.operations import DTYPES
from ..installed import tf

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
