"""Objects from one rank to all, and from all to all.

Objects travel as pickles (cloudpickle when it is installed), so ranks run code of each other: they are one
job and trust each other as they trust the program they run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ..named_ops.operations import Kind, Request
from .basics import basics
from .operations import begin, operation_names, set_number, wait
from .process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`. It is pickled.

    Args:
        obj: any object that can be pickled; only the root's is used.
        root_rank: the rank whose object is sent.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    root = basics.rank() == root_rank
    payload = dumps(obj) if root else b""
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    length = _broadcast(torch.tensor([len(payload)]), root_rank, names[0], process_set)
    content = as_tensor(payload) if root else torch.empty(int(length), dtype=torch.uint8)
    content = _broadcast(content, root_rank, names[1], process_set)
    return obj if root else loads(content)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all members of `process_set`, in rank order. They are pickled.

    Args:
        obj: any object that can be pickled.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    payload = dumps(obj)
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    lengths = _run("allgather", torch.tensor([len(payload)]), names[0], process_set).tolist()
    parts = _run("allgather", as_tensor(payload), names[1], process_set).split(lengths)
    mine = process_set.rank()
    return [obj if place == mine else loads(part) for place, part in enumerate(parts)]


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    _run("broadcast", tensor, name, process_set, root_rank)
    return tensor


def _run(kind: Kind, tensor: torch.Tensor, name: str | None, process_set: ProcessSet, root: int = 0) -> Any:
    number = set_number(process_set, kind.capitalize())
    own_name = operation_names.name(kind, name, process_set)
    request = Request(own_name, kind, tensor, in_place=kind == "broadcast", root=root, process_set=number)
    return wait(begin([request]))[0]


def dumps(obj: Any) -> bytes:
    """Return the pickle of an object."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(obj)
    return data


def loads(content: torch.Tensor) -> Any:
    """Return the object whose pickle `content` is, a tensor of bytes."""
    return pickle.load(io.BytesIO(content.numpy().tobytes()))


def as_tensor(payload: bytes) -> torch.Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
