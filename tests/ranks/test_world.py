"""Meeting, leaving, meeting again; and every way of being unlike the other ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.transport import connect
from farandole.comm.world import connect as meeting
from farandole.comm.world.store_sync import all_gather_json, require_same
from farandole.comm.world.world import escape
from farandole.core.host.open_sockets import borrowed, open_sockets
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import free_port, ranks, takes
from tests.ranks.reference import data, mlp, own


@ranks(3)
def test_two_ranks_on_one_gpu_are_refused_on_all() -> None:
    gpu = "GPU-b" if int(os.environ["FARANDOLE_RANK"]) else "GPU-a"
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(meeting, "unique_id", lambda device: gpu)
    with pytest.raises(
        fd.ConfigError, match=r"ranks 1 and 2 are both on cpu of .*, and NCCL takes one rank a GPU"
    ) as no:
        fd.init()
    assert no.value.remedy is not None
    assert 'fd.init(device="cpu")' in no.value.remedy
    monkeypatch.undo()


@pytest.mark.full("further")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_groups_of_hosts_and_peers() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"] = str(rank % 2)
    os.environ["FARANDOLE_NODE_RANK"] = str(rank // 2)
    world = fd.init()
    assert (world.rank, world.size, world.local_rank, world.node_rank) == (rank, 4, rank % 2, rank // 2)
    for group, members in ((world.node, {0: 1, 1: 1, 2: 5, 3: 5}), (world.cross, {0: 2, 1: 4, 2: 2, 3: 4})):
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=group)
        assert int(value) == members[rank]


@ranks(2)
def test_ranks_meet_again_after_an_attempt_that_failed_further_on_for_one_of_them() -> None:
    """A link is cut while they connect: one has begun to make its group, the other still looks at the store."""
    rank, connect = int(os.environ["FARANDOLE_RANK"]), dist.init_process_group

    def fail(*_: Any, **__: Any) -> None:
        if rank == 0:
            dist.distributed_c10d._process_group_name([], use_hashed_name=False)
        raise RuntimeError("Connect timeout [none]")

    dist.init_process_group = fail
    try:
        with pytest.raises(fd.CommError, match=r"could not connect: Connect timeout \[none\]"):
            fd.init(timeout_seconds=10)
    finally:
        dist.init_process_group = connect
    value = torch.ones(3)
    dist.all_reduce(value, group=fd.init(timeout_seconds=10).group)
    assert value.tolist() == [2, 2, 2]


@pytest.mark.full("slow")
@ranks(2)
@takes(seconds=100)
def test_init_and_shutdown_a_thousand_times() -> None:
    me = psutil.Process()

    def once(with_traffic: bool) -> None:
        world = fd.init()
        assert fd.init() is world
        if with_traffic:
            value = torch.ones(3)
            dist.all_reduce(value, group=world.group)
            assert value.tolist() == [2, 2, 2]
        fd.shutdown()
        fd.shutdown()
        with pytest.raises(fd.ConfigError, match=r"call farandole.init\(\) first"):
            fd.world()

    for _ in range(5):
        once(True)
    files, threads = me.num_fds(), threading.active_count()
    for i in range(1000):
        once(i % 10 == 0)
    assert abs(me.num_fds() - files) < 20, "a leak would be of a thousand"
    assert threading.active_count() == threads


@pytest.mark.full("further")
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@ranks(2)
@takes(seconds=60)
def test_models_of_former_worlds_hold_no_socket_and_no_thread(kept: bool) -> None:
    models: list[nn.Module] = []
    seen: list[weakref.ref[nn.Module]] = []
    counts = []
    for _ in range(5):
        fd.init()
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(codec="int8", lossy=True, route="flat"))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        fd.shutdown()
        seen.append(weakref.ref(model))
        if kept:
            models.append(model)
        del model, optimizer
        gc.collect()
        me = psutil.Process()
        counts.append((me.num_fds(), me.num_threads()))
    assert counts[1:] == [counts[1]] * 4, counts
    assert sum(ref() is not None for ref in seen) == len(models)


@pytest.mark.full("further")
@ranks(2)
def test_a_process_that_meets_in_many_places_keeps_one_store() -> None:
    first = int(os.environ["FARANDOLE_PORT"])
    counts = []
    for _ in range(4):
        world = fd.init()
        port = torch.tensor(free_port() if world.rank == 0 else 0)
        dist.broadcast(port, 0, group=world.group)
        fd.shutdown()
        os.environ["FARANDOLE_PORT"] = str(int(port))
        counts.append(psutil.Process().num_fds())
    fd.init()
    assert counts[1:] == [counts[1]] * 3, counts
    if world.rank == 0:
        listening = {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}
        assert int(os.environ["FARANDOLE_PORT"]) in listening
        assert first not in listening


@ranks(2)
def test_the_store_listens_on_the_chosen_address_only() -> None:
    world = fd.init()
    port = int(os.environ["FARANDOLE_PORT"])
    if world.rank == 0:
        listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def used_controls() -> dict[str, int]:
    """Return which congestion controls this process's TCP connections use, and how many."""
    found: dict[str, int] = {}
    for descriptor, _ in open_sockets():
        with borrowed(descriptor) as connection, contextlib.suppress(OSError):
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # a listener has none
                text = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                name = text.rstrip(b"\0").decode()
                found[name] = found.get(name, 0) + 1
    return found


@ranks(2)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_connections_for_messages_use_the_congestion_control_of_the_plan(codec: str) -> None:
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        before = mine.getsockopt(*option)
        fd.init()
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(codec=codec, route="flat", congestion_control="reno"))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        used = used_controls()
        assert used.get("reno", 0) == (1 if codec == "int8" else 0), used
        # The program's own connections are left alone.
        assert mine.getsockopt(*option) == before
        assert all_gather_json(fd.world(), "test/done", 0) == [0, 0]


@ranks(2)
def test_a_congestion_control_that_one_host_lacks_is_refused_on_every_rank() -> None:
    world = fd.init()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = r"congestion_control = 'swift': rank 1 on .* cannot use it: No such file"
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:  # whose kernel has it
            patch.setattr(connect, "_choose", lambda connection, control: "")
        with pytest.raises(fd.PlanError, match=said):
            fd.distribute(model, optimizer, fd.Plan(codec="int8", route="flat", congestion_control="swift"))


@ranks(2)
def test_an_existing_process_group_is_used_and_left_alone() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["FARANDOLE_PORT"]), 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    world = fd.init()
    assert world.group is dist.group.WORLD
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(4)
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    fd.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()


def linear(**other: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4, **other), nn.Linear(4, 3))


UNLIKE = {
    "shape": (
        lambda rank: nn.Sequential(nn.Linear(6, 4 + rank), nn.Linear(4 + rank, 3)),
        r"parameter '0.weight' is \[\[4, 6\], \"float32\"\] on rank 0, \[\[5, 6\], \"float32\"\] on rank 1",
    ),
    "dtype": (
        lambda rank: linear(dtype=torch.float64 if rank else None),
        r"parameter '0.weight' is .*\"float32\"\] on rank 0, .*\"float64\"\] on rank 1",
    ),
    "number": (
        lambda rank: nn.Sequential(*[nn.Linear(6, 6) for _ in range(2 + rank)]),
        r"what follows 8 equal entries is \"nothing\" on rank 0, \"parameter '2.weight'\" on rank 1",
    ),
    "order": (
        lambda rank: nn.ModuleDict({n: nn.Linear(2, 2) for n in (["b", "a"] if rank else ["a", "b"])}),
        r"name is \"parameter 'a.weight'\" on rank 0, \"parameter 'b.weight'\" on rank 1",
    ),
    "buffers": (
        lambda rank: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=not rank)),
        r"buffer|what follows",
    ),
}


@pytest.mark.gate_cases("shape")
@pytest.mark.parametrize("kind", sorted(UNLIKE))
@ranks(2)
def test_a_rank_with_another_model_is_refused_on_every_rank(kind: str) -> None:
    world = fd.init()
    make, text = UNLIKE[kind]
    model = make(world.rank)
    with pytest.raises(fd.Mismatch, match=text) as caught:
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    assert caught.value.rank == world.rank
    assert "\n" not in str(caught.value)


@pytest.mark.full("further")
@ranks(3)
def test_the_odd_one_out_is_named_last() -> None:
    world = fd.init()
    with pytest.raises(fd.Mismatch, match="layers is 4 on ranks 0 and 2, 5 on rank 1"):
        require_same(world, "testing", [("width", 8), ("layers", 5 if world.rank == 1 else 4)])
    require_same(world, "testing", [("width", 8)])  # and the world is still usable


@ranks(2)
def test_other_plans_and_other_optimizers_are_refused() -> None:
    world = fd.init()
    model = mlp()
    with pytest.raises(fd.Mismatch, match="plan key 'accumulate' is 1 on rank 0, 2 on rank 1"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(accumulate=1 + world.rank))
    model = mlp()
    kind = torch.optim.Adam if world.rank else torch.optim.SGD
    with pytest.raises(fd.Mismatch, match='class of optimizer 0 is "SGD" on rank 0, "Adam" on rank 1'):
        fd.distribute(model, kind(model.parameters(), 0.1))


@pytest.mark.full("further")
@ranks(2)
def test_another_world_size_is_refused() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    if rank == 1:
        os.environ["FARANDOLE_SIZE"] = "3"
    with pytest.raises(fd.CommError, match=r"world size is 2 on rank 0, 3 on rank 1|did not get here") as caught:
        fd.init(timeout_seconds=1.5)
    if rank == 0:
        assert isinstance(caught.value, fd.Mismatch)


@pytest.mark.full("further")
@ranks(2)
def test_a_rank_taken_twice_is_refused() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    if rank == 1:
        os.environ["FARANDOLE_RANK"] = "0"
        os.environ["FARANDOLE_LOCAL_RANK"] = "0"
    with pytest.raises(fd.CommError, match=r"two processes say they are rank 0|rank 1 did not get here|in use"):
        fd.init(timeout_seconds=1.5)


@pytest.mark.full("further")
@ranks(2)
def test_who_is_missing_is_named() -> None:
    world = fd.init(timeout_seconds=1.0)
    if world.rank == 0:
        with pytest.raises(fd.Stalled, match=r"rank 0, lunch: rank 1 did not get here within 1 s"):
            all_gather_json(world, "lunch", "I am here")


@ranks(2)
def test_an_optimizer_state_that_cannot_travel_is_refused_on_both() -> None:
    world = fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if world.rank == 0:
        optimizer.state[next(iter(model.parameters()))]["thing"] = object()
    with pytest.raises(fd.ConfigError, match=r"'thing'.* is a object"):
        fd.distribute(model, optimizer)


@ranks(1)
def test_what_distribute_refuses() -> None:
    with pytest.raises(fd.ConfigError, match=r"call farandole\.init"):
        fd.distribute(mlp(), torch.optim.SGD(mlp().parameters(), 0.1))
    fd.init()
    model = mlp()
    good = torch.optim.SGD(model.parameters(), 0.1)
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], 0.1)
    lazy = nn.Sequential(nn.LazyLinear(3))
    meta = nn.Linear(2, 2, device="meta")
    cases: list[tuple[Any, Any, str]] = [
        ("model", good, "expected a torch.nn.Module, got str"),
        (model, "optimizer", "expected a torch.optim.Optimizer, got str"),
        (model, [], "list of optimizers is empty"),
        (model, stranger, r"holds 1 parameters that are not the model's \(shapes \(7,\)\)"),
        (lazy, torch.optim.SGD(lazy.parameters(), 0.1), "'0.weight' has no shape yet"),
        (meta, torch.optim.SGD(meta.parameters(), 0.1), "'weight' is on the meta device"),
    ]
    for what, optimizer, text in cases:
        with pytest.raises(fd.ConfigError, match=text):
            fd.distribute(what, optimizer)
    fd.distribute(model, good)
    with pytest.raises(fd.ConfigError, match="distributed already"):
        fd.distribute(model, good)


@ranks(2)
def test_a_wrapped_model_is_refused() -> None:
    fd.init()
    model = nn.parallel.DistributedDataParallel(mlp())
    with pytest.raises(fd.ConfigError, match="give the bare model"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.full("further")
@ranks(2)
def test_a_plan_of_the_launcher_and_one_of_the_script() -> None:
    import tempfile

    fd.init()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.toml"
        path.write_text("accumulate = 2\n")
        os.environ["FARANDOLE_PLAN"] = str(path)
        model = mlp()
        with pytest.raises(fd.PlanError, match="two plans: accumulate = 3 in the script, 2 in "):
            fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(accumulate=3))
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))

        assert DistributedModel.of(model).plan == fd.Plan(accumulate=2).with_bucket_bytes(on_device=False)


@ranks(2)
def test_a_gradient_of_another_kind_is_named() -> None:
    fd.init()
    table = nn.Embedding(5, 2, sparse=True)
    fd.distribute(table, torch.optim.SGD(table.parameters(), 0.1))
    table(torch.tensor([1])).sum().backward()
    table.zero_grad()
    table.sparse = False
    with pytest.raises(fd.CommError, match="gradient of 'weight' is dense, in the first step it was sparse"):
        table(torch.tensor([1])).sum().backward()


@ranks(2)
def test_a_peer_that_leaves_is_an_error_not_a_hang() -> None:
    world = fd.init(timeout_seconds=5)
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(timeout_seconds=3))
    x, y = data(4)
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    if world.rank == 1:
        fd.shutdown()
        return
    loss = nn.functional.mse_loss(model(own(x)), own(y))
    with pytest.raises((fd.PeerLost, fd.Stalled), match=r"rank 0, all[-_]reduce"):
        loss.backward()


@ranks(2)
def test_whatever_is_asked_of_a_world_whose_generation_has_ended_is_a_lost_peer() -> None:
    world = fd.init()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    values = TensorDataset(torch.ones(8, 1))
    loader = fd.shard(DataLoader(values, sampler=list(range(8)), batch_size=2))
    with contextlib.suppress(fd.PeerLost):  # the other may have left already
        all_gather_json(world, "all are here", 0)
    escape()
    asked: list[Callable[[], object]] = [
        lambda: all_gather_json(world, "anything", 1),
        lambda: fd.distribute(model, optimizer),
        world.new_group,
        lambda: world.node,
        lambda: world.cross,
        lambda: fd.mean(1.0),
        fd.preempted,
        lambda: next(iter(loader)),
    ]
    for ask in asked:
        with pytest.raises(fd.PeerLost, match="this generation of ranks has ended"):
            ask()


@ranks(2)
def test_a_store_that_is_gone_is_a_lost_peer() -> None:
    world = fd.init()
    assert world.store is not None
    if world.rank == 0:
        world.store.wait(["rank 1 is here"], timedelta(seconds=20))  # nothing it waits for is taken away before
        escape()
    else:
        world.store.set("rank 1 is here", "")
        with pytest.raises(fd.PeerLost, match="the store, which rank 0 serves, is gone"):
            all_gather_json(world, "anything", 1)


SEARCHED = {
    "none": fd.Plan(sync_batch_norm=True),
    "flat": fd.Plan(route="flat"),
    "int8": fd.Plan(route="flat", codec="int8", lossy=True),
}


@pytest.mark.full("further")
@pytest.mark.parametrize("kind", list(SEARCHED))
@ranks(2)
@takes(seconds=60)
def test_a_search_that_drops_its_models_keeps_nothing_of_them(kind: str) -> None:
    world = fd.init()
    counts = []
    for _ in range(5):
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), SEARCHED[kind])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        weight = weakref.ref(model.get_parameter("0.weight"))
        del model, optimizer
        gc.collect()
        assert weight() is None, "parameters are dropped with their model"
        all_gather_json(world, "all have dropped theirs", 0)
        me = psutil.Process()
        samples = []
        for _ in range(5):  # a thread that has a file open for a moment leaves nothing
            samples.append((me.num_fds(), me.num_threads()))
            time.sleep(0.05)
        counts.append(
            (
                *min(samples),
                len(world.session._closers._methods),
                len(world.session.batch_weight._listeners._methods),
            )
        )
    for later in counts[2:]:
        assert all(count <= before for count, before in zip(later, counts[1], strict=True)), counts
    world.session.let_go()
    all_gather_json(world, "all have let go", 0)
    assert psutil.Process().num_threads() < counts[1][1], "the last one's threads"


@ranks(3)
def test_what_ranks_have_said_to_each_other_is_forgotten() -> None:
    world = fd.init()
    assert world.store is not None
    all_gather_json(world, "begin", 0)
    before = world.store.num_keys()
    for turn in range(30):
        if (turn + world.rank) % 3 == 0:
            time.sleep(0.01)  # another one is late each time
        assert all_gather_json(world, "a question", [turn, world.rank]) == [[turn, rank] for rank in range(3)]
        assert world.store.num_keys() <= before + 2 * 3
    all_gather_json(world, "end", 0)
    assert world.store.num_keys() <= before + 3 + 3, "the last answers, and those of the end"


@pytest.mark.full("further")
@ranks(2)
def test_an_engine_lives_as_long_as_any_of_its_parameters() -> None:
    world = fd.init()
    part = nn.Linear(2, 1, bias=False)
    nn.init.ones_(part.weight)
    whole = nn.ModuleList([part, nn.BatchNorm1d(2)])
    fd.distribute(whole, torch.optim.SGD(whole.parameters(), 0.1))
    del whole
    gc.collect()
    part(torch.full((1, 2), float(world.rank))).sum().backward()
    assert part.weight.grad is not None
    assert part.weight.grad.tolist() == [[0.5, 0.5]]
