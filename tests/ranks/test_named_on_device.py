"""Named operations on a simulated accelerator: by groups of the backend, the bits of CPU memory, and the waits."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.bench.codecs_check import Subject
from farandole.bench.device_test_worker import check_named
from farandole.comm.device.streams import simulate_device
from farandole.comm.transport.comm_thread import BucketWork
from farandole.core.vocabulary.errors import CommError
from farandole.horovod.common.compression import CodecCompressor
from farandole.horovod.named_ops import data_plane, group_thread
from farandole.horovod.named_ops.group_thread import GroupThread, exchange_bytes
from farandole.horovod.named_ops.operations import PendingTicket
from tests.ranks.pool import ranks
from tests.ranks.test_horovod_ops import MOVED, numbers, same
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts
from tests.simulated_device import Race, ThreadedDevice

_CPU = torch.device("cpu")


@contextmanager
def simulated(*left_out: str) -> Generator[ThreadedDevice, None, None]:
    device = ThreadedDevice(*left_out)
    simulate_device(_CPU, device)
    try:
        hvd.init()
        with device:
            yield device
    finally:
        device.left_out = frozenset()
        hvd.shutdown()
        simulate_device(_CPU, None)


def count_jobs(monkeypatch: pytest.MonkeyPatch) -> list[BucketWork]:
    """Return the list of jobs that go by groups from now on."""
    found: list[BucketWork] = []
    conduct = GroupThread._conduct

    def count(self: GroupThread, job: BucketWork) -> None:
        found.append(job)
        conduct(self, job)

    monkeypatch.setattr(GroupThread, "_conduct", count)
    return found


def results(count: int) -> list[torch.Tensor]:
    """Return what all operations give for tensors of `count` numbers, too large to travel with announcements."""
    rank, size = hvd.rank(), hvd.size()
    mine = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)
    lines = count // 100
    splits = torch.tensor([lines // 2, *[0] * (size - 2), lines - lines // 2], dtype=torch.int32)
    # Each its own: a collective is taken for one that writes all its tensors.
    wide, most, narrow, in_place, spread = (
        mine.double(),
        mine.bfloat16(),
        mine.bfloat16(),
        mine.clone(),
        mine.double(),
    )
    some, fewer, given = mine[: count // 2].clone(), mine[: count // 3].clone(), mine.clone()
    rows, table, swapped = (
        mine.view(-1, 100)[: lines // (rank + 1)].clone(),
        mine.view(-1, 100).clone(),
        mine.clone(),
    )
    handles = [
        hvd.allreduce_async(mine, name="mean"),
        hvd.allreduce_async(wide, name="sum", op=hvd.Sum, prescale_factor=0.5),
        hvd.allreduce_async(most, name="max", op=hvd.Max),
        hvd.allreduce_async(narrow, name="narrow", op=hvd.Average, postscale_factor=3.0),
        hvd.allreduce_async_(in_place, name="here", op=hvd.Sum),
        hvd.grouped_allreduce_async([some, fewer], name="group"),
        hvd.allgather_async(rows.view(-1, 100), name="rows"),
        hvd.broadcast_async(given, size - 1, name="copy"),
        hvd.broadcast_async_(spread, 1, name="over"),
        hvd.reducescatter_async(table, name="part", op=hvd.Sum),
        hvd.alltoall_async(swapped.view(-1, 100), splits=splits, name="swap"),
    ]
    found: list[torch.Tensor] = []
    for handle in handles:
        result = hvd.synchronize(handle)
        found += result if isinstance(result, (list, tuple)) else [result]
    assert found[4] is in_place
    return [each * 1 for each in found]


@pytest.mark.gate_cases("700100-65536")
@pytest.mark.parametrize(("count", "piece_bytes"), [(30_000, data_plane.DEVICE_PIECE_BYTES), (700_100, 2**16)])
@ranks(4)
def test_all_operations_have_the_bits_of_cpu_memory(
    count: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger ones in many segments."""
    monkeypatch.setattr(data_plane, "DEVICE_PIECE_BYTES", piece_bytes)
    jobs = count_jobs(monkeypatch)
    hvd.init()
    expected = results(count)
    assert not jobs
    hvd.shutdown()
    with simulated() as device:
        found = results(count)
        assert not device.host_waits or set(device.host_waits) == {"outside"}, device.host_waits
    assert len(jobs) >= 8
    assert (max(len(job.items) for job in jobs) >= 22) == (piece_bytes == 2**16)
    assert sum(job.sent_bytes for job in jobs) > 4 * count
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours, theirs)


@ranks(2)
def test_every_type_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = count_jobs(monkeypatch)
    with simulated():
        for dtype in MOVED:
            mine = numbers(hvd.rank(), (40_000, 2), dtype)
            both = torch.cat([numbers(rank, (40_000, 2), dtype) for rank in range(2)])
            assert same(hvd.allgather(mine, name=f"{dtype}"), both)
    assert len(jobs) == len(MOVED)


CODECS = [
    "bf16", "fp8", "int8", "int4", "int8:feedback=false", "sign", "randomk:0.05", "topk:0.02,exact=true",
    "topk:0.1,exact=true,momentum=0.5,clip_norm=1.0",
]  # fmt: skip


def coded(codec: str, *, bad_step: int | None) -> list[torch.Tensor]:
    """Return the means of four steps of two tensors by a codec, one step with a number that is not finite."""
    rank, found = hvd.rank(), []
    compression = CodecCompressor(codec)
    for step in range(4):
        for name, count in (("even", 40_960), ("odd", 33_333)):
            mine = torch.randn(
                count, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float32
            )
            if step == bad_step and rank == 1:
                mine[7] = torch.inf
            op, scale = (hvd.Sum, 0.5) if name == "odd" else (hvd.Average, 1.0)
            found.append(hvd.allreduce(mine, name=name, op=op, postscale_factor=scale, compression=compression))
    return [each * 1 for each in found]


@pytest.mark.full("further")
@pytest.mark.parametrize(
    "codec", [pytest.param(each, marks=[] if each == "int8" else pytest.mark.full("further")) for each in CODECS]
)
@ranks(3)
def test_codecs_have_the_bits_of_cpu_memory(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()
    expected = coded(codec, bad_step=2)
    assert not torch.isfinite(expected[4]).any()
    hvd.shutdown()
    jobs = count_jobs(monkeypatch)
    with simulated():
        found = coded(codec, bad_step=2)
    assert len(jobs) == 8
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("codec", ["int8", pytest.param("topk:0.1,exact=true", marks=pytest.mark.full("further"))])
@ranks(4, **TWO_HOSTS, HOROVOD_DYNAMIC_PROCESS_SETS="1")
def test_codecs_go_by_slices_between_hosts(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of CPU memory, where hosts add up first, too; ranks of one host have no group of their own."""
    pretend_two_hosts()
    hvd.init()
    expected = coded(codec, bad_step=2)
    hvd.shutdown()
    seen: set[tuple[int, ...]] = set()
    exchange = group_thread.exchange_among

    def noting(message: Any, circle: Any, everyone: Any) -> torch.Tensor:
        seen.add(circle.ranks)
        return exchange(message, circle, everyone)

    monkeypatch.setattr(group_thread, "exchange_among", noting)
    pretend_two_hosts()
    with simulated():
        rank = hvd.rank()
        hvd.add_process_set([0, 1])  # a group of these ranks is not taken: ranks learn of it at different moments
        found = coded(codec, bad_step=2)
    assert seen == {(0, 1) if rank < 2 else (2, 3), (0, 2) if rank % 2 == 0 else (1, 3)}
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours, theirs)


FOUND = {"launch": r"on operations and .* on main", "read": r"on main and .* on operations", "keep": "was let go"}


def use_three_times() -> None:
    """Make a tensor, have it summed, use the result and let it go; a moment later, so that no thread holds it."""
    for step in range(3):
        mine = torch.ones(200_000, dtype=torch.float32).mul_(2)
        hvd.allreduce(mine, name=f"{step}", op=hvd.Sum).add_(1)
        time.sleep(0.05)
        mine.mul_(2)


@pytest.mark.full_cases("read")
@pytest.mark.parametrize("left_out", FOUND)
@ranks(2)
def test_a_wait_that_is_left_out_is_found(left_out: str) -> None:
    """One for each of them: the device waits for who submits, and who waits for the device, and for its memory."""
    with simulated(left_out), pytest.raises((Race, RuntimeError), match=FOUND[left_out]):
        use_three_times()


@ranks(2)
def test_results_that_are_let_go_were_kept_before_they_could_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    keep, submit = PendingTicket.keep_result, GroupThread.submit

    def kept(self: PendingTicket) -> None:
        calls.append("keep")
        keep(self)

    def submitted(self: GroupThread, *arguments: Any, **keys: Any) -> BucketWork:
        calls.append("go")
        return submit(self, *arguments, **keys)

    monkeypatch.setattr(PendingTicket, "keep_result", kept)
    monkeypatch.setattr(GroupThread, "submit", submitted)
    with simulated():
        use_three_times()
    assert calls == ["keep", "go"] * 3


@ranks(3, HOROVOD_DYNAMIC_PROCESS_SETS="1")
def test_process_sets_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = count_jobs(monkeypatch)
    with simulated():
        pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])]
        for process_set in pairs:
            if process_set.included():
                mine = torch.full((100_000,), float(hvd.rank()), dtype=torch.float64)
                total = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set)
                assert torch.equal(total, torch.full_like(mine, float(sum(process_set.ranks or ()))))
        assert len(jobs) == 1 + (hvd.rank() == 2)
        for _ in range(2):
            assert hvd.remove_process_set(pairs[0])
            pairs[0] = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            swapped = hvd.broadcast(torch.full((90_000,), hvd.rank(), dtype=torch.int64), 2, process_set=pairs[0])
            assert bool((swapped == 2).all())


@ranks(2)
def test_what_needs_cpu_memory_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs of matrices, Adasum, and sums without a rank that has joined."""
    jobs = count_jobs(monkeypatch)
    with simulated():
        mine = torch.full((100_000,), 1.0 + hvd.rank(), dtype=torch.float32)
        hvd.allreduce(mine, name="cast", compression=hvd.Compression.fp16)
        hvd.allreduce(mine, name="coded", compression=hvd.Compression.int8)
        before = len(jobs)
        assert before == 2
        hvd.allreduce(mine.view(100, -1), name="matrix", compression=hvd.Compression.powersgd(2))
        hvd.allreduce(mine, name="adasum", op=hvd.Adasum)
        if hvd.rank() == 0:
            alone = hvd.allreduce(mine, name="alone", op=hvd.Sum)
            assert torch.equal(alone, mine)
        hvd.join()
        assert len(jobs) == before


@ranks(2)
def test_a_failure_on_the_device_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated():
        if hvd.rank() == 1:
            monkeypatch.setattr(GroupThread, "land", lambda *_: 1 / 0)
        with pytest.raises((CommError, RuntimeError), match="ZeroDivisionError"):
            use_three_times()


class ThreadedSubject(Subject):
    """A simulated accelerator that two threads use."""

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        """See `Subject`."""
        device = ThreadedDevice()
        simulate_device(_CPU, device)
        try:
            with device:
                yield
        finally:
            simulate_device(_CPU, None)


def without_first(*arguments: Any) -> torch.Tensor:
    """Exchange, and lose the first number of what is long: by short ones ranks agree on what they do."""
    received = exchange_bytes(*arguments)
    received.view(-1)[: received.numel() > 64] = 0
    return received


@ranks(3)
def test_the_check_of_a_device_compares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, world = count_jobs(monkeypatch), fd.init()
    check = check_named(ThreadedSubject(_CPU), world)
    assert check.passed, check.answer
    assert check.answer == "10 kinds: the bits of tensors in CPU memory"
    assert jobs
    assert check_named(Subject(_CPU), world).passed is None
    if world.rank == 1:
        monkeypatch.setattr(group_thread, "exchange_bytes", without_first)
    check = check_named(ThreadedSubject(_CPU), world)
    assert check.passed is False
    assert check.answer == "sum, rank 0: other bits than in CPU memory"
