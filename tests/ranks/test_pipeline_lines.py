"""Pipelines where a group does what it is told in order, as NCCL does: each direction has a line of its own."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.pipeline import apply, cut_model, messages
from farandole.parallel.pipeline import messages as peers
from tests.ranks.pool import ranks, takes
from tests.ranks.test_pipeline import Tied, chain, compare, cross_entropy, follow

pytestmark = pytest.mark.full("slow")


class InOrder:
    """Sends and receives of a group go one after the other, each until its other side has come.

    The first of a group waits on the host. Stands for `torch.distributed` in a module.
    """

    def __init__(self) -> None:
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: torch.Tensor, *, group: dist.ProcessGroup, group_dst: int) -> Any:
        return self._told(group, self._send_and_hear, tensor, group, group_dst)

    def irecv(self, tensor: torch.Tensor, *, group: dist.ProcessGroup, group_src: int) -> Any:
        return self._told(group, self._receive_and_say, tensor, group, group_src)

    def send(self, tensor: torch.Tensor, *, group: dist.ProcessGroup, group_dst: int) -> None:
        self.isend(tensor, group=group, group_dst=group_dst).wait()

    def recv(self, tensor: torch.Tensor, *, group: dist.ProcessGroup, group_src: int) -> None:
        self.irecv(tensor, group=group, group_src=group_src).wait()

    def P2POp(self, op: Any, tensor: torch.Tensor, **where: Any) -> Any:  # noqa: N802  # torch's name
        return dist.P2POp(dist.isend if op == self.isend else dist.irecv, tensor, **where)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def _send_and_hear(self, tensor: torch.Tensor, group: dist.ProcessGroup, other: int) -> None:
        dist.send(tensor, group=group, group_dst=other)
        dist.recv(torch.empty(1), group=group, group_src=other, tag=1)

    def _receive_and_say(self, tensor: torch.Tensor, group: dist.ProcessGroup, other: int) -> None:
        dist.recv(tensor, group=group, group_src=other)
        dist.send(torch.empty(1), group=group, group_dst=other, tag=1)

    def _told(self, group: dist.ProcessGroup, call: Any, *arguments: Any) -> Any:
        is_first = id(group) not in self._threads
        thread = self._threads.setdefault(id(group), ThreadPoolExecutor(1))
        done: Future[None] = thread.submit(call, *arguments)

        class Work:
            def wait(self) -> None:
                done.result(timeout=20)

        work = Work()
        if is_first:
            work.wait()
        return work


@contextmanager
def in_order() -> Generator[None, None, None]:
    groups: Any = InOrder()
    with ExitStack() as stack:
        stack.callback(groups.close)
        stack.enter_context(patch.object(apply, "needs_lines", lambda _: True))
        for module in (messages, cut_model, peers):
            stack.enter_context(patch.object(module, "dist", groups))
        yield


def follow_in_order(plan: Plan, make: Any, batches: list[Any], what: str) -> None:
    with in_order():
        follow(make(), make(), plan, batches, what)


@ranks(2, 4)
@takes(60)
def test_every_schedule_on_lines() -> None:
    stages = fd.init().size
    torch.manual_seed(3)
    batches = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(3)]
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        follow_in_order(Plan(pipeline=stages, schedule=schedule, micro_batches=8), chain, batches, schedule)


@ranks(4)
@takes(60)
def test_tied_weights_and_replicas_on_lines() -> None:
    world = fd.init()
    torch.manual_seed(4)
    tokens = [torch.randint(11, (8, 5)) for _ in range(3)]
    tied = Plan(pipeline=4, micro_batches=4)
    follow_in_order(tied, Tied, [(each, each) for each in tokens], "tied weights")
    torch.manual_seed(5)
    rows = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    reference, model = chain(), chain()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (reference, model))
    with in_order():
        fd.distribute(model, optimizer, Plan(data=2, pipeline=2, micro_batches=2))
        mine = slice(world.sample_rank, None, world.sample_size)
        for x, y in rows:
            plain.zero_grad(), optimizer.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            fd.step(model, cross_entropy, x[mine], y[mine])
            plain.step(), optimizer.step()
    compare(reference, model, "replicas")
