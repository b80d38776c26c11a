"""How the computing of a run's ranks varies from step to step: what simulations of more ranks resample."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import OPTIMIZER
from ..figures.step_parts import COMPUTE
from ..read.run_reader import read_run
from .facts.step_table import make_step_table

_LEAST_STEPS = 8


def work_factors(run_directory: Path) -> list[float]:
    """Return the computing of each step of each rank after the warm-up, over that rank's median.

    Forward and backward count, not the optimizer. That a rank is slower than the others in every step is no
    variation, so each rank is compared with itself.

    Raises:
        DataError: it is no run, or its records do not tell computing from waiting, or have too few steps.
    """
    records = read_run(run_directory, for_diagnosis=True)
    table = make_step_table(records) if records.timelines else None
    names = [name for name in COMPUTE if name != OPTIMIZER]
    found: list[float] = []
    for cells in table.cells if table is not None else []:
        seconds = [sum(cell.phases.get(name, 0.0) for name in names) for cell in cells]
        middle = statistics.median(seconds) if seconds else 0.0
        if middle > 0 and min(seconds) > 0:
            found += [each / middle for each in seconds]
    if table is None or len(table.steps) < _LEAST_STEPS or not found:
        raise DataError(
            f"{run_directory} does not tell how computing varies: it takes {_LEAST_STEPS} steps after a warm-up, "
            "with forward and backward told apart",
            remedy="record a longer run with farandole, or give --noise",
        )
    return found
