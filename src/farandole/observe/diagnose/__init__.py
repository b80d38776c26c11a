"""What a run's time goes to, and what to do about it: `diagnose` a run directory, `compare` two.

It names the cause, the rank and the cost, and predicts what a fix saves. It reads records only: nothing here runs
in a training process, and no cause is guessed that the records do not show. Page: ``docs/check/slow.md``.

::

    diagnosis = diagnose(Path("runs/20260101-120000-train"))
    print(diagnosis.verdict)
"""

from .comparison import Comparison, compare, to_text
from .finding import KINDS, Diagnosis, Finding, Fix, Gain
from .verdict import diagnose, measured_step

__all__ = [
    "KINDS", "Comparison", "Diagnosis", "Finding", "Fix", "Gain", "compare", "diagnose",
    "measured_step", "to_text",
]  # fmt: skip
