"""The backend "farandole" of `torch.distributed`: every collective beside gloo, in the same processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend
from farandole.comm.backend import create, host_exchange, message_exchange
from farandole.comm.transport.transport import Transport
from tests.ranks import backend_program, backend_script, backend_sharded
from tests.ranks.pool import free_port, patient, ranks, takes
from tests.ranks.started import started

STEPS = 120


@contextmanager
def as_if_apart(apart: bool, ranks_a_host: int = 1) -> Iterator[None]:
    """Let ranks take themselves for those of several hosts: they exchange messages then, in small segments."""
    before = (create._host_identity, message_exchange.SEGMENT_BYTES, host_exchange.CHUNK_BYTES)
    if apart:
        create._host_identity = lambda rank: f"host {rank // ranks_a_host}"
        message_exchange.SEGMENT_BYTES, host_exchange.CHUNK_BYTES = 2**14, 2**17
    try:
        yield
    finally:
        create._host_identity, message_exchange.SEGMENT_BYTES, host_exchange.CHUNK_BYTES = before


def make(members: list[int] | None = None, seconds: float = 20.0) -> Any:
    """Return a group on our back end."""
    fd.init()
    return dist.new_group(members, backend="farandole", timeout=timedelta(seconds=seconds))


def short_barrier(group: Any, seconds: float) -> None:
    """Wait at a barrier with a time of its own; `dist.barrier` has no such argument before torch 2.12."""
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=seconds)
    group.barrier(options).wait()


def without_gloo(text: str) -> str:
    """Return what a rank printed without what gloo says on its standard output, before torch 2.12."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] "))


@pytest.mark.gate_cases("2-one host")
@takes(60)
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(2, 3)
def test_generated_programs_give_what_gloo_gives(apart: bool) -> None:
    world = fd.init()
    with as_if_apart(apart):
        compare_with_gloo([None, [0, world.size - 1], [0], None])
    fd.shutdown()


@pytest.mark.full("further")
@takes(60)
@ranks(4)
def test_generated_programs_on_hosts_with_several_ranks_give_what_gloo_gives() -> None:
    fd.init()
    with as_if_apart(True, ranks_a_host=2):
        compare_with_gloo([None, None, [1, 2], [0, 1, 3]])
    with as_if_apart(True, ranks_a_host=2):
        group = make()
    start, circles = Transport.start_parts, set()

    def noting(transport: Transport, parts: Any, tag: int, circle: Any) -> Any:
        circles.add(circle.ranks)
        return start(transport, parts, tag, circle)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(Transport, "start_parts", noting)
    # The sum of the first host, 257, is no bfloat16: rounded there to 256, the sum of all would be 258.
    mine = torch.full((70_000,), (256.0, 1.0, 2.0, 0.0)[dist.get_rank()], dtype=torch.bfloat16)
    dist.all_reduce(mine, group=group)
    assert mine.eq(260.0).all(), "259 is rounded once, to an even place"
    monkeypatch.undo()
    # Half of it goes to one rank of the other host.
    assert circles == {(0, 2) if dist.get_rank() % 2 == 0 else (1, 3)}
    fd.shutdown()


def compare_with_gloo(groups_of: list[list[int] | None]) -> None:
    pairs = [(dist.new_group(members), make(members)) for members in groups_of]
    for seed in range(STEPS):
        gloo, ours = pairs[seed % len(pairs)]
        if gloo == dist.GroupMember.NON_GROUP_MEMBER:
            assert ours == dist.GroupMember.NON_GROUP_MEMBER
            continue
        step = backend_program.draw(seed, gloo.size())
        assert ours.name() == "farandole"
        expected = backend_program.play(step, gloo)
        found = backend_program.play(step, ours)
        assert len(found) == len(expected), step
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (step, one, other)
    for gloo, ours in pairs:
        for group in (gloo, ours):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(3)
def test_calls_that_differ_are_an_error_on_all_ranks(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        groups = [make() for _ in range(4)]
    ok, length, kind, order = groups

    tensor = torch.full((1000 - (rank == 2),), 7.0)
    with pytest.raises(fd.Mismatch, match=r"call 1\).*rank . is at|is at all_reduce\(SUM\) of (1000|999) float32"):
        dist.all_reduce(tensor, group=length)
    assert (tensor == 7).all(), "bytes have moved"
    with pytest.raises(fd.Mismatch):  # and the group has ended with it
        dist.barrier(group=length)

    dtype = torch.int32 if rank == 1 else torch.float32
    with pytest.raises(fd.Mismatch, match="int32"):
        dist.broadcast(torch.ones(4, dtype=dtype), 0, group=kind)

    first, second = (dist.all_reduce, dist.broadcast) if rank else (dist.broadcast, dist.all_reduce)
    arguments = ({}, {"src": 0}) if rank else ({"src": 0}, {})
    work = first(torch.ones(4), group=order, async_op=True, **arguments[0])
    second(torch.ones(4), group=order, async_op=True, **arguments[1])
    with pytest.raises(fd.Mismatch, match=r"broadcast .*all_reduce|all_reduce.* broadcast"):
        work.wait()

    with pytest.raises(ValueError, match=r"BAND of torch\.float32"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=ok)
    with pytest.raises(NotImplementedError, match="sparse"):
        ok.broadcast([torch.ones(2, 2).to_sparse()])
    with pytest.raises(NotImplementedError, match="merge_remote_group"):
        ok.merge_remote_group()
    value = torch.ones(2)
    dist.all_reduce(value, group=ok)  # refused arguments leave a group as it was
    assert value.tolist() == [3.0, 3.0]
    fd.shutdown()


@pytest.mark.full("further")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(2)
def test_every_wait_has_an_end(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        late, short, mail, other = make(), make(seconds=0.5), make(), make()
    mail.set_timeout(timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(fd.Stalled, match="rank 1"):
            short_barrier(late, 0.3)
        with pytest.raises(fd.Stalled, match=r"all_reduce\(SUM\) of 2 float32"):
            dist.all_reduce(torch.ones(2), group=short)
        with pytest.raises(fd.Stalled, match=r"recv of 2 float32 from rank 1.*rank 1"):
            dist.recv(torch.ones(2), 1, group=mail)
        work = dist.barrier(group=other, async_op=True)
        with pytest.raises(fd.Stalled, match="goes on"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
    dist.barrier()
    if rank == 0:
        assert work.wait(timedelta(seconds=20))
    else:
        dist.barrier(group=other)
        dist.barrier(group=late)  # the other one was there
        with pytest.raises(fd.PeerLost, match="rank 0"):  # and has left
            dist.barrier(group=late)
    fd.shutdown()


@pytest.mark.full("slow")
@pytest.mark.parametrize("ranks_a_host", [4, 1, 2], ids=["one host", "messages", "hosts of two"])
@ranks(4)
def test_a_stopped_rank_is_named_by_all_others(ranks_a_host: int) -> None:
    rank = fd.init().rank
    survivors = dist.new_group([0, 1, 2])
    with as_if_apart(ranks_a_host < 4, ranks_a_host):
        groups = [make(seconds=1.0) for _ in range(4)]
    long, short, receiving, sending = groups
    dist.all_gather_object(processes := [0] * 4, os.getpid())
    for group in (long, short):
        dist.all_reduce(torch.ones(100_000), group=group)
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 lets it go on
    else:
        begin = time.monotonic()
        for group, length in ((long, 100_000), (short, 4)):
            dist.barrier(group=survivors)
            with pytest.raises((fd.Stalled, fd.PeerLost), match="rank 3"):
                dist.all_reduce(torch.ones(length), group=group)
        with pytest.raises(fd.Stalled, match="rank 3"):
            dist.recv(torch.ones(1), 3, group=receiving)
        with pytest.raises((fd.Stalled, fd.PeerLost), match="rank 3"):
            dist.send(torch.ones(2**23), 3, group=sending)  # more than the kernel takes
        assert time.monotonic() - begin < 12, "four times the time-out, and the last words of two groups"
        dist.barrier(group=survivors)
        if rank == 0:
            os.kill(processes[3], signal.SIGCONT)
    if rank == 3:
        with pytest.raises(fd.CommError):
            call_twice(short)
    dist.barrier()
    fd.shutdown()


def call_twice(group: Any) -> None:
    for _ in range(2):  # others may have come to the first of them before they left
        dist.all_reduce(torch.ones(4), group=group)


@ranks(3)
def test_messages_from_any_rank_in_any_order() -> None:
    world, group = fd.init(), make()
    assert not group._mailbox._transport._lanes, "connections before there is a message"
    if world.rank:
        for tag in (5, 6):
            dist.send(torch.tensor([world.rank * 10.0 + tag]), 0, group=group, tag=tag)
        waiting = dist.irecv(got := torch.zeros(3), 0, group=group)
        total = torch.ones(2)
        dist.all_reduce(total, group=group)  # while a receive waits
        assert waiting is not None
        waiting.wait()
        assert got.tolist() == [1.0, 2.0, 3.0]
    else:
        got = torch.zeros(1)
        seen = {}
        for _ in range(2):
            source = dist.recv(got, group=group, tag=6)
            seen[source] = got.item()
        assert seen == {1: 16.0, 2: 26.0}
        dist.recv(got, 2, group=group, tag=5)
        assert got.item() == 25.0
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        works = [dist.isend(torch.tensor([1.0, 2.0, 3.0]), peer, group=group) for peer in (1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    assert total.tolist() == [3.0, 3.0]
    parting, other = make(), make()
    if world.rank == 1:
        dist.send(torch.ones(3), 0, group=parting)
        dist.destroy_process_group(parting)
    dist.barrier()
    if world.rank == 0:  # what was sent before its sender left is there, and nothing after it
        dist.recv(got := torch.zeros(3), 1, group=parting)
        assert got.tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(fd.PeerLost, match="rank 1"):
            dist.recv(got, 1, group=parting)
    if world.rank == 0:
        with suppress(fd.PeerLost):  # rank 1 may have refused it and be gone before this rank has looked
            dist.send(torch.ones(2, dtype=torch.int32), 1, group=other)
    elif world.rank == 1:
        with pytest.raises(fd.Mismatch, match="2 int32 where 2 float32"):
            dist.recv(torch.ones(2), 0, group=other)
    fd.shutdown()


@ranks(2)
def test_what_is_strided_rounded_once_or_alone() -> None:
    world, group = fd.init(), make()
    wide = torch.arange(12.0).view(3, 4)
    column = wide[:, 1]
    dist.all_reduce(column, group=group)
    assert wide[:, 1].tolist() == [2.0, 10.0, 18.0]
    assert wide[:, 2].tolist() == [2.0, 6.0, 10.0]
    tiny = torch.tensor([1.0 if world.rank else 2.0**-8], dtype=torch.bfloat16)
    dist.all_reduce(tiny, dist.ReduceOp.AVG, group=group)
    assert tiny.item() == torch.tensor((1 + 2.0**-8) / 2).bfloat16().item()
    with torch.inference_mode():
        total = torch.ones(3)
        waited = dist.all_reduce(total, group=group, async_op=True)
        assert waited is not None
        waited.wait()
    assert total.tolist() == [2.0, 2.0, 2.0]
    alone = make([world.rank]) if world.rank == 0 else make([0])
    if world.rank == 0:
        value, out = torch.ones(3), torch.zeros(3)
        dist.all_reduce(value, dist.ReduceOp.AVG, group=alone)
        dist.all_gather([out], value, group=alone)
        dist.all_to_all_single(both := torch.zeros(3), value, group=alone)
        assert value.tolist() == out.tolist() == both.tolist() == [1.0, 1.0, 1.0]
        dist.barrier(group=alone)
    fd.shutdown()


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(2)
def test_calls_keep_their_order_whoever_waits(apart: bool) -> None:
    fd.init()
    with as_if_apart(apart):
        group = make()
    value = torch.ones(50_000)
    works = [dist.all_reduce(value, group=group, async_op=True) for _ in range(5)]
    dist.all_reduce(value, group=group)  # by this thread, after what the group's thread has not begun
    assert value[0] == 2**6
    assert all(work is not None and work.is_completed() for work in works)
    works = [dist.all_reduce(value, group=group, async_op=True) for _ in range(5)]
    waiting = [threading.Thread(target=work.wait) for work in reversed(works) if work is not None]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    assert value[0] == 2**11

    def again(future: torch.futures.Future[Any]) -> torch.Tensor:
        tensor: torch.Tensor = future.value()[0]
        dist.all_reduce(tensor, group=group)  # a call in the callback of another
        return tensor

    for _ in range(20):
        small = torch.ones(3)
        work = dist.all_reduce(small, group=group, async_op=True)
        assert work is not None
        assert work.get_future().then(again).wait().tolist() == [4.0, 4.0, 4.0]
    fd.shutdown()


def places(size: int) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


SCRIPT = str(Path(backend_script.__file__))


@pytest.mark.full("further")
@patient
def test_a_stock_script_trains_as_with_gloo_and_may_leave_without_a_word(tmp_path: Path) -> None:
    with started(tmp_path, [SCRIPT, "train"], places(2)) as both:
        codes = [rank.process.wait(timeout=60) for rank in both]
        assert codes == [0, 0], "\n".join(rank.err for rank in both)
        assert [without_gloo(rank.out) for rank in both] == ["over\n", "over\n"]
        assert "terminate called" not in both[0].err


@pytest.mark.full("further")
@patient
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with started(tmp_path, [SCRIPT, "die"], places(2)) as both:
        codes = [rank.process.wait(timeout=60) for rank in both]
        assert codes == [0, -9], both[0].err
        by_ddp, by_barrier, last = both[0].out.splitlines()
    # What DDP's reducer passes on is a RuntimeError with our text: see [Note: errors in futures].
    assert "PeerLost" in by_ddp, by_ddp
    for line in (by_ddp, by_barrier):
        assert f"rank 1 on {socket.gethostname()} is gone: its process has ended" in line
        assert "all_reduce(SUM) of" in line
    assert by_barrier.startswith("PeerLost: ")
    assert last == "over"


@patient
def test_fsdp2_and_dtensor_give_what_they_give_on_gloo(tmp_path: Path) -> None:
    """In processes of their own: torch's caches of meshes keep gloo's connections open."""
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}  # the script imports another one of the tests
    words = [str(Path(backend_sharded.__file__))]
    with started(tmp_path, words, [{**place, **root} for place in places(2)]) as both:
        codes = [rank.process.wait(timeout=90) for rank in both]
        assert codes == [0, 0], "\n".join(rank.err for rank in both)
        assert [without_gloo(rank.out) for rank in both] == ["over\n", "over\n"]
