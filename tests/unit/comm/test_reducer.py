"""The reducer on ranks that are threads: which steps met, which buckets wait, what is weighed and recorded."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from farandole.comm.autotune.profile import PassTimings
from farandole.comm.device.streams import simulate_device
from farandole.comm.engine.guards import REMEDY, refuse_messages
from farandole.comm.engine.in_flight import OpenRoute
from farandole.comm.engine.parameters import device_of
from farandole.comm.engine.passes import OpenPass
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import CommError, ConfigError, Mismatch, PlanError
from farandole.core.vocabulary.events import BACKWARD, BucketFacts, BucketLayout, Exchange, Phase
from farandole.core.vocabulary.spec import Plan
from tests.unit.comm.ranks_in_threads import Rank, add_pass, backward, grads, parameters_of, play, world_of

ONE_EACH: dict[str, Any] = {"first_bucket_bytes": 1, "bucket_bytes": 1}
"""Options of a plan by which each parameter has a bucket of its own."""


# -- steps that met --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_made_another_number_of_steps_is_named_on_all(codec: str, odd: int) -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(b=(64, 64), a=(64, 64))
        reducer = rank.reducer(named, Plan(route="flat", codec=codec, **ONE_EACH))
        backward(named, b=1.0, a=1.0)
        reducer.note_step()
        if rank.number == odd:
            reducer.note_step()
        with pytest.raises(Mismatch) as caught:
            backward(named, b=1.0 + rank.number, a=1.0)
        return str(caught.value)

    said = {0: "1 on ranks 1 and 2, 2 on rank 0", 2: "1 on ranks 0 and 1, 2 on rank 2"}[odd]
    for rank, text in enumerate(play(3, body)):
        assert f"rank {rank}, all-reduce: gradients of different steps met in exchange 2" in text
        assert f"optimizer steps made before it are {said};" in text


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_ranks_that_held_other_passes_are_named_on_all(codec: str) -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(a=(64, 64))
        rank.reducer(named, Plan(route="flat", codec=codec))
        backward(named, a=1.0)
        if rank.number == 2:
            rank.world.session.holds_passes = True
            backward(named, a=1.0)
            rank.world.session.holds_passes = False
        with pytest.raises(Mismatch) as caught:
            add_pass(named, a=1.0)
        return str(caught.value)

    for text in play(3, body):
        assert "different numbers of backward passes met in exchange 2: 1 on ranks 0 and 1, 2 on rank 2;" in text
        assert "inside fd.accumulate for the same micro-batches" in text


def test_passes_that_the_plan_accumulates_may_be_fewer_on_a_rank() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named, Plan(route="flat", accumulate=2))
        backward(named, a=1.0)
        if rank.number:
            reducer.exchange()
        else:
            add_pass(named, a=2.0)
        return grads(named), reducer.exchanges_done, reducer.passes_held

    assert play(2, body) == [({"a": 2.0}, 1, 0)] * 2


def test_a_rank_without_a_pass_exchanges_as_after_one() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named)
        backward(named, a=1.0)
        if rank.number == 1:
            named["a"].grad = None
            reducer.exchange()
        else:
            backward(named, a=3.0)
        return grads(named)

    assert play(3, body) == [{"a": 2.0}] * 3


def test_a_rank_that_only_takes_part_agrees_with_any_number_of_steps() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named)
        backward(named, a=1.0)
        if rank.number == 1:
            reducer.note_step()
            reducer.exchange(contribute=False)
        else:
            backward(named, a=3.0)
        return grads(named), reducer.share_of_batch

    assert play(3, body) == [({"a": 2.0}, 1.0)] * 3


# -- which buckets wait ----------------------------------------------------------------------------


def test_buckets_leave_without_their_frozen_members_and_wait_for_them_again() -> None:
    """Seen at each gradient: how many buckets have left."""

    def body(rank: Rank) -> list[list[int]]:
        named = parameters_of(a=(3,), b=(3,), c=(3,))
        reducer = rank.reducer(named, Plan(route="flat", **ONE_EACH))
        seen: list[int] = []
        for parameter in named.values():
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(reducer.in_flight.launched))
        passes = []
        for trains in (True, True, False, False, False, True, True):
            named["b"].requires_grad_(trains)
            seen.clear()
            backward(named, **{name: 1.0 + rank.number for name in named if trains or name != "b"})
            assert grads(named) == {"a": 1.5, "b": 1.5 if trains else None, "c": 1.5}
            passes.append(list(seen))
        return passes

    waits, knows, first_again = [1, 1], [2, 3], [1, 2, 3]
    expected = [[0, 0, 0], [1, 2, 3], waits, knows, knows, first_again, first_again]
    assert play(2, body) == [expected] * 2


def test_a_parameter_that_is_unfrozen_gets_a_bucket_on_all_ranks() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,), b=(5,))
        named["b"].requires_grad_(False)
        reducer = rank.reducer(named, Plan(route="flat", first_bucket_bytes=1, bucket_bytes=1000))
        backward(named, a=1.0 + rank.number)
        before = reducer.names_by_bucket
        named["b"].requires_grad_(True)
        backward(named, a=1.0, b=1.0 + rank.number)
        assert grads(named) == {"a": 1.0, "b": 1.5}
        backward(named, a=1.0, b=2.0 + rank.number)
        assert grads(named) == {"a": 1.0, "b": 2.5}
        return before, reducer.names_by_bucket, len(rank.events.of(BucketLayout))

    assert play(2, body) == [([["a"]], [["a"], ["b"]], 2)] * 2


def test_ranks_that_unfreeze_other_parameters_are_told() -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(a=(3,), b=(3,), c=(3,))
        for name in "bc":
            named[name].requires_grad_(False)
        rank.reducer(named)
        backward(named, a=1.0)
        named["b" if rank.number == 2 else "c"].requires_grad_(True)
        with pytest.raises(Mismatch) as caught:
            backward(named, a=1.0)
        return str(caught.value)

    for text in play(3, body):
        assert 'trainable parameter 0 is "c" on ranks 0 and 1, "b" on rank 2; freeze and unfreeze' in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda named: named | {"b": nn.Parameter(torch.ones(4, 2))}, "parameter 'b' is [[2, 4], \"float32\"]"),
        (lambda named: named | {"b": nn.Parameter(torch.ones(4, 2).t())}, "strides of parameter 'b' is [4, 1]"),
        (lambda named: named | {"b": nn.Parameter(named["b"].double())}, "parameter 'b' is [[2, 4], \"float32\"]"),
        (lambda named: dict(reversed(named.items())), "name is \"parameter 'a'\" on ranks 0 and 1"),
        (lambda named: {"a": named["a"]}, "what follows 3 equal entries is \"parameter 'b'\" on ranks 0 and 1"),
    ],
    ids=["shape", "strides", "dtype", "order", "fewer"],
)  # fmt: skip
def test_ranks_whose_parameters_differ_are_told_in_the_constructor(change: Any, text: str) -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(a=(3,), b=(2, 4))
        with pytest.raises(Mismatch) as caught:
            rank.reducer(change(named) if rank.number == 2 else named)
        return str(caught.value)

    for said in play(3, body):
        assert text in said


# -- what is weighed -------------------------------------------------------------------------------


def test_passes_of_unequal_batches_are_accumulated_by_their_samples() -> None:
    """The factors of the passes, over two ranks, are 0.5 and 1.5, then 1.25 and 0.75."""

    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named, Plan(route="flat", accumulate=2))
        weight = rank.world.session.batch_weight
        given = [(4.0, 8.0), (16.0, 32.0)][rank.number]
        shares = [(0.5, 1.25), (1.5, 0.75)][rank.number]
        for scale, share in zip(given, shares, strict=True):
            weight.set(share)
            add_pass(named, a=scale)
        return grads(named), reducer.share_of_batch

    mean = (0.5 * 4 + 1.25 * 8 + 1.5 * 16 + 0.75 * 32) / 2
    assert play(2, body) == [({"a": mean}, 1.25), ({"a": mean}, 0.75)]


def test_a_placeholder_adds_nothing_and_leaves_what_is_held() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,))
        rank.reducer(named, Plan(route="flat", accumulate=2))
        for scale, share in ((4.0, 1.0), (64.0, 0.0) if rank.number else (8.0, 2.0)):
            rank.world.session.batch_weight.set(share)
            add_pass(named, a=scale)
        return grads(named)

    assert play(2, body) == [{"a": (4.0 + 2 * 8.0 + 4.0) / 2}] * 2


def test_what_travels_along_is_weighed_by_the_share_of_the_batch() -> None:
    class Extra:
        def __init__(self) -> None:
            self.weights: list[float] = []

        def prepare(self) -> bool:
            return True

        def pack(self, weight: float) -> torch.Tensor:
            self.weights.append(weight)
            return torch.tensor([weight])

        def unpack(self) -> None:
            pass

    def body(rank: Rank) -> list[float]:
        named, extra = parameters_of(a=(3,)), Extra()
        rank.reducer(named).add_extra_tensors(extra)
        rank.world.session.batch_weight.set(0.5 if rank.number else 1.5)
        for _ in range(3):
            backward(named, a=1.0)
        return extra.weights

    assert play(2, body) == [[0.75] * 3, [0.25] * 3]


def test_a_count_is_for_one_step() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named)
        weight = rank.world.session.batch_weight
        for _ in range(2):
            weight.set_by_count(0.5 if rank.number else 1.5)
            for _ in range(2):
                backward(named, a=2.0 * rank.number)
                assert grads(named) == {"a": 0.5}
            reducer.note_step()
        with pytest.raises(ConfigError, match=r"fd.weight was called for an earlier step and not for this one"):
            backward(named, a=1.0)

    play(2, body)


# -- what is recorded ------------------------------------------------------------------------------


def test_the_layout_says_what_is_in_each_bucket_and_how_it_travels() -> None:
    """Once for each layout: buckets that are the same in a new list are not said again."""

    def body(rank: Rank) -> list[BucketLayout]:
        named = parameters_of(a=(3,), m=(64, 64), z=(5,))
        rank.reducer(parameters_of(other=(1,)))
        reducer = rank.reducer(named, Plan(route="flat", codec="int8", first_bucket_bytes=1, bucket_bytes=30_000))
        for change in (None, {}, {"m": CodecSpec.parse("none")}, {"m": CodecSpec.parse("int4")}):
            if change is not None:
                reducer.switch_codecs(change)
            backward(named, a=1.0, m=1.0, z=1.0)
            backward(named, a=1.0, m=1.0, z=1.0)
        assert {exchange.engine for exchange in rank.events.of(Exchange)} == {1}
        return rank.events.of(BucketLayout)

    for layouts in play(2, body):
        assert [(layout.route, layout.engine) for layout in layouts] == [("flat", 1)] * 3
        assert [[(facts.codec, facts.parameters) for facts in layout.buckets] for layout in layouts] == [
            [("none", ("z",)), ("int8", ("m",)), ("none", ("a",))],
            [("none", ("z",)), ("none", ("m", "a"))],
            [("none", ("z",)), ("int4", ("m",)), ("none", ("a",))],
        ]
        assert [facts.nbytes for facts in layouts[0].buckets] == [56, 16384, 48]
        assert layouts[0].buckets[0] == BucketFacts(56, "none", ("z",))


def test_an_exchange_and_the_backward_pass_before_it_are_recorded() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named, Plan(route="flat", accumulate=2))
        for turn in range(4):
            reducer.backward_begins()
            begun = reducer.passes.current.backward_seconds
            backward(named, a=1.0)
            (*_, phase) = phases = rank.events.of(Phase)
            assert len(phases) == turn + 1
            assert (phase.name, phase.begin_seconds) == (BACKWARD, begun)
            assert phase.end_seconds >= begun
            assert len(rank.events.of(Exchange)) == (turn + 1) // 2
        for exchange in rank.events.of(Exchange):
            (bucket,) = exchange.buckets
            assert bucket.first_ready_seconds is not None
            assert exchange.launch_seconds == (bucket.launch_seconds,)
            assert bucket.first_ready_seconds <= bucket.launch_seconds <= exchange.wait_end_seconds
            assert exchange.wait_begin_seconds <= exchange.wait_end_seconds == bucket.end_seconds
            assert exchange.sent_bytes == bucket.sent_bytes > 0
        reducer.exchange()
        assert len(rank.events.of(Phase)) == 4, "there was no pass"
        (last,) = rank.events.of(Exchange)[-1].buckets
        assert last.first_ready_seconds is None, "nothing became ready"

    play(2, body)


def test_times_of_a_step_for_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("farandole.comm.engine.passes.time.monotonic", lambda: now[0])
    times = OpenPass(2)
    times.ready_seconds, times.arrivals, times.seen = [7.0, 7.0], [1], bytearray(b"\0\1")
    times.open(is_tuned=True)
    assert (times.ready_seconds, times.arrivals, times.seen) == ([0.0, 0.0], [], bytearray(2))
    times.ready_seconds[1] = 11.0
    assert times.close(12.0, 13.0) == PassTimings(10.0, 10.0, 12.0, 13.0, [0.0, 11.0]), "it began with the pass"
    times.forward_begin_seconds = 14.0
    now[0] = 15.0
    times.open(is_tuned=True)
    now[0] = 16.0
    times.open(is_tuned=True)
    assert times.backward_seconds == 10.0, "of the first pass, until it is recorded"
    assert times.close(17.0, 18.0) == PassTimings(14.0, 16.0, 17.0, 18.0, [0.0, 0.0]), "it began with its forward"
    times.open(is_tuned=False)
    assert times.close(17.0, 18.0).forward_begin_seconds == 0.0
    times.ready_seconds = [1.0, 2.0, 3.0]
    times.forget_ready()
    assert times.ready_seconds == [0.0, 0.0, 0.0]


def test_forward_begins_once_a_step_and_asks_for_what_is_wrong_with_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10.0]
    monkeypatch.setattr("farandole.comm.engine.reducer.time.monotonic", lambda: now[0])

    def body(rank: Rank) -> None:
        named, asked = parameters_of(a=(3,)), list[int]()
        reducer = rank.reducer(named, Plan(route="flat", accumulate=3))
        reducer.before_forward = lambda: asked.append(1)
        reducer.forward_begins()
        now[0] = 20.0
        reducer.forward_begins()
        assert reducer.passes.current.forward_begin_seconds == 10.0
        add_pass(named, a=1.0)
        with torch.no_grad():
            reducer.forward_begins()
        assert (len(asked), reducer.passes_held) == (2, 1), "evaluation is nobody's step"
        named["a"].grad = None
        with torch.no_grad():
            reducer.forward_begins()
        assert reducer.passes_held == 1
        reducer.forward_begins()
        assert reducer.passes_held == 0, "the loop has thrown it away"

    play(1, body)


# -- gradients that are not finite -----------------------------------------------------------------


def broken(rank: Rank, named: dict[str, nn.Parameter]) -> None:
    """Do a pass in which rank 2 has NaN in all gradients."""
    backward(named, **dict.fromkeys(named, float("nan") if rank.number == 2 else 1.0))


def grad_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def matrices() -> dict[str, nn.Parameter]:
    return parameters_of(**dict.fromkeys("edcba", (64, 64)))


def test_a_step_with_nan_is_skipped_and_one_rank_says_why() -> None:
    def body(rank: Rank) -> None:
        named = matrices()
        reducer = rank.reducer(named, Plan(route="flat", codec="int8", nonfinite="skip", **ONE_EACH))
        backward(named, **dict.fromkeys(named, 1.0 + rank.number))
        skipped = [reducer.step_is_skipped]
        before = reducer.exchange_state()
        broken(rank, named)
        skipped.append(reducer.step_is_skipped)
        assert set(grads(named).values()) == {None}
        for name, entry in reducer.exchange_state().items():
            assert torch.equal(entry["elements"]["residual"], before[name]["elements"]["residual"]), name
        backward(named, **dict.fromkeys(named, 1.0))
        assert [*skipped, reducer.step_is_skipped] == [False, True, False]
        assert None not in grads(named).values()

    text = r"farandole: step skipped: gradients of a, b, c and 2 more hold NaN or infinity on rank 2$"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        play(3, body)
    assert len(caught) == 1, "only the first of the ranks concerned speaks"


def test_a_sum_that_overflows_is_nobodys_gradient() -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(b=(64, 64), a=(64, 64))
        rank.reducer(named, Plan(route="flat", codec="int8", nonfinite="raise", **ONE_EACH))
        with pytest.raises(CommError) as caught:
            backward(named, b=1.0, a=3e38)
        return str(caught.value)

    for rank, text in enumerate(play(3, body)):
        assert text.startswith(
            f"rank {rank}, backward: gradients of a are finite on every rank, and their sum over the ranks is not;"
        )


@pytest.mark.parametrize("then", ["used", "kept", "dropped"])
def test_nan_is_passed_on_and_rolled_back_when_no_step_uses_it(then: str) -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(b=(64, 64), a=(64, 64))
        reducer = rank.reducer(named, Plan(route="flat", codec="topk:0.1", **ONE_EACH))

        def residuals() -> dict[str, torch.Tensor]:
            return {name: entry["elements"]["residual"] for name, entry in reducer.exchange_state().items()}

        backward(named, b=1.0, a=1.0)
        before = residuals()
        backward(named, b=1.0, a=float("nan") if rank.number == 1 else 1.0)
        after = residuals()
        assert bool(torch.isnan(grad_of(named["a"])).all())
        assert not bool(torch.isnan(grad_of(named["b"])).any())
        assert torch.equal(after["a"], before["a"]), "at once"
        assert not torch.equal(after["b"], before["b"]), "the loop may use it yet"
        if then == "used":
            reducer.flush()
        if then != "kept":
            for parameter in named.values():
                parameter.grad = None
        reducer.passes.guards.nonfinite.rollback_if_dropped()
        assert torch.equal(residuals()["b"], (before if then == "dropped" else after)["b"])

    play(2, body)


# -- what an accelerator cannot have ---------------------------------------------------------------


def test_messages_from_an_accelerators_memory_are_refused_on_all_ranks() -> None:
    """What a parameter on the meta device stands for here."""

    def body(rank: Rank) -> None:
        here, there = torch.zeros(3), torch.zeros(3, device="meta")
        named = [("a", here), ("b", there if rank.number == 2 else here), ("c", there)]
        for plan, codecs, text in ((Plan(codec="int8"), ["int8", "int4"], "codec 'int8'"),):
            with pytest.raises(PlanError, match=f"^{text}: parameter 'c' of rank 0 is on meta") as caught:
                refuse_messages(rank.world, named, plan, codecs=codecs)
            assert caught.value.remedy == REMEDY
            with pytest.raises(PlanError, match=f"^{text}: parameter 'b' of rank 2 is on meta"):
                refuse_messages(rank.world, named[:2], plan, codecs=codecs)
            refuse_messages(rank.world, named[:1], plan, codecs=codecs)
        with pytest.raises(PlanError, match=r"^zero = 1: parameter 'c' of rank 0 is on meta") as caught:
            refuse_messages(rank.world, named, Plan(zero=1), codecs=[], shards=True)
        assert caught.value.remedy == "on an accelerator use zero = 3, or 0"
        refuse_messages(rank.world, named, Plan(route="flat"), codecs=[])

    play(3, body)
    refuse_messages(world_of(0, 1), [("c", torch.zeros(3, device="meta"))], Plan(), codecs=["int8"])
    assert device_of([torch.zeros(1), torch.zeros(1, device="meta")]) == torch.device("meta")
    assert device_of([torch.zeros(1)]) == device_of([]) == torch.device("cpu")


def test_codecs_of_an_accelerator_that_ranks_would_not_compute_alike_are_refused() -> None:
    named = [("a", torch.zeros(3, device="meta")), ("b", torch.zeros(3))]

    def body(rank: Rank) -> None:
        with pytest.raises(PlanError, match="codec 'int8': parameter 'a' of rank 0 is on meta, others are on cpu"):
            refuse_messages(rank.world, named, Plan(), codecs=["int8"])
        with pytest.raises(PlanError, match="staging = 'always': parameter 'a' of rank 0 is on meta"):
            refuse_messages(rank.world, named, Plan(staging="always"), codecs=[])
        refuse_messages(rank.world, named, Plan(), codecs=[])
        refuse_messages(rank.world, named[:1], Plan(), codecs=["int8", "powersgd:2"])
        other = named[:1] if rank.number == 0 else named[1:]
        with pytest.raises(PlanError, match="rank 0 has a Model, rank 1 a CPU, and their products"):
            refuse_messages(rank.world, other, Plan(), codecs=["powersgd:2"])

    def rounded(rank: Rank) -> None:
        with pytest.raises(PlanError, match="on rank 0 products of float32 matrices are rounded to TF32"):
            refuse_messages(rank.world, named[:1], Plan(), codecs=["powersgd:2"])
        refuse_messages(rank.world, named[:1], Plan(), codecs=["int8"])

    meta, before = torch.device("meta"), torch.backends.cuda.matmul.fp32_precision
    simulate_device(meta, cast("Any", SimpleNamespace(model="Model")))
    try:
        play(2, body)
        torch.set_float32_matmul_precision("high")
        play(2, rounded)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # where torch raises for a look by the older name
        play(2, rounded)
        simulate_device(meta, None)
        play(2, lambda rank: refuse_messages(rank.world, named[1:], Plan(), codecs=["powersgd:2"]))
    finally:
        simulate_device(meta, None)
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


# -- several reducers, and the end -----------------------------------------------------------------


def test_two_reducers_in_one_pass_are_exchanged_in_one_order() -> None:
    """Their graphs may run in another order on another rank."""

    def body(rank: Rank) -> None:
        one, two = parameters_of(a=(3,)), parameters_of(a=(3,))
        for named in (one, two):
            rank.reducer(named)
        for turn in range(2):
            backward(one | {"b": two["a"]}, **({"a": 1.0, "b": 3.0} if rank.number else {"b": 5.0, "a": 2.0}))
            found = grads(one), grads(two)
            assert found == ({"a": 1.5}, {"a": 4.0}), turn

    play(2, body)


def test_a_pass_that_an_error_ended_is_exchanged_at_the_step() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,), b=(3,))
        reducer = rank.reducer(named, Plan(route="flat", **ONE_EACH))
        backward(named, a=1.0, b=1.0)
        fail = [rank.number == 1]

        def hook(_: torch.Tensor) -> None:
            if fail[0]:
                raise KeyError("in a hook of the loop")

        named["a"].register_hook(hook)
        if rank.number == 1:
            with pytest.raises(KeyError):
                backward(named, a=2.0, b=2.0)
            fail[0] = False
            reducer.flush()
        else:
            backward(named, a=2.0, b=2.0)
        assert grads(named) == {"a": 1.0, "b": 2.0}
        backward(named, a=2.0, b=2.0)
        assert grads(named) == {"a": 2.0, "b": 2.0}
        return reducer.exchanges_done

    assert play(2, body) == [3, 3]


def test_a_placeholders_pass_that_an_error_ended_leaves_what_is_held() -> None:
    def body(rank: Rank) -> Any:
        named = parameters_of(a=(3,), b=(3,))
        reducer = rank.reducer(named, Plan(route="flat", accumulate=2))
        add_pass(named, a=4.0, b=4.0)
        if rank.number:
            rank.world.session.batch_weight.set(0.0)

            def fail(_: torch.Tensor) -> None:
                raise KeyError("in a hook of the loop")

            handle = named["a"].register_hook(fail)
            with pytest.raises(KeyError):
                add_pass(named, a=64.0, b=64.0)
            handle.remove()
        else:
            add_pass(named, a=8.0, b=8.0)
        reducer.flush()
        return grads(named), reducer.exchanges_done

    assert play(2, body) == [({"a": 8.0, "b": 8.0}, 1)] * 2


def test_a_reducer_that_is_dropped_closes_its_route_when_the_next_step_ends() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(64, 64))
        reducer = rank.reducer(named, Plan(route="flat", codec="int8"))
        backward(named, a=1.0)
        known = weakref.ref(reducer)
        del reducer
        assert known() is not None, "its parameters keep it"
        assert rank.route.conductor is not None
        thread = rank.route.conductor._thread
        named.clear()
        gc.collect()
        assert known() is None
        assert thread.is_alive(), "not in the middle of anything"
        rank.world.session.let_go()
        assert not thread.is_alive()

    play(1, body)


def test_who_leaves_before_the_exchange_is_over_is_told() -> None:
    def body(rank: Rank) -> None:
        named = parameters_of(a=(3,), b=(3,))
        reducer = rank.reducer(named, Plan(route="flat", **ONE_EACH))
        backward(named, a=1.0, b=1.0)
        named["b"].register_post_accumulate_grad_hook(lambda _: rank.world.close())
        with pytest.raises(CommError, match=r"the world was left before the exchange was over; call"):
            backward(named, a=1.0, b=1.0)
        assert not reducer.is_open

    play(1, body)


@pytest.mark.parametrize("first_is_sparse", [False, True])
def test_a_gradient_of_another_kind_than_in_the_first_step_is_named(first_is_sparse: bool) -> None:
    def body(rank: Rank) -> str:
        rows = nn.Parameter(torch.ones(5, 2))
        named = {"z": nn.Parameter(torch.ones(2)), "rows": rows}
        rank.reducer(named, Plan(route="flat", **ONE_EACH))
        for is_sparse in (first_is_sparse, not first_is_sparse):
            rows.grad = named["z"].grad = None
            found = nn.functional.embedding(torch.tensor([1]), rows, sparse=is_sparse)
            total = found.sum() + named["z"].sum()
            if is_sparse is first_is_sparse:
                total.backward()
        with pytest.raises(CommError) as caught:
            total.backward()
        return str(caught.value)

    kinds = (
        "dense, in the first step it was sparse" if first_is_sparse else "sparse, in the first step it was dense"
    )
    (text,) = play(1, body)
    assert f"the gradient of 'rows' is {kinds}" in text


def test_what_closes_the_connections_of_a_dropped_reducer_does_not_run_at_the_interpreters_end() -> None:
    class Dropped:
        pass

    reducer = Dropped()
    when_dropped = OpenRoute(world_of(0, 1)).close_with(reducer)
    assert when_dropped.alive
    assert not when_dropped.atexit
    when_dropped.detach()
