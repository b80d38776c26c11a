"""Messages by collectives of the backend: of tensors on a device, from where they are to where they go."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..messages.message import GroupRank, Message, received_shape

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
