"""What the roster orders, and the driver does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..job.contract import RankSpec


@dataclass(frozen=True)
class Start:
    """Start worker `number` on `host`."""

    number: int
    host: str
    place: RankSpec
    """Its rank if all running workers formed the next generation: for a script's code before `init`."""


@dataclass(frozen=True)
class Tell:
    """Send a frame to a worker."""

    number: int
    frame: dict[str, Any]
    place: RankSpec | None = None
    """Its place in the generation that an assignment begins."""


@dataclass(frozen=True)
class Kill:
    """End a worker now."""

    number: int


@dataclass(frozen=True)
class Say:
    """Tell the person who watches."""

    text: str


@dataclass(frozen=True)
class Stop:
    """The job is over."""

    succeeded: bool
    text: str = ""


Order = Start | Tell | Kill | Say | Stop
