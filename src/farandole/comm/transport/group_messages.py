"""Messages by collectives of the backend: of tensors on a device, from where they are to where they go."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from ..messages import GroupRank, Message, check, received_shape, reduce_scatter_all_gather
from .comm_thread import Conversation, SegmentWork
from .connect import Connection
from .rank_group import PieceExchange, RankGroup, Within
from .transport import Transport

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


# A transport beyond collectives: frames whose length the receiver does not know, and connections made later.


class FrameTransport(Transport):
    """See `transport.Transport`."""

    def add(self, rank: int, connection: socket.socket, *, sends: bool) -> Connection:
        """Take a connection to `rank` that was made later; return it. `sends`: what is sent there goes by it."""
        self._require_owner()
        lane = Connection(rank, connection)
        self._lanes[connection.fileno()] = lane
        self._poll.register(connection.fileno(), select.EPOLLIN)
        if sends:
            self._by_rank[rank].append(lane)
        return lane

    def watch(self, descriptor: int, serve: Callable[[], object]) -> None:
        """Call `serve`, from whatever call waits for the kernel, when the descriptor is readable."""
        self._watched[descriptor] = serve
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """End what `watch` began."""
        self._watched.pop(descriptor)
        self._poll.unregister(descriptor)

    def send_frame(self, target: int, tag: int, frame: memoryview) -> None:
        """Begin to send a frame, whose length only this rank knows, to a rank that calls `take_frames`."""
        self._require_owner()
        self._send(target, tag, frame)

    def take_frames(self, sources: Collection[int], tag: int) -> dict[int, memoryview]:
        """Return the frames of `sources` with this tag, of any length, once they have arrived.

        Raises as `PendingMessage.wait` does.
        """
        self._require_owner()
        self._serve_until_none(lambda: {source for source in sources if (source, tag) not in self._early})
        return {source: self._early.pop((source, tag)) for source in sources}
