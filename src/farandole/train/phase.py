"""`fd.phase`: what the loop does beside training, by a name of the user's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import Phase
from .stall.watcher import open_phases

LONGEST_NAME = 80


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the time spent in this context under `name`.

    Phases nest, and time counts for the innermost one. The report shows it separately from the training.

    Args:
        name: ``"evaluation"``, ``"checkpoint"`` or any other, 1 to 80 characters.

    Raises:
        ConfigError: the name is empty or too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ConfigError(f"phase: the name is {name!r}, expected a text of 1 to {LONGEST_NAME} characters")
    here = world()
    recorder, names = here.session.recorder, open_phases(here)
    begin = time.monotonic()
    names.append(name)
    try:
        yield
    finally:
        names.remove(name)
        recorder.record(Phase(name, begin, time.monotonic()))
