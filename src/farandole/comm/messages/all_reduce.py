"""Sums over the ranks, made of messages that every transport can carry.

Two algorithms: reduce-scatter and all-gather, for large tensors, and recursive doubling, for many ranks and small
tensors. Both give the same bits on all ranks.

Recursive doubling: in round k each rank exchanges its partial sum with the rank whose number differs in bit k, and
both add. For P ranks, a power of two, that is log2 P messages a rank, where an all-to-all is P - 1 messages in one
round. Other numbers of ranks fold: those beyond the power of two first hand their part to one below, and receive
the sum at the end.

[Note: the same bits] After round k the ranks whose numbers agree in all bits above k hold the same bits.
Before the first round that is true of each rank alone. In round k two such groups meet, member by member; all
of one hold a, all of the other hold b, and each computes a + b with the lower group's first. So both groups
hold the same bits then, and after the last round all ranks do. Which numbers are added in which order depends
on the number of ranks alone.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
2005.
"""

from __future__ import annotations

import torch

from .message import GroupRank, Message, Reduction
from .reduce_rules import accumulates_in_fp32

ONE_ROUND_BYTES = 16 * 1024
"""Up to this many bytes in all, each rank sends its whole tensor to all others in one round: latency dominates."""


def reduce_scatter_all_gather(tensor: torch.Tensor, group: GroupRank, divisor: int = 1) -> Reduction:
    """Return the sum over the ranks, over `divisor`, by ``all_to_all`` and ``all_gather``, in the order of ranks.

    Every element is added up by one rank, so all ranks end with the same bits. A rank sends 2 (N-1)/N S bytes.
    Small tensors are gathered in one round, and every rank adds them up: (N-1) S bytes.

    See [Note: who may write when] in `message`.
    """
    count = tensor.numel()
    if count * tensor.element_size() * group.size <= ONE_ROUND_BYTES:
        gathered = yield Message(tensor.clone(), "all_gather")
        total = add_rows(gathered, divisor)
    else:
        piece = -(-count // group.size)
        padded = tensor.reshape(-1)
        if piece * group.size != count:
            padded = torch.cat([padded, padded.new_zeros(piece * group.size - count)])
        local = add_rows((yield Message(padded.view(group.size, piece), "all_to_all")), divisor)
        total = (yield Message(local, "all_gather")).reshape(-1)[:count]
    return total.view(tensor.shape)


def recursive_doubling(tensor: torch.Tensor, group: GroupRank) -> Reduction:
    """Sum over the ranks. A rank sends its tensor once a round, in float32 when it has 16 bits or less."""
    power = 1 << (group.size.bit_length() - 1)
    total = tensor.float() if accumulates_in_fp32(tensor.dtype) else tensor.clone()
    beyond = group.rank >= power
    partner = group.rank - power if beyond else group.rank + power
    folds = partner < group.size
    if power < group.size:
        other = yield Message(total, "sendrecv", peer=partner if folds else group.rank)
        if folds and not beyond:
            total = total + other[0]
    step = 1
    while step < power:
        peer = group.rank if beyond else group.rank ^ step
        other = yield Message(total, "sendrecv", peer=peer)
        if not beyond:
            total = total + other[0] if peer > group.rank else other[0] + total
        step *= 2
    if power < group.size:
        other = yield Message(total, "sendrecv", peer=partner if folds else group.rank)
        if beyond:
            total = other[0]
    total = total.to(tensor.dtype)
    return total


def add_rows(rows: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """Return the sum of `rows` over the first dimension, added in order, over `divisor`.

    Floats of 16 bits and less are added up and divided in float32, and rounded once.
    """
    total = rows[0].float() if accumulates_in_fp32(rows.dtype) else rows[0].clone()
    for row in rows[1:]:
        total += row
    if divisor != 1:
        total /= divisor
    return total.to(rows.dtype)
