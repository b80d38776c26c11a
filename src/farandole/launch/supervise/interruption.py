"""A job that was ended by a signal to its launcher: which signal, and which ranks waited then."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.failures import Position, describe, judge, read_positions
from ...core.vocabulary.run_files import INTERRUPTED, STACKS, STALL, SavesAccount, write_private
from ...core.vocabulary.units import format_seconds


@dataclass(frozen=True)
class Interruption:
    """How a job stood when its launcher was signalled."""

    signal: int
    positions: tuple[Position, ...]
    """Ranks that did no steps; empty: all went on."""
    is_hanging: bool
    """Whether no rank could have gone on."""
    saves: SavesAccount | None = None
    """None: nothing of the job saves checkpoints."""

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.signal

    def to_text(self, directory: Path) -> str:
        """Return what is said of it: where ranks waited, if any did, and that all have ended."""
        lines = []
        if any(position.kind not in ("pause", "working", "idle") for position in self.positions):
            how = "while hanging: " if self.is_hanging else "while "
            lines.append(f"farandole: interrupted {how}{describe(self.positions, past=True)}")
        name = signal.Signals(self.signal).name
        files = f"logs in {directory / 'logs'}"
        if lines and (directory / STACKS).exists():
            files += f", stacks in {directory / STACKS}"
        if self.saves is not None:
            lines.append(f"farandole: {_describe_saves(self.saves)}")
        lines.append(f"farandole: stopped all ranks on {name}; {files}; exit code {self.exit_code}")
        return "\n".join(lines)

    def write(self, directory: Path) -> None:
        """Leave it in the run directory; raises OSError."""
        values = {
            "signal": signal.Signals(self.signal).name, "exit_code": self.exit_code, "hanging": self.is_hanging,
            "positions": [asdict(position) for position in self.positions],
            "saves": None if self.saves is None else asdict(self.saves),
        }  # fmt: skip
        write_private(directory / INTERRUPTED, json.dumps(values, indent=1) + "\n")


def interruption_of(directory: Path, number: int, positions: Sequence[Position], size: int | None) -> Interruption:
    """Return how a job of `size` ranks (None: not known) stood; `positions`: those at the time of the signal."""
    reported = _reported_hang(directory)
    found = {position.rank: position for position in reported}
    found |= {position.rank: position for position in positions or read_positions(directory)}
    ordered = tuple(found[rank] for rank in sorted(found))
    is_hanging = bool(reported) or (len(ordered) == size and judge(ordered) == "hang")
    return Interruption(number, ordered, is_hanging, SavesAccount.read(directory))


def _describe_saves(saves: SavesAccount) -> str:
    """Return whether the last save is whole, and which checkpoint is."""
    is_whole = saves.whole is not None and saves.begun in (saves.whole, None)
    if saves.whole is None:
        whole = f"no checkpoint of this run is in {saves.directory}"
    else:
        age = format_seconds(max(0.0, time.time() - saves.when_seconds))
        whole = f"the last whole checkpoint is that of step {saves.whole} in {saves.directory}, made {age} ago"
    return whole if is_whole or saves.begun is None else f"the save of step {saves.begun} is not whole; {whole}"


def _reported_hang(directory: Path) -> list[Position]:
    """Return the positions of a hang that a rank reported and that has not ended."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads((directory / STALL).read_text(encoding="utf-8"))
        found = [Position.from_json(json.dumps(each)) for each in values["positions"]]
        return [position for position in found if position is not None]
    return []
