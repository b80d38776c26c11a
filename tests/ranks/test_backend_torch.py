"""The backend "farandole" is what torch expects of one: callbacks, compilers, tensors of all kinds, signals."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
import farandole.backend  # registers the name
from farandole.core.vocabulary.errors import Mismatch
from tests.ranks.pool import ranks, takes
from tests.ranks.test_backend import as_if_apart, make


def future_of(work: Any) -> Any:
    assert work is not None, "asynchronous"
    return work.get_future()


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(2)
def test_a_callback_may_wait_for_the_next_calls_future(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        group = make(seconds=10)
    found = [torch.full((4,), float(rank + number)) for number in range(4)]

    def call(number: int) -> Any:
        return future_of(dist.all_reduce(found[number], group=group, async_op=True))

    def after(number: int) -> Callable[[Any], Any]:
        # Waits in C++, as communication hooks do, and once more inside.
        return lambda _: call(number).then(after(number + 1)).wait() if number < 3 else call(number).wait()

    call(0).then(after(1)).wait()
    assert [each[0].item() for each in found] == [1.0, 3.0, 5.0, 7.0]


@ranks(2)
def test_a_callback_may_wait_for_the_next_message() -> None:
    rank = fd.init().rank
    group = make(seconds=10)
    found = torch.zeros(2)
    if rank == 0:
        first = dist.irecv(torch.zeros(2), 1, group=group)
        future_of(first).then(lambda _: future_of(dist.irecv(found, 1, group=group, tag=3)).wait()).wait()
        assert found.tolist() == [1.0, 2.0]
    else:
        dist.send(torch.zeros(2), 0, group=group)
        time.sleep(0.3)
        dist.send(torch.tensor([1.0, 2.0]), 0, group=group, tag=3)


KEPT: list[dist.ProcessGroup] = []
"""Groups of gloo that a callback may hold last: one that is destroyed there joins its own thread, and aborts."""


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@takes(60)
@ranks(2)
def test_ddp_with_torchs_powersgd(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        groups = [make(seconds=20), dist.new_group()]
    KEPT.append(groups[1])
    trained = []
    for group in groups:
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(24, 16), process_group=group)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(5):
            model(torch.randn(8, 24, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(torch.cat([each.detach().reshape(-1) for each in model.parameters()]))
    ours, gloos = trained
    assert torch.allclose(ours, gloos, rtol=0, atol=1e-6), "gloo trains the same"


@pytest.mark.full("further")
@takes(60)
@ranks(2)
def test_what_torch_compile_sees_of_a_group() -> None:
    rank = fd.init().rank
    group = make()

    def broadcast(values: torch.Tensor) -> None:
        dist.broadcast(values, 0, group=group)

    def barrier(_: torch.Tensor) -> None:
        dist.barrier(group=group)

    def message(values: torch.Tensor) -> None:
        if rank == 0:
            dist.send(values, 1, group=group)
        else:
            dist.recv(values, 0, group=group)

    def asynchronous(values: torch.Tensor) -> None:
        work = dist.all_reduce(values, dist.ReduceOp.MIN, group=group, async_op=True)
        assert work is not None, "asynchronous"
        work.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, for what torch itself does there
        for operation in (broadcast, barrier, message, asynchronous):

            def function(
                values: torch.Tensor, operation: Callable[[torch.Tensor], None] = operation
            ) -> torch.Tensor:
                doubled = values * 2
                operation(doubled)
                return doubled + 1

            own = 1.0 + rank * (operation is barrier)
            compiled = torch.compile(function, backend="eager")
            assert compiled(torch.full((3,), 1.0 + rank)).tolist() == [2 * own + 1] * 3, operation.__name__
    model = torch.nn.Linear(5, 3)
    compiled = torch.compile(DistributedDataParallel(model, process_group=group), backend="eager")
    compiled(torch.full((4, 5), 1.0 + rank)).sum().backward()
    (weight, _) = model.parameters()
    assert weight.grad is not None
    assert weight.grad.eq(4 * 1.5).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(3)
def test_sums_of_float8_are_rounded_once(dtype: torch.dtype, apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        group = make()
    # 16 + 1 + 1 = 18, which both types have to round; 16 + 1 would be 16 again in the smaller one.
    mine = torch.full((5,), (16.0, 1.0, 1.0)[rank]).to(dtype)
    dist.all_reduce(mine, group=group)
    assert mine.float().eq(torch.tensor(18.0).to(dtype).float()).all()
    out = torch.zeros(2).to(dtype)
    dist.reduce_scatter(out, [torch.ones(2).to(dtype) for _ in range(3)], group=group)
    assert out.float().eq(3.0).all()
    mine = torch.full((5,), 3.0 * rank).to(dtype)
    dist.all_reduce(mine, dist.ReduceOp.AVG, group=group)
    assert mine.float().eq(3.0).all()


@ranks(2)
def test_tensors_without_data_come_back_and_leave_the_group_usable() -> None:
    rank = fd.init().rank
    group = make()
    with FakeTensorMode():
        fake = torch.ones(3)
        dist.all_reduce(fake, group=group)
        work = dist.all_gather([torch.ones(3) for _ in range(2)], fake, group=group, async_op=True)
        assert work is not None, "asynchronous"
        assert work.wait()
        dist.barrier(group=group)  # of real ranks
        assert type(fake).__name__ == "FakeTensor"
    meta = torch.ones(3, device="meta")
    future_of(dist.all_reduce(meta, group=group, async_op=True)).wait()
    assert meta.is_meta
    real = torch.full((2,), float(rank))
    dist.all_reduce(real, group=group)
    assert real.tolist() == [1.0, 1.0]


@pytest.mark.full("busy")
@ranks(2)
def test_a_receive_is_posted_long_before_its_message() -> None:
    rank = fd.init().rank
    group = dist.new_group(backend="farandole", timeout=timedelta(seconds=1))
    found = torch.zeros(2)
    if rank == 0:
        work = dist.irecv(found, 1, group=group)
        assert work is not None, "asynchronous"
        time.sleep(2.0)
        fd.barrier()
        assert work.wait()
        assert found.tolist() == [1.0, 1.0]
    else:
        fd.barrier()
        dist.send(torch.ones(2), 0, group=group)


@ranks(2)
def test_what_cannot_be_written_to_is_refused_and_the_group_stays() -> None:
    rank = fd.init().rank
    group = make()
    shared = torch.ones(1).expand(4)
    for call in (
        lambda: dist.all_reduce(shared, group=group),
        lambda: dist.broadcast(shared, 0, group=group),
        lambda: dist.all_gather([shared, torch.ones(4)], torch.ones(4), group=group),
        lambda: dist.recv(shared, 1 - rank, group=group),
    ):
        with pytest.raises(ValueError, match=r"shape \(4,\) and stride \(0,\).* share memory.*clone"):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(NotImplementedError, match="nested"):
        dist.all_reduce(nested, group=group)
    with (
        pytest.raises(NotImplementedError, match="not coalesced by device"),
        dist._coalescing_manager(group, device=torch.device("cpu")),
    ):
        pass
    outs = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(outs, shared, group=group)  # it may be read
    assert [each.tolist() for each in outs] == [[1.0] * 4] * 2


@ranks(2)
def test_a_default_device_changes_nothing_of_calls_with_cpu_tensors() -> None:
    rank = fd.init().rank
    group = make()
    flat, strided = torch.full((5,), float(rank)), torch.full((5, 2), float(rank))[:, 0]
    with torch.device("meta"):
        for tensor in (flat, strided):
            group.allreduce([tensor]).wait()  # by way of `dist.all_reduce`, torch turns the default device off
            assert tensor.tolist() == [1.0] * 5


@ranks(2)
def test_the_value_of_a_gathers_future_is_flat_as_with_gloo() -> None:
    fd.init()
    for group in (make(), dist.new_group()):
        outs = [torch.zeros(2) for _ in range(2)]
        value = future_of(dist.all_gather(outs, torch.ones(2), group=group, async_op=True)).wait()
        assert [each.tolist() for each in value] == [[1.0, 1.0]] * 2


@ranks(2)
def test_a_handler_that_raises_ends_the_group_in_words() -> None:
    class Alarm(Exception):
        pass

    def raise_it(*_: object) -> None:
        raise Alarm("time is up")

    rank = fd.init().rank
    group = make()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(Alarm):
                dist.barrier(group=group)
        finally:
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(RuntimeError, match="an earlier call of this group was ended by Alarm: time is up"):
            dist.barrier(group=group)
    fd.barrier()


@ranks(2)
def test_a_longer_message_is_told_in_elements() -> None:
    rank = fd.init().rank
    group = make()
    if rank == 0:
        dist.isend(torch.ones(5), 1, group=group)
    else:
        with pytest.raises(Mismatch, match="rank 0 sent 5 float32 where 3 float32 was expected"):
            dist.recv(torch.zeros(3), 0, group=group)
    fd.barrier()
