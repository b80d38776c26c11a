"""The schedule of a plan's pipeline: simulated with equal stages, drawn, and its bubble and memory in flight."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.schedule.actions import Schedule
from ..core.schedule.build import build_schedule
from ..core.schedule.simulate import (
    BatchesInARow,
    Simulation,
    StageTimes,
    draw_grid,
    draw_svg,
    in_flight,
    simulate,
)
from ..core.vocabulary.errors import PlanError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.units import format_share

MOST_ACTIONS = 200_000


@dataclass(frozen=True)
class PipelinePage:
    """A schedule and what it costs, with stages that take equally long."""

    schedule: Schedule
    simulation: Simulation
    batches: int = 1
    """That follow each other without a flush."""
    bubble_share: float = 0.0
    """The part of a step in which the busiest rank waits; of several batches, of each further one."""

    @property
    def title(self) -> str:
        """One line."""
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {self._parts} "
            f"micro-batches; bubble {format_share(self.bubble_share)} of a step"
        )

    @property
    def _parts(self) -> str:
        count = self.schedule.micro_batches // self.batches
        return str(count) if self.batches == 1 else f"{self.batches} batches in a row of {count}"

    def to_text(self) -> str:
        """Return the page: a grid, and figures."""
        chunks = self.schedule.stages // self.schedule.ranks
        kept = ", ".join(map(str, in_flight(self.schedule)))
        return (
            f"{self.title}\n\n{draw_grid(self.simulation, unit_seconds=1.0 / chunks)}\n"
            f"activations of so many micro-batches are kept at once, by rank (in stages): {kept}\n"
            "forward and both parts of backward are taken as equally long, transfers as free\n"
        )

    def to_svg(self) -> str:
        """Return the drawing."""
        return draw_svg(self.simulation, title=self.title)

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values; times are in units of one forward pass of a rank."""
        return {
            "version": 1,
            "schedule": self.schedule.name,
            "ranks": self.schedule.ranks,
            "stage_ranks": list(self.schedule.stage_ranks),
            "micro_batches": self.schedule.micro_batches // self.batches,
            "batches": self.batches,
            "actions": [[str(action) for action in actions] for actions in self.schedule.actions],
            "in_flight": list(in_flight(self.schedule)),
            "bubble_share": self.bubble_share,
            "spans": [{**asdict(span), "action": str(span.action)} for span in self.simulation.spans],
        }


def pipeline_page(plan: Plan, micro_batches: int = 0) -> PipelinePage:
    """Return the schedule of `plan`; `micro_batches` instead of the plan's, if not 0.

    Raises `PlanError` when the plan has no pipeline of a known size, or its schedule does not fit.
    """
    if not isinstance(plan.pipeline, int) or plan.pipeline < 2:
        raise PlanError(
            f"plan: pipeline = {plan.pipeline!r}, and there is nothing to draw without a pipeline",
            remedy="set pipeline to a number of ranks from 2 on: --set pipeline=4",
        )
    count = micro_batches or plan.micro_batches or 2 * plan.pipeline
    if count < 1 or count * plan.pipeline * 6 > MOST_ACTIONS:
        raise PlanError(
            f"plan: {count} micro-batches on {plan.pipeline} ranks",
            remedy=f"draw at least one, and at most {MOST_ACTIONS // (6 * plan.pipeline)}",
        )
    if plan.weight_versions > 1:
        return _in_a_row(plan.pipeline, count)
    schedule = build_schedule(plan.schedule, plan.pipeline, count, plan.chunks)
    chunks = schedule.stages // schedule.ranks
    each = 1.0 / chunks
    simulation = simulate(schedule, [StageTimes(each, each, each)] * schedule.stages)
    return PipelinePage(schedule, simulation, bubble_share=simulation.bubble_share)


def _in_a_row(ranks: int, micro_batches: int) -> PipelinePage:
    """Return two batches without a flush between them; the bubble is that of a step once the pipeline is full."""
    rows, times = BatchesInARow(ranks, micro_batches), [StageTimes(1.0, 1.0, 1.0)] * ranks
    two, three = (simulate(rows.schedule(batches), times) for batches in (2, 3))
    step = three.total_seconds - two.total_seconds
    bubble = step - (max(three.busy_seconds) - max(two.busy_seconds))
    return PipelinePage(rows.schedule(2), two, 2, bubble / step)
