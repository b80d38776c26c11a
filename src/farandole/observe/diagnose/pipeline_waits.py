"""Pipelines: what the schedule's bubble, a slow stage and the transfers between stages cost.

See [Note: three reasons to wait] in `figures.pipeline_seconds`.

[Note: what a micro-batch costs] However small it is, its passes go through the parameters six times: weights are
read twice, a gradient is written, and added to what is there. SGD goes through them three times, Adam seven: what
the optimizer takes tells what one micro-batch more takes, of which half of the bubble's share is waited for again.
Its transfers are half as large and twice as many: what nothing hides of them is taken to double.
"""

from __future__ import annotations

from ...core.vocabulary.events import (
    OPTIMIZER,
    SETUP_BATCH,
    SETUP_OPTIMIZER,
    SETUP_PIPELINE_RANK,
)
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.units import format_seconds
from ..figures.figures import mean
from ..figures.pipeline_seconds import PipelineSeconds, measure_pipeline
from .facts.finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, confidence, format_cost
from .facts.proposals import command_with
from .facts.step_table import StepTable


def find_pipeline(table: StepTable) -> list[Finding]:
    """Find what pipelines wait for."""
    measured = measure_pipeline(table.records.timelines, table.rows)
    if measured is None:
        return []
    computing = measured.computing
    costs = {
        "bubble": measured.bubble,
        "slow-stage": measured.slow_stage,
        "pipeline-communication": measured.transfer,
    }
    found = []
    places = [(each.rank, int(each.setup[SETUP_PIPELINE_RANK] or 0)) for each in table.records.timelines]
    for kind, seconds in costs.items():
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        cost = format_cost(seconds, share)
        evidence = (f"computing of a step by rank of the pipeline: {', '.join(map(format_seconds, computing))}",)
        title, fixes, late = _words(kind, cost, seconds, measured, table, ranks=places)
        found.append(
            Finding(kind, title, seconds, share, late, evidence=evidence, fixes=fixes,
                    confidence=confidence(len(table.steps)))
        )  # fmt: skip
    return found


def _words(
    kind: str,
    cost: str,
    seconds: float,
    measured: PipelineSeconds,
    table: StepTable,
    *,
    ranks: list[tuple[int, int]],
) -> tuple[str, tuple[Fix, ...], tuple[int, ...]]:
    """`ranks`: each rank with its place in the pipeline."""
    computing, schedule, records = measured.computing, measured.schedule, table.records
    if kind == "bubble":
        fix = _more_micro_batches(table, measured, seconds)
        return (
            f"the bubble of schedule {schedule.name} with {schedule.micro_batches} micro-batches takes {cost}",
            (fix,),
            (),
        )
    if kind == "slow-stage":
        slow = computing.index(max(computing))
        more = max(computing) / measured.usual_seconds - 1
        stages = schedule.stages_of(slow)
        name = " and ".join(f"stage {stage} ({_begin_of(stage, measured.cuts)})" for stage in stages)
        verb = "take" if len(stages) > 1 else "takes"
        gain = Gain(seconds, "all of it, if the layers can be divided evenly")
        fix = Fix("move a cut (pipeline_cuts), or cut the model into smaller layers", "", gain)
        if records.plan.get("pipeline_cuts"):
            cuts: dict[str, list[str]] = {"pipeline_cuts": []}
            fix = Fix("let the layers be measured and divided", command_with(records, cuts), gain, cuts)
        late = tuple(rank for rank, place in ranks if place == slow)
        if measured.slow_ranks[slow]:
            late = measured.slow_ranks[slow]
            name = f"{name_ranks(late, most=SHOWN_RANKS)} of {name}"
            verb = "takes" if len(late) == 1 else "take"
            fix = Fix(
                "look for what is slower there than on ranks with the same stage: clocks, temperature, hooks",
                "", Gain(seconds, "all of it, if it is as fast as they are"),
            )  # fmt: skip
        return f"{name} {verb} {more:.0%} longer than the mean, which costs {cost}", (fix,), late
    fix = Fix("cut where less travels, or use fewer and larger micro-batches")
    return f"transfers between stages take {cost} that nothing hides", (fix,), ()


def _more_micro_batches(table: StepTable, measured: PipelineSeconds, seconds: float) -> Fix:
    """Return twice as many micro-batches, if that saves time. See [Note: what a micro-batch costs]."""
    count, setup = measured.schedule.micro_batches, table.records.timelines[0].setup
    stepping = max(mean([cell.phases.get(OPTIMIZER, 0.0) for cell in own]) for own in table.cells)
    more = count * stepping * (2 if setup.get(SETUP_OPTIMIZER) == "SGD" else 1)
    more = more * (1 + seconds / 2 / measured.usual_seconds) + measured.transfer
    batch, saved = setup.get(SETUP_BATCH), seconds / 2 - more
    if saved < LEAST_SHARE * table.step_seconds or (isinstance(batch, int) and batch % (2 * count)):
        return Fix(f"a larger batch, a multiple of {2 * count}, in so many micro-batches")
    changes = {"micro_batches": 2 * count}
    gain = Gain(saved, f"half of it, less {format_seconds(more)} that {count} micro-batches more cost")
    return Fix("more and smaller micro-batches", command_with(table.records, changes), gain, changes)


def _begin_of(stage: int, cuts: list[str]) -> str:
    return f"from {cuts[stage - 1]!r}" if 0 < stage <= len(cuts) else "from the input"
