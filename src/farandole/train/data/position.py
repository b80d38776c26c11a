"""Where a divided loader stands: its epoch, what it has handed out of it, and where a resumed epoch begins.

See [Note: epochs and resuming] in `rank_sampler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...comm.world.store_sync import require_same
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError

_VERSION = 1
_KEYS = {"version", "epoch", "batches", "used", "seed"}


@dataclass
class EpochRows:
    """What an epoch has handed out on this rank, for those who bring its results together (`fd.gather`)."""

    loader: int
    epoch: int
    runs: list[list[int]] = field(default_factory=list)
    """Samples that count in a batch, and how many batches in succession have so many."""
    batches: int = 0
    is_placeholder: bool = False
    """Whether the last batch counts for nothing."""
    has_ended: bool = False

    def add(self, samples: int) -> None:
        """Note a batch of `samples` that count."""
        self.batches += 1
        self.is_placeholder = samples == 0
        if self.runs and self.runs[-1][0] == samples:
            self.runs[-1][1] += 1
        else:
            self.runs.append([samples, 1])


@dataclass
class LatestLoop:
    """The loop over a divided loader that drew a batch, or ended, last. One a session."""

    rows: EpochRows | None = None
    loaders: int = 0
    """How many were divided: the same number on all ranks."""


@dataclass
class LoaderPosition:
    """Where one loader stands."""

    epoch: int = -1
    """The epoch that was begun last."""
    batches: int = 0
    """Batches handed out in it, those before a resume included."""
    used: int = 0
    """How far the job's order is used: in samples, or in batches of the user's batch sampler."""
    is_complete: bool = True
    """Whether all its batches were handed out."""
    resume: tuple[int, int, int] | None = None
    """Epoch, batches and `used` of a state that was loaded, until its epoch begins."""

    def begin(self, epoch: int) -> int:
        """Begin an epoch; return how far its order was used before."""
        resume, self.resume = self.resume, None
        self.epoch, self.is_complete = epoch, False
        self.batches, self.used = resume[1:] if resume is not None and resume[0] == epoch else (0, 0)
        return self.used

    def handed_out(self, unit: int) -> None:
        """Note a batch, which goes `unit` further in the job's order."""
        self.batches += 1
        self.used += unit

    def choose_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; what was loaded for it stays."""
        if self.resume is not None and self.resume[0] != epoch:
            self.resume = None
        self.epoch, self.is_complete = epoch - 1, True

    def state(self, asked_epoch: int | None, seed: int) -> dict[str, int]:
        """Return what `read_state` takes."""
        if self.resume is not None:
            epoch, batches, used = self.resume
        elif self.is_complete:
            epoch, batches, used = self.epoch + 1, 0, 0
        else:
            epoch, batches, used = self.epoch, self.batches, self.used
        if asked_epoch is not None and asked_epoch != epoch:
            epoch, batches, used = asked_epoch, 0, 0
        return {"version": _VERSION, "epoch": epoch, "batches": batches, "used": used, "seed": seed}


def read_state(here: World, state: Any) -> dict[str, int]:
    """Return a state that all ranks have; raise `ConfigError` for what is none."""
    is_state = (
        isinstance(state, Mapping)
        and set(state) == _KEYS
        and all(isinstance(value, int) and not isinstance(value, bool) for value in state.values())
        and state["version"] == _VERSION
        and min(state["epoch"], state["batches"], state["used"]) >= 0
    )
    facts = dict(state) if is_state else f"no state: {str(state)[:80]}"
    require_same(
        here, "loading the state of a loader", [("the state", facts)], remedy="load the same file on all ranks"
    )
    if not is_state:
        raise ConfigError(
            f"load_state_dict: expected what state_dict() of a loader returned, got {str(state)[:80]}",
            remedy="save loader.state_dict() beside the model",
        )
    return dict(state)
