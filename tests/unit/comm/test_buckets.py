"""Buckets without a world: what is loaded, added, marked and landed, where nothing and where two ranks meet."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from farandole.comm.autotune.probe import ProbeRequest
from farandole.comm.codecs.registry import make_codec
from farandole.comm.engine.bucket import MARKS, DenseBucket, SparseBucket
from farandole.comm.engine.buckets import BucketSet
from farandole.comm.engine.coded_bucket import CarryOver, CodedBucket
from farandole.comm.engine.grad_ownership import FlatGradients
from farandole.comm.engine.in_flight import BucketTimer
from farandole.comm.engine.parameters import layout_of
from farandole.comm.routes import Route
from farandole.comm.transport.comm_thread import BucketWork
from farandole.comm.transport.rank_group import RankGroup
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.spec import Plan


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def dense(parameters: list[torch.nn.Parameter], size: int = 2, **options: Any) -> DenseBucket:
    members = [10 + i for i in range(len(parameters))]
    return DenseBucket(members, parameters, [layout_of(each) for each in parameters], size, **options)


def meet(*buckets: DenseBucket) -> None:
    """Do what an all-reduce does."""
    total = torch.stack([bucket.gradients.flat for bucket in buckets]).sum(0)
    for bucket in buckets:
        bucket.gradients.flat.copy_(total)


SHAPES = [(3, 2), (5,), (), (1, 9)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_ranks_get_the_mean_in_gradients_that_stay_in_the_bucket(large: bool, dtype: torch.dtype) -> None:
    shapes = [(64, 300), (20_000,)] if large else SHAPES
    ranks = [parameters_of(*shapes, dtype=dtype) for _ in range(2)]
    buckets = [dense(parameters) for parameters in ranks]
    for step in range(1, 3):
        for rank, parameters in enumerate(ranks):
            for number, parameter in enumerate(parameters):
                value = float(step * (rank + 1) * (number + 1))
                if parameter.grad is None or step == 1:
                    parameter.grad = torch.full_like(parameter, value)
                else:
                    parameter.grad.fill_(value)
            buckets[rank].load(0.5)
            assert buckets[rank].gradients.unused == []
        meet(*buckets)
        for bucket, parameters in zip(buckets, ranks, strict=True):
            bucket.finalize()
            assert bucket.gradients.is_held
            for number, parameter in enumerate(parameters):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5 * step * (number + 1)))
                assert parameter.grad.data_ptr() == bucket.gradients.views[number].data_ptr(), (
                    "nothing is copied back"
                )
                assert parameter.grad.data_ptr() % 64 == 0, "on a cache line"


def test_a_member_that_one_rank_has_no_gradient_for_counts_as_zeros() -> None:
    ranks = [parameters_of(*SHAPES) for _ in range(2)]
    buckets = [dense(parameters) for parameters in ranks]
    for parameter in ranks[0][:2]:
        parameter.grad = torch.ones_like(parameter)
    for bucket in buckets:
        bucket.gradients.flat.fill_(9.0)  # what another exchange left
        bucket.load(0.5)
    assert [bucket.gradients.unused for bucket in buckets] == [[2, 3], [0, 1, 2, 3]]
    assert [bucket.used_mask[:4].tolist() for bucket in buckets] == [[1, 1, 0, 0], [0, 0, 0, 0]]
    meet(*buckets)
    for bucket, parameters in zip(buckets, ranks, strict=True):
        bucket.finalize()
        for parameter in parameters[:2]:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))
        assert [parameter.grad for parameter in parameters[2:]] == [None, None], "as no rank had one"
        bucket.gradients.zero_missing()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in parameters[2:])
        assert torch.equal(cast("torch.Tensor", parameters[0].grad), torch.full((3, 2), 0.5)), "others stay"


@pytest.mark.parametrize("large", [False, True])
def test_a_weight_of_nothing_contributes_nothing_whatever_the_gradients_are(large: bool) -> None:
    (parameter,) = parameters_of((200, 100) if large else (3,))
    parameter.grad = torch.full_like(parameter, torch.nan)
    bucket = dense([parameter])
    bucket.load(0.0)
    assert not bucket.gradients.flat[: parameter.numel()].any()
    assert bucket.used_mask[:1].tolist() == [1]


def test_what_is_added_after_the_load_is_weighted_as_the_gradient_is() -> None:
    parameters = parameters_of((3,), (2,))
    parameters[0].grad = torch.ones(3)
    bucket = dense(parameters, size=4)
    bucket.load(0.25)
    bucket.add(0, torch.full((3,), 8.0), 2.0)
    bucket.add(1, torch.full((2,), 4.0), 1.0)
    assert bucket.gradients.views[0].tolist() == [4.25] * 3
    assert bucket.gradients.views[1].tolist() == [1.0] * 2, "also for a member without a gradient"


def test_gradients_of_the_users_own_memory_stay_theirs_and_take_the_mean() -> None:
    flat = torch.arange(10.0)
    parameters = parameters_of((4,), (6,))
    for parameter, part in zip(parameters, flat.split([4, 6]), strict=True):
        parameter.grad = part
    bucket = dense(parameters)
    bucket.load(0.5)
    bucket.gradients.flat[:100].mul_(4)
    bucket.finalize()
    assert flat.tolist() == [2.0 * i for i in range(10)]
    assert bucket.gradients.is_held
    mine = parameters[0].grad
    assert mine is not None
    assert mine.data_ptr() == flat.data_ptr()


def test_memory_that_somebody_holds_is_left_to_them() -> None:
    parameters = parameters_of((4,))
    bucket = dense(parameters)
    parameters[0].grad = torch.ones(4)
    bucket.load(1.0)
    bucket.gradients.note_uses()
    bucket.finalize()
    kept = parameters[0].grad
    parameters[0].grad = torch.full((4,), 5.0)
    before = bucket.gradients.flat
    bucket.load(1.0)
    assert kept is not None
    assert kept.tolist() == [1.0] * 4
    assert bucket.gradients.flat is not before
    assert bucket.gradients.views[0].tolist() == [5.0] * 4
    assert bucket.used_mask[:1].tolist() == [1]
    bucket.mark_steps(3)
    assert bucket.gradients.flat[-MARKS:].any(), "mask and marks lie in the memory that is sent"


@pytest.mark.parametrize(
    "keep", [lambda grad: grad.view(-1)[:2], lambda grad: grad.numpy()], ids=["view", "array"]
)
def test_memory_that_somebody_looks_at_is_left_to_them(keep: Any) -> None:
    """They hold no object of ours, but the memory is in use."""
    parameters = parameters_of((4,), (2,))
    bucket = dense(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    bucket.load(1.0)
    bucket.gradients.note_uses()
    bucket.finalize()
    before = bucket.gradients.flat
    kept = keep(cast("torch.Tensor", parameters[0].grad))
    bucket.load(1.0)
    assert bucket.gradients.flat is before, "all are added to in place, as they would be without us"
    parameters[0].grad = torch.full((4,), 5.0)
    bucket.load(1.0)
    assert bucket.gradients.flat is not before
    assert kept.tolist()[:2] == [1.0, 1.0]
    del kept
    bucket.gradients.note_uses()
    bucket.finalize()
    before = bucket.gradients.flat
    parameters[0].grad = torch.full((4,), 6.0)
    bucket.load(1.0)
    assert bucket.gradients.flat is before, "nobody holds it any more"


def test_memory_of_the_users_own_is_looked_for_while_a_bucket_is_new() -> None:
    def own(parameter: torch.nn.Parameter) -> torch.Tensor:
        flat = torch.ones(9)
        parameter.grad = flat[2:6]
        return flat

    late, early = (parameters_of((4,))[0] for _ in range(2))
    for parameter, is_early in ((early, True), (late, False)):
        bucket = dense([parameter])
        for turn in range(5):
            if turn == 4 or is_early:
                flat = own(parameter)
            else:
                parameter.grad = torch.ones(4)
            bucket.load(1.0)
            bucket.gradients.flat[:4] = 7.0
            bucket.finalize()
        assert flat[2:6].tolist() == [7.0 if is_early else 1.0] * 4, "later where it was found"
        mine = cast("torch.Tensor", parameter.grad)
        assert (mine.data_ptr() == flat[2:].data_ptr()) is is_early
        assert mine.tolist() == [7.0] * 4


def test_what_was_copied_back_holds_nothing_of_the_bucket() -> None:
    (parameter,) = parameters_of((4,))
    bucket = dense([parameter])
    parameter.grad = torch.ones(9)[2:6]
    bucket.load(1.0)
    bucket.gradients.note_uses()
    bucket.finalize()
    before = bucket.gradients.flat
    parameter.grad = torch.ones(4)
    bucket.load(1.0)
    assert bucket.gradients.flat is before
    bucket.finalize()
    assert parameter.grad is bucket.gradients.views[0]


def test_a_view_that_was_given_other_memory_is_made_anew() -> None:
    """As `Module._apply` does: what it holds is the gradient, which lies elsewhere."""
    parameters = parameters_of((4,), (2,))
    bucket = dense(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    bucket.load(1.0)
    bucket.finalize()
    cast("torch.Tensor", parameters[1].grad).data = torch.full((2,), 3.0)
    bucket.load(2.0)
    bucket.finalize()
    assert bucket.gradients.views[0].tolist() == [2.0] * 4
    assert bucket.gradients.views[1].tolist() == [6.0] * 2
    assert parameters[1].grad is bucket.gradients.views[1]
    assert bucket.gradients.views[1].storage_offset() == 16


def test_whether_a_step_has_used_a_gradient() -> None:
    parameters = parameters_of((4,), (2,))
    bucket = dense(parameters)
    parameters[0].grad = torch.ones(4)
    bucket.load(1.0)
    assert not bucket.gradients.holds_used(0)
    bucket.gradients.note_used()
    assert bucket.gradients.holds_used(0)
    assert not bucket.gradients.holds_used(1), "it has none"
    parameters[0].grad.mul_(2)
    assert not bucket.gradients.holds_used(0), "it was written since"
    bucket.gradients.note_used()
    parameters[0].grad = torch.ones(4)
    assert not bucket.gradients.holds_used(0), "it lies elsewhere"
    assert not bucket.gradients.is_held


def test_sizes_and_bytes() -> None:
    parameters = parameters_of((17,), (3,))
    bucket = dense(parameters, size=4)
    assert bucket.gradients.views[1].storage_offset() == 32, "17 numbers fill two lines of 16"
    assert bucket.gradients.nbytes == 4 * bucket.gradients.flat.numel() == 4 * (32 + 3 + 2 + MARKS)
    assert bucket.sent_bytes == pytest.approx(2 * 3 / 4 * bucket.gradients.nbytes, abs=2)
    apart = FlatGradients(parameters, [layout_of(each) for each in parameters], multiple=64)
    assert (apart.elements, apart.flat.numel()) == (32 + 3, 64)
    apart.flat.fill_(1.0)
    assert apart.is_finite
    apart.flat[3] = torch.inf
    assert not apart.is_finite


# -- steps that met --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_marks_of_any_ranks_differ_when_their_steps_do(dtype: torch.dtype) -> None:
    def differ(*steps: int | None) -> bool:
        total, mine = (dense(parameters_of((2,), dtype=dtype)) for _ in range(2))
        total.used_mask.zero_()
        for each in steps:
            mine.used_mask.fill_(7.0)
            assert mine.mark_steps(each)
            total.used_mask[1:] += mine.used_mask[1:] / len(steps)
        return total.steps_differ

    for one in range(18):
        assert not differ(one, one, one)
        assert not differ(one, None, one), "who makes none agrees with all"
        for other in range(18):
            assert differ(one, one, other) is (one % 16 != other % 16)
    assert not differ(None, None)
    assert not differ(1, 97, 1), "steps are counted modulo 16, however many there are"


# -- what an encoded bucket announces --------------------------------------------------------------


def coded(rank: int) -> CodedBucket:
    """Return one of two ranks' buckets, of three members."""
    parameters = parameters_of((64, 64), (64, 64), (64, 64))
    everyone = RankGroup((0, 1), rank)
    route = cast("Route", SimpleNamespace(route="flat", everyone=everyone, slices=(everyone, None)))
    layouts, codec = [layout_of(each) for each in parameters], make_codec(CodecSpec.parse("int8"))
    return CodedBucket([5, 6, 7], parameters, layouts, codec, lines=route, probe_request=ProbeRequest())


def test_a_bucket_that_was_not_exchanged_yet_has_sent_nothing() -> None:
    bucket = coded(0)
    assert bucket.sent_bytes == 0
    assert not bucket.had_nonfinite
    assert (bucket.nonfinite_members, bucket.overflowed_members) == ([], [])
    assert bucket.fits(cast("Route", SimpleNamespace(route="flat")))
    assert not bucket.fits(cast("Route", SimpleNamespace(route="hierarchical")))


def announce(*buckets: CodedBucket) -> None:
    rows = torch.stack([next(bucket._announce()).tensor for bucket in buckets])
    for bucket in buckets:
        bucket._take_announcements(rows)


def test_ranks_learn_who_has_a_gradient_and_which_are_not_finite() -> None:
    here, there = coded(0), coded(1)
    for bucket, present in ((here, [0]), (there, [0, 1])):
        for i in present:
            bucket.gradients.parameters[i].grad = torch.ones(64, 64)
    for poisoned in (False, True):
        if poisoned:
            cast("torch.Tensor", there.gradients.parameters[1].grad)[0, 0] = torch.nan
        for bucket in (here, there):
            bucket.load(0.5)
        assert not here.nonfinite_members
        assert list(there.nonfinite_members) == ([6] if poisoned else [])
        assert bool(there.gradients.flat.any()) is not poisoned, "one that is not finite contributes zeros"
        announce(here, there)
        assert here.had_nonfinite is there.had_nonfinite is poisoned
        for bucket in (here, there):
            bucket.finalize()
        grads = [parameter.grad for parameter in here.gradients.parameters]
        assert [grad is None for grad in grads] == [False, False, True], "the last one is nobody's"
        assert bool(torch.isnan(cast("torch.Tensor", grads[0])).all()) is poisoned


def test_a_probe_is_asked_for_by_one_and_done_by_all() -> None:
    here, there = coded(0), coded(1)
    there._probe_request.by_this_rank = True
    announce(here, there)
    assert here._probe_request.by_any_rank


def test_steps_that_are_announced() -> None:
    here, there = coded(0), coded(1)
    for one, other in itertools.product([None, 0, 1, 254, 255, 256], repeat=2):
        for bucket, steps in ((here, one), (there, other)):
            assert bucket.mark_steps(steps)
        announce(here, there)
        alike = one is None or other is None or one % 255 == other % 255
        assert here.steps_differ is there.steps_differ is not alike, (one, other)


# -- sparse ----------------------------------------------------------------------------------------


def is_held(bucket: SparseBucket) -> bool:
    return bucket.gradients.is_held


def sparse_gradient(rows: list[int], width: int = 3) -> torch.Tensor:
    values = torch.ones(len(rows), width)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (10, width), check_invariants=True)


def test_a_sparse_gradient_sends_its_rows_once() -> None:
    (parameter,) = parameters_of((10, 3))
    bucket = SparseBucket([4], parameter, 3)
    assert (bucket.gradients.nbytes, bucket.sent_bytes) == (0, 0)
    parameter.grad = sparse_gradient([7, 2, 7])
    bucket.load(0.5)
    assert bucket.sent_bytes == 2 * 2 * (3 * 4 + 8), "to two others: two rows of three numbers, and an index each"
    assert not is_held(bucket)
    bucket.finalize()
    assert is_held(bucket)
    assert bucket.gradients.holds_used(0)
    assert bucket.gradients.is_finite
    mean = parameter.grad.to_dense()
    assert (mean[2].tolist(), mean[7].tolist(), int((mean != 0).sum())) == ([0.5] * 3, [1.0] * 3, 6)
    parameter.grad = sparse_gradient([1])
    assert not is_held(bucket)
    parameter.grad = torch.zeros(10, 3)
    assert not is_held(bucket)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_no_row_at_all_is_no_gradient(weight: float) -> None:
    (parameter,) = parameters_of((10, 3))
    bucket = SparseBucket([0], parameter, 2)
    if not weight:
        parameter.grad = sparse_gradient([1])
    bucket.load(weight)
    assert bucket.sent_bytes == 0
    bucket.finalize()
    assert parameter.grad is None
    assert not is_held(bucket)
    assert not bucket.steps_differ
    assert not bucket.mark_steps(3), "there is no room in it"
    bucket.gradients.zero_missing()
    assert parameter.grad is None, "nothing but rows"
    with pytest.raises(AssertionError, match="nothing is carried over to a sparse gradient"):
        bucket.add(0, torch.ones(10, 3), 1.0)


def test_rows_that_are_not_finite_are_seen() -> None:
    (parameter,) = parameters_of((10, 3))
    parameter.grad = sparse_gradient([1, 2]) * torch.nan
    bucket = SparseBucket([0], parameter, 2)
    bucket.load(1.0)
    assert not bucket.gradients.is_finite


# -- what is to be added later ---------------------------------------------------------------------


def test_what_was_not_sent_and_what_is_asked_for_are_added_once() -> None:
    parameters = parameters_of((2,), (2,))
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    bucket = dense(parameters, size=1)
    carried = CarryOver()

    def sent() -> list[float]:
        bucket.load(0.0)
        carried.add_to(bucket)
        return [float(view[0]) for view in bucket.gradients.views]

    def state() -> tuple[bool, bool]:
        return carried.is_active, carried.has_pending(11)

    assert state() == (False, False)
    carried.keep(10, torch.ones(2))
    assert state() == (True, False)
    carried.keep(10, torch.ones(2))
    carried.rescale(3.0)
    carried.add_extra_gradient(11, (torch.ones(2), 0.5))
    assert state() == (True, True)
    assert sent() == [6.0, 0.5]
    assert sent() == [6.0, 0.5], "until they have arrived"
    carried.settle([11])
    assert (sent(), state()) == ([6.0, 0.0], (True, False))
    carried.settle([10, 11])
    assert (sent(), state()) == ([0.0, 0.0], (True, False)), "the step may be dropped yet"
    carried.keep(10, torch.ones(2))
    carried.roll_back(10)
    assert sent() == [7.0, 0.0], "beside what came since"
    carried.add_extra_gradient(11, (torch.ones(2), 2.0))
    carried.settle([10, 11])
    carried.add_extra_gradient(11, (torch.ones(2), 8.0))
    carried.roll_back(11)
    assert sent() == [0.0, 8.0], "what is asked for now goes first"
    carried.add_extra_gradient(11, None)
    carried.add_extra_gradient(11, None)
    assert state() == (True, False)
    carried.settle([])
    for index in (10, 11):
        carried.roll_back(index)
    assert (sent(), state()) == ([0.0, 0.0], (False, False)), "another exchange has begun: it has arrived for good"


# -- times -----------------------------------------------------------------------------------------


def test_times_of_a_bucket_by_its_members_and_its_work() -> None:
    bucket = dense(parameters_of((3,), (3,)))
    ready = [0.0] * 10 + [2.0, 5.0, 9.0]
    other = BucketTimer(6.0, cast("Any", SimpleNamespace()), on_host=True).close(bucket, ready, 8.0)
    assert (other.first_ready_seconds, other.last_ready_seconds) == (2.0, 5.0)
    assert (other.launch_seconds, other.begin_seconds, other.end_seconds) == (6.0, 6.0, 8.0)
    assert (other.wait_seconds, other.codec_seconds, other.rounds) == (0.0, 0.0, 1)
    assert (other.nbytes, other.sent_bytes) == (bucket.gradients.nbytes, bucket.sent_bytes)
    work = BucketWork([], 0, begin_seconds=6.5, end_seconds=7.5, wait_seconds=0.25, codec_seconds=0.5, rounds=4)
    told = BucketTimer(6.0, work, on_host=True).close(bucket, ready, 8.0)
    assert (told.begin_seconds, told.end_seconds) == (6.5, 7.5)
    assert (told.wait_seconds, told.codec_seconds, told.rounds) == (0.25, 0.5, 4)
    single = BucketTimer(6.0, BucketWork([], 0, rounds=1), on_host=True).close(bucket, ready, 8.0)
    assert single.rounds == 1
    early = BucketTimer(6.0, BucketWork([], 0), on_host=True).close(bucket, [0.0] * 13, 8.0)
    assert (early.first_ready_seconds, early.last_ready_seconds) == (None, None)
    assert (early.begin_seconds, early.end_seconds, early.rounds) == (6.0, 8.0, 1)


class Work(dist.Work):
    """What a backend gives."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.future


@pytest.mark.parametrize("on_host", [True, False])
def test_work_of_the_backend_ends_when_it_is_done_and_not_when_it_was_waited_for(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.comm.engine.in_flight.time.monotonic", lambda: 7.0)
    work = Work()
    timer, bucket = BucketTimer(6.0, work, on_host=on_host), dense(parameters_of((3,)))
    assert timer.close(bucket, [0.0] * 11, 9.0).end_seconds == 9.0, "it is not known yet"
    work.future.set_result([])
    times = timer.close(bucket, [0.0] * 11, 9.0)
    assert (times.launch_seconds, times.begin_seconds) == (6.0, 6.0)
    assert times.end_seconds == (7.0 if on_host else 9.0), "a queue of an accelerator does not say when"


def test_a_plan_without_a_size_of_buckets_has_the_usual_one() -> None:
    """At stage 3 of ZeRO, where gradients of experts are in buckets, and the plan is not to say how large."""
    parameters = [(f"expert.{k}", torch.nn.Parameter(torch.zeros(2))) for k in range(3)]
    buckets = BucketSet(cast("Any", SimpleNamespace(size=2)), parameters, Plan(zero=3), include_frozen=False)
    assert buckets._limit_bytes == 4 << 20
