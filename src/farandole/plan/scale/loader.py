"""What loading data limits: workers of a rank, and storage that all ranks read from.

A step takes at least as long as its batch takes to come: the largest of computing and exchanging, of loading a
rank's samples with its workers, and of reading the global batch from shared storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError


@dataclass(frozen=True)
class Loading:
    """Where batches come from. None: not known, and no limit."""

    worker_bytes_per_second: float | None = None
    """What one worker of a rank makes of batches."""
    workers: int = 1
    """For each rank."""
    storage_bytes_per_second: float | None = None
    """What all ranks together read."""

    def __post_init__(self) -> None:
        for name, value in (
            ("loader", self.worker_bytes_per_second),
            ("storage-rate", self.storage_bytes_per_second),
            ("loader-workers", float(self.workers)),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g}: expected more than 0")

    def seconds(self, rank_bytes: float, global_bytes: float) -> float:
        """Return what the batch of a step takes to come, if nothing else is waited for."""
        found = 0.0
        if self.worker_bytes_per_second is not None:
            found = rank_bytes / (self.workers * self.worker_bytes_per_second)
        if self.storage_bytes_per_second is not None:
            found = max(found, global_bytes / self.storage_bytes_per_second)
        return found
