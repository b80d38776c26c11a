"""Gradients on an accelerator travel by the back end alone: other messages are refused on every rank.

There is no accelerator here: parameters on the meta device stand for any that is not the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.parameters import ReducerOptions, device_of
from farandole.comm.engine.reducer import GradientReducer
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.test_routes import pretend_two_hosts

REMEDY = 'on an accelerator use another codec than threshold and your own, and route "auto" or "flat"'


def parameters_of(*, here: bool) -> Sequence[tuple[str, nn.Parameter]]:
    """Return one in CPU memory and, unless `here`, one on the accelerator."""
    first, second = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
    there = second if here else second.to("meta")
    return [(name, nn.Parameter(layer.weight.detach())) for name, layer in (("first", first), ("second", there))]


@pytest.mark.gate_cases("{'codec': 'int8'}-codec 'int8'")
@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"codec": "int8"}, "codec 'int8'"),
        ({"codec": "powersgd:2"}, "codec 'powersgd:rank=2'"),
        ({"codec_for": {"first": "bf16"}}, "codec 'bf16'"),
        ({"codec": "auto", "lossy": True}, "codec 'auto'"),
    ],
    ids=str,
)
@ranks(2)
def test_what_needs_messages_is_refused_on_all_ranks(plan: dict[str, Any], what: str) -> None:
    world = fd.init()
    for late in (False, True):  # as `fd.distribute`, and as the Horovod front end
        with pytest.raises(fd.PlanError) as caught:
            GradientReducer(
                world, parameters_of(here=False), fd.Plan(**plan), ReducerOptions(lazy_init=late)
            ).tuning.connect()
        expected = f"{what}: parameter 'second' of rank 0 is on meta, and what travels by messages is read"
        assert str(caught.value).startswith(expected), caught.value
        assert REMEDY in str(caught.value)


@ranks(2)
def test_one_rank_alone_on_an_accelerator_is_refused_on_all() -> None:
    world = fd.init()
    with pytest.raises(fd.Mismatch, match='device of parameter \'second\' is "cpu" on rank 0, "meta" on rank 1'):
        GradientReducer(world, parameters_of(here=world.rank == 0), fd.Plan(codec="int8"))


@pytest.mark.full("further")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_the_exact_mean_goes_by_the_back_end() -> None:
    """Also where hosts would share memory; a plan that insists on that is refused."""
    pretend_two_hosts()
    world = fd.init()
    reducer = GradientReducer(world, parameters_of(here=False), fd.Plan())
    assert reducer.route == "flat"
    assert "not in CPU memory" in reducer.route_reason
    with pytest.raises(fd.PlanError, match="route = 'hierarchical', but the ranks' models are not in CPU memory"):
        GradientReducer(world, parameters_of(here=False), fd.Plan(route="hierarchical"))
    elsewhere = [("first", parameter) for _, parameter in parameters_of(here=False)[1:]]
    reducer = GradientReducer(world, elsewhere, fd.Plan())
    with pytest.raises(fd.PlanError, match="codec 'int8': parameter 'first' of rank 0 is on meta"):
        reducer.switch_codecs({"first": CodecSpec.parse("int8")})


@ranks(2)
def test_one_bit_adam_is_refused_before_it_trains() -> None:
    fd.init()
    model = nn.Linear(64, 128)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    optimizer = fd.OneBitAdam(model.parameters(), warm_up_steps=3)
    with pytest.raises(fd.PlanError, match=r"codec 'sign.*': parameter 'second' of rank 0 is on meta"):
        optimizer.attach(reducer, dict(parameters_of(here=False)))


def test_the_device_of_parameters() -> None:
    there = torch.empty(1, device="meta")
    assert device_of([]) == torch.device("cpu")
    assert device_of([torch.empty(1)]) == torch.device("cpu")
    assert device_of([torch.empty(1), there]) == there.device
