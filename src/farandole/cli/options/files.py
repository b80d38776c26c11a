"""What a command reads and writes: whether a file can be written, before minutes are spent; and the newest run."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice


def check_output(option: str, name: str | None) -> Path | None:
    """Return the path of an option that names a file to write, None without one; nothing is written.

    Raises `ConfigError` where the file cannot be written.
    """
    if name is None:
        return None
    path = Path(name)
    there = path.exists()
    if there and not path.is_file() and not path.is_dir():
        return path  # a pipe waits in opening for who reads it
    try:
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as problem:
        raise ConfigError(
            f"{option}: cannot write {name}: {problem.strerror or problem}",
            remedy="name a file in a folder that is there",
        ) from None
    return path


# The run that a command reads: by default the newest.


NEWEST = "(default: the newest in runs/)"


def run_or_newest(name: str | None) -> Path:
    """Return the run directory `name`; the newest where none was given, which is said then."""
    if name is not None:
        return Path(name)
    from ...observe.records.run_reader import newest_run

    found = newest_run()
    write_notice(f"the newest run: {found}")
    return found
