"""The step model: the recurrence of buckets on worked examples, and that all ask the same one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farandole.comm.autotune.probe import measure_codecs
from farandole.core.bucket_plan import BucketPlan, plan_buckets
from farandole.core.link import LinkModel
from farandole.core.step_model import (
    BucketLoad,
    CodecSpeed,
    Gradient,
    StepProfile,
    buckets_of,
    loads_of,
    predict_local_steps,
    predict_step,
    rebucket,
    replay_buckets,
    slowest_speed,
)
from farandole.core.vocabulary.codec_spec import CodecSpec

LINK = LinkModel(bytes_per_second=100.0, latency_seconds=0.5)


def load(ready: float, nbytes: float = 100.0) -> BucketLoad:
    return BucketLoad(nbytes, nbytes, rounds=2, ready_seconds=ready, first_ready_seconds=ready - 1)


def test_a_bucket_leaves_when_it_is_ready_and_the_link_is_free() -> None:
    # 100 bytes at 100 a second and two rounds of half a second: 2 s on the link.
    assert replay_buckets([load(0.0), load(1.0)], LINK).end_seconds == 4.0
    assert replay_buckets([load(0.0), load(7.0)], LINK).end_seconds == 9.0
    assert replay_buckets([], LINK).end_seconds == -float("inf")


def test_work_before_a_bucket_leaves_overlaps_with_the_one_on_its_way() -> None:
    two = [load(0.0), load(0.0)]
    assert replay_buckets([each.coded(1.0, 0.01) for each in two], LINK).end_seconds == 1.0 + 2.0 + 2.0
    inside = [each._replace(intra_host_seconds=1.0) for each in two]
    assert replay_buckets(inside, LINK).end_seconds == 2 * (1.0 + 2.0), "nothing else is on its way meanwhile"
    slow = [each._replace(cpu_seconds=3.0, decode_seconds=0.25) for each in two]
    assert replay_buckets(slow, LINK) == (6.25, 6.0), "CPU time longer than the link's bounds a bucket"


def test_cpu_time_delays_gradients_only_on_a_shared_core() -> None:
    late = [load(0.0)._replace(cpu_seconds=2.0), load(10.0)]
    assert replay_buckets(late, LINK).end_seconds == 12.0
    assert replay_buckets(late, LINK, shares_core=True).end_seconds == 14.0


def test_other_bucket_sizes_keep_bytes_and_the_last_moment() -> None:
    before = [load(1.0), load(2.0, 300.0)]
    for size in (50.0, 100.0, 400.0):
        after = rebucket(before, size)
        assert len(after) == 400 / size
        assert sum(each.sent_bytes for each in after) == pytest.approx(400.0)
        assert after[-1].ready_seconds == 2.0
    assert rebucket(before, 100.0)[0].ready_seconds == 1.0


def test_a_step_is_predicted_with_the_buckets_that_the_reducer_builds() -> None:
    gradients = [Gradient(f"g{i}", 100, 1.0 + i, 10, 10, False, False) for i in range(6)]
    profile = StepProfile(gradients, 1.0, 6.0, 2, shares_core=False, speeds={"none": CodecSpeed(0.0, 1.0)})
    link = LinkModel(bytes_per_second=1e9, latency_seconds=0.0)
    plan = BucketPlan({}, bucket_bytes=300, first_bucket_bytes=100)
    found = predict_step(profile, link, plan)
    buckets = plan_buckets(gradients, key=lambda _: "one", first_bytes=100, limit_bytes=300)
    assert [len(bucket) for bucket in buckets] == [1, 3, 2]
    assert buckets_of(profile, plan) == buckets
    assert found.sent_bytes == 600, "a ring of two sends every byte once"
    assert found.seconds == pytest.approx(7.0)
    assert found.seconds - found.compute_seconds == pytest.approx(0.0, abs=1e-6)
    mixed = [*gradients[:3], *(Gradient(f"h{i}", 100, 4.0 + i, 10, 10, False, False, "float16") for i in range(3))]
    apart = buckets_of(StepProfile(mixed, 1.0, 6.0, 2, False, profile.speeds), BucketPlan({}, 600))
    assert [len(bucket) for bucket in apart] == [3, 3], "gradients of different types share no bucket"


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "int8", "fp8", "int4", "sign", "powersgd:rank=2"])
def test_bytes_by_formula_are_those_that_the_codec_sends(codec: str) -> None:
    """What is predicted from a codec's name is what a simulated exchange of it sends."""
    spec, side = CodecSpec.parse(codec), 512
    per_element = spec.bytes_per_element(side, side)
    assert per_element is not None
    measured = measure_codecs((codec,), 2)[codec]
    assert measured.ratio == pytest.approx(per_element / 4, rel=0.01)
    assert measured.rounds == spec.rounds


def test_ranks_meet_as_often_as_meetings_cost_a_twentieth() -> None:
    """Two parameters of 40 MB each over 1 MB/s, in a quarter of the bytes: a meeting of 20 s."""
    gradients = [
        Gradient(name, 40_000_000, 0.1, 1000, 10_000, can_be_coded=True, can_be_low_rank=True) for name in "ab"
    ]
    speeds = {"none": CodecSpeed(0.0, 1.0), "int8": CodecSpeed(1e-9, 0.25)}
    link = LinkModel(1e6, 0.5)
    profile = StepProfile(gradients, 1.0, 7.0, 2, shares_core=False, speeds=speeds)
    found = predict_local_steps(profile, link, "int8")
    assert found.meeting_seconds == pytest.approx(20.0 + 2 * 0.5 + 80e6 * 1e-9)
    assert found.steps == math.ceil(found.meeting_seconds / (0.05 * 8.0))
    assert found.seconds == pytest.approx(8.0 + found.meeting_seconds / found.steps)
    longer = predict_local_steps(profile, link, "int8", other_seconds=8.0)
    assert longer.steps == math.ceil(found.meeting_seconds / (0.05 * 16.0))
    assert longer.seconds == pytest.approx(16.0 + found.meeting_seconds / longer.steps)
    fast, slow = (replace(link, bytes_per_second=each) for each in (1e12, 1e3))
    assert predict_local_steps(profile, fast, "int8").steps == 10
    assert predict_local_steps(profile, slow, "int8").steps == 100


def test_a_codec_on_a_device_costs_something_for_each_bucket_or_matrix_and_is_serial() -> None:
    gradients = [Gradient(name, 4_000_000, 1.0, 1000, 1000, True, True) for name in "abcd"]
    speeds = {name: CodecSpeed(1e-9, 0.25, seconds_per_bucket=0.5) for name in ("none", "int8", "powersgd:rank=4")}
    link = LinkModel(1e6, 0.0)
    profile = StepProfile(gradients, 0.0, 1.0, 2, shares_core=True, speeds=speeds)
    whole = BucketPlan(dict.fromkeys("abcd", "int8"), 8_000_000)
    assert [load.cpu_seconds for load in loads_of(profile, link, whole)] == pytest.approx([0.508, 0.508])
    plan = BucketPlan(dict.fromkeys("abcd", "powersgd:rank=4"), 8_000_000)
    assert [load.cpu_seconds for load in loads_of(profile, link, plan)] == pytest.approx([1.008, 1.008])
    serial = replace(profile, is_serial=True)
    (first, _), (beside, _) = (loads_of(each, link, whole) for each in (serial, profile))
    assert first.on_link(link) == pytest.approx(first.cpu_seconds + link.seconds(first.sent_bytes, first.rounds))
    assert beside.on_link(link) == pytest.approx(link.seconds(first.sent_bytes, first.rounds))
    assert (first.decode_seconds, beside.decode_seconds > 0) == (0.0, True)


def test_the_slowest_rank_is_one_rank() -> None:
    """Each has its two figures: from the largest of both followed a rank that there is not."""
    speed = CodecSpeed(0.0, 0.5)
    found = slowest_speed(speed, [(0.0, 1e-3), (1e-3 / 2**20, 0.0), (1e-4 / 2**20, 5e-4)])
    assert (found.seconds_per_byte, found.seconds_per_bucket, found.ratio) == (1e-3 / 2**20, 0.0, 0.5)
