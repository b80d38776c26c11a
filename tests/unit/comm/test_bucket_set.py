"""Which parameters share a bucket, by ranks that are threads; what is carried over when buckets change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farandole.comm.engine.bucket import Bucket
from farandole.comm.engine.buckets import BucketSet, ChosenCodecs
from farandole.comm.engine.parameters import ParameterTable
from farandole.core.vocabulary.codec_spec import EXACT, CodecSpec
from farandole.core.vocabulary.errors import ConfigError, Mismatch, PlanError
from farandole.core.vocabulary.spec import Plan
from tests.unit.comm.ranks_in_threads import Rank, parameters_of, play

INT8, INT4 = CodecSpec.parse("int8"), CodecSpec.parse("int4")


def set_of(rank: Rank, named: dict[str, nn.Parameter], plan: Plan | None = None, **options: Any) -> BucketSet:
    return BucketSet(rank.world, list(named.items()), plan or Plan(route="flat"), **options)


def members(buckets: BucketSet) -> list[list[int]]:
    return [bucket.members for bucket in buckets.buckets]


# -- agreement -------------------------------------------------------------------------------------


def test_buckets_follow_rank_0s_order_of_readiness_and_then_the_end_of_the_model() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(**dict.fromkeys("abcdef", (100,)))
        buckets = set_of(rank, named, Plan(first_bucket_bytes=400, bucket_bytes=800))
        assert (buckets.buckets, buckets.bucket_of, buckets.unassigned) == ([], [None] * 6, [0, 1, 2, 3, 4, 5])
        named["e"].requires_grad_(False)
        arrivals = [[3, 0, 4], [5, 1], [1, 2]][rank.number]
        new = buckets.assign_new_parameters(arrivals, rank.route)
        assert buckets.unassigned == [4]
        assert all(
            bucket is not None and index in bucket.members
            for index, bucket in enumerate(buckets.bucket_of)
            if index != 4
        )
        assert buckets.assign_new_parameters([], rank.route) == []
        named["e"].requires_grad_(True)
        before = buckets.buckets
        assert buckets.assign_new_parameters([], rank.route) == [4]
        assert buckets.buckets is not before, "another list whenever they change"
        return new, members(buckets), buckets.unassigned

    assert play(3, body) == [([0, 1, 2, 3, 5], [[3], [0, 5], [2, 1], [4]], [])] * 3


def test_only_the_very_first_bucket_is_small() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(**dict.fromkeys("abcdef", (100,)))
        for name in "abcd":
            named[name].requires_grad_(False)
        buckets = set_of(rank, named, Plan(first_bucket_bytes=400, bucket_bytes=1600))
        buckets.assign_new_parameters([], rank.route)
        for name in "abcd":
            named[name].requires_grad_(True)
        buckets.assign_new_parameters([], rank.route)
        return members(buckets)

    assert play(1, body) == [[[5], [4], [3, 2, 1, 0]]]


def test_a_gradient_that_is_sparse_on_any_rank_has_a_bucket_of_its_own() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(4, 2), b=(4, 2), c=(4, 2))
        if rank.number == 2:
            named["b"].grad = torch.ones(4, 2).to_sparse(1)
            named["a"].grad = torch.ones(4, 2)
        buckets = set_of(rank, named)
        buckets.assign_new_parameters([0, 1, 2], rank.route)
        found = [(bucket.members, bucket.is_sparse) for bucket in buckets.buckets]
        buckets.rebuild_buckets({}, 8, rank.route)
        return found, [(bucket.members, bucket.is_sparse) for bucket in buckets.buckets]

    alone = [([0], False), ([1], True), ([2], False)]
    together, apart = play(3, body)[0]
    assert apart == alone
    assert sorted(together) in ([([0], False), ([1], True), ([2], False)], [([0, 2], False), ([1], True)])
    assert ([1], True) in together


def test_parameters_that_were_trainable_in_the_constructor_may_be_asked_for() -> None:
    def body(rank: Rank) -> Any:
        found = []
        for include in (False, True):
            named = parameters_of(a=(3,), b=(3,), c=(3,))
            named["c"].requires_grad_(False)
            buckets = set_of(rank, named, include_frozen=include)
            named["b"].requires_grad_(False)
            found.append(buckets.assign_new_parameters([], rank.route))
        return found

    assert play(2, body) == [[[0], [0, 1]]] * 2


# -- during a pass ---------------------------------------------------------------------------------


def test_frozen_members_are_not_counted_until_they_train_again() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,), b=(3,), c=(3,))
        buckets = set_of(rank, named, Plan(first_bucket_bytes=1, bucket_bytes=1000))
        buckets.assign_new_parameters([0, 1, 2], rank.route)
        first, rest = buckets.buckets
        assert (first.members, rest.members) == ([0], [1, 2])
        for each in "ab":
            named[each].requires_grad_(False)
        first.pending, rest.pending = 1, 1
        buckets.exclude_frozen(1)
        assert buckets.frozen == [1], "the first bucket has left"
        buckets.exclude_frozen(0)
        buckets.exclude_frozen(0)
        assert sorted(buckets.frozen) == [0, 1], "each once"
        first.pending = rest.pending = 0
        named["c"].requires_grad_(False)
        buckets.exclude_frozen(0)
        assert sorted(buckets.frozen) == [0, 1], "a bucket that is complete has nobody to wait for"
        first.pending, rest.pending = 1, 2
        named["b"].requires_grad_(True)
        buckets.expect_unfrozen()
        assert (buckets.frozen, first.pending, rest.pending) == ([0], 0, 2)

    play(1, body)


def test_whether_a_gradient_was_written_since_a_step() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,), b=(3,))
        buckets = set_of(rank, named)
        assert not buckets.was_written(1)
        named["b"].grad = torch.ones(3)
        assert buckets.was_written(1), "it has no bucket yet"
        buckets.assign_new_parameters([], rank.route)
        (bucket,) = buckets.buckets
        bucket.load(1.0)
        bucket.gradients.note_used()
        assert not buckets.was_written(1)
        assert not buckets.was_written(0), "it has none"
        named["b"].grad.add_(1.0)
        assert buckets.was_written(1)

    play(1, body)


def test_what_cannot_be_loaded_is_explained() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,), b=(3,))
        buckets = set_of(rank, named)
        buckets.assign_new_parameters([], rank.route)
        (bucket,) = buckets.buckets
        problem = RuntimeError("no room\nand more")
        assert str(buckets.explain_load(bucket, problem)) == "rank 0, loading of bucket 0: no room"
        named["a"].grad, named["b"].grad = torch.ones(3), torch.ones(3).to_sparse()
        assert "'b' is sparse, in the first step it was dense" in str(buckets.explain_load(bucket, problem))

    play(1, body)


# -- codecs that change ----------------------------------------------------------------------------


def trained(rank: Rank, codec: str = "int8") -> tuple[BucketSet, dict[str, nn.Parameter]]:
    """Return the buckets of two matrices and a vector, with one and two as residuals of the matrices."""
    named = parameters_of(v=(3,), m=(64, 64), n=(64, 64))
    buckets = set_of(rank, named, Plan(route="flat", codec=codec, first_bucket_bytes=1, bucket_bytes=17_000))
    buckets.assign_new_parameters([2, 1, 0], rank.route)
    assert members(buckets) == [[2], [1], [0]]
    for number, bucket in enumerate(buckets.buckets[:2], 1):
        residual_of(bucket).fill_(number)
    return buckets, named


def residual_of(bucket: Bucket | None) -> torch.Tensor:
    assert bucket is not None
    assert bucket.coded is not None
    found = bucket.coded.states.residual(0)
    assert found is not None
    return found


def test_only_buckets_that_are_concerned_are_built_anew_and_nothing_unsent_is_lost() -> None:
    def body(rank: Rank) -> None:
        buckets, _ = trained(rank)
        n, m, v = buckets.buckets
        changed = buckets.changes({"m": INT4, "n": INT8})
        assert changed == {"m": INT4}, "the other has it already"
        buckets.rebuild_buckets(changed, None, rank.route)
        assert [each is old for each, old in zip(buckets.buckets, (n, m, v), strict=True)] == [True, False, True]
        assert buckets.bucket_of[1] is buckets.buckets[1]
        assert [bucket.spec for bucket in buckets.buckets] == [INT8, INT4, EXACT]
        assert sorted(buckets.carry_over.unsent) == [1]
        assert bool((buckets.carry_over.unsent[1] == 2.0).all())
        buckets.rescale_kept(3.0)
        assert bool((residual_of(n) == 3.0).all())
        assert bool((buckets.carry_over.unsent[1] == 6.0).all())
        buckets.rescale_kept(1.0)
        buckets.rebuild_buckets(buckets.changes({"m": EXACT, "n": EXACT}), 1 << 20, rank.route)
        assert members(buckets) == [[2], [1, 0]]
        assert sorted(buckets.carry_over.unsent) == [1, 2]
        assert not buckets.codecs.by_name["v"].is_applied

    play(2, body)


def test_a_switch_that_cannot_be_is_refused_on_all_ranks() -> None:
    def body(rank: Rank) -> None:
        buckets, _ = trained(rank)
        with pytest.raises(Mismatch, match=r"codec of 'm' is \"int4\" on ranks 0 and 1, \"int8\" on rank 2"):
            buckets.changes({"m": INT8 if rank.number == 2 else INT4})
        with pytest.raises(
            Mismatch, match=r"parameters to switch is \[\"m\"\] on ranks 0 and 1, \[\"n\"\] on rank 2"
        ):
            buckets.changes({"n" if rank.number == 2 else "m": INT4})
        with pytest.raises(ConfigError, match="switching codecs: the model has no parameter 'x'"):
            buckets.changes({"x": INT4})
        with pytest.raises(PlanError, match="parameter 'v' has shape"):
            buckets.changes({"v": INT4})
        assert buckets.changes({}) == {}

    play(3, body)


def test_a_dropped_step_is_rolled_back_in_the_buckets_that_are_named() -> None:
    def body(rank: Rank) -> None:
        buckets, named = trained(rank)
        n, m, v = buckets.buckets
        for index in range(3):
            buckets.carry_over.add_extra_gradient(index, (torch.ones(1), 1.0))
        for each in named.values():
            each.grad = torch.ones_like(each)
        for bucket in (n, m, v):
            bucket.load(1.0)
        buckets.settle_carry_over()
        for bucket in (n, m):
            assert bucket.coded is not None
            bucket.coded.states.current[0] = bucket.coded.codec.init(torch.zeros(8192), bucket.coded.group.seat)
        buckets.roll_back([m, v])
        assert [buckets.carry_over.has_pending(index) for index in range(3)] == [True, True, False]
        assert bool((residual_of(m) == 2.0).all())
        assert not bool(residual_of(n).any())

    play(2, body)


def test_only_members_that_have_their_mean_have_had_what_was_pending() -> None:
    def body(rank: Rank) -> None:
        buckets, named = trained(rank)
        for index in range(3):
            buckets.carry_over.add_extra_gradient(index, (torch.ones(1), 1.0))
        named["m"].grad = torch.ones(64, 64)
        buckets.settle_carry_over()
        assert [buckets.carry_over.has_pending(index) for index in range(3)] == [True, False, True]

    play(1, body)


def test_state_waits_for_its_bucket_and_is_saved_meanwhile() -> None:
    def body(rank: Rank) -> None:
        entries = trained(rank)[0].state()
        assert sorted(entries) == ["m", "n"]
        named = parameters_of(v=(3,), m=(64, 64), n=(64, 64))
        named["m"].requires_grad_(False)
        late = set_of(rank, named, Plan(route="flat", codec="int8", first_bucket_bytes=1, bucket_bytes=17_000))
        late.load_state(entries)
        assert sorted(late.state()) == ["m", "n"]
        late.assign_new_parameters([2], rank.route)
        assert bool((residual_of(late.bucket_of[2])[:4096] == 1.0).all())
        assert sorted(late.state()) == ["m", "n"]
        named["m"].requires_grad_(True)
        late.assign_new_parameters([], rank.route)
        assert bool((residual_of(late.bucket_of[1])[:4096] == 2.0).all())
        assert late._loaded == {}
        assert sorted(entries) == ["m", "n"], "they are the caller's"
        late.load_state({"n": entries["n"]})
        assert bool((residual_of(late.bucket_of[2])[:4096] == 1.0).all())
        assert not bool(residual_of(late.bucket_of[1]).any()), "it begins anew"
        with pytest.raises(ConfigError, match="the model has no parameter 'x'"):
            late.load_state({"x": entries["n"]})

    play(2, body)


# -- which codec a parameter has -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "requested", "needs_messages"),
    [
        (Plan(), [], False),
        (Plan(codec="auto"), ["auto"], True),
        (Plan(codec="int8"), ["int8"], True),
        (Plan(codec="int8", codec_for={"n": "int4"}), ["int8", "int4"], True),
        (Plan(codec="auto", codec_for={"n": "int4"}), ["auto"], True),
        (Plan(codec="none", codec_for={"n": "none"}), [], False),
    ],
)
def test_codecs_that_are_asked_for(plan: Plan, requested: list[str], needs_messages: bool) -> None:
    table = ParameterTable(list(parameters_of(v=(3,), m=(64, 64), n=(64, 64)).items()))
    codecs = ChosenCodecs(table, plan)
    assert (codecs.requested, codecs.needs_messages) == (requested, needs_messages)
    assert codecs.why_useless == ""
    codecs.update({"m": CodecSpec.parse("bf16")})
    assert codecs.instance(CodecSpec.parse("bf16")) is codecs.instance(codecs.by_name["m"]) is not None
    assert codecs.needs_messages


def test_what_carries_gradients_without_a_codec() -> None:
    def body(rank: Rank) -> None:
        codecs = set_of(rank, parameters_of(a=(3,))).codecs
        assert codecs.instance(EXACT) is None
        codecs.set_default_codec(rank.route, always=False)
        assert codecs.instance(EXACT) is None, "the backend does"
        codecs.set_default_codec(rank.route, always=True)
        found = codecs.instance(EXACT)
        assert found is not None
        assert found.spec.is_exact

    play(1, body)


def test_a_codec_of_which_nothing_comes_is_said() -> None:
    table = ParameterTable(list(parameters_of(v=(3,)).items()))
    assert "codec = 'int8' changes nothing here" in ChosenCodecs(table, Plan(codec="int8")).why_useless
