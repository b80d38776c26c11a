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


# Attention of some queries to some keys, with the log of the softmax's sum: the piece that a ring is made of.
#
# `attend_block` and its backward pass are exact for the pairs they are given. Results for several blocks of keys
# are merged by `merge`, and gradients of a block follow from the merged output and sum (Dao 2023,
# "FlashAttention-2", section 3.1, algorithms 1 and 2).
#
# On the CPU torch's own kernel runs; on other devices, and for values of another width than the keys, matrix
# products on slices of the queries, which keep at most `SLICE_BYTES` of scores.


SLICE_BYTES = 64 * 2**20
_FLASH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Operands(NamedTuple):
    """Queries, keys and values, or their gradients."""

    query: torch.Tensor
    """(batch, heads, queries, width)."""
    key: torch.Tensor
    """(batch, heads / g, keys, width): groups of g heads share keys and values."""
    value: torch.Tensor
    """(batch, heads / g, keys, width of values)."""


class Scoring(NamedTuple):
    """What is done to the scores before the softmax."""

    bias: torch.Tensor | None
    """Added, in the type of the queries, 4-dimensional and broadcast; None: nothing is."""
    is_causal: bool
    """Whether query i sees the keys up to i only; then `bias` is the same for all queries."""
    scale: float


class Attended(NamedTuple):
    """The output of attention, and the log of the softmax's sum."""

    output: torch.Tensor
    """(batch, heads, queries, width of values)."""
    log_sum: torch.Tensor
    """(batch, heads, queries), at least float32."""


def attend_block(operands: Operands, scoring: Scoring) -> Attended:
    """Return the attention of the queries to the keys; a query that sees no key has 0 and minus infinity."""
    query, key, value = operands
    bias, is_causal, scale = scoring
    if not _has_kernel(operands):
        return _attend_by_products(operands, scoring)
    output, log_sum = _flash(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
    if bias is not None:  # the kernel's log is 0 where a query sees nothing
        log_sum = log_sum.masked_fill(_sees_nothing(bias, is_causal), -torch.inf)
    return Attended(output, log_sum)


def attend_block_backward(
    grad: torch.Tensor, operands: Operands, attended: Attended, scoring: Scoring
) -> Operands:
    """Return what the block adds to the gradients of query, key and value.

    `attended` is that of all blocks, merged; the log of a query that sees no key may be any finite number.
    """
    if not _has_kernel(operands):
        return _backward_by_products(grad, operands, attended, scoring)
    bias, is_causal, scale = scoring
    return Operands(
        *_flash_backward(grad, *operands, *attended, 0.0, is_causal, attn_mask=bias, scale=scale)
    )  # fmt: skip


def merge(attended: Attended, block: Attended) -> torch.Tensor:
    """Add a block to the output, in place, and return the log of both sums.

    The output is at least float32. Source: Milakov and Gimelshein 2018, "Online normalizer calculation for
    softmax", section 3.
    """
    both = torch.logaddexp(attended.log_sum, block.log_sum)
    share = torch.exp(block.log_sum - both).nan_to_num_(0.0)  # neither sees a key: minus infinity less itself
    attended.output.lerp_(block.output.to(attended.output.dtype), share.unsqueeze(-1))
    return both


def _has_kernel(operands: Operands) -> bool:
    query, _, value = operands
    return (
        query.device.type == "cpu" and query.dtype in _FLASH_DTYPES and query.shape[-1] == value.shape[-1]
    )  # fmt: skip


def _sees_nothing(bias: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Return which queries see no key, to be broadcast to (batch, heads, queries)."""
    is_hidden = bias == -torch.inf
    if is_causal:
        assert bias.shape[-2] == 1, f"with a causal mask the bias is one for all queries, not {bias.shape[-2]}"
        return is_hidden.squeeze(-2).to(torch.uint8).cumprod(-1, dtype=torch.uint8).bool()
    return is_hidden.all(-1)


# -- by matrix products ----------------------------------------------------------------------------


def _slices(operands: Operands) -> list[slice]:
    """Return slices of the queries whose scores, in float32, have at most `SLICE_BYTES`."""
    query, key, _ = operands
    row_bytes = 4 * query.shape[0] * query.shape[1] * key.shape[2]
    rows = max(1, SLICE_BYTES // max(1, row_bytes))
    return [slice(begin, begin + rows) for begin in range(0, query.shape[2], rows)]


def _repeated(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values for each head of queries, at least float32."""
    wide = torch.promote_types(operands.query.dtype, torch.float32)
    times = operands.query.shape[1] // operands.key.shape[1]
    keys, values = operands.key.to(wide), operands.value.to(wide)
    return (keys, values) if times == 1 else (keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1))


def _scores(query: torch.Tensor, keys: torch.Tensor, scoring: Scoring, rows: slice) -> torch.Tensor:
    bias = scoring.bias
    scores = query[:, :, rows].to(keys.dtype) @ keys.transpose(-1, -2) * scoring.scale
    if bias is not None:
        scores += bias if bias.shape[-2] == 1 else bias[:, :, rows]
    if scoring.is_causal:
        here = torch.arange(query.shape[2], dtype=torch.int64, device=query.device)[rows]
        there = torch.arange(keys.shape[2], dtype=torch.int64, device=query.device)
        scores.masked_fill_(there > here[:, None], -torch.inf)
    return scores


def _attend_by_products(operands: Operands, scoring: Scoring) -> Attended:
    query = operands.query
    keys, values = _repeated(operands)
    output = query.new_empty((*query.shape[:3], values.shape[-1]))
    log_sum = keys.new_empty(query.shape[:3])
    for rows in _slices(operands):
        scores = _scores(query, keys, scoring, rows)
        log_sum[:, :, rows] = torch.logsumexp(scores, -1)
        output[:, :, rows] = (torch.softmax(scores, -1).nan_to_num_(0.0) @ values).to(query.dtype)
    return Attended(output, log_sum)


def _backward_by_products(
    grad: torch.Tensor, operands: Operands, attended: Attended, scoring: Scoring
) -> Operands:
    query, key, value = operands
    keys, values = _repeated(operands)
    of_query = torch.empty_like(query)
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _slices(operands):
        scores = _scores(query, keys, scoring, rows)
        shares = torch.exp(scores - attended.log_sum[:, :, rows].unsqueeze(-1))
        grads = grad[:, :, rows].to(keys.dtype)
        of_value += shares.transpose(-1, -2) @ grads
        inner = (grads * attended.output[:, :, rows].to(keys.dtype)).sum(-1, keepdim=True)
        of_scores = shares * (grads @ values.transpose(-1, -2) - inner) * scoring.scale
        of_query[:, :, rows] = (of_scores @ keys).to(query.dtype)
        of_key += of_scores.transpose(-1, -2) @ query[:, :, rows].to(keys.dtype)
    return Operands(of_query, _fold(of_key, key), _fold(of_value, value))


def _fold(grad: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return the sum over the heads that share keys or values."""
    batch, heads = shared.shape[:2]
    return grad.view(batch, heads, -1, *grad.shape[2:]).sum(2).to(shared.dtype)
