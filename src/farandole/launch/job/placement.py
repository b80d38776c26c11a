"""Which rank runs where: hosts are filled in their order, and may have different numbers of slots.

[Note: cross rank] Ranks with the same local rank on different hosts form a group across hosts.
`cross_rank` is the index among the hosts that *have* this local rank, `cross_size` their number: on
hosts of 1 and 2 slots, local rank 1 is alone in its group. `node_rank` counts all hosts.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...core.env import read_thread_count
from ...core.host.interfaces import interface_of_node
from ...core.launcher_env import NodeInfo
from ...core.vocabulary.errors import ConfigError
from .contract import RankSpec
from .hosts import LOOPBACK, MOST_SLOTS, EmulatedHost, HostNamespaces, HostSlots, in_network_of

# Which cores a rank gets: an equal, contiguous share of those it may use; what to say of too few.


def available_cores() -> list[int]:
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def divide_cores(cores: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Divide `cores` evenly over `ranks`; empty shares (no binding) when there are too few.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [(0, 1), (2, 3)]
    """
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def threads_per_rank(cores: Sequence[int], ranks: int) -> int:
    """Return how many compute threads each of `ranks` should use: its share of the cores.

    >>> threads_per_rank([0, 1, 2, 3, 4], 2), threads_per_rank([0, 1], 3)
    (2, 1)
    """
    return max(1, len(cores) // max(1, ranks))


def bind_ranks(places: Sequence[RankSpec], cores: list[int], *, bind: bool) -> list[RankSpec]:
    """Return the places of all ranks of a host, each with its share of `cores` when they are to be bound."""
    shares = divide_cores(cores, len(places)) if bind else [()] * len(places)
    spare = tuple(sorted(set(cores).difference(*shares)))
    return [replace(place, cores=share, spare_cores=spare) for place, share in zip(places, shares, strict=True)]


def crowding_warnings(
    ranks: int, cores: int, *, bind: bool, remedy: str, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return what to say, before the start, of more ranks or more threads than cores on a host.

    `remedy` has a place for how many ranks it has cores for; `environment` is that of the ranks, None: our own.
    """
    if ranks > cores:
        return (
            f"{ranks} ranks on {_core_word(cores)}: they share cores, none is bound, and a step takes the longer; "
            + remedy.format(cores),
        )
    own = cores // ranks
    asked = read_thread_count(environment)
    if not bind or asked is None or asked <= own:
        return ()
    return (
        f"OMP_NUM_THREADS={asked}, and each rank is bound to {_core_word(own)}: leave it out, or set it to {own}",
    )


def _core_word(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"


# A port for the ranks to meet at, reserved without a race.
#
# The port is bound here and never listened on. Because it was bound without SO_REUSEADDR the kernel gives it to
# no other process; because SO_REUSEADDR is set afterwards, rank 0 (which sets it too, as every server does) can
# bind and listen on it while it is still held here.


class ReservedPort:
    """Holds a port of `address`, on `host` when it is not this one, until closed. A context manager."""

    def __init__(self, address: str = "127.0.0.1", host: HostNamespaces | None = None) -> None:
        self._socket = _reserve(address) if host is None else in_network_of(host, lambda: _reserve(address))
        self.address = address
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_in_use(port: int, process: int | None = None) -> bool:
    """Return whether a TCP socket listens at `port` or is connected with it, where `process`, or this one, is.

    The kernel knows of most connections for a minute after they were closed.
    """
    ending = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            _, *rows = Path(f"/proc/{process or 'self'}/net/{name}").read_text(encoding="ascii").splitlines()
            if any(address.endswith(ending) for row in rows for address in row.split()[1:3]):
                return True
    return False


def _reserve(address: str) -> socket.socket:
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    reserved.bind((address, 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def assign_ranks(hosts: Sequence[HostSlots], size: int) -> list[RankSpec]:
    """Return the place of each of `size` ranks; hosts that get none do not count.

    Raises `ConfigError` when the hosts have too few slots.
    """
    slots = [(node, local) for node, host in enumerate(hosts) for local in range(host.slots)]
    if size > len(slots):
        raise ConfigError(
            f"Requested more processes ({size}) than there are available slots ({len(slots)})",
            remedy=f"lower -np, or add slots to {', '.join(host.name for host in hosts)}",
        )
    slots = slots[:size]
    local_sizes = Counter(node for node, _ in slots)
    cross_sizes = Counter(local for _, local in slots)
    seen: Counter[int] = Counter()
    placed = []
    for rank, (node, local) in enumerate(slots):
        host = hosts[node]
        placed.append(
            RankSpec(
                rank, size, local, local_sizes[node], node, len(local_sizes),
                host=host.namespaces if isinstance(host, EmulatedHost) else None, host_name=host.name,
                cross_rank=seen[local], cross_size=cross_sizes[local], visible_devices=host.chosen,
            )
        )  # fmt: skip
        seen[local] += 1
    return placed


# The ranks of one node, where a scheduler starts ``farandole run`` once on every node.


def ranks_per_node(node: NodeInfo, size: int | None) -> int:
    """Return how many ranks each node has when the job has `size`; None: what the scheduler says.

    Raises `ConfigError` when that is not known, and for a size that does not spread evenly.
    """
    if size is None:
        if node.slots is None:
            raise ConfigError(
                f"{node.source} says that this is node {node.node_rank} of {node.node_count}, not how many ranks "
                "a node has",
                remedy=f"give -np, the ranks of all nodes: for one a node -np {node.node_count}",
            )
        return node.slots
    if size % node.node_count:
        raise ConfigError(
            f"-np {size} on {node.node_count} nodes ({node.source}): every node takes the same number of ranks",
            remedy=f"give a multiple of {node.node_count}; -np counts the ranks of all nodes",
        )
    if size // node.node_count > MOST_SLOTS:
        raise ConfigError(f"-np {size}: expected at most {MOST_SLOTS} on one host")
    return size // node.node_count


def node_interface(node: NodeInfo) -> str:
    """Return the interface that leads to the other nodes; "" where it is not known, or all are this machine."""
    if node.address == LOOPBACK:
        return ""
    return interface_of_node(node.address, [node.second] if node.second else [], is_first=node.node_rank == 0)


def node_places(node: NodeInfo, per_node: int) -> list[RankSpec]:
    """Return the places of this node's ranks."""
    interface = node_interface(node)
    first = node.node_rank * per_node
    return [
        RankSpec(
            first + local, per_node * node.node_count, local, per_node,
            node.node_rank, node.node_count, interface=interface,
        )
        for local in range(per_node)
    ]  # fmt: skip
