"""What a collective makes a rank do: the bytes it sends, and the rounds in which it waits for others.

[Note: work of a collective] One definition for those who fit `CollectiveCost` to measured exchanges and for those
who predict exchanges by it. Bytes are those that the busiest rank sends with the algorithm that sends least; an
exchange that sends more of them (a backend whose reduce-scatter is an all-reduce inside) is measured as one with
less bandwidth. Rounds grow with the logarithm of the ranks, as those of trees and of recursive doubling do:
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..step_model.comm_cost import ring_bytes
from ..vocabulary.errors import ConfigError
from ..vocabulary.suggestions import did_you_mean
from .cluster import OPERATIONS


@dataclass(frozen=True)
class CollectiveWork:
    """What one rank does in a collective."""

    sent_bytes: float
    rounds: int


def collective_work(operation: str, ranks: int, nbytes: float) -> CollectiveWork:
    """Return what a collective among `ranks` ranks makes one of them do. See [Note: work of a collective].

    `nbytes`: of the input of all_reduce, reduce_scatter, all_to_all (of one rank) and broadcast, of the output of
    all_gather, of the message of send. A single rank sends nothing.

    >>> collective_work("all_reduce", 4, 1000)
    CollectiveWork(sent_bytes=1500.0, rounds=4)
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"unknown operation {operation!r}", remedy=did_you_mean(operation, OPERATIONS))
    if ranks == 1:
        return CollectiveWork(0.0, 0)
    if operation == "send":
        return CollectiveWork(float(nbytes), 1)
    rounds = (ranks - 1).bit_length()
    if operation == "broadcast":
        return CollectiveWork(float(nbytes), rounds)
    passes = 2 if operation == "all_reduce" else 1
    return CollectiveWork(ring_bytes(nbytes, ranks, passes), passes * rounds)
