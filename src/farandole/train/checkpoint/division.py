"""Who writes what: DCP's planners say which boxes there are, and replicas divide them by bytes.

[Note: plans as JSON] Every rank makes its own plan (`DefaultSavePlanner`). A replicated training has equal plans
on all ranks, so digests are compared and nothing more is said; otherwise all plans go through the store as JSON,
never pickled. Every rank then divides the boxes in the same way, and DCP's planner checks that they cover each
tensor once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ...checkpoint.dtypes import tensor_bytes
from ...parallel.split import Split, boxes_here

PIECE_BYTES = 32 << 20
"""Larger tensors are cut along their first dimension: to be divided among ranks, and hashed side by side."""

Item = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A box in a plan: name of the tensor, its type, its shape, and offsets and shape of the box."""


def local_items(tensors: Mapping[str, torch.Tensor], splits: Mapping[str, Split] | None = None) -> list[Item]:
    """Return the boxes that this rank could write, of at most `PIECE_BYTES` if the first dimension allows it.

    `splits` tells which part of a whole one a tensor is: boxes are those of the whole.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    whole = {name: tensor for name, tensor in tensors.items() if name not in (splits or {})}
    planner.set_up_planner(whole, is_coordinator=False)
    items: list[Item] = []
    for each in planner.create_local_plan().items:
        data = each.tensor_data
        assert data is not None, f"{each.index.fqn} is a tensor"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        offsets, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        if not all(shape) and tuple(data.size) != shape:
            continue  # a shard without elements: its rank has none of the tensor
        items += [(each.index.fqn, dtype, tuple(data.size), *box) for box in _cut(dtype, offsets, shape)]
    for name, split in (splits or {}).items():
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        for part in boxes_here(tensors[name], split):
            items += [(name, dtype, split.shape, *box) for box in _cut(dtype, part.offsets, part.shape)]
    return items


def divide(plans: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """Return which of its boxes each rank writes: each box once, the bytes as even as can be.

    Raises `ValueError` when the boxes do not cover each tensor once.
    """
    owners: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    items: dict[tuple[str, tuple[int, ...]], Item] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            owners.setdefault((item[0], item[3]), []).append(rank)
            items[item[0], item[3]] = item
    loads = [0] * len(plans)
    divided: list[list[Item]] = [[] for _ in plans]
    sizes = {key: tensor_bytes(item[1], item[4]) for key, item in items.items()}
    for key in sorted(items, key=lambda key: (-sizes[key], key)):
        rank = min(owners[key], key=lambda each: (loads[each], each))
        loads[rank] += sizes[key]
        divided[rank].append(items[key])
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    planner.create_global_plan([SavePlan([_write_item(item) for item in plan]) for plan in divided])
    return [sorted(plan) for plan in divided]


def plan_from_json(value: Any) -> list[Item]:
    """Return a plan that went through the store."""
    return [
        (name, dtype, tuple(size), tuple(offsets), tuple(shape)) for name, dtype, size, offsets, shape in value
    ]


def _write_item(item: Item) -> WriteItem:
    name, dtype, size, offsets, shape = item
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)),
            properties=dataclasses.replace(TensorProperties(torch.float32), dtype=getattr(torch, dtype)),
            size=torch.Size(size),
        ),
    )


def _cut(
    dtype: str, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    nbytes = tensor_bytes(dtype, shape)
    if nbytes <= PIECE_BYTES or shape[0] < 2:
        return [(offsets, shape)]
    count = min(shape[0], -(-nbytes // PIECE_BYTES))
    rows = -(-shape[0] // count)
    return [
        ((offsets[0] + at, *offsets[1:]), (min(rows, shape[0] - at), *shape[1:]))
        for at in range(0, shape[0], rows)
    ]
