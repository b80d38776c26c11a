"""The reducer alone, on two ranks: what passes, exchanges and options do, by values known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.parameters import ReducerOptions
from farandole.comm.engine.reducer import GradientReducer
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import CommError, ConfigError, Mismatch
from farandole.core.vocabulary.events import Event, Exchange
from tests.ranks.pool import ranks


def make(
    shapes: list[tuple[int, ...]], plan: fd.Plan | None = None, **options: Any
) -> tuple[GradientReducer, list[nn.Parameter]]:
    """Return a reducer over parameters a, b, c... of ones."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    named = [(chr(ord("a") + i), parameter) for i, parameter in enumerate(parameters)]
    plan = plan or fd.Plan(route="flat")
    return GradientReducer(fd.init(), named, plan, ReducerOptions(**options)), parameters


def backward(parameters: list[nn.Parameter], *scales: float) -> None:
    """Give each parameter a gradient of its scale, the last parameter's first; 0: none."""
    total = torch.zeros(())
    for parameter, scale in zip(parameters, scales, strict=True):
        if scale:
            total = total + scale * parameter.sum()
    total.backward()


def grads(parameters: list[nn.Parameter]) -> list[float | None]:
    """Return each gradient, which has one value everywhere."""
    found: list[float | None] = []
    for parameter in parameters:
        if parameter.grad is not None:
            assert parameter.grad.min() == parameter.grad.max()
        found.append(None if parameter.grad is None else float(parameter.grad.flatten()[0]))
    return found


def members(reducer: GradientReducer) -> list[str]:
    return [name for names in reducer.names_by_bucket for name in names]


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


class Watch:
    """Keeps the exchanges."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []

    def record(self, event: Event) -> None:
        assert isinstance(event, Exchange)
        self.seen.append(event)


@pytest.mark.full("further")
@ranks(2)
def test_buckets_are_of_the_sizes_asked_for_and_leave_while_the_pass_runs() -> None:
    plan = fd.Plan(route="flat", first_bucket_bytes=2000, bucket_bytes=9000)
    reducer, parameters = make([(400,)] * 12, plan)
    watch = Watch()
    reducer.watch(watch)
    assert (reducer.bucket_bytes, reducer.names_by_bucket) == ([], [])
    assert reducer.route == "flat"
    for step in range(3):
        clear(parameters)
        backward(parameters, *[float(number + 1) * (1 + fd.world().rank) for number in range(12)])
        assert grads(parameters) == [1.5 * (number + 1) for number in range(12)]
        assert (reducer.exchanges_done, reducer.passes_held) == (step + 1, 0)
    sizes = [len(names) for names in reducer.names_by_bucket]
    assert sizes == [1, 5, 5, 1], "one of 1,600 bytes fits into the first, five into the others"
    assert sorted(members(reducer)) == sorted("abcdefghijkl")
    assert all(
        0 <= nbytes - 1600 * size <= 64 * size + 64
        for nbytes, size in zip(reducer.bucket_bytes, sizes, strict=True)
    )
    assert len(watch.seen) == 3
    for exchange in watch.seen[1:]:
        first, *_, last = exchange.buckets
        assert last.first_ready_seconds is not None
        assert first.launch_seconds < last.first_ready_seconds, "as soon as it is complete"
        assert exchange.launch_seconds == tuple(bucket.launch_seconds for bucket in exchange.buckets)
        assert exchange.sent_bytes == sum(bucket.sent_bytes for bucket in exchange.buckets) > 0


@ranks(2)
def test_passes_are_held_until_there_are_enough_or_a_step_comes() -> None:
    reducer, parameters = make([(3,)], fd.Plan(route="flat", accumulate=3))
    mine = 1.0 + fd.world().rank
    backward(parameters, mine)
    assert (grads(parameters), reducer.passes_held, reducer.exchanges_done) == ([mine], 1, 0)
    backward(parameters, mine)
    assert (grads(parameters), reducer.passes_held) == ([2 * mine], 2)
    backward(parameters, mine)
    assert (grads(parameters), reducer.passes_held, reducer.exchanges_done) == ([4.5], 0, 1)
    reducer.flush()
    assert reducer.exchanges_done == 1, "there is nothing to flush"
    clear(parameters)
    backward(parameters, mine)
    reducer.flush()
    assert (grads(parameters), reducer.passes_held, reducer.exchanges_done) == ([1.5], 0, 2)
    clear(parameters)
    reducer.begin_step(accumulate=2)
    assert reducer.accumulate == 2
    backward(parameters, mine)
    clear(parameters)
    reducer.forward_begins()
    assert reducer.passes_held == 0, "the loop has thrown it away"
    backward(parameters, mine)
    assert reducer.passes_held == 1
    reducer.begin_step()
    assert (reducer.passes_held, reducer.accumulate) == (0, 2)


@ranks(2)
def test_a_rank_without_a_pass_takes_part_and_may_add_nothing() -> None:
    reducer, parameters = make([(3,), (2,)])
    leads = fd.world().rank == 0
    backward(parameters, 1.0, 1.0)
    for contribute, expected in ((True, 6.0), (False, 4.0)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4.0)
        if leads:
            clear(parameters)
            backward(parameters, 8.0, 8.0)
        else:
            reducer.exchange(contribute=contribute)
        assert grads(parameters) == [expected] * 2
        assert reducer.share_of_batch == 1.0
    assert reducer.exchanges_done == 3


@ranks(2)
def test_a_rank_that_contributes_nothing_may_have_made_other_steps() -> None:
    reducer, parameters = make([(3,)])
    backward(parameters, 1.0)
    if fd.world().rank:
        reducer.note_step()
        reducer.exchange(contribute=False)
    else:
        clear(parameters)
        backward(parameters, 3.0)
    assert grads(parameters) == [1.5]
    clear(parameters)
    with pytest.raises(Mismatch, match=r"in exchange 3: .* before it are 0 on rank 0, 1 on rank 1"):
        backward(parameters, 1.0)


@ranks(2)
def test_gradients_written_by_hand_are_exchanged_at_the_step_and_those_that_are_not_stay() -> None:
    reducer, parameters = make([(3,), (2,), (4,)])
    backward(parameters, 1.0, 1.0, 1.0)
    reducer.note_used()
    reducer.exchange_written(parameters)
    assert reducer.exchanges_done == 1, "a step has used them"
    parameters[1].grad = torch.full((2,), 2.0 * (1 + fd.world().rank))
    reducer.exchange_written(parameters[:1])
    assert reducer.exchanges_done == 1, "it is not that optimizer's"
    reducer.exchange_written([torch.zeros(1), *parameters])
    assert (grads(parameters), reducer.exchanges_done) == ([1.0, 3.0, 1.0], 2)


@ranks(2)
def test_an_extra_gradient_is_added_once_to_the_mean() -> None:
    reducer, parameters = make([(3,), (2,)])
    backward(parameters, 1.0, 1.0)
    for name in "ab":
        reducer.add_extra_gradient(name, (torch.full((3 if name == "a" else 2,), 10.0), 0.5))
    clear(parameters)
    backward(parameters, 1.0 + fd.world().rank, 0.0)
    assert grads(parameters) == [6.5, None]
    assert (reducer.has_pending("a"), reducer.has_pending("b")) == (False, True), "b had no gradient"
    clear(parameters)
    reducer.add_extra_gradient("b", None)
    assert not reducer.has_pending("b")
    backward(parameters, 1.0, 1.0)
    assert grads(parameters) == [1.0, 1.0]


@ranks(2)
def test_gradients_can_become_the_sum() -> None:
    _, parameters = make([(3,)], reduce_op="sum")
    backward(parameters, 1.0 + fd.world().rank)
    assert grads(parameters) == [3.0]


@ranks(2)
def test_ranks_can_be_connected_late() -> None:
    said: list[str] = []
    reducer, parameters = make([(3,)], lazy_init=True, before_connecting=lambda: said.append("now"))
    assert (reducer.route, said) == ("none", [])
    assert reducer.is_open
    backward(parameters, 1.0 + fd.world().rank)
    assert (reducer.route, said, grads(parameters)) == ("flat", ["now"], [1.5])


@pytest.mark.parametrize("include", [False, True])
@ranks(2)
def test_parameters_that_were_frozen_before_the_first_pass(include: bool) -> None:
    reducer, parameters = make([(3,), (2,)], include_frozen=include)
    parameters[1].requires_grad_(False)
    backward(parameters, 1.0, 0.0)
    assert members(reducer) == (["a", "b"] if include else ["a"])
    parameters[1].requires_grad_(True)
    clear(parameters)
    backward(parameters, 1.0, 1.0 + fd.world().rank)
    assert grads(parameters) == [1.0, 1.5]
    assert sorted(members(reducer)) == ["a", "b"]
    parameters[0].requires_grad_(False)
    clear(parameters)
    backward(parameters, 0.0, 1.0 + fd.world().rank)
    assert grads(parameters) == [None, 1.5]
    parameters[0].requires_grad_(True)
    clear(parameters)
    backward(parameters, 1.0 + fd.world().rank, 1.0)
    assert grads(parameters) == [1.5, 1.0]


@ranks(2)
def test_a_second_gradient_between_two_steps_is_what_the_front_end_makes_of_it() -> None:
    reducer, parameters = make([(3,), (2,)], on_second_gradient=KeyError)
    backward(parameters, 1.0, 0.0)
    backward(parameters, 0.0, 1.0)
    with pytest.raises(KeyError, match="b"):
        backward(parameters, 0.0, 1.0)
    reducer.begin_step()
    backward(parameters, 1.0, 1.0)


class Extra:
    """A number that travels along."""

    def __init__(self, is_needed: bool) -> None:
        self.is_needed, self.done = is_needed, list[str]()
        self.tensor = torch.zeros(1)

    def prepare(self) -> bool:
        self.done.append("prepare")
        return self.is_needed

    def pack(self, weight: float) -> torch.Tensor:
        self.done.append("pack")
        self.tensor = torch.tensor([weight * (4.0 + 4 * fd.world().rank)])
        return self.tensor

    def unpack(self) -> None:
        self.done.append(f"unpack {float(self.tensor[0])}")


@ranks(2)
def test_what_travels_along_is_agreed_on_once_and_summed_in_every_exchange() -> None:
    reducer, parameters = make([(3,)])
    extras = [Extra(True), Extra(False)]
    for extra in extras:
        reducer.add_extra_tensors(extra)
    for _ in range(2):
        backward(parameters, 1.0)
    assert extras[0].done == ["prepare", "pack", "unpack 6.0", "pack", "unpack 6.0"]
    assert extras[1].done == ["prepare"]


@ranks(2)
def test_a_reducer_that_is_removed_leaves_gradients_local() -> None:
    reducer, parameters = make([(3,)])
    backward(parameters, 1.0)
    reducer.remove()
    assert not reducer.is_open
    clear(parameters)
    mine = 1.0 + fd.world().rank
    backward(parameters, mine)
    assert (grads(parameters), reducer.exchanges_done) == ([mine], 1)


@ranks(2)
def test_a_gradient_that_changes_its_kind_is_named() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    reducer = GradientReducer(fd.init(), list(embedding.named_parameters()), fd.Plan(route="flat"))
    embedding(torch.tensor([1, 2])).sum().backward()
    assert reducer.mean_is_finite
    embedding.weight.grad = None
    with pytest.raises(
        CommError, match=r"gradient of 'weight' is dense, in the first step it was sparse"
    ) as caught:
        (embedding.weight * 2).sum().backward()
    assert caught.value.bucket == 0


@ranks(2)
def test_codecs_are_switched_between_steps_by_the_names_of_parameters() -> None:
    reducer, parameters = make([(64, 64), (3,)])
    backward(parameters, 1.0, 1.0)
    assert [reducer.has_codecs] == [False]
    with pytest.raises(ConfigError, match="the model has no parameter 'z'"):
        reducer.switch_codecs({"z": CodecSpec.parse("int8")})
    reducer.switch_codecs({"a": CodecSpec.parse("int8")}, bucket_bytes=1 << 20)
    assert reducer.has_codecs
    clear(parameters)
    backward(parameters, 1.0 + fd.world().rank, 2.0)
    assert parameters[0].grad is not None
    torch.testing.assert_close(parameters[0].grad, torch.full((64, 64), 1.5), rtol=1e-2, atol=0)
    assert grads(parameters[1:]) == [2.0]
    assert set(reducer.exchange_state()) == {"a"}
    parameters[0].grad[0, 0] = torch.nan
    assert not reducer.mean_is_finite
