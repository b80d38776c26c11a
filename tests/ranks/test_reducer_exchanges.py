"""What one exchange of a reducer agrees on, records, refuses and leaves behind, by values known by hand."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.codecs.registry import make_codec
from farandole.comm.engine.guards import refuse_messages
from farandole.comm.engine.parameters import ReducerOptions
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.messages import GroupRank, as_encoding, simulate
from farandole.comm.world.world import escape
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import PeerLost, PlanError, Stalled
from farandole.core.vocabulary.events import BACKWARD, BucketLayout, Event, Exchange, Phase
from tests.ranks.pool import ranks
from tests.ranks.test_reducer import Watch, backward, clear, grads, make, members

MATRIX = (100, 41)
"""More than the elements that a codec is for, and no whole number of blocks."""


class Everything:
    """Keeps all events of a world."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def record(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kinds)]


def comm_threads() -> int:
    return sum("conductor" in thread.name for thread in threading.enumerate())


def written(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """Let a backward pass bring these gradients."""
    clear(list(parameters))
    total = torch.zeros(())
    for parameter, value in zip(parameters, values, strict=True):
        total = total + (parameter * value).sum()
    total.backward()


# -- order and time --------------------------------------------------------------------------------


@ranks(2)
def test_buckets_are_built_in_the_order_in_which_rank_0_was_ready() -> None:
    """Another rank may compute in another order, and must launch in that one all the same."""
    reducer, parameters = make([(3,)] * 5, fd.Plan(route="flat", first_bucket_bytes=1, bucket_bytes=1))
    order = [2, 0, 4, 1, 3] if fd.world().rank == 0 else [0, 1, 2, 3, 4]
    value = torch.zeros(())
    for index in order:  # a chain, whose last link is ready first
        value = _link(value, parameters[index], index + 1.0)
    value.backward()
    assert members(reducer) == list("dbeac"), "from the end of rank 0's chain to its begin"
    assert grads(parameters) == [1.0, 2.0, 3.0, 4.0, 5.0]


class _Link(torch.autograd.Function):
    """Adds the sum of a parameter, whose gradient is ready before that of what came before."""

    @staticmethod
    def forward(context: Any, before: torch.Tensor, parameter: torch.Tensor, scale: float) -> torch.Tensor:
        context.scale, context.shape = scale, parameter.shape
        return before + scale * parameter.sum()

    @staticmethod
    def backward(context: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], grads[0] * torch.full(context.shape, context.scale), None


def _link(before: torch.Tensor, parameter: nn.Parameter, scale: float) -> torch.Tensor:
    found: torch.Tensor = _Link.apply(before, parameter, scale)
    return found


@ranks(2)
def test_every_bucket_leaves_when_its_last_gradient_is_there() -> None:
    reducer, parameters = make([(100,)] * 4, fd.Plan(route="flat", first_bucket_bytes=400, bucket_bytes=800))
    watch = Watch()
    reducer.watch(watch)
    parameters[0].register_post_accumulate_grad_hook(lambda _: time.sleep(0.3))
    for _ in range(2):
        clear(parameters)
        backward(parameters, 1.0, 2.0, 3.0, 4.0)
    exchange = watch.seen[-1]
    assert [len(names) for names in reducer.names_by_bucket] == [1, 2, 1]
    for one, following in zip(exchange.buckets, exchange.buckets[1:], strict=False):
        assert one.last_ready_seconds is not None
        assert following.first_ready_seconds is not None
        assert one.last_ready_seconds <= one.launch_seconds <= following.first_ready_seconds
    assert exchange.buckets[0].end_seconds < exchange.wait_begin_seconds, (
        "its end is its own, not that of the wait"
    )
    assert exchange.buckets[-1].launch_seconds <= exchange.wait_begin_seconds <= exchange.wait_end_seconds


@ranks(2)
def test_what_is_recorded_of_two_steps() -> None:
    world = fd.init()
    reducer, parameters = make([(5,)] * 3, fd.Plan(route="flat", first_bucket_bytes=20, bucket_bytes=1000))
    events = Everything()
    world.session.recorder = events
    for _ in range(2):
        clear(parameters)
        began = time.monotonic()
        reducer.forward_begins()
        reducer.backward_begins()
        ready = time.monotonic()
        time.sleep(0.01)  # the first gradient comes later than the loss's
        backward(parameters, 1.0, 1.0, 1.0)
        (phase,) = events.of(Phase)[-1:]
        assert isinstance(phase, Phase)
        assert phase.name == BACKWARD
        assert began <= phase.begin_seconds < ready, "the pass began with the loss's gradient"
    assert len(events.of(Phase)) == len(events.of(Exchange)) == 2
    (layout,) = events.of(BucketLayout)
    assert isinstance(layout, BucketLayout)
    assert [bucket.parameters for bucket in layout.buckets] == [("c",), ("b", "a")]
    assert len(events.seen) == 5, "a layout that did not change is recorded once"
    for bucket_bytes, layouts in ((None, 1), (1, 2)):
        reducer.switch_codecs({}, bucket_bytes=bucket_bytes)
        clear(parameters)
        backward(parameters, 1.0, 1.0, 1.0)
        assert len(events.of(BucketLayout)) == layouts, "the same buckets in another list are the same"


# -- codecs ----------------------------------------------------------------------------------------


@pytest.mark.gate_cases("randomk:0.2")
@pytest.mark.parametrize("codec", ["sign", "int8", "topk:0.05", "randomk:0.2"])
@ranks(2)
def test_the_mean_of_an_odd_matrix_has_the_bits_of_the_simulator(codec: str) -> None:
    """What fills a bucket up to whole blocks is zeros in every step, whatever a codec made of it before."""
    size, rank, count = 2, fd.init().rank, torch.Size(MATRIX).numel()
    _, parameters = make([MATRIX], fd.Plan(codec=codec, route="flat"))
    instance = make_codec(CodecSpec.parse(codec))
    groups = [GroupRank(each, size) for each in range(size)]
    padded = -(-count // 2048) * 2048
    states = [instance.init(torch.zeros(padded), group) for group in groups]
    generator = torch.Generator().manual_seed(1)
    for turn in range(4):
        given = [torch.randn(MATRIX, generator=generator) for _ in groups]
        units = [torch.cat([each.flatten(), torch.zeros(padded - count)]) for each in given]
        states = simulate(
            [as_encoding(instance.exchange(units[g.rank], states[g.rank], g), units[g.rank]) for g in groups]
        ).states
        written(parameters, [given[rank]])
        assert parameters[0].grad is not None
        assert torch.equal(parameters[0].grad, units[0][:count].view(MATRIX)), turn


@ranks(2)
def test_the_residual_of_a_parameter_without_a_gradient_waits_for_its_next() -> None:
    """By turns used on both ranks, on one, on none: what is missing of the sum is never more than one rounding."""
    rank = fd.init().rank
    _, parameters = make([MATRIX, MATRIX], fd.Plan(codec="topk:0.3", route="flat"))
    generator = torch.Generator().manual_seed(2)
    sums, wanted = torch.zeros(MATRIX), torch.zeros(MATRIX)
    for turn in range(9):
        given = [torch.randn(MATRIX, generator=generator) for _ in range(2)]
        uses = [turn % 3 < 2, turn % 3 < 1]
        clear(parameters)
        total = (parameters[1] * given[rank]).sum()
        if uses[rank]:
            total = total + (parameters[0] * given[rank]).sum()
        total.backward()
        wanted += sum(each / 2 for each, used in zip(given, uses, strict=True) if used)
        if parameters[0].grad is not None:
            sums += parameters[0].grad
    for _ in range(60):
        written(parameters, [torch.zeros(MATRIX), torch.zeros(MATRIX)])
        assert parameters[0].grad is not None
        sums += parameters[0].grad
    assert torch.allclose(sums, wanted, atol=1e-4), "all that was asked for has arrived"


@ranks(2)
def test_only_the_step_with_nan_is_skipped() -> None:
    reducer, parameters = make([MATRIX], fd.Plan(codec="int8", route="flat", nonfinite="skip"))
    for value in (1.0, float("nan"), 1.0, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written(parameters, [torch.full(MATRIX, value)])
        assert reducer.step_is_skipped == math.isnan(value)
        assert (parameters[0].grad is None) == math.isnan(value)


@ranks(2)
def test_switching_to_no_codec_connects_nothing() -> None:
    reducer, parameters = make([MATRIX, (3,)])
    backward(parameters, 1.0, 1.0)
    before = comm_threads()
    reducer.switch_codecs({"a": CodecSpec.parse("none")})
    assert comm_threads() == before
    reducer.switch_codecs({"a": CodecSpec.parse("int8")})
    assert comm_threads() == before + 1
    clear(parameters)
    backward(parameters, 1.0, 2.0)
    assert reducer.has_codecs
    reducer.remove()
    assert comm_threads() == before, "its thread ends with it"


@ranks(2)
def test_codec_auto_ends_with_its_reducer() -> None:
    before = comm_threads()
    reducer, parameters = make([MATRIX, MATRIX], fd.Plan(codec="auto", route="flat", lossy=True))
    assert reducer.tuner is not None
    for _ in range(3):
        clear(parameters)
        reducer.forward_begins()
        backward(parameters, 1.0, 2.0)
        assert grads(parameters) == pytest.approx([1.0, 2.0], rel=0.1)
    reducer.remove()
    assert comm_threads() == before
    clear(parameters)
    backward(parameters, 1.0 + fd.world().rank, 2.0)
    assert grads(parameters) == [1.0 + fd.world().rank, 2.0]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.full("further")
@ranks(2)
def test_by_default_frozen_parameters_stay_away_and_the_ranks_connect_at_once() -> None:
    """A reducer with a frozen parameter, which has no hook, is removed like any other."""
    rank = fd.init().rank
    asked: list[str] = []
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    named = list(zip("ab", parameters, strict=True))
    parameters[1].requires_grad_(False)
    options = ReducerOptions(before_connecting=lambda: asked.append("now"))
    reducer = GradientReducer(fd.world(), named, fd.Plan(route="flat"), options)
    assert (asked, reducer.route) == (["now"], "flat")
    parameters[0].sum().backward()
    assert members(reducer) == ["a"]
    reducer.remove()
    clear(parameters)
    (parameters[0].sum() * (rank + 1.0)).backward()
    assert grads(parameters[:1]) == [rank + 1.0]
    late = GradientReducer(
        fd.world(),
        named,
        fd.Plan(route="flat"),
        ReducerOptions(lazy_init=True, before_connecting=options.before_connecting),
    )
    assert (asked, late.route) == (["now"], "none")
    clear(parameters)
    (parameters[0].sum() * (rank + 1.0)).backward()
    assert (asked, grads(parameters[:1])) == (["now", "now"], [1.5])


@ranks(2)
def test_what_an_accelerator_cannot_have_is_named_on_all_ranks() -> None:
    world = fd.init()
    here, there = torch.zeros(3), torch.zeros(3, device="meta")
    named = [("a", here), ("b", there if world.rank else here)]
    for plan, codecs, text in ((fd.Plan(codec="int8"), ["int8"], "codec 'int8'"),):
        with pytest.raises(PlanError, match=f"{text}: parameter 'b' of rank 1 is on meta"):
            refuse_messages(world, named, plan, codecs=codecs)
        refuse_messages(world, [("a", here)], plan, codecs=codecs)
    refuse_messages(world, named, fd.Plan(), codecs=[])


@ranks(1)
def test_a_world_of_one_sends_nothing_and_refuses_nothing() -> None:
    refuse_messages(fd.init(), [("a", torch.zeros(3, device="meta"))], fd.Plan(codec="int8"), codecs=["int8"])


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.full("further")
@ranks(2)
def test_a_rank_that_does_not_come_is_an_error_of_its_bucket() -> None:
    world = fd.init()
    _, parameters = make([(3,), (4,)], fd.Plan(route="flat", timeout_seconds=1.0, bucket_bytes=1))
    backward(parameters, 1.0, 1.0)
    if world.rank:
        time.sleep(2.0)  # in other work
        return
    begin = time.monotonic()
    with pytest.raises(Stalled, match="rank 0, all-reduce of bucket 0: no answer within 1 s"):
        backward(parameters, 1.0, 1.0)
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks(2)
def test_a_generation_that_has_ended_is_said_at_once(codec: str) -> None:
    fd.init()
    _, parameters = make([MATRIX], fd.Plan(route="flat", codec=codec))
    backward(parameters, 1.0)
    escape()
    with pytest.raises(PeerLost, match="all-reduce of bucket 0: this generation of ranks has ended"):
        backward(parameters, 1.0)


@ranks(2)
def test_a_sparse_bucket_may_be_the_first_to_leave() -> None:
    """It has no room to say how many steps were made; the next bucket does."""
    rank = fd.init().rank
    table, weight = nn.Embedding(6, 3, sparse=True), nn.Parameter(torch.ones(4))
    rows = cast("nn.Parameter", table.weight)
    named = [("w", weight), ("table", rows)]
    reducer = GradientReducer(fd.world(), named, fd.Plan(route="flat"))
    for turn in range(2):
        clear([weight, rows])
        loss = _link((weight * (rank + 1.0)).sum(), nn.Parameter(torch.zeros(1)), 1.0)
        (loss + table(torch.tensor([rank, 5])).sum()).backward()
        assert grads([weight]) == [1.5], turn
        found = rows.grad
        assert found is not None
        assert found.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
        reducer.note_step()
    assert sorted(members(reducer)) == ["table", "w"]
