"""Messages by collectives of the backend: of tensors on a device, from where they are to where they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..messages.all_reduce import reduce_scatter_all_gather
from ..messages.message import GroupRank, Message, check, received_shape
from .comm_thread import Conversation, SegmentWork
from .rank_group import PieceExchange, RankGroup, Within

# The older name warns in torch 2.13; the newer one is not in torch 2.10.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange_by_group(message: Message, seat: GroupRank, group: dist.ProcessGroup) -> torch.Tensor:
    """Send one round's message among all ranks of `group`, and return what is received, see `Message`.

    Collectives are not asynchronous: on a device the current stream waits, and the host does not. Raises
    `ValueError` for an operation that no codec of a device uses.
    """
    tensor = message.tensor.contiguous()
    received = tensor.new_empty(received_shape(message, seat))
    if message.operation == "all_to_all":
        dist.all_to_all_single(received, tensor, group=group)
    elif message.operation == "all_gather":
        _all_gather(received.view(-1), tensor.view(-1), group=group)
    else:
        raise ValueError(f"{message.operation}: by collectives only all_to_all and all_gather travel")
    return received


def drive(item: SegmentWork, carry: Callable[[Message | PieceExchange, RankGroup], torch.Tensor]) -> Any:
    """Drive an item's conversation to its end, and return its result.

    `carry` exchanges one round among the ranks of a group, and returns what is received. Rows of a sum are added
    here, in the order of ranks: the same bits everywhere.
    """
    stack: list[Conversation] = [item.begin()]
    answer: torch.Tensor | None = None
    while True:
        try:
            message = next(stack[-1]) if answer is None else stack[-1].send(answer)
        except StopIteration as end:
            stack.pop()
            if not stack:
                return end.value
            answer = end.value
            continue
        circle = item.circle
        if isinstance(message, Within):
            circle, message = message.group, message.message
        if isinstance(message, Message):
            check(message, circle.seat)
            if message.operation == "all_reduce":
                assert circle is item.circle, "its rounds are those of the conversation's own group"
                stack.append(reduce_scatter_all_gather(message.tensor, circle.seat))
                answer = None
                continue
        answer = carry(message, circle)
