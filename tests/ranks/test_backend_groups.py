"""Groups of the backend "farandole": who is in them, who does not come, parts of them, and other devices."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import farandole as fd
import farandole.backend
from tests.ranks import backend_script
from tests.ranks.pool import patient, ranks
from tests.ranks.started import started
from tests.ranks.test_backend import as_if_apart, make, places, without_gloo


def total(group: Any, value: float) -> float:
    """Return the sum of all ranks' values."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@pytest.mark.full("further")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(3)
def test_a_rank_that_never_comes_is_named_on_every_rank(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        if rank != 2:
            with pytest.raises(fd.Stalled, match=r"rank ., making a group: rank 2 did not come within 0\.5 s"):
                make(seconds=0.5)
        if rank == 1:  # by its number in the job, where it is the second of the group
            with pytest.raises(fd.Stalled, match="rank 2 did not come"):
                make([1, 2], seconds=0.5)
    fd.shutdown()


@pytest.mark.full("further")
@ranks(3)
def test_groups_made_in_another_order_are_no_groups() -> None:
    rank = fd.init().rank
    if rank < 2:
        pattern = r"this rank makes a group of ranks \[0, 1.*another one a group of.*same groups in the same order"
        with pytest.raises(fd.Mismatch, match=pattern):
            make([0, 1] if rank == 0 else [0, 1, 2], seconds=5)
    else:
        make([0, 1])
        with pytest.raises(fd.Stalled, match="ranks 0 and 1 did not come"):
            make([0, 1, 2], seconds=1)
    fd.shutdown()


@ranks(3)
def test_the_order_of_ranks_objects_and_groups_of_one() -> None:
    rank = fd.init().rank
    group = make([2, 0, 1])
    assert group.rank() == rank, "torch sorts them"
    pair = make([2, 1])
    alone = [make([each]) for each in range(3)][rank]
    assert total(group, rank + 1.0) == 6.0
    if rank:
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 2, group=pair)
        assert tensor.item() == 2.0

    value = {"rank": rank, "text": "x" * 1000 * rank}
    said: list[Any] = [None] * 3
    dist.all_gather_object(said, value, group=group)
    assert [each["rank"] for each in said] == [0, 1, 2]
    gathered: list[Any] | None = [None] * 3 if rank == 1 else None
    dist.gather_object(value, gathered, dst=1, group=group)
    assert gathered is None or len(gathered[2]["text"]) == 2000
    told: list[Any] = [value, rank] if rank == 2 else [None, None]
    dist.broadcast_object_list(told, 2, group=group)
    assert told == [{"rank": 2, "text": "x" * 2000}, 2]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", {"b": 1}, None] if rank == 0 else None, 0, group=group)
    assert mine == [["a", {"b": 1}, None][rank]]
    if rank == 0:
        dist.send_object_list(["from 0", 0], 2, group=group)
    elif rank == 2:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0, group=group)
        assert received == ["from 0", 0]

    assert total(alone, 5.0) == 5.0
    dist.all_gather_object(said := [None], "me", group=alone)
    assert said == ["me"]
    out = torch.zeros(2)
    alone.reduce_scatter_single(out, torch.tensor([1.0, 2.0])).wait()
    dist.scatter(one := torch.zeros(1), [torch.ones(1)], group=alone, group_src=0)
    dist.gather(one, [other := torch.zeros(1)], group=alone, group_dst=0)
    dist.reduce(one, group_dst=0, group=alone)
    assert (out.tolist(), one.item(), other.item()) == ([1.0, 2.0], 1.0, 1.0)
    with pytest.raises(ValueError, match="no other rank"):
        alone.send([out], 0, 0)
    fd.shutdown()


@pytest.mark.full("further")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(3)
def test_a_group_can_be_split(apart: bool) -> None:
    rank = fd.init().rank
    with as_if_apart(apart):
        parent = make()
        pair = parent.split_group([2, 0], timeout=timedelta(seconds=0.5), group_desc="ends")
        single = parent.split_group([1])
        again = parent.split_group([0, 2])
        assert (pair is None, single is None) == (rank == 1, rank != 1)
        assert total(parent, 1.0) == 3.0
        if rank == 1:
            assert (single.size(), single.rank()) == (1, 0)
        else:
            assert (pair.rank(), pair.size(), pair.group_desc) == (rank // 2, 2, "ends")
            for group in (pair, again):
                tensor = torch.tensor([rank + 1.0])
                group.allreduce([tensor]).wait()
                assert tensor.item() == 4.0
        if rank == 0:
            with pytest.raises(fd.Stalled, match="rank 2"):  # by its number in the job
                pair.barrier().wait()
        for wrong in ([], [0, 0], [3]):
            with pytest.raises(ValueError, match="farandole"):
                parent.split_group(wrong)
        # torch's own function asks for an accelerator first, whatever the backend is.
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(parent, [[0, 1], [2]])
    fd.shutdown()


@ranks(4)
def test_slices_of_a_mesh() -> None:
    rank = fd.init().rank
    names = ("rows", "columns")
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, "farandole")
    )
    rows, columns = mesh["rows"].get_group(), mesh["columns"].get_group()
    whole = mesh._flatten("all", backend_override="farandole").get_group()
    assert [str(group.name()) for group in (rows, columns, whole)] == ["farandole"] * 3
    assert total(rows, rank + 1.0) == [4.0, 6.0][rank % 2]
    assert total(columns, rank + 1.0) == [3.0, 7.0][rank // 2]
    assert total(whole, rank + 1.0) == 10.0
    fd.shutdown()


@pytest.mark.skipif(
    not hasattr(dist, "all_gather_single"), reason="no collectives of meta tensors before torch 2.13"
)
@ranks(2)
def test_tensors_of_another_device_go_to_its_backend() -> None:
    """Meta tensors stand for an accelerator's; torch's fake backend does nothing, at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend

    rank = fd.init().rank
    group = dist.new_group(backend="cpu:farandole,meta:fake", timeout=timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    assert FakeStore is not None
    assert dist.get_backend_config(group) == "cpu:farandole,meta:fake"
    meta = torch.ones(4, device="meta")
    dist.all_reduce(meta, group=group)
    if rank == 0:  # nobody is waited for there
        dist.all_gather([torch.ones(4, device="meta") for _ in range(2)], meta, group=group)
        dist.gather(meta, None, group=group, dst=1)
        dist.send(meta, 1, group=group)
        dist.broadcast(meta, 0, group=group)
        group.reduce_scatter_single(torch.ones(2, device="meta"), meta, dist.ReduceScatterOptions())
    assert total(group, rank + 1.0) == 3.0
    said: list[Any] = [None, None]
    dist.all_gather_object(said, rank, group=group)
    assert said == [0, 1]
    assert type(group._get_backend(torch.device("meta"))).__name__ == "FakeProcessGroup"
    dist.destroy_process_group(group)

    other = make()
    with pytest.raises(NotImplementedError, match=r'on cuda.*make it with "cpu:farandole,cuda:'):
        other._get_backend(torch.device("cuda"))
    nccl = dist.new_group(backend="cpu:farandole,meta:nccl", timeout=timedelta(seconds=20))
    with pytest.raises(NotImplementedError, match=r"no NCCL"):
        dist.all_reduce(meta, group=nccl)
    assert total(nccl, 1.0) == 2.0
    fd.shutdown()


@patient
def test_no_way_to_end_aborts_a_process(tmp_path: Path) -> None:
    script = str(Path(backend_script.__file__))
    with started(tmp_path, [script, "leave"], places(2)) as both:
        codes = [rank.process.wait(timeout=60) for rank in both]
        assert codes == [3, 3], "\n".join(rank.err for rank in both)
        for rank in both:
            assert without_gloo(rank.out) == "over\n"
            assert "terminate" not in rank.err
            assert "Traceback" not in rank.err


@pytest.mark.full("further")
@ranks(2)
def test_init_makes_groups_of_the_backend_that_it_is_asked_for() -> None:
    means = {}
    for backend in ("farandole", "gloo", None, *["farandole"] * 10):
        world = fd.init(backend=backend)
        assert world.backend == (backend or "gloo")
        assert str(world.group.name() if world.group else "") == (backend or "gloo")
        torch.manual_seed(world.rank)
        layer = torch.nn.Linear(20, 20)
        layer, optimizer = fd.distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        layer(torch.ones(4, 20) * world.rank).sum().backward()
        optimizer.step()
        means[world.backend] = [p.detach().clone() for p in layer.parameters()]
        fd.shutdown()
    for one, other in zip(means["farandole"], means["gloo"], strict=True):
        assert torch.equal(one, other)
    with pytest.raises(fd.ConfigError, match=r"backend='mpi': expected gloo or farandole"):
        fd.init(backend="mpi")


@ranks(2, FARANDOLE_BACKEND="farandole")
def test_the_launchers_backend_and_the_scripts_do_not_contradict() -> None:
    with pytest.raises(fd.ConfigError, match=r"two backends: gloo in the script, farandole from the launcher"):
        fd.init(backend="gloo")
    assert fd.init().backend == "farandole"
    fd.shutdown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(
        fd.ConfigError, match=r"'farandole' is asked for, and the script has made a group of cpu:gloo"
    ):
        fd.init()
    dist.destroy_process_group()


@ranks(2)
def test_a_dead_rank_is_a_peer_lost_where_init_asked_for_it() -> None:
    world = fd.init(backend="farandole")
    assert fd.mean(1.0) == 1.0
    if world.rank == 1:
        assert world.group is not None
        world.group.shutdown()
        fd.shutdown()
        return
    with pytest.raises(fd.PeerLost, match="rank 1 on"):
        dist.all_reduce(torch.ones(2))
    fd.shutdown()
