"""Ranks in a mesh: parts of the world that exchange gradients by themselves, samples, copies of shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.world.store_sync import all_gather_json, require_same
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.global_norm import watch_norms
from farandole.parallel.mesh import make_mesh
from farandole.parallel.model import DistributedModel
from farandole.parallel.seeds import seed_passes
from farandole.parallel.split import Split, mark_copy, split_in_place
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp
from tests.ranks.sharded_cases import full
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts


@pytest.mark.gate_cases("int8")
@ranks(4)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_gradients_meet_in_each_part_of_the_world_alone(codec: str) -> None:
    here = fd.init()
    mesh = make_mesh(here, Plan(tensor=2))
    part = mesh.part("data")
    assert part.job_ranks == (here.rank % 2, here.rank % 2 + 2), "tensor ranks are neighbours"
    model = nn.Linear(64, 80)
    reducer = GradientReducer(part, list(model.named_parameters()), Plan(codec=codec))
    model(torch.full((4, 64), float(here.rank + 1))).sum().backward()
    expected = 4 * (1 + here.rank % 2 + 1 + here.rank % 2 + 2) / 2
    assert model.weight.grad is not None, "a gradient came"
    torch.testing.assert_close(model.weight.grad, torch.full((80, 64), expected), rtol=0.01, atol=0.0)
    assert reducer.has_codecs == (codec != "none"), "the weight is large enough to be packed"
    reducer.remove()
    fd.barrier()


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_a_part_knows_its_hosts() -> None:
    pretend_two_hosts()
    here = fd.init()
    mesh = make_mesh(here, Plan(tensor=2))
    tensor, replicas = mesh.part("tensor"), mesh.replicas
    assert (tensor.node_count, tensor.local_size) == (1, 2), "tensor ranks share a host"
    assert (replicas.node_count, replicas.local_size) == (2, 1), "data-parallel ranks do not"
    group = mesh.group("tensor")
    mine = torch.tensor([float(here.rank)])
    torch.distributed.all_reduce(mine, group=group)
    assert mine.item() == sum(tensor.job_ranks), f"{tensor.job_ranks}"
    fd.barrier()


@pytest.mark.full("further")
@ranks(4)
def test_a_mismatch_in_a_part_is_raised_in_it() -> None:
    here = fd.init()
    part = make_mesh(here, Plan(tensor=2)).part("data")
    if here.tensor_rank == 0:
        require_same(part, "a test", [("value", 1)])
    else:
        with pytest.raises(Mismatch, match=f"rank {here.rank}, .*value is 1 on rank 1, 3 on rank 3"):
            require_same(part, "a test", [("value", here.rank)])
    fd.barrier()


@pytest.mark.full("further")
@ranks(4)
def test_ranks_of_one_replica_get_the_same_samples() -> None:
    here = fd.init()
    make_mesh(here, Plan(tensor=2))
    loader = fd.shard(DataLoader(TensorDataset(torch.arange(12)), batch_size=3))
    seen = [int(each) for (batch,) in loader for each in batch]
    everyone = all_gather_json(here, "samples", seen)
    assert everyone[0] == everyone[1], f"{everyone}"
    assert everyone[2] == everyone[3], f"{everyone}"
    assert sorted(everyone[0] + everyone[2]) == list(range(12)), f"{everyone}"
    assert (here.data_rank, here.data_size) == (here.rank // 2, 2), "the place in the mesh"
    seeds = all_gather_json(here, "seeds", fd.seed(3, per_rank=True))
    assert seeds[0] == seeds[1] == 3, "augmentation is the same for the same samples"
    assert seeds[2] == seeds[3] != 3
    gathered = fd.gather(torch.tensor(seen))
    assert sorted(gathered.tolist()) == list(range(12)), "each sample once"
    with pytest.raises(ConfigError, match="several ranks compute the loss of one sample"):
        fd.gather(torch.ones(1, requires_grad=True), gradients=True)
    make_mesh(here, Plan())
    with pytest.raises(ConfigError, match="divided over 2 ranks"):
        next(iter(loader))


@pytest.mark.gate_cases("0.05")
@ranks(4)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_copies_of_shards_train_as_one_process(clip: float | None) -> None:
    here = fd.init()
    reference, model = mlp(), mlp()
    plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (reference, model))
    fd.distribute(model, optimizer, Plan(zero=3, data=2, shard=2, clip_norm=clip))
    first = next(model.parameters())
    assert isinstance(first, DTensor), "parameters are sharded"
    assert first.device_mesh.shape == (2, 2), "two copies of two shards"
    x, y = data(8)
    for _ in range(3):
        plain.zero_grad(), nn.functional.mse_loss(reference(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        plain.step()
        own = slice(here.rank * 2, here.rank * 2 + 2)
        optimizer.zero_grad(), nn.functional.mse_loss(model(x[own]), y[own]).backward(), optimizer.step()
    for name, value in full(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.gate_cases("1.0")
@ranks(4)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_by_the_norm_of_all_ranks(order: float) -> None:
    here = fd.init()
    plan = Plan(tensor=2, pipeline=2)
    mesh = make_mesh(here, plan)
    whole = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    stage = whole[:3] if here.pipeline_rank == 0 else whole[3:]
    model = nn.ParameterList([torch.zeros(6, 4) for _ in stage])
    split, replicated, tied = model
    rows = Split((6, 4), 0, ((here.tensor_rank * 2, 2), (4 + here.tensor_rank, 1)), "tensor")
    split_in_place(split, rows, [])
    split.grad, replicated.grad, tied.grad = rows.take(stage[0]), stage[1].clone(), whole[2].clone()
    if here.pipeline_rank == 1:
        mark_copy(tied)
    DistributedModel(plan, mesh).stands_for(model)
    watch_norms()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=order)
    expected = torch.linalg.vector_norm(torch.stack(whole[:5]), order)
    torch.testing.assert_close(norm, expected, msg=lambda m: f"norm of order {order}: {m}")
    torch.testing.assert_close(replicated.grad, stage[1] / (expected + 1e-6), msg="the gradient is clipped")
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) < 3.0, "another model's norm is its own"


@ranks(2)
def test_a_grad_scaler_skips_a_step_on_all_ranks_or_none() -> None:
    here = fd.init()
    plan = Plan(tensor=2)
    model = nn.ParameterList([torch.ones(3)])
    DistributedModel(plan, make_mesh(here, plan)).stands_for(model)
    watch_norms()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model[0].sum()).backward()
        if bad and here.rank == 1:
            model[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert (model[0].detach() == 1.0).all() == bad, f"rank {here.rank} {'stepped' if bad else 'did not step'}"
    assert scaler.get_scale() == 2.0, "the scale was halved once, on both ranks"


@pytest.mark.full("further")
@ranks(4)
def test_dropout_is_equal_on_tensor_ranks_of_one_replica() -> None:
    here = fd.init()
    mesh = make_mesh(here, Plan(tensor=2))

    class Layers(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [nn.functional.dropout(x), nn.functional.dropout(x)]

    model = Layers()
    seed_passes(model, mesh)
    torch.manual_seed(here.rank)
    before = torch.get_rng_state()
    passes = [[each.sum(0).tolist() for each in model(torch.ones(64, 2))] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before), "the script's generator is as it was"
    everyone = all_gather_json(here, "dropped", passes)
    for first, second in ((0, 1), (2, 3)):
        for number in range(2):
            mine, other = everyone[first][number], everyone[second][number]
            assert mine == other, "replicated layers drop alike"
    assert everyone[0][0][0] != everyone[2][0][0], "replicas drop by themselves"
    assert everyone[0][0][0] != everyone[0][1][0], "and each pass"


@ranks(4)
def test_parts_make_groups_in_any_number_and_after_some_were_dropped() -> None:
    here = fd.init()
    part = make_mesh(here, Plan(tensor=2)).part("data")
    if here.tensor_rank:
        part.new_group()  # the other part has one group less from now on
    for _ in range(3):
        groups = [part.new_group(), part.new_group(backend="farandole")]
        for group in groups:
            mine = torch.ones(2) * here.rank
            torch.distributed.all_reduce(mine, group=group)
            assert mine[0] == sum(part.job_ranks), f"{mine} of {part.job_ranks}"
        assert groups[0] is not None, "two ranks have a group"
        part.drop_group(groups[0])
    fd.barrier()
