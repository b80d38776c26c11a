"""What this process has exchanged: bytes of its TCP connections (a slow network is no hang), and collectives."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ...core.host.open_sockets import borrowed, open_sockets

# Acknowledged and received bytes in Linux's `struct tcp_info`, to which fields are only ever added (4.10).
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120


def collectives_begun() -> int | None:
    """Return how many collectives and messages torch's groups have begun; None where a group does not count.

    Those of torch's own code are in it, e.g. of DistributedDataParallel's reducer, which has no frame in a stack.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return int(sum(group._get_sequence_number_for_group() for group in groups))
    except RuntimeError:
        return None


def carried_bytes() -> int:
    """Return what all connections of this process have sent and received; 0 where the kernel does not say."""
    total = 0
    with suppress(OSError):
        for descriptor, _ in open_sockets():
            with suppress(OSError, struct.error), borrowed(descriptor) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    size = _COUNTS_AT + _COUNTS.size
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                    total += sum(_COUNTS.unpack_from(info, _COUNTS_AT))
    return total
