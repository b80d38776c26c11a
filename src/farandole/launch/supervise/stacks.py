"""The stacks of a host's ranks, taken before they are stopped.

Ranks are asked; py-spy, where it is installed, looks at those that cannot answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ...core.host.process_status import catches
from ...core.host.stacks import STACKS_SIGNAL
from ...core.vocabulary.run_files import STACKS, read_crashes, stacks_path
from .process import dying_with_us
from .stopped_process import behind_shells, state_of

STACKS_SECONDS = 0.4
"""For ranks to write their stacks, before they are stopped."""
_PYTHONS_OWN = 'File "<frozen '
"""Frames of Python's import system, which are inside every import."""
_MOST_BYTES = 50_000
"""Most characters of one rank's stacks in a report."""


class StackTaker:
    """Asks ranks for their stacks. Nothing of it waits."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._helpers: list[subprocess.Popen[bytes]] = []

    def take(self, processes: Mapping[int, int]) -> None:
        """Have the stacks of `processes` (numbers by rank) written into the run directory."""
        spy = find_py_spy()
        for rank, started in processes.items():
            process = behind_shells(started)
            if state_of(process) not in ("T", "t") and catches(process, STACKS_SIGNAL):
                with suppress(ProcessLookupError):
                    os.kill(process, STACKS_SIGNAL)
            elif spy is not None:
                with suppress(OSError, subprocess.SubprocessError):
                    self._spy_on(spy, rank, process)

    def _spy_on(self, spy: str, rank: int, process: int) -> None:
        path = stacks_path(self._directory, rank)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._helpers.append(
                subprocess.Popen(
                    # It must not stop the process, which a stopped one could not do either.
                    [spy, "dump", "--nonblocking", "--pid", str(process)],
                    stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor,
                    preexec_fn=dying_with_us(),  # noqa: PLW1509 - forked from a process with one thread
                )
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End what still looks."""
        for helper in self._helpers:
            helper.kill()
            helper.wait()
        self._helpers.clear()


def find_py_spy() -> str | None:
    """Return py-spy's path: beside this Python, or on the PATH; None: not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(run_directory: Path) -> dict[int, str]:
    """Return what ranks wrote, by rank, and take away the files of those that wrote nothing."""
    found = {}
    for path in (run_directory / STACKS).glob("rank_*.txt"):
        number = path.stem.removeprefix("rank_")
        with suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            if not text:
                path.unlink()
            elif number.isdecimal():
                found[int(number)] = text[:_MOST_BYTES]
    with suppress(OSError):
        (run_directory / STACKS).rmdir()
    return dict(sorted(found.items()))


def read_current_stacks(run_directory: Path, step: int | None) -> dict[int, str]:
    """Return what `read_stacks` does, without what ranks left that have done steps since.

    Args:
        run_directory: where the ranks left them, their positions and accounts of crashes.
        step: how many steps the rank had finished that failed first; None when unknown.
    """
    found = read_stacks(run_directory)
    if not found:
        return found
    from ...core.failures import read_positions

    finished = {crash.rank: crash.step or 0 for crash in read_crashes(run_directory)}
    reached = max([step or 0, *finished.values()])
    for position in read_positions(run_directory):
        # Ranks that wait for each other may be one step apart.
        if position.step < max(finished.get(position.rank, 0), reached - 1):
            found.pop(position.rank, None)
    return found


def where_they_stood(stacks: Mapping[int, str]) -> Iterator[tuple[list[int], list[str]]]:
    """Return for each place where ranks stood: which ranks, and their main thread, innermost first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, text in stacks.items():
        alike.setdefault(tuple(_main_thread(text)), []).append(rank)
    for lines, ranks in alike.items():
        if lines:
            yield ranks, list(lines)


def _main_thread(text: str) -> list[str]:
    """Return the frames of the thread that matters, without what differs from rank to rank."""
    parts = [part for part in text.split("\n\n") if part.strip()]
    chosen = next((part for part in parts if part.startswith("Current thread") or '"MainThread"' in part), text)
    lines = [line.strip() for line in chosen.splitlines()]
    begin = next(
        (at for at, line in enumerate(lines) if line.startswith(("Current thread", "Thread", "Most recent"))), -1
    )
    return [line for line in lines[begin + 1 :] if line and not line.startswith(_PYTHONS_OWN)]
