"""Predictions: their parts add up, they follow the cluster's figures, and no figure is beaten."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from farandole.core.cluster import Cluster, CodecCost, Coefficient
from farandole.core.link import LinkModel
from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import StageTimes, bubble_seconds, simulate
from farandole.core.step_model import BucketLoad, replay_buckets
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate, Prediction, Term
from farandole.plan.cost.buckets import BucketKind, BucketTable
from farandole.plan.cost.gradients import sharded_units
from farandole.plan.cost.layout import RunLayout
from farandole.plan.cost.predict import fits, predict
from farandole.plan.cost.rates import Rates
from farandole.plan.cost.stages import StageUnits, pipeline_step
from farandole.plan.profile import ModelProfile
from tests.unit.plan.cost.cases import cluster_of, transformer, with_tiers

RANKS, BATCH = 16, 256
PLANS: dict[str, dict[str, Any]] = {
    "data": {},
    "small buckets": {"bucket_bytes": 65536, "first_bucket_bytes": 65536},
    "zero 1": {"zero": 1},
    "zero 1, late rows": {"zero": 1, "overlap_gather": True},
    "zero 1, packed rows": {"zero": 1, "weight_codec": "int8"},
    "zero 2 in passes": {"zero": 2, "micro_batches": 4},
    "zero 3": {"zero": 3},
    "hybrid": {"zero": 3, "shard_within": "host"},
    "shards and copies": {"zero": 3, "shard": 8, "data": 2},
    "tensor": {"tensor": 4},
    "tokens": {"tensor": 4, "sequence_parallel": True, "recompute": "blocks"},
    "1f1b": {"pipeline": 4, "micro_batches": 8},
    "interleaved": {"pipeline": 4, "micro_batches": 8, "schedule": "interleaved"},
    "zb-v": {"pipeline": 4, "micro_batches": 8, "schedule": "zb-v"},
    "zb-h1, tensor": {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"},
    "pipeline, zero 3": {"pipeline": 2, "zero": 3},
    "heads": {"context": 4},
    "ring": {"context": 4, "context_kind": "ring"},
    "bf16": {"precision": "bf16", "recompute": "blocks", "clip_norm": 1.0},
    "int8": {"codec": "int8"},
    "accumulate": {"accumulate": 4},
    "disk": {"offload": "disk"},
}


def predicted(cluster: Cluster | None = None, /, **keys: Any) -> Prediction:
    profile = transformer(layers=8, hidden=128, sequence=64, heads=8)
    return predict(profile, cluster or cluster_of(4, RANKS), Candidate(Plan(**keys), RANKS, BATCH))


def test_tokens_are_gathered_again_for_the_gradients_of_weights_alone() -> None:
    """Not in a block that is computed again, whose second pass gathers them; nor where weights are frozen."""
    plain = transformer(layers=8, hidden=128, sequence=64, heads=8)
    frozen = replace(plain, units=tuple(replace(each, gradients=()) for each in plain.units))

    def gathered(profile: ModelProfile, **keys: Any) -> int:
        plan = Plan(tensor=4, sequence_parallel=True, **keys)
        calls = predict(profile, cluster_of(4, RANKS), Candidate(plan, RANKS, BATCH)).collectives
        return sum(each.count for each in calls if (each.operation, each.degree) == ("all_gather", "tensor"))

    edges = 2
    assert gathered(plain) == 8 * 6 + edges
    assert gathered(plain, recompute="blocks") == 8 * 6 + edges
    assert gathered(frozen) == 8 * 4 + edges


def value_of(cluster: Cluster, path: str) -> float:
    """Seconds of one unit of the coefficient at `path`."""
    found: Any = cluster
    words = path.split(".")
    for position, word in enumerate(words):
        if isinstance(found, dict):
            found = found[word]
        elif isinstance(found, tuple):
            found = found[int(word)]
        else:
            assert hasattr(found, word), f"{path}: {words[:position]}"
            found = getattr(found, word)
    return 1 / found.value if path.endswith("_per_second") else float(found.value)


@pytest.mark.parametrize("name", PLANS)
def test_terms_and_features_add_up(name: str) -> None:
    cluster = replace(
        cluster_of(4, RANKS), loader_bytes_per_second=Coefficient(1e4), rank_speeds={},
        codecs={"int8": CodecCost(Coefficient(2e-9), 0.26)}, disk_read_bytes_per_second=Coefficient(1e9),
        disk_write_bytes_per_second=Coefficient(5e8),
    )  # fmt: skip
    prediction = predicted(cluster, **PLANS[name])
    assert sum(prediction.terms.values()) == pytest.approx(prediction.seconds), "terms are disjoint"
    assert all(seconds >= 0 for seconds in prediction.terms.values()), prediction.terms
    assert prediction.low_seconds <= prediction.seconds <= prediction.high_seconds, "no interval is empty"
    linear = sum(count * value_of(cluster, path) for path, count in prediction.features.items())
    assert linear == pytest.approx(prediction.seconds), f"features give {linear} of {prediction.seconds} s"
    assert len(prediction.memory) == PLANS[name].get("pipeline", 1), "one for each place of the pipeline"
    assert all(each.state_bytes > 0 for each in prediction.memory), prediction.memory


ACCELERATORS = {"backend": "nccl"}


def coded_step(cluster: Cluster, **keys: Any) -> Prediction:
    profile = transformer(layers=8, hidden=256, sequence=64, heads=8)
    return predict(profile, cluster, Candidate(Plan(**keys), RANKS, BATCH))


@pytest.mark.parametrize("route", ["auto", "flat"])
def test_codecs_on_accelerators_cost_something_for_each_bucket(route: Any) -> None:
    """They take it from the computation, and features say how often."""
    codecs = {"int8": CodecCost(Coefficient(2e-11), 0.26, 2, Coefficient(4e-4))}
    cluster = replace(cluster_of(4, RANKS), codecs=codecs, fingerprint=ACCELERATORS)
    free = replace(cluster, codecs={"int8": replace(codecs["int8"], seconds_per_bucket=None)})
    before = 0.0
    for nbytes in (2**24, 2**20, 2**17):
        keys = {"codec": "int8", "route": route, "bucket_bytes": nbytes, "first_bucket_bytes": nbytes}
        found, without = coded_step(cluster, **keys), coded_step(free, **keys)
        linear = sum(count * value_of(cluster, path) for path, count in found.features.items())
        if route == "flat":  # else sums inside of hosts are in the computation, which no feature names
            assert linear == pytest.approx(found.seconds)
        assert sum(found.terms.values()) == pytest.approx(found.seconds)
        more = found.seconds - without.seconds
        assert more > before
        assert more == pytest.approx(found.terms["codec"] - without.terms["codec"])
        assert found.features["codecs.int8.seconds_per_bucket"] > 0
        before = more


def test_a_codec_on_an_accelerator_is_serial_with_its_messages() -> None:
    """One stream has both: what it computes is hidden by no message, as it is on a CPU with cores to spare."""
    costs = {"int8": CodecCost(Coefficient(3e-10), 0.26)}
    slow = with_tiers(replace(cluster_of(4, RANKS), codecs=costs), 0.2)
    on_cpus, there = (replace(slow, fingerprint={"backend": name}) for name in ("gloo", "nccl"))
    keys = {"codec": "int8", "route": "flat", "bucket_bytes": 2**20, "first_bucket_bytes": 2**20}
    hidden, seen = coded_step(on_cpus, **keys), coded_step(there, **keys)
    gradient_bytes = 4 * sum(
        unit.count * gradient.rows * gradient.columns
        for unit in transformer(layers=8, hidden=256, sequence=64, heads=8).units
        for gradient in unit.gradients
    )
    assert seen.terms["codec"] > 0.9 * 3e-10 * gradient_bytes
    assert hidden.terms["codec"] < 0.3 * seen.terms["codec"]


def test_a_codec_of_matrices_begins_with_each_of_them_and_sends_them_whole() -> None:
    """In a bucket of all, and on hosts of several ranks too; its ratio is that of the shapes."""
    costs = {"powersgd:rank=4": CodecCost(Coefficient(0.0), 1e-6, 4, Coefficient(1e-3))}
    cluster = replace(cluster_of(4, RANKS), codecs=costs, fingerprint=ACCELERATORS)
    found = {
        route: coded_step(cluster, codec="powersgd:4", route=route, bucket_bytes=2**26, first_bucket_bytes=2**26)
        for route in ("auto", "flat")
    }
    matrices = 8 * 4 + 2  # of 8 layers, the embedding, the head
    assert found["flat"].features["codecs.powersgd:rank=4.seconds_per_bucket"] == pytest.approx(matrices, rel=0.1)
    assert found["auto"].seconds == pytest.approx(found["flat"].seconds)
    other = replace(cluster, codecs={"powersgd:rank=4": replace(costs["powersgd:rank=4"], ratio=1.0)})
    keys = {"codec": "powersgd:4", "bucket_bytes": 2**26, "first_bucket_bytes": 2**26}
    assert coded_step(other, **keys).seconds == pytest.approx(coded_step(cluster, **keys).seconds)


@pytest.mark.parametrize("name", PLANS)
def test_faster_links_are_no_slower_and_nothing_beats_the_hardware(name: str) -> None:
    before = float("inf")
    for speed in (0.01, 0.1, 1.0, 10.0, 1e6):
        cluster = with_tiers(cluster_of(4, RANKS), speed)
        prediction = predicted(cluster, **PLANS[name])
        assert prediction.seconds <= before * (1 + 1e-9), f"links {speed} times as fast"
        before = prediction.seconds
        profile = transformer(layers=8, hidden=128, sequence=64, heads=8)
        flops = sum(unit.count * (unit.forward_flops + unit.backward_flops) for unit in profile.units) * BATCH
        precision = PLANS[name].get("precision", "fp32")
        peak = RANKS * cluster.device.compute[precision][-1].flops_per_second.value
        assert prediction.seconds >= flops / peak, "all ranks at their full rate"
        fastest = max(tier.collectives["send"].bytes_per_second.value for tier in cluster.tiers)
        # Of what is sent, part travels while ranks compute, but never more than in the whole step.
        sent = sum(each.count for each in prediction.collectives if each.operation != "send")
        assert not sent or prediction.seconds >= prediction.sent_bytes / (fastest * RANKS), "the links' full rate"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 12), (8, 32)])
def test_equal_stages_give_the_closed_form(schedule: str, ranks: int, micro_batches: int) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    plan = Plan(pipeline=ranks, schedule=schedule, micro_batches=micro_batches)
    layout = RunLayout.of(Candidate(plan, ranks, micro_batches), 8)
    times = [StageTimes(1.0 / chunks, 1.0 / chunks, 1.0 / chunks)] * (ranks * chunks)
    step = pipeline_step(times, layout)
    expected = 3.0 * micro_batches + bubble_seconds(schedule, ranks, 1.0, 1.0, 1.0)
    assert step.seconds == pytest.approx(expected, rel=1e-9), f"{schedule} on {ranks} ranks"
    assert step.without_transfers == pytest.approx(expected, rel=1e-9), "nothing travels"


def test_a_long_schedule_is_continued() -> None:
    random.seed(18)
    near = [[random.uniform(0.8, 1.2) for _ in range(3)] for _ in range(24)]
    times = [StageTimes(forward, inputs, weights, 0.05) for forward, inputs, weights in near]
    plan = Plan(pipeline=24, micro_batches=240)
    step = pipeline_step(times, RunLayout.of(Candidate(plan, 24, 240), 8))
    whole = simulate(build_schedule("1f1b", 24, 240), times).total_seconds
    assert step.seconds == pytest.approx(whole, rel=0.02), "few rounds, continued, beside all of them"


@pytest.mark.parametrize("shares_core", [False, True])
def test_a_table_of_buckets_is_replayed_as_buckets_are(shares_core: bool) -> None:
    random.seed(7)
    kinds = [BucketKind(4 * n, 4 * n, "none", 1.0) for n in (1000, 50_000, 700_000)]
    buckets = [
        replace(random.choice(kinds), place=place, progress=float(number))
        for place in range(3)
        for number in range(1, 40)
    ]
    begins, each, link = [0.0, 0.2, 0.9], [0.005, 0.0175, 0.01], LinkModel(2e7, 1e-4)
    table = BucketTable.of(buckets)
    loads = [
        BucketLoad(b.gradient_bytes, 1.5 * b.nbytes, 4, 0.0, 0.0, 0.0, 1e-4, b.nbytes * 5e-8, 1e-3)
        for b in table.kinds
    ]
    got = table.replay(loads, begins, each, link, slow=1.1, shares_core=shares_core)
    one_by_one, sent = list[BucketLoad](), 0.0
    for bucket in buckets:
        load = loads[table.kinds.index(bucket.kind())]
        alone = begins[bucket.place] + bucket.progress * each[bucket.place]
        one_by_one.append(load._replace(ready_seconds=alone + 0.1 * min(alone, sent)))
        sent += load.intra_host_seconds + load.on_link(link)
    expected = replay_buckets(one_by_one, link, shares_core=shares_core)
    assert got.end_seconds == pytest.approx(expected.end_seconds, rel=1e-12), "the recurrence, bucket by bucket"
    assert got.cpu_seconds == pytest.approx(expected.cpu_seconds, rel=1e-12), "of codecs and inside the host"
    assert [*table] == buckets, "the table has every bucket, in order"


def test_measured_units_are_taken_as_they_are() -> None:
    profile = transformer(layers=8, hidden=128, sequence=64, forward_seconds=0.01)
    one = predict(profile, cluster_of(1), Candidate(Plan(), 1, 4))
    assert one.terms["compute"] == pytest.approx(8 * 0.03 * 4), "8 layers, 4 samples, 10 ms forward and 20 back"
    assert one.features["profile.seconds"] == pytest.approx(8 * 0.03 * 4), "no figure of the cluster is in them"
    assert not one.collectives, "one rank sends nothing"
    units = [replace(each, times=replace(each.times, spread=0.1)) for each in profile.units if each.times]
    spread = replace(profile, units=tuple(units))
    wide = predict(spread, cluster_of(1), Candidate(Plan(), 1, 4))
    assert wide.low_seconds == pytest.approx(0.9 * wide.terms["compute"] + wide.terms["optimizer"]), "10 % less"
    far = predict(profile, cluster_of(1), Candidate(Plan(), 1, 512))
    assert any("512 samples a pass were not measured" in each for each in far.warnings), far.warnings
    assert not any("extrapolated" in each for each in one.warnings), one.warnings


def test_intervals_follow_those_of_the_cluster() -> None:
    cluster = cluster_of(4, RANKS)
    slow = cluster.tiers[1]
    costs = {
        name: replace(each, bytes_per_second=Coefficient(1e8, "measured", 0.5e8, 2e8))
        for name, each in slow.collectives.items()
    }
    wide = replace(cluster, tiers=(cluster.tiers[0], replace(slow, collectives=costs)))
    prediction = predicted(wide, zero=1)
    best, worst = (
        predicted(
            replace(wide, tiers=(wide.tiers[0], replace(slow, collectives={
                name: replace(each, bytes_per_second=Coefficient(speed)) for name, each in costs.items()
            }))), zero=1,
        ).seconds
        for speed in (2e8, 0.5e8)
    )  # fmt: skip
    assert (prediction.low_seconds, prediction.high_seconds) == pytest.approx((best, worst)), (
        "both ends, predicted"
    )
    assert best < prediction.seconds < worst, "a slow link matters here"


def test_slow_ranks_loaders_and_memory() -> None:
    even = predicted()
    slow = predicted(replace(cluster_of(4, RANKS), rank_speeds={3: 0.5, 99: 0.1}))
    assert slow.terms["straggler"] == pytest.approx(even.terms["compute"] + even.terms["optimizer"]), (
        "half as fast"
    )
    starved = predicted(replace(cluster_of(4, RANKS), loader_bytes_per_second=Coefficient(10.0)))
    assert starved.seconds == pytest.approx(8 * 64 * BATCH / RANKS / 10.0), "the loader is the step"
    assert fits(even, cluster_of(4, RANKS)), even.peak_bytes
    small = replace(cluster_of(4, RANKS).device, memory_bytes=Coefficient(float(even.peak_bytes - 1)))
    assert not fits(even, replace(cluster_of(4, RANKS), device=small)), "a byte too few"


@pytest.mark.parametrize(
    ("keys", "ranks", "batch", "words"),
    [
        ({}, 16, 100, ["global_batch = 100", "16 replicas", "use 96"]),
        ({"pipeline": 4}, 16, 4, ["global_batch = 4", "4 replicas x 8 micro-batches", "32"]),
        ({"tensor": 3}, 16, 64, ["tensor 3", "16"]),
        ({"pipeline": 16, "micro_batches": 16}, 16, 64, ["10 layers", "16 stages"]),
        ({"pipeline": 2, "pipeline_cuts": ("nowhere",)}, 2, 64, ["'nowhere'", "units: embedding"]),
        ({"pipeline": 2, "pipeline_cuts": ("layers.2", "layers.4")}, 2, 64, ["2 names", "2 stages"]),
        ({"pipeline": 3, "pipeline_cuts": ("layers.4", "layers.2")}, 3, 66, ["not in the order"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(keys: dict[str, Any], ranks: int, batch: int, words: list[str]) -> None:
    profile = transformer(layers=8, hidden=128, sequence=64, heads=8)
    keys = {"micro_batches": keys.get("pipeline", 0)} | keys if "pipeline_cuts" in keys else keys
    with pytest.raises(PlanError) as raised:
        predict(profile, cluster_of(4, RANKS), Candidate(Plan(**keys), ranks, batch))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_profile_of_another_device_is_named() -> None:
    plain, candidate = transformer(layers=8, hidden=128, sequence=64, heads=8), Candidate(Plan(), RANKS, BATCH)
    for name, device, is_other in (
        ("cpu", "cpu", False), ("cpu", "cuda", True), ("gpu", "cuda", False), ("gpu", "cpu", True),
        ("gpu", "", False),
    ):  # fmt: skip
        found = predict(replace(plain, device=device), cluster_of(4, RANKS, name=name), candidate)
        said = [each for each in found.warnings if "analyse the model again for this cluster" in each]
        assert len(said) == is_other, (name, device, found.warnings)


def test_what_autocast_leaves_in_float32_is_computed_and_gathered_so() -> None:
    plain = transformer(layers=8, hidden=128, sequence=64, heads=8, experts=4)

    def left(share: float) -> ModelProfile:
        units = [replace(each, uncast_flops=share * (each.count > 1) * each.forward_flops) for each in plain.units]
        return replace(plain, units=tuple(units))

    def computing(profile: ModelProfile, **keys: Any) -> float:
        cluster, candidate = cluster_of(4, RANKS), Candidate(Plan(**keys), RANKS, BATCH)
        return predict(profile, cluster, candidate, interval=False).terms["compute"]

    wide, narrow = computing(plain), computing(plain, precision="bf16")
    blocks = sum(each.count * each.forward_flops for each in plain.units if each.count > 1)
    share = blocks / sum(each.count * each.forward_flops for each in plain.units)
    flops_seconds = 2 * (wide - narrow)  # of fp32; at least, as 16 bits are also moved faster
    more = computing(left(0.5), precision="bf16") - narrow
    assert more == pytest.approx(0.25 * share * flops_seconds, rel=0.2), (wide, narrow, more)
    for keys in ({}, {"precision": "bf16", "bf16_parameters": True}):
        assert computing(left(0.5), **keys) == computing(plain, **keys), "nothing is cast"
    layout = RunLayout.of(Candidate(Plan(zero=3, precision="bf16"), RANKS, BATCH), 4)
    experts = sum(each.nbytes for each in plain.units[1].gradients if each.divided_by == "expert")
    stage = StageUnits([(1, 8)])
    (cast,), (uncast,) = (sharded_units(each, stage, layout) for each in (plain, left(0.5)))
    assert experts > 0
    assert uncast.nbytes == cast.nbytes
    assert uncast.gathered_bytes - cast.gathered_bytes >= experts // 2, "4 bytes an element, not 2"
    said = predict(left(0.5), cluster_of(4, RANKS), Candidate(Plan(precision="bf16"), RANKS, BATCH)).warnings
    assert any("experts of layers.0 compute in float32" in each for each in said), said


def test_units_without_a_recipe_stay_whole_and_are_named() -> None:
    prediction = predicted(tensor=4)
    assert any("leaves embedding, head whole" in each for each in prediction.warnings), prediction.warnings


def test_an_optimizer_starts_operations_for_each_tensor_of_its_rank() -> None:
    plain, cluster = transformer(layers=8, hidden=128, sequence=64, heads=8), cluster_of(4, RANKS)
    profile = replace(plain, optimizer_operations=10.0)
    facts = {name: replace(each, updates_at_once=True) for name, each in plain.memory.optimizer.items()}
    at_once = replace(profile, memory=replace(plain.memory, optimizer=facts))
    tensors = sum(unit.count * len(unit.gradients) for unit in profile.units)
    launch = cluster.device.launch_seconds.value
    for plan in (Plan(), Plan(zero=1), Plan(tensor=4)):
        candidate = Candidate(plan, RANKS, BATCH)
        took = [predict(each, cluster, candidate).terms["optimizer"] for each in (plain, profile, at_once)]
        assert took[1] - took[0] == pytest.approx(10 * launch * tensors), f"{plan}: each tensor has operations"
        assert took[2] - took[0] == pytest.approx(10 * launch), f"{plan}: all tensors at once have them once"
    divided = Candidate(Plan(pipeline=4, micro_batches=8), RANKS, BATCH)
    more = (
        predict(profile, cluster, divided).terms["optimizer"] - predict(plain, cluster, divided).terms["optimizer"]
    )
    assert 0 < more < 10 * launch * tensors, "a stage has some of the tensors"


def test_an_exchange_is_slower_only_while_something_is_computed() -> None:
    """However slow an exchange is beside a computation, what is left of it behind takes no longer than alone."""
    plain = cluster_of(4, RANKS)
    alone = predicted(zero=3).terms["shard"]
    slow = replace(plain, exchange_slowdown=Coefficient(1000.0))
    beside = predicted(slow, zero=3).terms["shard"]
    whole = sum(
        call.count * Rates(plain).exchange(call.operation, RANKS, 1, call.nbytes).seconds
        for call in predicted(zero=3).collectives
        if call.degree == "shard"
    )
    assert alone < beside <= whole * (1 + 1e-9), f"{alone}, {beside}, and {whole} if nothing is hidden"


def test_a_computation_is_slower_only_while_something_travels() -> None:
    """Backward of 4,000 samples hides all buckets but the last, and is slower for as long as they take."""
    plain = cluster_of(4, RANKS, latency_seconds=0.0)
    profile, plan = transformer(layers=8, hidden=128, sequence=64, heads=8), Candidate(Plan(), RANKS, 4000 * RANKS)
    alone, slow = (
        predict(profile, replace(plain, compute_slowdown=Coefficient(each)), plan) for each in (1.0, 1.5)
    )
    (buckets,) = {call.count for call in alone.collectives if call.degree == "data"}
    whole = sum(
        call.count * Rates(plain).exchange(call.operation, RANKS, 1, call.nbytes).seconds
        for call in alone.collectives
        if call.degree == "data"
    )
    assert buckets >= 1
    assert alone.terms["data"] <= whole < 0.01 * alone.terms["compute"]
    assert slow.terms["data"] - alone.terms["data"] <= 0.5 * whole * (1 + 1e-9)


def test_sums_of_shards_are_waited_for_on_cpus() -> None:
    plain = cluster_of(4, RANKS)
    here, there = (replace(plain, fingerprint={"backend": each}) for each in ("gloo", "nccl"))
    assert predicted(here, zero=3).terms["shard"] > predicted(there, zero=3).terms["shard"], (
        "nothing is hidden more"
    )


@pytest.mark.parametrize(("keys", "term", "passes", "starts"), [
    ({"tensor": 4}, "tensor", 3.0, 0),
    ({"context": 4, "context_kind": "heads"}, "context", 3.0, 0),
    ({"zero": 3}, "straggler", 2.0, 6 * 120),
])  # fmt: skip
def test_ranks_that_vary_wait_for_the_slowest_inside_of_passes(
    keys: dict[str, Any], term: Term, passes: float, starts: int
) -> None:
    """1.0294 standard deviations for four ranks (David and Nagaraja 2003); of ZeRO-3 on a CPU backward alone."""
    profile, cluster = transformer(layers=6, forward_seconds=1e-3), cluster_of(4)
    uneven = replace(profile, units=tuple(
        replace(unit, times=replace(unit.times, jitter=0.1)) if unit.times else unit for unit in profile.units
    ))  # fmt: skip
    candidate = Candidate(Plan(**keys), 4, 16)
    even, more = predict(profile, cluster, candidate), predict(uneven, cluster, candidate)
    started = cluster.device.launch_seconds.value * starts
    forward = predict(profile, cluster, Candidate(Plan(**(keys | {"zero": 0})), 4, 16)).terms["compute"] / 3
    waited = 0.10294 * (passes * forward + started)
    assert more.terms[term] - even.terms.get(term, 0.0) == pytest.approx(waited, rel=1e-3)
    assert more.seconds - even.seconds == pytest.approx(waited, rel=1e-3)


def test_ranks_that_meet_once_a_step_have_no_such_term() -> None:
    profile, cluster = transformer(layers=6, forward_seconds=1e-3), cluster_of(4)
    uneven = replace(profile, units=tuple(
        replace(unit, times=replace(unit.times, jitter=0.1)) if unit.times else unit for unit in profile.units
    ))  # fmt: skip
    candidate = Candidate(Plan(), 4, 16)
    assert predict(uneven, cluster, candidate).seconds == predict(profile, cluster, candidate).seconds


def test_operations_on_dtensors_are_longer_to_start() -> None:
    profile, cluster = replace(transformer(layers=6), optimizer_operations=10.0), cluster_of(4)
    whole, shards = (predict(profile, cluster, Candidate(Plan(zero=zero), 4, 16)).features for zero in (1, 3))
    launches = [each["device.launch_seconds"] for each in (whole, shards)]
    tensors = sum(unit.count * len(unit.gradients) for unit in profile.units)
    units = 6 * (90 + 120)
    assert launches[1] - launches[0] - units == pytest.approx(3 * 10 * tensors), "beside what FSDP2 does for units"
