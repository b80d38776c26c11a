"""A sum in few messages, for many ranks and small tensors: recursive doubling.

In round k each rank swaps what it has with the rank whose number differs in bit k, and both add. For P ranks,
a power of two, that is log2 P messages a rank, where everybody to everybody is P - 1 messages in one round.
Other numbers of ranks fold: those beyond the power of two first hand their part to one below, and receive the
sum at the end.

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

from .message import Encoding, GroupRank, Message
from .reduce_rules import accumulates_in_fp32


def sum_by_doubling(tensor: torch.Tensor, seat: GroupRank) -> Encoding:
    """Sum over the ranks. A rank sends its tensor once a round, in float32 when it has 16 bits or less."""
    power = 1 << (seat.size.bit_length() - 1)
    total = tensor.float() if accumulates_in_fp32(tensor.dtype) else tensor.clone()
    beyond = seat.rank >= power
    partner = seat.rank - power if beyond else seat.rank + power
    folds = partner < seat.size
    if power < seat.size:
        other = yield Message(total, "swap", peer=partner if folds else seat.rank)
        if folds and not beyond:
            total = total + other[0]
    step = 1
    while step < power:
        peer = seat.rank if beyond else seat.rank ^ step
        other = yield Message(total, "swap", peer=peer)
        if not beyond:
            total = total + other[0] if peer > seat.rank else other[0] + total
        step *= 2
    if power < seat.size:
        other = yield Message(total, "swap", peer=partner if folds else seat.rank)
        if beyond:
            total = other[0]
    total = total.to(tensor.dtype)
    return total, total
