"""What ranks compare before bytes move, and which models cannot be distributed beside each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.world import store_sync
from farandole.comm.world.world import World
from farandole.core.vocabulary.spec import RouteName
from farandole.parallel.data import model_changes
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own


def _conv(channels_last: bool) -> nn.Conv2d:
    torch.manual_seed(1)
    conv = nn.Conv2d(3, 4, 3)
    return conv.to(memory_format=torch.channels_last) if channels_last else conv  # type: ignore[call-overload]


@pytest.mark.gate_cases("auto")
@pytest.mark.parametrize("route", ["auto", "flat"])
@ranks(2)
def test_strides_are_compared(route: RouteName) -> None:
    model = _conv(channels_last=fd.init().rank == 0)
    with pytest.raises(
        fd.Mismatch, match=r"strides of parameter 'weight' is \[27, 1, 9, 3\] on rank 0, \[27, 9, 3, 1\] on rank 1"
    ):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(route=route))


@ranks(2)
def test_strides_are_compared_by_the_horovod_front_end() -> None:
    import farandole.horovod.torch as hvd

    hvd.init()
    model = _conv(channels_last=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(hvd.HorovodInternalError, match=r"strides of parameter '.*' is \[27, 1, 9, 3\] on"):
        model(torch.ones(1, 3, 4, 4)).sum().backward()
    del optimizer


@ranks(2)
def test_the_same_strides_everywhere_are_fine() -> None:
    fd.init()
    model, alone = _conv(channels_last=True), _conv(channels_last=False)
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    fd.distribute(model, optimizer)
    x = data(4, width=48)[0].view(4, 3, 4, 4)
    for _ in range(3):
        for each, its, batch in ((model, optimizer, own(x)), (alone, other, x)):
            its.zero_grad()
            each(batch).square().mean().backward()
            its.step()
    assert_close(model, alone)
    assert_same_bits(model)


@ranks(2)
def test_ranks_that_agree_compare_in_one_round() -> None:
    fd.init()
    model, plain, rounds = _conv(channels_last=False), store_sync.all_gather_json, []

    def note(world: World, topic: str, mine: Any, **named: Any) -> list[Any]:
        rounds.append(topic)
        return plain(world, topic, mine, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module in (store_sync, model_changes):
            patch.setattr(module, "all_gather_json", note)
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    assert rounds == ["comparing models"]


@ranks(2)
def test_frozen_parameters_are_compared() -> None:
    world = fd.init()
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(world.rank == 0)
    with pytest.raises(fd.Mismatch, match='parameter \'bias\' is "trains" on rank 0, "frozen" on rank 1'):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


@ranks(2)
def test_the_class_of_the_model_is_compared() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Linear(3, 3) if fd.init().rank == 0 else Other(3, 3)
    with pytest.raises(fd.Mismatch, match='class of the model is "Linear" on rank 0, "Other" on rank 1'):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


@ranks(2)
def test_tied_parameters_are_compared() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight if fd.init().rank == 0 else model[1].weight
    with pytest.raises(fd.Mismatch, match=r"parameters that are one .*0\.weight = 2\.weight.* on rank 0"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


@ranks(1, 2)
def test_two_models_with_a_shared_part_are_refused() -> None:
    fd.init()
    encoder = nn.Linear(3, 3, bias=False)
    actor, critic = nn.Sequential(encoder, nn.Linear(3, 1)), nn.Sequential(encoder, nn.Linear(3, 1))
    fd.distribute(actor, torch.optim.SGD(actor.parameters(), 0.1))
    with pytest.raises(fd.ConfigError, match=r"another distributed model has '0\.weight' too.*ModuleList"):
        fd.distribute(critic, torch.optim.SGD(critic[1].parameters(), 0.1))


@ranks(2)
def test_models_that_share_a_part_on_one_rank_only_are_named_on_all() -> None:
    world = fd.init()
    first, second = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    if world.rank == 1:
        second[0] = first[0]
    fd.distribute(first, torch.optim.SGD(first.parameters(), 0.1))
    with pytest.raises(fd.Mismatch, match=r"another distributed model has too is .*0\.weight.* on rank 1"):
        fd.distribute(second, torch.optim.SGD(second.parameters(), 0.1))


@ranks(2)
def test_a_shared_part_may_be_distributed_again_in_the_next_world() -> None:
    encoder = nn.Linear(3, 3, bias=False)
    for _ in range(2):
        fd.init()
        model = nn.Sequential(encoder, nn.Linear(3, 1))
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        fd.shutdown()


@ranks(2)
def test_models_that_were_distributed_in_another_order_are_named() -> None:
    world = fd.init()
    torch.manual_seed(5)
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    if world.rank == 1:
        models.reverse()
    fd.distribute(models[0], torch.optim.SGD(models[0].parameters(), 0.1))
    with pytest.raises(fd.Mismatch, match="another order"):
        fd.distribute(models[1], torch.optim.SGD(models[1].parameters(), 0.1))


@ranks(2)
def test_a_tensor_of_inference_mode_is_refused_on_all_ranks() -> None:
    rank = fd.init().rank
    for on_all in (True, False):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if on_all or rank == 1:
            with torch.inference_mode():
                model[0].weight = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        model[0].weight.requires_grad_(False)
        kind = fd.ConfigError if on_all else fd.Mismatch
        with pytest.raises(kind, match=r"inference_mode\(\)"):
            fd.distribute(model, torch.optim.SGD(model[1].parameters(), 0.1))
