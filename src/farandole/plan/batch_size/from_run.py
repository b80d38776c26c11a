"""The batch size for the link of a run that was recorded."""

from __future__ import annotations

from functools import partial

from ...core.step_model.prediction import MeasuredStep
from .advice import BatchAdvice, BatchQuestion, advise
from .step_times import StepTime


def advise_run(step: MeasuredStep, *, critical_batch: float | None = None) -> BatchAdvice:
    """Return which batch a run should take.

    `critical_batch`: in samples, instead of what the run measured itself. Raises `ConfigError` if it is not
    above 0.
    """
    critical = step.critical_batch if critical_batch is None else critical_batch
    question = BatchQuestion(ranks=step.ranks, current=step.global_batch, critical_batch=critical)
    times = {codec: partial(_time_of_run, step, codec) for codec in step.ratios}
    return advise(times, question, step.notes)


def _time_of_run(step: MeasuredStep, codec: str, global_batch: int) -> StepTime:
    seconds, exposed = step.at(global_batch, codec)
    return StepTime(global_batch, seconds, exposed)
