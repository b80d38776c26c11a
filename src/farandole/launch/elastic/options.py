"""Options of an elastic job: least and most ranks, discovery of hosts, time-outs.

Not here: what happens when hosts come and go. Defaults are Horovod's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.vocabulary.errors import ConfigError

LEAST_COOLDOWN_SECONDS = 1
MOST_COOLDOWN_SECONDS = 3600


@dataclass(frozen=True)
class ElasticOptions:
    """The bounds of an elastic job."""

    min_ranks: int
    """Below this many the job waits for more hosts."""
    max_ranks: int | None = None
    """Never more than this; None: no bound."""
    discovery_script: Path | None = None
    """An executable that prints ``host:slots`` or ``host`` a line; None: the hosts given do not change."""
    elastic_timeout_seconds: float = 600.0
    """How long to wait for `min_ranks` before the job fails."""
    reset_limit: int | None = None
    """How often the ranks may be set anew; None: as often as needed."""
    cooldown_range_seconds: tuple[int, int] | None = None
    """Least and most time before a failed host is tried again; None: never again."""
    slots_per_host: int | None = None
    """Slots of a host whose line says none; None: one."""
    spares: int = 0
    """Workers beyond `max_ranks` that wait for the place of one that is lost."""

    def __post_init__(self) -> None:
        if self.min_ranks < 1:
            raise ConfigError(f"--min-np {self.min_ranks}: expected at least 1")
        if self.max_ranks is not None and self.max_ranks < self.min_ranks:
            raise ConfigError(f"--max-np {self.max_ranks}: expected at least --min-np, {self.min_ranks}")
        if not 0 <= self.elastic_timeout_seconds < float("inf"):
            raise ConfigError(f"elastic_timeout={self.elastic_timeout_seconds} must be >= 0")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ConfigError(f"reset_limit={self.reset_limit} must be >= 0")
        if self.slots_per_host is not None and self.slots_per_host < 1:
            raise ConfigError(f"--slots-per-host {self.slots_per_host}: expected at least 1")
        if self.spares < 0 or (self.spares and self.max_ranks is None):
            raise ConfigError(
                f"--spares {self.spares}: expected at least 0, and a number of ranks",
                remedy="say with -np or --max-np how many train",
            )
        if self.cooldown_range_seconds is not None:
            least, most = self.cooldown_range_seconds
            if not LEAST_COOLDOWN_SECONDS <= least <= most <= MOST_COOLDOWN_SECONDS:
                raise ConfigError(
                    f"--blacklist-cooldown-range {least} {most}: expected two ascending numbers of seconds from "
                    f"{LEAST_COOLDOWN_SECONDS} to {MOST_COOLDOWN_SECONDS}"
                )
