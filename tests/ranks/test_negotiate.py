"""Operations matched by name, on real ranks: results, disagreements, joins, sets, ranks that go or do not come."""

from __future__ import annotations

import gc
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.horovod.named_ops.engine import NamedOpsEngine
from farandole.horovod.named_ops.operations import NamedOpsSettings, OperationLog, Request
from tests.ranks.pool import _place, free_port, patient, ranks
from tests.ranks.started import started

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
LARGE = 70_000  # elements: does not travel with its announcement


@contextmanager
def engine(**settings: Any) -> Iterator[NamedOpsEngine]:
    made = NamedOpsEngine(fd.init(), NamedOpsSettings(**settings))
    try:
        yield made
        all_gather_json(fd.world(), "test/end", 0)
    finally:
        made.close()


def run(on: NamedOpsEngine, name: str, kind: Any, tensor: torch.Tensor | None = None, **more: Any) -> Any:
    return on.submit([Request(name, kind, tensor, **more)])[0].wait()


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what that rank has: anybody can compute it."""
    values = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(rank))
    return values.to(dtype)


def sums(dtype: torch.dtype, count: int, size: int) -> torch.Tensor:
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = numbers(0, count, dtype).to(wide)
    for rank in range(1, size):
        total = total + numbers(rank, count, dtype).to(wide)
    return total


@ranks(3)
def test_sums_of_all_types_small_and_large() -> None:
    rank = fd.init().rank
    with engine() as it:
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]:
            for count in (0, 1, 10, LARGE):
                mine, name = numbers(rank, count, dtype), f"{dtype}{count}"
                before = mine.clone()
                total = run(it, name, "allreduce", mine)
                expected = sums(dtype, count, 3).to(dtype)
                assert total.dtype == dtype
                assert total.equal(expected), name
                assert mine.equal(before), "the input is left alone"
                if dtype != torch.bool:
                    mean = run(it, name, "allreduce", mine, reduction="average", in_place=True)
                    exact = sums(dtype, count, 3)
                    if dtype in INTEGERS:
                        assert mean.equal(exact.div(3, rounding_mode="trunc").to(dtype))
                    else:
                        assert mean.equal((exact / 3).to(dtype))
                    assert mean is mine


@pytest.mark.parametrize("count", [5, LARGE])
@ranks(3)
def test_other_reductions_and_scales(count: int) -> None:
    rank = fd.init().rank
    everyone = torch.stack([numbers(r, count, torch.float32) for r in range(3)])
    with engine() as it:
        mine = everyone[rank].clone()
        assert run(it, "min", "allreduce", mine, reduction="min").equal(everyone.amin(0))
        assert run(it, "max", "allreduce", mine, reduction="max").equal(everyone.amax(0))
        assert run(it, "product", "allreduce", mine, reduction="product").equal(everyone.prod(0))
        scaled = run(it, "scaled", "allreduce", mine, prescale=0.5, postscale=3.0)
        assert scaled.equal(everyone.sum(0) * 0.5 * 3.0)
        whole = run(it, "whole", "allreduce", mine.int(), prescale=0.6)
        assert whole.equal((everyone.double() * 0.6).trunc().int().sum(0, dtype=torch.int32))
        third = run(it, "third", "allreduce", mine + 0.1, reduction="average")
        by_hand = ((everyone[0] + 0.1) + (everyone[1] + 0.1)) + (everyone[2] + 0.1)
        assert third.equal(by_hand / 3)


@pytest.mark.gate_cases("6")
@pytest.mark.parametrize("count", [6, LARGE])
@ranks(4)
def test_moves_of_all_types(count: int) -> None:
    rank, size = fd.init().rank, 4
    with engine() as it:
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]:
            uneven = [numbers(r, (count + r) * 2, dtype).view(count + r, 2) for r in range(size)]
            assert run(it, "gather", "allgather", uneven[rank]).equal(torch.cat(uneven))
            for root in (0, 2):
                target = numbers(rank, count, dtype)
                returned = run(it, f"spread{root}", "broadcast", target, root=root)
                assert returned is target
                assert target.equal(numbers(root, count, dtype))
            splits = [[(count // 8 + r + 2 * to) % (count // 4 + 1) for to in range(size)] for r in range(size)]
            output, received = run(it, "swap", "alltoall", uneven[rank], splits=tuple(splits[rank]))
            assert received.tolist() == [splits[r][rank] for r in range(size)]
            assert output.equal(
                torch.cat(
                    [uneven[r].split([*splits[r], len(uneven[r]) - sum(splits[r])])[rank] for r in range(size)]
                )
            )
            if dtype != torch.bool:
                rows = numbers(rank, (count + 1) * 2, dtype).view(-1, 2)
                mine = run(it, "scatter", "reducescatter", rows)
                total = sums(dtype, (count + 1) * 2, size).to(dtype).view(-1, 2)
                base, more = divmod(count + 1, size)
                assert mine.equal(total.split([base + (r < more) for r in range(size)])[rank])


@pytest.mark.parametrize("count", [16, LARGE])
@ranks(3)
def test_adasum_is_the_same_on_all_ranks_and_what_the_formula_says(count: int) -> None:
    rank = fd.init().rank
    vectors = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.double(), b.double()
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    with engine() as it:
        found = run(it, "a", "allreduce", vectors[rank], reduction="adasum")
        torch.testing.assert_close(
            found.double(), two(two(vectors[0], vectors[1]), vectors[2]), rtol=1e-5, atol=1e-5
        )
        assert run(it, "bits", "allgather", found[None]).unique(dim=0).shape[0] == 1
        same = run(it, "same", "allreduce", vectors[0], reduction="adasum")
        torch.testing.assert_close(same, vectors[0])


@pytest.mark.full("further")
@ranks(3)
def test_any_order_from_many_threads_without_waiting() -> None:
    rank = fd.init().rank
    names = [f"t{i}" for i in range(60)]
    sizes = {name: LARGE if i % 5 == 0 else i + 1 for i, name in enumerate(names)}
    with engine(cache_capacity=16) as it:
        for _ in range(3):
            tickets: dict[str, Any] = {}

            def submit(part: list[str], tickets: dict[str, Any] = tickets) -> None:
                for name in part:
                    tensor = torch.full((sizes[name],), float(rank + int(name[1:])))
                    (tickets[name],) = it.submit([Request(name, "allreduce", tensor)])

            order = names if rank == 0 else names[::-1] if rank == 1 else names[30:] + names[:30]
            threads = [threading.Thread(target=submit, args=(order[i::3],)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            deadline = time.monotonic() + 20
            while not all(ticket.done() for ticket in tickets.values()):
                assert time.monotonic() < deadline, "operations must finish while nobody waits"
                time.sleep(0.001)
            for name, ticket in tickets.items():
                assert ticket.wait().unique().tolist() == [3 * int(name[1:]) + 3]


def refused(on: NamedOpsEngine, name: str, kind: Any, tensor: torch.Tensor | None = None, **more: Any) -> str:
    with pytest.raises(fd.Mismatch) as caught:
        run(on, name, kind, tensor, **more)
    text = str(caught.value).partition(": ")[2]
    everyone = all_gather_json(fd.world(), "test/errors", text)
    assert len(set(everyone)) == 1, everyone
    return text


@pytest.mark.parametrize("count", [3, LARGE])
@ranks(3)
def test_disagreements_fail_on_all_ranks_in_the_same_words_and_the_job_goes_on(count: int) -> None:
    rank = fd.init().rank
    odd, x = rank == 2, torch.ones(count)
    with engine() as it:
        for again in range(2):
            for name in ("dtype", "shape", "kind", "op", "scale", "root", "rank", "dim", "codec"):
                kind = {"root": "broadcast", "rank": "allgather", "dim": "allgather"}.get(name, "allreduce")
                two = torch.ones(count, 4) if name in ("rank", "dim") else x
                run(it, name, kind, two)  # everybody knows the numbers now
            text = refused(it, "dtype", "allreduce", x.double() if odd else x)
            assert "Mismatched data types: One rank had type float32, but another rank had type float64." in text
            assert "float32 on ranks 0 and 1" in text
            assert "float64 on rank 2" in text
            text = refused(it, "shape", "allreduce", torch.ones(count + 1) if odd else x)
            assert f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [{count}]" in text
            text = refused(it, "kind", "allgather" if odd else "allreduce", x)
            assert "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER." in text
            text = refused(it, "op", "allreduce", x, reduction="min" if odd else "sum")
            assert "Mismatched reduction operation: One rank specified sum" in text
            text = refused(it, "scale", "allreduce", x, prescale=2.0 if odd else 1.0)
            assert "Mismatched prescale and/or postscale factors" in text
            text = refused(it, "root", "broadcast", x.clone(), root=1 if odd else 0)
            assert "Mismatched BROADCAST root ranks: One rank specified root rank 0" in text
            text = refused(it, "rank", "allgather", torch.ones(count, 2, 2) if odd else torch.ones(count, 2))
            assert "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2" in text
            text = refused(it, "dim", "allgather", torch.ones(count, 4 if odd else 2))
            assert "dimension 1 equal to 2, but another rank sent a tensor with dimension 1 equal to 4" in text
            text = refused(it, "codec", "allreduce", x, codec="int8" if odd else "none")
            assert "Mismatched codecs" in text
            assert run(it, "dtype", "allreduce", x).sum().item() == 3 * count
            assert run(it, f"new{again}", "allreduce", x).sum().item() == 3 * count
        assert "ALLGATHER a rank-zero tensor" in refused(it, "scalar", "allgather", torch.tensor(1.0))


@ranks(2)
def test_what_one_rank_alone_can_see_is_refused_at_once() -> None:
    rank = fd.init().rank
    with engine() as it:
        only = it.add_process_set([1])

        def no(match: str, name: str, kind: Any, tensor: torch.Tensor | None = None, **more: Any) -> None:
            with pytest.raises(fd.ConfigError, match=match):
                it.submit([Request(name, kind, tensor, **more)])

        x = torch.ones(3)
        if rank == 0:
            (ticket,) = it.submit([Request("twice", "allreduce", x)])
            no("same name as another tensor that is", "twice", "allreduce", x)
            all_gather_json(fd.world(), "test/twice", 0)
        else:
            all_gather_json(fd.world(), "test/twice", 0)
            (ticket,) = it.submit([Request("twice", "allreduce", x)])
        assert ticket.wait().equal(2 * x), "the first one still completes"
        no("does not exist, or has not been registered", "a", "allreduce", x, process_set=7)
        if rank == 0:
            no(
                "Allreduce: Rank 0 is not a member of the provided process set",
                "a",
                "allreduce",
                x,
                process_set=only,
            )
        no("invalid root rank 9", "a", "broadcast", x, root=9)
        no("not an even multiple", "a", "alltoall", x)
        no("does not equal number of workers", "a", "alltoall", x, splits=(1, 1, 1))
        no("greater than the first dimension", "a", "alltoall", x, splits=(2, 2))
        no("contiguous", "a", "allreduce", torch.ones(3, 3).t())
        no("only supports AVERAGE and SUM", "a", "reducescatter", x, reduction="min")
        no("no average", "a", "allreduce", x.bool(), reduction="average")
        no("unknown codec", "a", "allreduce", x, codec="zip")
        with pytest.raises(fd.ConfigError, match="same name"):
            it.submit([Request("g", "allreduce", x), Request("g", "allreduce", x)])
        assert run(it, "a", "allreduce", x).equal(2 * x)


@pytest.mark.parametrize("count", [4, LARGE])
@ranks(3)
def test_groups_run_all_or_none(count: int) -> None:
    rank = fd.init().rank
    with engine(fusion_bytes=64) as it:
        for _ in range(2):
            group = [Request(f"g{i}", "allreduce", torch.full((count,), float(i))) for i in range(3)]
            if rank == 1:
                time.sleep(0.05)
            results = [ticket.wait() for ticket in it.submit(group)]
            assert [result[0].item() for result in results] == [0, 3, 6]
        shape = count + (rank == 2)
        broken = [Request("h0", "allreduce", torch.ones(count)), Request("h1", "allreduce", torch.ones(shape))]
        for ticket in it.submit(broken):
            with pytest.raises(fd.Mismatch, match="tensor shapes"):
                ticket.wait()
        apart = [Request("k0", "allreduce", torch.ones(count)), Request("k1", "allreduce", torch.ones(count))]
        tickets = it.submit(apart) if rank else [it.submit([each])[0] for each in apart]
        for ticket in tickets:
            with pytest.raises(fd.Mismatch, match="Mismatched groups: One rank submitted it alone"):
                ticket.wait()
        assert run(it, "k1", "allreduce", torch.ones(1)).item() == 3


@pytest.mark.parametrize("count", [4, LARGE])
@ranks(3)
def test_joined_ranks_contribute_zeros(count: int) -> None:
    rank = fd.init().rank
    with engine() as it:
        for _ in range(2):
            for step in range(4):
                if step < 2 + rank:
                    total = run(it, "grad", "allreduce", torch.full((count,), 6.0))
                    there = sum(step < 2 + r for r in range(3))
                    assert total.unique().tolist() == [6.0 * there]
                    mean = run(it, "mean", "allreduce", torch.full((count,), 6.0), reduction="average")
                    assert mean.unique().tolist() == [2.0 * there]
                    low = run(it, "min", "allreduce", torch.full((count,), 6.0), reduction="min")
                    assert low.unique().tolist() == [6.0 if there == 3 else 0.0]
            if rank == 2:
                with pytest.raises(fd.Mismatch, match="Allgather is not supported with Join at this time"):
                    run(it, "gather", "allgather", torch.ones(count))
                with pytest.raises(fd.Mismatch, match="Barrier is not supported with Join at this time"):
                    run(it, "b", "barrier")
                assert run(it, "after", "allreduce", torch.ones(count)).sum().item() == count
            assert it.join().wait() == 2
            assert run(it, "together", "allgather", torch.ones(count)).shape == (3 * count,)


@pytest.mark.full("further")
@ranks(4)
def test_process_sets_overlap_and_do_not_wait_for_each_other() -> None:
    rank = fd.init().rank
    with engine() as it:
        pairs = [it.add_process_set([0, 1]), it.add_process_set([3, 2])]
        odd = it.add_process_set([1, 2, 3])
        assert (pairs, odd) == ([1, 2], 3)
        assert it.process_sets == {0: (0, 1, 2, 3), 1: (0, 1), 2: (2, 3), 3: (1, 2, 3)}
        mine, begin = pairs[rank // 2], time.monotonic()
        if rank == 0:
            time.sleep(1.0)
        run(it, "b", "barrier", process_set=mine)
        waited = time.monotonic() - begin
        assert waited > 0.9 if rank < 2 else waited < 0.5
        for count in (5, LARGE):
            todo = [("p", mine), ("o", odd), ("e", 0)]
            if rank % 2:
                todo.reverse()
            tickets = [
                it.submit(
                    [Request(f"{name}{count}", "allreduce", torch.full((count,), 1.0 + rank), process_set=s)]
                )[0]
                for name, s in todo
                if rank or s != odd
            ]
            found = sorted(int(ticket.wait()[0]) for ticket in tickets)
            pair = 3 if rank < 2 else 7
            assert found == sorted([pair, 10] + ([9] if rank else []))
            root = run(
                it,
                f"r{count}",
                "broadcast",
                torch.full((count,), float(rank)),
                root=rank // 2 * 2 + 1,
                process_set=mine,
            )
            assert root[0].item() == rank // 2 * 2 + 1
        with pytest.raises(fd.Mismatch, match="Mismatched process sets"):
            it.add_process_set([0, rank or 1])
        assert it.remove_process_set(1)
        assert not it.remove_process_set(1)
        assert not it.remove_process_set(0)
        assert it.add_process_set([0, 2]) == 1
        if rank in (0, 2):
            assert run(it, "p5", "allreduce", torch.full((5,), 1.0 + rank), process_set=1)[0].item() == 4


@pytest.mark.gate_cases("powersgd:4", "int8")
@pytest.mark.parametrize("codec", ["int8", "powersgd:4", "topk:0.5"])
@ranks(3)
def test_codecs_keep_what_they_lost_for_each_name(codec: str) -> None:
    rank = fd.init().rank
    vectors = [torch.randn(40, 30, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    mean = torch.stack(vectors).mean(0)
    steps = 12
    with engine() as it:
        total = torch.zeros_like(vectors[0])
        for _ in range(steps):
            found = run(it, "w", "allreduce", vectors[rank], reduction="average", codec=codec)
            assert run(it, "bits", "allgather", found[None]).unique(dim=0).shape[0] == 1
            total += found
        once = (found - mean).norm() / mean.norm()
        # Error feedback: what was lost comes later, so the mean over steps is nearer than one step.
        assert (total / steps - mean).norm() / mean.norm() < max(0.6 * once, 1e-3)
        nan = vectors[rank].clone()
        nan[0, 0] = torch.nan if rank == 1 else 0.0
        assert run(it, "w", "allreduce", nan, reduction="average", codec=codec).isnan().all()
        assert run(it, "w", "allreduce", vectors[rank], codec=codec).isfinite().all()


@pytest.mark.full("further")
@ranks(2)
def test_many_engines_leave_nothing() -> None:
    world = fd.init()
    gc.collect()  # what earlier tests of this process left to the collector
    before: tuple[int, int] | None = None
    for cycle in range(40):
        it = NamedOpsEngine(world)
        assert run(it, "x", "allreduce", torch.ones(2)).tolist() == [2, 2]
        if cycle % 4 == 0:
            assert run(it, "y", "allreduce", torch.ones(LARGE)).sum() == 2 * LARGE
        it.close()
        it.close()
        with pytest.raises(fd.CommError, match="closed"):
            it.submit([Request("x", "allreduce", torch.ones(2))])
        now = (len(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: PTH208 - counted, not read
        if cycle == 4:
            before = now
        assert before is None or (now[0] <= before[0] and now[1] <= before[1])


@ranks(3)
def test_a_rank_that_closes_fails_what_waits_for_it_and_nothing_else() -> None:
    world = fd.init()
    it = NamedOpsEngine(world)
    for count in (1, LARGE):
        assert run(it, f"last{count}", "allreduce", torch.ones(count)).sum() == 3 * count
    if world.rank == 1:
        it.close()
        all_gather_json(world, "test/closed", 0)
        return
    (ticket,) = it.submit([Request("never", "allreduce", torch.ones(1))])
    with pytest.raises(fd.PeerLost, match=r"rank 1 \(on .*\) has left"):
        ticket.wait()
    with pytest.raises(fd.PeerLost, match="rank 1"):
        it.submit([Request("more", "allreduce", torch.ones(1))])
    all_gather_json(world, "test/closed", 0)
    it.close()


class Diary(OperationLog):
    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def submitted(self, name: str, kind: Any, at_seconds: float) -> None:
        self.said.append(("submitted", name, kind))

    def begun(self, name: str, kind: Any, at_seconds: float) -> None:
        self.said.append(("begun", name, kind))

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        self.said.append(("ready", name, rank))

    def activity(self, names: Any, activity: str, begin_seconds: float, end_seconds: float) -> None:
        assert begin_seconds <= end_seconds
        self.said += [(activity, name) for name in names]

    def finished(self, name: str, dtype: str, shape: Any, at_seconds: float, error: str = "") -> None:
        self.said.append(("finished", name, dtype, tuple(shape), bool(error)))


@ranks(2)
def test_the_log_tells_each_operation_from_its_beginning_to_its_end() -> None:
    world, diary = fd.init(), Diary()
    it = NamedOpsEngine(world, NamedOpsSettings(), diary)
    for name, count in (("small", 2), ("large", LARGE)):
        run(it, name, "allreduce", torch.ones(count))
        said = [what for what in diary.said if what[1] == name and what[0] != "ready"]
        middle = ["TCP_ALLREDUCE"] if count == 2 else ["QUEUE", "TCP_ALLREDUCE"]
        # The result of a small operation is told before its only activity.
        assert sorted(what[0] for what in said) == sorted(["submitted", "begun", *middle, "finished"])
        assert said[:2] == [("submitted", name, "allreduce"), ("begun", name, "allreduce")]
        assert ("finished", name, "float32", (count,), False) in said
    all_gather_json(world, "test/end", 0)
    it.close()


JOB = """
    import os, signal, sys, time
    import torch
    import farandole as fd
    from farandole.horovod.named_ops.engine import NamedOpsEngine
    from farandole.horovod.named_ops.operations import NamedOpsSettings, Request

    world = fd.init()
    it = NamedOpsEngine(world, NamedOpsSettings(**{settings}))
    it.submit([Request("begin", "barrier")])[0].wait()

    def lagging():
        {lagging}

    if world.rank == 1:
        lagging()
    begin = time.monotonic()
    requests = [Request(f"grad/{{count}}", "allreduce", torch.ones(count)) for count in (3, {large})]
    for ticket in [it.submit([request])[0] for request in requests]:
        try:
            ticket.wait()
        except fd.CommError as error:
            waited = time.monotonic() - begin
            print(f"rank {{world.rank}} after {{waited:.2f}} s {{type(error).__name__}}: {{error}}", flush=True)
    it.close()
    os._exit(0)
"""


def play(tmp_path: Path, lagging: str, *, settings: dict[str, float] | None = None) -> str:
    """Run a job of three ranks of its own, in which rank 1 does something else; return all they wrote."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB).format(lagging=lagging, large=LARGE, settings=settings or {}))
    port = free_port()
    with started(tmp_path, [str(script)], [_place(rank, 3, port) for rank in range(3)]) as jobs:
        for job in jobs:
            job.process.wait(45)
        return "".join(job.out + job.err for job in jobs)


@pytest.mark.full("slow")
@patient
def test_a_rank_that_is_killed_is_named_within_a_second(tmp_path: Path) -> None:
    said = play(tmp_path, "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)")
    for rank in (0, 2):
        lines = [line for line in said.splitlines() if line.startswith(f"rank {rank} after")]
        assert len(lines) == 2, "of a small and of a large operation"
        for line in lines:
            assert "PeerLost" in line
            assert "rank 1 (on " in line
            assert float(line.split()[3]) < 1.5


@pytest.mark.full("slow")
@patient
def test_a_rank_that_does_not_come_is_named_with_its_place(tmp_path: Path) -> None:
    settings = {"stall_warning_seconds": 0.5, "stall_shutdown_seconds": 1.2}
    said = play(tmp_path, "time.sleep(4)", settings=settings)
    assert "waiting for remainder of ranks for more than" in said
    assert f"1: [grad/3, grad/{LARGE}]" in said
    assert "in lagging" in said, "where rank 1 is"
    for rank in (0, 2):
        lines = [line for line in said.splitlines() if line.startswith(f"rank {rank} after")]
        assert ["Stalled" in line for line in lines] == [True, True]


def test_an_end_before_the_warning_is_refused() -> None:
    with pytest.raises(fd.ConfigError, match="stall_shutdown_seconds=5 is below stall_warning_seconds=60"):
        NamedOpsSettings(stall_shutdown_seconds=5.0)
    assert NamedOpsSettings(stall_warning_seconds=0.0, stall_shutdown_seconds=5.0)


@pytest.mark.full("busy")
@ranks(2)
def test_a_burst_needs_few_packets() -> None:
    """Operations that follow each other fast leave together, also those that are complete when submitted."""
    rank = fd.init().rank
    with engine() as it:
        mine, names = torch.ones(1), [f"gradient/{i}" for i in range(500)]
        run(it, "first", "allreduce", mine)
        if rank:
            all_gather_json(fd.world(), "test/submitted", 0)  # the other rank has submitted all of them
        calls = count_sends(it)
        tickets = [it.submit([Request(name, "allreduce", mine)])[0] for name in names]
        if not rank:
            all_gather_json(fd.world(), "test/submitted", 0)
        assert [ticket.wait().item() for ticket in tickets] == [2.0] * len(names)
        assert len(calls) < len(names) / 2


@pytest.mark.full("busy")
@ranks(2)
def test_what_follows_a_result_is_no_burst() -> None:
    """A caller that waits for each operation sends the next one itself; no thread is woken to send it."""
    fd.init()
    with engine() as it:
        run(it, "first", "allreduce", torch.ones(1))
        links, wakes = it._controller.state.links, []
        assert links is not None
        links.wake = lambda: wakes.append(1)  # type: ignore[method-assign]
        for i in range(200):
            assert it.submit([Request(f"loss/{i}", "allreduce", torch.ones(1))])[0].wait().item() == 2.0
        del links.wake
        links.wake()
        assert len(wakes) < 20, "none to send; some to look after the loan of the links"


def count_sends(on: NamedOpsEngine) -> list[int]:
    """Return a list that grows by one with each call of the kernel that sends something."""
    links = on._controller.state.links
    assert links is not None
    calls: list[int] = []
    pump = links._pump_out

    def counting(link: Any) -> None:
        calls.append(len(link.outgoing))
        pump(link)

    links._pump_out = counting  # type: ignore[method-assign]
    return calls


@pytest.mark.full("further")
@ranks(2)
def test_nothing_happens_while_nothing_is_to_be_done() -> None:
    world = fd.init()
    it = NamedOpsEngine(world, NamedOpsSettings(stall_warning_seconds=0.2))
    run(it, "x", "allreduce", torch.ones(1))
    run(it, "y", "allreduce", torch.ones(LARGE))
    all_gather_json(world, "test/idle", 0)
    time.sleep(0.5)  # the timer of the stall watch ends
    before = switches()
    time.sleep(1.0)
    assert switches() - before <= 2
    all_gather_json(world, "test/idle", 0)
    it.close()


def switches() -> int:
    """Return how often our threads were woken."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == os.getpid() or not (task / "comm").exists():
            continue
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        if names.get(int(task.name), "").startswith("farandole"):
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    found += int(line.split()[1])
    return found
