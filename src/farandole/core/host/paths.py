"""Is it there, and is it Python? For names that a user typed, among them those that no file can have.

`pathlib` raises for a name that is too long; to a user it is a file that does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..vocabulary.errors import ConfigError


def exists(path: Path) -> bool:
    """Return whether there is anything of that name."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Return whether it is a file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_directory(path: Path) -> bool:
    """Return whether it is a directory."""
    return os.path.isdir(path)  # noqa: PTH112


@contextmanager
def reading_python(script: Path) -> Iterator[None]:
    """Inside the ``with``, raise `ConfigError` for a script that cannot be read, or is no Python."""
    try:
        yield
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None)
        where = f"{script}:{line}" if line else str(script)
        what = getattr(problem, "msg", problem)
        raise ConfigError(f"{where}: {what}", remedy="the script is no Python") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{script} is nested too deeply for Python", remedy="is it a program?") from None
    except OSError as problem:
        raise ConfigError(f"cannot read {script}: {problem.strerror or problem}") from None
