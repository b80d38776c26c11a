"""A run's line: the checkpoints that its state comes from, in the order in which they were written.

[Note: lines] A directory may hold checkpoints of several lines. A run that loads step 100 and goes on gives up
steps 200 and 300 that are there. Their numbers are higher than those of the saves that follow: by numbers alone
they would be kept and resumed from, and the new ones removed. So the first save after a load sets aside what lies
above the loaded step, before its own manifest is written. And only checkpoints of the line are removed to make
room: what this process has loaded or written, and what lies below that.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..core.environ.env import read_run_settings
from ..core.vocabulary.notice import write_notice
from ..core.vocabulary.run_files import SavesAccount
from .directory import remove_checkpoint, saved_steps, set_aside, step_directory, steps_to_prune


class RunLine:
    """The line of one directory, on this rank. Rank 0 alone writes, loading is seen by all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._steps: list[int] = []
        self._left_at: int | None = None
        """The step that was loaded, until the save that follows."""
        self._account = SavesAccount(str(directory))

    def load(self, step: int) -> None:
        """Go on from the checkpoint of a step."""
        self._steps = [each for each in saved_steps(self._directory) if each <= step]
        self._left_at = step

    def give_up_later(self, step: int) -> None:
        """Before the first commit after a load, of `step`: set aside what lies above the loaded step."""
        left_at, self._left_at = self._left_at, None
        if left_at is None:
            return
        names = []
        for each in saved_steps(self._directory):
            if each > left_at and each != step:
                try:
                    names.append(set_aside(self._directory, each))
                except OSError as problem:
                    write_notice(f"ALARM: step {each} was given up and cannot be set aside: {problem}")
        if names:
            write_notice(
                f"in {self._directory}, step {left_at} was loaded: later checkpoints are of a line that was given "
                f"up, and are now {', '.join(names)}"
            )

    def begin(self, step: int | None) -> None:
        """Tell the launcher that a save begins, or (None) that there will be some."""
        self._tell(replace(self._account, begun=step))

    def commit(self, step: int) -> None:
        """Take in the checkpoint that was just written."""
        self._steps = [each for each in self._steps if each != step] + [step]
        self._tell(replace(self._account, whole=step, when_seconds=time.time()))

    def _tell(self, account: SavesAccount) -> None:
        self._account = account
        account.write(read_run_settings().run_directory)

    def prune(self, keep: int | None, keep_every: int | None) -> None:
        """Remove the line's checkpoints but the last `keep`, and multiples of `keep_every`."""
        for step in steps_to_prune(self._steps, keep, keep_every):
            with suppress(OSError):  # it is tried again after the next save
                others = remove_checkpoint(self._directory, step)
                self._steps.remove(step)
                if others:
                    place = step_directory(self._directory, step)
                    write_notice(f"{place} stays: Farandole did not make {', '.join(others)}")


class Lines:
    """The lines of all directories that this process has loaded from or saved to."""

    def __init__(self) -> None:
        self._by_path: dict[str, RunLine] = {}

    def of(self, directory: Path) -> RunLine:
        """Return the line of a directory, however its path is written."""
        path = os.path.realpath(directory)
        if path not in self._by_path:
            self._by_path[path] = RunLine(Path(path))
        return self._by_path[path]
