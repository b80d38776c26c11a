"""`fd.context_shard` and its kin: what a loop calls to cut sequences, and to put them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...comm.world.world import world
from ...core.environ.job_plan import resolve_plan
from ...core.vocabulary.errors import ConfigError
from .agreement import Compared
from .context import Context
from .group import cut, join, positions_of

_IGNORED = -100
"""A target that counts for nothing: the default of torch's cross-entropy."""


def context_shard(*tensors: torch.Tensor, dim: int | Sequence[int] = 1) -> Any:
    """Return this rank's part of tensors that hold whole sequences: tokens, targets, positions, padding.

    Where the plan has ``context`` above 1, the ranks of a context group hold the same samples, and each trains on
    some of their tokens: two runs of them, one from each half, so that a causal mask is the same work on all
    ranks. Else the tensors are returned as they are, so a loop may always call it. Targets that are the next
    tokens must be shifted before, in the whole sequence. The length must divide by 2 x ``context``.

    Args:
        tensors: whole sequences, the same on all ranks of the group, of any dtype.
        dim: the dimension of the sequence, or one for each tensor.

    Returns:
        A tensor for one tensor, else a tuple; copies without gradient history of their own rank's tokens.

    Raises:
        ConfigError: a length does not divide, lengths differ between tensors, or `dim` is no dimension; raised on
            every rank of the group.
        Mismatch: the ranks of the group were given different tensors; raised on each of them.
    """
    context = _context()
    dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
    if context is None:
        _checked(tensors, dims, 1)
        return tensors[0] if len(tensors) == 1 else tensors
    group = context.group
    if all(isinstance(each, torch.Tensor) for each in tensors):
        compared = Compared(group, "fd.context_shard", tensors, extra=str(dims))
        compared.require_same_shapes("what is to be cut")
        compared.require_same_values("what is to be cut")
    dims = _checked(tensors, dims, group.size)
    parts = []
    for tensor, along in zip(tensors, dims, strict=True):
        part = cut(tensor, along, group.rank, group.size)
        context.note_cut(part, along, is_ragged=_is_ragged(tensor, along, group.size))
        parts.append(part)
    return parts[0] if len(parts) == 1 else tuple(parts)


def context_positions(length: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the positions of this rank's tokens in their sequence: what ``torch.arange(length)`` is elsewhere.

    A model that makes its own positions, for learned or rotary embeddings, calls this with the number of tokens
    that it was given; so may the loop, with tokens that were cut. Elsewhere, and without a ``context`` degree,
    they are 0 to `length` - 1.

    Args:
        length: the number of tokens of this rank.
        device: of the result; by default the world's.

    Returns:
        int64, of shape (length,).

    Raises:
        ConfigError: `length` is no even number, as each rank has two runs of tokens.
    """
    context = _context()
    where = torch.device(device) if device is not None else world().device
    if context is None or not context.is_part(length):
        return torch.arange(length, dtype=torch.int64, device=where)
    if length % 2:
        raise ConfigError(
            f"context_positions: {length} tokens of this rank, expected an even number: two runs of them",
            remedy="cut sequences with fd.context_shard",
        )
    group = context.group
    return positions_of(length * group.size, group.rank, group.size, where)


def context_gather(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Return whole sequences from the parts of all ranks, in their order: the inverse of `context_shard`.

    To be called by all ranks of a context group. No gradient flows through it. Without a ``context`` degree the
    tensor is returned as it is.

    Args:
        tensor: this rank's part, of one shape and dtype on all ranks.
        dim: the dimension of the sequence.

    Raises:
        ConfigError: `dim` is no dimension of the tensor.
        Mismatch: shapes differ between ranks; raised on each of them.
    """
    context = _context()
    if context is None:
        return tensor
    along = _checked([tensor], [dim], 1, "context_gather")[0]
    compared = Compared(context.group, "fd.context_gather", [tensor])
    compared.require_same_shapes("what is to be gathered")
    return join(context.group.all_gather(tensor, "fd.context_gather"), along)


def _context() -> Context | None:
    here = world()
    found = here.session.kept(Context)
    if found is None and here.size > 1 and resolve_plan(None).context != 1:
        raise ConfigError(
            "context_shard: the plan divides sequences, but no model is distributed yet",
            remedy="call fd.distribute before",
        )
    return found


def _checked(tensors: Sequence[Any], dims: Sequence[int], size: int, name: str = "context_shard") -> list[int]:
    """Return the dimensions from 0 on; raise `ConfigError` for what cannot be cut into 2 x `size`."""
    if not tensors:
        raise ConfigError(f"{name}: there is nothing to cut", remedy="give it tokens, targets, ...")
    if len(dims) != len(tensors):
        raise ConfigError(f"{name}: {len(dims)} dimensions for {len(tensors)} tensors")
    found, lengths = [], []
    for tensor, dim in zip(tensors, dims, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"{name}: expected tensors, got a {type(tensor).__name__}",
                remedy="give the tensors of a batch one by one",
            )
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(f"{name}: a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
        found.append(dim % tensor.dim())
        lengths.append(tensor.shape[dim])
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"{name}: sequences of {', '.join(map(str, lengths))} tokens in one call",
            remedy="give dim=(...), one dimension for each tensor; or call it for each",
        )
    if size > 1 and (lengths[0] % (2 * size) or not lengths[0]):
        above = (lengths[0] // (2 * size) + 1) * 2 * size
        raise ConfigError(
            f"{name}: {lengths[0]} tokens do not divide by 2 x context = {2 * size}, in dimension "
            f"{found[0]} of shape {tuple(tensors[0].shape)}",
            remedy=f"pad to {above} tokens, with targets of {_IGNORED}, or choose another dim",
        )
    return found


def _is_ragged(targets: torch.Tensor, dim: int, size: int) -> bool:
    """Return whether the parts of the ranks have unequal numbers of targets that count."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return False
    counts = (
        (targets != _IGNORED).transpose(0, dim).flatten(1).sum(1) if targets.dim() > 1 else targets != _IGNORED
    )
    return len({int(cut(counts, 0, rank, size).sum()) for rank in range(size)}) > 1
