"""The bubble of the named schedules in closed form: stages take equally long, and transfers take no time.

p ranks, v stages a rank. F, I and W: seconds of forward, backward of inputs and backward of weights of one
micro-batch on all stages of a rank together.
"""

from __future__ import annotations

from ..vocabulary.errors import PlanError
from ..vocabulary.schedule_names import chunks_of, require_schedule


def bubble_seconds(
    name: str, ranks: int, forward: float, backward_input: float, backward_weight: float, *, chunks: int = 0
) -> float:
    """Return the seconds that each rank waits in a step; the times are seconds.

    Valid from as many micro-batches as ranks on, ``zb-v`` from 2 p - 1 on.

    - gpipe, 1f1b: (p - 1) (F + I + W)
    - interleaved: that over v (Narayanan et al. 2104.04473, section 2.2)
    - zb-h1: (p - 1) (F + max(I - W, 0)); the paper has I >= W (Qi et al. 2401.10241, table 1)
    - zb-v: (p - 1) (F + I - W) / 2 with equal times; with others `PlanError`: to be simulated
    """
    require_schedule(name, chunks)
    if name in ("gpipe", "1f1b", "interleaved"):
        return (ranks - 1) * (forward + backward_input + backward_weight) / chunks_of(name, chunks)
    if name == "zb-h1":
        return (ranks - 1) * (forward + max(backward_input - backward_weight, 0.0))
    if not forward == backward_input == backward_weight:
        raise PlanError("schedule 'zb-v' has no closed form unless all times are equal", remedy="simulate it")
    return (ranks - 1) * (forward + backward_input - backward_weight) / 2
