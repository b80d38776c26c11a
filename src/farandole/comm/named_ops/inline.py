"""Small operations: the data travels with the announcement, and every member does all the work itself.

One way over the network, no second message. `payload` says what a member sends to each other one, `result` what
it makes of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.accelerator import synchronize_stream
from ..messages import bytes_of
from .operations import DTYPES, Operation, Signature
from .reductions import adasum, finish, fold, scale

CPU = torch.device("cpu")
SMALL_BYTES = 64 * 1024
"""What a rank sends in all for a small operation, at most."""

_IN_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8)


def is_small(signature: Signature, size: int) -> bool:
    """Return whether this rank's data travels along. Alone, nothing is sent: everything is small."""
    if size == 1:
        return True
    return signature.device == "cpu" and signature.is_exact and signature.nbytes * (size - 1) <= SMALL_BYTES


def payloads(operation: Operation, rank: int) -> list[bytearray]:
    """Return what this rank gives to each member, in their order; equal ones are one object."""
    signature, tensor, members = operation.signature, operation.tensor, operation.members
    if tensor is None or (signature.kind == "broadcast" and signature.root != rank):
        return [bytearray()] * len(members)
    whole = to_bytes(input_of(operation))
    if signature.kind == "alltoall":
        return _cut(whole, signature.row_bytes, signature.splits)
    if signature.kind == "reducescatter" and signature.shape:
        return _cut(whole, signature.row_bytes, shares(signature.shape[0], len(members)))
    return [whole] * len(members)


def result(operation: Operation, told: Sequence[bytearray], rank: int) -> torch.Tensor | object:
    """Return the operation's result from what each present member gave to this one, where its tensor is."""
    made, tensor = _result(operation, told, rank), operation.tensor
    if tensor is None or tensor.is_cpu:
        return made
    if isinstance(made, tuple):
        return (to_device_of(tensor, made[0]), *made[1:])
    return to_device_of(tensor, made) if isinstance(made, torch.Tensor) else made


def _result(operation: Operation, told: Sequence[bytearray], rank: int) -> torch.Tensor | object:
    signature = operation.signature
    kind = signature.kind
    if kind == "barrier":
        return None
    dtype = DTYPES[signature.dtype]
    if kind == "allreduce":
        return deliver(operation, _reduce(operation, [to_tensor(data, dtype) for data in told]))
    place = operation.present.index(rank)
    if kind == "reducescatter":
        total = _reduce(operation, [to_tensor(data, dtype) for data in told])
        return total.view(shares(signature.shape[0], operation.size)[place], *signature.shape[1:])
    if kind == "broadcast":
        assert operation.tensor is not None, "a broadcast has a tensor"
        if signature.root == rank:
            return operation.request.tensor
        return deliver(operation, to_tensor(told[operation.present.index(signature.root)], dtype))
    joined = to_tensor(bytearray().join(told), dtype)
    if kind == "allgather":
        return joined.view(sum(each.shape[0] for each in operation.told.values()), *signature.shape[1:])
    received = [each.splits[place] for each in operation.told.values()]
    return joined.view(sum(received), *signature.shape[1:]), torch.tensor(received, dtype=torch.int32)


def _reduce(operation: Operation, rows: list[torch.Tensor]) -> torch.Tensor:
    signature = operation.signature
    dtype = rows[0].dtype
    if signature.reduction == "adasum":
        wide = [row if dtype in (torch.float32, torch.float64) else row.float() for row in rows]
        total = alone(adasum(wide, shared=False))
    else:
        total = fold(rows, signature.reduction, zeros_too=zeros_matter(operation))
    return finish(total, dtype, signature.reduction, operation.size, signature.postscale)


def zeros_matter(operation: Operation) -> bool:
    """Return whether the zeros of absent members change the result."""
    return bool(operation.absent) and operation.signature.reduction in ("min", "max", "product")


def deliver(operation: Operation, flat: torch.Tensor) -> torch.Tensor:
    """Return `flat` in the tensor's shape; in the submitter's own tensor, where it asked for that."""
    request = operation.request
    if request.in_place or request.kind == "broadcast":
        assert operation.tensor is not None, "checked at submission"
        assert request.tensor is not None, "checked at submission"
        operation.tensor.copy_(flat.view(operation.tensor.shape))
        return request.tensor
    return flat.view(operation.signature.shape)


def input_of(operation: Operation, home: torch.device = CPU) -> torch.Tensor:
    """Return the operation's tensor, scaled, in the memory of `home`."""
    tensor = operation.tensor
    assert tensor is not None, "checked at submission"
    if tensor.device != home:
        if operation.ready_event is not None:
            operation.ready_event.synchronize()
        tensor = tensor.to(home)
    return scale(tensor, operation.signature.prescale)


def to_device_of(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `result` where `tensor` is; it is all there."""
    if result.device == tensor.device:
        return result
    moved = result.to(tensor.device)
    synchronize_stream(tensor.device)
    return moved


def alone(conversation: object) -> torch.Tensor:
    """Return the result of a conversation with one rank, which sends no message."""
    try:
        next(conversation)  # type: ignore[call-overload]
    except StopIteration as end:
        found: torch.Tensor = end.value
        return found
    raise AssertionError("a conversation with one rank sends no message")


def shares(rows: int, size: int) -> tuple[int, ...]:
    """Return the rows of each member: the first ``rows % size`` have one more.

    >>> shares(7, 3)
    (3, 2, 2)
    """
    return tuple(rows // size + (place < rows % size) for place in range(size))


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """Return a copy of a contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return bytearray()
    if tensor.dtype in _IN_NUMPY:  # the usual types take the short way
        return bytearray(tensor.numpy().data)  # .data: an array without dimensions would be taken for a number
    return bytearray(bytes_of(tensor).numpy())


def to_tensor(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor in the memory of `data`."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _cut(whole: bytearray, row_bytes: int, rows: Sequence[int]) -> list[bytearray]:
    parts, begin = [], 0
    for count in rows:
        parts.append(whole[begin : begin + count * row_bytes])
        begin += count * row_bytes
    return parts
