"""Named operations of tensors on the devices of all ranks, compared bit for bit with those in CPU memory."""

from __future__ import annotations

import torch

from ...comm.messages.element_bytes import bytes_of
from ...comm.named_ops.data.group_thread import device_kind
from ...comm.named_ops.engine import NamedOpsEngine
from ...comm.named_ops.operations.request import Request
from ...comm.world.world import World

_ROWS = 3_000
_COLUMNS = 40
"""Together more than what travels with announcements."""


def goes_by_groups(world: World, device: torch.device) -> bool:
    """Return whether tensors on `device` go by groups of the backend there, and are not copied to the CPU."""
    return device_kind(world) == device.type


def run_named(world: World, device: torch.device) -> dict[str, torch.Tensor]:
    """Return what each operation gives for numbers drawn by rank, in CPU memory; called by all ranks."""
    engine = NamedOpsEngine(world)
    try:
        requests = _requests(world, device)
        tickets = [engine.submit([each])[0] for each in requests]
        values = [ticket.wait() for ticket in tickets]
        results = [value[0] if isinstance(value, tuple) else value for value in values]
        return {each.name: result.cpu() for each, result in zip(requests, results, strict=True)}
    finally:
        engine.close()


def first_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Return the name of the first operation with other bits; empty when there is none."""
    return next((name for name, one in found.items() if not _is_same(one, expected[name])), "")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def _requests(world: World, device: torch.device) -> list[Request]:
    generator = torch.Generator().manual_seed(world.rank)
    drawn = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float32).to(device)
    rows = [_ROWS // world.size] * world.size
    rows[0] += _ROWS - sum(rows) - 1  # one row stays
    return [
        Request("sum", "allreduce", drawn.double()),
        Request("mean", "allreduce", drawn.clone(), reduction="average"),
        Request("mean of bf16", "allreduce", drawn.bfloat16(), reduction="average"),
        Request("scaled", "allreduce", drawn.half(), in_place=True, prescale=0.3, postscale=1.7),
        Request("largest", "allreduce", drawn.bfloat16(), reduction="max"),
        Request("coded", "allreduce", drawn.clone(), reduction="average", codec="bf16"),  # which divides nothing
        Request("rows", "allgather", drawn[: _ROWS // (world.rank + 1)].clone()),
        Request("copy", "broadcast", drawn.clone(), root=world.size - 1),
        Request("part", "reducescatter", drawn.clone()),
        Request("swap", "alltoall", drawn.clone(), splits=tuple(rows)),
    ]
