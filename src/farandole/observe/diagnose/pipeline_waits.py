"""Pipelines: what the schedule's bubble, a slow stage and the transfers between stages cost.

See [Note: three reasons to wait] in `figures.pipeline_seconds`.
"""

from __future__ import annotations

from ...core.vocabulary.events import SETUP_PIPELINE, SETUP_PIPELINE_RANK
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.units import format_seconds
from ..figures.pipeline_seconds import PipelineSeconds, measure_pipeline
from .facts.evidence import LEAST_SHARE, SHOWN_RANKS, confidence, format_cost
from .facts.finding import Finding, Fix, Gain
from .facts.step_table import StepTable


def is_pipeline(table: StepTable) -> bool:
    """Return whether the ranks form pipelines."""
    return any(timeline.setup.get(SETUP_PIPELINE) for timeline in table.records.timelines)


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
        title, fixes, late = _words(kind, cost, seconds, measured, ranks=places)
        found.append(
            Finding(kind, title, seconds, share, late, evidence=evidence, fixes=fixes,
                    confidence=confidence(len(table.steps)))
        )  # fmt: skip
    return found


def _words(
    kind: str, cost: str, seconds: float, measured: PipelineSeconds, *, ranks: list[tuple[int, int]]
) -> tuple[str, tuple[Fix, ...], tuple[int, ...]]:
    """`ranks`: each rank with its place in the pipeline."""
    count, computing = measured.schedule.micro_batches, measured.computing
    if kind == "bubble":
        fix = Fix(
            "more and smaller micro-batches",
            f"micro_batches = {2 * count}",
            Gain(seconds / 2, "half of it, if half a micro-batch takes half the time"),
            {"micro_batches": 2 * count},
        )
        return (
            f"the bubble of schedule {measured.schedule.name} with {count} micro-batches takes {cost}",
            (fix,),
            (),
        )
    if kind == "slow-stage":
        slow = computing.index(max(computing))
        more = max(computing) / measured.usual_seconds - 1
        stages = measured.schedule.stages_of(slow)
        name = " and ".join(f"stage {stage} ({_begin_of(stage, measured.cuts)})" for stage in stages)
        verb = "take" if len(stages) > 1 else "takes"
        fix = Fix(
            "leave pipeline_cuts out, and the layers are measured and divided; or move a cut",
            "pipeline_cuts = []",
            Gain(seconds, "all of it, if the layers can be divided evenly"),
        )
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


def _begin_of(stage: int, cuts: list[str]) -> str:
    return f"from {cuts[stage - 1]!r}" if 0 < stage <= len(cuts) else "from the input"
