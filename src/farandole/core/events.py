"""What a running job says about itself: small records, written by `comm` and `train`, read by `observe`.

[Note: what is recorded] Timestamps only, of this process's monotonic clock, taken where the code
passes anyway: never a barrier, never a device synchronisation. A recorder has one method and the
default does nothing, so that no code asks whether anybody listens. All times are seconds of
`time.monotonic()`, which is one clock for all processes of a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

EVENTS_VERSION = 1
"""Version of the records in ``events-rank*.jsonl``; readers refuse newer ones."""


@dataclass(frozen=True, slots=True)
class DataWait:
    """The training loop asked its loader for a batch and got it."""

    begin_seconds: float
    end_seconds: float
    samples: int
    """Samples of this rank that count (0 for a placeholder batch)."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of gradients: what was launched while backward ran, and the wait after it."""

    launch_seconds: tuple[float, ...]
    """When each bucket was handed to the network, in launch order."""
    wait_begin_seconds: float
    """When this rank had nothing left to do but wait."""
    wait_end_seconds: float
    sent_bytes: int
    """Bytes this rank sends for it, by the formula of the route."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer has stepped; everything since the previous one belongs to this step."""

    step: int
    """Counts from 1."""
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Logged:
    """What the training loop told us with `fd.log`. Unknown things are None."""

    loss: float | None = None
    tokens: int | None = None
    total_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: who we are. Training time counts from here."""

    rank: int
    size: int
    host: str
    process_id: int
    generation: int
    begin_seconds: float
    wall_time: str
    """ISO 8601, for people; no computation uses it."""


Event = Started | DataWait | Exchange | StepDone | Logged


class Recorder(Protocol):
    """Takes events. Must be cheap, must not raise, must not block on anything but its own file."""

    def record(self, event: Event) -> None:
        """Take one event."""


class NullRecorder:
    """The default: takes everything, keeps nothing."""

    def record(self, event: Event) -> None:
        """Forget the event."""
