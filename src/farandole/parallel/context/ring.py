"""Attention over a sequence that is divided over ranks: keys and values go around a ring.

[Note: the ring] Each rank keeps its queries. Its keys and values travel to the next rank, and on, until all ranks
have seen them: c - 1 hops (Liu et al. 2023, "Ring Attention", section 3). Blocks are merged by the log of their
sums, so the result is exact, and a hop is under way while the block before is computed. In backward keys and
values travel again; the gradients of a block of keys begin on the rank after its owner, travel one rank behind the
block, each rank adds its part, and the last hop takes them home, where the owner adds its own: c - 1 hops.
Gradients that travel are float32 where keys are of a shorter type.

With n tokens a rank, h heads of keys, and elements of w bytes (w' for gradients), a rank sends
2 (c - 1) batch h n width w bytes in c - 1 messages forward, and 2 (c - 1) batch h n width (w + w') bytes in
2 (c - 1) messages backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .block_attention import Attended, Operands, Scoring, attend_block, attend_block_backward, merge
from .group import GRADIENTS_TAG, KEYS_TAG, ContextGroup, Hop


class RingCall(NamedTuple):
    """What one call of attention needs beside its tensors."""

    group: ContextGroup | None
    """None: the sequence is whole on this rank."""
    biases: Sequence[torch.Tensor] | None
    """For the keys of each rank of the group: what is added to the scores, without gradient; None: nothing."""
    is_causal: bool
    scale: float


class BlockPairs(NamedTuple):
    """Which queries see which keys of a block, as slices, and whether a causal mask is among them."""

    queries: slice
    keys: slice
    is_causal: bool


_ALL = slice(None)


def pairs_of(rank: int, other: int, length: int, is_causal: bool) -> BlockPairs:
    """Return what rank `rank` computes with the keys of rank `other`, each with `length` tokens.

    See [Note: zigzag].
    """
    if not is_causal or rank == other:
        return BlockPairs(_ALL, _ALL, is_causal)
    half = length // 2
    return BlockPairs(_ALL, slice(0, half), False) if other < rank else BlockPairs(slice(half, None), _ALL, False)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks. See [Note: the ring]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RingCall) -> Any:
        """Return the output, of shape (batch, heads, tokens of this rank, width of values)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        rank, size = _place(call)
        held = Block.pack(key, value) if size > 1 else Block(None, key, value)
        whole: Attended | None = None
        for step in range(size):
            hop = _pass_on(call, held, step)
            other = (rank - step) % size
            pairs = pairs_of(rank, other, query.shape[2], call.is_causal)
            part = attend_block(_operands(query, held, pairs), _scoring(call, other, pairs))
            if whole is None:
                whole = Attended(part.output.to(wide), part.log_sum)
            else:
                rows = pairs.queries
                seen = Attended(whole.output[:, :, rows], whole.log_sum[:, :, rows])
                seen.log_sum.copy_(merge(seen, part))
            if hop is not None:
                held = held.like(hop.wait())
        assert whole is not None, "a group has at least one rank"
        output, log_sum = whole.output.to(query.dtype), whole.log_sum
        if call.biases is not None:
            log_sum.masked_fill_(log_sum == -torch.inf, 0.0)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of query, key and value of this rank."""
        query, key, value, output, log_sum = ctx.saved_tensors
        call: RingCall = ctx.call
        wide = torch.promote_types(query.dtype, torch.float32)
        rank, size = _place(call)
        held = Block.pack(key, value) if size > 1 else Block(None, key, value)
        own: Operands | None = None
        gradients: Hop | None = None
        for step in range(size):
            hop = _pass_on(call, held, step)
            other = (rank - step) % size
            pairs = pairs_of(rank, other, query.shape[2], call.is_causal)
            rows = pairs.queries
            part = attend_block_backward(
                grad[:, :, rows],
                _operands(query, held, pairs),
                Attended(output[:, :, rows], log_sum[:, :, rows]),
                _scoring(call, other, pairs),
            )
            if own is None:
                own = part._replace(query=part.query.to(wide))
            else:
                own.query[:, :, rows] += part.query
                gradients = _send_gradients(call.group, held, part, pairs.keys, gradients)
            if hop is not None:
                held = held.like(hop.wait())
        assert own is not None, "a group has at least one rank"
        if gradients is not None:
            home = held.like(gradients.wait())
            own = own._replace(key=home.key.add_(own.key), value=home.value.add_(own.value))
        return own.query.to(query.dtype), own.key.to(key.dtype), own.value.to(value.dtype), None


class Block(NamedTuple):
    """Keys and values of one rank, or their gradients, in one piece of memory to send."""

    memory: torch.Tensor | None
    """Flat; None where nothing is sent."""
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def pack(cls, key: torch.Tensor, value: torch.Tensor) -> Block:
        """Return a copy of both."""
        return cls(None, key, value).like(torch.cat([key.reshape(-1), value.reshape(-1)]))

    def like(self, memory: torch.Tensor) -> Block:
        """Return a block of these shapes in `memory`, of any type."""
        count = self.key.numel()
        return Block(memory, memory[:count].view(self.key.shape), memory[count:].view(self.value.shape))


def _place(call: RingCall) -> tuple[int, int]:
    return (0, 1) if call.group is None else (call.group.rank, call.group.size)


def _operands(query: torch.Tensor, held: Block, pairs: BlockPairs) -> Operands:
    return Operands(query[:, :, pairs.queries], held.key[:, :, pairs.keys], held.value[:, :, pairs.keys])


def _scoring(call: RingCall, other: int, pairs: BlockPairs) -> Scoring:
    bias = None
    if call.biases is not None:
        bias = call.biases[other][:, :, :, pairs.keys]
        bias = bias if bias.shape[-2] == 1 else bias[:, :, pairs.queries]
    return Scoring(bias, pairs.is_causal, call.scale)


def _pass_on(call: RingCall, held: Block, step: int) -> Hop | None:
    """Begin to pass on the block that is held, and to receive the next one; None when all have been here."""
    if call.group is None or step == call.group.size - 1:
        return None
    assert held.memory is not None, "what travels is packed"
    return call.group.start_hop(held.memory, torch.empty_like(held.memory), KEYS_TAG)


def _send_gradients(
    group: ContextGroup | None, held: Block, part: Operands, keys: slice, arriving: Hop | None
) -> Hop:
    """Add this rank's part to the gradients of a block of keys, and pass them on.

    `arriving` brings what the ranks before have added; None: this rank is the first after the owner.
    """
    assert group is not None, "gradients travel in a group"
    assert held.memory is not None, "what travels is packed"
    if arriving is None:
        wide = torch.promote_types(held.memory.dtype, torch.float32)
        memory = torch.zeros_like(held.memory, dtype=wide)
        room = torch.empty_like(memory)
    else:
        memory, room = arriving.wait(), arriving.sent
    sums = held.like(memory)
    sums.key[:, :, keys] += part.key
    sums.value[:, :, keys] += part.value
    return group.start_hop(memory, room, GRADIENTS_TAG)
