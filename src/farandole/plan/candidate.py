"""What is predicted, and what a prediction says: the types between search, cost model and readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.vocabulary.spec import Plan
from ..core.vocabulary.spec import Term as Term  # noqa: PLC0414 - others import it from here
from .memory import MemoryByCategory


@dataclass(frozen=True)
class Candidate:
    """A way to train: a plan, with ranks and samples."""

    plan: Plan
    ranks: int
    global_batch: int
    """Samples of one step of the optimizer, over all ranks."""

    @property
    def script_changes(self) -> int:
        """How many things the script must do for it: call `fd.step` instead of its passes, cut sequences."""
        return (self.plan.pipeline != 1 or self.plan.micro_batches > 1) + (self.plan.context != 1)


@dataclass(frozen=True)
class CollectiveCalls:
    """Equal calls of one collective in a step, on one rank."""

    operation: str
    """One of `farandole.core.cluster.OPERATIONS`."""
    degree: str
    """Whose ranks call it: "data", "shard", "tensor", "pipeline", "expert" or "context"."""
    ranks: int
    nbytes: int
    """Bytes of the tensor: the input of all_reduce and reduce_scatter, the output of all_gather."""
    count: int
    codec: str = "none"


@dataclass(frozen=True)
class Prediction:
    """What a step of a `Candidate` is predicted to take and to hold."""

    seconds: float
    low_seconds: float
    high_seconds: float
    terms: Mapping[Term, float]
    memory: tuple[MemoryByCategory, ...]
    """By pipeline stage, on the rank that holds most."""
    sent_bytes: float
    """By one rank."""
    collectives: tuple[CollectiveCalls, ...]
    features: Mapping[str, float] = field(default_factory=dict)
    """How often each coefficient of the cluster is in `seconds`: their products sum up to its linear part."""
    warnings: tuple[str, ...] = ()
    """What is extrapolated, preset or not known."""

    @property
    def peak_bytes(self) -> int:
        """The memory of the rank that needs most."""
        return max(each.total_bytes for each in self.memory)
