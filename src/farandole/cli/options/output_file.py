"""Can a file be written where an option says? Asked before a benchmark takes its minutes."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.errors import ConfigError


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
