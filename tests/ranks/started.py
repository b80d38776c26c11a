"""Ranks that a test starts by hand, each a process of its own: for ranks that are killed or stand still.

They are forked of warm Python (see `tests.warm`), and write to files: a child that outlives its rank keeps nobody
waiting who reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import warm
from tests.ranks.pool import START_SECONDS

ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class StartedRank:
    """One of them."""

    def __init__(self, work: Path, words: Sequence[str], place: dict[str, str], said: Path) -> None:
        said.mkdir()
        self._out, self._err = said / "out", said / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = warm.start(work, *words, out=out, err=err, environment={**ALONE, **place})

    @property
    def out(self) -> str:
        """What it has written so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, line: str) -> None:
        """Wait until the last line that it wrote is `line`."""
        deadline = time.monotonic() + START_SECONDS
        while not self.out.endswith(f"{line}\n"):
            assert self.process.poll() is None, f"it ended with exit code {self.process.returncode}: {self.err}"
            assert time.monotonic() < deadline, f"no {line!r} after {START_SECONDS:g} s: {self.out}{self.err}"
            time.sleep(0.02)


@contextlib.contextmanager
def started(
    directory: Path, words: Sequence[str], places: Sequence[dict[str, str]]
) -> Iterator[list[StartedRank]]:
    """Start ``python words`` once for each of `places`, the environment of a rank; kill what is left at the end.

    They work in ``directory/work``. What they say is put beside it.
    """
    (directory / "work").mkdir()
    ranks: list[StartedRank] = []
    try:
        for number, place in enumerate(places):
            ranks.append(StartedRank(directory / "work", words, place, directory / f"rank-{number}"))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait(START_SECONDS)
