"""Routes of the reducer: same bits, right means, fallbacks, and what is left when a rank is killed (nothing)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.messages import GroupRank, Message, Rounds
from farandole.comm.transport import shared_tensor
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.shared_tensor import SharedMemory, Unavailable
from farandole.comm.transport.transport import Transport
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.model import DistributedModel
from tests.leftovers import left_in_memory, memory_names
from tests.ranks.pool import _place, free_port, patient, ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own, train_alone
from tests.ranks.started import started

WIDTH = 64


def wide() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def train(plan: fd.Plan, steps: int = 3) -> nn.Module:
    """Train on this rank's part of some batches; check it against one process on the whole."""
    model, alone = wide(), wide()
    batches = [data(24, seed=seed, width=WIDTH) for seed in range(steps)]
    train_alone(alone, torch.optim.SGD(alone.parameters(), 0.1), batches)
    model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    assert_same_bits(model)
    if plan.codec == "none":
        assert_close(model, alone)
    return model


def the_reducer(model: nn.Module) -> GradientReducer:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    return reducer


def pretend_two_hosts() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)


TWO_HOSTS = {"FARANDOLE_LOCAL_SIZE": "2", "FARANDOLE_NODE_COUNT": "2"}
SMALL = {"bucket_bytes": 16384, "first_bucket_bytes": 1024}


@pytest.mark.gate_cases("flat-flat-int8")
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("route", "taken"), [("auto", "shared"), ("shared", "shared"), ("flat", "flat")])
@ranks(3)
def test_one_host(route: str, taken: str, codec: str) -> None:
    fd.init()
    plan = fd.Plan.from_mapping({"route": route, "codec": codec, **SMALL}, where="test")
    reducer = the_reducer(train(plan))
    assert reducer.route == taken
    assert reducer.route_reason == (
        "the plan says so" if taken == "flat" else "one host, whose ranks share memory"
    )


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["none", "int8", "powersgd:2"])
@pytest.mark.parametrize("route", ["auto", "hierarchical", "flat"])
@ranks(4, **TWO_HOSTS)
def test_two_hosts(route: str, codec: str) -> None:
    pretend_two_hosts()
    fd.init()
    plan = fd.Plan.from_mapping({"route": route, "codec": codec, **SMALL}, where="test")
    reducer = the_reducer(train(plan))
    assert reducer.route == ("flat" if route == "flat" else "hierarchical")
    if route == "auto":
        assert reducer.route_reason == "2 hosts of 2 ranks, whose ranks share memory"


def narrow_gradient(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of which `dtype` cannot hold the sums, and float32 can."""
    generator = torch.Generator().manual_seed(rank)
    grad = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-3, 6, (count,), generator=generator)
    return grad.mul(256).round().div(256).to(dtype)


def exact_mean(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return their mean, rounded once."""
    return torch.stack(rows).double().mean(0).to(rows[0].dtype)


def check_narrow_mean(route: str, dtype: torch.dtype, hosts: int = 1) -> None:
    world = fd.init()
    for count in (700, 30_000):  # in one round, and by parts
        model = nn.Linear(1, count, bias=False).to(dtype)
        plan = fd.Plan.from_mapping({"route": route}, where="test")
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
        grads = [narrow_gradient(rank, count, dtype) for rank in range(world.size)]
        (model.weight.view(-1) * grads[world.rank]).sum().backward()
        assert model.weight.grad is not None
        each = world.size // hosts
        means = [exact_mean(grads[host * each : (host + 1) * each]) for host in range(hosts)]
        assert torch.equal(model.weight.grad.view(-1), exact_mean(means))


@pytest.mark.gate_cases("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(3)
def test_narrow_gradients_are_added_up_in_float32(dtype: torch.dtype) -> None:
    check_narrow_mean("shared", dtype)


@pytest.mark.gate_cases("dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(4, **TWO_HOSTS)
def test_narrow_gradients_are_rounded_once_a_host_and_once_across(dtype: torch.dtype) -> None:
    pretend_two_hosts()
    check_narrow_mean("hierarchical", dtype, hosts=2)


class Breaking:
    """A user-defined codec that fails on rank 1 in its third exchange."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> int:
        return 0

    def encode(self, grad: torch.Tensor, state: int, group: GroupRank) -> Rounds:
        if fd.world().rank == 1 and state == 2:
            raise ValueError("no more paper")
        gathered = yield Message(grad.clone(), "all_gather")
        return gathered.mean(0), grad, state + 1


breaking = Breaking()


@pytest.mark.full("further")
@pytest.mark.parametrize("route", ["flat", "hierarchical"])
@ranks(4, **TWO_HOSTS)
def test_a_rank_that_fails_and_lives_on_frees_the_others_at_once(route: str) -> None:
    pretend_two_hosts()
    world = fd.init()
    codec = "tests.ranks.test_routes.breaking"
    plan = fd.Plan.from_mapping({"route": route, "codec": codec, "timeout_seconds": 60, **SMALL}, where="test")
    begin = time.monotonic()
    with pytest.raises(ValueError if world.rank == 1 else fd.PeerLost) as caught:
        train(plan, steps=4)
    assert time.monotonic() - begin < 15
    if world.rank == 1:
        assert "no more paper" in str(caught.value)
    elif world.rank == 3 or route == "flat":  # who waits for rank 1's messages
        assert re.search(r"it failed: .*ValueError: no more paper", str(caught.value)), caught.value
    all_gather_json(world, "test/everybody was freed", 0)  # rank 1 has kept its connections until now


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_a_route_this_world_does_not_have_is_refused_on_all_ranks() -> None:
    pretend_two_hosts()
    fd.init()
    model = wide()
    with pytest.raises(fd.PlanError, match="route = 'shared', but the ranks are on 2 hosts"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(route="shared"))
    train(fd.Plan())


@pytest.mark.full("further")
@ranks(2)
def test_one_host_has_no_hierarchy() -> None:
    fd.init()
    model = wide()
    with pytest.raises(fd.PlanError, match="route = 'hierarchical', but the ranks are on 1 host"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(route="hierarchical"))
    train(fd.Plan())


@ranks(2, FARANDOLE_LOCAL_SIZE="1", FARANDOLE_NODE_COUNT="2")
def test_one_rank_a_host_is_flat() -> None:
    rank = os.environ["FARANDOLE_RANK"]
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = "0", rank
    fd.init()
    reducer = the_reducer(train(fd.Plan()))
    assert (reducer.route, reducer.route_reason) == ("flat", "there is one rank a host")


@pytest.mark.full("further")
@ranks(3, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_hosts_of_different_size_are_flat() -> None:
    pretend_two_hosts()
    if os.environ["FARANDOLE_RANK"] == "2":
        os.environ["FARANDOLE_LOCAL_SIZE"] = "1"
    fd.init()
    reducer = the_reducer(train(fd.Plan()))
    assert (reducer.route, reducer.route_reason) == ("flat", "the hosts have different numbers of ranks")


@contextmanager
def without_memory() -> Iterator[None]:
    """Refuse shared memory on one rank, as a container that hides processes does."""
    with pytest.MonkeyPatch.context() as patch:
        if fd.world().rank == 1:

            def refused(*_: object) -> int:
                raise PermissionError("no")

            patch.setattr("os.pidfd_open", refused)
        yield


@pytest.mark.full("further")
@ranks(2)
def test_without_shared_memory_auto_is_flat_and_shared_is_refused() -> None:
    fd.init()
    with without_memory():
        reducer = the_reducer(train(fd.Plan()))
        assert reducer.route == "flat"
        assert "rank 1 on " in reducer.route_reason
        assert "cannot watch its peers: no" in reducer.route_reason
        model = wide()
        with pytest.raises(fd.PlanError, match=r"route = 'shared', but rank 1 on .* cannot watch its peers"):
            fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(route="shared"))
    assert the_reducer(train(fd.Plan())).route == "shared"


@ranks(2)
def test_memory_that_runs_out_later_is_an_error_on_all_ranks() -> None:
    fd.init()
    with pytest.MonkeyPatch.context() as patch:

        def out(*_: object) -> SharedMemory:
            raise Unavailable("no 4096 bytes of shared memory")

        patch.setattr(shared_tensor.SharedMemory, "allocate", out)
        with pytest.raises(fd.CommError, match="no 4096 bytes of shared memory"):
            train(fd.Plan())


# -- killed --------------------------------------------------------------------------------------------

# Every rank trains until it sees an error, and says when and which.
TRAINS = """
import os, sys, time, torch
from torch import nn
import farandole as fd

world = fd.init(device="cpu")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
plan = fd.Plan(route=sys.argv[1], codec=sys.argv[2], timeout_seconds=30)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.01), plan)
x = torch.randn(8, 256)
for step in range(100_000):
    try:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    except fd.PeerLost as problem:
        print(time.time(), problem, flush=True)
        break
    if step == 3:
        print("trains", flush=True)
"""


def noticed_seconds() -> float:
    """Return how long it may take; on a machine that does much else longer, but less than `timeout_seconds`."""
    return 5.0 if os.getloadavg()[0] < 4 * (os.cpu_count() or 1) else 20.0


def places(route: str, size: int, port: int) -> list[dict[str, str]]:
    found = [_place(rank, size, port) for rank in range(size)]
    if route == "hierarchical":
        for rank, place in enumerate(found):
            place |= {**TWO_HOSTS, "FARANDOLE_LOCAL_RANK": str(rank % 2), "FARANDOLE_NODE_RANK": str(rank // 2)}
    return found


@pytest.mark.full("further")
@patient
@pytest.mark.parametrize(
    ("route", "codec"),
    [
        ("flat", "none"),
        ("flat", "int8"),
        ("shared", "none"),
        ("hierarchical", "none"),
        ("hierarchical", "int8"),
    ],
)
def test_a_rank_killed_in_the_middle_is_noticed_by_all_and_leaves_nothing(
    route: str, codec: str, tmp_path: Path
) -> None:
    size = 4 if route == "hierarchical" else 3
    before = memory_names()
    with started(tmp_path, ["-c", TRAINS, route, codec], places(route, size, free_port())) as workers:
        for worker in workers:
            worker.wait_for("trains")
        killed = time.time()
        workers[-1].process.kill()
        for rank, worker in enumerate(workers[:-1]):
            assert worker.process.wait(40) == 0, worker.err
            at, _, text = worker.out.splitlines()[-1].partition(" ")
            assert f"rank {rank}, " in text
            assert "is gone" in text or "closed its connection" in text
            assert float(at) - killed < noticed_seconds(), text
    assert not list((tmp_path / "work").iterdir())
    assert not left_in_memory(before, "torch")


# -- messages to one rank, and from it --------------------------------------------------------------------


@pytest.mark.gate_cases("shape1", "shape3")
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0,)])
@ranks(3)
def test_collect_and_spread_as_in_lockstep(shape: tuple[int, ...]) -> None:
    world = fd.init()
    transport = Transport(world, timeout_seconds=10)
    circle = RankGroup((0, 1, 2), world.rank)
    mine = torch.full(shape, float(world.rank))
    collected = transport.start(Message(mine, "gather"), 1, circle).wait()
    spread = transport.start(Message(mine + 5, "broadcast"), 2, circle).wait()
    assert spread.equal(torch.full((1, *shape), 5.0))
    if world.rank == 0:
        assert collected.equal(torch.stack([torch.full(shape, float(rank)) for rank in range(3)]))
    else:
        assert collected.shape == (0, *shape)
    all_gather_json(world, "test/meet", 0)
    transport.close()
