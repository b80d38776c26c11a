"""The bubble of pipeline schedules and the automatic split, measured on ranks that sleep instead of compute.

    python benchmarks/pipeline.py [--micro-batches 4 8 16] [--schedules gpipe 1f1b no-flush split]

Four processes on this machine. A layer sleeps in forward, and in backward for its input and for its weight, so
that cores do not matter. Prints for each schedule the measured bubble (the step without the computing of a rank,
mean over ranks) and that of the formula; "no-flush" is 1f1b with weight_versions = 2, once the pipeline is full.
Then, of twelve unequal layers, the split by measured cost, the best one by brute force, and the measured step
beside the simulated one.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn

import farandole as fd
from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import StageTimes, bubble_seconds, simulate
from farandole.core.vocabulary.events import Event, PipelineAction
from farandole.parallel.model import DistributedModel
from models import Sleep, SleepForWeights, mean_square
from shared import is_main, read_options, run_on_ranks

RANKS = 4
SECONDS = 0.15
"""Of each part (forward, input, weight) of a rank's layers with one micro-batch."""
STEPS = 1
"""After a first one, in which the model is cut."""
FILLING, IN_A_ROW = 2, 4
"""Steps without a flush: until the pipeline is full, and measured."""
UNEQUAL = (20, 36, 12, 48, 28, 28, 16, 40, 24, 32, 44, 20)
"""Milliseconds of each part of twelve layers."""


class Sleeper(nn.Module):
    """Sleeps as long in forward as for each part of backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        y: torch.Tensor = Sleep.apply(x, self.seconds) + SleepForWeights.apply(self.weight, self.seconds)
        return y


class _Busy:
    """Adds up what this rank computes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, PipelineAction):
            self.seconds += event.end_seconds - event.begin_seconds


def chain(seconds: list[float], plan: fd.Plan) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return layers that sleep so long, divided by the plan, their optimizer, and a batch."""
    model = nn.Sequential(*[Sleeper(each) for each in seconds])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, plan)
    batch = torch.ones(plan.micro_batches, 4).requires_grad_()  # the first stage sleeps for its input, too
    return model, optimizer, batch


def measure(seconds: list[float], plan: fd.Plan) -> tuple[float, float, Any]:
    """Train a chain of sleeping layers; return step and computing of the quietest step, and the pipeline."""
    model, _, batch = chain(seconds, plan)
    times = []
    for _ in range(STEPS + 1):
        fd.barrier()
        busy = fd.world().session.recorder = _Busy()
        begin = time.perf_counter()
        fd.step(model, mean_square, batch, batch.detach())
        times.append((time.perf_counter() - begin, busy.seconds))
    return *min(times[1:]), DistributedModel.of(model).pipeline


def _cut_evenly(layers: int, stages: int) -> tuple[str, ...]:
    return tuple(str(layers * stage // stages) for stage in range(1, stages))


def bubbles(names: list[str], counts: list[int]) -> None:
    """Measure the bubble of each schedule."""
    if is_main():
        print("schedule      m   formula  measured  difference", flush=True)
    for schedule in names:
        chunks = 2 if schedule == "interleaved" else 1
        stages = RANKS * chunks
        for count in counts:
            plan = fd.Plan(
                pipeline=RANKS, schedule=schedule, micro_batches=count, pipeline_cuts=_cut_evenly(stages, stages)
            )
            step, busy, _ = measure([SECONDS / chunks] * stages, plan)
            expected = bubble_seconds(schedule, RANKS, SECONDS, SECONDS, SECONDS)
            measured = fd.mean(step - busy)
            if is_main():
                print(
                    f"{schedule:<12} {count:>2} {1000 * expected:>6.1f} ms {1000 * measured:>6.1f} ms "
                    f"{measured / expected - 1:>9.1%}",
                    flush=True,
                )


def without_flush(counts: list[int]) -> None:
    """Measure the bubble of batches in a row, in a loop that does not read the loss."""
    for count in counts:
        plan = fd.Plan(
            pipeline=RANKS, weight_versions=2, micro_batches=count, pipeline_cuts=_cut_evenly(RANKS, RANKS)
        )
        model, optimizer, batch = chain([SECONDS] * RANKS, plan)
        begin, busy = 0.0, _Busy()
        for step in range(FILLING + IN_A_ROW):
            if step == FILLING:
                begin, busy = time.perf_counter(), _Busy()
            fd.world().session.recorder = busy
            optimizer.zero_grad()
            fd.step(model, mean_square, batch, batch.detach())
            optimizer.step()
        measured = fd.mean((time.perf_counter() - begin - busy.seconds) / IN_A_ROW)
        fd.drain(model)
        flush = bubble_seconds("1f1b", RANKS, SECONDS, SECONDS, SECONDS)
        if is_main():
            print(
                f"{'no-flush':<12} {count:>2} {0.0:>6.1f} ms {1000 * measured:>6.1f} ms "
                f"{measured / flush:>9.1%} of 1f1b's bubble",
                flush=True,
            )


def split() -> None:
    """Let twelve unequal layers be divided by measured cost."""
    seconds = [each / 1000 for each in UNEQUAL]
    plan = fd.Plan(pipeline=RANKS, micro_batches=8)
    step, _, pipeline = measure(seconds, plan)
    cuts = [int(name) for name in pipeline.cut.stage_names]
    best = min(_slowest(seconds, chosen) for chosen in itertools.combinations(range(1, len(seconds)), RANKS - 1))
    bounds = [0, *cuts, len(seconds)]
    times = [sum(seconds[a:b]) for a, b in itertools.pairwise(bounds)]
    simulated = simulate(build_schedule("1f1b", RANKS, 8), [StageTimes(t, t, t) for t in times]).total_seconds
    if is_main():
        print(f"cuts {cuts}: slowest stage {3000 * max(times):.0f} ms, best by brute force {3000 * best:.0f} ms")
        print(f"step: simulated {1000 * simulated:.1f} ms, measured {1000 * step:.1f} ms", end=", ")
        print(f"{step / simulated - 1:+.1%}")


def _slowest(seconds: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *cuts, len(seconds)]))


def main() -> None:
    """Start the ranks, or be one."""
    options = read_options(
        __doc__,
        micro_batches=[4, 8, 16],
        schedules=["gpipe", "1f1b", "interleaved", "zb-h1", "no-flush", "split"],
    )
    run_on_ranks(RANKS, "--quiet")
    torch.set_num_threads(1)
    fd.init(progress=False)
    bubbles([name for name in options.schedules if name not in ("split", "no-flush")], options.micro_batches)
    if "no-flush" in options.schedules:
        without_flush(options.micro_batches)
    if "split" in options.schedules:
        split()
    fd.shutdown()


if __name__ == "__main__":
    main()
