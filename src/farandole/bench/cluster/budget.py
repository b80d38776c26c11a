"""The time of a measurement: from the start of the command on, divided among phases as they begin. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.units import format_seconds

SHARES = {"compute": 0.3, "collectives": 0.35, "overlap": 0.12, "codecs": 0.11, "loader": 0.05, "disk": 0.07}
"""Parts of the time, in the order of the phases."""
REST_SECONDS = 1.3
"""What the command takes before it starts the job and after the last phase: the interpreter, the end of all
ranks and the file. Measured as `LEAST_PHASES_SECONDS` was: 1.2 to 1.3."""
LEAST_PHASES_SECONDS = 1.5
"""For all phases, if each makes its fewest rounds. 2 ranks on 2 cores that were given 0 s took 0.9 to 1.1 s (5
runs). Slower machines and links need more, which the job says at its end."""
LEAST_SECONDS = 6.0
"""The smallest budget. Suffices for a start of up to 3.2 s; measured: 2.3 to 2.9 s. Slower ones are refused."""


@dataclass(frozen=True)
class StartMoment:
    """When a command began, as a process on the same or on another machine can tell."""

    machine: str
    """The kernel's boot id: processes with the same one share the monotonic clock. Empty: not known."""
    monotonic_seconds: float
    wall_seconds: float

    @classmethod
    def now(cls) -> StartMoment:
        """Return this moment."""
        return cls(_boot_id(), time.monotonic(), time.time())

    @classmethod
    def parse(cls, text: str) -> StartMoment:
        """Return what `to_text` was of. Raises ValueError for anything else."""
        machine, monotonic, wall = text.split(",")
        return cls(machine, float(monotonic), float(wall))

    def to_text(self) -> str:
        """Return it as a word of a command line."""
        return f"{self.machine},{self.monotonic_seconds:.6f},{self.wall_seconds:.6f}"

    def passed_seconds(self) -> float:
        """Return how long ago it was; on another machine by the wall clocks of both, and never below 0."""
        if self.machine and self.machine == _boot_id():
            return max(0.0, time.monotonic() - self.monotonic_seconds)
        return max(0.0, time.time() - self.wall_seconds)


class PhaseBudget:
    """Gives each phase its share of the remaining time. All ranks make it, and call it alike."""

    def __init__(
        self,
        phases: Sequence[str],
        left_seconds: float,
        *,
        agree: Callable[[float], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            phases: those that will run, in order.
            left_seconds: for all of them.
            agree: returns what rank 0 calls it with, on all ranks.
            clock: in seconds.
        """
        self._phases, self._clock, self._agree = list(phases), clock, agree
        self._end_seconds = clock() + left_seconds

    def begin(self, phase: str) -> float:
        """Return the seconds of `phase`, which begins: the same on all ranks, 0 where no time remains.

        What earlier phases did not need is divided among the later ones, and so is what they took too long.
        """
        open_phases = self._phases[self._phases.index(phase) :]
        left = max(0.0, self._agree(self.left_seconds))
        return left * SHARES[phase] / sum(SHARES[each] for each in open_phases)

    @property
    def left_seconds(self) -> float:
        """The remaining time by this rank's clock; negative: the phases took longer than they were given."""
        return self._end_seconds - self._clock()


def require_enough(seconds: float, passed_seconds: float) -> float:
    """Return what `seconds` leave for the phases, after a start of `passed_seconds`.

    Raises:
        ConfigError: not enough for the fewest rounds; names the smallest budget that is.
    """
    left = seconds - passed_seconds - REST_SECONDS
    if left >= LEAST_PHASES_SECONDS:
        return left
    least = math.ceil(passed_seconds + REST_SECONDS + LEAST_PHASES_SECONDS)
    raise ConfigError(
        f"--seconds {seconds:g}: starting the ranks took {format_seconds(passed_seconds)}, the "
        f"end takes about {format_seconds(REST_SECONDS)}, and the fewest rounds of all phases "
        f"{format_seconds(LEAST_PHASES_SECONDS)}",
        remedy=f"give it at least --seconds {least}",
    )


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
