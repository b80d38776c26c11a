"""Steps as work, for tests of plan/scale: figures that are easy to reckon with."""

from __future__ import annotations

from pathlib import Path

from farandole.core.step_model.link import LinkModel
from farandole.core.vocabulary.degrees import Degrees
from farandole.core.vocabulary.events import StepDone
from farandole.core.vocabulary.spec import Plan
from farandole.observe.record.simulated_run import write_simulated_run
from farandole.plan.scale.simulated_run import SimulatedJob, job_events
from farandole.plan.scale.step_work import GradientBucket, StageWork, StepWork

LINK = LinkModel(1e9, 20e-6)


def buckets(count: int = 8, nbytes: int = 4_000_000) -> tuple[GradientBucket, ...]:
    """Return buckets that become ready evenly through backward."""
    return tuple(GradientBucket(nbytes, 1.5 * nbytes, 2, i / count, (i + 1) / count) for i in range(count))


def data_parallel(ranks: int, **changes: object) -> StepWork:
    """Return a step of 90 ms of computing, whose exchange is almost hidden."""
    values = {"optimizer_seconds": 0.005, "data_seconds": 0.0005, "rank_samples": 8, **changes}
    return StepWork(Degrees(data=ranks), (StageWork(0.03, 0.03, 0.03),), (buckets(),), LINK, **values)  # type: ignore[arg-type]


def pipelined(degrees: Degrees, schedule: str = "1f1b", chunks: int = 1, **changes: object) -> StepWork:
    """Return a step of 8 micro-batches of 30 ms a rank."""
    each = 0.01 / chunks
    stages = (StageWork(each, each, each, send_seconds=0.0005),) * (degrees.pipeline * chunks)
    values = {
        "micro_batches": 8, "schedule_name": schedule, "optimizer_seconds": 0.005, "rank_samples": 8,
        "chunks": chunks if schedule == "interleaved" else 0, **changes,
    }  # fmt: skip
    return StepWork(degrees, stages, (buckets(4),) * degrees.pipeline, LINK, **values)  # type: ignore[arg-type]


def all_ranks_step_seconds(job: SimulatedJob) -> float:
    """Return the mean step of a simulation of every rank, after the first steps."""
    ends: dict[int, float] = {}
    for _, event in job_events(job):
        if isinstance(event, StepDone):
            ends[event.step] = max(ends.get(event.step, 0.0), event.end_seconds)
    skip = min(2, job.steps - 1)
    return (ends[job.steps] - ends[skip]) / (job.steps - skip)


def write(directory: Path, job: SimulatedJob, plan: Plan | None = None) -> Path:
    """Write a simulated run."""
    write_simulated_run(
        directory, job_events(job), plan=plan or Plan(), size=job.work.ranks, simulated={"steps": job.steps}
    )
    return directory
