"""The thread of operations on a device, without a device: what it sends to whom, and that it can be given up."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.comm.messages import GroupRank
from farandole.comm.transport.rank_group import PieceExchange
from farandole.horovod.named_ops.group_thread import GroupThread, exchange_pieces


def test_pieces_go_to_their_ranks_and_all_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def batch(calls: list[Any]) -> list[Any]:
        said = [(each.op.__name__, each.group_peer, each.tensor.numel()) for each in calls]
        assert said == [("isend", 9, 24), ("irecv", 5, 4), ("irecv", 9, 16)]
        return [SimpleNamespace(wait=lambda at=at: waited.append(at)) for at in range(len(calls))]

    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, group, group_peer: SimpleNamespace(
        op=op, tensor=tensor, group_peer=group_peer))  # fmt: skip
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    outgoing = [torch.zeros(0), torch.zeros(9), torch.zeros(3).double()]
    incoming = [torch.zeros(1), torch.zeros(9), torch.zeros(2).double()]
    group: Any = None
    assert exchange_pieces(PieceExchange(outgoing, incoming), (5, 6, 9), GroupRank(1, 3), group) == 24
    assert waited == [0, 1, 2]


def test_an_operation_that_the_device_never_passes_ends_when_it_is_given_up() -> None:
    asked, aborted, ends = threading.Event(), threading.Event(), list[BaseException]()

    def has_passed(event: object) -> bool:
        asked.set()
        return False

    streams = SimpleNamespace(on=nullcontext, operations="operations", record=object, has_passed=has_passed)
    groups: Any = SimpleNamespace(device=torch.device("cpu"), streams=streams, backend="gloo", abort=aborted.set)
    thread = GroupThread(groups)

    def land() -> None:
        try:
            thread.land(lambda: None)
        except RuntimeError as problem:
            ends.append(problem)

    waiting = threading.Thread(target=land, daemon=True)
    waiting.start()
    assert asked.wait(10)
    thread.abort()
    waiting.join(10)
    assert aborted.is_set()
    assert [str(each) for each in ends] == ["the operations on the device were given up"]
    thread.close()
