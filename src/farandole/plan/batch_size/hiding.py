"""The smallest global batch at which communication hides behind computation.

[Note: hiding communication] What is exchanged does not depend on the batch, and what is computed grows with it. So
the exposed share of a step falls while the batch grows, and there is a smallest batch at which it is below a
limit. It is found by doubling, then by bisection: about 2 log2(batch) predictions. What a larger batch
never hides is the exchange of the gradients that are ready last: it becomes small beside a long step, not zero.
"""

from __future__ import annotations

from .step_times import StepTime, StepTimes


def hiding_batch(times: StepTimes, *, multiple: int, most: int, exposed_share: float) -> StepTime | None:
    """Return the step at the smallest batch whose exposed share is at most `exposed_share`.

    See [Note: hiding communication].

    Args:
        times: predicts a step; its exposed share must not grow with the batch.
        multiple: the batch is a multiple of it: the ranks, times the micro-batches of a step.
        most: the largest batch to look at, in samples.
        exposed_share: of the step, above 0 and below 1.

    Returns:
        The step; None if no batch up to `most`, that fits into the memory, hides so much.
    """
    top = most // multiple
    low, high = 0, min(1, top)  # in multiples; at `low` it neither hides nor is too large
    found = None
    while high > low:
        found = times(high * multiple)
        if _is_enough(found, exposed_share):
            break
        low, high = high, min(2 * high, top)
    if found is None or not _is_enough(found, exposed_share):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        tried = times(middle * multiple)
        if _is_enough(tried, exposed_share):
            high, found = middle, tried
        else:
            low = middle
    return found if found.fits else None


def _is_enough(step: StepTime, exposed_share: float) -> bool:
    """Return whether communication hides, or the batch does not fit: no larger one is of interest."""
    return not step.fits or step.exposed_share <= exposed_share
