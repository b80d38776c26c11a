"""Ranks that are threads of this process: a reducer or a session of each, in milliseconds.

The store is torch's `HashStore`, the messages of codecs go over socket pairs by the real transport and its thread.
Only the backend's all-reduce is played (`Sums`), since a process has one default group.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from farandole.comm.engine import bucket as dense_bucket
from farandole.comm.engine import bucket as sparse_bucket
from farandole.comm.engine import guards, in_flight
from farandole.comm.engine.parameters import ReducerOptions
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.routes import Route
from farandole.comm.transport.comm_thread import CommThread
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.transport import Peers, Transport
from farandole.comm.world.world import ProcessGroups, World
from farandole.core.vocabulary.events import Event
from farandole.core.vocabulary.spec import Plan

WAIT_SECONDS = 10.0
_Result = TypeVar("_Result")


class Everything:
    """Keeps all events."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def record(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, kind: type[_Result]) -> list[_Result]:
        return [event for event in self.seen if isinstance(event, kind)]


class _Sum:
    """One all-reduce of all ranks."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.done = threading.Event()

    def wait(self) -> None:
        if not self.done.wait(WAIT_SECONDS):
            raise RuntimeError(f"timed out: only ranks {sorted(self.tensors)} came")


Group = tuple[int, int]
"""A rank, and which of its groups."""


class Sums:
    """The backend's all-reduce among threads: the n-th call of each rank with a group is part of its n-th sum."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._sums: dict[tuple[int, int], _Sum] = defaultdict(_Sum)
        self._turns: dict[Group, Iterator[int]] = defaultdict(itertools.count)

    def start(self, tensor: torch.Tensor, group: Group) -> _Sum:
        rank, number = group
        with self._lock, torch.no_grad():
            found = self._sums[number, next(self._turns[group])]
            found.tensors[rank] = tensor
            if len(found.tensors) == self._size:
                total = torch.stack([each.to_dense() for each in found.tensors.values()]).sum(0)
                for each in found.tensors.values():
                    each.copy_(total.to_sparse(1) if each.is_sparse else total)
                found.done.set()
        return found


@dataclass
class Rank:
    """One rank, as its thread sees it."""

    world: World
    route: Route
    events: Everything = field(default_factory=Everything)

    @property
    def number(self) -> int:
        return self.world.rank

    def reducer(self, named: dict[str, nn.Parameter], plan: Plan | None = None, **options: Any) -> GradientReducer:
        """Return a reducer over `named`, whose world records into `events`."""
        self.world.session.recorder = self.events
        plan = plan or Plan(route="flat")
        return GradientReducer(self.world, list(named.items()), plan, ReducerOptions(**options))


def world_of(rank: int, size: int, store: dist.Store | None = None) -> World:
    """Return a world whose ranks only share a store."""
    return World(
        rank=rank, size=size, local_rank=0, local_size=1, node_rank=rank, node_count=size, host=f"host{rank}",
        address=None, device=torch.device("cpu"), source="a test", timeout_seconds=WAIT_SECONDS,
        groups=ProcessGroups(cast("dist.ProcessGroup", (rank, -1)) if size > 1 else None, store=store),
    )  # fmt: skip


def play(size: int, body: Callable[[Rank], _Result]) -> list[_Result]:
    """Run `body` on `size` ranks at once; return what each returned, or raise what stopped the first."""
    results: dict[int, _Result] = {}
    problems: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            results[rank.number] = body(rank)
        except BaseException as problem:
            problems.append(problem)

    with _ranks(size) as ranks:
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank.number}") for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * WAIT_SECONDS)
    if problems:
        raise problems[0]
    return [results[rank] for rank in range(size)]


@contextmanager
def _ranks(size: int) -> Iterator[list[Rank]]:
    store, sums, everyone = dist.HashStore(), Sums(size), tuple(range(size))
    worlds = [world_of(rank, size, store) for rank in everyone]
    mesh: list[list[list[socket.socket]]] = [[[] for _ in everyone] for _ in everyone]
    for one, other in itertools.combinations(everyone, 2):
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        mesh[one][other], mesh[other][one] = [ends[0]], [ends[1]]
    conductors = []
    for world, connections in zip(worlds, mesh, strict=True):
        alone = world_of(world.rank, 1)
        transport = Transport(alone, timeout_seconds=WAIT_SECONDS, made=connections)
        transport.peers = Peers(world.rank, [each.host for each in worlds])
        conductors.append(CommThread(transport))
    made = [itertools.count() for _ in everyone]

    def connect(world: World, *_: Any, **__: Any) -> Route:
        """Each with a group of its own; messages of all go over the same connections."""
        rank = world.rank
        group = cast("dist.ProcessGroup", (rank, next(made[rank])))
        alone = RankGroup((rank,), rank)
        return Route("flat", "a test says so", group, RankGroup(everyone, rank), alone, conductor=conductors[rank])

    with (
        mock.patch.object(in_flight, "connect_route", connect),
        mock.patch.object(dense_bucket, "start_all_reduce", sums.start),
        mock.patch.object(sparse_bucket, "start_all_reduce", sums.start),
        mock.patch.object(in_flight, "start_all_reduce", sums.start),
        mock.patch.object(guards, "start_all_reduce", sums.start),
    ):
        try:
            yield [Rank(world, connect(world)) for world in worlds]
        finally:
            for conductor in conductors:
                conductor.close()


def parameters_of(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """Return parameters of ones, by name."""
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def backward(named: dict[str, nn.Parameter], **scales: float) -> None:
    """Clear all gradients; then give the named parameters gradients of their scales, the last one's first."""
    for parameter in named.values():
        parameter.grad = None
    add_pass(named, **scales)


def add_pass(named: dict[str, nn.Parameter], **scales: float) -> None:
    """Do a backward pass that adds to the gradients."""
    total = torch.zeros(())
    for name, scale in scales.items():
        total = total + scale * named[name].sum()
    total.backward()


def grads(named: dict[str, nn.Parameter]) -> dict[str, float | None]:
    """Return each gradient, which has one value everywhere."""
    found: dict[str, float | None] = {}
    for name, parameter in named.items():
        if parameter.grad is not None:
            assert parameter.grad.min() == parameter.grad.max(), name
        found[name] = None if parameter.grad is None else float(parameter.grad.flatten()[0])
    return found
