"""The simulation by roles is that of all ranks, and closed forms come out."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from farandole.core.schedule.bubble import bubble_seconds
from farandole.core.vocabulary.degrees import Degrees
from farandole.plan.scale.noise import Noise
from farandole.plan.scale.noisy_step import noisy_step_seconds
from farandole.plan.scale.simulated_run import SimulatedJob
from farandole.plan.scale.step_roles import factors_by_replica, step_seconds
from farandole.plan.scale.step_work import StageWork, StepWork
from tests.unit.plan.simulated_jobs import LINK, all_ranks_step_seconds, data_parallel, pipelined

JOBS = {
    "data parallel": data_parallel(64),
    "tensor inside of data": StepWork(
        Degrees(data=8, tensor=4), (StageWork(0.02, 0.02, 0.02, 0.01, 0.01),), ((),), LINK,
        optimizer_seconds=0.004, exposed_seconds=0.01,
    ),
    "1f1b": pipelined(Degrees(pipeline=4, data=4, tensor=2)),
    "interleaved": pipelined(Degrees(pipeline=4, data=2), "interleaved", 2),
    "zb-h1": pipelined(Degrees(pipeline=4, data=2), "zb-h1"),
    "zb-v": pipelined(Degrees(pipeline=4, data=2), "zb-v", 2),
    "zero-3": replace(data_parallel(16), keeps_in_step=("data", "shard", "expert", "context", "tensor")),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("slow", [{}, {3: 1.5}, {0: 1.2, 5: 1.7, 6: 1.1}])
def test_roles_give_what_a_simulation_of_all_ranks_gives(name: str, slow: dict[int, float]) -> None:
    work = JOBS[name]
    whole = all_ranks_step_seconds(SimulatedJob(work, 4, steps=3, slow_ranks=slow))
    assert step_seconds(work, slow) == whole, f"{name} with {slow}: not the same as all {work.ranks} ranks"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_equal_stages_give_the_closed_form(schedule: str) -> None:
    for ranks, micro_batches in ((2, 4), (4, 8), (8, 32)):
        chunks = 2 if schedule == "interleaved" else 1
        stages = (StageWork(0.1 / chunks, 0.1 / chunks, 0.1 / chunks),) * (ranks * chunks)
        work = StepWork(
            Degrees(pipeline=ranks), stages, ((),) * ranks, LINK, schedule, micro_batches,
            chunks if schedule == "interleaved" else 0,
        )  # fmt: skip
        expected = 0.3 * micro_batches + bubble_seconds(schedule, ranks, 0.1, 0.1, 0.1, chunks=work.chunks)
        assert step_seconds(work) == pytest.approx(expected, rel=1e-9), f"{schedule}, {ranks} ranks"


def test_data_parallel_gives_the_closed_form() -> None:
    work = data_parallel(16)
    bucket = work.buckets[0][0]
    last = bucket.sent_bytes / 1e9 + 2 * 20e-6
    expected = 0.005 + 0.0005 + 0.09 + last  # the link is faster than backward: only the last bucket shows
    assert step_seconds(work) == pytest.approx(expected, rel=1e-9), "forward, backward, the last bucket, optimizer"
    slow = 0.005 * 1.5 + 0.0005 + 0.09 * 1.5 + last
    assert step_seconds(work, {3: 1.5}) == pytest.approx(slow, rel=1e-9), "as long as its slowest rank"


def test_tensor_ranks_are_as_slow_as_the_slowest_of_them() -> None:
    work = JOBS["tensor inside of data"]
    assert step_seconds(work, {5: 2.0}) == pytest.approx(0.12 + 0.02 + 0.01 + 0.008), "exchanges are not slower"


@pytest.mark.parametrize("tail", ["gaussian", "exponential", "measured"])
@pytest.mark.parametrize("name", ["data parallel", "1f1b"])
def test_noise_costs_what_a_simulation_of_all_ranks_says(name: str, tail: str) -> None:
    noise = Noise.of_times([1.0, 1.0, 1.1, 0.9, 1.05, 1.3]) if tail == "measured" else Noise(0.1, tail)  # type: ignore[arg-type]
    work = data_parallel(16) if name == "data parallel" else JOBS[name]
    whole = all_ranks_step_seconds(SimulatedJob(work, 4, steps=120, noise=noise))
    predicted = noisy_step_seconds(work, noise)
    assert predicted == pytest.approx(whole, rel=0.02), f"{name}, {tail}"
    assert predicted > 1.02 * step_seconds(work), "noise costs something"


def test_noise_beside_a_slow_rank_hides_behind_it() -> None:
    work = data_parallel(64)
    alone = noisy_step_seconds(work, Noise(0.05)) - step_seconds(work)
    beside = noisy_step_seconds(work, Noise(0.05), {3: 1.5}) - step_seconds(work, {3: 1.5})
    assert 0 <= beside < 0.3 * alone, "the others are waited for no longer"
    assert noisy_step_seconds(work, Noise(0.0), {3: 1.5}) == step_seconds(work, {3: 1.5}), "no noise"


def test_many_ranks_are_as_few_replicas() -> None:
    large = pipelined(Degrees(pipeline=16, data=256, tensor=4), micro_batches=64)
    many = data_parallel(16_384)
    for work, replicas in ((many, 16_384), (large, 256)):
        assert work.ranks == 16_384, "ranks"
        found = factors_by_replica(work, {3: 1.5})
        assert len(found) == 2, "one slow replica, and one for all others"
        assert sum(found.values()) == work.replicas == replicas, "all of them are counted"
    tracemalloc.start()
    steps = [step_seconds(many, {3: 1.5}), step_seconds(large, {3: 1.5})]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64e6, "memory does not grow with the ranks"
    assert steps[0] == pytest.approx(step_seconds(data_parallel(8), {3: 1.5})), "as 8 ranks over the same link"
    assert steps[1] > step_seconds(large), "a slow rank costs something"
    assert noisy_step_seconds(large, Noise(0.05)) > step_seconds(large), "the largest of 16,384"
