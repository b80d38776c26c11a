"""The workers of an elastic job, and the generation of ranks that some of them form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_STATE = -1
"""Progress of a worker that has not yet received the job's state."""

State = Literal["starting", "ready", "member", "removed", "ended"]


@dataclass(eq=False)
class Worker:
    """One process of the job; numbers are never used again."""

    number: int
    """Lower numbers were started earlier."""
    host: str
    progress: int = NO_STATE
    """Commits made by the job up to the state it holds."""
    started_at: float = 0.0
    state: State = "starting"
    address: str = ""
    port: int = 0
    """Where it offers to be met as rank 0; valid while it is ready."""
    has_trained: bool = False
    """Whether it ever was in a generation."""

    @property
    def is_alive(self) -> bool:
        """Whether it counts: it runs and is not on its way out."""
        return self.state in ("starting", "ready", "member")


@dataclass(eq=False)
class Generation:
    """One generation of ranks, from its assignment to the next one."""

    number: int = 0
    """0: none was formed yet."""
    members: tuple[int, ...] = ()
    """Workers by rank."""
    lost_members: int = 0
    """Members that have failed."""
    broken_at: float | None = None
    """When its members were told to leave; None: they were not."""
    asked: frozenset[int] | None = None
    """The members of the next one, as these were last told; None: they were told nothing."""
